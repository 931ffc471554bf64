"""Speaks to the dataflow: leases in, trajectories out. A dataflow that is being restarted is waited for."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from flowjax.monitor.token import bearer
from flowjax.records import Episode, Lease, WireError, pack, unpack

_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_ANSWER_TIMEOUT_S = 30.0
_BUSY = 429


class DataflowError(RuntimeError):
    """The dataflow refuses a message or has been away for too long; the message says what to look at."""


class DataflowClient:
    """Client of one dataflow, as the worker of that name. Use as an async context manager.

    Args:
        url: of the dataflow.
        worker: who holds the leases.
        away_s: how long the dataflow may be away before a call fails.
        token: of the run, where its dataflow listens beyond loopback.
    """

    def __init__(self, url: str, *, worker: str, away_s: float, token: str = ""):
        self._url, self._worker, self._away_s = url.rstrip("/"), worker, away_s
        self._headers = {"Content-Type": "application/msgpack", **bearer(token)}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "DataflowClient":
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def lease(self, slots: int, can: Mapping[str, Sequence[str]] | None = None) -> tuple[list[Lease], float]:
        """Up to `slots` episodes to play, and the seconds to wait before asking again.

        `can` says what this worker plays: `worlds` (of tasks), `policies`, `kinds`; what it leaves out is anything.
        """
        answer = await self._call("lease", slots=slots, **({"can": dict(can)} if can else {}))
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

    async def _call(self, name: str, **message: Any) -> dict[str, Any]:
        assert self._session is not None, "use the client in `async with`"
        body, started_s, pause_s = pack({"worker": self._worker, **message}), time.monotonic(), _FIRST_RETRY_S
        while True:
            try:
                async with self._session.post(f"{self._url}/{name}", data=body, headers=self._headers) as response:
                    status, answer = response.status, unpack(await response.read())
                if status == _BUSY:  # the trainer is behind: not a fault, however long it lasts
                    started_s = time.monotonic()
                elif status < 500:
                    break
                problem = f"HTTP {status}: {answer.get('error')}"
            except (aiohttp.ClientError, OSError, WireError) as error:  # TimeoutError is an OSError
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() - started_s > self._away_s:
                raise DataflowError(
                    f"the dataflow at {self._url} has not answered for {self._away_s:.0f} s ({problem}): "
                    "see logs/dataflow.log"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)
        if status != 200:
            raise DataflowError(f"the dataflow refuses /{name} (HTTP {status}): {answer.get('error')}")
        return answer
