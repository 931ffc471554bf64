"""What training adds, and whether it is a skill: `python -m tests.benchmarks.skills --recipes=code,math --seeds=0,1,2`.

For each recipe (its variant `nano`; `math:nano_calculator` names another one) and seed: a run by the launcher, then the
base and the newest checkpoint on the same held-out tasks, played greedily (temperature 0) and sampled (temperature 1).
What greedy play of the base solves is known before training: a policy that only beats the sampled base has become
colder, one that beats the greedy base has learnt something.

Runs and evaluations are kept in `--out`; the same command again goes on where it stopped. Prints, and writes to
`<out>/skills.md`, success with its 95 % interval over tasks, the paired difference of greedy play, and each run's
minutes; `config.json`, `run.json` (code, packages, machine) and every episode lie in the runs' folders.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import app, flags

from flowjax.compare import read_scores, shared_tasks
from flowjax.monitor.held_out import percent
from flowjax.monitor.statistics import difference
from tests.benchmarks.runs import HOW, evaluated, machine, success, trained

_RECIPES = flags.DEFINE_list("recipes", ["code"], "Recipes in configs/, each with :variant where that is not nano.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "config.seed of each run.")
_TASKS = flags.DEFINE_integer("tasks", 512, "Held-out episodes of each evaluation.", lower_bound=2)
_OUT = flags.DEFINE_string("out", "runs/skills", "Folder of the runs and of the table.")
HEAD = """| recipe | seed | greedy: base | trained | gain, points | sampled: base | trained | minutes |
|---|---|---|---|---|---|---|---|"""


def row(recipe: str, seed: str, minutes: float, base: Mapping[str, Path], policy: Mapping[str, Path]) -> str:
    """A line of the table: both ways to play, and what greedy play gained on the same tasks."""
    gain = difference(*shared_tasks(*([read_scores(side["greedy"], "success")] for side in (policy, base))))
    cells = {how: " | ".join(percent(success(side[how])) for side in (base, policy)) for how in HOW}
    mean, low, high = (f"{100 * value:+.1f}" for value in (gain.mean, gain.low, gain.high))
    gained = f"{mean} [{low}, {high}]"
    return f"| {recipe} | {seed} | {cells['greedy']} | {gained} | {cells['sampled']} | {minutes:.1f} |"


def main(argv: Sequence[str]) -> None:
    del argv
    out = Path(_OUT.value).absolute()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    run = out
    for recipe in _RECIPES.value:
        base: dict[str, Path] = {}
        for seed in _SEEDS.value:
            run, took_s = trained(recipe, seed, out)
            base = base or {how: evaluated(run, how=how, base=True, tasks=_TASKS.value) for how in HOW}
            policy = {how: evaluated(run, how=how, base=False, tasks=_TASKS.value) for how in HOW}
            rows.append(row(recipe, seed, took_s / 60, base, policy))
            table = "\n".join([HEAD, *rows, "", machine(run), ""])
            (out / "skills.md").write_text(table)
            print(table, flush=True)


if __name__ == "__main__":
    app.run(main)
