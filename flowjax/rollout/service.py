"""The rollout service: leases episodes, plays many at once, hands their trajectories over.

All its loops run on one event loop. A loop that fails for good ends the service; a single episode never does.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flowjax.broker import DataflowClient, DataflowError
from flowjax.config import task_options
from flowjax.envs import find_world
from flowjax.files import place
from flowjax.monitor.metrics import write_status
from flowjax.records import COUNTED_STATUSES, Episode, Lease, pack
from flowjax.rollout.client import EngineError, VersionAway
from flowjax.rollout.engines import ServedBase, SlotControl
from flowjax.rollout.episode import EpisodePlayer
from flowjax.run import Run
from flowjax.weights.follow import Follower

# ----------------------------------------------------------------------------------------------------- what is served


class VersionReports:
    """Reports to the dataflow which versions of one policy are served here: at once when that changes, which admits the
    next groups, and when the dataflow asks. Also every `presence_s`, which makes up for a report that was lost."""

    def __init__(self, policy: str, served: Follower, dataflow: DataflowClient, *, presence_s: float):
        self._policy, self._served, self._dataflow, self._presence_s = policy, served, dataflow, presence_s
        self._asked = asyncio.Event()  # the dataflow asked, since the newest report was begun
        self._known = asyncio.Event()  # set from a report on until the dataflow asks again

    def ask(self) -> None:
        """Report again at once: the dataflow does not know."""
        self._known.clear()
        self._asked.set()

    async def known(self) -> None:
        """Return when the dataflow knows."""
        await self._known.wait()

    async def run(self) -> None:
        """Report until cancelled. Raises as the client's calls do."""
        policy, served, clock = self._policy, self._served, asyncio.get_running_loop().time
        await served.ready()
        said, due_s = None, clock()
        while True:
            # `current` is number and name: a version that is made anew after its trainer went back has an old number.
            current, held = served.current(policy), served.held(policy)
            if (current, held) != said or self._asked.is_set() or clock() >= due_s:
                self._asked.clear()
                due_s = clock() + self._presence_s
                oldest = await self._dataflow.report_versions(policy, current[0], held)
                served.keep_from(policy, oldest)
                # Versions below `oldest` are not held from here on, which the dataflow knows: no new report for that.
                said = current, [version for version in held if version >= oldest]
                if not self._asked.is_set():
                    self._known.set()
            await self._until_news(current[0], min(_LOOK_EVERY_S, due_s - clock()))

    async def _until_news(self, version: int, timeout_s: float) -> None:
        """Return when another version than this is served, or the dataflow asks; else after the time."""
        news = [asyncio.ensure_future(self._served.changed(self._policy, version))]
        news += [asyncio.ensure_future(self._asked.wait())]
        try:
            await asyncio.wait(news, timeout=max(timeout_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in news:
                task.cancel()


# -------------------------------------------------------------------------------------------------------------- service

_log = logging.getLogger(__name__)
_GATHER_S = 0.005  # how long finished episodes wait for others to be sent with
_ITEMS_PER_MESSAGE = 64
_MESSAGE_BYTES = 512 * 1024  # of episodes; also at the dataflow's minimum rate it arrives within the time allowed
_NAMES_BYTES = 2048  # of ids and names in a message, for each episode
_FAILED_ROUNDS = 4  # times the number of slots: so many failures in a row end the service
_EXECUTOR_AWAY_S = 1800.0  # longest outage of an executor, after which the service ends
_OUTAGE_OVER_S = 900.0  # without an error: the next one begins another outage
_PROBE_EVERY_S = 1.0
_LOOK_EVERY_S = 1.0  # at the engines' load, at versions on the disk, at a request for leases that is held back
_REPORT_EVERY_S = 1.0
_LOG_EVERY_S = 30.0
_WINDOW_S = 10.0  # over which rates are taken
_DRAIN_S = 5.0  # for the last messages to the dataflow
_LAST_ANSWER_S = 1.5  # for leases that are on their way; a little longer than the dataflow's default hold


class RolloutError(RuntimeError):
    """The service cannot play; the message says why."""


@dataclass
class Totals:
    """Totals since the start. An episode fails when its status is neither ok nor truncated."""

    episodes: int = 0
    failed_episodes: int = 0
    given_back: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0

    def add(self, episode: Episode) -> None:
        turns = episode.turns
        self.episodes += 1
        self.failed_episodes += episode.status not in COUNTED_STATUSES
        self.turns += len(turns)
        self.sampled_tokens += sum(len(turn.sampled_ids) for turn in turns)
        self.prompt_tokens += sum(len(turn.prompt_ids) for turn in turns)


class Rates:
    """Increase per second of the totals over the last seconds."""

    def __init__(self):
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def update(self, totals: Totals, now_s: float) -> dict[str, float]:
        """`<total>_per_s` for every total."""
        self._samples.append((now_s, asdict(totals)))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= _WINDOW_S:
            self._samples.popleft()
        (then_s, before), (_, after) = self._samples[0], self._samples[-1]
        elapsed_s = now_s - then_s
        return {f"{name}_per_s": (after[name] - before[name]) / elapsed_s if elapsed_s else 0.0 for name in after}


def read_leases(path: Path) -> list[str]:
    """Leases that a service here held when it last wrote its status: after a crash, those of the one that died. None of
    a status file that was copied from another place: its service may still be playing."""
    try:
        status = json.loads(path.read_text())
        return [str(lease_id) for lease_id in status["leases"]] if status["place"] == place(path.parent) else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


class RolloutService:
    """Plays until it is asked to stop. Its `status-rollout.json` goes to the run's folder."""

    def __init__(self, run: Run, *, bases: Sequence[ServedBase], dataflow: DataflowClient, player: EpisodePlayer):
        config = run.config
        self._policies, self._most_slots = list(run.policies), config.rollout.max_concurrent_episodes
        self._slot_control = SlotControl(floor=config.rollout.min_concurrent_episodes, ceiling=self._most_slots)
        self._playable = {"worlds": [_world_name(run)], "policies": self._policies, "kinds": ["train", "eval"]}
        self._message_bytes = min(_MESSAGE_BYTES, config.dataflow.max_message_bytes // 2)
        self._renew_every_s, self._presence_s = config.dataflow.lease_s / 3, run.presence_s
        self._run_dir, self._place = run.folder, place(run.folder)
        # Left by a service that was killed: nobody plays them now.
        self._previous_leases = read_leases(run.folder / "status-rollout.json")
        self._bases, self._dataflow, self._player = bases, dataflow, player
        self._followers = {policy: base.follower for base in bases for policy in base.policies}
        self._playing: dict[str, asyncio.Task[None]] = {}  # by lease
        # Episodes with their leases, by kind: evaluations are sent apart, since training may have to wait for room.
        self._finished: dict[str, list[tuple[str, Episode]]] = {"eval": [], "train": []}
        self._unplayed: list[tuple[str, str]] = []  # lease, reason ("": does not count as an attempt)
        self._asking: asyncio.Task[tuple[list[Lease], float]] | None = None
        self._slot_freed, self._something_to_send = asyncio.Event(), {kind: asyncio.Event() for kind in self._finished}
        self._reports = {
            policy: VersionReports(policy, follower, dataflow, presence_s=self._presence_s)
            for policy, follower in self._followers.items()
        }
        dataflow.prompted = self._report_again
        self._failures_in_a_row = 0  # episodes since the last one that counts
        self._executor_away_s: tuple[float, float] | None = None  # when the first and the last of its late errors came
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rates = Rates()
        self.totals = Totals()
        self.last_status: dict[str, Any] = {}  # the status that was written last
        self.metrics_url = ""  # where else it can be read

    async def run(self, stop: asyncio.Event) -> None:
        """Play until `stop`, then give back what is unfinished.

        Raises:
            EngineError, DataflowError, WeightsError: engine or dataflow have been away for longer than the run allows.
            RolloutError: episode after episode comes to nothing.
        """
        loops = [self._lease, self._renew, self._report]
        loops += [partial(self._hand_over, kind) for kind in self._finished]
        loops += [loop for base in self._bases for loop in (base.follower.run, partial(self._watch, base))]
        loops += [self._adapt_slots] if self._slot_control.adaptive else []
        tasks = [asyncio.create_task(loop()) for loop in (*loops, stop.wait)]
        tasks += [asyncio.create_task(reports.run()) for reports in self._reports.values()]
        try:
            done, _ = await asyncio.wait([*tasks, self._fatal], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:  # of a loop that failed this raises the error; after `stop` nothing
                ended.result()
        finally:
            self._fatal.cancel()
            # Loops end before the drain: none may lease again while leases are given back.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._drain()
            self._note_status()

    async def _lease(self) -> None:
        """Keep every slot playing."""
        if self._previous_leases:
            await self._dataflow.give_back(self._previous_leases, "")
            self._previous_leases = []
        while True:
            # Until the dataflow knows what is served here, it may lease groups that need a newer version.
            await asyncio.gather(*(reports.known() for reports in self._reports.values()))
            self._slot_freed.clear()
            free = self._slot_control.slots - len(self._playing)
            retry_s = 1.0
            if free > 0 and self._engines_up:
                leases, retry_s = await self._ask(free)
                for lease in leases:
                    self._playing[lease.lease_id] = asyncio.create_task(self._episode(lease))
                if leases:
                    self._note_status()  # at once: if this one is killed, its successor gives back the leases in there
                if len(self._playing) >= self._slot_control.slots:
                    retry_s = 1.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_s):  # not wait_for, which can lose a cancellation before Python 3.12
                    await self._slot_freed.wait()
                await asyncio.sleep(_GATHER_S)

    async def _ask(self, slots: int) -> tuple[list[Lease], float]:
        """Ask for episodes; returns leases, and seconds until it may ask again. While nothing is played here, the
        request is held for long; it is withdrawn if engines go away, so that other workers get the episodes."""
        hold_s = None if self._playing else self._presence_s
        # A task of its own: when this loop is cancelled the leases are on their way, and `_drain` gives them back.
        asking = self._asking = asyncio.create_task(self._dataflow.lease(slots, self._playable, hold_s=hold_s))
        while not (await asyncio.wait([asking], timeout=_LOOK_EVERY_S))[0]:
            if not self._engines_up:
                asking.cancel()  # the dataflow gives leases that it has not sent yet to others
        self._asking = None
        return ([], 1.0) if asking.cancelled() else asking.result()

    def _report_again(self, policies: Sequence[str]) -> None:
        for policy in policies:
            if policy in self._reports:
                self._reports[policy].ask()

    async def _episode(self, lease: Lease) -> None:
        try:
            episode = await self._player.play(lease)
        except Exception as error:
            reason = str(error)
            if not isinstance(error, EngineError):  # a fault of flowjax: its lease is given back, too
                _log.exception("episode %s could not be played", lease.episode_id)
                reason = f"{type(error).__name__}: {error}"
            self._unplayed.append((lease.lease_id, "" if isinstance(error, VersionAway) else reason))  # "": no attempt
            self._count_failure(reason)
        else:
            self._finished[lease.kind].append((lease.lease_id, episode))
            self.totals.add(episode)
            if episode.status in COUNTED_STATUSES:
                self._failures_in_a_row, self._executor_away_s = 0, None
            elif episode.status == "executor_error":
                self._count_executor_error(episode.error)
            else:
                self._count_failure(episode.error)
            if episode.error:
                _log.warning("episode %s: %s: %s", episode.episode_id, episode.status, episode.error)
        finally:
            del self._playing[lease.lease_id]
            self._slot_freed.set()
            for waits in self._something_to_send.values():
                waits.set()

    def _count_failure(self, why: str) -> None:
        """Count failures in a row: single ones are normal, but if nothing else comes, every task would be used up."""
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= _FAILED_ROUNDS * self._most_slots and not self._fatal.done():
            text = f"{self._failures_in_a_row} episodes in a row came to nothing, the last because: {why}"
            self._fatal.set_exception(RolloutError(text))

    def _count_executor_error(self, why: str) -> None:
        """Time an executor's outage: it uses up no task, however many episodes meet it, but must not go on for ever."""
        now_s = time.monotonic()
        since_s, newest_s = self._executor_away_s or (now_s, now_s)
        since_s = since_s if now_s - newest_s < _OUTAGE_OVER_S else now_s
        self._executor_away_s = since_s, now_s
        if (away_s := now_s - since_s) > _EXECUTOR_AWAY_S and not self._fatal.done():
            self._fatal.set_exception(RolloutError(f"an executor has been away for {away_s:.0f} s: {why}"))

    async def _hand_over(self, kind: str) -> None:
        """Send finished episodes of a kind, many at once."""
        while True:
            await self._something_to_send[kind].wait()
            await asyncio.sleep(_GATHER_S)
            self._something_to_send[kind].clear()
            await self._send(kind)

    async def _send(self, kind: str) -> None:
        # Deleted once they are answered: an episode that was sent and not answered is sent again, which does no harm.
        # Others are only appended meanwhile, so that the first ones in the list are still those that were sent.
        if finished := _one_message(self._finished[kind], self._message_bytes):
            await self._dataflow.push(finished)
            del self._finished[kind][: len(finished)]
        # The first ones that share a reason: a message has only one. By evaluations' loop, which never waits for room.
        unplayed = list(itertools.takewhile(lambda item: item[1] == self._unplayed[0][1], self._unplayed))
        if unplayed and kind == "eval":
            await self._dataflow.give_back([lease_id for lease_id, _ in unplayed], unplayed[0][1])
            del self._unplayed[: len(unplayed)]
            self.totals.given_back += len(unplayed)
        if self._finished[kind] or (self._unplayed and kind == "eval"):
            self._something_to_send[kind].set()

    @property
    def _unsent(self) -> list[str]:
        """Leases of the episodes that are finished and not handed over yet."""
        return [lease_id for finished in self._finished.values() for lease_id, _ in finished]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_every_s)
            # Also leases of episodes that are played and not handed over yet, as while the dataflow has no room.
            held = [*self._playing, *self._unsent]
            for lease_id in await self._dataflow.renew(held) if held else ():
                if lease_id in self._playing:
                    _log.warning("lease %s is lost: another worker plays its episode", lease_id)
                    self._playing[lease_id].cancel()

    async def _watch(self, base: ServedBase) -> None:
        """Keep `base.up` current: nothing is leased while engines are away. If they stay away, the service ends."""
        while True:
            await base.watch()
            await asyncio.sleep(_PROBE_EVERY_S)

    @property
    def _engines_up(self) -> bool:
        """True if each base model has an engine that is alive: an episode may call on all of them."""
        return all(base.up for base in self._bases)

    async def _adapt_slots(self) -> None:
        """Let the number of episodes follow the engines' load."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            before = self._slot_control.slots
            loads = {}
            for base in self._bases:
                with contextlib.suppress(EngineError):  # away: `_watch` sees to that
                    loads[base.name] = base.load = await base.engine.load()
            self._slot_control.update(loads, len(self._playing))
            if self._slot_control.slots > before:
                self._slot_freed.set()

    async def _report(self) -> None:
        logged_s = time.monotonic()
        while True:
            self._note_status()
            if time.monotonic() - logged_s > _LOG_EVERY_S:
                logged_s = time.monotonic()
                _log.info(
                    "%(episodes)d episodes, %(episodes_per_s).1f/s, %(turns_per_s).0f turns/s, %(in_flight)d in flight,"
                    " version %(serving_version)s, %(failed_episodes)d failed",
                    self.last_status,
                )
            await asyncio.sleep(_REPORT_EVERY_S)

    def _note_status(self) -> None:
        self.last_status = self._status()
        with contextlib.suppress(OSError):  # a full disk stops the trainer, whose message is the better one
            write_status(self._run_dir, "rollout", self.last_status)

    def _status(self) -> dict[str, Any]:
        pool = self._player.pool.counts
        try:
            serving = {policy: self._followers[policy].current(policy)[0] for policy in self._policies}
        except KeyError:
            serving = {}
        return {
            **asdict(self.totals),
            **self._rates.update(self.totals, time.monotonic()),
            "in_flight": len(self._playing),
            "slots": self._slot_control.slots,
            "bases": {base.name: base.status() for base in self._bases},
            "worker": self._dataflow.worker,
            "metrics_url": self.metrics_url,
            "place": self._place,
            "leases": [*self._previous_leases, *self._playing, *self._unsent],
            "unsent": len(self._unsent),
            "serving_version": min(serving.values(), default=None),
            "serving_versions": serving,
            "versions_in_use": {policy: self._followers[policy].in_use(policy) for policy in self._policies},
            "engine_up": self._engines_up,
            "killed_envs": pool.timeouts + pool.crashes,
            "replayed_episodes": pool.replays,
        }

    async def _drain(self) -> None:
        """Stop playing; hand over what is finished and give back the rest."""
        stopped = list(self._playing)
        for task in (tasks := list(self._playing.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(_DRAIN_S):
                if self._asking is not None:
                    stopped += [lease.lease_id for lease in await self._last_leases(self._asking)]
                if stopped:  # first: a dataflow that is full takes no episodes for a while, and leases at any time
                    await self._dataflow.give_back(stopped, "")  # without an error it does not count as an attempt
                    stopped = []
                for kind in self._finished:
                    while self._finished[kind] or (self._unplayed and kind == "eval"):
                        await self._send(kind)
        except (DataflowError, TimeoutError):
            left = len(self._unsent) + len(self._unplayed) + len(stopped)
            _log.warning("%d leases could not be given back to the dataflow: they expire and are played again", left)

    async def _last_leases(self, asking: asyncio.Task[tuple[list[Lease], float]]) -> list[Lease]:
        """Leases that are on their way. A request that the dataflow still holds back is withdrawn: it has got none."""
        if not (await asyncio.wait([asking], timeout=_LAST_ANSWER_S))[0]:
            asking.cancel()
            await asyncio.wait([asking])
        return [] if asking.cancelled() else asking.result()[0]


def _world_name(run: Run) -> str:
    """`Task.world` of the run's tasks, read from the first task: all are of one world."""
    options = task_options(run.config, next(iter(run.config.env.sources), ""))
    task = find_world(run.config.env.name)(**options).tasks("train", run.config.env.data_seed)[0]
    assert task is not None, "a source of tasks must have every index"
    return task.world


def _one_message(finished: Sequence[tuple[str, Episode]], most_bytes: int) -> list[tuple[str, Episode]]:
    """The first of these episodes, as many as fit into one message; at least one, however long it is."""
    items, size_bytes = [], 0
    for lease_id, episode in finished[:_ITEMS_PER_MESSAGE]:
        size_bytes += len(pack(episode)) + _NAMES_BYTES
        if items and size_bytes > most_bytes:
            break
        items.append((lease_id, episode))
    return items
