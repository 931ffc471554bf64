"""Transport of messages to the dataflow and of its answers. Nothing above knows how they travel: one way is HTTP.

Messages and answers are maps as docs/dataflow.md lists them, packed by `flowjax.records`; `DataflowClient` has those of
a worker as calls.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

from flowjax.config import ConfigError
from flowjax.monitor.token import bearer, known_run_id, known_token, of_run
from flowjax.monitor.trouble import explain, telling_socket
from flowjax.records import Episode, Lease, WireError, pack, unpack
from flowjax.run import read_endpoints

Answer = dict[str, Any]
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_ANSWER_TIMEOUT_S = 60.0
_LACKING_S = 10.0  # longest that a process that is short of files or memory asks again: a restart may help it
_BUSY, _SUPERSEDED, _EVICTED, _OTHER_RUN = 429, 409, 403, 410


class DataflowError(RuntimeError):
    """The dataflow refuses a message or has been away for too long; the message says what to look at."""


class Superseded(DataflowError):
    """A trainer that was started later has the policy; says what this one is to do."""


class Evicted(DataflowError):
    """This worker was sent away from the run, or another run is at the address now: it must not ask again."""


class Busy(Exception):
    """The dataflow has no room yet for the content of a message; says why."""


class Unanswered(Exception):
    """A message or its answer was lost on the way, or the dataflow failed over it; says how."""


class Broker(Protocol):
    """Carries messages to one dataflow. Calls may run beside each other."""

    async def call(self, name: str, message: Mapping[str, Any], *, away_s: float) -> Answer:
        """The dataflow's answer to the message of that name.

        It is sent again until it is answered, so the dataflow may see it twice: every message is idempotent. If the
        dataflow has no room for it, it waits until there is some, however long that lasts.

        Args:
            away_s: how long the dataflow may be away.

        Raises:
            DataflowError: the dataflow refuses the message, or was away for longer.
        """
        ...


Connect = Callable[[], AbstractAsyncContextManager[Broker]]


@contextlib.asynccontextmanager
async def connect(address: str | Callable[[], str], *, token: str = "", run_id: str = "") -> AsyncIterator[Broker]:
    """The broker to the dataflow at `address`, chosen by its scheme.

    Args:
        address: `dataflow` in the run's endpoints.json, or a function that gives the present one (`Address`).
        token: of the run, where its dataflow listens beyond loopback.
        run_id: of the run that is meant; another one at that address refuses the messages.

    Raises:
        ConfigError: there is no broker for that scheme.
    """
    where = address if callable(address) else lambda: address
    if urlsplit(where()).scheme not in ("http", "https"):
        raise ConfigError(f"dataflow is {where()!r} in endpoints.json: give an address that begins with http://")
    headers = {"Content-Type": "application/msgpack", **bearer(token), **of_run(run_id)}
    timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)
    connector = aiohttp.TCPConnector(socket_factory=telling_socket)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        yield HttpBroker(where, session)


def connect_to_run(run_dir: Path) -> AbstractAsyncContextManager[Broker]:
    """The broker to the dataflow of a run, by the run's folder or that of a node.

    Raises:
        OSError, ValueError, KeyError: its endpoints.json does not say where that is.
        ConfigError: the run's token is an empty file.
    """
    address = Address(run_dir, "dataflow")
    return connect(address, token=known_token(run_dir), run_id=known_run_id(run_dir))


class Address:
    """Address of a role, read from the run's endpoints.json at each call: it changes when another process has its port.

    Raises:
        OSError, ValueError, KeyError: the file does not have it when this is made; later the last known one is used.
    """

    def __init__(self, run_dir: Path, name: str):
        self._run_dir, self._name = run_dir, name
        self._last: str = read_endpoints(run_dir)[name]

    def __call__(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError):
            self._last = read_endpoints(self._run_dir)[self._name]
        return self._last


@dataclass(frozen=True)
class HttpBroker:
    """Posts each message to the dataflow's server (`flowjax.dataflow.server`)."""

    where: Callable[[], str]
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.where().rstrip("/")

    async def call(self, name: str, message: Mapping[str, Any], *, away_s: float) -> Answer:
        post = partial(self._post, name, pack(dict(message)))
        return await until_answered(post, where=f"the dataflow at {self.url}", away_s=away_s)

    async def _post(self, name: str, body: bytes) -> Answer:
        try:
            async with self.session.post(f"{self.url}/{name}", data=body) as response:
                status, answer = response.status, await response.read()
            if status == 200:
                return unpack(answer)
        except (aiohttp.ClientError, OSError, WireError) as error:  # TimeoutError is an OSError
            raise Unanswered(f"{type(error).__name__}: {error}") from error
        if status == _BUSY:
            raise Busy(_reason(answer))
        if status >= 500:
            raise Unanswered(f"HTTP {status}: {_reason(answer)}")
        if status == _SUPERSEDED:
            raise Superseded(f"the dataflow refuses /{name} (HTTP {status}): {_reason(answer)}")
        if status in (_EVICTED, _OTHER_RUN):
            raise Evicted(_reason(answer))
        raise DataflowError(f"the dataflow refuses /{name} (HTTP {status}): {_reason(answer)}")


def _reason(answer: bytes) -> str:
    try:
        return unpack(answer)["error"]
    except (WireError, KeyError, TypeError):
        return "whoever answers there is no dataflow"


async def until_answered(attempt: Callable[[], Awaitable[Answer]], *, where: str, away_s: float) -> Answer:
    """Send a message until it is answered, with exponential backoff: the rule of all brokers.

    Args:
        attempt: sends it once. Raises `Busy` or `Unanswered` when it is to be sent again.
        where: name of the dataflow in errors.
        away_s: how long there may be no answer, in seconds.

    Raises:
        DataflowError: there was none for longer, or this process is short of something that sending takes.
    """
    silent_s, pause_s = 0.0, _FIRST_RETRY_S
    while True:
        asked_s = time.monotonic()
        try:
            return await attempt()
        except Busy:  # an answer, too: the dataflow is alive and only has no room
            silent_s = 0.0
        except Unanswered as error:
            # An attempt counts for no longer than its time-out: beyond that this process was stopped, as by Ctrl-Z or
            # with its machine. And for at most half of `away_s`, so that one attempt alone never ends the waiting.
            silent_s += min(time.monotonic() - asked_s, _ANSWER_TIMEOUT_S, away_s / 2)
            if (lacking := explain(error)) and silent_s > _LACKING_S:
                raise DataflowError(f"{where} cannot be asked: {lacking}") from error
            if silent_s > away_s:
                problem = f"{where} has not answered for {silent_s:.0f} s ({error})"
                raise DataflowError(f"{problem}: see logs/dataflow.log") from error
        await asyncio.sleep(pause_s)
        silent_s += pause_s
        pause_s = min(2 * pause_s, _LAST_RETRY_S)


class DataflowClient:
    """Client of one dataflow, as the worker of that name. Each call raises `DataflowError` as `Broker.call` does.

    Args:
        broker: to the dataflow.
        worker: name under which leases are held.
        away_s: how long the dataflow may be away before a call fails, in seconds.

    `prompted` is called with the policies whose served versions the dataflow asks for, as after its restart.
    """

    def __init__(self, broker: Broker, *, worker: str, away_s: float):
        self._broker, self.worker, self._away_s = broker, worker, away_s
        self.prompted: Callable[[Sequence[str]], None] = lambda policies: None

    async def lease(
        self, slots: int, playable: Mapping[str, Sequence[str]] | None = None, *, hold_s: float | None = None
    ) -> tuple[list[Lease], float]:
        """Up to `slots` episodes to play, and the seconds to wait before asking again.

        `playable` are the `worlds` (of tasks), `policies` and `kinds` of this worker; for a key left out, any. While
        there are no episodes the answer is held back for up to `hold_s` seconds; None: for as long as the dataflow
        likes.
        """
        said: dict[str, Any] = {"can": dict(playable)} if playable else {}
        said |= {} if hold_s is None else {"hold_s": hold_s}
        answer = await self._call("lease", slots=slots, **said)
        return answer["leases"], answer["retry_s"]

    async def renew(self, lease_ids: Sequence[str]) -> list[str]:
        """Give the leases a full term from now. Returns those that are no longer ours."""
        return (await self._call("renew", lease_ids=list(lease_ids)))["lost"]

    async def push(self, items: Sequence[tuple[str, Episode]]) -> int:
        """Hand over played episodes with their leases. Returns how many count; sending one twice does no harm."""
        described = [{"lease_id": lease_id, "episode": episode} for lease_id, episode in items]
        return (await self._call("episodes", items=described))["accepted"]

    async def give_back(self, lease_ids: Sequence[str], error: str) -> None:
        """Return episodes unplayed; with an error, that counts as one of the attempts that an episode has."""
        await self._call("give_back", lease_ids=list(lease_ids), error=error)

    async def report_versions(self, policy: str, serving: int, held: Sequence[int] | None = None) -> int:
        """Report the version that is served, and those that can be served (None: any). Returns the oldest version that
        may still be asked for."""
        said = {} if held is None else {"held": list(held)}
        answer = await self._call("versions", policy=policy, serving=serving, **said)
        return answer["oldest_needed"]

    async def _call(self, name: str, **message: Any) -> Answer:
        answer = await self._broker.call(name, {"worker": self.worker, **message}, away_s=self._away_s)
        if unreported := answer.get("report"):
            self.prompted(unreported)
        return answer
