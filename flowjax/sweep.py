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
import contextlib
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from flowjax.compare import (
    SAMPLING_FIELDS,
    apart,
    comparable_rewards,
    compare_variants,
    components_of,
    metrics_of,
    variants_figure,
    variants_table,
)
from flowjax.config import ConfigError, asks_help, load_run
from flowjax.fields import FOLDER_NAME, nearest, shown
from flowjax.files import replace_file
from flowjax.launch import command_line
from flowjax.launch.__main__ import LaunchRequest, read_request
from flowjax.launch.checks import check_config, check_unchanged, differences, in_base
from flowjax.launch.machine import RunInUse, check_unused, hold
from flowjax.launch.preflight import Findings, examine
from flowjax.launch.session import RunConsole
from flowjax.launch.supervisor import Role, RoleFailed, Supervisor, on_signals
from flowjax.run import resolve

_OK, _FAILED, _USER_MISTAKE = 0, 1, 2
_STOP_S = 60.0  # longest wait for a run that is stopping in order
_FREE_S = 30.0  # longest wait for a launcher, left over from a sweep that was killed, to free its run
# Fields that a run may be resumed with otherwise, and that a finished one cannot have any more.
_OF_RESULTS = ("engine.dtype", "engine.quantize", "dataflow.failed_episodes", "dataflow.min_group_size", "eval.seed")
_OF_TASKS = ("env.name", "env.options", "env.sources", "env.data_seed")  # fields that make tasks
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

    `changes`: further arguments with which it is resumed, for fields that may differ then and do, such as more steps.
    """

    variant: str
    seed: int
    folder: Path
    argv: Sequence[str]
    config: ConfigDict
    changes: Sequence[str] = ()

    @property
    def begun(self) -> bool:
        """True if the run is there to be resumed: a launch that died before it saved its config has begun none."""
        return (self.folder / "config.json").exists()

    @property
    def arguments(self) -> Sequence[str]:
        """Arguments with which the launcher begins or resumes the run."""
        return [f"--resume={self.folder}", *self.changes] if self.begun else self.argv

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

    def evaluations(self) -> dict[str, dict[int, Path]]:
        """File of the last held-out evaluation of each run that is finished, by variant and seed."""
        finished = [run for run in self.runs if run.result.exists()]
        return {name: {run.seed: run.result for run in finished if run.variant == name} for name in self.variants}


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file, and check the config of each of its runs.

    Raises:
        ConfigError: the file fails, a value in it is invalid, or a config cannot be run.
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
    others = [*_sampled_otherwise(configs), *_of_other_tasks(configs)]
    others += _made_otherwise(configs)
    others += _rewarded_otherwise(configs) if metric == "reward" else ()
    problems += [f"{path}: VARIANTS[{name!r}]: {text}" for name, text in others]
    if problems:
        raise ConfigError("\n".join(problems))
    return Sweep(folder, list(values["VARIANTS"]), runs, values["AT_ONCE"], metric)


def _values(path: Path) -> dict[str, Any]:
    """Values of the file, with defaults for those that it leaves out."""
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"there is no sweep file {path}: give a Python file with RECIPE, SEEDS and VARIANTS")
    try:
        module = command_line.run_file(path, f"flowjax_sweep_{path.stem}")
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
        if name not in _FIELDS and (near := nearest(name, _FIELDS)):  # other names in capitals are the file's own
            raise ConfigError(f"{path}: {name} is nothing that a sweep has{near}")
    for name in (name for name in vars(module) if name != "name"):  # which a loop leaves behind
        field = "SEEDS" if name.upper() == "SEED" else name.upper()
        if field in _FIELDS and field not in given:
            raise ConfigError(f"{path}: {name} is nothing that a sweep has: write {field}, or call it otherwise")
    values = {name: _python(given.get(name, default)) for name, (_, default, _) in _FIELDS.items()}
    for name, (kind, _, remedy) in _FIELDS.items():
        if name == "SEEDS" and isinstance(values[name], list | range):
            values[name] = tuple(values[name])
        if not isinstance(values[name], kind) or isinstance(values[name], bool) or not _fits(name, values[name]):
            said = f"is {shown(values[name])}" if name in given else "is missing"
            raise ConfigError(f"{path}: {name} {said}: give {remedy}")
    for name, variant in values["VARIANTS"].items():
        if not isinstance(name, str) or not name or not FOLDER_NAME.fits(name):
            raise ConfigError(f"{path}: VARIANTS has {shown(name)}: {FOLDER_NAME.remedy}")
        if not isinstance(variant, str | Mapping):
            raise ConfigError(f"{path}: VARIANTS[{name!r}] is {shown(variant)}: give a dict of fields, or a recipe")
        if others := [field for field in variant if not isinstance(field, str)]:
            raise ConfigError(
                f"{path}: VARIANTS[{name!r}] has the field {shown(others[0])}: give fields by their names"
            )
    return values


def _sampled_otherwise(configs: Mapping[str, ConfigDict]) -> Iterator[tuple[str, str]]:
    """Variants of a sweep whose held-out episodes are sampled in another way than the first one's, and what differs."""
    first = next(iter(configs), "")
    for name, config in configs.items():
        for field, was, now in differences(configs[first], config):
            if field in SAMPLING_FIELDS:
                values = f"config.{field} is {shown(now)}, not {shown(was)} as in VARIANTS[{first!r}]"
                remedy = "give them one value, or make another sweep of it"
                yield name, f"{values}, and greedy or narrow sampling is no better method: {remedy}"


def _made_otherwise(configs: Mapping[str, ConfigDict]) -> Iterator[tuple[str, str]]:
    """Variants of a sweep that would have a nano base made in another way than a variant before them, in one folder."""
    made: dict[str, tuple[str, ConfigDict]] = {}  # path -> the first variant that has a base there, and how it is made
    for name, config in configs.items():
        for of, base in resolve(config).bases.items():
            if base.model.nano is None:
                continue
            how = ConfigDict({"model": {"nano": base.model.nano}, "warm_start": base.warm_start})
            first, before = made.setdefault(base.model.path, (name, how))
            values = [
                in_base(of, f"config.{field} is {shown(now)}, not {shown(was)} as in VARIANTS[{first!r}]")
                for field, was, now in differences(before, how)
                if first != name  # two bases of one variant are its own config's affair
            ]
            if values:
                have = in_base(of, f"config.model.path is {base.model.path!r} in both")
                remedy = "give them one value, or each a base model of its own by another model.path"
                yield name, f"{'; '.join(values)}, but {have}, where one base model is made for all: {remedy}"


def _rewarded_otherwise(configs: Mapping[str, ConfigDict]) -> Iterator[tuple[str, str]]:
    """Variants of a sweep whose rewards are other functions than the first one's, or means over other policies; and
    what differs."""
    policies = {name: sorted(resolve(config).policies) for name, config in configs.items()}
    first = next(iter(configs), "")
    for name, these in policies.items():
        if not comparable_rewards(these, policies[first]):
            of = f"{', '.join(these)}, not {', '.join(policies[first])} as in VARIANTS[{first!r}]"
            yield name, f"its policies are {of}, and METRIC is 'reward', the mean over them: use another metric"
            continue
        components, before = (components_of(configs[of], policies[of]) for of in (name, first))
        if components != before:
            of = f"{shown(components)}, not {shown(before)} as in VARIANTS[{first!r}]"
            yield name, f"config.reward.components is {of}, and METRIC is 'reward': use another metric"


def _of_other_tasks(configs: Mapping[str, ConfigDict]) -> Iterator[tuple[str, str]]:
    """Variants that share no two held-out tasks with the variants before them, each with the fields that differ."""
    first = next(iter(configs), "")
    differing = {
        name: [found for found in differences(configs[first], config) if found[0].startswith(_OF_TASKS)]
        for name, config in configs.items()
    }
    if not any(differing.values()):
        return
    from flowjax.dataflow.tasks import held_out_contents  # which imports grain: most sweeps do without

    tasks: dict[str, set[str]] = {}
    for name, config in configs.items():
        if name == first or differing[name]:
            with contextlib.suppress(Exception):  # the launcher's checks say what is wrong with a world
                tasks[name] = held_out_contents(config)
    for name in apart(tasks) if first in tasks else ():
        values = "; ".join(f"config.{field} is {shown(now)}, not {shown(was)}" for field, was, now in differing[name])
        remedy = "a sweep compares by the same tasks, so give them one value, or make another sweep of it"
        yield name, f"{values} as in VARIANTS[{first!r}], and no two held-out tasks are the same: {remedy}"


def _python(value: Any) -> Any:
    """The value with numpy's numbers turned into Python's: grids are often made by numpy, but flags take Python's."""
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
        trained, wanted = (
            {name: of.trainer.steps for name, of in resolve(c).policies.items()} for c in (saved, config)
        )
        is_finished = SweepRun(name, seed, run_dir, argv, saved).result.exists()
        if is_finished and any(trained[of] > wanted[of] for of in wanted):
            steps = f"{max(wanted.values())}, but {run_dir} has been trained for {max(trained.values())}"
            raise ConfigError(f"config.trainer.steps is {steps}: raise it again, or give the sweep another NAME")
        changes = {field: now for field, _, now in differences(saved, config) if field not in ("name", "runs")}
        late = [field for field in changes if field.endswith(_OF_RESULTS) or ".warm_start." in f".{field}"]
        if late and is_finished:
            raise ConfigError(
                f"config.{late[0]} is {shown(changes[late[0]])}, but {run_dir} is finished and was made with another "
                "value: give the sweep another NAME, or remove that folder"
            )
    return SweepRun(name, seed, run_dir, argv, config, _flags(changes))


def _flags(fields: Mapping[str, Any]) -> list[str]:
    return [f"--config.{field}={value if isinstance(value, str) else repr(value)}" for field, value in fields.items()]


def _examined(sweep: Sweep, *, dry_run: bool) -> dict[str, Findings]:
    """The launcher's findings on worlds, rewards and models, by what was examined: one run of each variant that is
    still to begin, and every run to be resumed, which may have made more steps than are asked for by now."""
    requests: dict[str, LaunchRequest] = {}
    for run in (run for run in sweep.runs if not run.result.exists()):
        request = read_request([*run.arguments, *["--dry_run"] * dry_run])
        requests.setdefault(f"run {run.folder.name}" if run.begun else f"variant {run.variant}", request)
    return {name: examine(of.run, of.devices, resume=of.resume) for name, of in requests.items()}


# -------------------------------------------------------------------------------------------------------------- running


async def _run_all(sweep: Sweep, console: Console) -> tuple[dict[str, int], int]:
    """Begin or resume the runs that are not finished. Returns those that failed, with the launcher's exit status, and
    128 + n after signal n, else 0."""
    failed: dict[str, int] = {}
    slots, supervisors, interrupted = asyncio.Semaphore(sweep.at_once), [], []

    async def one(run: SweepRun) -> None:
        async with slots:
            # The launcher of a sweep that was killed may still be stopping this very run.
            until = asyncio.get_running_loop().time() + _FREE_S
            while check_unused(run.folder) and asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.5)
            argv = run.arguments
            say(f"{run.folder.name}: {'resumed' if run.begun else 'begun'}")
            supervisor = Supervisor(sweep.folder / "logs")
            supervisors.append(supervisor)
            supervisor.start(Role(run.folder.name, [sys.executable, "-m", "flowjax.launch", *argv], finite=True))
            try:
                await supervisor.until(supervisor.ended(run.folder.name))
                if run.result.exists():
                    say(f"{run.folder.name}: finished")
                else:
                    failed[run.folder.name] = _OK
                    log = sweep.folder / "logs" / f"{run.folder.name}.log"
                    say(f"{run.folder.name}: ended without {run.result.name} in {run.result.parent}, see {log}")
            except RoleFailed as error:
                failed[run.folder.name] = error.status
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
                state = "finished" if run.result.exists() else "to resume" if run.begun else "to begin"
                console.print(f"{run.folder}  {state}", markup=False, highlight=False, soft_wrap=True)
        examined = _examined(sweep, dry_run=dry_run)
        if problems := [f"{name}: {text}" for name, found in examined.items() for text in found.problems]:
            raise ConfigError("\n".join(problems))
        if dry_run:
            for name, text in ((name, text) for name, found in examined.items() for text in found.here):
                said = f"{name}: not ready on this machine: {text}"
                console.print(said, markup=False, highlight=False, soft_wrap=True)
            return _OK
        with contextlib.ExitStack() as until_compared:
            try:
                until_compared.enter_context(hold(sweep.folder, "sweep"))
            except OSError as error:
                remedy = "see that this user may write there, or give another RUNS"
                raise ConfigError(f"sweep folder {sweep.folder}: {error.strerror}: {remedy}") from error
            before = sweep.evaluations()
            failed, interrupted = asyncio.run(_run_all(sweep, console))
            rows, said = compare_variants(sweep.evaluations(), sweep.metric)
            if unfinished := [run.folder.name for run in sweep.runs if not run.result.exists()]:
                said.append(f"Not finished, and left out: {', '.join(unfinished)}.")
            table = sweep.folder / "sweep.md"
            if _USER_MISTAKE in failed.values() and sweep.evaluations() == before and table.exists():
                said.append(f"{table} stays as it was: a run was refused, and none has finished since.")
                text = "\n".join(said)
            elif rows:
                text = variants_table(sweep.folder.name, sweep.metric, rows, said)
                replace_file(table, text)
                replace_file(sweep.folder / "sweep.svg", variants_figure(sweep.metric, rows))
            else:
                text = "\n".join(said)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    except (ConfigError, OSError, RunInUse) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return _USER_MISTAKE
    return interrupted or (_FAILED if failed else _OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
