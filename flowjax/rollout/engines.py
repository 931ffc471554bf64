"""Engines: several as one pool, the base models that they serve as episodes see them, and how many episodes they take.

A pool sends a call to the engine that has its prefix cached, and on to another one when that engine dies.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flowjax.rollout.client import (
    EngineAway,
    EngineClient,
    EngineError,
    EngineReply,
    Load,
    Partial,
    SamplingOptions,
    UnknownModel,
    VersionAway,
)
from flowjax.run import Base, Run
from flowjax.weights.follow import Follower
from flowjax.weights.hand_over import hand_over, model_name
from flowjax.workflows.codec import Codec

_log = logging.getLogger(__name__)
_MOST_OVER_MEAN = 1.25  # most calls at one engine, relative to its share of the calls of all that could take them
_ALWAYS_ROOM = 8  # calls, times its share, that every engine has room for
_SLOW = 1.5  # times the fastest engine's seconds for a token
_LEAST_SHARE, _SHARE_STEP = 1 / 8, 1.05
_REMEMBERED_CALLS = 128
_HUNG_S = 15.0  # an engine that has not answered for this long is away
_PREFIX_TOKENS = 64  # of a prompt, which stand for its group if the caller names none
_FIRST_PROBE_S, _LAST_PROBE_S = 0.05, 1.0


class Member:
    """One engine of a pool and its state. The follower keeps its adapters in step.

    `names` are the models that it listed last, `in_flight` the pool's calls that it is working on. `seconds` and
    `tokens` are decaying sums over its calls, and `share` (1 for fast engines) bounds its calls.
    """

    def __init__(self, client: EngineClient):
        self.client = client
        self.up = True
        self.names: set[str] = set()
        self.in_flight = 0
        self.seconds = self.tokens = 0.0
        self.share = 1.0

    async def models(self) -> set[str]:
        self.names = await self.client.models()
        return self.names

    async def load_adapter(self, name: str, path: Path) -> None:
        await self.client.load_adapter(name, path)

    async def load_weights(self, name: str, path: Path) -> None:
        await self.client.load_weights(name, path)

    async def unload_adapter(self, name: str) -> None:
        self.names.discard(name)
        await self.client.unload_adapter(name)

    async def probe(self) -> None:
        up = await self.client.healthy()
        if up != self.up:
            _log.info("engine %s is %s", self.client.url, "up" if up else "away")
        self.up = up


class EnginePool:
    """Engines that serve the same base model. Use as an async context manager.

    Args:
        clients: impatient ones; a call that fails at one is sent to another.
        request_timeout_s: how long all of them may be away before calls fail.
    """

    def __init__(self, clients: Sequence[EngineClient], *, request_timeout_s: float = 120.0):
        self.members = tuple(Member(client) for client in clients)
        self._timeout_s = request_timeout_s
        self._open = contextlib.AsyncExitStack()
        self.moved_calls = self.continued_calls = 0  # to another engine; with tokens that the first had sampled

    async def __aenter__(self) -> "EnginePool":
        for member in self.members:
            await self._open.enter_async_context(member.client)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._open.aclose()

    async def generate(
        self, model: str, prompt_ids: Sequence[int], sampling: SamplingOptions, *, group: str = "", pinned: bool = False
    ) -> EngineReply:
        """Sample one completion of `prompt_ids` from the model or adapter of that name, on whichever engine has it; see
        `EngineClient.generate` for `pinned`.

        Calls of one `group` go to one engine while that has room. When the engine dies, the call goes on at another one
        from the tokens that had been streamed, with the rest of the token budget; it begins anew if replies end with a
        stop text, follow a grammar or have a seed.

        Raises:
            UnknownModel: no engine that is up serves `model`.
            EngineAway: all engines were away, or failed at it, for longer than `request_timeout_s`.
            EngineError: an engine refuses the request.
        """
        key = group or ",".join(map(str, prompt_ids[:_PREFIX_TOKENS]))
        # The part sampled so far; since when no engine has sampled a token; the engines that have failed at it since.
        before, failing_s, failed = Partial(), math.inf, set[Member]()
        clock, pause_s = asyncio.get_running_loop().time, _FIRST_PROBE_S
        while True:
            left = sampling.max_new_tokens - len(before.sampled_ids)
            if not left:  # the engine died between the last token and saying so
                before.finish_reason = "length"
                return before.completion()
            member = await self._choose(model, key, min(pause_s, _LAST_PROBE_S), failed)
            member.in_flight += 1
            try:
                # Tokens that another engine had sampled are part of the prompt now: this one goes on after them.
                prompt = [*prompt_ids, *before.sampled_ids]
                asked, began_s = replace(sampling, max_new_tokens=left), clock()
                reply = await member.client.generate(model, prompt, asked, pinned=pinned)
                share_calls(self.members, member, len(reply.sampled_ids), clock() - began_s)
                before.append(reply)
                return before.completion()
            except UnknownModel:  # the engine restarted, or unloaded it since it listed it: another may have it
                member.names.discard(model)
            except EngineAway as away:
                if member.up:
                    _log.info("calls move on: %s", away)
                member.up = False
                # A stop text or part of a grammar may lie across the seam, and a seed would begin its numbers again.
                whole = sampling.stop or sampling.structured_outputs or sampling.seed is not None
                partial = Partial() if whole else away.partial
                if partial.sampled_ids:  # the call has got further: the time-out begins anew
                    failing_s, pause_s, failed = math.inf, _FIRST_PROBE_S, set()
                else:
                    failing_s, pause_s, failed = min(failing_s, clock()), 2 * pause_s, {*failed, member}
                untried = {each for each in self.members if each.up and model in each.names} - failed
                if clock() - failing_s > self._timeout_s and not untried:
                    raise
                self.moved_calls += 1
                self.continued_calls += bool(partial.sampled_ids)
                before.append(partial.completion())
            finally:
                member.in_flight -= 1

    async def healthy(self) -> bool:
        """True if any engine is alive."""
        await asyncio.gather(*(member.probe() for member in self.members))
        return any(member.up for member in self.members)

    @property
    def trouble(self) -> str:
        """Reason why one of them was not alive when it was last asked; "" if all were."""
        return next((member.client.trouble for member in self.members if member.client.trouble), "")

    async def load(self) -> Load:
        """Sum of the engines' loads, those that are away left out.

        Raises:
            EngineError: none answers.
        """
        asked = [member.client.load() for member in self.members if member.up]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        loads = [answer for answer in answers if isinstance(answer, Load)]
        if not loads:
            raise EngineError("no engine tells its load")
        # Preemptions of all members: summed over those that answer, one that comes back would seem to add many at once.
        return replace(sum(loads[1:], loads[0]), preemptions=sum(member.client.preempted for member in self.members))

    def status(self) -> dict[str, Any]:
        """State of each engine, and how often a call had to move."""
        engines = [
            {"url": m.client.url, "up": m.up, "in_flight": m.in_flight, "share": m.share, "models": sorted(m.names)}
            for m in self.members
        ]
        return {"engines": engines, "moved_calls": self.moved_calls, "continued_calls": self.continued_calls}

    async def _choose(self, model: str, key: str, pause_s: float, failed: Collection[Member]) -> Member:
        """An engine for a call, of `failed` only if no other has the model. If all are away, waits, first `pause_s`."""
        clock = asyncio.get_running_loop().time
        started_s = clock()
        while not any(member.up for member in self.members):
            if clock() - started_s > self._timeout_s:
                urls = ", ".join(member.client.url for member in self.members)
                raise EngineAway(f"all engines ({urls}) have been away for {self._timeout_s:.0f} s: see their logs")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PROBE_S)
            await self.healthy()
        able = [member for member in self.members if member.up and model in member.names]
        if not able:
            raise UnknownModel(f"no engine that is up serves {model}")
        return choose(key, [member for member in able if member not in failed] or able)


def share_calls(members: Sequence[Member], member: Member, tokens: int, took_s: float) -> None:
    """Note a call that `member` has answered. If its tokens take more than 1.5 times as long as the fastest engine's,
    its share is lowered, to an eighth at least; else raised. With fewer calls an engine samples each one faster."""
    kept = 1 - 1 / _REMEMBERED_CALLS
    member.seconds, member.tokens = kept * member.seconds + took_s, kept * member.tokens + max(tokens, 1)
    fastest_s = min(each.seconds / each.tokens for each in members if each.tokens and (each.up or each is member))
    step = 1 / _SHARE_STEP if member.seconds / member.tokens > _SLOW * fastest_s else _SHARE_STEP
    member.share = min(max(member.share * step, _LEAST_SHARE), 1.0)


def choose(key: str, members: Sequence[Member]) -> Member:
    """Rendezvous hashing with bounded loads: of the engines, in the key's own order, the first that has room.

    An engine has room while its calls are fewer than max(8 * share, ceil(1.25 * (calls + 1) * share / all shares)), so
    one of them always has. The order follows from key and address alone: an engine that goes or comes moves the keys
    that it is the first for, no others (Thaler and Ravishankar, 1998; Mirrokni, Thorup and Zadimoghaddam, 2018).
    """
    if len(members) == 1:
        return members[0]
    mean = (sum(member.in_flight for member in members) + 1) / sum(member.share for member in members)
    preferred = sorted(members, key=lambda member: _score(key, member.client.url), reverse=True)
    return next(
        member
        for member in preferred
        if member.in_flight < max(_ALWAYS_ROOM * member.share, math.ceil(_MOST_OVER_MEAN * mean * member.share))
    )


def _score(key: str, url: str) -> bytes:
    return hashlib.blake2b(f"{url} {key}".encode(), digest_size=8).digest()


Engines = EngineClient | EnginePool


def engines_of_base(base: Base, run_dir: Path, urls: Sequence[str]) -> Engines:
    """The engines of a base model at these addresses: a pool, or just the client of one that does not stream."""
    engine = base.engine
    options: dict[str, Any] = {
        "prompts_per_request": engine.prompts_per_request,
        "batch_window_s": engine.batch_window_s,
        "stream": engine.stream_partial,
    }
    logs = [run_dir / "logs" / f"{name}.log" for name in base.engine_names(len(urls))]
    if len(urls) == 1 and not engine.stream_partial:
        return EngineClient(urls[0], request_timeout_s=engine.request_timeout_s, log=logs[0], **options)
    patience_s = min(_HUNG_S, engine.request_timeout_s)
    clients = [
        EngineClient(url, request_timeout_s=patience_s, patient=False, log=log, **options)
        for url, log in zip(urls, logs, strict=True)
    ]
    return EnginePool(clients, request_timeout_s=engine.request_timeout_s)


# -------------------------------------------------------------------------------------------- how many episodes at once

_DECREASE = 0.75
_INCREASES_TO_CEILING = 32
_TOLERATED_QUEUE = 0.25  # waiting requests for each running one
_FULL_CACHE = 0.9  # share of the key-value cache in use


def next_slots(slots: float, load: Load, preempted: int, *, playing: int, floor: int, ceiling: int) -> float:
    """Slots for the next interval: additive increase, multiplicative decrease (Chiu and Jain, 1989).

        slots <- slots                                while more are playing: the last decrease has not taken effect
        slots <- max(floor, 0.75 * slots)             if requests were preempted, or waiting > running / 4
        slots <- slots                                if any request waits, over 90 % of the cache is in use, or slots
                                                      are free already
        slots <- min(ceiling, slots + ceiling / 32)   otherwise

    `preempted` counts requests since the last look; `playing` are the episodes under way.
    """
    if playing > slots:
        return slots
    if preempted > 0 or load.waiting > _TOLERATED_QUEUE * load.running:
        return max(float(floor), _DECREASE * slots)
    if load.waiting or load.cache_share > _FULL_CACHE or playing < math.floor(slots):
        return slots
    return min(float(ceiling), slots + ceiling / _INCREASES_TO_CEILING)


class SlotControl:
    """The slots of a rollout service between `floor` and `ceiling`; a floor of 0 means all of them, always.

    Every episode may call every base model, so that the base with the fewest slots decides.
    """

    def __init__(self, *, floor: int, ceiling: int):
        self._floor, self._ceiling = floor, ceiling
        self._slots = float(floor or ceiling)
        self._loads: Mapping[str, Load] = {}  # by base model, as last seen

    @property
    def adaptive(self) -> bool:
        return self._floor > 0

    @property
    def slots(self) -> int:
        return math.floor(self._slots)

    def update(self, loads: Mapping[str, Load], playing: int) -> None:
        """Set the slots by the loads of those bases that answered, with `playing` episodes under way."""
        bounds = {"playing": playing, "floor": self._floor, "ceiling": self._ceiling}
        proposed = [
            next_slots(self._slots, load, load.preemptions - self._loads.get(base, load).preemptions, **bounds)
            for base, load in loads.items()
        ]
        self._slots = min(proposed, default=self._slots)
        self._loads = {**self._loads, **loads}


# --------------------------------------------------------------------------------------------------- served base models


class ServedBase:
    """One base model: it speaks for the policies trained on it, and under its own name as it is.

    `up` is whether one of its engines was alive at the last look, `load` how busy they were.
    """

    def __init__(
        self,
        name: str,
        policies: Collection[str],
        *,
        engine: Engines,
        follower: Follower,
        codec: Codec,
        patience_s: float,
        logs: str,
    ):
        self.name, self.policies = name, tuple(policies)
        self.engine, self.follower, self.codec = engine, follower, codec
        self._patience_s, self._logs, self._seen_s = patience_s, logs, time.monotonic()
        self.up = False
        self.load: Load | None = None

    async def generate(
        self, model: str, pinned: int | None, prompt_ids: Sequence[int], sampling: SamplingOptions, *, group: str
    ) -> EngineReply:
        """Sample one turn of the base itself, or of a policy: of the version `pinned`, or else of the newest when the
        turn begins and of those that replace it meanwhile.

        Raises:
            EngineError: the engines are away, refuse, or do not get the version.
        """
        name, pause_s = model, _FIRST_PROBE_S
        while True:
            with contextlib.ExitStack() as held:
                if model != self.name:
                    version = self.follower.current(model)[0] if pinned is None else pinned
                    # Before the request is sent: the follower could else unload an old version between the two.
                    name = held.enter_context(self.follower.requesting(model, version))
                try:
                    return await self.engine.generate(
                        name, prompt_ids, sampling, group=group, pinned=pinned is not None
                    )
                except UnknownModel:  # the engine has restarted, was not asked for its list yet, or holds other weights
                    if pause_s > self._patience_s:  # it lists the model, yet refuses it again and again
                        raise
                    self.follower.recheck(name)
                    await asyncio.sleep(pause_s)
                    await self.served(model, pinned)
            pause_s *= 2

    async def served(self, model: str, version: int | None) -> None:
        """Wait until an engine has that version of a policy (None: the current one), or the base itself.

        Raises:
            EngineError: none has it in time; `VersionAway` if the version was named and is available here.
        """
        if model == self.name:
            await self._soon(model, self.follower.listed(model))
        elif version is None:
            await self._soon(model, self.follower.serve_current(model))
        else:
            away = VersionAway if version in self.follower.held(model) else EngineError
            await self._soon(model_name(model, version), self.follower.serve(model, version), away)

    async def _soon(self, name: str, served: Awaitable[None], away: type[EngineError] = EngineError) -> None:
        arrival = asyncio.ensure_future(served)
        try:
            while not (await asyncio.wait({arrival}, timeout=self._patience_s))[0]:
                # Waiting for an evaluation's long episodes is no fault: they keep the engines' weights until they end.
                if not self.follower.waits(name):
                    serving = ", ".join(sorted(self.follower.listing())) or "nothing"
                    raise away(
                        f"{name} has not come to the engine within {self._patience_s:.0f} s: it serves {serving}, see "
                        f"{self._logs}"
                    )
            arrival.result()
        finally:
            arrival.cancel()

    async def watch(self) -> None:
        """Ask whether an engine is alive.

        Raises:
            EngineError: none has been for longer than they may take to start.
        """
        up, now_s = await self.engine.healthy(), time.monotonic()
        if up != self.up:
            _log.info("the engine of %s is %s", self.name, "up" if up else "away")
        self.up = up
        self._seen_s = now_s if up else self._seen_s
        if (away_s := now_s - self._seen_s) > self._patience_s:
            raise EngineError(f"the engine has been away for {away_s:.0f} s ({self.engine.trouble}): see {self._logs}")

    def status(self) -> dict[str, Any]:
        return {
            "up": self.up,
            **({"load": asdict(self.load)} if self.load else {}),
            **(self.engine.status() if isinstance(self.engine, EnginePool) else {}),
        }


@contextlib.asynccontextmanager
async def bases_of_run(run: Run, urls: Mapping[str, Sequence[str]]) -> AsyncIterator[list[ServedBase]]:
    """The base models of a run, whose engines are at these addresses, by base.

    Raises:
        ValueError: a model's folder has no usable tokenizer or shape.
    """
    async with contextlib.AsyncExitStack() as opened:
        bases = []
        for name, base in run.bases.items():
            policies = run.policies_on(name)
            engine = await opened.enter_async_context(engines_of_base(base, run.folder, urls[name]))
            follower = Follower(
                engine.members,
                run.folder,
                {policy: hand_over(trained) for policy, trained in policies.items()},
                max_staleness=run.config.dataflow.max_staleness,
                logs=base.logs,
            )
            codec = Codec(
                Path(base.model.path),
                max_prompt_tokens=run.config.rollout.max_prompt_tokens,
                template_options=base.model.template_options.to_dict(),
            )
            parts: dict[str, Any] = {"engine": engine, "follower": follower, "codec": codec}
            bases.append(ServedBase(name, policies, **parts, patience_s=base.engine.start_timeout_s, logs=base.logs))
        yield bases
