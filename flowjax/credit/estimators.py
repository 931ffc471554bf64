"""Estimators by name: those of this file, the published ones, and your own by `package.module:function`.

Some compare whole episodes, some look forward from each turn, and some use the states that a group's episodes went
through: RewardFlow, and GAE with these states' values as its critic.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flowjax.credit import ESTIMATORS, PASS_AT_K
from flowjax.credit.table import (
    ROUNDING,
    Discount,
    Norm,
    Number,
    TurnTable,
    Weight,
    discounted_sums,
    episode_weights,
    fault_at_trial,
    first_rows,
    is_last_turn,
    normalise,
    segment_statistics,
    segment_total,
    state_visits,
    whiten,
)
from flowjax.fields import Interval, declared_types, load_named, nearest, option_problems

Estimator = Callable[..., Float[Array, "turns"]]


class CreditError(ValueError):
    """An estimator or an option that does not exist, does not fit or fails; the message names field and remedy."""


@functools.cache
def get_estimator(name: str) -> Estimator:
    """The estimator of that name, or the function at `package.module:function`.

    Raises:
        CreditError: there is none.
    """
    if name not in ESTIMATORS and ":" not in name:
        raise CreditError(
            f"config.credit.name is {name!r}{nearest(name, ESTIMATORS)}; known are {', '.join(ESTIMATORS)}, "
            "or package.module:function for your own"
        )
    return load_named("config.credit.name", ESTIMATORS.get(name, name), CreditError)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown estimator, an unknown option, a value that the option does not take, or a user's estimator that
    fails on a small table.

    Raises:
        CreditError: with the field, the value and what to write instead.
    """
    _check_declared(name, options)
    if ":" in name:
        _check_tried(name, options)


def _check_declared(name: str, options: Mapping[str, Any]) -> None:
    function = get_estimator(name)
    parameters = inspect.signature(function).parameters.values()
    # Options are keyword-only; what comes by position is the table of turns.
    positional = {each.name for each in parameters if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)}
    declared = {option: kind for option, kind in declared_types(function).items() if option not in positional}
    for problem in option_problems("config.credit.options", options, declared, repr(name)):
        raise CreditError(problem)


def _check_tried(name: str, options: Mapping[str, Any]) -> None:
    """Raise CreditError if an estimator fails at a trial."""
    try:
        why = fault_at_trial(lambda table: np.asarray(estimate(table, name, **options)))
    except Exception as error:  # it may fail in any way
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        why = f"fails on a table of five episodes with scores 0 and 1 ({said})"
    if why:
        raise CreditError(
            f"config.credit.name is {name!r}, which {why}: give a function of the table, with keyword-only options, to "
            "one finite number per row"
        )


def credit_parts(table: TurnTable, name: str, **options: Any) -> dict[str, Float[Array, "turns"]]:
    """The result of `estimate` in two parts, "episode" and "step", for shipped estimators that add them with a
    `step_weight`; {} for others, whose option of that name may mean anything."""
    if ":" in name or "step_weight" not in inspect.signature(get_estimator(name)).parameters:
        return {}
    episode = estimate(table, name, **{**options, "step_weight": 0.0})
    return {"episode": episode, "step": estimate(table, name, **options) - episode}


def estimate(table: TurnTable, name: str, **options: Any) -> Float[Array, "turns"]:
    """Advantage of each row of `table`; zero on rows that do not count.

    Raises:
        CreditError: an unknown estimator or option, or a value that the option does not take; arrays are not looked at.
    """
    _check_declared(name, {option: value for option, value in options.items() if not isinstance(value, jax.Array)})
    return jnp.asarray(get_estimator(name)(table, **options), jnp.float32)  # NumPy puts no bfloat16 beside others


# ------------------------------------------------------------------------------------------------------- whole episodes

# These compare whole episodes: every turn of a trajectory gets the same advantage.


@partial(jax.jit, static_argnames=("norm",))
def grpo(table: TurnTable, *, norm: Norm = "mean_std") -> Float[Array, "turns"]:
    """A = (x - mean(group)) / (std(group) + 1e-6), x the trajectory's score. GRPO (arXiv 2402.03300), section 4.1.2.

    Mean and deviation are over episodes: one with several parts weighs no more than one without. `norm="mean"` leaves
    the deviation out (Dr. GRPO, arXiv 2503.20783). Zero in a group of one. `published.credit.grpo` has the statistics
    over turns that several codebases take.
    """
    _, mean, deviation = segment_statistics(table.score, table.group, episode_weights(table))
    return jnp.where(table.mask, normalise(table.score, mean, deviation, norm), 0.0)


@jax.jit
def dr_grpo(table: TurnTable) -> Float[Array, "turns"]:
    """A = x - mean(group): GRPO without the division by the deviation, which favours easy and hard tasks.

    Dr. GRPO (arXiv 2503.20783).
    """
    return grpo(table, norm="mean")


@jax.jit
def rloo(table: TurnTable) -> Float[Array, "turns"]:
    """A = x - mean of the other episodes. Leave-one-out REINFORCE (arXiv 2402.14740).

    Of n episodes without parts that is n / (n - 1) (x - mean). Where an episode has several, their mean y is left out
    of the baseline, and an episode weighs once: x - (n mean - y) / (n - 1). Zero in a group of one.
    """
    weights = episode_weights(table)
    count, mean, _ = segment_statistics(table.score, table.group, weights)
    _, episode_mean, _ = segment_statistics(table.score, table.episode, weights)
    advantage = (count * (table.score - mean) + episode_mean - table.score) / jnp.maximum(count - 1, 1)
    return jnp.where(table.mask & (count > 1), advantage, 0.0)


@jax.jit
def reinforce_plus_plus_baseline(table: TurnTable) -> Float[Array, "turns"]:
    """x - mean(group), then whitened over all turns of the table. REINFORCE++-baseline (arXiv 2501.03262)."""
    centred = grpo(table, norm="mean")
    return jnp.where(table.mask, whiten(centred, table.mask), 0.0)


@jax.jit
def maxrl(table: TurnTable) -> Float[Array, "turns"]:
    """A = (x - mean(group)) / mean(group): the gradient of the log of the success rate. MaxRL (arXiv 2602.02710).

    Rare successes weigh more than under GRPO; zero where the mean is zero. The mean stands for a success rate, so in a
    group with scores below zero (penalties) it is counted from the lowest score: else it might be near or below zero.
    """
    members = first_rows(table)
    _, mean, _ = segment_statistics(table.score, table.group, episode_weights(table))
    lowest = jnp.zeros_like(table.score).at[table.group].min(jnp.where(members, table.score, 0.0))[table.group]
    rate = mean - lowest
    largest = jnp.zeros_like(rate).at[table.group].max(jnp.where(members, jnp.abs(table.score), 0.0))[table.group]
    differ = rate > ROUNDING * largest
    advantage = (table.score - mean) / jnp.where(differ, rate, 1.0)
    return jnp.where(table.mask & differ, advantage, 0.0)


@partial(jax.jit, static_argnames=("k",))
def pass_at_k(
    table: TurnTable, *, k: Annotated[int, Interval(at_least=1)] = PASS_AT_K, threshold: Number = 0.5
) -> Float[Array, "turns"]:
    """Advantage of a trajectory for the chance that at least one of k succeeds. arXiv 2508.10751.

    With N members of which F fail, R = 1 - C(F, k) / C(N, k) is the mean reward of all subsets of k and
    s = sqrt(R (1 - R)) its deviation; a success gets (1 - R) / s, a failure
    (1 - R - C(F - 1, k - 1) / C(N - 1, k - 1)) / s.
    Zero in a group of k or fewer: it has one such subset, so the reward has no deviation. Success means a score above
    `threshold`.
    """
    succeeded = table.score > threshold
    members = first_rows(table)
    count = segment_total(members.astype(jnp.float32), table.group)
    failed = segment_total((members & ~succeeded).astype(jnp.float32), table.group)
    # 1 - R: all of a subset fail; and the same for the k - 1 others of a subset that a failure is in.
    all_fail = _choose_ratio(failed, count, k, jnp.minimum(k, count))
    others_fail = _choose_ratio(failed - 1, count - 1, k - 1, jnp.minimum(k, count) - 1)
    spread = jnp.sqrt(all_fail * (1 - all_fail))
    gain = jnp.where(succeeded, all_fail, all_fail - others_fail)
    advantage = gain / jnp.where(spread > 0, spread, 1.0)
    return jnp.where(table.mask & (spread > 0), advantage, 0.0)


@partial(jax.jit, static_argnames=("norm",))
def best_of_group(table: TurnTable, *, norm: Literal["mean", "mean_std"] = "mean") -> Float[Array, "turns"]:
    """Only the best member is trained, by its lead over the second best; ties give nothing. verl's GRPO pass@k.

    `norm="mean_std"` divides by the deviation of the group. Zero in a group of one.
    """
    members = first_rows(table)
    rows = table.score.shape[0]
    scores = jnp.where(members, table.score, -jnp.inf)  # other rows never are the maximum
    best = jnp.full(rows, -jnp.inf).at[table.group].max(scores)[table.group]
    in_front = best - table.score <= ROUNDING * jnp.abs(best)
    leads = members & in_front
    below = jnp.where(leads, -jnp.inf, scores)
    second = jnp.full(rows, -jnp.inf).at[table.group].max(below)[table.group]
    alone_in_front = segment_total(leads.astype(jnp.float32), table.group) == 1
    # In a group of one there is no second: -inf. It must not enter the arithmetic, where 0 * inf would be NaN.
    earns = table.mask & in_front & alone_in_front & jnp.isfinite(second)
    _, _, deviation = segment_statistics(table.score, table.group, members)
    scale = 1.0 / (deviation + 1e-6) if norm == "mean_std" else 1.0
    return jnp.where(earns, (table.score - jnp.where(earns, second, 0.0)) * scale, 0.0)


def _choose_ratio(
    top: Float[Array, "rows"], bottom: Float[Array, "rows"], k: int, used: Float[Array, "rows"]
) -> Float[Array, "rows"]:
    """C(top, used) / C(bottom, used) as a product of at most k factors; zero when top < used."""
    # A loop of k steps for all rows, masked beyond `used`: how many a row needs is not known while tracing.
    ratio = jnp.ones_like(top)
    for j in range(k):
        factor = jnp.maximum(top - j, 0) / jnp.maximum(bottom - j, 1)
        ratio = jnp.where(j < used, ratio * factor, ratio)
    return ratio


# -------------------------------------------------------------------------------------------------------------- returns

# These look forward from each turn: discounted returns, REINFORCE++, GiGPO.

Rewards = Literal["score", "reward"]


def turn_rewards(table: TurnTable, rewards: Rewards) -> Float[Array, "turns"]:
    """Reward of each turn: the environment's, or the trajectory's score all at its last turn."""
    if rewards == "reward":
        return jnp.where(table.mask, table.reward, 0.0)
    return jnp.where(table.mask & is_last_turn(table), table.score, 0.0)


@partial(jax.jit, static_argnames=("rewards", "norm"))
def discounted_return(
    table: TurnTable, *, gamma: Discount = 0.95, rewards: Rewards = "score", norm: Norm = "mean"
) -> Float[Array, "turns"]:
    """G_t = r_t + gamma G_{t+1} over the turns of a trajectory, centred over all turns of the group."""
    value = discounted_sums(turn_rewards(table, rewards), table.successor, gamma)
    _, mean, deviation = segment_statistics(value, table.group, table.mask)
    return jnp.where(table.mask, normalise(value, mean, deviation, norm), 0.0)


@partial(jax.jit, static_argnames=("rewards",))
def reinforce_plus_plus(
    table: TurnTable, *, gamma: Discount = 1.0, rewards: Rewards = "score"
) -> Float[Array, "turns"]:
    """Discounted return, whitened over all turns of the table. REINFORCE++ (arXiv 2501.03262), turns as actions."""
    value = discounted_sums(turn_rewards(table, rewards), table.successor, gamma)
    return jnp.where(table.mask, whiten(value, table.mask), 0.0)


@partial(jax.jit, static_argnames=("rewards", "norm"))
def gigpo(
    table: TurnTable,
    *,
    gamma: Discount = 0.95,
    step_weight: Weight = 1.0,
    invalid_penalty: Weight = 0.0,
    rewards: Rewards = "reward",
    norm: Norm = "mean",
) -> Float[Array, "turns"]:
    """A = A_episode + w A_step. GiGPO (arXiv 2505.10978).

    A_step compares a turn's return G_t = r_t + gamma G_{t+1} with those of all turns of the group that started in the
    same state; a turn with no such companion gets zero. A_episode is `grpo`.

    Args:
        table: the turns.
        gamma: discount per turn.
        step_weight: w.
        invalid_penalty: subtracted from the return of a turn whose reply could not be read, and from no other turn's.
        rewards: the environment's rewards, or the score at the last turn.
        norm: of both parts.
    """
    value = discounted_sums(turn_rewards(table, rewards), table.successor, gamma)
    # After the sum, not before: a penalty inside it would also blame the turns that led here.
    value = value - invalid_penalty * ~table.valid
    _, mean, deviation = segment_statistics(value, state_visits(table), table.mask)
    step_part = normalise(value, mean, deviation, norm)
    return jnp.where(table.mask, grpo(table, norm=norm) + step_weight * step_part, 0.0)


# ---------------------------------------------------------------------------------------- state graphs: RewardFlow, GAE

# Differences and deviations of the step part below this share of the group's highest value are rounding, not signal.
_ROUNDED = 1e-4
# Values have converged once a sweep moves none of them by more than this share of its group's highest one.
_TOLERANCE = 1e-6


class StateValues(NamedTuple):
    """Values of the states around each turn, and what the turn itself earned."""

    before: Float[Array, "turns"]  # value of the state that the turn started in
    after: Float[Array, "turns"]  # value of the state in which the trajectory's next turn starts; zero after the last
    earned: Float[Array, "turns"]  # reward of the turn: by default the trajectory's score, all at its last turn


@partial(jax.jit, static_argnames=("rewards", "episode_norm", "step_norm"))
def rewardflow(
    table: TurnTable,
    *,
    gamma: Discount = 0.9,
    step_weight: Weight = 1.0,
    rewards: Rewards = "score",
    invalid_penalty: Weight = 0.0,
    episode_norm: Norm = "mean_std",
    step_norm: Norm = "mean_std",
) -> Float[Array, "turns"]:
    """A = A_episode + w A_step, A_step from the values of the states of the merged graph. After arXiv 2603.18859.

    A_step of a turn s -> s' is d = r + gamma V(s') - V(s), V the policy's own value of a state (`state_values`), over
    the deviation of d within the group. In every state the mean of d is zero. With `rewards="score"`, d of a turn that
    changes nothing and is not its episode's last is -(1 - gamma) V(s), never above zero; with `rewards="reward"` it is
    r - (1 - gamma) V(s), above zero where going on costs more than standing still.
    `flowjax.published.credit` has the published form, in which V is the best discounted reward that any sibling
    reached; `docs/credit/rewardflow.md` says why it is not used here.

    Args:
        table: the turns.
        gamma: discount per turn.
        step_weight: w.
        rewards: the trajectory's score at its last turn, or the environment's reward of every turn.
        invalid_penalty: subtracted from d of a turn whose reply could not be read, before d is scaled.
        episode_norm: scale of the episode part.
        step_norm: scale of the step part; "mean" is "none" here, since d has a mean of zero but for the penalty.
    """
    found = state_values(table, gamma=gamma, rewards=rewards)
    credit = _differences(table, found, gamma) - invalid_penalty * ~table.valid
    if step_norm == "mean_std":
        _, _, deviation = segment_statistics(credit, table.group, table.mask)
        highest = _highest(table, found.before)
        # Zero where nothing was earned and nothing reached: 0 / 1, not 0 / 0.
        floor = _ROUNDED * highest
        credit = credit / jnp.where(deviation + floor > 0, deviation + floor, 1.0)
    return jnp.where(table.mask, grpo(table, norm=episode_norm) + step_weight * credit, 0.0)


@partial(jax.jit, static_argnames=("rewards",))
def step_credit(table: TurnTable, *, gamma: Discount = 0.9, rewards: Rewards = "score") -> Float[Array, "turns"]:
    """r + gamma V(s') - V(s) of each turn, the temporal difference under the policy's own values."""
    return _differences(table, state_values(table, gamma=gamma, rewards=rewards), gamma)


def _differences(table: TurnTable, found: StateValues, gamma: Discount) -> Float[Array, "turns"]:
    credit = jnp.where(table.mask, found.earned + gamma * found.after - found.before, 0.0)
    # A group of rounding alone has no credit: over a deviation that is rounding, too, it would look like some.
    return jnp.where(_highest(table, credit) > _ROUNDED * _highest(table, found.before), credit, 0.0)


@partial(jax.jit, static_argnames=("rewards",))
def state_values(table: TurnTable, *, gamma: Discount = 0.9, rewards: Rewards = "score") -> StateValues:
    """Expected discounted return of the policy from each state, estimated from all turns of the group at once.

    V(s) = mean over the group's turns from s of r + gamma V(s'): the exact values of the Markov process whose
    transitions are the observed ones (the batch TD(0) solution: Sutton & Barto 2018, section 6.3). s' is the state in
    which the *same policy* acts next, so that other agents' turns are part of its environment. An episode cut at the
    turn limit ends like any other.

    Scores are counted from the lowest of the group where that is negative: otherwise, with a discount, it would pay to
    delay a bad end.
    """
    earned = turn_rewards(table, rewards)
    last = is_last_turn(table)
    if rewards == "score":
        lowest = jnp.zeros_like(earned).at[table.group].min(jnp.where(table.mask, table.score, 0.0))[table.group]
        above = earned - lowest
        # A score that is above the lowest by rounding alone is no better: divided by a deviation that is rounding, too,
        # it would look like a success.
        earned = jnp.where(table.mask & last & (above > ROUNDING * _highest(table, table.score)), above, 0.0)
    state = state_visits(table)
    visits = segment_total(table.mask.astype(earned.dtype), state)

    def after(values: Float[Array, "turns"]) -> Float[Array, "turns"]:
        return jnp.where(last, 0.0, values[table.successor])

    def sweep(values: Float[Array, "turns"]) -> Float[Array, "turns"]:
        returns = jnp.where(table.mask, earned + gamma * after(values), 0.0)
        return segment_total(returns, state) / jnp.maximum(visits, 1)

    # Every observed path leads to an end, so this converges for gamma = 1 too. What another episode earns n turns on
    # takes n sweeps to arrive, so the bound grows with the table. It only guards against rounding that goes back and
    # forth, and against long undiscounted walks in which every cycle has an even length: values oscillate there.
    bound = 10 * earned.shape[0] + 1000

    def changing(carry: tuple[Float[Array, "turns"], Float[Array, "turns"], Int[Array, ""]]) -> Bool[Array, ""]:
        values, previous, sweeps = carry
        moved = jnp.abs(values - previous) > _TOLERANCE * _highest(table, values)
        return jnp.any(moved & table.mask) & (sweeps < bound)

    # Start from each state's mean return, which is its value already where all paths earn the same. Sweeps from zero
    # would stop just short of it in states with many loops, and the rest would be credit where none is due.
    returns = discounted_sums(earned, table.successor, gamma)
    start = segment_total(jnp.where(table.mask, returns, 0.0), state) / jnp.maximum(visits, 1)
    carry = (sweep(start), start, jnp.asarray(1))
    before, _, _ = jax.lax.while_loop(changing, lambda carry: (sweep(carry[0]), carry[0], carry[2] + 1), carry)
    before = jnp.where(table.mask, before, 0.0)
    return StateValues(before, after(before), earned)


@partial(jax.jit, static_argnames=("rewards", "whitened"))
def gae(
    table: TurnTable,
    *,
    gamma: Discount = 0.95,
    trace: Discount = 0.9,
    rewards: Rewards = "score",
    whitened: bool = True,
) -> Float[Array, "turns"]:
    """A_t = d_t + gamma trace A_{t+1} across turns, the state graph as critic. GAE (arXiv 1506.02438), eq. 16.

    d is `step_credit`, and trace is GAE's lambda: 0 gives d itself, 1 the turn's discounted return less its state's
    value. `whitened` brings the result to zero mean and unit variance over the table.
    """
    errors = step_credit(table, gamma=gamma, rewards=rewards)
    advantage = discounted_sums(errors, table.successor, gamma * trace)
    if whitened:
        advantage = whiten(advantage, table.mask)
    return jnp.where(table.mask, advantage, 0.0)


def _highest(table: TurnTable, values: Float[Array, "turns"]) -> Float[Array, "turns"]:
    """The largest absolute value among the counted rows of each row's group."""
    largest = jnp.zeros_like(values).at[table.group].max(jnp.where(table.mask, jnp.abs(values), 0.0))
    return largest[table.group]
