"""The trainer role: `python -m flowjax.trainer --run=<run folder>`."""

import json
import sys
from pathlib import Path

import jax
from absl import app, flags, logging

from flowjax.config import ConfigError, load_run
from flowjax.models.config import ModelError
from flowjax.models.hf import load_decoder
from flowjax.models.lora import Lora
from flowjax.models.sharding import make_mesh
from flowjax.monitor.metrics import MetricsWriter
from flowjax.trainer.batch import BatchError
from flowjax.trainer.loop import train
from flowjax.trainer.sources import DataflowSource, SourceError
from flowjax.weights.publish import CheckpointError, Checkpoints

_RUN = flags.DEFINE_string("run", None, "Run folder.", required=True)


def _run(run_dir: Path) -> None:
    config = load_run(run_dir)
    mesh = make_mesh(**config.mesh.to_dict())
    lora = Lora(**config.policy.lora.to_dict()) if config.policy.train == "lora" else None
    model = load_decoder(
        Path(config.model.path),
        lora=lora,
        dtype=config.model.dtype,
        mesh=mesh,
        remat=config.model.remat,
        key=jax.random.key(config.seed),
    )
    endpoints = json.loads((run_dir / "endpoints.json").read_text())
    name = config.policy.name
    with Checkpoints(
        run_dir / "checkpoints" / name,
        keep=config.trainer.keep_checkpoints,
        keep_every=config.trainer.keep_every_steps,
    ) as checkpoints:
        train(
            config,
            model,
            DataflowSource(endpoints["dataflow"], policy=name, timeout_s=config.trainer.step_timeout_s),
            mesh=mesh,
            metrics=MetricsWriter(run_dir, tensorboard=config.trainer.tensorboard, resume_step=checkpoints.latest()),
            checkpoints=checkpoints,
            on_step=lambda line: logging.info("step %d loss %.4f", line["step"], line["loss"]),
        )


def main(argv: list[str]) -> None:
    del argv
    try:
        _run(Path(_RUN.value))
    except (BatchError, CheckpointError, ConfigError, ModelError, SourceError) as error:
        sys.exit(f"trainer: {error}")


if __name__ == "__main__":
    app.run(main)
