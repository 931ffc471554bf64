"""Which of the groups at hand a batch is made of."""

from collections.abc import Sequence

from flowjax.dataflow.algorithms.base import Candidate
from flowjax.dataflow.algorithms.chain import Chain
from flowjax.dataflow.ledger_queries import Stream
from flowjax.dataflow.ledger_streams import Selection


def select(
    algorithms: Chain, ready: Sequence[Stream], used: Sequence[Stream], *, step: int, groups: int, max_staleness: int
) -> Selection:
    """The groups of batch `step`, and those that no batch may have: too old, or of a version that its trainer has lost
    and will make anew."""
    known = [stream for stream in ready if stream.newest_version <= step]
    fresh = [stream for stream in known if step - stream.oldest_version <= max_staleness]
    dropped = {
        "too_old": [stream.group_id for stream in known if step - stream.oldest_version > max_staleness],
        "lost_version": [stream.group_id for stream in ready if stream.newest_version > step],
    }
    chosen = algorithms.serve(_candidates(fresh, step), _candidates(used, step), groups)
    return ([each.group_id for each in chosen[:groups]] if len(chosen) >= groups else None), dropped


def count_replayed(algorithms: Chain, used: Sequence[Stream], *, step: int, groups: int) -> int:
    """How many groups of batch `step` would be ones that were trained on before."""
    if algorithms.fresh_share == 1:
        return 0
    return min(len(algorithms.serve([], _candidates(used, step), groups)), groups)


def _candidates(streams: Sequence[Stream], step: int) -> list[Candidate]:
    return [Candidate(each.group_id, each.arrival, step - each.oldest_version, each.batches) for each in streams]
