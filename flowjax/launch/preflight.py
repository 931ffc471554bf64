"""All checks of a run, on the config, this machine and the run's own modules, with what they find put together."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowjax.launch.checks import check_config, on_each_base
from flowjax.launch.devices import Devices
from flowjax.launch.machine import (
    check_accelerators,
    check_engine,
    check_folder,
    check_model,
    check_ports,
    check_unused,
)
from flowjax.monitor.sinks import check_sinks
from flowjax.run import Engine, Run

_PROBE_TIMEOUT_S = 120.0


@dataclass
class Findings:
    """`problems` make the config unusable anywhere; `here` only on this machine as it is now."""

    problems: list[str] = field(default_factory=list)
    here: list[str] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)


def examine(run: Run, devices: Devices, *, resume: bool = False) -> Findings:
    """Run every check. Nothing is written, nothing started but short-lived probes."""
    probe = _start_probe(run, devices, run.folder / "checkpoints" / run.config.policy.name if resume else None)
    problems = check_config(run.config)
    here = [*on_each_base(run, check_model), *check_ports(run), *on_each_base(run, check_engine)]
    here += [*check_accelerators(run, devices), *check_unused(run.folder), *check_sinks(run.config)]
    if not here:
        problems += _engine_problems(run)
    found, lacking, plan = _finish_probe(probe)
    problems += [text for text in found if text not in problems]
    here += lacking
    here += check_folder(run.folder, 0 if problems else disk_bytes(run, plan))
    return Findings(problems, here, plan)


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
    """Most that checkpoints and adapter folders of a run take at once."""
    needed_bytes = 0
    for policy in run.policies.values():
        trainer, model = policy.trainer, plan.get("bases", {}).get(policy.base.name, {}).get("model", {})
        kept = trainer.keep_checkpoints + 1  # the one being written
        kept += trainer.steps // trainer.keep_every_steps if trainer.keep_every_steps else 0
        adapters = run.config.dataflow.max_staleness + 2
        needed_bytes += kept * model.get("checkpoint_bytes", 0) + adapters * model.get("adapter_bytes", 0)
    return needed_bytes


def _start_probe(run: Run, devices: Devices, checkpoints: Path | None) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "flowjax.launch.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    request = {
        "config": json.loads(run.config.to_json()),
        "devices": devices.trainer_count,
        "checkpoints": str(checkpoints) if checkpoints else None,
    }
    assert process.stdin is not None
    process.stdin.write(json.dumps(request))
    process.stdin.flush()
    return process


def _finish_probe(process: subprocess.Popen[str]) -> tuple[list[str], list[str], dict[str, Any]]:
    errors = f"no answer within {_PROBE_TIMEOUT_S:.0f} s"
    try:
        output, errors = process.communicate(timeout=_PROBE_TIMEOUT_S)
        answer = json.loads(output)
    except (subprocess.TimeoutExpired, ValueError):
        process.kill()
        process.wait()
        reason = "\n    ".join(errors.strip().splitlines()[-5:])
        return [f"the modules that the config names could not be examined: {reason}"], [], {}
    return answer["problems"], answer["here"], answer["plan"]
