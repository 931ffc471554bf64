"""The whole loop beside TRL's, from one base to the same held-out success:

    bash launch/benchmark_peers.sh
    python -m tests.benchmarks.loop [--seeds=0,1,2] [--steps=0] [--targets=0.4,0.5] [--ours=grpo,fresh,recipe]

Both train `configs/sokoban.py:nano,grpo`: base model, adapter, rooms in their order, prompts (one per turn), GRPO over
groups of episodes, budget and optimiser are those of its config, and the machine's cores. flowjax runs by its launcher;
TRL by `tests.benchmarks.loop_trl` in the peers' environment, whose GRPOTrainer plays in its `rollout_func`. Others of
flowjax can stand beside: `fresh` plays each batch with the newest version, as TRL does, and `recipe` is
`configs/sokoban.py:nano` as it is, with RewardFlow for GRPO.

Every `--every_steps` steps the policy plays the same held-out rooms, sampled; TRL's between its steps, flowjax's from
its checkpoints after the run. Seconds count from the first rollout on, and neither these evaluations nor starting up,
but whatever else the machine does. (flowjax's run also plays its base beside the first rollouts, which does count.)
docs/benchmarks/trainer.md says what differs between the sides.

Prints, and writes to `<out>/loop.md`, for each side episodes (those trained on) and seconds until held-out success
first meets each target (by straight lines between evaluations), episodes and sampled tokens per second, and ratios to
the first. What is finished is kept in `--out`; the same command again goes on, flowjax's run where it stopped, TRL's
from its start.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from flowjax.config import load_run
from flowjax.dataflow.tasks import held_out_tasks, task_at, train_tasks
from flowjax.monitor.provenance import read_starts
from tests.benchmarks.runs import Curve, call, curve, machine, peer_environment, peer_python, success, trained

OURS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # flowjax's runs: recipe, and further fields
    "grpo": ("sokoban:nano,grpo", ()),
    "fresh": ("sokoban:nano,grpo", ("--config.dataflow.max_staleness=0",)),
    "recipe": ("sokoban:nano", ()),
}


@dataclass(frozen=True)
class Loop:
    """What one side did with one seed. `start_s` are seconds from its command to its first rollout, `load` is the
    machine's over the last five minutes of the run."""

    curve: Curve
    episodes: int
    start_s: float
    load: float

    def per_second(self) -> tuple[float, float]:
        """Episodes and tokens, sampled and trained on."""
        seconds = self.curve.spent["seconds"][-1]
        return self.episodes / seconds, self.curve.spent["tokens"][-1] / seconds


def case_of(run: Path) -> dict[str, Any]:
    """What TRL's side is to do, from the config that flowjax's run had."""
    config = load_run(run)
    lora, optimizer, loss = config.policy.lora, config.optimizer, config.loss
    groups = config.trainer.groups_per_step * config.trainer.steps
    sources = {"train": (train_tasks(config), groups), "held_out": (held_out_tasks(config), config.eval.tasks)}
    return {
        "base": str(Path(config.model.path).absolute()),
        "world": config.env.name,
        "options": config.env.options.to_dict(),
        "max_turns": config.env.max_turns,
        "max_new_tokens": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "group_size": config.rollout.group_size,
        "groups": config.trainer.groups_per_step,
        "updates": config.trainer.updates_per_step,
        "steps": config.trainer.steps,
        "every_steps": config.trainer.keep_every_steps,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targets": list(lora.targets),
        "learning_rate": optimizer.learning_rate,
        "warmup": optimizer.warmup_steps,
        "betas": list(optimizer.betas),
        "clip_norm": optimizer.clip_norm,
        "clip_low": loss.options.clip_low,
        "clip_high": loss.options.clip_high,
        "entropy": loss.entropy_coefficient,
        "seed": config.seed,
        **{name: [asdict(task_at(tasks, i)) for i in range(count)] for name, (tasks, count) in sources.items()},
    }


def run_trl(run: Path, folder: Path, peers: Path, threads: int) -> None:
    """TRL's run of the case that flowjax's run had, if it is not there."""
    if (folder / "result.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(json.dumps(case_of(run)))
    (folder / "begun.json").write_text(json.dumps({"time_s": time.time()}))
    command = [str(peer_python(peers)), "-m", "tests.benchmarks.loop_trl", str(folder), str(threads)]
    print("$", *command, flush=True)
    if status := subprocess.run(command, check=False, env=peer_environment(threads)).returncode:
        raise SystemExit(status)


def evaluate_ours(run: Path) -> None:
    """Play the held-out rooms with flowjax's checkpoints of the steps at which TRL's side plays them."""
    trainer = load_run(run).trainer
    steps = sorted({*range(trainer.keep_every_steps, trainer.steps, trainer.keep_every_steps), trainer.steps})
    call("flowjax.evaluate", str(run), f"--steps={','.join(map(str, steps))}")


def ours(run: Path) -> Loop:
    """Read flowjax's run and the evaluations of its checkpoints."""
    config = load_run(run)
    played = {int(folder.name): float(success(folder)["mean"]) for folder in (run / "evaluations").iterdir()}
    found = curve(run, played)
    # Episodes that were trained on, as on TRL's side: those under way for later batches are of these.
    per_step = config.trainer.groups_per_step * config.rollout.group_size
    found = replace(found, spent={**found.spent, "rollouts": found.spent["steps"] * per_step})
    start = read_starts(run)[0]["started_s"]
    load = json.loads((run / "launch.json").read_text())["load"]
    return Loop(found, int(found.spent["steps"][-1]) * per_step, found.begun_s - start, load)


def theirs(folder: Path) -> Loop:
    """Read TRL's run."""
    result, begun = (json.loads((folder / name).read_text()) for name in ("result.json", "begun.json"))
    rows = result["evaluations"]
    spent = {name: np.array([row[name] for row in rows], float) for name in ("rollouts", "tokens", "seconds")}
    found = Curve(np.array([row["success"] for row in rows]), spent)
    return Loop(found, int(spent["rollouts"][-1]), result["first_rollout_s"] - begun["time_s"], result["load"])


def versions_of(folder: Path) -> str:
    """Versions of TRL's side, in a sentence."""
    found = json.loads((folder / "result.json").read_text())["versions"]
    return f"TRL's side: {', '.join(f'{name} {version}' for name, version in found.items())}."


def figures(loops: Sequence[Loop], targets: Iterable[float]) -> dict[str, list[float]]:
    """The columns of a side: name -> a value of each seed; of seeds that never met a target, none."""
    columns: dict[str, list[float]] = {}
    for target in targets:
        met = [spent for each in loops if (spent := each.curve.until(target)) is not None]
        columns[f"episodes to {target:.0%}"] = [spent["rollouts"] for spent in met]
        columns[f"seconds to {target:.0%}"] = [spent["seconds"] for spent in met]
    for place, unit in enumerate(("episodes/s", "tokens/s")):
        columns[unit] = [each.per_second()[place] for each in loops]
    columns["last success, %"] = [100 * float(each.curve.success[-1]) for each in loops]
    columns["start-up, s"] = [each.start_s for each in loops]
    columns["load"] = [each.load for each in loops]
    return columns


def table(sides: Mapping[str, Mapping[str, Loop]], targets: Sequence[float]) -> str:
    """A line for each side, whose loops are by seed: mean and every seed; and the ratio of each one's means to the
    first's, where every seed met the target on both. Below it the curves."""
    found = {name: figures(list(loops.values()), targets) for name, loops in sides.items()}
    (first, us), *others = found.items()
    seeds = len(sides[first])

    def number(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

    def cell(values: Sequence[float]) -> str:
        if not values:
            return "never"
        each = f" ({', '.join(map(number, values))})" if seeds > 1 else ""
        missed = f", {seeds - len(values)} never" if len(values) < seeds else ""
        return f"{number(statistics.mean(values))}{each}{missed}"

    def ratio(name: str, them: Mapping[str, Sequence[float]]) -> str:
        whole = len(us[name]) == len(them[name]) == seeds
        return f"{statistics.mean(them[name]) / statistics.mean(us[name]):.2f}" if whole else ""

    lines = [f"| side | {' | '.join(us)} |", "|" + "---|" * (len(us) + 1)]
    lines += [f"| {name} | {' | '.join(map(cell, columns.values()))} |" for name, columns in found.items()]
    lines += [f"| {name} / {first} | {' | '.join(ratio(each, them) for each in us)} |" for name, them in others]
    curves = [
        f"{name}, seed {seed}: " + " ".join(f"{100 * value:.0f}" for value in each.curve.success)
        for name, loops in sides.items()
        for seed, each in loops.items()
    ]
    return "\n".join([*lines, "", "Held-out success, %, by evaluation:", "", *curves, ""])


def main(argv: Sequence[str]) -> None:
    del argv
    given, out = flags.FLAGS, Path(flags.FLAGS.out).absolute()
    peers = Path(given.peers)
    peer_python(peers)  # before flowjax's run: says what is missing
    out.mkdir(parents=True, exist_ok=True)
    targets = [float(target) for target in given.targets]
    fields = [f"--config.trainer.keep_every_steps={given.every_steps}", f"--config.eval.tasks={given.tasks}"]
    fields += [f"--config.trainer.steps={given.steps}"] if given.steps else []
    sides: dict[str, dict[str, Loop]] = {name: {} for name in (*(f"flowjax, {each}" for each in given.ours), "TRL")}
    for seed in given.seeds:
        runs = []
        for name in given.ours:
            recipe, more = OURS[name]
            run, _ = trained(recipe, seed, out / name, [*fields, *more])
            evaluate_ours(run)
            sides[f"flowjax, {name}"][seed] = ours(run)
            runs.append(run)
        run_trl(runs[0], out / f"trl-{seed}", peers, given.threads)
        sides["TRL"][seed] = theirs(out / f"trl-{seed}")
        text = f"{table(sides, targets)}\n{machine(runs[0])} {versions_of(out / f'trl-{seed}')}\n"
        (out / "loop.md").write_text(text)
        print(text, flush=True)


if __name__ == "__main__":
    flags.DEFINE_list("ours", ["grpo"], f"Runs of flowjax, of {', '.join(OURS)}; TRL's has the config of the first.")
    flags.register_validator("ours", lambda names: names and set(names) <= set(OURS), f"of {', '.join(OURS)}")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "config.seed of each set of runs.")
    flags.DEFINE_integer("steps", 0, "Steps of each run; the recipe's where 0.", lower_bound=0)
    flags.DEFINE_integer("every_steps", 5, "Steps between held-out evaluations.", lower_bound=1)
    flags.DEFINE_integer("tasks", 256, "Held-out episodes of each evaluation.", lower_bound=2)
    flags.DEFINE_list("targets", ["0.4", "0.5"], "Held-out success to be met, shares.")
    flags.DEFINE_integer("threads", 2, "Cores that TRL may use; flowjax uses those it is given.", lower_bound=1)
    flags.DEFINE_string("peers", ".venv-peers", "Folder of the peers' environment.")
    flags.DEFINE_string("out", "runs/loop", "Folder of the runs and of the table.")
    app.run(main)
