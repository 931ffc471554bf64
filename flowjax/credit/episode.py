"""Estimators that compare whole episodes: every turn of a trajectory gets the same advantage."""

from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flowjax.credit.segments import Norm, Number, first_rows, normalise, segment_statistics, segment_total, whiten
from flowjax.credit.table import TurnTable
from flowjax.fields import Interval


@partial(jax.jit, static_argnames=("norm",))
def grpo(table: TurnTable, *, norm: Norm = "mean_std") -> Float[Array, "turns"]:
    """A = (x - mean(group)) / (std(group) + 1e-6), x the trajectory's score. GRPO (arXiv 2402.03300), section 4.1.2.

    `norm="mean"` leaves the deviation out (Dr. GRPO, arXiv 2503.20783). Zero in a group of one. `published.gigpo.grpo`
    has the statistics over turns that several codebases take.
    """
    _, mean, deviation = segment_statistics(table.score, table.group, first_rows(table))
    return jnp.where(table.mask, normalise(table.score, mean, deviation, norm), 0.0)


@jax.jit
def dr_grpo(table: TurnTable) -> Float[Array, "turns"]:
    """A = x - mean(group): GRPO without the deviation, which favours easy and hard tasks. arXiv 2503.20783."""
    return grpo(table, norm="mean")


@jax.jit
def rloo(table: TurnTable) -> Float[Array, "turns"]:
    """A = x - mean of the others = n / (n - 1) (x - mean). Leave-one-out REINFORCE (arXiv 2402.14740).

    Zero in a group of one.
    """
    count, mean, _ = segment_statistics(table.score, table.group, first_rows(table))
    advantage = count / jnp.maximum(count - 1, 1) * (table.score - mean)
    return jnp.where(table.mask & (count > 1), advantage, 0.0)


@jax.jit
def reinforce_plus_plus_baseline(table: TurnTable) -> Float[Array, "turns"]:
    """x - mean(group), then whitened over all turns of the table. REINFORCE++-baseline (arXiv 2501.03262)."""
    centred = grpo(table, norm="mean")
    return jnp.where(table.mask, whiten(centred, table.mask), 0.0)


@jax.jit
def maxrl(table: TurnTable) -> Float[Array, "turns"]:
    """A = (x - mean(group)) / mean(group): the gradient of the log of the success rate. MaxRL (arXiv 2602.02710).

    For scores that are not negative. Rare successes weigh more than under GRPO; zero where the mean is not positive.
    """
    _, mean, _ = segment_statistics(table.score, table.group, first_rows(table))
    solved = mean > 0
    advantage = (table.score - mean) / jnp.where(solved, mean, 1.0)
    return jnp.where(table.mask & solved, advantage, 0.0)


@partial(jax.jit, static_argnames=("k",))
def pass_at_k(
    table: TurnTable, *, k: Annotated[int, Interval(at_least=1)] = 4, threshold: Number = 0.5
) -> Float[Array, "turns"]:
    """Advantage of a trajectory for the chance that at least one of k succeeds. arXiv 2508.10751.

    With N members of which F fail, R = 1 - C(F, k) / C(N, k) is the mean reward of all subsets of k and
    s = sqrt(R (1 - R)) its deviation; a success gets (1 - R) / s, a failure
    (1 - R - C(F - 1, k - 1) / C(N - 1, k - 1)) / s.
    Groups smaller than k use k = N. Success means a score above `threshold`.
    """
    succeeded = table.score > threshold
    members = first_rows(table)
    count = segment_total(members.astype(jnp.float32), table.group)
    failed = segment_total((members & ~succeeded).astype(jnp.float32), table.group)
    all_fail = _choose_ratio(failed, count, k, jnp.minimum(k, count))
    others_fail = _choose_ratio(failed - 1, count - 1, k - 1, jnp.minimum(k, count) - 1)
    spread = jnp.sqrt(all_fail * (1 - all_fail))
    gain = jnp.where(succeeded, all_fail, all_fail - others_fail)
    advantage = gain / jnp.where(spread > 0, spread, 1.0)
    return jnp.where(table.mask & (spread > 0), advantage, 0.0)


@partial(jax.jit, static_argnames=("norm",))
def best_of_group(table: TurnTable, *, norm: Norm = "mean") -> Float[Array, "turns"]:
    """Only the best member is trained, by its lead over the second best; ties give nothing. verl's GRPO pass@k.

    `norm="mean_std"` divides by the deviation of the group. Zero in a group of one.
    """
    members = first_rows(table)
    rows = table.score.shape[0]
    lowest = jnp.where(members, table.score, -jnp.inf)
    best = jnp.full(rows, -jnp.inf).at[table.group].max(lowest)[table.group]
    leads = members & (table.score == best)
    below = jnp.where(leads, -jnp.inf, lowest)
    second = jnp.full(rows, -jnp.inf).at[table.group].max(below)[table.group]
    alone_in_front = segment_total(leads.astype(jnp.float32), table.group) == 1
    earns = table.mask & (table.score == best) & alone_in_front & jnp.isfinite(second)
    _, _, deviation = segment_statistics(table.score, table.group, members)
    scale = 1.0 / (deviation + 1e-6) if norm == "mean_std" else 1.0
    return jnp.where(earns, (table.score - jnp.where(earns, second, 0.0)) * scale, 0.0)


def _choose_ratio(
    top: Float[Array, "rows"], bottom: Float[Array, "rows"], k: int, used: Float[Array, "rows"]
) -> Float[Array, "rows"]:
    """C(top, used) / C(bottom, used) as a product of at most k factors; zero when top < used."""
    ratio = jnp.ones_like(top)
    for j in range(k):
        factor = jnp.maximum(top - j, 0) / jnp.maximum(bottom - j, 1)
        ratio = jnp.where(j < used, ratio * factor, ratio)
    return ratio
