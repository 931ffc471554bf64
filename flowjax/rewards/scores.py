"""From groups to one score per trajectory: outcomes gathered on the host, combined by one jitted function."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from flowjax.fields import declared_types, load_named, nearest, option_problems
from flowjax.records import COUNTED_STATUSES, Group, Trajectory, Turn

Component = Callable[..., Float[Array, "trajectories"]]
# Component name -> weight, or a map of `weight`, the component's options and, for one of one's own, `path`.
Components = Mapping[str, Any]

COMPONENTS = {
    "canvas": "flowjax.rewards.components:canvas",
    "env_return": "flowjax.rewards.components:env_return",
    "executor_cost": "flowjax.rewards.components:executor_cost",
    "invalid_actions": "flowjax.rewards.components:invalid_actions",
    "overlong": "flowjax.rewards.components:overlong",
    "partial_score": "flowjax.rewards.components:partial_score",
    "published_canvas": "flowjax.published.canvas:canvas",
    "solved_well_formed": "flowjax.rewards.components:solved_well_formed",
    "success": "flowjax.rewards.components:success",
    "token_penalty": "flowjax.rewards.components:token_penalty",
    "turn_penalty": "flowjax.rewards.components:turn_penalty",
    "verdict": "flowjax.rewards.components:verdict",
    "well_formed": "flowjax.rewards.components:well_formed",
    "zero_sum": "flowjax.rewards.components:zero_sum",
}


class RewardError(ValueError):
    """A reward that cannot be given; the message names the component, the outcome and the remedy."""


@dataclass(frozen=True)
class _Part:
    """A component of a reward, with its weight and options."""

    function: Component
    weight: float
    options: Mapping[str, Any]

    @property
    def outcomes(self) -> list[str]:
        """Outcomes that the component reads: its positional parameters."""
        parameters = inspect.signature(self.function).parameters.values()
        return [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]


def trajectory_scores(
    groups: Sequence[Group], components: Components
) -> tuple[Float[np.ndarray, "trajectories"], dict[str, Float[np.ndarray, "trajectories"]]]:
    """Score of each trajectory in order, and what each component gave before weighting.

    Raises:
        RewardError: a component does not exist, or an episode does not report what it needs.
    """
    parts = _parts(components)
    outcomes = _gather_outcomes(groups, sorted({name for part in parts.values() for name in part.outcomes}))
    functions = tuple((name, part.function, tuple(part.outcomes)) for name, part in parts.items())
    weights = {name: part.weight for name, part in parts.items()}
    total, values = _combine(functions, outcomes, weights, {name: part.options for name, part in parts.items()})
    return np.asarray(total), {name: np.asarray(value) for name, value in values.items()}


# Read off the turns when a world does not report them itself.
_DERIVED: dict[str, Callable[[Sequence[Turn]], float]] = {
    "turns": len,
    "invalid_actions": lambda turns: sum(not turn.valid for turn in turns),
    "env_return": lambda turns: sum(turn.env_reward for turn in turns),
    "sampled_tokens": lambda turns: sum(len(turn.sampled_ids) for turn in turns),
    "longest_reply_tokens": lambda turns: max((len(turn.sampled_ids) for turn in turns), default=0),
}


def _gather_outcomes(groups: Sequence[Group], names: Iterable[str]) -> dict[str, Float[np.ndarray, "trajectories"]]:
    """One array per outcome over all trajectories, in order.

    Episodes that failed for reasons outside the policy have zeros where they report nothing.

    Raises:
        RewardError: an episode that counts does not report an outcome, or reports one that is not finite.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return {name: np.array([_outcome(trajectory, name) for trajectory in trajectories], np.float32) for name in names}


def _outcome(trajectory: Trajectory, name: str) -> float:
    if name in trajectory.outcome:
        value = float(trajectory.outcome[name])
        if not np.isfinite(value):
            raise RewardError(f"trajectory {trajectory.trajectory_id!r} reports {name} = {value}, not a number")
        return value
    if name in _DERIVED:
        return float(_DERIVED[name](trajectory.turns))
    if trajectory.status not in COUNTED_STATUSES:
        return 0.0
    raise RewardError(
        f"trajectory {trajectory.trajectory_id!r} reports no outcome {name!r}, only {sorted(trajectory.outcome)}: "
        "let the world report it, or take the component that needs it out of config.reward.components"
    )


# Weights and options are traced: policies that differ in them alone share one compiled program.
@functools.partial(jax.jit, static_argnums=0)
def _combine(
    functions: tuple[tuple[str, Component, tuple[str, ...]], ...],
    outcomes: Mapping[str, Float[Array, "trajectories"]],
    weights: Mapping[str, Float[Array, ""]],
    options: Mapping[str, Mapping[str, Any]],
) -> tuple[Float[Array, "trajectories"], dict[str, Float[Array, "trajectories"]]]:
    """Sum of weight times component, and the components."""
    values = {name: function(*(outcomes[key] for key in read), **options[name]) for name, function, read in functions}
    return sum(weights[name] * values[name] for name in values), values  # pyright: ignore[reportReturnType]


# -------------------------------------------------------------------------------------------------------------- checks


def required_outcomes(components: Components) -> tuple[str, ...]:
    """Outcomes that a world must report for this reward. Those read off the turns of any episode are not among them.

    Raises:
        RewardError: a component or one of its options does not exist.
    """
    names = {name for part in _parts(components).values() for name in part.outcomes}
    return tuple(sorted(names - set(_DERIVED)))


def check_reward(components: Components, world_outcomes: Sequence[str], world: str) -> None:
    """Refuse a reward that asks for an outcome that the world does not give.

    Raises:
        RewardError: naming the component, the outcome and what there is instead.
    """
    if not components:
        raise RewardError("config.reward.components is empty: name at least one, such as success = 1.0")
    available = set(world_outcomes) | set(_DERIVED) | {name.rpartition("/")[2] for name in world_outcomes}
    for component, part in _parts(components).items():
        for name in part.outcomes:
            if name not in available:
                raise RewardError(
                    f"config.reward.components.{component} needs the outcome {name!r}, which {world} does not report; "
                    f"it reports {', '.join(sorted(world_outcomes))}: drop the component or take another"
                )


def _parts(components: Components) -> dict[str, _Part]:
    return {name: _part(name, setting) for name, setting in components.items()}


def _part(name: str, setting: Any) -> _Part:
    field = f"config.reward.components.{name}"
    options = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
    weight, path = options.pop("weight", 1.0), options.pop("path", COMPONENTS.get(name))
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not np.isfinite(weight):
        raise RewardError(f"{field} has weight {weight!r}, it takes a number")
    if path is None:
        raise RewardError(
            f"{field} does not exist{nearest(name, COMPONENTS)}; known are {', '.join(COMPONENTS)}, or give "
            "path=package.module:function for your own"
        )
    function = load_named(f"{field}.path", path, RewardError)
    known = {key: p for key, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    types = {option: kind for option, kind in declared_types(function).items() if option in known}
    for problem in option_problems(field, options, types, repr(name)):
        raise RewardError(problem)
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in options:
            raise RewardError(f"{field}.{key} is missing: give it a value")
    return _Part(function, float(weight), options)
