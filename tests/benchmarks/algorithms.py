"""Estimators of credit side by side, with a language model as policy:

    python -m tests.benchmarks.algorithms [--recipes=sokoban:nano] [--estimators=rewardflow,grpo] [--seeds=0,1,2,3,4]
        [--options=gigpo.norm=mean] [--base_per_seed]

For each recipe every estimator trains the same base, with `--base_per_seed` another one in each seed: bases of a recipe
differ, so what is said of one need not hold of the next. The fields are the same but for an estimator's own options
(`OPTIONS`, which `tests.benchmarks.credit_learning --tune` chose on a small network, other levels and other seeds;
`--options` changes them where a world asks for others), and so are the steps, hence nearly the tokens. A held-out
evaluation every few steps is sampled at temperature 1. Then the newest checkpoint plays the held-out tasks greedily,
and so does the base.

Prints, and writes to `<out>/<recipe>.md` and `.svg`, what `tests/benchmarks/learning.py` says of them. Runs stay in
`--out`; the same command again goes on where it stopped, also from what `tests/benchmarks/kept.py` has kept of runs
elsewhere. Seconds count what else the machine does.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import app, flags

from tests.benchmarks.learning import write_comparison
from tests.benchmarks.runs import trained

ESTIMATORS = ("rewardflow", "gigpo", "grpo", "rloo", "reinforce_plus_plus", "published.rewardflow")
# RewardFlow's best of three gammas by three weights are its defaults. What GiGPO adds up is the trajectory's score.
OPTIONS: Mapping[str, Mapping[str, str | float]] = {"gigpo": {"gamma": 0.8, "norm": "mean_std", "rewards": "score"}}


def main(argv: Sequence[str]) -> None:
    del argv
    given, out = flags.FLAGS, Path(flags.FLAGS.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    fields = [f"--config.eval.every_steps={given.every_steps}", f"--config.eval.tasks={given.curve_tasks}"]
    fields += [f"--config.trainer.steps={given.steps}"] if given.steps else []
    chosen = {name: dict(OPTIONS.get(name, {})) for name in given.estimators}
    for option in given.options:
        name, dot, setting = option.rpartition("=")[0].rpartition(".")
        if not dot or name not in chosen:
            raise app.UsageError(f"--options={option}: estimator.option=value, the estimator one of --estimators.")
        chosen[name][setting] = option.rpartition("=")[2]
    for recipe in given.recipes:
        file, _, variant = recipe.partition(":")
        runs: dict[str, list[Path]] = {name: [] for name in given.estimators}
        for seed in given.seeds:  # all estimators of a seed before the next seed: a table may stop after any of them
            of_seed = [f"--config.model.path=models/{recipe.replace(':', '-')}-{seed}"] if given.base_per_seed else []
            for name, found in runs.items():
                options = [f"--config.credit.options.{key}={value}" for key, value in chosen[name].items()]
                found.append(trained(f"{file}:{variant or 'nano'},{name}", seed, out, [*fields, *of_seed, *options])[0])
            print(write_comparison(out / recipe.replace(":", "-"), "estimator", runs, given.tasks), flush=True)


if __name__ == "__main__":
    flags.DEFINE_list("recipes", ["sokoban:nano"], "Recipes in configs/, each with :variant where that is not nano.")
    flags.DEFINE_list("estimators", list(ESTIMATORS), "Estimators of credit; the others are compared with the first.")
    flags.DEFINE_list("options", [], "estimator.option=value: options of an estimator in place of the tuned ones.")
    flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "config.seed of each run.")
    flags.DEFINE_bool("base_per_seed", False, "Teach a base for each seed, instead of one for all.")
    flags.DEFINE_integer("steps", 0, "Steps of each run; the recipe's where 0.", lower_bound=0)
    flags.DEFINE_integer("every_steps", 10, "Steps between held-out evaluations beside training.", lower_bound=1)
    flags.DEFINE_integer("curve_tasks", 256, "Held-out episodes of each of those.", lower_bound=2)
    flags.DEFINE_integer("tasks", 512, "Held-out episodes played greedily after it, and by the base.", lower_bound=2)
    flags.DEFINE_string("out", "runs/algorithms", "Folder of the runs and of the tables.")
    app.run(main)
