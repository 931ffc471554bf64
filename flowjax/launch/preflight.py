"""All checks of a run (its config, this machine, the modules it names) with their findings in one place; and the plan
that `--dry_run` shows, for this machine or a larger one."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flowjax.config import ConfigError
from flowjax.launch.checks import check_config, in_base, on_each_base, other_bases
from flowjax.launch.devices import Devices, visible_accelerators
from flowjax.launch.machine import (
    check_accelerators,
    check_engine,
    check_folder,
    check_model,
    check_ports,
    check_unused,
    to_fetch,
)
from flowjax.launch.roles import check_reached, fixed_ports, int8_roles, missing_bases, tcmalloc
from flowjax.launch.supervisor import Role
from flowjax.monitor.metrics import lost_checkpoints
from flowjax.monitor.provenance import changed_code
from flowjax.monitor.sinks import check_sinks
from flowjax.monitor.token import is_loopback
from flowjax.run import Base, Engine, Run

_PROBE_TIMEOUT_S = 600.0  # it takes seconds; a busy machine must not pass for a fault of the config


@dataclass
class Findings:
    """Messages and sizes: `problems` make the config unusable anywhere, `here` only on this machine as it is now."""

    problems: list[str] = field(default_factory=list)
    here: list[str] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)


def examine(
    run: Run, devices: Devices, *, resume: bool = False, checkpoints: Mapping[str, Path] | None = None
) -> Findings:
    """Run every check. Nothing is written, nothing started but short-lived probes.

    Args:
        checkpoints: of an evaluation: by policy, the folder that has its checkpoints.
    """
    # Started first: the probe takes seconds to import JAX, and the other checks run here meanwhile.
    probe = _start_probe(run, devices, run.folder / "checkpoints" if resume else None)
    problems, kind = check_config(run.config), "evaluation" if run.is_evaluation else "run"
    if resume:
        checkpoints = {name: run.folder / "checkpoints" / name for name in run.policies}
    trained = {name: folder for name, folder in (checkpoints or {}).items() if any(folder.glob("[0-9]*"))}

    def model(base: Base) -> list[str]:
        if base.name in _from_run(run):
            return []
        return check_model(base, trained=not trained.keys().isdisjoint(run.policies_on(base.name)))

    def engine(base: Base) -> list[str]:
        ways = (policy.train for policy in run.policies_on(base.name).values())
        return check_engine(base, adapters="lora" in ways)

    here = [*on_each_base(run, model), *other_bases(run, trained), *check_ports(run), *check_reached(run)]
    here += [*on_each_base(run, engine), *check_accelerators(run, devices), *check_unused(run.folder, kind)]
    here += [] if run.is_evaluation else check_sinks(run.config)  # only a run sends lines
    here += _lost_bases(run, resume=resume) + (lost_checkpoints(run.folder, run.policies) if resume else [])
    if run.is_relayed and not run.is_node:  # a node has been there already
        here += _relay_problems(run.config.dataflow.relay)
    if not here:
        problems += _engine_problems(run)
    for file in changed_code(run.folder) if resume else ():
        print(f"{file}, which the config names, has changed since the run's last start", file=sys.stderr)
    found, lacking, plan = _finish_probe(probe)
    problems += [text for text in found if text not in problems]
    here += lacking
    here += check_folder(run.folder, 0 if problems else disk_bytes(run, plan), kind)
    return Findings(problems, here, plan)


def _from_run(run: Run) -> list[str]:
    """Names of base models that a node has to fetch from its run: a dry run finds it before that."""
    there = {name for name, base in run.bases.items() if (Path(base.model.path) / "config.json").exists()}
    return [name for name in run.bases if run.is_node and name not in there]


def _lost_bases(run: Run, *, resume: bool) -> list[str]:
    """Messages on nano base models that are missing and must not be made anew: a resumed run has been trained on them,
    or an evaluation is to play them. A new base would have other weights under the same name."""
    if not (missing := missing_bases(run)):
        return []
    if run.is_evaluation:
        remedy = "start the run first, which makes it, or name the folder it is in"
    elif resume:
        from flowjax.weights.publish import committed_steps  # which imports JAX: only this rare case needs it

        folders = {name: run.folder / "checkpoints" / name for name in run.policies}
        trained = {run.policies[name].base.model.path for name, folder in folders.items() if committed_steps(folder)}
        missing = [base for base in missing if run.bases[base].model.path in trained]
        remedy = "this run has been trained on it, so start from the folder where it was started, or bring it back"
    else:
        return []
    paths = {name: run.bases[name].model.path for name in missing}
    return [
        in_base(name, f"config.model.path is {path!r}, which is not there: {remedy}") for name, path in paths.items()
    ]


def _relay_problems(servers: str) -> list[str]:
    """A message where none of the NATS servers can be used from here."""
    from flowjax.relay import dialled

    async def dial() -> None:
        async with dialled(servers):
            pass

    try:
        asyncio.run(dial())
    except ConfigError as error:
        return [f"config.dataflow.relay: {error}"]
    return []


def _engine_problems(run: Run) -> list[str]:
    """Settings that the engines' commands cannot express."""
    from flowjax.rollout.sidecar import engine_command

    try:
        for base in run.bases:
            engine_command(run, Engine("", base, replica=0), port=0)
    except ValueError as error:
        return [str(error)]
    return []


def disk_bytes(run: Run, plan: dict[str, Any]) -> int:
    """Most bytes that checkpoints, adapter folders, versions on their way to nodes, and int8 copies take at once.

    Of int8 copies only the part that is not on the disk yet counts.
    """
    from flowjax.rollout.sidecar import served_folder

    needed_bytes = 0
    for policy in run.policies.values():
        trainer, model = policy.trainer, plan.get("bases", {}).get(policy.base.name, {}).get("model", {})
        saved = model.get("policies", {}).get(policy.name, {})  # for each policy: ranks may differ
        if run.is_evaluation:  # its checkpoint is a link to the run's
            needed_bytes += saved.get("adapter_bytes", 0)
            continue
        kept = trainer.keep_checkpoints + 1  # the one being written
        kept += trainer.steps // trainer.keep_every_steps if trainer.keep_every_steps else 0
        adapters = run.config.dataflow.max_staleness + 2  # versions that engines may hold (`sidecar.adapter_slots`)
        versions = trainer.keep_checkpoints + 1 if trainer.checkpoint_every > 1 else 0  # between checkpoints
        if run.is_node:  # it has the weights that engines read, and no state of the optimiser
            needed_bytes += max(kept, adapters) * saved.get("adapter_bytes", 0)
            continue
        adapters += kept if policy.train == "full" else 0  # full training: a copy for engines beside each checkpoint
        needed_bytes += kept * saved.get("checkpoint_bytes", 0) + adapters * saved.get("adapter_bytes", 0)
        needed_bytes += versions * saved.get("version_bytes", 0)
        # Nodes may join.
        if "rollout" in run.config.elsewhere or run.is_relayed or not is_loopback(run.config.dataflow.host):
            from flowjax.dataflow.files import KEPT

            needed_bytes += 2 * (KEPT + 1) * saved.get("adapter_bytes", 0)  # versions on their way, and their packs
    for name, base in run.bases.items():
        if base.engine.quantize == "int8" and base.engines:
            copy, there = served_folder(run, base), 0
            for folder in (copy, *copy.parent.glob(f".{copy.name}.*")):  # also an unfinished copy, which is replaced
                there += sum(path.stat().st_size for path in folder.glob("*"))
            copy_bytes = plan.get("bases", {}).get(name, {}).get("model", {}).get("served_bytes", 0)
            needed_bytes += max(copy_bytes - there, 0)
    return needed_bytes


def _start_probe(run: Run, devices: Devices, checkpoints: Path | None) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "flowjax.launch.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},  # it must not take the accelerators' memory
    )
    request = {
        "config": json.loads(run.config.to_json()),
        "devices": devices.remote if run.trained_remotely else devices.trainer_count,
        "checkpoints": str(checkpoints) if checkpoints else None,
        "platform": devices.platform,
    }
    assert process.stdin is not None
    process.stdin.write(json.dumps(request))
    process.stdin.flush()  # not closed: `communicate` does that
    return process


def _finish_probe(process: subprocess.Popen[str]) -> tuple[list[str], list[str], dict[str, Any]]:
    errors = ""
    try:
        output, errors = process.communicate(timeout=_PROBE_TIMEOUT_S)
        answer = json.loads(output)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        waited = f"the modules that the config names were not examined within {_PROBE_TIMEOUT_S:.0f} s"
        busy = "the machine is busy, or a module waits for something when it is imported: try again"
        return [], [f"{waited}: {busy}"], {}
    except ValueError:
        reason = "\n    ".join(errors.strip().splitlines()[-5:])
        return [f"the modules that the config names could not be examined: {reason}"], [], {}
    for note in answer["notes"]:
        print(note, file=sys.stderr)
    return answer["problems"], answer["here"], answer["plan"]


# ------------------------------------------------------------------------------------------------ the plan of a dry run


def render_plan(
    run: Run, roles: Sequence[Role], ports: Mapping[str, int], devices: Devices, found: Findings
) -> RenderableType:
    """Batch arithmetic, devices, memory, disk, ports and roles; then the problems that are in the way."""
    parts: list[RenderableType] = [
        Text(f"plan of {run.folder}", "bold"),
        _rows("batch", batch_lines(run)),
        _rows("devices", device_lines(run, devices, found)),
    ]
    for base, plan in found.plan.get("bases", {}).items():
        title = f" of {base}" if len(run.bases) > 1 else ""
        if "model" in plan:
            parts.append(_rows(f"model{title}", model_lines(run, run.bases[base], plan["model"])))
        if "memory" in plan:
            parts.append(_rows(f"trainer memory per device{title}, estimated", memory_lines(plan["memory"])))
    if not found.problems:
        needed_bytes = disk_bytes(run, found.plan)
        parts.append(_rows("disk", [("run folder", f"about {size(needed_bytes)}, and logs and trajectories")]))
    parts.append(_rows("ports on loopback", port_lines(run, ports)))
    parts.append(Text("roles", "bold"))
    for base in _from_run(run):
        parts.append(Text(f"  first: {run.bases[base].model.path} is fetched from the run (there is no model here)"))
    for base in () if run.is_node else to_fetch(run):
        path = run.bases[base].model.path
        parts.append(Text(f"  first: {path} is fetched from Hugging Face (there is no folder of that name)"))
    for base in missing_bases(run):
        parts.append(Text(f"  first: warm start of a nano base model into {run.bases[base].model.path}"))
    for role in int8_roles(run):
        parts.append(Text(f"  first: {role.name}, a copy of a base model that engines read"))
    shared = dict(set.intersection(*(set(role.env.items()) for role in roles))) if roles else {}
    parts.append(Text(f"  all: {_environment(shared)}"))
    for role in roles:
        differing = {name: value for name, value in role.env.items() if name not in shared}
        note = (
            "; arguments as for the vLLM of this machine" if devices.assumed and role.name.startswith("engine") else ""
        )
        command = f"{_environment(differing)} {shlex.join(role.argv)}".strip()
        parts.append(Text(f"  {role.name} (restarts: {role.restarts}{note})\n    {command}"))
    parts += _obstacles(found)
    return Group(*parts)


def batch_lines(run: Run) -> list[tuple[str, str]]:
    """Counts of episodes, turns and tokens of one step and of the run, from the config alone."""
    from flowjax.records import most_turns  # imported here: it imports JAX, which only a plan needs

    config, trainer, rollout = run.config, run.config.trainer, run.config.rollout
    episodes = trainer.groups_per_step * rollout.group_size
    most, several = most_turns(run), len(run.agents) > 1
    turns, of_all = episodes * most, " (turns of all agents)" if several else ""
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    # Each of several agents has its own sequences, and may have more than one in an episode.
    whole = config.env.context == "append" and not several
    sequences, which = (episodes, "an episode is one sequence") if whole else (turns, "each turn its own sequence")
    tokens = trainer.micro_batch_rows * trainer.row_tokens
    return [
        ("episodes per step", f"{trainer.groups_per_step} groups x {rollout.group_size} members = {episodes}"),
        ("turns per step", f"at most {episodes} x {most} = {turns:,}{of_all}"),
        ("tokens per step", f"at most {sequences:,} x {longest:,} = {sequences * longest:,} ({which})"),
        ("rows per pass", f"{trainer.micro_batch_rows} rows x {trainer.row_tokens:,} tokens = {tokens:,} token slots"),
        ("passes per step", f"at most {-(-sequences * longest // tokens):,} with full rows"),
        (
            "run",
            f"{trainer.steps} steps x {trainer.updates_per_step} updates = {trainer.steps * trainer.updates_per_step}, "
            f"{trainer.steps * episodes:,} episodes; up to {config.eval.tasks} held-out tasks before and after",
        ),
        ("staleness", f"at most {config.dataflow.max_staleness} versions"),
    ]


def device_lines(run: Run, devices: Devices, found: Findings) -> list[tuple[str, str]]:
    """Devices of the trainer, of each base model's engines and of the other roles."""
    mesh = found.plan.get("mesh")
    unknown = "does not fit" if found.plan else "not examined"
    shape = " x ".join(f"{name} {size}" for name, size in mesh.items()) if mesh else unknown
    here = len(visible_accelerators()) or "none"
    note = f"  (assumed: {here} here; --devices=N plans for N)" if devices.assumed else ""
    if devices.shared and run.trains:
        note += f"  (shared: the engine takes {run.config.engine.gpu_memory_fraction:.0%} of the memory)"
    trainer = (
        f"accelerators {','.join(devices.trainer)}"
        if devices.trainer
        else f"{devices.cpu_devices} CPU device{'s' * (devices.cpu_devices != 1)}"
    )
    if run.trained_remotely:
        trainer = f"on other hosts, {devices.remote or 'all their'} devices together"
        shape = shape if devices.remote else "by their number (--devices=N plans for N on each)"
    lines, used = [("trainer", f"{trainer}, mesh {shape}{note}")], 0
    for base in run.bases.values():
        if not base.engines:
            continue
        count = 0 if base.engine.urls else base.engine.replicas * base.engine.tensor_parallel
        (name,) = base.engine_names(1)
        lines.append((name, engine_line(base.engine, devices.engine[used : used + count])))
        lines.append((f"{name}'s Python", base.engine.python or "the one running flowjax"))
        used += count
    count = run.config.env.workers
    workers = f"CPU, {count} environment worker{'s' * (count != 1)}"
    lines.append(("dataflow, rollout", workers))
    if not devices.trainer and run.trains and not run.trained_remotely:
        slower = "given back at each step: apt-get install libtcmalloc-minimal4 makes steps shorter"
        lines.append(("memory on the CPU", f"kept by {tcmalloc()}" if tcmalloc() else slower))
    return lines


def engine_line(engine: ConfigDict, accelerators: Sequence[str]) -> str:
    """Devices or addresses, parallelism and dtype of one base model's engines, from its section `engine`."""
    where = (
        f"accelerators {','.join(accelerators)}"
        if accelerators
        else f"CPU, {engine.threads} thread{'s' * (engine.threads != 1)}"
    )
    if engine.urls:
        where = f"at {', '.join(engine.urls)}"
    elif engine.replicas > 1:
        where = f"{engine.replicas} on {where}"
    return f"{where}, tensor parallel {engine.tensor_parallel}, {engine.dtype}"


def model_lines(run: Run, base: Base, model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Sizes of a base model: of its parameters, of checkpoints, and of what its engines hold in memory."""
    engine, parallel = base.engine, base.engine.tensor_parallel
    kv_tokens = engine.max_concurrent_sequences * engine.max_model_tokens
    folder = f"{base.model.path}: {model['parameters']:,} parameters"
    trained = model.get("policies", {})
    in_trainer = f"{base.model.dtype} in the trainer" if trained else "not trained"
    lines = [("base", f"{folder}, {in_trainer}")]
    for name, saved in trained.items():
        trainer = run.policies[name].trainer
        every = trainer.checkpoint_every
        of = f" of {name}" if len(trained) > 1 else ""
        between = f", one in {every} steps; {size(saved['version_bytes'])} for a version between" if every > 1 else ""
        lines += [
            (f"trained{of}", f"{saved['train']}, {saved['trained']:,} parameters (float32)"),
            (f"checkpoint{of}", f"{size(saved['checkpoint_bytes'])} each, {trainer.keep_checkpoints} kept{between}"),
            (f"handed to the engine{of}", f"{size(saved['adapter_bytes'])} per version"),
        ]
    return [
        *lines,
        (
            "engine per device",
            f"{size(model['served_bytes'] // parallel)} weights + "
            f"{size(model['adapter_slots_bytes'])} adapters + "
            f"{size(model['kv_bytes_per_token'] * kv_tokens // parallel)} key-value cache if all "
            f"{engine.max_concurrent_sequences} sequences were {engine.max_model_tokens:,} tokens long",
        ),
    ]


def memory_lines(parts: Mapping[str, int]) -> list[tuple[str, str]]:
    lines = [(name.replace("_", " "), size(value)) for name, value in parts.items() if value]
    return [*lines, ("total", f"{size(sum(parts.values()))}; compilers' own counts: docs/benchmarks/accelerators.md")]


def size(size_bytes: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def _environment(env: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(env.items()))


def port_lines(run: Run, ports: Mapping[str, int]) -> list[tuple[str, str]]:
    """The ports of the servers that are started here; those that the config does not fix are marked."""
    fixed = fixed_ports(run)
    chosen = " (free now; chosen anew at the start)"
    return [(name, f"{port}{'' if name in fixed else chosen}") for name, port in ports.items()]


def _rows(title: str, lines: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(f"  {name}", Text(value))  # `Text`: a path may contain what rich reads as markup
    return Group(Text(title, "bold"), table)


def _obstacles(found: Findings) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for title, problems in (("this config cannot run", found.problems), ("not ready on this machine", found.here)):
        if problems:
            parts += [Text(title, "bold red"), *(Text(f"  {problem}") for problem in problems)]
    return parts
