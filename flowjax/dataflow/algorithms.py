"""Data algorithms: their hooks (`Algorithm`), how a config's names become objects, and a run's algorithms (`Chain`)."""

import contextlib
import copy
import difflib
import inspect
import logging
import math
import typing
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from flowjax.config import ConfigError
from flowjax.credit.table import are_equal
from flowjax.fields import Interval, declared_types, load_named, option_problems, type_problem
from flowjax.records import Group, Task, pack, state_key, unpack, unreadable_key
from flowjax.rewards import trajectory_scores

K = TypeVar("K")
V = TypeVar("V")
# A changed row as the ledger keeps it: algorithm, table ("": all that is in no table), key, value (None: deleted).
StateRow = tuple[str, str, bytes, bytes | None]
_TABLES = ""  # in a state as written, the names of its tables: one that has no rows is restored, too

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
    is the staleness of its oldest token."""

    group_id: str
    arrival: int
    age_versions: int
    batches: int = 0  # that it has been in


class AlgorithmError(ValueError):
    """A data algorithm has raised, or given an answer that cannot be used; the message says which, where and why."""


class Algorithm:
    """Base class: one hook for each decision about data; an algorithm overrides the hooks that it needs.

    Objects live in the dataflow's process and are asked from one thread, except for `trains`. What they have learned is
    kept over a restart by `state` and `restore`, and written down together with the results that it came from. A
    restarted run decides as if it had never stopped, as long as decisions depend on that state and the arguments alone:
    take chance from `share_of`, not from a random generator.
    """

    least_group_size: Annotated[int, Interval(at_least=1)] = 1  # smallest config.rollout.group_size that it works with
    fresh_share: Annotated[float, Interval(above=0, at_most=1)] = 1.0  # newly played groups of a batch, others replayed
    # For so many versions `serve` is offered groups that were trained on.
    keeps_used_versions: Annotated[int, Interval(at_least=0)] = 0

    def __init__(self, *, seed: int = 0):  # with a default, so that super().__init__() does
        del seed

    def choose(self, task: Task, position: int) -> bool:
        """Before the rollout: True to play `task`, the `position`-th of the run's order. Must not change state: another
        algorithm may still refuse the task (see `chosen`)."""
        del task, position
        return True

    def chosen(self, task: Task, position: int) -> None:
        """Note that `task` is played: all algorithms chose it, or too many in a row were refused."""

    def keep(self, result: Result) -> bool:
        """After the rollout: True if the trainer may have the group. Asked once per complete group that has rewards."""
        del result
        return True

    def trains(self, result: Result) -> Bool[np.ndarray, "trajectories"]:
        """Mask of a kept group's trajectories that the loss may train on; the others only count in the group's
        statistics. Must depend on the arguments alone: it is asked again with every batch, from any thread."""
        return np.ones(len(result.rewards), bool)

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        """Order in which groups go into a batch of `groups` groups: it takes the first ones. `fresh` are groups never
        trained on and within the bound on staleness, in the order of tasks; `used` those trained on, of any age. Must
        not change state: it is also called with nothing fresh, to learn how many used ones a batch will have. Where
        `fresh` fills a batch, the answer has to, too: no task is played in place of a group that it leaves out."""
        del used, groups
        return fresh

    def published(self, policy: str, version: int) -> None:
        """Note that a policy's trainer has committed a new version."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        """State that must survive a restart of the process, by name of the attribute: numbers, strings, lists, and maps
        of them, whose keys are numbers or strings; a deque, if nothing holds it. All of it is written down after every
        group, except that only the changed rows of a `flowjax.dataflow.algorithms.Table` are."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the attributes to what `state` returned before the restart."""
        for name, value in state.items():
            before = getattr(self, name, None)
            if isinstance(before, dict | set | deque) and type(before) is not dict:  # these are read as maps and lists
                before.clear()
                (before.extend if isinstance(before, deque) else before.update)(value)
            else:
                setattr(self, name, value)


class Table(MutableMapping[K, V]):
    """A map for state that grows with the number of tasks: only its changed rows are written down.

    Keys are numbers or strings; values are these, lists, or maps of them. Assign a new value instead of changing one in
    place: a change inside a value is not noticed.
    """

    def __init__(self, rows: Mapping[K, V] | None = None):
        self._rows = dict(rows or {})
        self.changed = set(self._rows)  # keys put in or taken out since it was last written down

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
    """Name of a task that is unique in its run: its id, after its source if the run has several sources."""
    return f"{task.source}/{task.task_id}" if task.source else task.task_id


def fresh_groups(groups: int, fresh_share: float) -> int:
    """Number of newly played groups in a batch of `groups`, rounded up."""
    # Rounded before the ceiling: 10 * (1 - 0.7) is 3.0000000000000004 in floating point, and must give 3 groups.
    return math.ceil(round(groups * fresh_share, 6))


def share_of(*parts: str | int) -> float:
    """Pseudo-random number in [0, 1) that the parts determine: it is the same after a restart."""
    return state_key(*parts) / 2**64


def build_algorithms(config: ConfigDict) -> dict[str, Algorithm]:
    """The algorithms of `config.dataflow.algorithms`, by name and in its order.

    A name is a built-in one, or any name for the class that the option `path` (`package.module:Class`) gives; the other
    options are those of the algorithm.

    Raises:
        ConfigError: there is no such algorithm, it has no such option, or the run's groups are too small for it.
    """
    named = config.dataflow.algorithms.items()
    algorithms = {name: _build(name, options.to_dict(), config.seed) for name, options in named}
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
    if not {"seed", "**"} & declared_types(kind.__init__).keys():
        raise ConfigError(f"{field}.path is {path}, whose __init__ takes no seed: write it as (self, *, seed, ...)")
    known = {option: of for option, of in declared_types(kind.__init__).items() if option not in ("self", "seed")}
    for problem in option_problems(field, options, known, repr(name)):
        raise ConfigError(problem)
    given, parameters = {"**", *options}, inspect.signature(kind.__init__).parameters
    for option in (each for each in known if each not in given and parameters[each].default is inspect.Parameter.empty):
        raise ConfigError(f"{field}.{option} is not given, and {path} has no default: give it")
    try:
        algorithm = kind(seed=seed, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field} is {options}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{field} cannot be made with {options} ({type(error).__name__}: {error})") from error
    for setting, of in typing.get_type_hints(Algorithm, include_extras=True).items():
        if problem := type_problem(of, value := getattr(algorithm, setting)):
            raise ConfigError(f"{field}.path is {path}, whose {setting} is {value!r}: {problem}")
    hooks = {name: hook for name, hook in inspect.getmembers(Algorithm, inspect.isfunction) if name != "__init__"}
    for hook, asked in hooks.items():
        _check_hook(f"{field}.path is {path}, whose {hook}", getattr(algorithm, hook), asked)
    asked_for = {name for name in dir(Algorithm) if not name.startswith("_")}
    for name in (name for name in dir(kind) if not name.startswith("_") and name not in asked_for):
        # 0.85 matches a slip (a letter more, less or changed), but not another word ("score" beside "serve").
        alike = asked_for & hooks.keys() if callable(getattr(kind, name)) else asked_for - hooks.keys()
        if near := difflib.get_close_matches(name, alike, cutoff=0.85):
            raise ConfigError(
                f"{field}.path is {path}, whose {name} is nothing that the dataflow asks for: name it "
                f"{' or '.join(sorted(near))}, or otherwise where it is your own"
            )
    return algorithm


def _check_hook(named: str, hook: Callable[..., Any], asked: Callable[..., Any]) -> None:
    """Raise ConfigError where the hook cannot be called as `asked`, that of `Algorithm`."""
    _, *arguments = inspect.signature(asked).parameters
    if inspect.iscoroutinefunction(hook):
        raise ConfigError(f"{named} is async, and nothing waits for it: make it a plain function")
    try:
        inspect.signature(hook).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{named} cannot be called with ({', '.join(arguments)}): {error}") from error


class Chain:
    """The algorithms in the order in which they are asked. Every call raises `AlgorithmError` once one has failed.

    A failure ends the dataflow. What the other algorithms learned from the same group is not written down then: they
    are asked about it again when the run goes on.

    Args:
        written: rows of their states, as the ledger has them.
    """

    def __init__(self, algorithms: Mapping[str, Algorithm], written: Iterable[StateRow] = ()):
        self.by_name = dict(algorithms)
        self._failure = ""
        self._unwritten: dict[Hashable, Any] = {}  # answers of hooks that learn, until what they learned is written
        self._whole: dict[str, bytes] = {}  # states without their tables, by algorithm, as last written down
        self._tables: dict[tuple[str, str], Table[Any, Any]] = {}  # by algorithm and attribute
        for name, state in _states(written).items():
            if name in self.by_name:
                self._ask(name, "restore", state)

    @property
    def fresh_share(self) -> float:
        """Share of a batch that is newly played."""
        return math.prod(algorithm.fresh_share for algorithm in self.by_name.values())

    @property
    def keeps_used_versions(self) -> int:
        """Number of versions for which groups that were trained on must be kept, since they may be replayed."""
        return max((algorithm.keeps_used_versions for algorithm in self.by_name.values()), default=0)

    def choose(self, task: Task, position: int) -> bool:
        chosen = ("chosen", position) in self._unwritten  # chosen before, but a full disk refused to keep the group
        return chosen or all(self._ask(name, "choose", task, position, read=_yes_or_no) for name in self.by_name)

    def chosen(self, task: Task, position: int) -> None:
        self._learn("chosen", task, position, key=position)

    def keep(self, result: Result) -> bool:
        """True if all keep it. Each one is asked, also after another has refused: all of them learn from the result."""
        return all(self._learn("keep", result, key=(result.policy, result.group_id), read=_yes_or_no))

    def trains(self, result: Result) -> Bool[np.ndarray, "trajectories"]:
        read = partial(_mask, len(result.rewards))
        masks = [self._ask(name, "trains", result, read=read) for name in self.by_name]
        return np.all([np.ones(len(result.rewards), bool), *masks], axis=0)

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        for name in self.by_name:  # each orders what the one before it returned
            least = groups if len(fresh) >= groups else 0
            fresh = self._ask(name, "serve", fresh, used, groups, read=partial(_each_once, least))
        return fresh

    def published(self, policy: str, version: int) -> None:
        self._learn("published", policy, version, key=(policy, version))

    def metrics(self) -> dict[str, dict[str, float]]:
        return {name: self._ask(name, "metrics", read=_numbers) for name in self.by_name}

    @contextlib.contextmanager
    def state_changes(self, hook: str = "", key: Hashable = None) -> Iterator[Sequence[StateRow]]:
        """Rows changed since the states were last written down. The body must write them in one transaction with what
        the answers of `hook` about `key` decided; they count as written when it ends without an exception."""
        whole: dict[str, bytes] = {}
        rows: list[StateRow] = []
        for name in self.by_name:
            whole[name], changed = self._ask(name, "state", read=partial(self._packed, name))
            rows += changed
        yield [*((name, "", b"", state) for name, state in whole.items() if state != self._whole.get(name)), *rows]
        # Not reached if the body raised: nothing was written then, and the same changes are given again.
        self._whole = whole
        self._unwritten.pop((hook, key), None)  # only these answers: others in there are still to be used
        for table in self._tables.values():
            table.changed.clear()

    def _packed(self, name: str, state: Mapping[str, Any]) -> tuple[bytes, list[StateRow]]:
        """An algorithm's state without its tables, and the rows of these that have changed."""
        tables = {attribute: value for attribute, value in state.items() if isinstance(value, Table)}
        rows: list[StateRow] = []
        for attribute, table in tables.items():
            # The rows of the earlier Table would stay in the ledger: only that Table knows which keys to delete.
            if self._tables.setdefault((name, attribute), table) is not table:
                raise ValueError(f"{attribute} is another Table than before: empty that one instead")
            for key in table.changed:
                if not isinstance(key, str | int | float | np.integer):  # a tuple would come back as a list
                    raise TypeError(f"{attribute} has the key {key!r}: let keys be numbers or strings")
                rows.append((name, attribute, _pack(key), _pack(table[key]) if key in table else None))
        plain = {attribute: value for attribute, value in state.items() if attribute not in tables}
        whole = {attribute: list(value) if isinstance(value, deque) else value for attribute, value in plain.items()}
        whole |= {_TABLES: sorted(tables)} if tables else {}
        packed, algorithm = _pack(whole), self.by_name[name]
        if type(algorithm).restore is Algorithm.restore:
            for attribute in (each for each in state if not hasattr(algorithm, each)):
                raise ValueError(f"it has no attribute {attribute} to restore: name an attribute, or write restore")
        return packed, rows

    def _learn(self, hook: str, *args: Any, key: Hashable, read: Callable[[Any], Any] | None = None) -> list[Any]:
        """Answers of all algorithms. Each is asked once: if a full disk refuses what they learned, the same call comes
        again, and must not count the same result twice."""
        if (hook, key) not in self._unwritten:
            self._unwritten[hook, key] = [self._ask(name, hook, *args, read=read) for name in self.by_name]
        return self._unwritten[hook, key]

    def _ask(self, name: str, hook: str, *args: Any, read: Callable[[Any], Any] | None = None) -> Any:
        """An algorithm's answer, checked and converted by `read`."""
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
    """States by algorithm, put together from their rows in the ledger."""
    states: dict[str, dict[str, Any]] = {}
    tables: dict[tuple[str, str], dict[Any, Any]] = {}
    for name, attribute, key, packed in written:
        value = copy.deepcopy(unpack(packed or b""))  # arrays are read-only as they are read
        rows, place = (tables.setdefault((name, attribute), {}), unpack(key)) if attribute else (states, name)
        rows[place] = value
    for name, state in states.items():
        for attribute in state.pop(_TABLES, ()):
            tables.setdefault((name, attribute), {})
    for (name, attribute), rows in tables.items():
        states[name][attribute] = table = Table(rows)
        table.changed.clear()  # they are written down
    return states


def _pack(state: Any) -> bytes:
    """The state as bytes; TypeError where it holds something that msgpack cannot write, or would not read back."""
    try:
        if (key := unreadable_key(state)) is not None:
            raise TypeError(f"it has a map with the key {key!r}")
        return pack(state)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{error}: let it be numbers, strings, lists, and maps of them whose keys are numbers or strings"
        ) from error


def _yes_or_no(answer: Any) -> bool:
    if not isinstance(answer, bool | np.bool_):  # None, above all: a forgotten return would play or keep nothing
        raise TypeError(f"it answers {answer!r}: give True or False")
    return bool(answer)


def _numbers(metrics: Mapping[str, Any]) -> Mapping[str, float]:
    try:  # numpy's numbers are none for JSON
        found = {str(name): each if isinstance(each, int | float) else float(each) for name, each in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(f"it answers {metrics!r}: give a map from names to numbers") from error
    for name in (name for name, each in found.items() if not math.isfinite(each)):
        raise ValueError(f"it answers {found[name]} for {name!r}: give a finite number, or leave it out")
    return found


def _mask(trajectories: int, mask: Any) -> np.ndarray:
    if (found := np.asarray(mask)).dtype != bool:  # indices, above all: as a mask they would name others
        raise TypeError(f"it answers {mask!r}: give a mask, True or False for each trajectory")
    return found.reshape(trajectories)


def _each_once(least: int, candidates: Sequence[Candidate]) -> list[Candidate]:
    distinct = list({candidate.group_id: candidate for candidate in candidates}.values())
    if len(distinct) < least:  # the trainer would wait for ever
        raise ValueError(f"it answers {len(distinct)} groups, too few for a batch of {least}: put the others last")
    return distinct
