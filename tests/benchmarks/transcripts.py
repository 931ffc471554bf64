"""Cost of transcripts: `python -m tests.benchmarks.transcripts runs/<name>`, seconds of a step with them and without.

Takes the batches of a finished run and does again what its processes did: credit with and without writing transcripts
(dataflow), the log-probs at training (trainer), the JSON of every turn (rollout). Processor seconds, so that other work
on the machine does not count; beside them the seconds that the run's steps took, and the bytes on disk.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from flowjax.dataflow.batches import credit_batch
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.transcripts import batch_path, transcript, write_lines
from flowjax.records import Group
from flowjax.report.episodes import RecordedGroup, batches_of, read_batch
from flowjax.run import Policy, read_run
from flowjax.trainer.batch import pack, packing_order
from flowjax.trainer.log import write_trained
from flowjax.workflows import shown_as

_REPEATS = 5


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 0 if set(argv) & {"--help", "-h"} else 2
    folder = Path(argv[0])
    run = read_run(folder)
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    for name, policy in run.policies.items():
        steps = batches_of(folder, name)
        groups = read_batch(folder, name, steps[len(steps) // 2])
        step_s = statistics.median(line["total_s"] for line in lines if line["policy"] == name)
        parts = _seconds(policy, groups)
        size = sum(batch_path(folder, name, step).stat().st_size for step in steps) / len(steps)
        print(f"{name}: a step takes {step_s:.2f} s (median of {len(lines)}); of processor time, transcripts take")
        for part, seconds in parts.items():
            print(f"  {part:40} {1000 * seconds:7.1f} ms  {seconds / step_s:6.2%}")
        total = sum(parts.values())
        print(f"  {'all together':40} {1000 * total:7.1f} ms  {total / step_s:6.2%}")
        print(f"  with them {step_s:.3f} s, without {step_s - total:.3f} s; {size / 1024:.0f} KiB of disk a step")
    return 0


def _seconds(policy: Policy, recorded: list[RecordedGroup]) -> dict[str, float]:
    """Processor seconds that a batch costs, by process."""
    groups = [_as_played(group) for group in recorded]
    components, credit = policy.reward.components.to_dict(), policy.credit
    given = {"components": components, "estimator": credit.name, "options": credit.options.to_dict()}
    packing = {"row_tokens": policy.trainer.row_tokens, "micro_batch_rows": policy.trainer.micro_batch_rows}
    batch = credit_batch(groups, **given)
    micro_batches = pack(batch.rows, **packing)
    with tempfile.TemporaryDirectory() as folder:

        def write() -> None:
            made = credit_batch(groups, **given, with_parts=True)
            played = [(group.task, trajectory) for group in groups for trajectory in group.trajectories]
            lines = (transcript(*each, one) for each, one in zip(played, made.credits, strict=True))
            write_lines(Path(folder) / "batch.gz", lines)

        def train() -> None:
            order, found = (
                packing_order(batch.rows, **packing),
                [jnp.asarray(b.behaviour_logprobs) for b in micro_batches],
            )
            write_trained(Path(folder) / "trained.gz", batch.rows, order, micro_batches, found)

        def show() -> None:
            for line in (line for group in recorded for line in group.lines):
                for turn in line["turns"]:
                    shown_as(**turn.get("shown", {}))

        with_s, without_s = _median(write), _median(lambda: credit_batch(groups, **given))
        return {
            "dataflow: credit's parts, compression": with_s - without_s,
            "trainer: log-probs at training": _median(train),
            "rollout: what turns show": _median(show),
        }


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


def _median(work: Callable[[], object]) -> float:
    work()  # compiles
    found = []
    for _ in range(_REPEATS):
        started_s = time.process_time()
        work()
        found.append(time.process_time() - started_s)
    return statistics.median(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
