"""Variants times seeds, so many runs at a time, and the comparison of their last held-out evaluations:

    python -m flowjax.sweep sweep.py [--dry_run]

The sweep file is Python that says what is run:

    RECIPE = "configs/sokoban.py:nano"                 # as --config has it
    SEEDS = (0, 1, 2)                                  # config.seed of each run
    VARIANTS = {                                       # fields that differ; or a recipe in place of RECIPE
        "grpo": {"credit.name": "grpo"},
        "gigpo": "configs/sokoban.py:nano,gigpo",
        "slow": {"credit.name": "grpo", "optimizer.learning_rate": 1e-4},
    }
    AT_ONCE = 1                                        # runs at a time; the others are left out: these are defaults
    METRIC = "success"                                 # as flowjax.compare has it
    NAME, RUNS = "sweep", "runs"                       # of the sweep, by default the file's; and where its folder is

Runs are `<RUNS>/<NAME>/<variant>-<seed>`, with the launcher's output in `logs/`. The same command again runs none that
is finished and resumes what is not. In the end every variant is compared with the first (flowjax.compare), as a table
in `sweep.md` and a figure in `sweep.svg`. A run that fails stops no other; what is there is compared. `--dry_run`
says what would run, and what of it could not on this machine.

Exit status: 0 done, 1 a run has failed (its log is named), 2 something to correct in the sweep file.
"""

import asyncio
import importlib.util
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict
from rich.console import Console

from flowjax.compare import (
    apart,
    conclusion,
    metrics_of,
    of_other_tasks,
    read_scores,
    sampled_otherwise,
    shared_tasks,
)
from flowjax.config import ConfigError, asks_help, load_run
from flowjax.envs.demonstrations import no_shares_of
from flowjax.fields import FOLDER_NAME, nearest, shown
from flowjax.files import replace_file
from flowjax.launch import command_line
from flowjax.launch.__main__ import read_request
from flowjax.launch.checks import check_config, check_unchanged, differences
from flowjax.launch.machine import RunInUse, check_unused, hold
from flowjax.launch.preflight import Findings, examine
from flowjax.launch.session import RunConsole
from flowjax.launch.supervisor import Role, RoleFailed, Supervisor, on_signals
from flowjax.monitor.held_out import is_share
from flowjax.monitor.statistics import difference, task_interval
from flowjax.run import resolve

_OK, _FAILED, _USER_MISTAKE = 0, 1, 2
_STOP_S = 60.0  # for a run to stop in its own order
_FREE_S = 30.0  # for the launcher of a sweep that was killed to let go of its run
_FIELDS: dict[str, tuple[type, Any, str]] = {
    "RECIPE": (str, None, "a recipe such as 'configs/sokoban.py:nano'"),
    "SEEDS": (tuple, (0,), "a tuple of different whole numbers from 0 on, such as (0, 1, 2)"),
    "VARIANTS": (dict, None, "a dict: name -> fields that differ, such as {'grpo': {'credit.name': 'grpo'}}"),
    "AT_ONCE": (int, 1, "a whole number from 1 on"),
    "METRIC": (str, "success", "success, reward, or another number of held-out episodes"),
    "NAME": (str, "", "the name of a folder"),
    "RUNS": (str, "runs", "a folder"),
}


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep: its variant and seed, its folder and the launcher's arguments that begin it.

    `changes` are those that resume it besides, of fields that may differ then and do: more steps, say.
    """

    variant: str
    seed: int
    folder: Path
    argv: Sequence[str]
    config: ConfigDict
    changes: Sequence[str] = ()

    @property
    def result(self) -> Path:
        """File of the last held-out evaluation, which a finished run has."""
        policies = resolve(self.config).policies
        versions = ",".join(f"{name}@{policy.trainer.steps}" for name, policy in policies.items())
        return self.folder / "held_out" / f"{versions}.jsonl"


@dataclass(frozen=True)
class Sweep:
    """Runs in their order, and how they are played and compared."""

    folder: Path
    variants: Sequence[str]
    runs: Sequence[SweepRun]
    at_once: int
    metric: str


def read_sweep(path: Path) -> Sweep:
    """The sweep of a file, all of whose configs hold.

    Raises:
        ConfigError: the file cannot be run, has a value that cannot be, or names a config that cannot be run.
    """
    values = _values(path)
    folder = Path(values["RUNS"]) / (values["NAME"] or path.stem)
    runs, problems = [], []
    for name, variant in values["VARIANTS"].items():
        for seed in values["SEEDS"]:
            try:
                runs.append(_run(path, values["RECIPE"], folder, name, variant, seed))
            except ConfigError as error:
                problems.append(f"{path}: VARIANTS[{name!r}]: {error}")
                break
    metric, configs = values["METRIC"], {run.variant: run.config for run in runs}
    for name, config in configs.items():
        if (known := metrics_of(config)) and metric not in known:
            has = f"which episodes of VARIANTS[{name!r}] do not have{nearest(metric, known)}"
            problems.append(f"{path}: METRIC is {metric!r}, {has}: use one of {', '.join(sorted(known))}")
            break
    others = [*sampled_otherwise(configs), *of_other_tasks(configs)]
    problems += [f"{path}: VARIANTS[{name!r}]: {text}" for name, text in others]
    if problems:
        raise ConfigError("\n".join(problems))
    return Sweep(folder, list(values["VARIANTS"]), runs, values["AT_ONCE"], metric)


def _values(path: Path) -> dict[str, Any]:
    """Values of the file, with the defaults of what it leaves out."""
    spec = importlib.util.spec_from_file_location(f"flowjax_sweep_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"there is no sweep file {path}: give a Python file with RECIPE, SEEDS and VARIANTS")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == path.resolve()
        ]
        line = frames[-1].lineno if frames else getattr(error, "lineno", "?")
        raise ConfigError(f"{path} line {line}: {type(error).__name__}: {error}") from error
    given = {name: value for name, value in vars(module).items() if name.isupper() and not name.startswith("_")}
    for name in given:
        if name not in _FIELDS and (near := nearest(name, _FIELDS)):  # names of its own are its own matter
            raise ConfigError(f"{path}: {name} is nothing that a sweep has{near}")
    values = {name: _python(given.get(name, default)) for name, (_, default, _) in _FIELDS.items()}
    for name, (kind, _, remedy) in _FIELDS.items():
        if name == "SEEDS" and isinstance(values[name], list | range):
            values[name] = tuple(values[name])
        if not isinstance(values[name], kind) or isinstance(values[name], bool) or not _fits(name, values[name]):
            lower = f", and {name.lower()} is no name of a sweep" if name.lower() in vars(module) else ""
            said = f"is {shown(values[name])}" if name in given else f"is missing{lower}"
            raise ConfigError(f"{path}: {name} {said}: give {remedy}")
    for name, variant in values["VARIANTS"].items():
        if not isinstance(name, str) or not name or not FOLDER_NAME.fits(name):
            raise ConfigError(f"{path}: VARIANTS has {shown(name)}: {FOLDER_NAME.remedy}")
        if not isinstance(variant, str | Mapping):
            raise ConfigError(f"{path}: VARIANTS[{name!r}] is {shown(variant)}: give a dict of fields, or a recipe")
    return values


def _python(value: Any) -> Any:
    """A value with Python's numbers in place of numpy's, of which grids are made: flags take no other."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _python(each) for name, each in value.items()}
    return type(value)(map(_python, value)) if type(value) in (list, tuple) else value


def _fits(name: str, value: Any) -> bool:
    if name == "SEEDS":
        return len(set(value)) == len(value) > 0 and all(type(seed) is int and seed >= 0 for seed in value)
    if name in ("RECIPE", "VARIANTS", "METRIC", "RUNS"):
        return bool(value)
    return value >= 1 if name == "AT_ONCE" else not value or FOLDER_NAME.fits(value)


def _run(path: Path, recipe: str, folder: Path, name: str, variant: str | Mapping[str, Any], seed: int) -> SweepRun:
    fields = (
        {} if isinstance(variant, str) else {field.removeprefix("config."): value for field, value in variant.items()}
    )
    if len(fields) < len(variant) and not isinstance(variant, str):
        twice = next(field for field in fields if {field, f"config.{field}"} <= variant.keys())
        raise ConfigError(f"{twice} and config.{twice} are one field, which is given twice: leave one of them out")
    if reserved := {"seed", "name", "runs"} & fields.keys():
        raise ConfigError(f"config.{min(reserved)} is the sweep's to set: use SEEDS, NAME and RUNS")
    run_name = f"{name}-{seed}"
    fields |= {"seed": seed, "name": run_name, "runs": str(folder)}
    argv = [f"--config={variant if isinstance(variant, str) else recipe}", *_flags(fields)]
    config, _ = command_line.parse(argv)
    if problems := check_config(config):
        raise ConfigError("; ".join(problems))
    if config.eval.tasks < 2:
        text = "a sweep compares held-out evaluations, so ask for two tasks or more"
        raise ConfigError(f"config.eval.tasks is {config.eval.tasks}: {text}")
    run_dir, changes = folder / run_name, {}
    if (run_dir / "config.json").exists():
        saved = load_run(run_dir)
        if changed := check_unchanged(saved, config):
            differs = changed[0].partition(": leave")[0]
            raise ConfigError(
                f"{run_dir} was begun otherwise ({differs}): give the sweep another NAME, or remove that folder"
            )
        changes = {field: now for field, _, now in differences(saved, config) if field not in ("name", "runs")}
    return SweepRun(name, seed, run_dir, argv, config, _flags(changes))


def _flags(fields: Mapping[str, Any]) -> list[str]:
    return [f"--config.{field}={value if isinstance(value, str) else repr(value)}" for field, value in fields.items()]


def _examined(sweep: Sweep, *, dry_run: bool) -> dict[str, Findings]:
    """Findings on the variants' worlds, rewards and models, as the launcher's; of one run of each that is to begin."""
    begun = {run.variant: run for run in reversed(sweep.runs) if not run.folder.exists()}
    requests = {name: read_request([*run.argv, *["--dry_run"] * dry_run]) for name, run in begun.items()}
    return {name: examine(request.run, request.devices) for name, request in requests.items()}


# -------------------------------------------------------------------------------------------------------------- running


async def _run_all(sweep: Sweep, console: Console) -> tuple[list[str], int]:
    """Begin or resume what is not finished. Returns the runs that have failed, and 128 + n after signal n."""
    failed: list[str] = []
    slots, supervisors, interrupted = asyncio.Semaphore(sweep.at_once), [], []

    async def one(run: SweepRun) -> None:
        async with slots:
            # The launcher of a sweep that was killed may still be stopping this very run.
            until = asyncio.get_running_loop().time() + _FREE_S
            while check_unused(run.folder) and asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.5)
            resumed = (run.folder / "config.json").exists()
            argv = [f"--resume={run.folder}", *run.changes] if resumed else list(run.argv)
            say(f"{run.folder.name}: {'resumed' if resumed else 'begun'}")
            supervisor = Supervisor(sweep.folder / "logs")
            supervisors.append(supervisor)
            supervisor.start(Role(run.folder.name, [sys.executable, "-m", "flowjax.launch", *argv], finite=True))
            try:
                await supervisor.until(supervisor.ended(run.folder.name))
                if run.result.exists():
                    say(f"{run.folder.name}: finished")
                else:
                    failed.append(run.folder.name)
                    log = sweep.folder / "logs" / f"{run.folder.name}.log"
                    say(f"{run.folder.name}: ended without {run.result.name} in {run.result.parent}, see {log}")
            except RoleFailed as error:
                failed.append(run.folder.name)
                say(f"{run.folder.name}: {error.reason}, see {error.log}")
            finally:
                await supervisor.stop(grace_s=_STOP_S)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(number: signal.Signals) -> None:
        # The first signal stops every run in its own order, another kills them.
        for supervisor in supervisors if interrupted else ():
            supervisor.kill()
        interrupted.append(number)
        work.cancel()

    missing = [run for run in sweep.runs if not run.result.exists()]
    say(f"{sweep.folder}: {len(sweep.runs) - len(missing)} of {len(sweep.runs)} runs are finished")
    work = asyncio.gather(*map(one, missing))
    on_signals(stop)
    try:
        await work
    except asyncio.CancelledError:
        say("stopped; the same command goes on from here")
    return failed, 128 + interrupted[0] if interrupted else _OK


# ------------------------------------------------------------------------------------------------------------ comparing


@dataclass(frozen=True)
class _Row:
    """A variant in the table. The last three are of the comparison with the first variant, which has none."""

    name: str
    seeds: Float[np.ndarray, "seeds"]
    mean: float
    low: float
    high: float
    more: str = ""
    p_value: str = ""
    improvement: str = ""


def compare_variants(sweep: Sweep) -> tuple[list[_Row], list[str]]:
    """The rows of the table, and a sentence on each variant but the first, of the runs that are finished.

    Raises:
        ConfigError: the evaluations cannot be compared.
    """
    finished = [run for run in sweep.runs if run.result.exists()]
    scores = {
        name: {run.seed: read_scores(run.result, sweep.metric) for run in finished if run.variant == name}
        for name in sweep.variants
    }
    counts = no_shares_of(finished[0].folder) if finished else ()
    there = [name for name in sweep.variants if scores[name]]
    left = apart({name: set.intersection(*map(set, scores[name].values())) for name in there})
    there = [name for name in there if name not in left]
    rows, said = [], []
    # One set of tasks for all rows: means and differences then agree.
    shared = shared_tasks(*(list(scores[name].values()) for name in there)) if there else []
    for name, other in zip(there, shared, strict=True):
        base, first = scores[there[0]], shared[0]
        mean, low, high = task_interval(other.mean(axis=0), share=is_share(sweep.metric, other.flat, counts))
        row = _Row(name, other.mean(axis=1), mean, low, high)
        if name != there[0]:
            both = [seed for seed in base if seed in scores[name]]
            if min(len(other), len(first)) > 1:
                found, of = difference(other, first), ""
            # What speaks of methods needs several seeds of both: of one alone, that of each is compared.
            elif both:
                places = list(scores[name]).index(both[0]), list(base).index(both[0])
                found = difference(other[places[0]][None], first[places[1]][None])
                of = f", seed {both[0]} of each" if max(len(other), len(first)) > 1 else ""
            else:
                said.append(f"{name} and {there[0]} have no seed in common yet.")
                rows.append(row)
                continue
            more = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]{of}"
            row = _Row(name, row.seeds, mean, low, high, more, f"{found.p_value:.3g}", f"{found.improvement:.3f}")
            said.append(f"{name} (A) and {there[0]} (B){of}: {conclusion(found, sweep.metric)}")
        rows.append(row)
    if lacking := [run.folder.name for run in sweep.runs if not run.result.exists()]:
        said.append(f"Not finished, and left out: {', '.join(lacking)}.")
    if left:
        said.append(f"Left out, for they share no two held-out tasks with the others: {', '.join(left)}.")
    if shared:
        tasks = shared[0].shape[1]
        left_out = len({task for name in there for played in scores[name].values() for task in played}) - tasks
        others = f"; {left_out} others are left out" if left_out else ""
        said.append(f"All numbers are of the {tasks} tasks that every run in the table has played{others}.")
    return rows, said


def table(sweep: Sweep, rows: Sequence[_Row], said: Sequence[str]) -> str:
    """The comparison in Markdown."""
    first = rows[0].name if rows else ""
    head = f"| variant | {sweep.metric} [95 % over tasks] | each seed | less {first} [95 %] | p | better on a task |"
    lines = [f"# {sweep.folder.name}", "", head, "|---|---|---|---|---|---|"]
    for row in rows:
        seeds = " ".join(f"{value:.3f}" for value in row.seeds)
        mean = f"{row.mean:.3f} [{row.low:.3f}, {row.high:.3f}]"
        lines.append(f"| {row.name} | {mean} | {seeds} | {row.more} | {row.p_value} | {row.improvement} |")
    return "\n".join([*lines, "", *said]) + "\n"


def figure(sweep: Sweep, rows: Sequence[_Row]) -> str:
    """The means with their intervals as SVG, a small circle for each seed."""
    left, width, each, top = 160, 480, 36, 40
    ends = [end for row in rows for end in (row.low, row.high, *row.seeds)]
    low, high = min(ends), max(ends)
    low, high = (low - 0.5, high + 0.5) if low == high else (low - 0.05 * (high - low), high + 0.05 * (high - low))

    def x(value: float) -> float:
        return round(left + width * (value - low) / (high - low), 1)

    height = top + each * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 40} {height}" font-family="sans-serif" '
        f'font-size="13" role="img"><title>{escape(sweep.metric)} of the variants, 95 % over tasks</title>'
        f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="20">{escape(sweep.metric)}</text>'
    ]
    for tick in np.linspace(low, high, 5):
        parts.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{top - 10}" y2="{height - 25}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tick)}" y="{height - 8}" text-anchor="middle">{tick:.3g}</text>')
    for index, row in enumerate(rows):
        y = top + each * index + each // 2
        parts.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{escape(row.name)}</text>')
        parts.append(
            f'<line x1="{x(row.low)}" x2="{x(row.high)}" y1="{y}" y2="{y}" stroke="#1f77b4" stroke-width="3"/>'
        )
        parts += [f'<circle cx="{x(seed)}" cy="{y}" r="3" fill="none" stroke="#555"/>' for seed in row.seeds]
        parts.append(f'<circle cx="{x(row.mean)}" cy="{y}" r="5" fill="#1f77b4"/>')
    return "".join([*parts, "</svg>\n"])


def main(argv: Sequence[str]) -> int:
    if asks_help(argv, __doc__):
        return _OK
    console = RunConsole()
    try:
        files = [argument for argument in argv if not argument.startswith("-")]
        if len(files) != 1 or set(argv) - {files[0], "--dry_run"}:
            raise ConfigError(f"give one sweep file, and --dry_run or nothing, not {' '.join(argv) or 'nothing'}")
        sweep, dry_run = read_sweep(Path(files[0])), "--dry_run" in argv
        if dry_run:
            for run in sweep.runs:
                state = "finished" if run.result.exists() else "to resume" if run.folder.exists() else "to begin"
                console.print(f"{run.folder}  {state}", markup=False, highlight=False, soft_wrap=True)
        examined = _examined(sweep, dry_run=dry_run)
        if problems := [f"variant {name}: {text}" for name, found in examined.items() for text in found.problems]:
            raise ConfigError("\n".join(problems))
        if dry_run:
            for name, text in ((name, text) for name, found in examined.items() for text in found.here):
                said = f"variant {name}: not ready on this machine: {text}"
                console.print(said, markup=False, highlight=False, soft_wrap=True)
            return _OK
        sweep.folder.mkdir(parents=True, exist_ok=True)
        with hold(sweep.folder, "sweep"):
            failed, interrupted = asyncio.run(_run_all(sweep, console))
            rows, said = compare_variants(sweep)
            if rows:
                replace_file(sweep.folder / "sweep.md", text := table(sweep, rows, said))
                replace_file(sweep.folder / "sweep.svg", figure(sweep, rows))
            else:
                text = "\n".join(said)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    except (ConfigError, OSError, RunInUse) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return _USER_MISTAKE
    return interrupted or (_FAILED if failed else _OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
