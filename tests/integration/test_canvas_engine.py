"""Workflows answered by a run's own vLLM: the base model, a policy's adapter, and an executor of a run that trains."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_rollout_real_engine import START_S, VllmRun

from flowjax.canvas import Cache, Problem, backends_from_config, load_operators, parse, run
from flowjax.canvas.backends.openai import OpenAIBackend
from flowjax.monitor.metrics import evaluation_lines, read_metrics
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

    async def streamed() -> None:
        """Replies that are told as they grow are those that come whole, in text and tokens."""
        told: list[str] = []
        plain = await alone()
        grown = await alone(on_event=lambda event: told.append(event.text or ""), stream=True)
        told = [text for text in told if text]
        assert len(told) > 1 and any(later.startswith(text) for text, later in pairwise(told))
        assert [(node.outputs, node.usage, node.error) for node in grown.trace] == [
            (node.outputs, node.usage, node.error) for node in plain.trace
        ]

    async def alone(**options: Any):
        return await run(
            parse("Custom -> Custom -> Custom"),  # one after the other: a batch may round otherwise
            Problem("up down left right"),
            operators=load_operators(),
            backends=backends,
            default_backend="base",
            temperature=1.0,
            max_new_tokens=1024,
            **options,
        )

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
            await streamed()
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


ROOT = Path(__file__).parents[2]
STEPS = 3


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_a_run_teaches_serves_and_asks_its_own_nano_executor(tmp_path: Path):
    """The command alone makes both bases, starts both engines, and trains on what the executor has replied."""
    command = [
        sys.executable, "-m", "flowjax.launch", "--config=configs/canvas.py:nano_llm", "--config.name=run",
        f"--config.runs={tmp_path}", f"--config.model.path={tmp_path / 'policy'}",
        f"--config.bases.executor.model.path={tmp_path / 'executor'}", "--config.warm_start.steps=120",
        "--config.warm_start.states=1500", "--config.bases.executor.warm_start.steps=30",
        "--config.bases.executor.warm_start.states=3000", f"--config.trainer.steps={STEPS}",
        "--config.trainer.groups_per_step=4", "--config.rollout.group_size=4", "--config.eval.tasks=16",
        "--config.optimizer.warmup_steps=0",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run_dir = tmp_path / "run"
    train = [line for line in read_metrics(run_dir) if line["kind"] == "train"]
    assert [line["step"] for line in train] == list(range(1, STEPS + 1))
    assert all(line["trained_tokens"] > 0 and line["mismatch_kl"] < 1e-6 for line in train)
    evaluations = evaluation_lines(read_metrics(run_dir))
    assert [(line["version"], line["episodes"]) for line in evaluations] == [(0, 16), (STEPS, 16)]
    status = json.loads((run_dir / "status-rollout.json").read_text())
    assert status["failed_episodes"] == 0 and set(status["bases"]) == {"base", "executor"}
    with closing(sqlite3.connect(run_dir / "executor-replies.sqlite")) as kept:
        replies = [json.loads(outputs) for (outputs,) in kept.execute("SELECT outputs FROM results")]
    prompt_tokens = [json.loads(reply["usage"])[1] for reply in replies]
    assert len(replies) > 20 and sum(prompt_tokens) < 100 * len(replies), "requests are tens of tokens"
    assert all(0 < sampled_tokens <= 128 for *_, sampled_tokens, _ in (json.loads(reply["usage"]) for reply in replies))
