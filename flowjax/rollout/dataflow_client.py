"""Speaks to the dataflow as a worker: leases in, trajectories out."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowjax.broker import Answer, Broker
from flowjax.records import Episode, Lease


class DataflowClient:
    """Client of one dataflow, as the worker of that name. Each call raises `DataflowError` as `Broker.call` does.

    Args:
        broker: to the dataflow.
        worker: who holds the leases.
        away_s: how long the dataflow may be away before a call fails.
    """

    def __init__(self, broker: Broker, *, worker: str, away_s: float):
        self._broker, self._worker, self._away_s = broker, worker, away_s

    async def lease(self, slots: int, playable: Mapping[str, Sequence[str]] | None = None) -> tuple[list[Lease], float]:
        """Up to `slots` episodes to play, and the seconds to wait before asking again.

        `can` says what this worker plays: `worlds` (of tasks), `policies`, `kinds`; what it leaves out is anything.
        """
        answer = await self._call("lease", slots=slots, **({"can": dict(playable)} if playable else {}))
        return answer["leases"], answer["retry_s"]

    async def renew(self, lease_ids: Sequence[str]) -> list[str]:
        """Put deadlines off. Returns the leases that are no longer ours."""
        return (await self._call("renew", lease_ids=list(lease_ids)))["lost"]

    async def push(self, items: Sequence[tuple[str, Episode]]) -> int:
        """Hand over played episodes with their leases. Returns how many count; sending one twice does no harm."""
        described = [{"lease_id": lease_id, "episode": episode} for lease_id, episode in items]
        return (await self._call("episodes", items=described))["accepted"]

    async def give_back(self, lease_ids: Sequence[str], error: str) -> None:
        """Return episodes unplayed; with an error, that counts as one of the attempts that an episode has."""
        await self._call("give_back", lease_ids=list(lease_ids), error=error)

    async def report_versions(self, policy: str, serving: int, in_use: Sequence[int]) -> int:
        """Say what the engine serves. Returns the oldest version that may still be asked for."""
        answer = await self._call("versions", policy=policy, serving=serving, in_use=list(in_use))
        return answer["oldest_needed"]

    async def _call(self, name: str, **message: Any) -> Answer:
        return await self._broker.call(name, {"worker": self._worker, **message}, away_s=self._away_s)
