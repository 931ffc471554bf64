"""The base models of a run as its episodes see them: engines, what these serve, and the tokenizer of each."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowjax.rollout.client import EngineError, EngineReply, Load, SamplingOptions, UnknownModel
from flowjax.rollout.engines import EnginePool, Engines, engines_of_base
from flowjax.run import Run
from flowjax.weights.follow import Follower, model_name
from flowjax.weights.hand_over import hand_over
from flowjax.workflows.codec import Codec

_log = logging.getLogger(__name__)


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
        self._patience_s, self._logs = patience_s, logs
        self.up = False
        self.load: Load | None = None
        self._seen_s = time.monotonic()

    async def generate(
        self, model: str, pinned: int | None, prompt_ids: Sequence[int], sampling: SamplingOptions, *, group: str
    ) -> EngineReply:
        """One turn of the base itself; or of a policy, of the version `pinned` or else of the newest when it begins.

        Raises:
            EngineError: the engines are away, refuse, or do not get the version.
        """
        if model == self.name:
            return await self._generate_frozen(prompt_ids, sampling, group)
        while True:
            version = self.follower.current(model)[0] if pinned is None else pinned
            name = model_name(model, version)
            with self.follower.using(model, version):
                try:
                    return await self.engine.generate(name, prompt_ids, sampling, group=group)
                except UnknownModel:  # the engine has been restarted, or holds other weights by now
                    self.follower.recheck(name)
                    await self.served(model, pinned)

    async def _generate_frozen(self, prompt_ids: Sequence[int], sampling: SamplingOptions, group: str) -> EngineReply:
        while True:
            try:
                return await self.engine.generate(self.name, prompt_ids, sampling, group=group)
            except UnknownModel:  # engines that have just come up have not been looked at yet
                self.follower.recheck(self.name)
                await self._soon(self.name, self.follower.listed(self.name))

    async def served(self, policy: str, version: int | None) -> None:
        """Wait until an engine has that version, or whichever is the current one.

        Raises:
            EngineError: none has it in time.
        """
        if version is None:
            await self._soon(policy, self.follower.serve_current(policy))
        else:
            await self._soon(model_name(policy, version), self.follower.serve(policy, version))

    async def _soon(self, name: str, served: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await served
        except TimeoutError as error:
            raise EngineError(
                f"{name} has not come to the engine within {self._patience_s:.0f} s: see {self._logs}"
            ) from error

    async def watch(self) -> None:
        """Take a look whether an engine is alive.

        Raises:
            EngineError: none has been for longer than they may take to start.
        """
        up, now_s = await self.engine.healthy(), time.monotonic()
        if up != self.up:
            _log.info("the engine of %s is %s", self.name, "up" if up else "away")
        self.up = up
        self._seen_s = now_s if up else self._seen_s
        if now_s - self._seen_s > self._patience_s:
            raise EngineError(f"the engine has been away for {now_s - self._seen_s:.0f} s: see {self._logs}")

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
