"""The trainer role: `python -m flowjax.trainer --run=<run folder> [--policy=<the only one to train>]`."""

import contextlib
import json
import sys
from functools import partial
from pathlib import Path

from absl import app, flags

from flowjax.broker import DataflowError, connect
from flowjax.config import ConfigError, load_run, policy_configs
from flowjax.models.shape import ModelError
from flowjax.models.sharding import make_mesh
from flowjax.monitor.metrics import MetricsWriter
from flowjax.monitor.token import known_token
from flowjax.trainer.batch import BatchError
from flowjax.trainer.compile_cache import use_compile_cache
from flowjax.trainer.learner import Learner
from flowjax.trainer.loop import train_policies
from flowjax.trainer.policies import make_models
from flowjax.trainer.processes import is_first, join
from flowjax.trainer.sources import DataflowSource, SourceError
from flowjax.trainer.status import TrainerStatus
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
        to_dataflow = partial(connect, endpoints["dataflow"], token=known_token(run_dir))
        source = DataflowSource(to_dataflow, timeout_s=config.trainer.step_timeout_s)
        role = f"trainer-{policy}" if policy else "trainer"
        status = TrainerStatus(run_dir, role, steps) if is_first() else None
        if status is not None:
            opened.enter_context(status.endpoint)
        on_step = status.update if status is not None else lambda line: None
        train_policies(learners, source, mesh=mesh, metrics=metrics, on_step=on_step)


def main(argv: list[str]) -> None:
    del argv
    try:
        _run(Path(_RUN.value), _POLICY.value)
    except (BatchError, CheckpointError, ConfigError, DataflowError, ModelError, SourceError) as error:
        sys.exit(f"trainer: {error}")


if __name__ == "__main__":
    app.run(main)
