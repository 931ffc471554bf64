"""Steps of a flow as the service takes them, in one call each."""

import asyncio

from flowjax.dataflow.batches import Assigned, CreditedBatch
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.leases import ANYTHING, Capabilities
from flowjax.dataflow.ledger import Kind
from flowjax.records import Episode, Lease


def write_finished(flow: Flow) -> None:
    """Write the line of each evaluation that is over; beside the event loop where it runs."""
    if not flow.evaluations.unwritten():
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(flow.evaluations.write_finished())
    else:
        flow.evaluations.start_writing()


def lease(
    flow: Flow, worker: str, slots: int, kind: Kind | None = None, playable: Capabilities = ANYTHING
) -> list[Lease]:
    flow.groups.expire()
    write_finished(flow)
    return flow.leases.lease(
        worker,
        slots,
        Capabilities(playable.worlds, playable.policies, playable.kinds & {kind} if kind else playable.kinds),
    )


def accept_all(flow: Flow, played: list[tuple[str, Episode]], *, worker: str = "") -> list[bool]:
    counted = flow.groups.accept_all(played, worker=worker)
    write_finished(flow)
    return counted


def accept(flow: Flow, lease_id: str, episode: Episode) -> bool:
    """Take in one episode; False when it does not count."""
    return accept_all(flow, [(lease_id, episode)])[0]


def give_back(flow: Flow, lease_ids: list[str], error: str) -> None:
    flow.groups.give_back(lease_ids, error)
    write_finished(flow)


def take(flow: Flow, policy: str, step: int) -> Assigned | None:
    flow.groups.filter()
    return flow.batches.take(policy, step)


def credited(flow: Flow, policy: str, step: int) -> tuple[CreditedBatch, int] | None:
    """What turns the policy's version `step` into the next, and how many groups were dropped; None: wait."""
    taken = take(flow, policy, step)
    return None if taken is None else (flow.batches.credit(policy, step, taken.groups), taken.dropped)
