"""A run folder as a run leaves it, by the run's own writers: a noisy expert that gets better plays in place
of engines and trainer."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from flowjax.config import default_config, save_run
from flowjax.dataflow.batches import credit_batch
from flowjax.envs import Env, Observation, Split, Step, World, find_world
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
from flowjax.trainer.batch import lay_out, plan
from flowjax.trainer.log import episode_metrics, write_trained
from flowjax.trainer.sources import ServedBatch
from flowjax.workflows import Agent
from flowjax.workflows.codec import Codec
from flowjax.workflows.single import EpisodeOptions, play

SHAPE = {"rows": 6, "columns": 6, "boxes": 1}
TRAINED_LESS = 0.1  # log-prob that every token has lost at training
ESTIMATOR = "rewardflow"


class _Session:
    """An environment in this process."""

    def __init__(self, env: Env):
        self._env = env

    async def reset(self, task: Task, seed: int) -> Observation:
        return self._env.reset(task, seed)

    async def step(self, action: str) -> Step:
        return self._env.step(action)


class _Completion:
    """A reply as an engine gives it."""

    def __init__(self, ids: Sequence[int], version: int, finish_reason: str):
        self.sampled_ids, self.logprobs = ids, [-0.3 - 0.2 * place for place in range(len(ids))]
        self.finish_reason, self.spans = finish_reason, [(f"agent@{version}", len(ids))]


@dataclass(frozen=True)
class Played:
    """A world, its options, what rewards are made of, and the actions that a policy may err to."""

    world: str
    options: Mapping[str, Any]
    components: Mapping[str, Any]
    max_turns: int
    slips: Sequence[str]

    def make(self) -> World:
        return find_world(self.world)(**self.options)


SOKOBAN = Played("flowjax.envs.sokoban:Sokoban", SHAPE, {"success": 1.0}, 8, ("up", "down", "left", "right", "none"))
CANVAS = Played(
    "flowjax.envs.canvas:Canvas",
    {"turns": 6, "allow_no_isolation": True, "kinds": ("arithmetic", "words")},
    {"canvas": {"weight": 1.0}, "invalid_actions": 0.05},
    6,
    ("add Plan", "add Custom", "delete n1", "finish", "Plan Plan"),
)


def record_run(
    folder: Path,
    *,
    steps: int,
    groups: int = 2,
    size: int = 4,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    played: Played = SOKOBAN,
) -> Path:
    """Write a run of so many steps; returns its folder."""
    config = default_config()
    config.env.name, config.name, config.seed = played.world, folder.name, seed
    config.env.options, config.env.max_turns, config.env.prompt = dict(played.options), played.max_turns, "compact"
    config.reward.components, config.credit.name = dict(played.components), ESTIMATOR
    config.model.path, config.trainer.steps = str(folder / "base"), steps
    config.credit.options = {"gamma": 0.9}
    for field, value in (changes or {}).items():
        section, name = field.split(".")
        config[section][name] = value
    save_run(config, folder)
    build_tokenizer(played.make().vocabulary(), folder / "base")
    with recorded_start([folder], ["python", "-m", "flowjax.launch", "--config=configs/sokoban.py:nano"]) as start:
        _Recorder(folder, played, seed).steps(steps, groups, size)
        start["exit_status"] = 0
    return folder


class _Recorder:
    """Plays, credits and writes in place of the roles of a run."""

    def __init__(self, folder: Path, played: Played, seed: int):
        self._folder, self._played = folder, played
        self._metrics, self._codec = MetricsWriter(folder), Codec(folder / "base")
        self._rng = np.random.default_rng(seed)

    def steps(self, steps: int, groups: int, size: int) -> None:
        for event in ("start", "up", "down", "restart", "up"):
            self._metrics.write("run", role="engine", event=event, text=f"process {event}")
        self._evaluate(0, noise=0.7)
        tasks = self._tasks("train", 40)
        for step in range(steps):
            noise = 0.7 - 0.6 * step / steps
            drawn = [tasks[(step * groups + number) % len(tasks)] for number in range(groups)]
            names = [f"train-{step}-{number}" for number in range(groups)]
            self._step(
                step,
                [
                    Group(name, task, [self._play(task, f"{name}/{k}", noise, step) for k in range(size)])
                    for name, task in zip(names, drawn, strict=True)
                ],
                share=step / steps,
            )
        self._evaluate(steps, noise=0.1)

    def _step(self, step: int, groups: Sequence[Group], share: float) -> None:
        components = dict(self._played.components)
        options = {"gamma": 0.9}
        batch = credit_batch(groups, components=components, estimator=ESTIMATOR, options=options, with_parts=True)
        played = [(group.task, trajectory) for group in groups for trajectory in group.trajectories]
        lines = [transcript(*each, credit) for each, credit in zip(played, batch.credits, strict=True)]
        write_lines(batch_path(self._folder, "agent", step), lines)
        _train(self._folder, step, batch.rows)
        served = ServedBatch("agent", batch.rows, batch.totals, 0)
        timed = {"wait_s": 1.0, "pack_s": 0.1, "step_s": 2.0, "save_s": 0.2, "keep_s": 0.01}
        learned = {"entropy": 0.6 - 0.3 * share, "mismatch_kl": 1e-4, "staleness_mean": 1.0, "total_s": 3.21}
        self._metrics.write("train", step=step + 1, policy="agent", **timed, **learned, **episode_metrics(served))

    def _evaluate(self, version: int, *, noise: float) -> None:
        """Write an evaluation with every episode turn by turn."""
        tasks = self._tasks("held_out", 24)
        played = [
            (task, self._play(task, f"eval-agent@{version}-{number:06d}/000", noise, version))
            for number, task in enumerate(tasks)
        ]
        solved = [trajectory.outcome["success"] for _, trajectory in played]
        paid = [Credit(success, {"success": success}) for success in solved]
        lines = [transcript(*each, credit) for each, credit in zip(played, paid, strict=True)]
        write_lines(held_out_path(self._folder, f"agent@{version}"), lines)
        share, low, high = sum(solved) / len(solved), *wilson(sum(solved), len(solved))
        policy = {"reward_mean": share, "reward_low": low, "reward_high": high, "trajectories": len(solved)}
        counted = {"tasks": len(solved), "episodes": len(solved), "seconds": 1.0, "policies": {"agent": policy}}
        found = {"success_rate": share, "low": low, "high": high, "versions": {"agent": version}}
        self._metrics.write("eval", step=version, **found, **counted)

    def _tasks(self, split: Split, count: int) -> list[Task]:
        source = self._played.make().tasks(split, 0)
        return [task for index in range(count) if (task := source[index]) is not None]

    def _play(self, task: Task, name: str, noise: float, version: int) -> Trajectory:
        """One episode of the expert, who errs at random, and now and then says what is no action."""
        world = self._played.make()
        env = world.env()

        async def generate(prompt_ids: list[int]) -> _Completion:
            del prompt_ids
            slips = self._rng.random() < noise
            said = str(self._rng.choice(self._played.slips)) if slips else world.expert(env)
            return _Completion(self._codec.encode_reply(world.reply(said, "compact")), version, "stop")

        options = EpisodeOptions(world, self._played.max_turns, "compact")
        agents = {"agent": Agent(self._codec, generate)}
        (part,) = asyncio.run(play(task, seed=0, env=_Session(env), agents=agents, options=options)).parts
        group, turns = name.partition("/")[0], part.turns
        return Trajectory(name, group, task.task_id, 0, turns, part.outcome, shown=part.shown)


def _train(folder: Path, step: int, rows: Sequence[TokenRow]) -> None:
    """Write log-probs at training, as of rows that were shuffled and packed."""
    shuffled = [rows[place] for place in np.random.default_rng(step).permutation(len(rows))]
    planned = plan(shuffled, row_tokens=256, micro_batch_rows=2)
    place = {id(row): index for index, row in enumerate(rows)}
    order = [[place[id(shuffled[index])] for index in each.numbered] for each in planned]
    batches = [lay_out(shuffled, each) for each in planned]
    found = [jnp.asarray(batch.behaviour_logprobs) - TRAINED_LESS for batch in batches]
    write_trained(trained_path(folder, "agent", step), rows, order, batches, found)
