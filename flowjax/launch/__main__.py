"""`python -m flowjax.launch --config=configs/<recipe>.py:<variant> [--config.field=value ...]`: run it all.

--name=NAME      the run folder is <config.runs>/NAME; by default a fresh name after the recipe's
--resume=FOLDER  go on with the run in FOLDER, exactly where it stopped
--join=URL       play for the run whose dataflow listens there; this machine may come and go
--role=trainer   with --run=FOLDER, in each task of a cluster's job: be a process of that run's trainer
--fresh_ledger   with --resume: set a damaged ledger aside, go on from the newest checkpoints with other tasks
--dry_run        print the plan (roles, devices, batch, memory, ports) and the obstacles, start nothing
--status=FOLDER  show what the run in FOLDER is doing: roles, queues, versions, ages
--invite=NODE    with --status: print a key with which a machine may play for the run under that name, and nothing else
--evict=NAME     with --status: send a node, or one worker, away from the run; others play what it was playing
--devices=N      with --dry_run: plan for a machine with N accelerators
--plan=8xH100    print how the run would lie best on such a machine, as flags to give, start nothing

Exit status: 0 done, 1 a role failed for good (its log is named), 2 something to correct in what was asked for.
"""

import asyncio
import contextlib
import itertools
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from flowjax.config import FIELDS, ConfigError, asks_help, is_unbegun, load_run, save_run
from flowjax.launch import command_line
from flowjax.launch.checks import check_unchanged
from flowjax.launch.devices import (
    Devices,
    engine_accelerators,
    host_device_count,
    mesh_count,
    processes_here,
    remote_count,
    share_out,
    visible_accelerators,
)
from flowjax.launch.machine import RunInUse, check_unused, fetch_models, hold, to_fetch
from flowjax.launch.pool import Pool
from flowjax.launch.preflight import Findings, examine
from flowjax.launch.roles import (
    choose_ports,
    drop_copies,
    int8_roles,
    missing_bases,
    publish_endpoints,
    run_roles,
    stop_order,
    trainer_roles,
    warm_start_roles,
)
from flowjax.launch.screen import render_status, summary
from flowjax.launch.session import OK, RunConsole, RunSession
from flowjax.launch.supervisor import USER_MISTAKE, RoleFailed, Supervisor
from flowjax.monitor.metrics import NewStatus, Progress, clock, read_status
from flowjax.monitor.provenance import recorded_start
from flowjax.monitor.sinks import forwarding
from flowjax.monitor.token import is_invited, make_run_id, make_token, send_away, wants_token
from flowjax.monitor.trouble import explain, in_words
from flowjax.run import Run, resolve, write_models

_ANSWERS_S = 10.0  # longest wait for an answer of the dataflow


@dataclass(frozen=True)
class LaunchRequest:
    """A run to start, to resume or to plan."""

    run: Run
    resume: bool
    dry_run: bool
    devices: Devices
    fresh_ledger: bool = False
    plan: str = ""  # machine to plan for


def read_request(argv: Sequence[str]) -> LaunchRequest:
    """Understand the command line.

    Raises:
        ConfigError: a mistake in it.
    """
    recipe, url = (command_line.value_of(argv, name) for name in ("config", "join"))
    if recipe is not None and url:
        remedy = "leave it out, the run gives the config; --config.<field>=... changes what may differ on a node"
        raise ConfigError(f"--config={recipe} beside --join={url}: {remedy}")
    config, values = command_line.parse(argv, _define, fallback=_known_config)
    for name in ("join", "name", "plan", "resume"):  # empty, as from a shell variable that is not set
        if values[name].present and not values[name].value:
            raise ConfigError(f"--{name} is empty: give a value, or leave the flag out")
    if url := values["join"].value:
        from flowjax.launch import join

        join.check_difference(join.config_of_run(url), config)
        run_dir = Path(config.runs) / (values["name"].value or config.name)
        config.name = run_dir.name
    elif values["resume"].value:
        run_dir = Path(values["resume"].value)
        if changed := check_unchanged(load_run(run_dir), config):
            raise ConfigError("\n".join(changed))
        named = run_dir if run_dir.name.strip(".") else run_dir.resolve()  # "." has a name only when resolved
        asked = config_flags.get_override_values(values["config"])
        wanted = Path(asked.get("runs", named.parent)) / (values["name"].value or asked.get("name", named.name))
        if wanted.resolve() != run_dir.resolve():
            raise ConfigError(f"--resume={run_dir} keeps that folder, but {wanted} is asked for: leave that out")
        config.name, config.runs = named.name, str(named.parent)
    else:
        run_dir = _fresh_folder(config, values)
    flag = {name: bool(values[name].value) for name in ("resume", "dry_run", "fresh_ledger")}
    if flag["fresh_ledger"] and (not flag["resume"] or flag["dry_run"]):
        raise ConfigError("--fresh_ledger changes a run that has begun: give --resume=<run folder>, and no --dry_run")
    if config.eval.versions:
        raise ConfigError(
            f"config.eval.versions is {config.eval.versions}, which is for an evaluation: leave it out, or play these "
            "versions with python -m flowjax.evaluate <run folder> --steps=..."
        )
    run = resolve(config, run_dir)
    devices, plan = _devices(run, values), values["plan"].value or ""
    return LaunchRequest(run, flag["resume"], flag["dry_run"], devices, flag["fresh_ledger"], plan)


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("resume", "", "Run folder to go on with.", flag_values=values)
    flags.DEFINE_string("name", "", "Name of the run.", flag_values=values)
    flags.DEFINE_string("join", "", "Dataflow of the run to play for.", flag_values=values)
    flags.DEFINE_bool("fresh_ledger", False, "Set the run's ledger aside and make a new one.", flag_values=values)
    flags.DEFINE_bool("dry_run", False, "Print the plan and stop.", flag_values=values)
    flags.DEFINE_string("plan", "", "Machine to plan for.", flag_values=values)
    flags.DEFINE_integer("devices", 0, "Accelerators to plan for.", lower_bound=0, flag_values=values)


def _known_config(values: flags.FlagValues) -> ConfigDict:
    if values["join"].value and values["resume"].value:
        raise ConfigError("--resume goes on with a run of this machine, --join plays for one elsewhere: give one")
    if values["join"].value:
        from flowjax.launch import join

        return join.config_of_run(values["join"].value)
    if not values["resume"].value:
        raise ConfigError("--config is missing: give a recipe, for example --config=configs/sokoban.py:nano")
    return load_run(Path(values["resume"].value))


def _fresh_folder(config: ConfigDict, values: flags.FlagValues) -> Path:
    """The folder of a new run: a name that was asked for must be free, a recipe's gets a number where it is not."""
    asked = values["name"].value or config_flags.get_override_values(values["config"]).get("name")
    runs, name = Path(config.runs), asked or config.name or "run"
    if problems := [*FIELDS.fields["name"].problems("config.name", name)]:
        raise ConfigError(problems[0])
    if asked:
        if not is_unbegun(runs / name):
            raise ConfigError(
                f"{runs / name} exists already: go on with it by --resume={runs / name}, or give another --name"
            )
    else:
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        name = next(name for name in names if is_unbegun(runs / name))
    config.name = name
    return runs / name


def _devices(run: Run, values: flags.FlagValues) -> Devices:
    config = run.config
    asked, dry_run = int(values["devices"].value or 0), values["dry_run"].value
    if asked and not dry_run:
        raise ConfigError(f"--devices={asked} goes with --dry_run; CUDA_VISIBLE_DEVICES limits what a run uses")
    accelerators, sizes = visible_accelerators(), tuple(config.mesh.to_dict().values())
    remote, assumed = remote_count(run, asked), asked not in (0, len(accelerators))
    if dry_run and not asked and not accelerators and config.model.nano is None:
        # A recipe for accelerators, planned on a machine without any: assume as many as it names.
        each = math.prod(size for size in sizes if size > 0)
        asked, assumed = engine_accelerators(run) + len(trainer_roles(run)) * each, True
    if assumed:
        accelerators = tuple(map(str, range(asked)))
    return share_out(
        accelerators,
        engine_accelerators(run),
        mesh_count(sizes),
        trainers=max(len(trainer_roles(run)), 1),
        cpu_devices=host_device_count() * processes_here(config.trainer),
        assumed=assumed,
        hosts=config.trainer.processes // processes_here(config.trainer),
        remote=remote,
    )


def main(argv: Sequence[str]) -> int:
    if asks_help(argv, __doc__):
        return OK
    try:
        return _do(argv)
    except (ConfigError, RunInUse) as error:
        return _refuse([str(error)])
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:  # of a file of the run
        return _refuse([in_words(error)])
    except KeyboardInterrupt:  # before any role has started: from then on the session handles signals
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT


def _do(argv: Sequence[str]) -> int:
    shown = command_line.value_of(argv, "status")
    for flag, change in (("invite", _invite), ("evict", _evict)):
        if (named := command_line.value_of(argv, flag)) is not None:
            return change(Path(shown), named) if shown else _refuse([f"--{flag} goes with --status=<run folder>"])
    if shown is not None:
        RunConsole().print(render_status(Path(shown)))
        return OK
    if any(argument.startswith("--role") for argument in argv):
        return _train(argv)
    request = read_request(argv)
    console = RunConsole()
    if request.plan:
        return _show_layouts(request, console)
    if request.dry_run:
        return _show_plan(request, console)
    run_dir = request.run.folder
    say = f"{'resuming' if request.resume else 'starting'} {run_dir}, logs in {run_dir / 'logs'}"
    console.print(say, highlight=False, markup=False, soft_wrap=True)
    if request.run.is_node:
        from flowjax.launch import join

        join.fetch(request.run)
    found = examine(request.run, request.devices, resume=request.resume)
    if problems := [*found.problems, *found.here]:
        return _refuse(problems)
    models = {}
    if to_fetch(request.run):
        models = fetch_models(request.run, run_dir)
        request = replace(request, run=resolve(request.run.config, run_dir, models))
        # Again: shapes, memory and tokenizers can be checked only now that the models are here.
        found = examine(request.run, request.devices, resume=request.resume)
        if problems := [*found.problems, *found.here]:
            return _refuse(problems)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(run_dir))  # before anything is written: another launch may have chosen this name
            if (run_dir / "config.json").exists() and not (request.resume or request.run.is_node):
                raise RunInUse(f"{run_dir} was made by another launch meanwhile: start again, or give another --name")
            save_run(request.run.config, run_dir)
            write_models(run_dir, models)
        except OSError as error:
            return _refuse([f"run folder {run_dir}: {error.strerror}: mend that, or give another --config.runs"])
        command = [sys.executable, "-m", "flowjax.launch", *argv]
        start = stack.enter_context(recorded_start([run_dir], command, engine_python=request.run.config.engine.python))
        try:
            if request.fresh_ledger:
                _start_ledger_anew(request.run, console)
            start["exit_status"] = _run(request, console)
        except OSError as error:
            reason = explain(error) or error.strerror or str(error) or type(error).__name__
            start["exit_status"] = _refuse([f"{error.filename or run_dir}: {reason}: mend that, then --resume the run"])
        return start["exit_status"]


def _train(argv: Sequence[str]) -> int:
    """Be a process of a run's trainer."""
    from flowjax.launch import join

    role, run = (argument.partition("=")[2] for argument in sorted(argv)) if len(argv) == 2 else ("", "")
    if sorted(argument.partition("=")[0] for argument in argv) != ["--role", "--run"] or role != "trainer" or not run:
        reason = "is --role=trainer --run=<run folder> and nothing else: the run's own launch says how it is trained"
        return _refuse([f"what a task of a cluster's job is given {reason}"])
    join.train(Path(run), RunConsole())
    return OK


def _start_ledger_anew(run: Run, console: RunConsole) -> None:
    """Make a new ledger, whose tasks begin after all that the old ledger or other files know to have been opened."""
    from flowjax.dataflow.ledger import start_anew
    from flowjax.weights.publish import committed_steps

    run_dir, config = run.folder, run.config
    made = [
        max(committed_steps(run_dir / "checkpoints" / policy), default=0) * settings.trainer.groups_per_step
        for policy, settings in run.policies.items()
    ]
    opened = int(read_status(run_dir, "dataflow").get("opened_groups", 0))
    # The status may be a second old: leave room for the groups that were opened since.
    ahead = (config.dataflow.max_staleness + 2) * config.trainer.groups_per_step
    position = start_anew(run_dir / "dataflow.sqlite", least_position=max([opened, *made]) + ahead)
    say = f"a new ledger in {run_dir}: training goes on with task {position}; the old one lies beside it"
    console.print(say, highlight=False, markup=False, soft_wrap=True)


def _invite(run_dir: Path, node: str) -> int:
    """Print a key for a node of a run."""
    from flowjax.launch import join

    try:
        invited = is_invited(run_dir, node)
        shown = join.invitation(run_dir, node)
    except OSError as error:
        return _refuse([f"{run_dir} cannot be written ({error.strerror}): give the folder of a run"])
    if invited:
        print(f"the earlier key of {node} is void: machines that use it end", file=sys.stderr)
    print(shown)
    return OK


def _evict(run_dir: Path, name: str) -> int:
    """Send a node or a worker away from a run that is under way."""
    from flowjax.broker import DataflowError, connect_to_run

    if name == read_status(run_dir, "rollout").get("worker"):
        return _refuse([f"{name} is the run's own rollout service, which the launch needs: only nodes can be evicted"])

    async def ask() -> int:
        async with connect_to_run(run_dir) as broker:
            return (await broker.call("evict", {"evicted": name}, away_s=_ANSWERS_S))["given_back"]

    invited = False
    try:
        invited = send_away(run_dir, name)  # first: with a void key its workers cannot come back when they hear of it
        outcome = f"{asyncio.run(ask())} episodes that it was playing go to others"
    except (DataflowError, ConfigError) as error:
        if not invited:
            gone = isinstance(error, DataflowError) and not check_unused(run_dir)
            return _refuse([f"{run_dir} is not under way: nobody plays for it" if gone else str(error)])
        outcome = f"its key is void; of its workers the dataflow says: {error}"
    except (OSError, ValueError, KeyError) as error:
        if not invited:
            reason = f"cannot be read ({error}): give the folder of a run under way"
            return _refuse([f"{run_dir / 'endpoints.json'} {reason}"])
        outcome = "its key is void, and the run is not under way"
    print(f"{name} is sent away; {outcome}")
    return OK


def _show_layouts(request: LaunchRequest, console: RunConsole) -> int:
    from flowjax.launch import planner

    console.print(planner.render(request.run, request.plan), highlight=False, soft_wrap=True)
    return OK


def _show_plan(request: LaunchRequest, console: RunConsole) -> int:
    from flowjax.launch.preflight import render_plan

    ports = choose_ports(request.run)
    found: Findings = examine(request.run, request.devices, resume=request.resume)
    roles = [] if found.problems else run_roles(request.run, ports, request.devices)
    console.print(render_plan(request.run, roles, ports, request.devices, found))
    return USER_MISTAKE if found.problems else OK


def _run(request: LaunchRequest, console: RunConsole) -> int:
    run, devices = request.run, request.devices
    if not run.is_node:  # a node has it from the run
        make_run_id(run.folder)
        if wants_token(run.config.dataflow):  # before any role starts: each reads it once
            make_token(run.folder)
    ports = choose_ports(run)
    publish_endpoints(run, ports)
    first = [*warm_start_roles(run, devices), *int8_roles(run)]
    pool = Pool(run.folder, run.config, say=lambda text: session.say(text))
    session = RunSession(
        run.folder,
        steps=_last_versions(run),
        apart=run.config.separate_trainers,
        warm_steps={base: run.bases[base].warm_start.steps for base in missing_bases(run)},
        stop_order=stop_order(run),
        console=console,
        look=None if run.is_node else pool.look,
    )

    async def done(supervisor: Supervisor, progress: Progress) -> None:
        if run.is_node:
            from flowjax.launch.join import until_done

            await until_done(run, console)
            return
        for trainer in trainer_roles(run):
            await supervisor.ended(trainer)
        if not run.trains:
            await _trained_by_others(run, pool.dataflow)
        await _final_evaluation(run, progress)

    with forwarding(run.folder, run.config, session.say), pool:
        status = asyncio.run(session.run(lambda: run_roles(run, ports, devices), done, first=first))
    if status == OK:
        drop_copies(run)
        if run.is_node:
            console.print("the run has ended", highlight=False)
            return status
        wall_s = time.time() - session.started_s
        console.print(summary(session.screen.progress, wall_s=wall_s, states=session.screen.states))
        return status
    stopped = f"stopped after {clock(time.time() - session.started_s)}"
    say = f"{stopped}; go on with: python -m flowjax.launch --resume={run.folder}"
    if run.is_node:
        from flowjax.launch.join import NodeRefused, last_line

        if isinstance(session.failure, NodeRefused):  # its report has said it
            return status
        say = last_line(run, stopped)
    console.print(say, highlight=False, markup=False, soft_wrap=True)
    return status


def _last_versions(run: Run) -> dict[str, int]:
    """The version at which each policy's training ends."""
    return {name: policy.trainer.steps for name, policy in run.policies.items()}


async def _trained_by_others(run: Run, dataflow: NewStatus) -> None:
    """Wait until the dataflow knows that the last version of every policy is committed."""
    while True:
        known = dataflow.read().get("policies", {})
        if all(known.get(policy, {}).get("committed", -1) >= last for policy, last in _last_versions(run).items()):
            return
        await asyncio.sleep(0.5)


async def _final_evaluation(run: Run, progress: Progress) -> None:
    """Wait for the evaluation of the last version, however long it takes, while episodes keep ending.

    Raises:
        RoleFailed: none has ended for as long as a step and an episode may take.
    """
    patience_s = run.config.trainer.step_timeout_s + run.config.rollout.episode_timeout_s
    versions, seen, seen_s = _last_versions(run), None, time.monotonic()
    last = max(versions.values())
    # From the metrics that the screen has read, where the last evaluation is filed under the largest step.
    while run.config.eval.tasks and progress.evals.get(last, {}).get("versions") != versions:
        status = read_status(run.folder, "dataflow")
        if (ended := [status.get("done"), status.get("failed")]) != seen:
            seen, seen_s = ended, time.monotonic()
        if time.monotonic() - seen_s > patience_s:
            reason = f"no episode of the evaluation of version {last} has ended within {patience_s:g} s"
            raise RoleFailed("rollout", 1, run.folder / "logs" / "rollout.log", reason)
        await asyncio.sleep(0.1)


def _refuse(problems: Sequence[str]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return USER_MISTAKE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
