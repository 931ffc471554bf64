"""What is exported of a run says, in a vLLM of its own, just what the run's engine says of the checkpoint."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from flowjax.launch.machine import free_port
from flowjax.monitor.transcripts import batch_path, read_lines, whole_prompts
from flowjax.rollout.client import EngineClient, SamplingOptions
from flowjax.rollout.sidecar import engine_command
from flowjax.run import Run, read_run
from flowjax.weights.follow import Follower
from flowjax.weights.hand_over import hand_over

ROOT = Path(__file__).parents[2]
STEPS, PROMPTS, NEW_TOKENS = 2, 16, 12
START_S = 1800.0


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A short run, whose steps are so long that the trained policy is far from its base."""
    folder = tmp_path_factory.mktemp("exported")
    command = [
        sys.executable, "-m", "flowjax.launch", "--config=configs/sokoban.py:nano", "--name=run",
        f"--config.runs={folder}", f"--config.model.path={folder / 'base'}", "--config.warm_start.steps=20",
        "--config.warm_start.states=1000", f"--config.trainer.steps={STEPS}", "--config.trainer.groups_per_step=4",
        "--config.rollout.group_size=4", "--config.eval.tasks=0", "--config.optimizer.warmup_steps=0",
        "--config.optimizer.learning_rate=0.05", "--config.optimizer.schedule=constant",
    ]  # fmt: skip
    launched = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert launched.returncode == 0, launched.stdout[-4000:] + launched.stderr[-2000:]
    return read_run(folder / "run")


@contextlib.contextmanager
def started(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[None]:
    """A server, for as long as the block lasts."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            argv, env={**os.environ, **env}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def healthy(engine: EngineClient, log: Path) -> None:
    until = time.monotonic() + START_S
    while not await engine.healthy():
        assert time.monotonic() < until, log.read_text()[-3000:]
        await asyncio.sleep(0.5)


async def said(engine: EngineClient, model: str, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """The likeliest tokens after each prompt."""
    greedy = SamplingOptions(0.0, NEW_TOKENS)
    return [(await engine.generate(model, prompt, greedy)).sampled_ids for prompt in prompts]


def of_vllm(folder: Path, model: Path, name: str, prompts: Sequence[list[int]], *more: str) -> list[tuple[int, ...]]:
    """What a vLLM as anybody starts it says; `name` is what it serves."""
    port, log = free_port(), folder / f"{name}.log"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    argv += ["--host=127.0.0.1", "--dtype=float32", "--enforce-eager", "--max-model-len=32", "--served-model-name=base"]

    async def ask() -> list[tuple[int, ...]]:
        async with EngineClient(f"http://127.0.0.1:{port}", request_timeout_s=START_S) as engine:
            await healthy(engine, log)
            return await said(engine, name, prompts)

    # One process each, or a busy machine takes minutes to start the others.
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with started([*argv, "--distributed-executor-backend=uni", *more], env, log):
        return asyncio.run(ask())


def of_run(run: Run, folder: Path, prompts: Sequence[list[int]]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """What the run's own engine says of its last version, and of its base."""
    port, log = free_port(), folder / "own.log"
    argv, env = engine_command(run, run.engines[0], port)

    async def ask() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        async with EngineClient(f"http://127.0.0.1:{port}", request_timeout_s=START_S) as engine:
            await healthy(engine, log)
            form = hand_over(run.policies["agent"])
            follower = Follower([engine], run.folder, {"agent": form}, max_staleness=1)
            following = asyncio.create_task(follower.run())
            try:
                async with asyncio.timeout(START_S):
                    await follower.serve("agent", STEPS)
                return await said(engine, f"agent@{STEPS}", prompts), await said(engine, "base", prompts)
            finally:
                following.cancel()

    with started(argv, env, log):
        return asyncio.run(ask())


def exported(run: Run, form: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "flowjax.export", f"--format={form}", f"--out={folder / form}"]
    command += [f"--checkpoint={run.folder / 'checkpoints/agent' / str(STEPS)}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / form


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(7200)
def test_exported_folders_say_in_vllm_what_the_runs_own_engine_says(run: Run, tmp_path: Path):
    lines = read_lines(batch_path(run.folder, "agent", STEPS - 1))
    played = [tuple(prompt) for line in lines for prompt in whole_prompts(line["turns"])]
    prompts = [list(prompt) for prompt in dict.fromkeys(played)][:PROMPTS]
    assert len(prompts) == PROMPTS
    own, base = of_run(run, tmp_path, prompts)
    assert own != base  # or nothing would be shown
    whole = of_vllm(tmp_path, exported(run, "hf", tmp_path), "base", prompts)
    assert whole == own
    adapter = f"--lora-modules=trained={exported(run, 'peft', tmp_path)}"
    rank = run.policies["agent"].lora.rank
    beside = of_vllm(
        tmp_path, Path(run.config.model.path), "trained", prompts, "--enable-lora", adapter, f"--max-lora-rank={rank}"
    )
    assert beside == own
