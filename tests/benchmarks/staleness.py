"""What old tokens and another precision cost, by objective:

    python -m tests.benchmarks.staleness [--objectives=ppo,m2po] [--staleness=0,1,2,4,8] [--seeds=0,1,2,3,4]

Each objective trains a recipe with each `config.dataflow.max_staleness`. The trainer is stopped (SIGSTOP) until as many
batches are ready, as if engines outran it, so that on any machine trained tokens come close to that age (it is
printed). Base, steps and other fields are the same throughout. `bfloat16` is PPO with an engine that samples in it
while the trainer keeps the recipe's precision, `bfloat16_truncated` the same with truncated importance weights.

Prints, and writes to `<out>/<objective>.md` and `.svg`, what `tests/benchmarks/learning.py` says of them: sentences are
on the difference from the freshest. Runs are kept in `--out`; the same command again goes on where it stopped.
docs/losses.md has what was run so far.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from flowjax.config import load_run
from flowjax.monitor.metrics import NewStatus, read_metrics, read_status
from tests.benchmarks.learning import write_comparison
from tests.benchmarks.runs import beside, folder_of, trained

_TRUNCATED = {"loss.options.correction": "token_truncate"}
# Clip bounds of GSPO are those of the recipe: published ones are for replies of thousands of tokens.
OBJECTIVES: Mapping[str, Mapping[str, str]] = {
    "ppo": {},
    "ppo_truncated": _TRUNCATED,
    "m2po": {"loss.kind": "m2po"},
    "gspo": {"loss.kind": "gspo"},
    "cispo": {"loss.kind": "cispo"},
    "cispo_published": {"loss.kind": "cispo", "loss.options.clip_low": "1.0"},  # weights have no lower bound
    "bfloat16": {"engine.dtype": "bfloat16"},
    "bfloat16_truncated": {"engine.dtype": "bfloat16", **_TRUNCATED},
}
_LOOK_EVERY_S = 0.1


def outrun(folder: Path, batches: int) -> contextlib.AbstractContextManager[None]:
    """The trainer of the run in `folder` is stopped until so many batches are ready, or all that are left."""
    launch = NewStatus(folder, "launch")

    def watch(ended: threading.Event) -> None:
        stopped = 0  # process group
        while not ended.wait(_LOOK_EVERY_S):
            trainer = launch.read().get("roles", {}).get("trainer", {}).get("pid", 0)
            wanted = trainer if trainer and is_early(folder, batches) else 0
            for group, sign in ((stopped, signal.SIGCONT), (wanted, signal.SIGSTOP)):
                if group and stopped != wanted:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(group, sign)
            stopped = wanted
        if stopped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(stopped, signal.SIGCONT)

    return beside(watch)


def is_early(folder: Path, batches: int) -> bool:
    """True where a step now would train on tokens that are not yet about `batches` versions old: those of the first
    version cannot be."""
    status = read_status(folder, "dataflow")
    if not status:
        return False
    trainer = load_run(folder).trainer
    (policy,) = status["policies"].values()
    if not policy["open_groups"] and not status["waiting"] and not status["leased"]:
        return False  # no more is played before the trainer goes on: it may have been stopped with one batch more
    # A stopped trainer may hold the next batch beside the one that is under way, and have made a version of a third one
    # that it has not reported.
    ahead = min(batches - 1, trainer.steps - policy["committed"] - 3)
    return policy["committed"] > 0 and policy["ready_groups"] < ahead * trainer.groups_per_step


def ages(runs: Sequence[Path]) -> str:
    """Mean age of trained tokens in versions, of each run."""
    found = ([line for line in read_metrics(run) if line["kind"] == "train"] for run in runs)
    return " ".join(f"{np.mean([line['staleness_mean'] for line in lines]):.2f}" for lines in found)


def main(argv: Sequence[str]) -> None:
    del argv
    given, out = flags.FLAGS, Path(flags.FLAGS.out).absolute()
    common = {"eval.every_steps": given.every_steps, "eval.tasks": given.curve_tasks}
    common |= {"trainer.steps": given.steps} if given.steps else {}
    for objective in given.objectives:
        folder = out / objective
        folder.mkdir(parents=True, exist_ok=True)
        runs: dict[str, list[Path]] = {f"at most {bound}": [] for bound in given.staleness}
        for seed in given.seeds:
            for bound, found in zip(given.staleness, runs.values(), strict=True):
                fields = {**common, **OBJECTIVES[objective], "dataflow.max_staleness": bound}
                settings = [f"--config.{name}={value}" for name, value in fields.items()]
                with outrun(folder_of(given.recipe, seed, folder / bound), int(bound)):
                    found.append(trained(given.recipe, seed, folder / bound, settings)[0])
            text = write_comparison(folder, "age in versions", runs, given.tasks)
            told = "; ".join(f"{name}: {ages(found)}" for name, found in runs.items())
            print(f"{objective}\n\n{text}\nMean age of trained tokens, each seed: {told}\n", flush=True)


if __name__ == "__main__":
    flags.DEFINE_string("recipe", "sokoban:nano", "Recipe in configs/, with :variant where that is not nano.")
    flags.DEFINE_list("objectives", ["ppo", "ppo_truncated", "m2po", "gspo", "cispo"], f"Of {', '.join(OBJECTIVES)}.")
    flags.DEFINE_list("staleness", ["0", "1", "2", "4", "8"], "config.dataflow.max_staleness, freshest first.")
    flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "config.seed of each run.")
    flags.DEFINE_integer("steps", 0, "Steps of each run; the recipe's where 0.", lower_bound=0)
    flags.DEFINE_integer("every_steps", 10, "Steps between held-out evaluations beside training.", lower_bound=1)
    flags.DEFINE_integer("curve_tasks", 256, "Held-out episodes of each of those.", lower_bound=2)
    flags.DEFINE_integer("tasks", 512, "Held-out episodes played greedily after it, and by the base.", lower_bound=2)
    flags.DEFINE_string("out", "runs/staleness", "Folder of the runs and of the tables.")
    app.run(main)
