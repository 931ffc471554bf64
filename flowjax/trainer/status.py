"""What a trainer tells of itself while it trains."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from flowjax.monitor.endpoint import MetricsEndpoint
from flowjax.monitor.progress import write_status


class TrainerStatus:
    """The newest line of each policy, in `status-<role>.json` and at a `/metrics` of its own."""

    def __init__(self, run_dir: Path, role: str, steps: Mapping[str, int]):
        self._run_dir, self._role = run_dir, role
        self._policies: dict[str, Mapping[str, Any]] = {policy: {"step": step} for policy, step in steps.items()}
        self.endpoint = MetricsEndpoint(lambda: {"policies": dict(self._policies)}, role="trainer")
        self._write()

    def update(self, line: Mapping[str, Any]) -> None:
        logging.info("%s: step %d loss %.4f", line["policy"], line["step"], line.get("loss", float("nan")))
        self._policies[line["policy"]] = {name: value for name, value in line.items() if name != "policy"}
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk stops the next checkpoint, whose message is the better one
            steps = {policy: {"step": line["step"]} for policy, line in self._policies.items()}
            write_status(self._run_dir, self._role, {"policies": steps, "metrics_url": self.endpoint.url})
