"""A run folder as a run of Sokoban leaves it, by the run's own writers: a noisy expert that gets better plays in place
of engines and trainer."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.config import default_config, save_run
from flowjax.dataflow.rows import credit_batch
from flowjax.envs.base import Observation, Split, Step
from flowjax.envs.sokoban import Sokoban
from flowjax.envs.sokoban.world import SokobanEnv
from flowjax.models.nano import build_tokenizer
from flowjax.monitor.metrics import MetricsWriter
from flowjax.monitor.provenance import recorded_start
from flowjax.monitor.statistics import wilson
from flowjax.monitor.transcripts import (
    Credit,
    batch_path,
    held_out_path,
    trained_path,
    transcript,
    write_lines,
)
from flowjax.records import Group, Task, TokenRow, Trajectory
from flowjax.trainer.batch import pack, packing_order
from flowjax.trainer.log import episode_metrics, write_trained
from flowjax.trainer.sources import Served
from flowjax.workflows.agent import Agent
from flowjax.workflows.codec import Codec
from flowjax.workflows.single import EpisodeOptions, play

SHAPE = {"rows": 6, "columns": 6, "boxes": 1}
MAX_TURNS = 8
TRAINED_LESS = 0.1  # log-prob that every token has lost at training
ESTIMATOR = "rewardflow"


class _Session:
    """An environment in this process."""

    def __init__(self, env: SokobanEnv):
        self._env = env

    async def reset(self, task: Task, seed: int) -> Observation:
        return self._env.reset(task, seed)

    async def step(self, action: str) -> Step:
        return self._env.step(action)


class _Completion:
    """A reply as an engine gives it."""

    def __init__(self, ids: Sequence[int], version: int, finish_reason: str):
        self.sampled_ids, self.logprobs = ids, [-0.3 - 0.2 * place for place in range(len(ids))]
        self.finish_reason, self.model = finish_reason, f"agent@{version}"


def record_run(
    folder: Path, *, steps: int, groups: int = 2, size: int = 4, seed: int = 0, changes: Mapping[str, Any] | None = None
) -> Path:
    """Write a run of so many steps; returns its folder."""
    config = default_config()
    config.env.name, config.name, config.seed = "flowjax.envs.sokoban:Sokoban", folder.name, seed
    config.env.options, config.env.max_turns, config.env.prompt = SHAPE, MAX_TURNS, "compact"
    config.reward.components, config.credit.name = {"success": 1.0}, ESTIMATOR
    config.model.path, config.trainer.steps = str(folder / "base"), steps
    config.credit.options = {"gamma": 0.9}
    for field, value in (changes or {}).items():
        section, name = field.split(".")
        config[section][name] = value
    save_run(config, folder)
    build_tokenizer(Sokoban().vocabulary(), folder / "base")
    with recorded_start(folder, ["python", "-m", "flowjax.launch", "--config=configs/sokoban.py:nano"]) as start:
        _steps(folder, steps, groups, size, seed)
        start["exit_status"] = 0
    return folder


def _steps(folder: Path, steps: int, groups: int, size: int, seed: int) -> None:
    metrics, rng, tasks = MetricsWriter(folder), np.random.default_rng(seed), _tasks("train", 40)
    codec = Codec(folder / "base")
    for event, text in (
        ("start", "process 1"),
        ("up", "after 3 s"),
        ("down", "ended by itself"),
        ("restart", ""),
        ("up", ""),
    ):
        metrics.write("run", role="engine", event=event, text=text)
    evaluate(folder, metrics, codec, 0, noise=0.7, rng=rng)
    for step in range(steps):
        noise = 0.7 - 0.6 * step / steps
        played = [
            Group(
                f"train-{step}-{number}",
                task,
                [_play(codec, task, f"train-{step}-{number}/{k}", noise, step, rng) for k in range(size)],
            )
            for number, task in enumerate(tasks[(step * groups + number) % len(tasks)] for number in range(groups))
        ]
        batch = credit_batch(
            played, components={"success": 1.0}, estimator=ESTIMATOR, options={"gamma": 0.9}, with_parts=True
        )
        lines = [(group.task, trajectory) for group in played for trajectory in group.trajectories]
        write_lines(
            batch_path(folder, "agent", step),
            [transcript(*each, credit) for each, credit in zip(lines, batch.credits, strict=True)],
        )
        _train(folder, step, batch.rows)
        served = Served("agent", batch.rows, batch.totals, 0)
        timed = {"wait_s": 1.0, "pack_s": 0.1, "mismatch_s": 0.1, "step_s": 2.0, "save_s": 0.2, "keep_s": 0.01}
        learned = {"entropy": 0.6 - 0.3 * step / steps, "mismatch_kl": 1e-4, "staleness_mean": 1.0, "total_s": 3.21}
        metrics.write("train", step=step + 1, policy="agent", **timed, **learned, **episode_metrics(served))
    evaluate(folder, metrics, codec, steps, noise=0.1, rng=rng)


def _tasks(split: Split, count: int) -> list[Task]:
    source = Sokoban(**SHAPE).tasks(split, 0)
    return [task for index in range(count) if (task := source[index]) is not None]


def _play(codec: Codec, task: Task, name: str, noise: float, version: int, rng: np.random.Generator) -> Trajectory:
    """One episode of the expert, who errs at random, and now and then says what is no action."""
    world, env = Sokoban(**SHAPE), Sokoban(**SHAPE).env()

    async def generate(prompt_ids: list[int]) -> _Completion:
        del prompt_ids
        wrong = str(rng.choice(["up", "down", "left", "right", "none"]))
        said = wrong if rng.random() < noise else world.expert(env)
        return _Completion(codec.encode_reply(said), version, "stop")

    options = EpisodeOptions(world, MAX_TURNS, "compact")
    agents = {"agent": Agent(codec, generate)}
    (part,) = asyncio.run(play(task, seed=0, env=_Session(env), agents=agents, options=options)).parts
    return Trajectory(name, name.partition("/")[0], task.task_id, 0, part.turns, part.outcome, shown=part.shown)


def _train(folder: Path, step: int, rows: Sequence[TokenRow]) -> None:
    """Write log-probs at training, as of rows that were shuffled and packed."""
    shuffled = [rows[place] for place in np.random.default_rng(step).permutation(len(rows))]
    packing: dict[str, Any] = {"row_tokens": 256, "micro_batch_rows": 2}
    place = {id(row): index for index, row in enumerate(rows)}
    order = [[place[id(shuffled[index])] for index in indices] for indices in packing_order(shuffled, **packing)]
    batches = pack(shuffled, **packing)
    found: list[Any] = [np.asarray(batch.behaviour_logprobs) - TRAINED_LESS for batch in batches]
    write_trained(trained_path(folder, "agent", step), rows, order, batches, found)


def evaluate(
    folder: Path, metrics: MetricsWriter, codec: Codec, version: int, *, noise: float, rng: np.random.Generator
) -> None:
    """Write an evaluation with every episode turn by turn."""
    tasks = _tasks("held_out", 24)
    played = [
        (tasks[k], _play(codec, tasks[k], f"eval-agent@{version}-{k:06d}/000", noise, version, rng)) for k in range(24)
    ]
    solved = [trajectory.outcome["success"] for _, trajectory in played]
    lines = [
        transcript(task, each, Credit(each.outcome["success"], {"success": each.outcome["success"]}))
        for task, each in played
    ]
    write_lines(held_out_path(folder, f"agent@{version}"), lines)
    share, low, high = sum(solved) / len(solved), *wilson(sum(solved), len(solved))
    reward = {"reward_mean": share, "reward_low": low, "reward_high": high, "trajectories": len(solved)}
    metrics.write(
        "eval",
        step=version,
        versions={"agent": version},
        success_rate=share,
        low=low,
        high=high,
        tasks=len(solved),
        episodes=len(solved),
        seconds=1.0,
        policies={"agent": reward},
    )
