"""Data algorithms: their hooks, how one is found by its name, and those of a run asked together."""

import contextlib
import difflib
import inspect
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from flowjax.config import ConfigError
from flowjax.credit.table import are_equal
from flowjax.fields import declared_types, load_named, option_problems
from flowjax.records import Group, Task, pack, state_key, unpack
from flowjax.rewards import trajectory_scores

K = TypeVar("K")
V = TypeVar("V")
# As the ledger keeps it: an algorithm's name, a table of its state ("": what is in none), key, value (None: gone).
StateRow = tuple[str, str, bytes, bytes | None]

BUILT_IN = {
    "dynamic_sampling": "flowjax.dataflow.built_in_algorithms:DynamicSampling",
    "overlong_filter": "flowjax.dataflow.built_in_algorithms:OverlongFilter",
    "deduplicate": "flowjax.dataflow.built_in_algorithms:Deduplicate",
    "skip_solved": "flowjax.dataflow.built_in_algorithms:SkipSolved",
    "difficulty": "flowjax.dataflow.built_in_algorithms:Difficulty",
    "greso": "flowjax.dataflow.built_in_algorithms:Greso",
    "first_in_first_out": "flowjax.dataflow.built_in_algorithms:FirstInFirstOut",
    "earliest_deadline": "flowjax.dataflow.built_in_algorithms:EarliestDeadline",
    "last_in_first_out": "flowjax.dataflow.built_in_algorithms:LastInFirstOut",
    "replay": "flowjax.dataflow.built_in_algorithms:Replay",
}


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A policy's results on a task: one reward and one length for each of the group's trajectories."""

    group_id: str
    task: Task
    policy: str
    rewards: Float[np.ndarray, "trajectories"]
    longest_reply_tokens: Int[np.ndarray, "trajectories"]

    @classmethod
    def of(cls, group: Group, policy: str, components: Mapping[str, float]) -> Self:
        """The result of `policy` in a group, rewarded by these components."""
        rewards, _ = trajectory_scores([group], components)
        longest = [max(len(turn.sampled_ids) for turn in trajectory.turns) for trajectory in group.trajectories]
        return cls(group.group_id, group.task, policy, np.asarray(rewards), np.array(longest))

    @property
    def informative(self) -> bool:
        """True where the rewards differ by more than their rounding."""
        return not are_equal(self.rewards)

    def share_above(self, reward: float) -> float:
        """Share of the trajectories with more than that reward."""
        return float((self.rewards > reward).mean())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that a batch may take. `arrival` counts groups in the order in which they became complete; `age_versions`
    is how many versions its oldest token lags."""

    group_id: str
    arrival: int
    age_versions: int
    batches: int = 0  # that it has been in


class AlgorithmError(ValueError):
    """A data algorithm has raised, or has answered what cannot be used; the message says which, where and why."""


class Algorithm:
    """Decisions about data; an algorithm overrides those that are its own.

    Objects live in the dataflow's process and are asked from one thread. `state` and `restore` keep what they have
    learned over a restart; it is written down together with the results that it came from. A run that is restarted
    decides as if it had not been, as long as decisions come from that state and the arguments alone: chance from
    `share_of`, not from a generator.
    """

    least_group_size = 1  # of the runs that it is for
    fresh_share = 1.0  # of a batch, that is newly played
    keeps_used_versions = 0  # how many versions long `serve` is offered groups that were trained on

    def choose(self, task: Task, position: int) -> bool:
        """Before the rollout: True to play `task`, the `position`-th of the run's order. Changes nothing: another
        algorithm may yet refuse it."""
        del task, position
        return True

    def chosen(self, task: Task, position: int) -> None:
        """`task` is played: all have chosen it, or nothing was chosen for too long."""

    def keep(self, result: Result) -> bool:
        """After the rollout: True where the policy's trainer may have the group. Asked about every group that is in."""
        del result
        return True

    def trains(self, result: Result) -> Bool[np.ndarray, "trajectories"]:
        """Mask of the trajectories of a kept group that the loss may have; the others only count in the group's
        statistics. From the arguments alone: asked again with every batch, from any thread."""
        return np.ones(len(result.rewards), bool)

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        """Order of the groups from which a batch of `groups` is taken, the first ones first. `fresh` are those never
        trained on and within the bound on staleness, in the order of tasks; `used` those that were, of any age. Changes
        nothing: it is also asked, with nothing fresh, how many used ones a batch will have."""
        del used, groups
        return fresh

    def published(self, policy: str, version: int) -> None:
        """A policy's trainer has made a new version."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        """All that is to outlive the process, by attribute: numbers, strings, lists, and maps of them, whose keys are
        numbers or strings. It is written down after every group: as a whole, but of a
        `flowjax.dataflow.algorithms.Table` what has changed."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Table(MutableMapping[K, V]):
    """A map of which only what has changed is written down, for what grows with the number of tasks.

    Keys are numbers or strings; values these, lists, or maps of them. A value is put in anew, not changed in place: a
    change inside it is not noticed.
    """

    def __init__(self, rows: Mapping[K, V] | None = None):
        self._rows = dict(rows or {})
        self.changed: set[K] = set()  # keys put in or taken out since it was last written down

    def __getitem__(self, key: K) -> V:
        return self._rows[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._rows[key] = value
        self.changed.add(key)

    def __delitem__(self, key: K) -> None:
        del self._rows[key]
        self.changed.add(key)

    def __iter__(self) -> Iterator[K]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def task_name(task: Task) -> str:
    """The task's id, which is only its source's own where a run has several sources."""
    return f"{task.source}/{task.task_id}" if task.source else task.task_id


def fresh_groups(groups: int, fresh_share: float) -> int:
    """Of a batch of so many groups, those that are newly played."""
    # Rounded before the ceiling: 10 * (1 - 0.7) is 3.0000000000000004 in floating point, and is to be 3 groups.
    return math.ceil(round(groups * fresh_share, 6))


def share_of(*parts: str | int) -> float:
    """A number from [0, 1) that the parts fix: chance that is the same after a restart."""
    return state_key(*parts) / 2**64


def build_algorithms(config: ConfigDict) -> dict[str, Algorithm]:
    """The algorithms of `config.dataflow.algorithms`, by name and in its order.

    A name is a built-in one, or any name for the class that the option `path` (`package.module:Class`) gives; the other
    options are those of the algorithm.

    Raises:
        ConfigError: there is no such algorithm, it has no such option, or the run's groups are too small for it.
    """
    algorithms = {
        name: _build(name, options.to_dict(), config.seed) for name, options in config.dataflow.algorithms.items()
    }
    for name, algorithm in algorithms.items():
        members, least = config.rollout.group_size, algorithm.least_group_size
        if members < least:
            raise ConfigError(
                f"config.rollout.group_size is {members}, but config.dataflow.algorithms.{name} compares the episodes "
                f"of a group: raise it to {least}, or leave {name} out"
            )
        groups = config.trainer.groups_per_step
        if algorithm.fresh_share < 1 and fresh_groups(groups, algorithm.fresh_share) == groups:
            raise ConfigError(
                f"config.trainer.groups_per_step is {groups}, of which config.dataflow.algorithms.{name} replays none: "
                f"raise it, or the share that is replayed, {1 - algorithm.fresh_share:g}"
            )
    return algorithms


def _build(name: str, options: Mapping[str, Any], seed: int) -> Algorithm:
    field = f"config.dataflow.algorithms.{name}"
    options = dict(options)
    path = options.pop("path", BUILT_IN.get(name, ""))
    if not path:
        raise ConfigError(f"{field} is no data algorithm: use {', '.join(BUILT_IN)}, or give path=package.module:Class")
    kind = load_named(f"{field}.path", path, ConfigError, "give package.module:Class")
    if not (isinstance(kind, type) and Algorithm in kind.__mro__):
        raise ConfigError(f"{field}.path is {path}, which is no subclass of {__name__}.Algorithm")
    known = {option: of for option, of in declared_types(kind.__init__).items() if option not in ("self", "seed")}
    for problem in option_problems(field, options, known, repr(name)):
        raise ConfigError(problem)
    try:
        algorithm = kind(seed=seed, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field} is {options}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{field} cannot be made with {options} ({type(error).__name__}: {error})") from error
    hooks = dict(inspect.getmembers(Algorithm, inspect.isfunction))
    for hook, asked in hooks.items():
        _check_hook(f"{field}.path is {path}, whose {hook}", getattr(algorithm, hook), asked)
    known = {name for name in dir(Algorithm) if not name.startswith("_")}
    for name in (name for name in dir(kind) if not name.startswith("_") and name not in known):
        # 0.85 takes a letter more, less or changed for a slip, but leaves other words alone ("score" beside "serve").
        alike = known & hooks.keys() if callable(getattr(kind, name)) else known - hooks.keys()
        if near := difflib.get_close_matches(name, alike, cutoff=0.85):
            raise ConfigError(
                f"{field}.path is {path}, whose {name} is nothing that the dataflow asks for: name it "
                f"{' or '.join(sorted(near))}, or otherwise where it is your own"
            )
    return algorithm


def _check_hook(named: str, hook: Callable[..., Any], asked: Callable[..., Any]) -> None:
    """Raises:
    ConfigError: the hook cannot be called as `asked`, that of `Algorithm`.
    """
    _, *arguments = inspect.signature(asked).parameters
    if inspect.iscoroutinefunction(hook):
        raise ConfigError(f"{named} is async, and nothing waits for it: make it a plain function")
    try:
        inspect.signature(hook).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{named} cannot be called with ({', '.join(arguments)}): {error}") from error


class Chain:
    """The algorithms in the order in which they are asked. Every call raises `AlgorithmError` once one has failed.

    A failure ends the dataflow. What the others have made of the same group is not written down by then: they are asked
    again when the run goes on.

    Args:
        written: what they had learned before, as it was written down.
    """

    def __init__(self, algorithms: Mapping[str, Algorithm], written: Iterable[StateRow] = ()):
        self.by_name = dict(algorithms)
        self._failure = ""
        self._unwritten: dict[Hashable, Any] = {}  # answers to what algorithms learn from, not written down yet
        self._whole: dict[str, bytes] = {}  # as it was last written down
        self._tables: dict[tuple[str, str], Table[Any, Any]] = {}  # by algorithm and attribute
        for name, state in _states(written).items():
            if name in self.by_name:
                self._ask(name, "restore", state)

    @property
    def fresh_share(self) -> float:
        """Of a batch, that is newly played."""
        return math.prod(algorithm.fresh_share for algorithm in self.by_name.values())

    @property
    def keeps_used_versions(self) -> int:
        """Versions for which groups that were trained on may be asked for again."""
        return max((algorithm.keeps_used_versions for algorithm in self.by_name.values()), default=0)

    def choose(self, task: Task, position: int) -> bool:
        chosen = ("chosen", position) in self._unwritten  # and a full disk has refused the group
        return chosen or all(self._ask(name, "choose", task, position, read=_yes_or_no) for name in self.by_name)

    def chosen(self, task: Task, position: int) -> None:
        self._learn("chosen", task, position, key=position)

    def keep(self, result: Result) -> bool:
        """True where all keep it; each is asked, also where one has refused."""
        return all(self._learn("keep", result, key=(result.policy, result.group_id), read=_yes_or_no))

    def trains(self, result: Result) -> Bool[np.ndarray, "trajectories"]:
        read = partial(_mask, len(result.rewards))
        masks = [self._ask(name, "trains", result, read=read) for name in self.by_name]
        return np.all([np.ones(len(result.rewards), bool), *masks], axis=0)

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        for name in self.by_name:
            fresh = self._ask(name, "serve", fresh, used, groups, read=_each_once)
        return fresh

    def published(self, policy: str, version: int) -> None:
        self._learn("published", policy, version, key=(policy, version))

    def metrics(self) -> dict[str, dict[str, float]]:
        return {name: self._ask(name, "metrics") for name in self.by_name}

    @contextlib.contextmanager
    def state_changes(self, hook: str = "", key: Hashable = None) -> Iterator[Sequence[StateRow]]:
        """Changes since the states were last written down, among them what `hook` has taught of `key`; they count as
        written when the body is through."""
        whole: dict[str, bytes] = {}
        rows: list[StateRow] = []
        for name in self.by_name:
            whole[name], changed = self._ask(name, "state", read=partial(self._packed, name))
            rows += changed
        yield [*((name, "", b"", state) for name, state in whole.items() if state != self._whole.get(name)), *rows]
        # Not reached where the body raised: nothing was written then, and the same changes are given again.
        self._whole = whole
        self._unwritten.pop((hook, key), None)  # what others have answered is asked for again: it waits to be used
        for table in self._tables.values():
            table.changed.clear()

    def _packed(self, name: str, state: Mapping[str, Any]) -> tuple[bytes, list[StateRow]]:
        """An algorithm's state without its tables, and the rows of these that have changed."""
        tables = {attribute: value for attribute, value in state.items() if isinstance(value, Table)}
        for attribute, table in tables.items():
            # The rows of the one before would stay in the ledger: only a table itself knows what was taken out of it.
            if self._tables.setdefault((name, attribute), table) is not table:
                raise ValueError(f"{attribute} is another Table than before: empty that one instead")
            for key in table.changed:
                if not isinstance(key, str | int | float | np.integer):  # a tuple would come back as a list
                    raise TypeError(f"{attribute} has the key {key!r}: let keys be numbers or strings")
        whole = {attribute: value for attribute, value in state.items() if attribute not in tables}
        rows = [
            (name, attribute, _pack(key), _pack(table[key]) if key in table else None)
            for attribute, table in tables.items()
            for key in table.changed
        ]
        return _pack(whole), rows

    def _learn(self, hook: str, *args: Any, key: Hashable, read: Callable[[Any], Any] | None = None) -> list[Any]:
        """Answers of all algorithms. Where a full disk refuses what they have learnt, the same comes again: each is
        asked once."""
        if (hook, key) not in self._unwritten:
            self._unwritten[hook, key] = [self._ask(name, hook, *args, read=read) for name in self.by_name]
        return self._unwritten[hook, key]

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


def _states(written: Iterable[StateRow]) -> dict[str, dict[str, Any]]:
    """States by algorithm, from the rows that they were written down as."""
    states: dict[str, dict[str, Any]] = {}
    tables: dict[tuple[str, str], dict[Any, Any]] = {}
    for name, attribute, key, value in written:
        if attribute:
            tables.setdefault((name, attribute), {})[unpack(key)] = unpack(value or b"")
        else:
            states[name] = unpack(value or b"")
    for (name, attribute), rows in tables.items():
        states[name][attribute] = Table(rows)
    return states


def _pack(state: Any) -> bytes:
    """The state as bytes that can be read again.

    Raises:
        TypeError: there are none.
    """
    try:
        if (key := _unreadable_key(state)) is not None:
            raise TypeError(f"it has a map with the key {key!r}")
        return pack(state)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{error}: let it be numbers, strings, lists, and maps of them whose keys are numbers or strings"
        ) from error


def _unreadable_key(state: Any) -> Any:
    """A key that could be written and not read: a tuple comes back as a list, which no map takes. None: there is none.

    Reading the bytes again would tell, too, but takes six times as long, after every group."""
    values = ()
    if isinstance(state, Mapping):
        for key in state:
            if key is not None and not isinstance(key, str | bytes | int | float | np.generic):
                return key
        values = state.values()
    elif isinstance(state, list | tuple):
        values = state
    nested = (value for value in values if isinstance(value, Mapping | list | tuple))
    return next((key for value in nested if (key := _unreadable_key(value)) is not None), None)


def _yes_or_no(answer: Any) -> bool:
    if not isinstance(answer, bool | np.bool_):  # None, above all: a return was forgotten, and nothing would be played
        raise TypeError(f"it answers {answer!r}: give True or False")
    return bool(answer)


def _mask(trajectories: int, mask: Any) -> np.ndarray:
    return np.asarray(mask, bool).reshape(trajectories)


def _each_once(candidates: Sequence[Candidate]) -> list[Candidate]:
    return list({candidate.group_id: candidate for candidate in candidates}.values())
