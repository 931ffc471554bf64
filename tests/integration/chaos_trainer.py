"""A trainer that learns nothing: real batches, real checkpoints, and in each what it has consumed.

    python chaos_trainer.py RUN_FOLDER STEP_S

A checkpoint's `data` holds the fingerprints of the rows that made it a version: they commit together or not at all.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import jax.numpy as jnp

from flowjax.broker import connect
from flowjax.config import load_run
from flowjax.trainer.sources import DataflowSource
from flowjax.weights.publish import Checkpoints, committed_steps


def main(run_dir: Path, step_s: float) -> None:
    config = load_run(run_dir)
    checkpoints = Checkpoints(run_dir / "checkpoints" / "agent", keep=config.trainer.steps + 1)
    address = json.loads((run_dir / "endpoints.json").read_text())["dataflow"]
    source = DataflowSource(partial(connect, address), timeout_s=300)
    version = max(committed_steps(run_dir / "checkpoints" / "agent"))
    source.claim({"agent": version})
    while version < config.trainer.steps:
        rows = source.batch({"agent": version}).rows
        time.sleep(step_s)
        fingerprints = [[float(value) for value in row.logprobs[row.sampled]] for row in rows]
        lag = max(version - int(row.versions[row.sampled].min()) for row in rows)
        version += 1
        adapter = {"q_proj": {"a": jnp.ones((1, 8, 2)), "b": jnp.full((1, 2, 8), float(version))}}
        checkpoints.save(version, adapter, {}, {"fingerprints": fingerprints, "lag": lag})
        checkpoints.wait()
        source.committed("agent", version)
    source.committed("agent", version)
    checkpoints.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
