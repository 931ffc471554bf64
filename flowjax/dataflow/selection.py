"""Which of the groups at hand a batch is made of."""

from collections.abc import Sequence

from flowjax.dataflow.algorithms.base import Candidate
from flowjax.dataflow.algorithms.chain import Chain
from flowjax.dataflow.ledger import PolicyGroup, Selection


def select(
    algorithms: Chain,
    ready: Sequence[PolicyGroup],
    used: Sequence[PolicyGroup],
    *,
    step: int,
    groups: int,
    max_staleness: int,
) -> Selection:
    """The groups of batch `step`, and those that no batch may have: too old, or of a version that its trainer has lost
    and will make anew."""
    known = [group for group in ready if group.newest_version <= step]
    fresh = [group for group in known if step - group.oldest_version <= max_staleness]
    dropped = {
        "too_old": [group.group_id for group in known if step - group.oldest_version > max_staleness],
        "lost_version": [group.group_id for group in ready if group.newest_version > step],
    }
    chosen = algorithms.serve(_candidates(fresh, step), _candidates(used, step), groups)
    return ([each.group_id for each in chosen[:groups]] if len(chosen) >= groups else None), dropped


def count_replayed(algorithms: Chain, used: Sequence[PolicyGroup], *, step: int, groups: int) -> int:
    """How many groups of batch `step` would be ones that were trained on before."""
    if algorithms.fresh_share == 1:
        return 0
    return min(len(algorithms.serve([], _candidates(used, step), groups)), groups)


def _candidates(policy_groups: Sequence[PolicyGroup], step: int) -> list[Candidate]:
    return [Candidate(each.group_id, each.arrival, step - each.oldest_version, each.batches) for each in policy_groups]
