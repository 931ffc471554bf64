"""The hooks of a data algorithm, and how one is found by its name."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from flowjax.config import ConfigError
from flowjax.fields import declared_types, option_problems
from flowjax.records import Task, state_key

BUILT_IN = {
    "dynamic_sampling": "flowjax.dataflow.algorithms.filters:DynamicSampling",
    "overlong_filter": "flowjax.dataflow.algorithms.filters:OverlongFilter",
    "deduplicate": "flowjax.dataflow.algorithms.filters:Deduplicate",
    "skip_solved": "flowjax.dataflow.algorithms.curricula:SkipSolved",
    "difficulty": "flowjax.dataflow.algorithms.curricula:Difficulty",
    "greso": "flowjax.dataflow.algorithms.curricula:Greso",
    "first_in_first_out": "flowjax.dataflow.algorithms.order:FirstInFirstOut",
    "earliest_deadline": "flowjax.dataflow.algorithms.order:EarliestDeadline",
    "last_in_first_out": "flowjax.dataflow.algorithms.order:LastInFirstOut",
    "replay": "flowjax.dataflow.algorithms.order:Replay",
}


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """How a policy did on a task: one reward and one length for each of the group's trajectories."""

    group_id: str
    task: Task
    policy: str
    rewards: Float[np.ndarray, "trajectories"]
    longest_reply_tokens: Int[np.ndarray, "trajectories"]

    @property
    def informative(self) -> bool:
        """Whether the rewards differ by more than their rounding."""
        return not np.allclose(self.rewards, self.rewards[0])

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


class Algorithm:
    """Decisions about data; an algorithm overrides those that are its own.

    Objects live in the dataflow's process and are asked from one thread. `state` and `restore` keep what they have
    learnt over a restart; it is written down together with the results that it came from. A run that is restarted
    decides as if it had not been, as long as decisions come from that state and the arguments alone: chance from
    `share_of`, not from a generator.
    """

    least_group_size = 1  # of the runs that it is for
    fresh_share = 1.0  # of a batch, that is newly played
    keeps_used_versions = 0  # how many versions long `serve` is offered groups that were trained on

    def choose(self, task: Task, position: int) -> bool:
        """Before the rollout: whether to play `task`, the `position`-th of the run's order. Changes nothing: another
        algorithm may yet refuse it."""
        del task, position
        return True

    def chosen(self, task: Task, position: int) -> None:
        """`task` is played: all have chosen it, or nothing was chosen for too long."""

    def keep(self, result: Result) -> bool:
        """After the rollout: whether the policy's trainer may have the group. Told of every group that is in."""
        del result
        return True

    def trains(self, result: Result) -> Bool[np.ndarray, "trajectories"]:
        """Which trajectories of a group that is kept the loss may have; the others only count in the group's
        statistics. From the arguments alone: asked again with every batch, from any thread."""
        return np.ones(len(result.rewards), bool)

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        """When a batch of `groups` is made: the groups to take it from, the first ones first. `fresh` are those never
        trained on and within the bound on staleness, in the order of tasks; `used` those that were, of any age. Changes
        nothing: it is also asked, with nothing fresh, how many used ones a batch will have."""
        del used, groups
        return fresh

    def published(self, policy: str, version: int) -> None:
        """A policy's trainer has made a new version."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        """What is to outlive the process, by attribute: numbers, strings, lists, and maps of them. It is written down
        after every group: as a whole, but of a `flowjax.dataflow.algorithms.state.Table` what has changed."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def task_name(task: Task) -> str:
    """The task's id, which is only its source's own where a run has several sources."""
    return f"{task.source}/{task.task_id}" if task.source else task.task_id


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
    return algorithms


def _build(name: str, options: Mapping[str, Any], seed: int) -> Algorithm:
    field = f"config.dataflow.algorithms.{name}"
    options = dict(options)
    module, colon, attribute = options.pop("path", BUILT_IN.get(name, "")).partition(":")
    if not colon:
        raise ConfigError(f"{field} is no data algorithm: use {', '.join(BUILT_IN)}, or give path=package.module:Class")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of the user's own may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{field}.path cannot be imported ({reason}): give package.module:Class") from error
    if not (isinstance(kind, type) and Algorithm in kind.__mro__):
        raise ConfigError(f"{field}.path is {module}:{attribute}, which is no subclass of {__name__}.Algorithm")
    known = {option: of for option, of in declared_types(kind.__init__).items() if option not in ("self", "seed")}
    for problem in option_problems(field, options, known, repr(name)):
        raise ConfigError(problem)
    try:
        return kind(seed=seed, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field} is {options}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{field} cannot be made with {options} ({type(error).__name__}: {error})") from error
