"""Nodes of a light run: real launchers, mirrors and rollout services, whose engine has no model."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from light_run import LightRun, environment

from flowjax.monitor.metrics import read_status
from flowjax.monitor.token import VARIABLE, invite


def wait_for(condition: Callable[[], Any], say: Callable[[], str], timeout_s: float = 300.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, say()
        time.sleep(0.1)


@contextlib.contextmanager
def started() -> Iterator[list[subprocess.Popen]]:
    """Processes that end with the test, whatever comes of it."""
    processes: list[subprocess.Popen] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()  # its guards end the roles
            process.wait()


class Node:
    """A node that was invited, in a folder of its own, with an engine of its own that runs already.

    `on` are words before its command, for another host.
    """

    def __init__(self, light: LightRun, url: str, name: str, *, on: Sequence[str] = ()):
        key = invite(light.run_dir, name)
        self.folder = light.folder / "far away" / name
        self.folder.mkdir(parents=True)
        self.output = self.folder / "output.txt"
        command = [*on, sys.executable, "-m", "flowjax.launch", f"--join={url}", "--name=node"]
        command += [f"--config.engine.urls=('http://127.0.0.1:{light.engine_port}',)", "--config.model.path=model"]
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment() | {VARIABLE: key},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def episodes(self) -> int:
        return read_status(self.folder / "runs" / "node", "rollout").get("episodes", 0)

    @property
    def worker(self) -> str:
        return read_status(self.folder / "runs" / "node", "rollout").get("worker", "")

    def logs(self) -> str:
        logs = (self.folder / "runs" / "node" / "logs").glob("*.log")
        return "\n".join([self.output.read_text(), *(f"== {log.name}\n{log.read_text()[-2000:]}" for log in logs)])
