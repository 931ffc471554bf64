"""The making of a nano base that the world asks: an executor of the canvas."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs import math, search, sokoban
from flowjax.config import ConfigError, save_run, taught_options
from flowjax.envs import Split
from flowjax.envs.canvas import Canvas
from flowjax.envs.demonstrations import base_words, is_executor
from flowjax.envs.math import Math
from flowjax.envs.sokoban import Sokoban
from flowjax.envs.sokoban.levels import moves_to_go
from flowjax.launch.command_line import load_recipe
from flowjax.models.nano import create_nano
from flowjax.monitor.metrics import read_metrics
from flowjax.run import TAUGHT_FILE, resolve
from flowjax.trainer import warm_start
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
    config.rollout.max_prompt_tokens = 4096  # the agent's, far beyond the lessons: it was refused by their row_tokens
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


def test_runs_that_share_a_base_wait_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = sokoban.get_config("nano")
    made, folder = tmp_path / "made", tmp_path / "base"
    create_nano([str(n) for n in range(9)], made, key=jax.random.key(0), pieces=False, **SHAPE)
    (made / TAUGHT_FILE).write_text(config.warm_start.to_json())
    folder.mkdir()  # empty, as a run that was stopped may leave it
    config.model.path, config.model.nano = str(folder), SHAPE
    run = resolve(config, tmp_path / "run")
    code = f"""
import pathlib, time
from flowjax.files import held
folder = pathlib.Path({str(folder)!r})
with held(folder.with_name(".base.lock"), wait_s=0):
    print("held", flush=True)
    time.sleep(3)
    pathlib.Path({str(made)!r}).rename(folder)
"""
    monkeypatch.setattr(warm_start, "build_base", lambda *_: pytest.fail("a base that another run makes"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        warm_start.have_base(run, run.bases["base"])
    for changed in ({"warm_start.steps": 7}, {"model.nano": SHAPE | {"layers": 2}}):
        other = config.copy_and_resolve_references()
        other.update_from_flattened_dict(changed)
        with pytest.raises(ConfigError, match="another run has made meanwhile"):
            warm_start.have_base(run, resolve(other).bases["base"])


def test_the_last_batches_teach_a_habit(tmp_path: Path):
    config = math.get_config("nano")
    config.warm_start.update({"states": 64, "steps": 8, "batch_rows": 16, "noisy_share": 0.5})
    run = resolve(config, tmp_path)
    world = Math(**config.env.options.to_dict())
    create_nano(base_words(run, "base", world), tmp_path, key=jax.random.key(0), pieces=False, **SHAPE)
    codec = Codec(tmp_path)
    knows, does = (Math(**taught_options(config, config.warm_start, noisy=noisy)) for noisy in (False, True))
    batches = list(warm_start._batches(config, config.warm_start, (knows, does), codec))
    (sign,) = codec.encode_reply("=")[:1]
    worked = [sum(sign == row.tokens[row.sampled.argmax()] for row in batch) for batch in batches]
    assert worked[:4] == [16] * 4 and max(worked[4:]) <= 6


def test_a_word_that_the_vocabulary_lacks_is_named_before_anything_is_taught(tmp_path: Path):
    """It was <unk> in every prompt, and nobody said so."""
    config = sokoban.get_config("nano")
    run, world = resolve(config, tmp_path), Sokoban(**config.env.options.to_dict())
    words = list(base_words(run, "base", world))
    create_nano(words, tmp_path / "whole", key=jax.random.key(0), pieces=False, **SHAPE)
    codec = Codec(tmp_path / "whole")
    rows = warm_start.imitation_rows(config, config.warm_start, world, codec, states=1, label_noise=0.0)
    reply = codec.decode([token for token in rows[0].tokens[rows[0].sampled] if token != codec.eos_token_id])
    words.remove(reply)
    create_nano(words, tmp_path / "short", key=jax.random.key(0), pieces=False, **SHAPE)
    with pytest.raises(ConfigError, match=rf"config.env.name is .*Sokoban', whose vocabulary\(\) .*lacks '{reply}'"):
        warm_start.imitation_rows(
            config, config.warm_start, world, Codec(tmp_path / "short"), states=1, label_noise=0.0
        )


def test_a_server_that_is_away_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It was a traceback, and the launcher tried once more."""
    config = search.get_config("nano")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    config.env.options.update({"documents": 200, "retriever": address, "search_timeout_s": 0.1})
    config.env.train_tasks = config.warm_start.tasks = 10
    config.model.path, config.model.nano = str(tmp_path / "base"), SHAPE
    save_run(config, tmp_path)
    monkeypatch.setattr(warm_start, "flags", SimpleNamespace(FLAGS=SimpleNamespace(run=str(tmp_path), base="base")))
    monkeypatch.setattr(warm_start, "use_compile_cache", lambda _: None)
    with pytest.raises(SystemExit) as refused:
        warm_start.main([])
    said = capsys.readouterr().err
    named = "warm start: config.env.name is 'flowjax.envs.search:Search', in which the expert cannot play (no retrieval"
    assert refused.value.code == 2 and said.startswith(named) and said.count("\n") == 1, said
    assert address in said and not (tmp_path / "base").exists()


class Seen(Exception):
    """The world that demonstrations would be made in."""


def test_a_base_imitates_and_does_so_alike_whatever_a_run_trains_with(tmp_path: Path):
    """The note in its folder, by which later runs know it, says nothing of that."""
    config = sokoban.get_config("nano")
    config.loss.update({"kind": "ppo", "kl_coefficient": 0.5, "entropy_coefficient": 0.1})
    config.loss.options = {"correction": "token_truncate"}
    config.rollout.temperature = 0.5
    taught = []
    for changes in ({}, {"name": "sgd", "clip_norm": 1e-3, "betas": (0.5, 0.5), "weight_decay": 1.0}):
        config.optimizer.update(changes)
        run = resolve(config, tmp_path)
        imitation = warm_start._imitation(run, run.bases["base"])
        taught.append(imitation.policies["base"].optimizer.to_dict())
        loss = imitation.policies["base"].loss
        assert (loss.kind, loss.kl_coefficient, loss.entropy_coefficient) == ("cross_entropy", 0.0, 0.0)
        assert not loss.options and imitation.config.rollout.temperature == 1.0
    assert taught[0] == taught[1]


def test_what_is_taught_lies_nearer_than_what_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = sokoban.get_config("nano")
    config.model.path, config.model.nano = str(tmp_path / "base"), SHAPE
    run = resolve(config, tmp_path)

    def stop(config, warm, world, *args, **kwargs):
        raise Seen(world)

    monkeypatch.setattr(warm_start, "imitation_rows", stop)
    with pytest.raises(Seen) as seen:
        build_base(run, run.bases["base"])
    taught, trained = seen.value.args[0], Sokoban(**config.env.options.to_dict())
    cases: list[tuple[Sokoban, Split, int, int]]
    cases = [(taught, "train", 1, 3), (trained, "train", 4, 12), (trained, "held_out", 4, 12)]
    for world, split, least, most in cases:
        env, tasks = world.env(), world.tasks(split, 0)
        moves = []
        for index in range(40):
            task = tasks[index]
            assert task is not None
            env.reset(task, 0)
            moves.append(moves_to_go(env.room, env.position))
        assert (min(moves), len(set(moves)) > 1) == (least, True) and max(moves) <= most, (split, moves)
