"""The data algorithms of a run, asked together."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool

from flowjax.dataflow.algorithms.base import Algorithm, Candidate, Result
from flowjax.dataflow.algorithms.state import Learnt, Table
from flowjax.records import Task, pack


class AlgorithmError(ValueError):
    """A data algorithm has raised, or has answered what cannot be used; the message says which, where and why."""


class Chain:
    """The algorithms in the order in which they are asked. Every call raises `AlgorithmError` once one has failed.

    A failure ends the dataflow. What the others have made of the same group is not written down by then: they are asked
    again when the run goes on.

    Args:
        states: what they had learnt before, by name.
    """

    def __init__(self, algorithms: Mapping[str, Algorithm], states: Mapping[str, Mapping[str, Any]] | None = None):
        self.by_name = dict(algorithms)
        self._failure = ""
        self._whole: dict[str, bytes] = {}  # as it was last written down
        self._tables: dict[tuple[str, str], Table[Any, Any]] = {}  # by algorithm and attribute
        for name, state in (states or {}).items():
            if name in self.by_name:
                self._ask(name, "restore", state)

    @property
    def fresh_share(self) -> float:
        """Of a batch, that is newly played."""
        return math.prod(algorithm.fresh_share for algorithm in self.by_name.values())

    @property
    def keeps_used_versions(self) -> int:
        """How many versions long groups that were trained on may be asked for again."""
        return max((algorithm.keeps_used_versions for algorithm in self.by_name.values()), default=0)

    def choose(self, task: Task, position: int) -> bool:
        return all(self._ask(name, "choose", task, position) for name in self.by_name)

    def chosen(self, task: Task, position: int) -> None:
        for name in self.by_name:
            self._ask(name, "chosen", task, position)

    def keep(self, result: Result) -> bool:
        """Whether all keep it; each is told, also where one has refused."""
        verdicts = [self._ask(name, "keep", result, read=bool) for name in self.by_name]
        return all(verdicts)

    def trains(self, result: Result) -> Bool[np.ndarray, "trajectories"]:
        read = partial(_mask, len(result.rewards))
        masks = [self._ask(name, "trains", result, read=read) for name in self.by_name]
        return np.all([np.ones(len(result.rewards), bool), *masks], axis=0)

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        for name in self.by_name:
            fresh = self._ask(name, "serve", fresh, used, groups, read=_each_once)
        return fresh

    def published(self, policy: str, version: int) -> None:
        for name in self.by_name:
            self._ask(name, "published", policy, version)

    def metrics(self) -> dict[str, dict[str, float]]:
        return {name: self._ask(name, "metrics") for name in self.by_name}

    @contextlib.contextmanager
    def learnt(self) -> Iterator[Learnt]:
        """What has changed since it was last written down; taken to be written when the body is through."""
        whole: dict[str, bytes] = {}
        rows: list[tuple[str, str, bytes, bytes | None]] = []
        for name in self.by_name:
            whole[name], changed = self._ask(name, "state", read=partial(self._packed, name))
            rows += changed
        yield Learnt({name: state for name, state in whole.items() if state != self._whole.get(name)}, rows)
        self._whole = whole
        for table in self._tables.values():
            table.changed.clear()

    def _packed(self, name: str, state: Mapping[str, Any]) -> tuple[bytes, list[tuple[str, str, bytes, bytes | None]]]:
        """An algorithm's state without its tables, and the rows of these that have changed."""
        tables = {attribute: value for attribute, value in state.items() if isinstance(value, Table)}
        for attribute, table in tables.items():
            if self._tables.setdefault((name, attribute), table) is not table:
                raise ValueError(f"{attribute} is another Table than before: empty that one instead")
        whole = {attribute: value for attribute, value in state.items() if attribute not in tables}
        rows = [
            (name, attribute, _pack(key), _pack(table[key]) if key in table else None)
            for attribute, table in tables.items()
            for key in table.changed
        ]
        return _pack(whole), rows

    def _ask(self, name: str, hook: str, *args: Any, read: Callable[[Any], Any] | None = None) -> Any:
        """An algorithm's answer, read so that it can be used."""
        if self._failure:
            raise AlgorithmError(self._failure)
        try:
            answer = getattr(self.by_name[name], hook)(*args)
            return read(answer) if read else answer
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())  # on one line
            self._failure = f"config.dataflow.algorithms.{name}.{hook} raised {reason}"
            logging.exception("%s", self._failure)
            raise AlgorithmError(self._failure) from error


def _pack(learnt: Any) -> bytes:
    try:
        return pack(learnt)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{error}: let it be numbers, strings, lists, and maps of them") from error


def _mask(trajectories: int, mask: Any) -> np.ndarray:
    return np.asarray(mask, bool).reshape(trajectories)


def _each_once(candidates: Sequence[Candidate]) -> list[Candidate]:
    return list({candidate.group_id: candidate for candidate in candidates}.values())
