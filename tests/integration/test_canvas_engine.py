"""A workflow answered by the run's own vLLM: the base model and a policy's adapter, both over the chat endpoint."""

import asyncio
from pathlib import Path

import pytest
from test_rollout_real_engine import START_S, VllmRun

from flowjax.canvas import Cache, Problem, backends_from_config, load_operators, parse, run
from flowjax.canvas.backends.openai import OpenAIBackend
from flowjax.rollout.client import EngineClient
from flowjax.run import resolve
from flowjax.weights.hand_over import hand_over
from flowjax.weights.publish import read_adapter


@pytest.mark.integration
def test_operators_are_answered_by_the_runs_own_engine(tmp_path: Path):
    serving = VllmRun(tmp_path, engine__max_model_tokens=2048)
    serving.publish(0)
    serving.launch()
    url = f"http://127.0.0.1:{serving.port}"
    endpoint = {"kind": "openai", "base_url": f"{url}/v1"}
    backends = backends_from_config({"base": endpoint | {"model": "base"}, "policy": endpoint | {"model": "agent@1"}})
    workflow = parse("[Custom, Custom, Custom@policy] -> ScEnsemble")
    cache = Cache()

    async def answered(seed: int):
        return await run(
            workflow,
            Problem("up down left right"),
            operators=load_operators(),
            backends=backends,
            default_backend="base",
            cache=cache,
            seed=seed,
            temperature=1.0,
            max_new_tokens=1024,  # this model says anything, and an answer that is cut is none
        )

    async def scenario():
        async with EngineClient(url, request_timeout_s=START_S) as engine:
            async with asyncio.timeout(START_S):
                while not await engine.healthy():
                    await asyncio.sleep(0.2)
            serving.publish(1)
            folder = serving.folder / "adapters" / "agent@1"
            hand_over(resolve(serving.config).policies["agent"]).write(
                folder, read_adapter(serving.folder / "checkpoints" / "agent", 1)
            )
            await engine.load_adapter("agent@1", folder)
            first, again, other = await answered(0), await answered(0), await answered(1)
        for backend in backends.values():
            assert isinstance(backend, OpenAIBackend)
            await backend.close()
        by_base, _, by_policy = first.trace[:3]
        assert first.status == "ok", first.error
        assert by_base.usage.prompt_tokens > 4 and 1 <= by_base.usage.sampled_tokens <= 1024
        assert by_policy.usage.calls == 1
        assert again.answer == first.answer
        assert again.usage.calls < first.usage.calls, "what came to something was cached"
        assert other.usage.calls > 0

    try:
        asyncio.run(scenario())
    finally:
        serving.kill()
