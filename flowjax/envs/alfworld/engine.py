"""alfworld's games on textworld's PDDL engine, with what textworld repeats at every step done once per game.

A `Game` is everything about a game file that never changes: the planner's translation of its PDDL, its parsed grammar,
its commands. A `Play` is one playing of it, on a copy of the planner's library, which holds the true state. Texts and
commands are those of textworld under alfworld's wrapper, word for word.
"""

import functools
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fast_downward
from textworld.envs.pddl import textgen
from textworld.envs.pddl.logic import Atom
from textworld.envs.pddl.logic import _parse_and_convert as parse_logic
from textworld.generator.game import EntityInfo
from textworld.logic import Placeholder, Proposition, State, Type, TypeHierarchy, Variable

from flowjax.envs.alfworld.grammar import Grammar, predicates, symbols
from flowjax.envs.alfworld.library import load_library
from flowjax.envs.alfworld.packages import package
from flowjax.envs.alfworld.room import Room
from flowjax.envs.alfworld.translation import Translation, translated
from flowjax.records import state_key

NOTHING_HAPPENS = "Nothing happens."
BOOKKEEPING = "checked"  # a predicate that looking sets and nothing depends on: no part of the state
TASK_SENTENCE = re.compile(r"Your task is to: ([^\"\\#{}\[\]|;<>\n]*)")
UNKNOWN_TASK = "Your task is to: UNKNOWN GOAL."

Fact = tuple[str, ...]  # predicate and arguments


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
    """As `_parse`, with the sentence that states the task, which differs in every game, put in afterwards."""
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
    """The identity of a game by what it is: domain, grammar (the task's sentence included) and problem."""
    parts = [data[name] for name in ("pddl_domain", "grammar", "pddl_problem")]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


class Facts(State):
    """textworld's state of facts. Those of one signature are kept sorted, which is how its queries walk them."""

    def __init__(self, types: TypeHierarchy, facts: Iterable[Proposition] = ()):
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
    """The unchanging part of a game file with the contents `data`; the game is left loaded in `library`.

    `cache` is a folder for translations, which take by far the most time.
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
        self.room = Room((fact.name, *fact.names) for fact in self.start.facts)

    def _loaded(self, library: Any) -> list[Proposition]:
        atoms = (Atom * library.get_state_size())()
        library.get_state(atoms)
        return [fact for fact in map(self.fact, atoms) if not fact.is_negation]

    def state(self, library: Any) -> set[Fact]:
        """The whole state as the planner's library holds it."""
        return self.changing(self._loaded(library))

    def branches(self, command: Command) -> bool:
        """Whether what the command does depends on the state; of such the library names effects that do not occur."""
        return command.action in self._branching

    def fact(self, atom: Atom) -> Proposition:
        """textworld's proposition of an atom of the planner's."""
        text = atom.name
        known = self._atoms.get(text)
        if known is None:
            known = self._atoms[text] = atom.get_fact(self._kinds)
        return known

    def changing(self, facts: Iterable[Proposition]) -> set[Fact]:
        """The true ones among `facts` that actions can change: with the game they are the whole state."""
        return {
            (fact.name, *fact.names)
            for fact in facts
            if fact.name in self._changing  # "not_..." is no such name
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
        changing = depends is None or depends & (self._changing | {BOOKKEEPING})
        command = Command(action, tuple(arguments), operator, mapping, None)
        if changing:
            return command
        return Command(action, command.arguments, operator, mapping, self.text(command, self.start))

    def text(self, command: Command, facts: Facts) -> str:
        """How a player types the command."""
        if command.fixed is not None:
            return command.fixed
        template = self.grammar.derive(self._actions[command.action].template, facts, command.mapping)
        names = {placeholder.name: self._names[variable.name] for placeholder, variable in command.mapping.items()}
        return template.format(**names)

    def feedback(self, command: Command, facts: Facts) -> str:
        """What the game says once the command has been obeyed."""
        return self.grammar.derive(self._actions[command.action].feedback_rule, facts, command.mapping)


def _types(known: Translation) -> TypeHierarchy:
    types = TypeHierarchy()
    for name, above in known.types:
        try:
            types.add(Type(name, above))
        except ValueError:
            continue  # textworld passes over them too
    return types


def _entities(facts: Facts) -> dict[str, EntityInfo]:
    """Everything that facts speak of, by identity, under the names that alfworld gives."""
    entities: dict[str, Any] = {v.name: EntityInfo(v.name, v.type) for fact in facts.facts for v in fact.arguments}
    demangler = package("alfworld.agents.utils.misc").Demangler(game_infos=entities)
    for identity, entity in entities.items():
        entity.name = demangler.demangle_alfred_name(identity)
        entity.definite, entity.indefinite = "the", "a"
    return entities


class Play:
    """One playing of a game: `load` one, then `obey` commands."""

    def __init__(self):
        self.library: Any = load_library()
        self.game: Game
        self.facts: Facts
        self.state: set[Fact] = set()
        self.commands: dict[str, Command] = {}
        self._effects: dict[str, tuple[int, int]] = {}

    def load(self, game: Game) -> str:
        """Begin the game; returns what it says first."""
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
        """Carry out a command of `commands`; returns what the game says."""
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
        if self.game.branches(command):
            self.state = self.game.state(self.library)
        self._list_commands()
        return self.game.feedback(command, self.facts)

    def key(self) -> int:
        """The key of the true state: the game, and every fact that an action can change."""
        return state_key(self.game.digest, *sorted(" ".join(fact) for fact in self.state))

    def _list_commands(self) -> None:
        """What can be done now. Of two ways to the same words the planner's first counts, as in textworld."""
        operators = (fast_downward.Operator * self.library.get_applicable_operators_count())()
        self.library.get_applicable_operators(operators)
        self.commands, self._effects = {}, {}
        for operator in operators:
            command = self.game.command(operator)
            if command.operator in self._effects:
                continue
            self._effects[command.operator] = (operator.id, operator.nb_effect_atoms)
            self.commands.setdefault(self.game.text(command, self.facts), command)
