"""Cost of records: `python -m tests.benchmarks.records [sokoban | canvas] [pairs of steps]`.

The trainer's own loop on batches of the nano recipe's size, every other step with records
(`config.dataflow.keep_trajectories`), in one process. A batch is credited by what credits it in a run, in the thread
that fetches it ahead; in a run that is another process of the same machine. A step with records has all that they cost:
what turns show, credit's parts, the transcripts of its next batch, the log-probs at training. The episodes are those of
a noisy expert.

Prints both step times, their ratio with its 95 % interval over pairs of steps, in seconds of the clock and of
processors, what each part costs by itself, and the bytes of 200 steps. Seconds of the clock mean little on a machine
that is busy with something else, and it says so.
"""

import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowjax.dataflow.batches import credit_batch
from flowjax.launch.command_line import load_recipe
from flowjax.models.nano import create_nano
from flowjax.monitor.metrics import MetricsWriter
from flowjax.monitor.transcripts import batch_path, held_out_path, trained_path, transcript, write_lines
from flowjax.records import Group
from flowjax.report.episodes import RecordedGroup, read_batch
from flowjax.run import Run, resolve
from flowjax.trainer.batch import lay_out, plan
from flowjax.trainer.log import write_trained
from flowjax.trainer.sources import NO_MISMATCHES, Mismatches, ServedBatch
from flowjax.trainer.train import make_mesh, make_models, start, train
from flowjax.weights.publish import Checkpoints
from flowjax.workflows import shown_as
from tests.report.recorded import CANVAS, SOKOBAN, record_run

_WARM_UP = 4  # steps that are not counted: programs are compiled
_PAIRS, _REPEATS = 20, 9
_STEPS, _EVALUATIONS = 200, 2  # of a run whose records are counted
_POLICY = "agent"


class _Batches:
    """Batches of one run, and the clock of its steps; records are kept in every other step."""

    def __init__(self, run: Run, recorded: Sequence[RecordedGroup]):
        self._run, self._recorded, self._groups = run, recorded, [_as_played(group) for group in recorded]
        self._at: tuple[float, float] | None = None
        self.spent: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # seconds of clock and processors

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        """The batch that is asked for while the step before it is under way, whose turn it counts as."""
        version = steps[_POLICY]
        config, keep = self._run.config, _keeps(version - 1)
        groups = [_at_version(group, version) for group in self._groups]
        batch = credit_batch(
            groups,
            components=config.reward.components.to_dict(),
            estimator=config.credit.name,
            options=config.credit.options.to_dict(),
            with_parts=keep,
        )
        if keep:
            played = [(group.task, trajectory) for group in groups for trajectory in group.trajectories]
            lines = (transcript(*each, credit) for each, credit in zip(played, batch.credits, strict=True))
            write_lines(batch_path(self._run.folder, _POLICY, version), lines)
            for line in (line for group in self._recorded for line in group.lines):
                for turn in line["turns"]:
                    shown_as(**turn.get("shown", {}))
        config.dataflow.keep_trajectories = _keeps(version)  # the step under way has read it by now
        return ServedBatch(_POLICY, batch.rows, batch.totals)

    def parts(self) -> dict[str, float]:
        """Processor seconds of each part of a step's records, by the process of a run that spends them."""
        config, groups = self._run.config, self._groups
        given = {"components": config.reward.components.to_dict(), "estimator": config.credit.name}
        credited = partial(credit_batch, groups, **given, options=config.credit.options.to_dict())
        batch = credited(with_parts=True)
        played = [(group.task, trajectory) for group in groups for trajectory in group.trajectories]
        file = self._run.folder / "measured.gz"
        trainer = config.trainer
        planned = plan(batch.rows, row_tokens=trainer.row_tokens, micro_batch_rows=trainer.micro_batch_rows)
        packed, order = [lay_out(batch.rows, each) for each in planned], [each.numbered for each in planned]
        found = [jnp.asarray(micro_batch.behaviour_logprobs) for micro_batch in packed]
        turns = [turn for group in self._recorded for line in group.lines for turn in line["turns"]]
        pairs = list(zip(played, batch.credits, strict=True))
        return {
            "dataflow: parts of credit": _median(partial(credited, with_parts=True)) - _median(credited),
            "dataflow: transcripts": _median(lambda: write_lines(file, (transcript(*e, c) for e, c in pairs))),
            "trainer: log-probs at training": _median(lambda: write_trained(file, batch.rows, order, packed, found)),
            "rollout: what turns show": _median(lambda: [shown_as(**turn.get("shown", {})) for turn in turns]),
        }

    def committed(self, policy: str, version: int, mismatches: Mismatches = NO_MISMATCHES) -> None:
        """See `flowjax.trainer.sources.Source`."""

    def stepped(self, line: Mapping[str, Any]) -> None:
        """Note the seconds since the step before; `line` is that of a step whose results are there."""
        now = time.perf_counter(), time.process_time()
        if self._at is not None and line["step"] > _WARM_UP:
            self.spent[_keeps(line["step"] - 1)].append((now[0] - self._at[0], now[1] - self._at[1]))
        self._at = now


def _median(work: Callable[[], object]) -> float:
    """Processor seconds of this thread, its caches as cold as once a step."""
    found = []
    for _ in range(_REPEATS):
        time.sleep(0.3)
        started_s = time.thread_time()
        work()
        found.append(time.thread_time() - started_s)
    return float(np.median(found))


def _keeps(version: int) -> bool:
    return version % 2 == 0


def main(argv: Sequence[str]) -> int:
    if {"--help", "-h"} & set(argv) or any(not word.isdigit() and word not in ("sokoban", "canvas") for word in argv):
        print(__doc__)
        return 0 if {"--help", "-h"} & set(argv) else 2
    name = next((word for word in argv if not word.isdigit()), "sokoban")
    pairs = next((int(word) for word in argv if word.isdigit()), _PAIRS)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        batches, run = _trained(Path(folder), name, pairs)
        sizes, parts = _sizes(run), batches.parts()
        episodes = run.policies[_POLICY].trainer.groups_per_step * run.config.rollout.group_size
    busy = f"; a busy machine: load {load:.1f} before, {os.getloadavg()[0]:.1f} after" if load > 1 else ""
    print(f"{name}: {episodes} episodes a step, {pairs} pairs of steps on {os.cpu_count()} cores{busy}")
    for place, what in enumerate(("clock", "processors")):
        kept, bare = (np.array([each[place] for each in batches.spent[kind]]) for kind in (True, False))
        count = min(len(kept), len(bare))
        low, ratio, high = _ratio(kept[:count], bare[:count])
        both = f"with records {np.median(kept):.3f} s, without {np.median(bare):.3f} s"
        print(f"  seconds of {what:10}: {both}; ratio {ratio:.4f} [{low:.4f}, {high:.4f}]")
    step_s = float(np.median([each[1] for each in batches.spent[False]]))
    for what, seconds in parts.items():
        print(f"  {what:40} {1000 * seconds:6.1f} ms of a processor, {seconds / step_s:.2%} of the step without")
    steps, held_out = _STEPS * sizes["step"] / 1e6, _EVALUATIONS * sizes["evaluation"] / 1e6
    beside = f"{_EVALUATIONS} evaluations: {held_out:.1f} MB"
    print(f"  {_STEPS} steps: {steps:.1f} MB; {beside}; together {steps + held_out:.1f} MB")
    return 0


def _trained(folder: Path, name: str, pairs: int) -> tuple[_Batches, Run]:
    """A run of the recipe, trained for so many pairs of steps."""
    config = load_recipe(f"configs/{name}.py:nano")
    config.model.path = str(folder / "run" / "base")
    config.trainer.steps = _WARM_UP + 2 * pairs
    config.optimizer.learning_rate = 1e-6  # the batch is the same each time
    run = resolve(config, folder / "run")
    played = SOKOBAN if name == "sokoban" else CANVAS
    groups, size = config.trainer.groups_per_step, config.rollout.group_size
    recorded = read_batch(record_run(folder / "played", steps=1, groups=groups, size=size, played=played), _POLICY, 0)
    create_nano(played.make().vocabulary(), config.model.path, key=jax.random.key(0), **config.model.nano.to_dict())
    batches = _Batches(run, recorded)
    with Checkpoints(run.folder / "checkpoints" / _POLICY, keep=2) as checkpoints:
        mesh = make_mesh(**config.mesh.to_dict())
        decoder = make_models(run, mesh)[_POLICY]
        learner = start(run, run.policies[_POLICY], decoder, checkpoints)
        metrics = MetricsWriter(run.folder)
        train({_POLICY: learner}, batches, mesh=mesh, metrics=metrics, on_step=batches.stepped)
    return batches, run


def _sizes(run: Run) -> dict[str, float]:
    """Bytes of the records of a step, and of an evaluation as long as the recipe's."""
    batches = sorted(batch_path(run.folder, _POLICY, 0).parent.glob("*.jsonl.gz"))
    trained = sorted(trained_path(run.folder, _POLICY, 0).parent.glob("*.trained.gz"))
    lines = [json.loads(line) for line in _unpacked(batches[0]).splitlines()]
    kept = min(run.config.eval.tasks * run.config.eval.samples, run.config.eval.transcripts)
    held_out = held_out_path(run.folder, "evaluation")
    write_lines(held_out, lines)
    a_step = sum(float(np.mean([file.stat().st_size for file in files])) for files in (batches, trained))
    return {"step": a_step, "evaluation": held_out.stat().st_size / len(lines) * kept}


def _unpacked(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def _ratio(kept: np.ndarray, bare: np.ndarray) -> tuple[float, float, float]:
    """Ratio of the medians, between the ends of its bootstrap interval over pairs of steps."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(kept), (2000, len(kept)))
    found = np.median(kept[drawn], axis=1) / np.median(bare[drawn], axis=1)
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(np.median(kept) / np.median(bare)), float(high)


def _as_played(recorded: RecordedGroup) -> Group:
    """The group with what its turns showed."""
    group = recorded.as_group()
    trajectories = [
        replace(
            trajectory,
            turns=[
                replace(turn, shown=json.dumps(kept.get("shown", {})))
                for turn, kept in zip(trajectory.turns, line["turns"], strict=True)
            ],
        )
        for trajectory, line in zip(group.trajectories, recorded.lines, strict=True)
    ]
    return replace(group, trajectories=trajectories)


def _at_version(group: Group, version: int) -> Group:
    """The group as the policy's newest version would have played it."""
    trajectories = [
        replace(trajectory, turns=[replace(turn, version=version) for turn in trajectory.turns])
        for trajectory in group.trajectories
    ]
    return replace(group, trajectories=trajectories)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
