"""A run of the real launcher whose engine has no model: dataflow, rollout service and trainer are real processes."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROOT = Path(__file__).parents[2]
PARTS = [str(ROOT / "tests" / "rollout"), str(ROOT / "tests" / "integration")]
sys.path += PARTS

from rollout_run import RolloutRun  # noqa: E402

from flowjax.envs.sokoban.rooms import DIRECTIONS  # noqa: E402
from flowjax.launch.machine import free_port  # noqa: E402
from flowjax.models.config import read_config  # noqa: E402
from flowjax.models.decoder import Decoder  # noqa: E402
from flowjax.models.hf import save_decoder  # noqa: E402

RECIPE = """
import json
from pathlib import Path
from flowjax.config import default_config

def get_config():
    config = default_config()
    with config.unlocked():
        config.update(json.loads(Path(__file__).with_name("config.json").read_text()))
    return config
"""


class LightRun:
    """A recipe, a model folder and an engine in `folder`; `launch()` starts runs under `folder/runs`.

    `overrides` are config fields with two underscores for a dot. Use as a context manager. `on` are words before the
    launcher's command, for another host than this one, which the engine stays on.
    """

    def __init__(self, folder: Path, *, weights: bool = True, on: Sequence[str] = (), **overrides: Any):
        self._on = on
        small = {
            "trainer__steps": 3,
            "trainer__row_tokens": 128,
            "trainer__micro_batch_rows": 8,
            "rollout__max_prompt_tokens": 64,
            "rollout__max_new_tokens": 2,
            "engine__max_model_tokens": 128,
            "model__dtype": "float32",
            "optimizer__warmup_steps": 0,
            "dataflow__max_ready_groups": 0,
            "trainer__groups_per_step": 2,
            "dataflow__lease_s": 20.0,
        }
        made = RolloutRun(folder / "parts", **{**small, **overrides})
        made.checkpoints.close()
        self.folder, config = folder, made.config
        vocabulary = json.loads((made.model / "tokenizer.json").read_text())["model"]["vocab"]
        self._actions = [str(vocabulary[name]) for name in DIRECTIONS]
        if weights:
            save_decoder(Decoder(read_config(made.model), dtype=jnp.float32, key=jax.random.key(0)), made.model)
        self.engine_port = free_port()
        config.runs, config.engine.urls = str(folder / "runs"), (f"http://127.0.0.1:{self.engine_port}",)
        (folder / "config.json").write_text(config.to_json())
        (folder / "recipe.py").write_text(RECIPE)
        self.run_dir = folder / "runs" / "light"

    def start_engine(self, *on: str) -> subprocess.Popen[bytes]:
        """An engine at `engine_port`, on the host that `on`, words before its command, names."""
        command = [*on, sys.executable, str(ROOT / "tests/integration/chaos_engine.py"), str(self.engine_port)]
        parts = {"PYTHONPATH": os.pathsep.join([str(ROOT), *PARTS])}
        return subprocess.Popen([*command, *self._actions], env=environment() | parts)

    def __enter__(self) -> "LightRun":
        self._engine = self.start_engine()
        until = time.monotonic() + 120
        while not _listens(self.engine_port):
            assert self._engine.poll() is None and time.monotonic() < until, "the engine has not come up"
            time.sleep(0.05)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._engine.kill()
        self._engine.wait()

    def launch(self, *flags: str, new: bool = True, **env: str) -> subprocess.Popen[str]:
        """Start the run, or go on with it."""
        command = [*self._on, sys.executable, "-m", "flowjax.launch"]
        command += [f"--config={self.folder / 'recipe.py'}", "--name=light"] if new else [f"--resume={self.run_dir}"]
        self.output = self.folder / f"output-{time.monotonic_ns()}.txt"
        with self.output.open("w") as out:
            return subprocess.Popen(
                [*command, *flags], cwd=ROOT, env=environment() | env, stdout=out, stderr=subprocess.STDOUT, text=True
            )

    def logs(self) -> str:
        """What the launcher has said, and the ends of the roles' logs."""
        parts = [self.output.read_text(errors="replace")]
        parts += [
            f"== {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in self.run_dir.glob("logs/*.log")
        ]
        return "\n".join(parts)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
