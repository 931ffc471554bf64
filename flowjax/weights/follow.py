"""The follower: makes the engines serve what the trainer has published.

For each engine by itself it compares the versions wanted (the newest committed step of each policy, and every version
in use) with those that the engine lists, and loads the missing ones. A version is served once one engine has it; the
others catch up, as do engines that were restarted. A version reaches an engine as an immutable folder
`adapters/<policy>@<step>`, under a name of its own. An engine holds several adapters, so that a request in flight ends
on the version it began with, and nothing pauses. Full weights replace each other under the requests in flight, which go
on with the new ones: an engine holds one version, and keeps it as long as an episode is pinned to it.

A version is its number and its commit. When the trainer goes back and makes a number anew, engines still hold the lost
weights as `<policy>@<step>`, and their caches go by names: the new ones are served as `<policy>@<step>.<commit>`.
"""

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from flowjax.monitor.trouble import explain
from flowjax.weights.hand_over import EngineWeights, HandOver, ServedNames, make_folder, remove_unfinished
from flowjax.weights.publish import CheckpointError, commit_of, committed_steps, newest_first
from flowjax.workflows import UNVERSIONED, served_version

_log = logging.getLogger(__name__)
_OBSERVE_EVERY_S = 2.0  # how long the engine's own list may be out of date when nothing hints at a change
_FIRST_LOOK_S = 5.0  # for engines that hang when the others answer
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_LACKING_S = 20.0  # of faults of this machine alone, after which the process ends: a restart may help


class WeightsError(RuntimeError):
    """A published version does not reach the engine; the message names it, the cause and the remedy."""


class FollowedEngine(EngineWeights, Protocol):
    """An engine as the follower needs it. Every call may fail: the engine may be dead, or starting again."""

    async def models(self) -> Collection[str]: ...

    async def unload_adapter(self, name: str) -> None: ...


class _Served:
    """Versions that one engine serves, and when those that it refused are tried again."""

    def __init__(self, engine: FollowedEngine):
        self.engine = engine
        self.observed: set[str] = set()
        self.observed_at_s = -_OBSERVE_EVERY_S
        self.retries: dict[str, _Retry] = {}  # by name
        self.wake = asyncio.Event()

    def lost(self) -> None:
        """The engine does not answer: what it serves is unknown."""
        self.observed.clear()
        self.retries.clear()
        self.observed_at_s = -_OBSERVE_EVERY_S


class Follower:
    """Keeps the engines on the newest version of each policy.

    Args:
        engines: where versions go.
        run_dir: holds `checkpoints/<policy>/`, `adapters/`, and `adapters.txt` with the commits that adapters are of.
        hand_overs: the published policies, and in which form each reaches the engine.
        max_staleness: versions behind the current one that stay loaded even when unused. Engines hold few.
        poll_s: interval at which the checkpoint folders are listed.
        stuck_s: how long the newest version may fail to load on a living engine before `run` gives up.
        logs: where the engines say why.
    """

    def __init__(
        self,
        engines: Sequence[FollowedEngine],
        run_dir: Path,
        hand_overs: Mapping[str, HandOver],
        *,
        max_staleness: int,
        poll_s: float = 0.02,
        stuck_s: float = 60.0,
        logs: str = "the engine's log",
    ):
        if len(hand_overs) > 1 and any(each.in_place for each in hand_overs.values()):
            raise WeightsError(
                f"config.policies names {', '.join(hand_overs)}, but an engine holds the full weights of one policy: "
                "set policy.train to 'lora'"
            )
        self._served = [_Served(engine) for engine in engines]
        self._run_dir, self._hand_overs = run_dir, dict(hand_overs)
        self._policies = tuple(hand_overs)
        self._max_staleness, self._poll_s, self._stuck_s = max_staleness, poll_s, stuck_s
        self._adapters = run_dir / "adapters"
        self._logs = logs
        self._names = ServedNames(run_dir / "adapters.txt")
        self._current: dict[str, int] = {}
        self._confirmed: dict[str, str] = {}  # name of the current version
        self._oldest_needed = dict.fromkeys(self._policies, 0)
        self._in_use: Counter[tuple[str, int]] = Counter()
        self._pinned: Counter[tuple[str, int]] = Counter()  # those of `_in_use` that whole episodes hold
        self._wanted: Counter[tuple[str, int]] = Counter()  # asked for by `serve`
        self._in_flight: Counter[str] = Counter()  # names that requests use
        self._writing = asyncio.Lock()
        self._changed = asyncio.Condition()

    def current(self, policy: str) -> tuple[int, str]:
        """Newest version that an engine has confirmed, and its name there.

        Raises:
            KeyError: none yet (await `ready`).
        """
        return self._current[policy], self._confirmed[policy]

    def name(self, policy: str, version: int) -> str:
        """The engines' name of a version: that of its present commit; of the current version, the name that engines
        have confirmed, as long as one lists it."""
        name = self._confirmed.get(policy, "")
        return name if self._current.get(policy) == version and self._lists(name) else self._committed(policy, version)

    def commit(self, name: str) -> str:
        """The commit of the version of that name, "" where it is not known."""
        return self._names.commit(name)

    def lost(self, name: str) -> bool:
        """True if the version of that name is lost because the trainer went back: it is gone, or was made anew."""
        policy, version = served_version(name)
        newest = self._newest(policy)
        return newest is None or version > newest or name != self._committed(policy, version)

    def _committed(self, policy: str, version: int) -> str:
        return self._names.of(policy, version, self._commit(policy, version))

    def _commit(self, policy: str, version: int) -> str | None:
        return commit_of(self._run_dir / "checkpoints" / policy, version)

    @contextmanager
    def requesting(self, policy: str, version: int) -> Iterator[str]:
        """While entered, the version is kept on the engines under the name yielded, even if its number is made anew."""
        name = self.name(policy, version)
        self._in_flight[name] += 1
        try:
            with self.using(policy, version):
                yield name
        finally:
            self._in_flight[name] -= 1
            self._in_flight += Counter()  # drops names with a count of 0

    @contextmanager
    def using(self, policy: str, version: int, *, pinned: bool = False) -> Iterator[None]:
        """While entered, the version is kept on the engines; full weights only if they are `pinned`."""
        counters = (self._in_use, self._pinned) if pinned else (self._in_use,)
        key = policy, version
        for counter in counters:
            counter[key] += 1
        try:
            yield
        finally:
            for counter in counters:
                counter[key] -= 1
                if not counter[key]:
                    del counter[key]

    def in_use(self, policy: str) -> list[int]:
        """Versions of a policy with something in flight."""
        return sorted(version for name, version in self._in_use if name == policy)

    def held(self, policy: str) -> list[int]:
        """Versions of a policy that may still be asked for and can be served here without replacing another one: with
        full weights those that an engine serves, else also those not loaded yet. None newer than the newest that is
        committed: it is lost, because the trainer went back."""
        oldest = self._oldest_needed[policy]
        committed = list(takewhile(lambda step: step >= oldest, newest_first(self._run_dir / "checkpoints" / policy)))
        if self._hand_overs[policy].in_place:
            names, known = self.listing(), set[int]()
        else:
            names, known = {folder.name for folder in self._adapters.glob(f"{policy}@*")}, set(committed)
        known |= {version for owner, version in map(served_version, names) if owner == policy}
        newest = max(committed, default=UNVERSIONED)
        return sorted(version for version in known if oldest <= version <= newest)

    def keep_from(self, policy: str, version: int) -> None:
        """Note that versions older than this will not be asked for again; before the first call, any may be."""
        self._oldest_needed[policy] = version

    async def ready(self) -> None:
        """Return when every policy has a version on an engine."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._current) == len(self._policies))

    async def changed(self, policy: str, version: int) -> int:
        """The current version, as soon as it is another than `version`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._current.get(policy, version) != version)
        return self._current[policy]

    async def serve(self, policy: str, version: int) -> None:
        """Return when an engine has this version: loaded just now, or again after a restart."""
        key = policy, version
        self._wanted[key] += 1
        try:
            self._hurry()
            async with self._changed:  # the name is looked up at each change: the version may be made anew meanwhile
                await self._changed.wait_for(lambda: self._lists(self.name(policy, version)))
        finally:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]

    async def serve_current(self, policy: str) -> None:
        """Return when an engine has the current version, whichever that has become by then."""
        self._hurry()
        async with self._changed:  # the name is looked up at each change: another version may be current by then
            await self._changed.wait_for(lambda: self._lists(self.name(policy, self._current.get(policy, UNVERSIONED))))

    async def listed(self, name: str) -> None:
        """Return when an engine lists a model of that name."""
        self._hurry()
        async with self._changed:
            await self._changed.wait_for(lambda: self._lists(name))

    def listing(self) -> set[str]:
        """Names that the engines listed last."""
        return {name for served in self._served for name in served.observed}

    def waits(self, name: str) -> bool:
        """True if the engines hold another version of the policy until the episodes that are pinned to it end."""
        policy, version = served_version(name)
        if policy not in self._policies or not self._hand_overs[policy].in_place:
            return False
        pinned = [held for owner, held in self._pinned if owner == policy]
        return bool(pinned) and min(pinned) != version

    def recheck(self, name: str) -> None:
        """Ask every engine at once what it serves: a request has found that none knows `name`."""
        for served in self._served:
            served.observed.discard(name)
            served.observed_at_s = -_OBSERVE_EVERY_S
        self._hurry()

    async def run(self) -> None:
        """Reconcile until cancelled.

        Raises:
            WeightsError: living engines have refused the newest version for `stuck_s`, or this machine could not write
                it for _LACKING_S, and none has it; or it could not even see which there are.
        """
        await self._first_look()
        keepers = [asyncio.create_task(self._keep(served)) for served in self._served]
        try:
            await asyncio.gather(*keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _first_look(self) -> None:
        """Wait for an engine to answer, then tidy up: what any of them still serves stays."""
        while True:
            looks = [asyncio.wait_for(self._observe(served), _FIRST_LOOK_S) for served in self._served]
            answers = await asyncio.gather(*looks, return_exceptions=True)
            if None in answers:  # what `_observe` returns: an engine that did not answer has left an exception
                break
            await asyncio.sleep(_FIRST_RETRY_S)
        await asyncio.to_thread(self._sweep)

    async def _keep(self, served: _Served) -> None:
        """Keep one engine in step until cancelled."""
        down, lacking_from_s = False, float("inf")
        while True:
            try:
                if time.monotonic() - served.observed_at_s > _OBSERVE_EVERY_S:
                    await self._observe(served)
                await self._reconcile(served)
                down, lacking_from_s = False, float("inf")
            except (WeightsError, asyncio.CancelledError):
                raise
            except Exception as error:
                if not down:
                    _log.info("waiting for an engine: %s", error)
                down = True
                # An engine may be away for any time: callers that need it have time-outs. But a fault of this machine
                # may be noticed nowhere else, while everyone waits for the next version.
                lacking_from_s = min(lacking_from_s, time.monotonic()) if explain(error) else float("inf")
                if time.monotonic() - lacking_from_s > _LACKING_S:
                    raise WeightsError(f"no version could be seen for {_LACKING_S:.0f} s ({explain(error)})") from error
                served.lost()
                await asyncio.sleep(_FIRST_RETRY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await served.wake.wait()
            served.wake.clear()

    def _hurry(self) -> None:
        for served in self._served:
            served.wake.set()

    def _lists(self, name: str) -> bool:
        return any(name in served.observed for served in self._served)

    def _newest(self, policy: str) -> int | None:
        return next(newest_first(self._run_dir / "checkpoints" / policy), None)

    async def _reconcile(self, served: _Served) -> None:
        for policy in self._policies:
            newest = self._newest(policy)
            # Loaded, then made current, then the old ones unloaded: at no moment does a new turn find no version.
            for version in self._wanted_versions(policy, newest):
                commit = self._commit(policy, version)
                if (name := self._names.of(policy, version, commit)) not in served.observed:
                    await self._try_hand_over(served, policy, version, newest)
                elif commit is not None:  # perhaps loaded by another follower
                    with suppress(OSError):
                        self._names.note(name, commit)
            if newest is not None and self._committed(policy, newest) in served.observed:
                await self._advance(policy, newest)
            await self._retire(served, policy)

    def _wanted_versions(self, policy: str, newest: int | None) -> list[int]:
        """Newest first: new turns wait for that one. With full weights only one: the oldest pinned, else the newest."""
        if self._hand_overs[policy].in_place:
            pinned = [version for name, version in (*self._pinned, *self._wanted) if name == policy]
            alone = min(pinned) if pinned else newest
            return [] if alone is None else [alone]
        wanted = {version for name, version in (*self._in_use, *self._wanted) if name == policy}
        wanted |= {version for version in (newest, self._current.get(policy)) if version is not None}
        return sorted(wanted, reverse=True)

    async def _advance(self, policy: str, version: int) -> None:
        current = self._current.get(policy, UNVERSIONED)
        name = self._committed(policy, version)
        if version == current and name == self._confirmed[policy]:
            return
        # Down only if the trainer has gone back: then the older version is the newest that is committed.
        if version < current and version != self._newest(policy):
            return  # another engine was faster with the next one
        async with self._changed:
            self._current[policy], self._confirmed[policy] = version, name
            self._changed.notify_all()
        _log.info("serving %s", name)

    async def _observe(self, served: _Served) -> None:
        names = set(await served.engine.models())
        self._names.seen(names)
        async with self._changed:
            served.observed, served.observed_at_s = names, time.monotonic()
            self._changed.notify_all()

    async def _try_hand_over(self, served: _Served, policy: str, version: int, newest: int | None) -> None:
        commit = self._commit(policy, version)
        name = self._names.of(policy, version, commit)
        retry = served.retries.setdefault(name, _Retry())
        if not retry.due():
            return
        error: Exception | None = None
        try:
            folder = self._adapters / name
            async with self._writing:  # the engines share the folder: the first writes it, the others find it there
                if commit is not None:
                    self._names.note(name, commit)
                if not folder.exists():
                    await asyncio.to_thread(self._write_folder, policy, version, commit, folder)
            await self._hand_overs[policy].load(served.engine, name, folder)
        except Exception as caught:  # whatever it is: what counts is whether the engine lists the name now
            error = caught
        await self._observe(served)
        if name in served.observed:
            del served.retries[name]
            return
        if retry.failures == 0:
            _log.warning("%s is not on the engine yet: %s", name, error or "the engine took it and does not list it")
        retry.failed()
        allowed_s = min(_LACKING_S, self._stuck_s) if error is not None and explain(error) else self._stuck_s
        if version == newest and retry.failing_s() > allowed_s and not self._lists(name):
            shared = "model.path" if self._hand_overs[policy].in_place else "model.path and policy.lora"
            remedy = f"see {self._logs}, and that engine and trainer have the same {shared}"
            if error is not None and explain(error):
                remedy = "see that this machine has room and its disk works"
            raise WeightsError(f"{name} has not reached the engine for {allowed_s:.0f} s ({error}): {remedy}")

    def _write_folder(self, policy: str, version: int, commit: str | None, folder: Path) -> None:
        make_folder(self._hand_overs[policy], self._run_dir / "checkpoints" / policy, version, folder)
        if self._commit(policy, version) not in (commit, None):  # None: thinned out since it was read
            shutil.rmtree(folder)
            raise CheckpointError(f"version {version} of {policy} was made anew while it was read")

    async def _retire(self, served: _Served, policy: str) -> None:
        """Unload versions that are behind the staleness bound and not in use, and lost weights whose number was made
        anew; then delete the folders that nobody will need."""
        if policy not in self._current:
            return
        oldest_loaded = self._current[policy] - self._max_staleness
        for name in served.observed | {folder.name for folder in self._adapters.iterdir()}:
            owner, version = served_version(name)
            if owner != policy or version == UNVERSIONED or not self._names.commit(name):  # the last: of another run
                continue
            superseded = name not in (self._committed(policy, version), self.name(policy, version))
            busy = (policy, version) in self._in_use or (policy, version) in self._wanted or version >= oldest_loaded
            if self._in_flight[name] or (busy and not superseded):
                continue
            if name in served.observed:
                if self._hand_overs[policy].in_place:
                    continue  # the next version takes its place
                served.observed.discard(name)  # before the request: a turn that begins meanwhile must not choose it
                await served.engine.unload_adapter(name)
            if (superseded or version < self._oldest_needed[policy]) and not self._lists(name):
                await asyncio.to_thread(shutil.rmtree, self._adapters / name, ignore_errors=True)

    def _sweep(self) -> None:
        """Delete unfinished folders, and those whose checkpoint may have been written anew since they were made.

        Versions that an engine lists stay. So does a folder without a checkpoint while newer checkpoints exist: an
        evaluation may still be pinned to it. Folders of policies on other engines belong to other followers.
        """
        self._adapters.mkdir(parents=True, exist_ok=True)
        for policy in self._policies:
            remove_unfinished(self._adapters, policy)
        for folder in self._adapters.iterdir():
            policy, version = served_version(folder.name)
            if policy not in self._policies:
                continue
            steps = committed_steps(self._run_dir / "checkpoints" / policy)
            if not self._lists(folder.name) and (version in steps or version > max(steps, default=UNVERSIONED)):
                shutil.rmtree(folder, ignore_errors=True)


class _Retry:
    """Time at which a failing version is tried again: exponential backoff from the first failure on."""

    def __init__(self):
        self.failures = 0
        self._first_s = self._next_s = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next_s

    def failing_s(self) -> float:
        return time.monotonic() - self._first_s

    def failed(self) -> None:
        now = time.monotonic()
        self._first_s = self._first_s or now
        self._next_s = now + min(_FIRST_RETRY_S * 2 ** min(self.failures, 30), _LAST_RETRY_S)
        self.failures += 1
