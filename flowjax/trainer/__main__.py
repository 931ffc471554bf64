"""The trainer role: `python -m flowjax.trainer --run=<run folder> [--policy=<the only one to train>]`."""

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from flowjax.config import ConfigError, load_run, policy_configs
from flowjax.models.shape import ModelError
from flowjax.models.sharding import make_mesh
from flowjax.monitor.endpoint import MetricsEndpoint
from flowjax.monitor.metrics import MetricsWriter
from flowjax.monitor.progress import write_status
from flowjax.monitor.token import known_token
from flowjax.trainer.batch import BatchError
from flowjax.trainer.compile_cache import use_compile_cache
from flowjax.trainer.learner import Learner
from flowjax.trainer.loop import train_policies
from flowjax.trainer.policies import make_models
from flowjax.trainer.processes import is_first, join
from flowjax.trainer.sources import DataflowSource, SourceError
from flowjax.weights.publish import CheckpointError, Checkpoints

_RUN = flags.DEFINE_string("run", None, "Run folder.", required=True)
_POLICY = flags.DEFINE_string("policy", "", "The only policy to train; all of the run's if empty.")


def _run(run_dir: Path, policy: str) -> None:
    config = load_run(run_dir)
    configs = {name: own for name, own in policy_configs(config).items() if policy in ("", name)}
    if not configs:
        raise ConfigError(f"--policy is {policy!r}: the run has {', '.join(policy_configs(config))}")
    use_compile_cache(config.trainer.compile_cache)
    join(config)
    mesh = make_mesh(**config.mesh.to_dict())
    models = make_models(config, mesh, configs)
    endpoints = json.loads((run_dir / "endpoints.json").read_text())
    with contextlib.ExitStack() as opened:
        learners = {}
        for name, own in configs.items():
            kept = {"keep": own.trainer.keep_checkpoints, "keep_every": own.trainer.keep_every_steps}
            checkpoints = opened.enter_context(Checkpoints(run_dir / "checkpoints" / name, **kept))
            learners[name] = Learner(name, own, models.pop(name), checkpoints)
        steps = {name: learner.step for name, learner in learners.items()}
        metrics = (
            MetricsWriter(run_dir, tensorboard=config.trainer.tensorboard, resume_step=steps) if is_first() else None
        )
        source = DataflowSource(
            endpoints["dataflow"], timeout_s=config.trainer.step_timeout_s, token=known_token(run_dir)
        )
        role = f"trainer-{policy}" if policy else "trainer"
        status = _Status(run_dir, role, steps) if is_first() else None
        if status is not None:
            opened.enter_context(status.endpoint)
        on_step = status.update if status is not None else lambda line: None
        train_policies(learners, source, mesh=mesh, metrics=metrics, on_step=on_step)


class _Status:
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


def main(argv: list[str]) -> None:
    del argv
    try:
        _run(Path(_RUN.value), _POLICY.value)
    except (BatchError, CheckpointError, ConfigError, ModelError, SourceError) as error:
        sys.exit(f"trainer: {error}")


if __name__ == "__main__":
    app.run(main)
