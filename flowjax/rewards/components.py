"""The parts that a reward is the weighted sum of. Each is a pure function of outcome arrays.

A component's positional arguments are named after the outcomes that it reads; keyword-only arguments are its options.
"""

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real

from flowjax.fields import Interval

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

    w is 1, or with `balanced` min(most_weight, 1/2 / share of answers that are as right or wrong as this one), shares
    being those of the trajectories that are scored together. While no w is bounded, the mean is the balanced accuracy:
    approving every answer pays no more than guessing, however many of them are right.
    """
    right = answer_right > 0.5
    share = jnp.where(right, right.mean(), 1.0 - right.mean())
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
    released = structure >= release_at - 1e-6  # the default weights may add up to just below 1
    return base + structure + jnp.where(released, correctness, 0.0)


def executor_cost(
    executor_calls: Outcome,
    executor_tokens: Outcome,
    executor_cost: Outcome,
    *,
    per_calls: Number = 10.0,
    per_tokens: Number = float("inf"),
    per_cost: Number = float("inf"),
) -> Outcome:
    """Minus what the executor was asked for in an episode: calls, tokens and money, each in units of its option."""
    return -(executor_calls / per_calls + executor_tokens / per_tokens + executor_cost / per_cost)
