"""The trainer role: `python -m flowjax.trainer --run=<run folder>`."""

import contextlib
import json
import sys
from pathlib import Path

from absl import app, flags, logging

from flowjax.config import ConfigError, load_run, policy_configs
from flowjax.models.shape import ModelError
from flowjax.models.sharding import make_mesh
from flowjax.monitor.metrics import MetricsWriter
from flowjax.trainer.batch import BatchError
from flowjax.trainer.compile_cache import use_compile_cache
from flowjax.trainer.learner import Learner
from flowjax.trainer.loop import train_policies
from flowjax.trainer.policies import make_models
from flowjax.trainer.processes import is_first, join
from flowjax.trainer.sources import DataflowSource, SourceError
from flowjax.weights.publish import CheckpointError, Checkpoints

_RUN = flags.DEFINE_string("run", None, "Run folder.", required=True)


def _run(run_dir: Path) -> None:
    config = load_run(run_dir)
    use_compile_cache(config.trainer.compile_cache)
    join(config)
    mesh = make_mesh(**config.mesh.to_dict())
    models = make_models(config, mesh)
    endpoints = json.loads((run_dir / "endpoints.json").read_text())
    with contextlib.ExitStack() as opened:
        learners = {}
        for name, own in policy_configs(config).items():
            kept = {"keep": own.trainer.keep_checkpoints, "keep_every": own.trainer.keep_every_steps}
            checkpoints = opened.enter_context(Checkpoints(run_dir / "checkpoints" / name, **kept))
            learners[name] = Learner(name, own, models.pop(name), checkpoints)
        steps = {name: learner.step for name, learner in learners.items()}
        metrics = (
            MetricsWriter(run_dir, tensorboard=config.trainer.tensorboard, resume_step=steps) if is_first() else None
        )
        train_policies(
            learners,
            DataflowSource(endpoints["dataflow"], timeout_s=config.trainer.step_timeout_s),
            mesh=mesh,
            metrics=metrics,
            on_step=lambda line: logging.info("step %d loss %.4f", line["step"], line.get("loss", float("nan"))),
        )


def main(argv: list[str]) -> None:
    del argv
    try:
        _run(Path(_RUN.value))
    except (BatchError, CheckpointError, ConfigError, ModelError, SourceError) as error:
        sys.exit(f"trainer: {error}")


if __name__ == "__main__":
    app.run(main)
