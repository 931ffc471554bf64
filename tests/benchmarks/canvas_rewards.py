"""Rewards for building workflows, side by side, where a language model executes them:

    python -m tests.benchmarks.canvas_rewards [--recipe=canvas:nano_llm] [--rewards=cwrpo,grpo_cost] [--seeds=0,1,2,3,4]

The same policy's base, the same executors, budget and steps, with another reward:

    cwrpo       structure first, correctness once it is there (the component `canvas`), and requests cost
    grpo_cost   correctness, and requests cost
    grpo        correctness alone
    published   FlowSteer's formula and canvas as published

Then the newest checkpoint plays the held-out exercises greedily, and so does the base; fixed workflows (`--fixed`, and
one `Custom`) are played on the same exercises by the same executors. What a policy learns has to be more than the best
of them. Prints, and writes to `<out>/canvas_rewards.md`, success with its 95 % interval over seeds and exercises,
requests an episode, shares of workflows with a check and a branch that mattered and of those that reach the structure
at which `canvas` releases correctness, the kinds of operators at work, and the share of different ones among the
workflows of the last five batches; beside it a picture of success over requests. A second table says what was built
over training, by requests that the executor had been asked: rewards are at equal executor budget in its lines.

Runs are kept in `--out`; the same command again goes on where it stopped.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import app, flags

from flowjax.canvas.text import parse
from flowjax.compare import read_scores, shared_tasks
from flowjax.config import load_run
from flowjax.dataflow.tasks import content_of
from flowjax.envs import ENGINES_VARIABLE, RUN_VARIABLE, find_world
from flowjax.envs.canvas import Canvas
from flowjax.monitor.held_out import read_held_out
from flowjax.monitor.statistics import difference, task_interval
from flowjax.report.episodes import batches_of, read_batch, workflow_use
from flowjax.rewards import canvas
from flowjax.run import Run, read_run
from tests.benchmarks.canvas_executor import played, served
from tests.benchmarks.learning import COLOURS, HEIGHT, LEFT, TOP, axes, base_evaluation, cells, evaluation
from tests.benchmarks.runs import HOW, machine, trained

REWARDS: Mapping[str, Mapping[str, object]] = {
    "cwrpo": {"canvas": 1.0, "executor_cost": {"weight": 1.0, "per_calls": 50.0}},
    "grpo_cost": {"success": 1.0, "executor_cost": {"weight": 1.0, "per_calls": 50.0}},
    "grpo": {"success": 1.0},
    "published": {"published_canvas": 1.0},
}
ALWAYS: Mapping[str, object] = {"invalid_actions": 0.05, "turn_penalty": 0.01}
PUBLISHED_WORLD = "flowjax.published.canvas:PublishedCanvas"
FIXED = (
    'Programmer{"tested"}', 'Programmer{"stepwise"}', "Plan -> Programmer",
    'Plan -> Programmer{"tested"} -> (Test ? done : Revise) -> Format',
)  # fmt: skip
POLICY = "agent"
LAST = 5  # batches
BUDGETS = (0.25, 0.5, 1.0)  # of the requests of the run that made fewest
NAMED = 4  # operators
STRUCTURE = ("checks", "formats", "distinct_operators", "branching", "operator_entropy", "distinct_siblings")
COLUMNS = (
    "reward", "greedy [95 %]", "each seed", "sampled [95 %]", "each seed", "requests", "check", "branch", "released",
    "kinds", "different",
)  # fmt: skip
TRAINING_COLUMNS = (
    "requests so far", "reward", "step", "right", "each seed", "released", "kinds", "different", "operators a workflow",
)  # fmt: skip


def fields(reward: str) -> list[str]:
    """What sets a reward on the command line."""
    components = {**REWARDS[reward], **ALWAYS}
    world = [f"--config.env.name={PUBLISHED_WORLD}"] if reward == "published" else []
    return [f"--config.reward.components={components}", *world]


def built(evaluation: Path) -> dict[str, float]:
    """Means over the episodes of an evaluation: requests, and what stands in the workflows."""
    return structure([episode.outcome for episode in read_held_out(evaluation)])


def structure(outcomes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over episodes: requests, and what stands in the workflows."""
    values = {
        name: jnp.array([outcome[name] for outcome in outcomes], float) for name in (*STRUCTURE, "executor_calls")
    }
    score = canvas(jnp.zeros(len(outcomes)), *(values[name] for name in STRUCTURE), base=0.0)
    return {
        "requests": float(values["executor_calls"].mean()),
        "check": float((values["checks"] > 0).mean()),
        "branch": float((values["branching"] > 0).mean()),
        "released": float((score >= 1 - 1e-6).mean()),
        "kinds": float(values["distinct_operators"].mean()),
    }


@dataclass(frozen=True)
class Batch:
    """What the episodes of a training batch built."""

    episodes: int
    success: float
    structure: Mapping[str, float]
    different: float  # share among the workflows
    operators: Mapping[str, float]  # in a workflow on average


@functools.cache
def batches(run: Path) -> Sequence[Batch]:
    """The training batches of a run, in order."""
    found: list[Batch] = []
    for step in batches_of(run, POLICY):
        groups = read_batch(run, POLICY, step)
        outcomes = [line["outcome"] for group in groups for line in group.lines]
        use = workflow_use(groups)
        right = float(np.mean([outcome["success"] for outcome in outcomes]))
        shares = use.get("unique", 0.0), use.get("operators", {})
        found.append(Batch(len(outcomes), right, structure(outcomes), *shares))
    return found


def requests_of(run: Path) -> np.ndarray:
    """Requests of the episodes trained on, up to and with each batch."""
    return np.cumsum([batch.episodes * batch.structure["requests"] for batch in batches(run)])


def until(run: Path, requests: float) -> tuple[int, Sequence[Batch]]:
    """The step at which so many requests had been made, and the batches that led to it."""
    step = min(int(np.searchsorted(requests_of(run), requests)) + 1, len(batches(run)))
    return step, batches(run)[max(0, step - LAST) : step]


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def training_rows(runs: Mapping[str, Sequence[Path]]) -> list[str]:
    """What was built over training, at equal numbers of requests; then at the end of each reward's runs."""
    least = min(float(requests_of(run)[-1]) for found in runs.values() for run in found)
    rows = [
        training_row(name, f"{share * least:,.0f}", [until(run, share * least) for run in found])
        for share in BUDGETS
        for name, found in runs.items()
    ]
    for name, found in runs.items():
        all_of = mean(float(requests_of(run)[-1]) for run in found)
        rows.append(training_row(name, f"all, {all_of:,.0f}", [until(run, np.inf) for run in found]))
    return rows


def training_row(name: str, budget: str, found: Sequence[tuple[int, Sequence[Batch]]]) -> str:
    """A line of the second table."""
    each = [mean(batch.success for batch in some) for _, some in found]
    every = [batch for _, some in found for batch in some]
    use: Counter[str] = Counter()
    for batch in every:
        use.update({operator: count / len(every) for operator, count in batch.operators.items()})
    named = ", ".join(f"{operator} {count:.2f}" for operator, count in use.most_common(NAMED))
    seeds = " ".join(f"{100 * value:.0f}" for value in each)
    step = mean(step for step, _ in found)
    shares = [mean(batch.structure["released"] for batch in every), mean(batch.structure["kinds"] for batch in every)]
    shares.append(mean(batch.different for batch in every))
    parts = [budget, name, f"{step:.0f}", f"{100 * mean(each):.1f} %", seeds, *(f"{value:.2f}" for value in shares)]
    return f"| {' | '.join([*parts, named])} |"


def different(run: Path) -> float:
    """Share of different ones among the workflows of each of the last batches, in the mean."""
    return mean(batch.different for batch in batches(run)[-LAST:])


def line(*parts: str) -> str:
    """A line of the table; its last cells are empty where there are fewer."""
    cells = " | ".join(parts).split(" | ")
    return f"| {' | '.join([*cells, *[''] * (len(COLUMNS) - len(cells))])} |"


def row(name: str, runs: Sequence[Path], tasks: int) -> str:
    """A line of the table."""
    sides = [cells([evaluation(run, how, tasks) for run in runs]) for how in HOW]
    found = [built(evaluation(run, "greedy", tasks)) for run in runs]
    means = {key: float(np.mean([each[key] for each in found])) for key in found[0]}
    shares = " | ".join(f"{means[key]:.2f}" for key in ("check", "branch", "released"))
    unique = float(np.mean([different(run) for run in runs]))
    return line(name, *sides, f"{means['requests']:.1f}", shares, f"{means['kinds']:.1f}", f"{unique:.2f}")


def setting(run: Run) -> str:
    """All that scores of a fixed workflow on an exercise depend on beside these two: world, seeds and executors."""
    config = run.config
    world = [config.env.name, config.env.options.to_dict(), config.env.data_seed, config.seed]
    bases = [base for name, base in sorted(run.bases.items()) if name in config.bases]
    executors = [
        [base.name, *(part.to_dict() for part in (base.model, base.engine, base.warm_start))] for base in bases
    ]
    return json.dumps([world, executors], sort_keys=True, default=str)


def fixed_scores(run: Path, workflows: Sequence[str], tasks: int, kept: Path) -> dict[str, dict[str, list[float]]]:
    """Success and requests of fixed workflows on the exercises of the evaluations, by exercise."""
    every: dict[str, dict[str, dict[str, list[float]]]] = json.loads(kept.read_text()) if kept.exists() else {}
    found, config = every.setdefault(setting(read_run(run)), {}), load_run(run)
    world = find_world(config.env.name)(**config.env.options.to_dict())
    assert isinstance(world, Canvas)
    exercises = {content_of(task): task for task in world.tasks("held_out", config.env.data_seed)[:tasks]}
    missing = {each: [name for name in exercises if name not in found.get(each, {})] for each in workflows}
    if any(missing.values()):
        with served(read_run(run)) as urls:
            os.environ |= {RUN_VARIABLE: str(run), ENGINES_VARIABLE: json.dumps(urls)}  # as environments are told
            for workflow, names in missing.items():
                outcomes = played(world, workflow, [exercises[name] for name in names]) if names else []
                pairs = [[each["success"], each["executor_calls"]] for each in outcomes]
                found.setdefault(workflow, {}).update(zip(names, pairs, strict=True))
                kept.write_text(json.dumps(every))
    return {workflow: {name: found[workflow][name] for name in exercises} for workflow in workflows}


def fixed_row(workflow: str, scores: Mapping[str, Sequence[float]]) -> str:
    """A line of the table."""
    successes, requests = np.array(list(scores.values())).T
    mean, low, high = task_interval(successes)
    share = f"{100 * mean:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    return line(f"`{workflow}`", share, "", "", "", f"{requests.mean():.1f}")


def beside(name: str, runs: Sequence[Path], best: str, scores: Mapping[str, Sequence[float]], tasks: int) -> str:
    """What the policies get right beyond a fixed workflow, paired over exercises."""
    ours = [read_scores(evaluation(run, "greedy", tasks), "success") for run in runs]
    theirs = {exercise: pair[0] for exercise, pair in scores.items()}
    found = difference(*shared_tasks(ours, [theirs] * len(ours)))
    more = f"{100 * found.mean:+.1f} points [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    return f"{name}, greedy, and the best fixed workflow, `{best}`: {more}."


def compared(name: str, first: str, runs: Mapping[str, Sequence[Path]], tasks: int) -> str:
    """What may be said of a reward beside the first one."""
    sides = [[read_scores(evaluation(run, "greedy", tasks), "success") for run in runs[each]] for each in (name, first)]
    found = difference(*shared_tasks(*sides))
    more = f"{100 * found.mean:+.1f} points [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    return f"{name} beside {first}, greedy: {more}, p = {found.p_value:.2g}, {len(runs[name])} seeds each."


def picture(points: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Success over requests as SVG, one dot for each policy or fixed workflow."""
    width = 420
    most = max(requests for found in points.values() for requests, _ in found) * 1.1
    parts = axes(most, "requests an episode", width=width, names=420, digits=1)
    for index, (name, found) in enumerate(points.items()):
        colour = COLOURS[index % len(COLOURS)]
        for requests, success in found:
            x, y = LEFT + width * requests / most, TOP + HEIGHT * (1 - success)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" opacity="0.8"/>')
        y = TOP + 14 + 20 * index
        parts.append(f'<text x="{LEFT + width + 14}" y="{y}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(argv: Sequence[str]) -> None:
    del argv
    given, out = flags.FLAGS, Path(flags.FLAGS.out).absolute()
    file, _, variant = given.recipe.partition(":")
    steps = [f"--config.trainer.steps={given.steps}"] if given.steps else []
    runs: dict[str, list[Path]] = {name: [] for name in given.rewards}
    fixed = tuple(dict.fromkeys(["Custom", *given.fixed]))
    for workflow in fixed:
        parse(workflow)
    for seed in given.seeds:  # all rewards of a seed before the next seed: a table may stop after any of them
        for name, found in runs.items():
            folder = out / name
            folder.mkdir(parents=True, exist_ok=True)
            found.append(trained(f"{file}:{variant}", seed, folder, [*fields(name), *steps])[0])
        first, *rest = runs
        scores = fixed_scores(runs[first][0], fixed, given.tasks, out / "fixed.json")
        best = max(scores, key=lambda workflow: np.mean([pair[0] for pair in scores[workflow].values()]))
        base = [base_evaluation(runs[first][0], how, given.tasks) for how in HOW]
        requests = f"{built(base[0])['requests']:.1f}"
        table = [line(*COLUMNS), "|" + "---|" * len(COLUMNS)]
        table += [line("(base)", *(cells([each]) for each in base), requests)]
        table += [row(name, found, given.tasks) for name, found in runs.items()]
        table += [fixed_row(workflow, each) for workflow, each in scores.items()]
        said = [beside(name, found, best, scores[best], given.tasks) for name, found in runs.items()]
        said += [compared(name, first, runs, given.tasks) for name in rest]
        over = [f"| {' | '.join(TRAINING_COLUMNS)} |", "|" + "---|" * len(TRAINING_COLUMNS), *training_rows(runs)]
        text = "\n".join([*table, "", machine(runs[first][0]), "", *said, "", *over, ""])
        (out / "canvas_rewards.md").write_text(text)
        points = {
            name: [
                (built(greedy)["requests"], float(np.mean(list(read_scores(greedy, "success").values()))))
                for greedy in (evaluation(run, "greedy", given.tasks) for run in found)
            ]
            for name, found in runs.items()
        }
        points |= {
            workflow: [(float(np.mean([p[1] for p in each.values()])), float(np.mean([p[0] for p in each.values()])))]
            for workflow, each in scores.items()
        }
        (out / "canvas_rewards.svg").write_text(picture(points))
        print(text, flush=True)


if __name__ == "__main__":
    flags.DEFINE_string("recipe", "canvas:nano_llm", "Recipe in configs/ with a canvas.")
    flags.DEFINE_list("rewards", list(REWARDS), "Rewards; the others are compared with the first.")
    flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "config.seed of each run.")
    flags.DEFINE_integer("steps", 0, "Steps of each run; the recipe's where 0.", lower_bound=0)
    flags.DEFINE_multi_string("fixed", list(FIXED), "Fixed workflows, beside one Custom; a phrase is said by its word.")
    flags.DEFINE_integer("tasks", 511, "Held-out episodes that are played greedily.", lower_bound=2)
    flags.DEFINE_string("out", "runs/canvas_rewards", "Folder of the runs, the table and the picture.")
    app.run(main)
