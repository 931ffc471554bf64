"""Complete groups -> rewards -> credit -> the token rows that a trainer sees."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowjax.credit.estimators import credit_parts, estimate
from flowjax.credit.table import build_table
from flowjax.monitor.transcripts import Credit
from flowjax.records import Group, TokenRow, Trajectory
from flowjax.rewards.scores import trajectory_scores


@dataclass(frozen=True, slots=True)
class CreditedBatch:
    """The rows to train on, and sums over the batch for the log.

    `totals`: groups, groups_without_signal (all of whose rewards are equal), episodes, turns, invalid_turns, reward,
    success, sampled_tokens, cut_turns (whose reply reached the limit of tokens), and one `reward/<component>` each.
    `credits` are those of all trajectories, in the order of the groups.
    """

    rows: Sequence[TokenRow]
    totals: Mapping[str, float]
    credits: Sequence[Credit] = ()


def credit_batch(
    groups: Sequence[Group],
    *,
    components: Mapping[str, float],
    estimator: str,
    options: Mapping[str, Any],
    trained: Sequence[bool] | np.ndarray | None = None,
    with_parts: bool = False,
) -> CreditedBatch:
    """Reward and credit the groups of a batch in one call, and lay their turns out as token rows.

    One call for all of them, because some estimators take statistics over the batch (REINFORCE++). Trajectories that
    are not `trained` count in the statistics and have no rows; by default all are. `with_parts`: the credits have the
    parts of their advantages, for people.
    """
    scores, parts = trajectory_scores(groups, components)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    table = build_table(groups, scores)
    advantages = np.asarray(estimate(table, estimator, **options))
    advantage_parts = credit_parts(table, estimator, **options) if with_parts else {}
    advantage_parts = {name: np.asarray(part) for name, part in advantage_parts.items()}
    rows, credits, start = [], [], 0
    for index, (trajectory, has_rows) in enumerate(
        zip(trajectories, [True] * len(trajectories) if trained is None else trained, strict=True)
    ):
        span = slice(start, start + len(trajectory.turns))
        if has_rows:
            rows += token_rows(trajectory, advantages[span])
        paid = {name: float(values[index]) for name, values in parts.items()}
        spans = {name: part[span] for name, part in advantage_parts.items()}
        credits.append(Credit(float(scores[index]), paid, advantages[span], spans))
        start = span.stop
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    totals = {
        "groups": len(groups),
        "groups_without_signal": _without_signal(groups, np.asarray(scores)),
        "episodes": len(trajectories),
        "turns": start,
        "invalid_turns": sum(not turn.valid for turn in turns),
        "sampled_tokens": sum(len(turn.sampled_ids) for turn in turns),
        "cut_turns": sum(turn.finish_reason == "length" for turn in turns),
        "reward": float(scores.sum()),
        "success": sum(trajectory.outcome.get("success", 0.0) for trajectory in trajectories),
        **{f"reward/{name}": float(values.sum()) for name, values in parts.items()},
    }
    return CreditedBatch(rows, totals, credits)


def _without_signal(groups: Sequence[Group], scores: np.ndarray) -> int:
    """Groups whose rewards are all equal: estimators that compare the members of a group learn nothing from them."""
    ends = np.cumsum([len(group.trajectories) for group in groups])
    return sum(bool(np.ptp(part) == 0) for part in np.split(scores, ends[:-1]) if len(part))


def token_rows(trajectory: Trajectory, advantages: Sequence[float] | np.ndarray) -> list[TokenRow]:
    """The turns of a trajectory as rows, one advantage per turn spread over its sampled tokens.

    A turn whose prompt begins with exactly the tokens of its policy's row so far extends that row (append mode);
    any other starts a new one (window mode).
    """
    open_rows: dict[str, list[tuple[np.ndarray, ...]]] = {}
    closed: list[TokenRow] = []
    for turn, advantage in zip(trajectory.turns, advantages, strict=True):
        so_far = open_rows.get(turn.policy)
        known = np.concatenate([part[0] for part in so_far]) if so_far else np.zeros(0, np.int32)
        if so_far and not np.array_equal(turn.prompt_ids[: len(known)], known):
            closed.append(_join(turn.policy, so_far))
            so_far, known = None, known[:0]
        prompt, sampled = turn.prompt_ids[len(known) :], turn.sampled_ids
        nothing = np.zeros(len(prompt), np.float32)
        spans = so_far or []
        spans.append((prompt, nothing.astype(bool), nothing, nothing, np.full(len(prompt), -1, np.int32)))
        spans.append(
            (
                sampled,
                np.ones(len(sampled), bool),
                turn.logprobs,
                np.full(len(sampled), advantage, np.float32),
                np.full(len(sampled), turn.version, np.int32),
            )
        )
        open_rows[turn.policy] = spans
    rows = closed + [_join(policy, spans) for policy, spans in open_rows.items()]
    sampled_tokens: Counter[str] = Counter()
    for turn in trajectory.turns:
        sampled_tokens[turn.policy] += len(turn.sampled_ids)
    names = {"trajectory_id": trajectory.trajectory_id}
    return [replace(row, trajectory_tokens=sampled_tokens[row.policy], **names) for row in rows]


def _join(policy: str, spans: Sequence[tuple[np.ndarray, ...]]) -> TokenRow:
    tokens, sampled, logprobs, advantages, versions = (np.concatenate(column) for column in zip(*spans, strict=True))
    return TokenRow(policy, tokens, sampled, logprobs, advantages, versions)
