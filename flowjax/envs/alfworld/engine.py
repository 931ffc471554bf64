"""alfworld's games on textworld's PDDL engine, with work that textworld repeats at every step done once per game.

A `Game` is everything about a game file that never changes: the planner's translation of its PDDL, its parsed grammar,
its commands. A `Playthrough` plays it on a copy of the planner's library, which holds the true state. Texts and
commands are those of textworld under alfworld's wrapper, word for word. textworld parses each template again at every
use, and copies its state: here parsed templates and sorted facts are cached.

A grammar's expressions are Python and are evaluated as such: load game files from trusted sources only.
"""

import functools
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import fast_downward
from textworld.envs.pddl import textgen
from textworld.envs.pddl.logic import Atom
from textworld.envs.pddl.logic import _parse_and_convert as parse_logic
from textworld.generator.game import EntityInfo
from textworld.logic import Placeholder, Proposition, Rule, State, Type, TypeHierarchy, Variable

from flowjax.envs.alfworld.generate import package
from flowjax.envs.alfworld.planner import Translation, load_library, translated
from flowjax.envs.alfworld.player import StaticFacts
from flowjax.records import state_key

NOTHING_HAPPENS = "Nothing happens."
BOOKKEEPING = "checked"  # a predicate that looking sets and no action depends on: left out of the state
TASK_SENTENCE = re.compile(r"Your task is to: ([^\"\\#{}\[\]|;<>\n]*)")
UNKNOWN_TASK = "Your task is to: UNKNOWN GOAL."

Fact = tuple[str, ...]  # predicate and arguments
Scope = tuple[Mapping[str, Any], Mapping[Any, Any]]  # things by variable name; textworld's placeholder to variable


@functools.lru_cache(maxsize=4096)
def symbols(template: str) -> tuple[Any, ...]:
    """textworld's parse of a template."""
    return tuple(textgen._parse_and_convert(template, rule_name="symbols"))


@functools.lru_cache(maxsize=1024)
def query(expression: str) -> Rule:
    """textworld's rule for a condition: its assignments in a state are the answers to the condition."""
    return Rule.parse_conjunctive_query(expression)


@functools.lru_cache(maxsize=1024)
def _code(expression: str) -> CodeType:
    return compile(expression.strip(), "<grammar>", "eval")


def predicates(template: str) -> set[str] | None:
    """Predicates that a template's text depends on; None where it uses rules of the grammar, or nests conditions."""
    found: set[str] = set()
    for symbol in symbols(template):
        if isinstance(symbol, textgen.ListSymbol):
            symbol = symbol.symbol
        if isinstance(symbol, textgen.NonterminalSymbol):
            return None
        if isinstance(symbol, textgen.ConditionalSymbol):
            if not isinstance(symbol.expression, textgen.EvalSymbol):
                return None
            found |= {predicate.name for predicate in query(symbol.given).preconditions} if symbol.given else set()
    return found


class Grammar:
    """The text rules of one game. `entities` are its things by identity."""

    def __init__(self, rules: Mapping[str, Sequence[Any]], entities: Mapping[str, Any]):
        self._rules = rules
        self._entities = entities

    def derive(self, template: str, state: Any, mapping: Mapping[Any, Any]) -> str:
        """The text of a template in a state, with the variables of `mapping`."""
        scope = (self._things(mapping), mapping)
        return "".join(str(word) for symbol in symbols(template) for word in self._words(symbol, state, scope))

    def _things(self, mapping: Mapping[Any, Any]) -> dict[str, Any]:
        return {placeholder.name: self._entities[variable.name] for placeholder, variable in mapping.items()}

    def _words(self, symbol: Any, state: Any, scope: Scope) -> list[Any]:
        if isinstance(symbol, textgen.TerminalSymbol):
            return [symbol.symbol]
        if isinstance(symbol, textgen.NonterminalSymbol):
            return self._rule(str(symbol.symbol), state, scope)
        if isinstance(symbol, textgen.EvalSymbol):
            return [eval(_code(symbol.expression), {}, scope[0])]
        if isinstance(symbol, textgen.ConditionalSymbol):
            return [
                word
                for found in self._scopes(symbol, state, scope)
                for word in self._words(symbol.expression, state, found)
            ]
        return self._list(symbol.symbol, state, scope)

    def _rule(self, name: str, state: Any, scope: Scope) -> list[Any]:
        """The words of the first rule of that name whose condition holds."""
        for rule in self._rules[name]:
            if not rule.condition or any(True for _ in state.all_assignments(query(rule.condition), scope[1])):
                return [word for part in rule.rhs for word in self._words(part, state, scope)]
        raise LookupError(f"no rule of the grammar for #{name}# applies")

    def _scopes(self, symbol: Any, state: Any, scope: Scope) -> list[Scope]:
        """A scope for each answer to the symbol's condition."""
        if not symbol.given:
            return [scope]
        things, mapping = scope
        answers = state.all_assignments(query(symbol.given), mapping)
        return [({**things, **self._things(answer)}, {**mapping, **answer}) for answer in answers]

    def _list(self, inner: Any, state: Any, scope: Scope) -> list[Any]:
        """`a, b, and c`, with the grammar's own separators."""
        if isinstance(inner, textgen.ConditionalSymbol):
            found = self._scopes(inner, state, scope)
            items = [self._words(inner.expression, state, one) for one in found]
        else:
            items = [[word] for word in self._words(inner, state, scope)]
        if not items:
            return self._rule("list_empty", state, scope)
        words = list(items[0])
        for number, item in enumerate(items[1:], start=2):
            words += self._rule("list_last_separator" if number == len(items) else "list_separator", state, scope)
            words += item
        return words


@dataclass(frozen=True, slots=True)
class Command:
    """A ground action. `fixed` is its text where that never changes, else None."""

    action: str
    arguments: tuple[str, ...]
    operator: str
    mapping: Mapping[Placeholder, Variable]
    fixed: str | None


@functools.lru_cache(maxsize=16)
def _parse(grammar: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """textworld's actions and rules of a grammar; parsing takes a third of a second."""
    parse: Any = parse_logic  # textworld is not typed
    actions, parsed = parse(grammar, rule_name="pddlStart")
    return actions, dict(parsed._rules)


def _logic(grammar: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """As `_parse`, but the sentence of the task, which differs in every game, is inserted after parsing: so all games
    of a grammar share one cached parse."""
    found = TASK_SENTENCE.findall(grammar)
    if len(found) != 1:
        return _parse(grammar)
    spoken = f"Your task is to: {found[0]}"
    actions, rules = _parse(grammar.replace(spoken, UNKNOWN_TASK))
    known = rules.get("task", [])
    if len(known) != 1 or "".join(str(symbol) for symbol in known[0].rhs) != UNKNOWN_TASK:
        return _parse(grammar)
    rule = textgen.ProductionRule("task", list(symbols(spoken)), known[0].weight, known[0].condition)
    return actions, {**rules, "task": [rule]}


def digest(data: Mapping[str, Any]) -> str:
    """The identity of a game by its content: domain, grammar (the task's sentence included) and problem."""
    parts = [data[name] for name in ("pddl_domain", "grammar", "pddl_problem")]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


class Facts(State):
    """textworld's state of facts. The facts of one signature are cached in sorted order, as its queries read them."""

    def __init__(self, types: TypeHierarchy, facts: Iterable[Proposition] = ()):
        # State's own constructor wants a whole GameLogic, of which only the types are used.
        self._logic = SimpleNamespace(types=types)
        self._facts = defaultdict(set)
        self._vars_by_name = {}
        self._vars_by_type = defaultdict(set)
        self._var_counts = Counter()
        self._sorted: dict[Any, list[Proposition]] = {}
        self.add_facts(facts)

    def clone(self) -> "Facts":
        other = Facts(self._logic.types)
        other._facts.update((signature, set(facts)) for signature, facts in self._facts.items())
        other._vars_by_name.update(self._vars_by_name)
        other._vars_by_type.update((kind, set(variables)) for kind, variables in self._vars_by_type.items())
        other._var_counts.update(self._var_counts)
        other._sorted.update(self._sorted)
        return other

    def facts_with_signature(self, sig: Any) -> list[Proposition]:  # pyright: ignore[reportIncompatibleMethodOverride]
        known = self._sorted.get(sig)
        if known is None:
            known = self._sorted[sig] = sorted(super().facts_with_signature(sig))
        return known

    def add_fact(self, prop: Proposition) -> None:
        self._sorted.pop(prop.signature, None)
        super().add_fact(prop)

    def remove_fact(self, prop: Proposition) -> None:
        self._sorted.pop(prop.signature, None)
        super().remove_fact(prop)


class Game:
    """The unchanging part of a game file with the contents `data`; the game stays loaded in `library`.

    `cache` is a folder for translations, which take by far the most time; None keeps none.
    """

    def __init__(self, data: Mapping[str, Any], library: Any, cache: Path | None = None):
        self.digest = digest(data)
        self._actions, rules = _logic(data["grammar"])
        known = translated(data["pddl_domain"], data["pddl_problem"], self.digest, cache)
        self.sas = known.sas.encode()
        self._kinds = known.kinds
        self._parameters = {
            action: [Placeholder(name, kind) for name, kind in parameters]
            for action, parameters in known.parameters.items()
        }
        self._changing = frozenset(known.changing) - {BOOKKEEPING}
        self._branching = frozenset(known.branching)
        self._atoms: dict[str, Proposition] = {}
        library.load_sas(self.sas)
        declared = [
            Proposition(name, [Variable(one, self._kinds[one]) for one in things]) for name, *things in known.declared
        ]
        self.start = Facts(_types(known), [*declared, *self._loaded(library)])
        self.entities = _entities(self.start)
        self.grammar = Grammar(rules, self.entities)
        self._names = {identity: entity.name for identity, entity in self.entities.items()}
        self._commands: dict[int, Command] = {}
        self.room = StaticFacts((fact.name, *fact.names) for fact in self.start.facts)

    def _loaded(self, library: Any) -> list[Proposition]:
        atoms = (Atom * library.get_state_size())()
        library.get_state(atoms)
        return [fact for fact in map(self.fact, atoms) if not fact.is_negation]

    def state(self, library: Any) -> set[Fact]:
        """The whole state, read from the planner's library."""
        return self.changing(self._loaded(library))

    def branches(self, command: Command) -> bool:
        """True where the command's effects depend on the state: then the library also names ones that do not occur."""
        return command.action in self._branching

    def fact(self, atom: Atom) -> Proposition:
        """textworld's proposition for an atom of the planner."""
        text = atom.name
        known = self._atoms.get(text)
        if known is None:
            known = self._atoms[text] = atom.get_fact(self._kinds)
        return known

    def changing(self, facts: Iterable[Proposition]) -> set[Fact]:
        """The true ones among `facts` that actions can change: together with the game they are the whole state."""
        return {
            (fact.name, *fact.names)
            for fact in facts
            if fact.name in self._changing  # false facts have names "not_...", which are not in it
        }

    def command(self, operator: Any) -> Command:
        """The command of one of the planner's operators."""
        known = self._commands.get(operator.id)
        if known is None:
            known = self._commands[operator.id] = self._describe(operator.name)
        return known

    def _describe(self, operator: str) -> Command:
        action, *arguments = operator.split()
        pairs = zip(self._parameters[action], arguments, strict=False)
        mapping = {placeholder: Variable(argument, placeholder.type) for placeholder, argument in pairs}
        depends = predicates(self._actions[action].template)
        # A text that depends on no changing fact is made once for the whole game.
        changing = depends is None or depends & (self._changing | {BOOKKEEPING})
        command = Command(action, tuple(arguments), operator, mapping, None)
        if changing:
            return command
        return Command(action, command.arguments, operator, mapping, self.text(command, self.start))

    def text(self, command: Command, facts: Facts) -> str:
        """The command as a player types it."""
        if command.fixed is not None:
            return command.fixed
        template = self.grammar.derive(self._actions[command.action].template, facts, command.mapping)
        names = {placeholder.name: self._names[variable.name] for placeholder, variable in command.mapping.items()}
        return template.format(**names)

    def feedback(self, command: Command, facts: Facts) -> str:
        """The game's answer, from the facts after the command."""
        return self.grammar.derive(self._actions[command.action].feedback_rule, facts, command.mapping)


def _types(known: Translation) -> TypeHierarchy:
    types = TypeHierarchy()
    for name, above in known.types:
        try:
            types.add(Type(name, above))
        except ValueError:
            continue  # as textworld does
    return types


def _entities(facts: Facts) -> dict[str, EntityInfo]:
    """All things in the facts, by identity, with alfworld's names for them."""
    entities: dict[str, Any] = {v.name: EntityInfo(v.name, v.type) for fact in facts.facts for v in fact.arguments}
    demangler = package("alfworld.agents.utils.misc").Demangler(game_infos=entities)
    for identity, entity in entities.items():
        entity.name = demangler.demangle_alfred_name(identity)
        entity.definite, entity.indefinite = "the", "a"
    return entities


class Playthrough:
    """Plays one game at a time: `load` it, then `obey` commands."""

    def __init__(self):
        self.library: Any = load_library()
        self.game: Game
        self.facts: Facts
        self.state: set[Fact] = set()
        self.commands: dict[str, Command] = {}
        self._effects: dict[str, tuple[int, int]] = {}

    def load(self, game: Game) -> str:
        """Begin the game; returns its first text."""
        self.game = game
        self.library.load_sas(game.sas)
        self.facts = game.start.clone()
        self.state = game.state(self.library)
        self._list_commands()
        return game.grammar.derive("#intro#", self.facts, {})

    @property
    def won(self) -> bool:
        return bool(self.library.check_goal())

    def obey(self, text: str) -> str:
        """Carry out a command of `commands`; returns the game's text."""
        command = self.commands[text]
        number, effects = self._effects[command.operator]
        atoms = (Atom * effects)()
        self.library.apply_operator(number, atoms)
        for fact in map(self.game.fact, atoms):
            opposite = fact.negate()
            self.facts.remove_fact(opposite)
            self.facts.add_fact(fact)
            self.state -= self.game.changing([opposite])
            self.state |= self.game.changing([fact])
        if self.game.branches(command):  # the effects above may be too many: read the state instead
            self.state = self.game.state(self.library)
        self._list_commands()
        return self.game.feedback(command, self.facts)

    def key(self) -> int:
        """The key of the true state: the game, and every fact that an action can change."""
        return state_key(self.game.digest, *sorted(" ".join(fact) for fact in self.state))

    def _list_commands(self) -> None:
        """List the commands possible now. Of two with the same text the planner's first counts, as in textworld."""
        operators = (fast_downward.Operator * self.library.get_applicable_operators_count())()
        self.library.get_applicable_operators(operators)
        self.commands, self._effects = {}, {}
        for operator in operators:
            command = self.game.command(operator)
            if command.operator in self._effects:
                continue
            self._effects[command.operator] = (operator.id, operator.nb_effect_atoms)
            self.commands.setdefault(self.game.text(command, self.facts), command)
