"""Text out of a game's grammar, word for word what textworld makes of it, from templates that are parsed once.

textworld parses each template anew every time it is used and copies all that it touches; here parses and queries are
kept, and a derivation is plain recursion. The parser and the answers to queries are textworld's own.

A grammar's expressions are Python and are evaluated as such: a game file from a stranger is a program.
"""

import functools
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from textworld.envs.pddl import textgen
from textworld.logic import Rule

Scope = tuple[Mapping[str, Any], Mapping[Any, Any]]  # things by variable name; textworld's placeholder to variable


@functools.lru_cache(maxsize=4096)
def symbols(template: str) -> tuple[Any, ...]:
    """textworld's parse of a template."""
    return tuple(textgen._parse_and_convert(template, rule_name="symbols"))


@functools.lru_cache(maxsize=1024)
def query(expression: str) -> Rule:
    """textworld's rule whose assignments answer a condition."""
    return Rule.parse_conjunctive_query(expression)


@functools.lru_cache(maxsize=1024)
def _code(expression: str) -> CodeType:
    return compile(expression.strip(), "<grammar>", "eval")


def predicates(template: str) -> set[str] | None:
    """Predicates that a template's text depends on; None where it depends on rules of the grammar."""
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
    """The rules of one game. `entities` are its things by identity."""

    def __init__(self, rules: Mapping[str, Sequence[Any]], entities: Mapping[str, Any]):
        self._rules = rules
        self._entities = entities

    def derive(self, template: str, state: Any, mapping: Mapping[Any, Any]) -> str:
        """The text of a template where the variables are those of `mapping`."""
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
