"""The launcher's session with a trainer that does no sums: `python light_launch.py <folder of a LightRun> <name>`."""

import asyncio
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flowjax.config import default_config, save_run
from flowjax.launch.devices import Devices
from flowjax.launch.roles import choose_ports, publish_endpoints, run_roles, stop_order
from flowjax.launch.session import RunSession
from flowjax.run import resolve

TRAINER = Path(__file__).parents[1] / "integration" / "chaos_trainer.py"


def main(folder: Path, name: str) -> int:
    config = default_config()
    with config.unlocked():
        config.update(json.loads((folder / "config.json").read_text()))
    run_dir = folder / "runs" / name
    save_run(config, run_dir)
    shutil.copytree(folder / "parts" / "run" / "checkpoints", run_dir / "checkpoints")  # version 0
    run = resolve(config, run_dir)
    ports = choose_ports(run)
    publish_endpoints(run, ports)
    roles = [
        replace(role, argv=[sys.executable, str(TRAINER), str(run_dir), "0.1"], written=None)
        if role.name == "trainer"
        else role
        for role in run_roles(run, ports, Devices())
    ]

    async def done(supervisor, progress) -> None:
        await supervisor.ended("trainer")

    steps = {config.policy.name: config.trainer.steps}
    session = RunSession(run_dir, steps=steps, stop_order=stop_order(run), console=Console(width=200))
    return asyncio.run(session.run(lambda: roles, done))


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
    except OSError as error:  # as `flowjax.launch` words it
        print(f"run folder: {error.strerror}: give another --config.runs=<folder>", file=sys.stderr)
        sys.exit(2)
