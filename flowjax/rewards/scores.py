"""From groups to one score per trajectory: outcomes gathered on the host, combined by one jitted function."""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from flowjax.fields import declared_types, option_problems
from flowjax.records import Group
from flowjax.rewards import components as built_in
from flowjax.rewards.outcomes import DERIVED, RewardError, gather_outcomes

Component = Callable[..., Float[Array, "trajectories"]]
# Component name -> weight, or a map of `weight` and the component's options.
Components = Mapping[str, Any]

COMPONENTS: dict[str, Component] = {
    function.__name__: function
    for function in (
        built_in.canvas,
        built_in.env_return,
        built_in.executor_cost,
        built_in.invalid_actions,
        built_in.overlong,
        built_in.partial_score,
        built_in.solved_well_formed,
        built_in.success,
        built_in.token_penalty,
        built_in.turn_penalty,
        built_in.verdict,
        built_in.well_formed,
        built_in.zero_sum,
    )
}


def trajectory_scores(
    groups: Sequence[Group], components: Components
) -> tuple[Float[np.ndarray, "trajectories"], dict[str, Float[np.ndarray, "trajectories"]]]:
    """Score of each trajectory in order, and what each component gave before weighting.

    Raises:
        RewardError: a component does not exist, or an episode does not report what it needs.
    """
    weights, options = _split(components)
    names = sorted({name for component in weights for name in _signature(component)[0]})
    outcomes = gather_outcomes(groups, names)
    total, parts = _combine(outcomes, weights, options, tuple(weights))
    return np.asarray(total), {name: np.asarray(part) for name, part in parts.items()}


def required_outcomes(components: Components) -> tuple[str, ...]:
    """Outcomes that a world must report for this reward. Those read off the turns of any episode are not among them.

    Raises:
        RewardError: a component or one of its options does not exist.
    """
    weights, _ = _split(components)
    names = {name for component in weights for name in _signature(component)[0]}
    return tuple(sorted(names - set(DERIVED)))


def check_reward(components: Components, world_outcomes: Sequence[str], world: str) -> None:
    """Refuse a reward that asks for an outcome that the world does not give.

    Raises:
        RewardError: naming the component, the outcome and what there is instead.
    """
    if not components:
        raise RewardError("config.reward.components is empty: name at least one, such as success = 1.0")
    available = set(world_outcomes) | set(DERIVED) | {name.rpartition("/")[2] for name in world_outcomes}
    for component in components:
        for name in _signature(component)[0]:
            if name not in available:
                raise RewardError(
                    f"config.reward.components.{component} needs the outcome {name!r}, which {world} does not report; "
                    f"it reports {', '.join(sorted(world_outcomes))}: drop the component or take another"
                )
    required_outcomes(components)


def get_component(name: str) -> Component:
    """The component of that name, or the function at `package.module:function`.

    Raises:
        RewardError: there is none.
    """
    if name in COMPONENTS:
        return COMPONENTS[name]
    if ":" not in name:
        close = difflib.get_close_matches(name, COMPONENTS, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise RewardError(
            f"config.reward.components.{name} does not exist{hint}; known are {', '.join(COMPONENTS)}, "
            "or package.module:function for your own"
        )
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"config.reward.components.{name} cannot be imported: {error}") from error


@functools.partial(jax.jit, static_argnames=("names",))
def _combine(
    outcomes: Mapping[str, Float[Array, "trajectories"]],
    weights: Mapping[str, Float[Array, ""]],
    options: Mapping[str, Mapping[str, Any]],
    names: tuple[str, ...],
) -> tuple[Float[Array, "trajectories"], dict[str, Float[Array, "trajectories"]]]:
    """Sum of weight times component, and the components."""
    parts = {}
    for name in names:
        parts[name] = get_component(name)(*(outcomes[key] for key in _signature(name)[0]), **options[name])
    return sum(weights[name] * parts[name] for name in names), parts  # pyright: ignore[reportReturnType]


def _signature(name: str) -> tuple[list[str], dict[str, inspect.Parameter]]:
    """Outcomes that a component reads, and its options."""
    parameters = inspect.signature(get_component(name)).parameters
    options = {key: p for key, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return [key for key in parameters if key not in options], options


def _split(components: Components) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    weights, options = {}, {}
    for name, setting in components.items():
        known = _signature(name)[1]
        chosen = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
        field = f"config.reward.components.{name}"
        weight = chosen.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not np.isfinite(weight):
            raise RewardError(f"{field} has weight {weight!r}, it takes a number")
        types = {option: kind for option, kind in declared_types(get_component(name)).items() if option in known}
        for problem in option_problems(field, chosen, types, repr(name)):
            raise RewardError(problem)
        needed = [key for key, p in known.items() if p.default is inspect.Parameter.empty and key not in chosen]
        if needed:
            raise RewardError(f"{field}.{needed[0]} is missing: give it a value")
        weights[name], options[name] = float(weight), chosen
    return weights, options
