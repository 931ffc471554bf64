"""Play the held-out tasks with a checkpoint's policy:

    python -m flowjax.evaluate --config=configs/sokoban.py:nano --checkpoint=runs/<name>/checkpoints/<policy>/<step>

Restores the adapter from Orbax, serves it, plays `config.eval.tasks` held-out tasks (all there are, where those are
fewer) `config.eval.samples` times each and prints success, reward, turns, tokens and the world's outcomes with 95 %
intervals over tasks, and pass@k of several samples. `evaluations/<step>` beside the run's checkpoints keeps the same in
`results.json`, and every episode in `held_out/` (docs/evaluation.md).

Of several policies, name a checkpoint each, with commas between them; `--config.agents` may bind agents otherwise than
in the run, such as to "base" as a fixed partner.

With `--base` the base model plays in place of its policies: what the run began with, also where version 0 is no longer
kept. `--config.eval.temperature=0` plays the likeliest reply each time. Both together tell what training adds to what
the base can already do:

    python -m flowjax.evaluate ... --config.eval.temperature=0
    python -m flowjax.evaluate ... --config.eval.temperature=0 --base

Exit status: 0 done, 1 a role failed for good (its log is named), 2 something to correct in what was asked for.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from flowjax.config import ConfigError, load_run, save_run
from flowjax.files import replace_file
from flowjax.launch import command_line
from flowjax.launch.devices import Devices, engine_accelerators, mesh_count, share_out, visible_accelerators
from flowjax.launch.hub import fetch_models, to_fetch
from flowjax.launch.preflight import examine
from flowjax.launch.roles import (
    choose_ports,
    publish_endpoints,
    run_roles,
    stop_order,
    trainer_roles,
)
from flowjax.launch.session import OK, RunSession
from flowjax.launch.supervisor import USER_MISTAKE, Supervisor
from flowjax.monitor.held_out import HeldOutEpisode, by_task, read_held_out
from flowjax.monitor.progress import Progress
from flowjax.monitor.screen import interval
from flowjax.monitor.statistics import pass_at_k, task_interval
from flowjax.run import Run, policy_sections, read_models, resolve, write_models
from flowjax.weights.publish import CheckpointError, committed_steps, read_adapter

# Between the command and the checkpoint's run:
_MUST_AGREE = ("model.path", "policy", "workflow", "env.name", "env.options")
# Outcomes with rows of their own, or that every world has:
_SHOWN_ANYHOW = ("success", "turns", "invalid_actions", "env_return")


def read_request(argv: Sequence[str]) -> tuple[ConfigDict, dict[str, Path]]:
    """The config to evaluate with and the checkpoint's folder of each policy.

    Raises:
        ConfigError: a mistake in the command line, or a folder that is no committed checkpoint.
        CheckpointError: a checkpoint is there but cannot be read.
    """
    config, values = command_line.parse(argv, _define)
    if not values["checkpoint"].value:
        raise ConfigError("--checkpoint is missing: give runs/<name>/checkpoints/<policy>/<step>")
    checkpoints: dict[str, Path] = {}
    for given in values["checkpoint"].value.split(","):
        _check_committed(checkpoint := Path(given))
        checkpoints[checkpoint.parent.name] = checkpoint
    if not config.policies and len(checkpoints) == 1:
        config.policy.name = next(iter(checkpoints))
    run = resolve(config)
    expected = list(run.policies)
    if set(checkpoints) != set(expected):
        raise ConfigError(
            f"--checkpoint names {', '.join(checkpoints)}, but the config has {', '.join(expected)}: give one "
            "checkpoint of each policy, with commas between them"
        )
    run_dir = next(iter(checkpoints.values())).parent.parent.parent
    if (run_dir / "config.json").exists() and (conflicts := list(_conflicts(load_run(run_dir), config))):
        raise ConfigError("\n".join(conflicts))
    if not config.eval.tasks:
        raise ConfigError("config.eval.tasks is 0: say how many held-out tasks to play")
    config.eval.versions = tuple(sorted({int(checkpoint.name) for checkpoint in checkpoints.values()}))
    if values["base"].value:
        bases = {name: policy.base.name for name, policy in run.policies.items()}
        config.agents = {agent: bases.get(model, model) for agent, model in run.agents.items()}
    return config, checkpoints


def _check_committed(checkpoint: Path) -> None:
    policy_folder, step = checkpoint.parent, checkpoint.name
    steps = committed_steps(policy_folder) if policy_folder.is_dir() else []
    if not step.isdigit() or int(step) not in steps:
        there = f"{policy_folder} has committed steps {steps}" if steps else f"{policy_folder} has none"
        raise ConfigError(f"--checkpoint={checkpoint} is not a committed checkpoint: {there}")
    read_adapter(policy_folder, int(step))


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "checkpoint", "", "Folder of a committed checkpoint; of several policies one each.", flag_values=values
    )
    flags.DEFINE_bool("base", False, "Play with the base model in place of the checkpoint.", flag_values=values)


def _conflicts(trained: ConfigDict, config: ConfigDict) -> Iterator[str]:
    compared = [(f"config.{field}", _at(trained, field), _at(config, field)) for field in _MUST_AGREE]
    runs = resolve(trained), resolve(config)
    compared += [
        (
            f"config.bases.{base}.model.path",
            *(run.bases[base].model.path if base in run.bases else None for run in runs),
        )
        for base in sorted({*trained.bases, *config.bases})
    ]
    compared += [
        (f"config.policies.{name}.policy", *(policy_sections(source, name)["policy"] for source in (trained, config)))
        for name in config.policies
        if name in runs[0].policies
    ]
    for field, was, now in ((field, _plain(was), _plain(now)) for field, was, now in compared):
        if was != now:
            yield f"{field} is {now}, but the checkpoint was trained with {was}: give the run's own"


def _at(config: ConfigDict, field: str) -> object:
    node: object = config
    for name in field.split("."):
        assert isinstance(node, ConfigDict)
        node = node[name]
    return node


def _plain(value: object) -> object:
    """Comparable: sections as dicts, tuples as the lists that JSON makes of them."""
    if isinstance(value, ConfigDict):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def prepare(
    config: ConfigDict, checkpoints: Mapping[str, Path], models: Mapping[str, dict[str, str]] | None = None
) -> Run:
    """The run that evaluates, in a fresh folder in `evaluations` beside theirs, with no checkpoints but these.

    `models` are base models that were fetched by their ids (`flowjax.run.write_models`).
    """
    named = [path.name if len(checkpoints) == 1 else f"{policy}@{path.name}" for policy, path in checkpoints.items()]
    by_base = config.agents and not set(config.agents.values()) & set(checkpoints)
    name, evaluations = "base" if by_base else ",".join(named), _evaluations(checkpoints)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    run_dir = next(evaluations / name for name in names if not (evaluations / name).exists())
    save_run(config, run_dir)
    write_models(run_dir, models or {})
    for policy, checkpoint in checkpoints.items():
        published = run_dir / "checkpoints" / policy
        published.mkdir(parents=True)
        (published / checkpoint.name).symlink_to(checkpoint.absolute())
    return resolve(config, run_dir)


def _evaluations(checkpoints: Mapping[str, Path]) -> Path:
    return next(iter(checkpoints.values())).parent.parent.parent / "evaluations"


def main(argv: Sequence[str]) -> int:
    if {"--help", "-h", "--helpfull"} & set(argv):
        print(__doc__)
        return OK
    jax.config.update("jax_platforms", "cpu")  # this process only reads: the devices are the engine's
    try:
        config, checkpoints = read_request(argv)
        trained = _evaluations(checkpoints).parent
        models = read_models(trained)
        run = resolve(config, _evaluations(checkpoints) / "new", models)
        devices = _devices(run)
        if to_fetch(run):
            models = fetch_models(run, trained)
            run = resolve(config, run.folder, models)
    except (CheckpointError, ConfigError) as error:
        print(error, file=sys.stderr)
        return USER_MISTAKE
    found = examine(run, devices)
    if problems := [*found.problems, *found.here]:
        print("\n".join(problems), file=sys.stderr)
        return USER_MISTAKE
    return _evaluate(prepare(config, checkpoints, models), devices)


def _devices(run: Run) -> Devices:
    sizes = tuple(run.config.mesh.to_dict().values())
    return share_out(visible_accelerators(), engine_accelerators(run), mesh_count(sizes))


def _evaluate(run: Run, devices: Devices) -> int:
    ports, version = choose_ports(run), min(run.config.eval.versions)
    publish_endpoints(run, ports)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    session = RunSession(run.folder, steps=0, stop_order=stop_order(run), console=console)

    async def done(supervisor: Supervisor, progress: Progress) -> None:
        while progress.eval_at(version) is None:
            await asyncio.sleep(0.1)

    roles = [role for role in run_roles(run, ports, devices) if role.name not in trainer_roles(run)]
    status = asyncio.run(session.run(lambda: roles, done))
    if status == OK:
        results = summarise(read_held_out(run.folder))
        replace_file(run.folder / "results.json", json.dumps(results, indent=2) + "\n")
        entry = session.screen.progress.eval_at(version) or {}
        console.print(_table(str(run.folder), results, entry.get("policies", {}) if run.config.policies else {}))
    return status


def summarise(episodes: Sequence[HeldOutEpisode]) -> dict[str, Any]:
    """Results of an evaluation, as in `results.json`: means with intervals over tasks, and pass@k.

    pass@k is there for k = 1, 2, 4 ... up to the samples that every task has.
    """
    solved = by_task(episodes, "success")
    fewest = min(map(len, solved.values()))
    ks = [1 << power for power in range(fewest.bit_length())] if fewest > 1 else []
    names = [name for name in episodes[0].metrics if all(name in episode.metrics for episode in episodes)]
    sources = {episode.source for episode in episodes} - {""}
    return {
        "tasks": len(solved),
        "episodes": len(episodes),
        "metrics": {name: _interval(by_task(episodes, name)) for name in names},
        "pass_at": {k: float(np.mean([pass_at_k(len(won), int(sum(won)), k) for won in solved.values()])) for k in ks},
        "sources": {
            source: _interval(by_task([episode for episode in episodes if episode.source == source], "success"))
            for source in sorted(sources)
        },
    }


def _interval(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    mean, low, high = task_interval(np.array([np.mean(values) for values in samples.values()]))
    return {"mean": mean, "low": low, "high": high}


def _table(title: str, results: Mapping[str, Any], policies: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    counts = f"of {results['tasks']} tasks, {results['episodes']} episodes"
    table.add_row("held-out success", f"{_percent(results['metrics']['success'])} {counts}")
    for k, share in results["pass_at"].items():
        table.add_row(f"pass@{k}", f"{share:.1%}".replace("%", " %"))
    for source, success in results["sources"].items():
        table.add_row(f"success on {source}", _percent(success))
    for policy, of_policy in policies.items():
        table.add_row(f"success of {policy}", interval({**of_policy, "episodes": of_policy.get("trajectories")}))
        more = {name: mean for name, mean in of_policy.get("outcomes", {}).items() if name not in _SHOWN_ANYHOW}
        table.add_row(f"outcomes of {policy}", ", ".join(f"{name} {mean:.3f}" for name, mean in more.items()))
    for name, found in results["metrics"].items():
        if name != "success":
            table.add_row(name, f"{found['mean']:.3g} [{found['low']:.3g}, {found['high']:.3g}]")
    return table


def _percent(found: Mapping[str, float]) -> str:
    return f"{100 * found['mean']:.1f} % [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
