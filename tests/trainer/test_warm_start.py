"""The making of a nano base that the world asks: an executor of the canvas."""

import json
from pathlib import Path

import numpy as np
import pytest

from flowjax.envs.canvas import Canvas
from flowjax.envs.demonstrations import is_executor
from flowjax.launch.command_line import load_recipe
from flowjax.monitor.metrics import read_metrics
from flowjax.run import resolve
from flowjax.trainer.warm_start import build_base
from flowjax.workflows.codec import Codec

ROOT = Path(__file__).parents[2]
SHAPE = {"hidden_size": 32, "layers": 1, "heads": 1, "kv_heads": 1, "ffn_size": 64}


@pytest.mark.slow
def test_an_executor_is_made_of_lessons(tmp_path: Path):
    config = load_recipe(f"{ROOT}/configs/canvas.py:nano_llm")
    executor = config.bases.executor
    executor.model = {"path": str(tmp_path / "executor"), "nano": SHAPE}
    executor.warm_start.update({"states": 60, "steps": 5, "batch_rows": 8})
    run = resolve(config, tmp_path)
    world = Canvas(**config.env.options.to_dict())
    assert is_executor(run, "executor", world) and not is_executor(run, "base", world)
    build_base(run, run.bases["executor"])
    lines = list(read_metrics(tmp_path / "warm_start"))
    learned = [line["trained_tokens"] for line in lines]
    assert len(learned) == 5 and all(0 < count < 8 * 40 for count in learned), learned
    assert len({line["compile_count"] for line in lines[-2:]}) == 1, "batches are of one shape"
    assert json.loads((tmp_path / "executor" / "config.json").read_text())["hidden_size"] == 32
    messages, reply = next(world.lessons(world.tasks("train", 0)[:4], np.random.default_rng(0)))
    codec = Codec(tmp_path / "executor")
    assert codec.decode(codec.encode_reply(reply)) == reply and len(codec.encode(messages)) < 200
