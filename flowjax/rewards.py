"""Rewards: from the outcomes of episodes to one score per trajectory.

Outcomes are gathered on the host, and one jitted function computes the components, each a pure function of outcome
arrays. A score is their weighted sum. A component's positional arguments are named after the outcomes that it reads;
keyword-only arguments are its options.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Real

from flowjax.fields import Interval, declared_types, load_named, nearest, option_problems
from flowjax.records import COUNTED_STATUSES, LARGEST_NUMBER, Group, Trajectory, Turn

Component = Callable[..., Float[Array, "trajectories"]]
_RELEASE_SLACK = 1e-6  # of the canvas's structure: the default weights may add up to just below 1
_CANCELLED = 2e-6  # share of the components' summed sizes below which their sum is float32's rounding alone
# Component name -> weight, or a map of `weight`, the component's options and, for your own component, its `path`.
Components = Mapping[str, Any]

COMPONENTS = {
    "canvas": "flowjax.rewards:canvas",
    "env_return": "flowjax.rewards:env_return",
    "executor_cost": "flowjax.rewards:executor_cost",
    "invalid_actions": "flowjax.rewards:invalid_actions",
    "overlong": "flowjax.rewards:overlong",
    "partial_score": "flowjax.rewards:partial_score",
    "published_canvas": "flowjax.published.canvas:canvas",
    "solved_well_formed": "flowjax.rewards:solved_well_formed",
    "success": "flowjax.rewards:success",
    "token_penalty": "flowjax.rewards:token_penalty",
    "turn_penalty": "flowjax.rewards:turn_penalty",
    "verdict": "flowjax.rewards:verdict",
    "well_formed": "flowjax.rewards:well_formed",
    "zero_sum": "flowjax.rewards:zero_sum",
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
    """Score of each trajectory in order, and each component's values before weighting; both are zero for trajectories
    that failed for reasons outside the policy, which no component sees.

    Raises:
        RewardError: there is no component, one does not exist or gives no finite number, or an episode that counts does
            not report what it needs.
    """
    if not (parts := _parts(components)):
        raise RewardError("there is no component: name one, as in {'success': 1.0}")
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    counted = np.array([trajectory.status in COUNTED_STATUSES for trajectory in trajectories], bool)
    kept = [trajectory for trajectory, counts in zip(trajectories, counted, strict=True) if counts]
    outcomes = _gather_outcomes(kept, sorted({name for part in parts.values() for name in part.outcomes}))
    functions = tuple((name, part.function, tuple(part.outcomes)) for name, part in parts.items())
    values = _values(functions, outcomes, {name: part.options for name, part in parts.items()})
    _check_finite(values, [f"trajectory {trajectory.trajectory_id!r}" for trajectory in kept])
    # In float64, and a rest that is rounding alone, where components cancel, is set to 0. Estimators treat scores as
    # equal that differ by a tiny share of their size: near 0 even rounding is more, and would pass for a difference.
    weighted = [part.weight * np.asarray(values[name], np.float64) for name, part in parts.items()]
    total, size = np.sum(weighted, axis=0), np.sum(np.abs(weighted), axis=0)
    total = np.where(np.abs(total) > _CANCELLED * size, total, 0.0)

    def of_all(found: Float[Array, "counted"] | Float[np.ndarray, "counted"]) -> Float[np.ndarray, "trajectories"]:
        spread = np.zeros(len(trajectories), np.float32)
        spread[counted] = found
        return spread

    return of_all(total), {name: of_all(value) for name, value in values.items()}


# Outcomes that are computed from the turns where a world does not report them itself.
_DERIVED: dict[str, Callable[[Sequence[Turn]], float]] = {
    "turns": len,
    "invalid_actions": lambda turns: sum(not turn.valid for turn in turns),
    "env_return": lambda turns: sum(turn.env_reward for turn in turns),
    "sampled_tokens": lambda turns: sum(len(turn.sampled_ids) for turn in turns),
    "longest_reply_tokens": lambda turns: max((len(turn.sampled_ids) for turn in turns), default=0),
}


def _gather_outcomes(
    trajectories: Sequence[Trajectory], names: Iterable[str]
) -> dict[str, Float[np.ndarray, "trajectories"]]:
    """One array per outcome, in order.

    Raises:
        RewardError: one does not report an outcome, or reports one that is not finite.
    """
    return {name: np.array([_outcome(trajectory, name) for trajectory in trajectories], np.float32) for name in names}


def _outcome(trajectory: Trajectory, name: str) -> float:
    if name in trajectory.outcome:
        value = float(trajectory.outcome[name])
        if not np.isfinite(value):
            raise RewardError(f"trajectory {trajectory.trajectory_id!r} reports {name} = {value}, not a number")
        return value
    if name in _DERIVED:
        return float(_DERIVED[name](trajectory.turns))
    raise RewardError(
        f"trajectory {trajectory.trajectory_id!r} reports no outcome {name!r}, only {sorted(trajectory.outcome)}: "
        "let the world report it, or take the component that needs it out of config.reward.components"
    )


def _check_finite(values: Mapping[str, Array], episodes: Sequence[str]) -> None:
    """Raise RewardError where a component gives no finite number for one of these."""
    for name, value in values.items():
        for episode, number in zip(episodes, np.asarray(value), strict=True):
            if not np.isfinite(number):
                raise RewardError(
                    f"config.reward.components.{name} gives {number} for {episode}: give a finite number for every "
                    "outcome, as with jnp.where and a divisor that is never 0"
                )


# Options are traced, so that policies that differ in their values alone share one compiled program.
@functools.partial(jax.jit, static_argnums=0)
def _values(
    functions: tuple[tuple[str, Component, tuple[str, ...]], ...],
    outcomes: Mapping[str, Float[Array, "trajectories"]],
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, Float[Array, "trajectories"]]:
    """The components, before they are weighted."""
    return {name: function(*(outcomes[key] for key in read), **options[name]) for name, function, read in functions}


# -------------------------------------------------------------------------------------------------------------- checks


def required_outcomes(components: Components) -> tuple[str, ...]:
    """Outcomes that a world must report for this reward, without those that are computed from the turns (`_DERIVED`).

    Raises:
        RewardError: a component or one of its options does not exist.
    """
    names = {name for part in _parts(components).values() for name in part.outcomes}
    return tuple(sorted(names - set(_DERIVED)))


def check_reward(components: Components, world_outcomes: Sequence[str], world: str) -> None:
    """Refuse a reward that asks for an outcome that the world does not give, or that cannot be computed.

    Raises:
        RewardError: naming the component, the outcome and what there is instead.
    """
    if not components:
        raise RewardError("config.reward.components is empty: name at least one, such as success = 1.0")
    available = set(world_outcomes) | set(_DERIVED)
    for component, part in _parts(components).items():
        for name in part.outcomes:
            if name not in available:
                raise RewardError(
                    f"config.reward.components.{component} needs the outcome {name!r}, which {world} does not report"
                    f"{nearest(name, available)}; there are {', '.join(sorted(available))}: drop the component or take "
                    "another. Rewards read these numbers of an episode, no texts"
                )
        _check_traced(component, part)
        if set(part.outcomes) <= {"success", *_DERIVED.keys() - set(world_outcomes)}:
            _check_values(component, part)
        if part.function is canvas:
            _check_release(component, part)


def _check_release(name: str, part: _Part) -> None:
    """Raise RewardError if no workflow can have the structure at which its answer pays."""
    known = inspect.signature(canvas).parameters.values()
    options = {each.name: each.default for each in known if each.kind is each.KEYWORD_ONLY} | dict(part.options)
    most = min(1.0, sum(max(value, 0.0) for option, value in options.items() if option.endswith("_weight")))
    if options["release_at"] > most + _RELEASE_SLACK:
        raise RewardError(
            f"config.reward.components.{name} releases the answer at a structure of {options['release_at']:g}, and its "
            f"weights add up to {most:g} at most: no answer would ever pay. Lower release_at, or raise a weight"
        )


def _check_traced(name: str, part: _Part) -> None:
    """Raise RewardError unless JAX can trace the component, and it gives one number per trajectory."""
    trajectories = jax.ShapeDtypeStruct((3,), jnp.float32)
    functions = ((name, part.function, tuple(part.outcomes)),)
    arrays = dict.fromkeys(part.outcomes, trajectories)
    try:
        found = _values.eval_shape(functions, arrays, {name: part.options})
        why = "" if found[name].shape == trajectories.shape else f"gives {found[name].shape} for 3 trajectories"
    except Exception as error:  # a user's component may fail in any way
        why = f"fails when JAX traces it ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if why:
        raise RewardError(
            f"config.reward.components.{name} {why}: give a function of jax.numpy arrays to one number per trajectory; "
            "its options are numbers or switches, which are traced like them, so that `if` takes neither"
        )


def _check_values(name: str, part: _Part) -> None:
    """Raise RewardError where groups all lost, all won or of both have no score, or one that no credit can be given
    for, as far as worlds have their outcomes alike."""
    turns = np.array([1, 2, 3], np.float32)
    for won in np.array([[0, 0, 0], [1, 1, 1], [0, 1, 0]], np.float32):
        known = {"success": won, "env_return": won, "turns": turns, "invalid_actions": turns * (1 - won)}
        known |= {"sampled_tokens": 8 * turns, "longest_reply_tokens": np.full_like(turns, 8)}
        arrays = {outcome: known[outcome] for outcome in part.outcomes}
        read = [", ".join(f"{outcome} = {value[row]:g}" for outcome, value in arrays.items()) for row in range(3)]
        three = "three with success " + ", ".join(f"{each:g}" for each in won)
        episodes = [f"an episode with {text}, of {three}" for text in read]
        # One program for all three: their shapes are the same.
        values = _values(((name, part.function, tuple(part.outcomes)),), arrays, {name: part.options})
        _check_finite(values, episodes)
        for episode, number in zip(episodes, part.weight * np.asarray(values[name], np.float64), strict=True):
            if abs(number) > LARGEST_NUMBER:
                raise RewardError(
                    f"config.reward.components.{name} gives {number:g} with its weight for {episode}, beyond "
                    f"{LARGEST_NUMBER:g}, for which no credit can be given: scale it"
                )


def _parts(components: Components) -> dict[str, _Part]:
    return {name: _part(name, setting) for name, setting in components.items()}


def _part(name: str, setting: Any) -> _Part:
    field = f"config.reward.components.{name}"
    options = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
    weight, path = options.pop("weight", 1.0), options.pop("path", COMPONENTS.get(name))
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not np.isfinite(weight):
        remedy = f"; your own component is {{'path': {weight!r}}}" if ":" in str(weight) else ""
        raise RewardError(f"{field} has weight {weight!r}, it takes a number{remedy}")
    if path is None:
        raise RewardError(
            f"{field} does not exist{nearest(name, COMPONENTS)}; known are {', '.join(COMPONENTS)}, or give "
            "path=package.module:function for your own"
        )
    function = load_named(f"{field}.path", path, RewardError)
    known = {key: p for key, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    if clash := sorted({"weight", "path"} & known.keys()):
        raise RewardError(
            f"{field}.path is {path!r}, which has an option {clash[0]!r}, as every component has: give it another name"
        )
    types = {option: kind for option, kind in declared_types(function).items() if option in known}
    for problem in option_problems(field, options, types, repr(name)):
        raise RewardError(problem)
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in options:
            raise RewardError(f"{field}.{key} is missing: give it a value")
    return _Part(function, float(weight), options)


# ----------------------------------------------------------------------------------------------------------- components

Outcome = Float[Array, "trajectories"]
# Options are traced, so that another value needs no other program.
Number = float | Real[Array, ""]
PositiveNumber = Annotated[Number, Interval(above=0)]
Switch = bool | Bool[Array, ""]


def success(success: Outcome) -> Outcome:
    """1 when the task was solved, else 0."""
    return (success > 0.5).astype(jnp.float32)


def partial_score(score: Outcome) -> Outcome:
    """The world's own grade of the result, as it is."""
    return score


def env_return(env_return: Outcome) -> Outcome:
    """Sum of the environment's rewards."""
    return env_return


def invalid_actions(invalid_actions: Outcome, turns: Outcome, *, per_turn: Switch = False) -> Outcome:
    """Minus the number of replies that could not be read as an action, or minus their share."""
    return -invalid_actions / jnp.where(per_turn, jnp.maximum(turns, 1), 1)


def turn_penalty(turns: Outcome) -> Outcome:
    """Minus the number of turns."""
    return -turns


def token_penalty(sampled_tokens: Outcome, *, per_tokens: PositiveNumber = 1000.0) -> Outcome:
    """Minus the number of sampled tokens, in units of `per_tokens`."""
    return -sampled_tokens / per_tokens


def overlong(longest_reply_tokens: Outcome, *, limit_tokens: PositiveNumber, buffer_tokens: PositiveNumber) -> Outcome:
    """Soft punishment of replies that come near the limit. DAPO (arXiv 2503.14476), eq. 13.

    0 up to limit - buffer, falling linearly to -1 at the limit, -1 beyond.
    """
    return jnp.clip((limit_tokens - buffer_tokens - longest_reply_tokens) / buffer_tokens, -1.0, 0.0)


def well_formed(well_formed: Outcome) -> Outcome:
    """Share of the replies that kept to the format asked for (tags in place, nothing outside them)."""
    return jnp.clip(well_formed, 0.0, 1.0)


def solved_well_formed(success: Outcome, well_formed: Outcome, *, format_reward: Number = 0.1) -> Outcome:
    """1 for a right answer in the right format, `format_reward` for the format alone, else 0. Search-R1 style."""
    in_format = well_formed >= 1.0
    return jnp.where(in_format, jnp.where(success > 0.5, 1.0, format_reward), 0.0)


def verdict(
    success: Outcome, answer_right: Outcome, *, balanced: Switch = False, most_weight: PositiveNumber = 8.0
) -> Outcome:
    """A verifier's reward: 1 when its verdict agrees with the truth, else 1 - w.

    w is 1, or with `balanced` min(most_weight, 1/2 / share), the share of answers that are right (or wrong) as this one
    is, among the trajectories scored together. While no w is bounded, the mean is the balanced accuracy: approving
    every answer pays no more than guessing, however many of them are right.
    """
    right = answer_right > 0.5
    share = jnp.where(right, right.mean(), 1.0 - right.mean())  # never 0: the trajectory itself is in it
    weight = jnp.where(balanced, jnp.minimum(most_weight, 0.5 / share), 1.0)
    return 1.0 - weight * (success <= 0.5)


def zero_sum(payoff: Outcome, opponent_payoff: Outcome) -> Outcome:
    """An agent's payoff less its opponent's, halved."""
    return 0.5 * (payoff - opponent_payoff)


def canvas(
    correctness: Outcome,
    checks: Outcome,
    formats: Outcome,
    distinct_operators: Outcome,
    branching: Outcome,
    operator_entropy: Outcome,
    distinct_siblings: Outcome,
    *,
    base: Number = -1.0,
    checker_weight: Number = 0.2,
    format_weight: Number = 0.2,
    operator_weight: Number = 0.2,
    control_weight: Number = 0.4,
    entropy_weight: Number = 0.0,
    siblings_weight: Number = 0.0,
    distinct: PositiveNumber = 4.0,
    release_at: Number = 1.0,
) -> Outcome:
    """Reward of a built workflow: base + S, and the correctness of its answer only once S reaches `release_at`.

    CWRPO (FlowSteer): R = base + S + [S >= release_at] C, so that no answer pays before the workflow has structure.
    S = min(1, weighted sum of parts), each in [0, 1]: a checker, a formatter, `distinct` kinds of operators, a control
    structure, the entropy of operator kinds and the share of siblings that differ, all of them counted only where they
    took part in the answer. `published_canvas` has the published parts.
    """
    structure = (
        checker_weight * jnp.minimum(1.0, checks)
        + format_weight * jnp.minimum(1.0, formats)
        + operator_weight * jnp.minimum(1.0, distinct_operators / distinct)
        + control_weight * jnp.minimum(1.0, branching)
        + entropy_weight * operator_entropy
        + siblings_weight * distinct_siblings
    )
    structure = jnp.minimum(1.0, structure)
    released = structure >= release_at - _RELEASE_SLACK
    return base + structure + jnp.where(released, correctness, 0.0)


def executor_cost(
    executor_calls: Outcome,
    executor_tokens: Outcome,
    executor_cost: Outcome,
    *,
    per_calls: PositiveNumber = 10.0,
    per_tokens: PositiveNumber = float("inf"),
    per_cost: PositiveNumber = float("inf"),
) -> Outcome:
    """Minus the executor's calls, tokens and money of an episode, each in units of its option."""
    return -(executor_calls / per_calls + executor_tokens / per_tokens + executor_cost / per_cost)
