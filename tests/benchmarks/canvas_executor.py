"""Skills of the nano executor, and the best fixed workflow: python -m tests.benchmarks.canvas_executor

Makes the executor of a recipe where it is not there yet, serves it as a run would, and plays fixed workflows in the
recipe's world on held-out exercises: the share that is right, by kind of exercise, with requests and tokens an episode.
What an agent learns is worth something only beside the best of these workflows at the same requests.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from absl import app, flags

from flowjax.config import save_run
from flowjax.envs import ENGINES_VARIABLE, RUN_VARIABLE, find_world
from flowjax.envs.canvas import Canvas
from flowjax.envs.canvas.exercises import KINDS, PHRASES
from flowjax.launch.command_line import load_recipe
from flowjax.launch.roles import missing_bases
from flowjax.monitor.statistics import wilson
from flowjax.records import Task
from flowjax.run import Run, read_run
from tests.benchmarks.runs import serving

_PLAYED_AT_ONCE = 24

SOLVERS = ("Custom", "AnswerGenerate", "Programmer")
PHRASED = [f'{solver}{{"{word}"}}' for solver in ("Custom", "Programmer") for word in PHRASES]
TEMPLATES = (
    *("Plan -> Custom", "Plan -> Programmer", "Decompose -> Programmer", "Custom -> Format"),
    *("[Custom, Custom, Custom] -> ScEnsemble", "[Programmer, Programmer, Programmer] -> ScEnsemble"),
    "[Programmer, AnswerGenerate, Custom] -> ScEnsemble -> Format",
    *("Custom -> (Review ? done : Revise)", "Programmer -> (Verify ? done : Revise)"),
    "Programmer -> (Test ? done : Revise)",
    "Plan -> Programmer -> (Verify ? done : Revise) -> Format",
)


@contextmanager
def served(run: Run) -> Iterator[dict[str, list[str]]]:
    """Addresses of the engines of the run's further bases, by base; stopped afterwards."""
    urls: dict[str, list[str]] = {}
    with serving(run, [engine for engine in run.engines if engine.base in run.config.bases]) as found:
        for each in found:
            urls.setdefault(each.engine.base, []).append(each.url)
        yield urls


def played(world: Canvas, workflow: str, tasks: Sequence[Task]) -> list[dict[str, float]]:
    """Outcome of a workflow, built in one edit, on each task."""

    def one(task: Task) -> dict[str, float]:
        env = world.env()
        env.reset(task, task.seed)
        return dict(env.step(f"add {workflow}").outcome)

    with ThreadPoolExecutor(_PLAYED_AT_ONCE) as pool:
        return list(pool.map(one, tasks))


def row(workflow: str, tasks: Sequence[Task], outcomes: Sequence[dict[str, float]]) -> str:
    """A line of the table."""
    by_kind = defaultdict(list)
    for task, outcome in zip(tasks, outcomes, strict=True):
        by_kind[task.kind].append(outcome["success"])
    right = int(sum(outcome["success"] for outcome in outcomes))
    low, high = wilson(right, len(outcomes))
    spent = [np.mean([outcome[name] for outcome in outcomes]) for name in ("executor_calls", "executor_tokens")]
    kinds = " | ".join(f"{np.mean(by_kind[kind]):.2f}" for kind in KINDS)
    share = f"{right / len(outcomes):.3f} [{low:.3f}, {high:.3f}]"
    return f"| `{workflow}` | {kinds} | {share} | {spent[0]:.1f} | {spent[1]:.0f} |"


def main(argv: Sequence[str]) -> None:
    del argv
    config = load_recipe(flags.FLAGS.recipe)
    if flags.FLAGS.executor:
        config.bases.executor.model.path = flags.FLAGS.executor
    with tempfile.TemporaryDirectory() as folder:
        save_run(config, Path(folder))
        run = read_run(Path(folder))
        for base in missing_bases(run):
            if base in config.bases:
                command = [sys.executable, "-m", "flowjax.trainer.warm_start", f"--run={folder}", f"--base={base}"]
                subprocess.run(command, check=True)
        world = find_world(config.env.name)(**config.env.options.to_dict())
        assert isinstance(world, Canvas)
        tasks = list(world.tasks("held_out", config.env.data_seed)[: flags.FLAGS.exercises])
        with served(run) as urls:
            os.environ |= {RUN_VARIABLE: folder, ENGINES_VARIABLE: json.dumps(urls)}  # as environments are told
            print(f"| workflow | {' | '.join(KINDS)} | right | requests | tokens |")
            print("|---" * (len(KINDS) + 4) + "|")
            started_s, requests = time.monotonic(), 0.0
            for workflow in (*SOLVERS, *PHRASED, *TEMPLATES, *flags.FLAGS.workflow):
                outcomes = played(world, workflow, tasks)
                requests += sum(outcome["executor_calls"] for outcome in outcomes)
                print(row(workflow, tasks, outcomes), flush=True)
            print(f"\n{requests / (time.monotonic() - started_s):.0f} requests/s, equal ones counted each time")


if __name__ == "__main__":
    flags.DEFINE_string("recipe", "configs/canvas.py:nano_llm", "Its executors are served.")
    flags.DEFINE_string("executor", "", "Model folder of the executor, where it is not the recipe's.")
    flags.DEFINE_integer("exercises", 200, "Held-out exercises of all kinds.")
    flags.DEFINE_multi_string("workflow", [], "Further workflows; a phrase is said by its word.")
    app.run(main)
