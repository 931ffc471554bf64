"""Exported checkpoints in the tools they are for: transformers and PEFT give the trainer's own log-probabilities."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import yaml
from flax import nnx
from peft import PeftModel
from transformers import AutoModelForCausalLM

from flowjax.config import ConfigError, default_config, load_run, save_run
from flowjax.export import export
from flowjax.models.decoder import Decoder
from flowjax.models.hf import load_decoder, save_decoder
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.nano import nano_config
from flowjax.models.shape import Experts, ModelError
from flowjax.monitor.held_out import HeldOutEpisode, summarise, write_held_out
from flowjax.monitor.metrics import MetricsWriter
from flowjax.run import resolve, write_models
from flowjax.weights.publish import CheckpointError, Checkpoints, read_adapter

MODEL = nano_config(40, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn_size=16)
TOKENS = np.random.default_rng(0).integers(3, 40, (2, 9))
STARTED = {
    "command": ["python", "-m", "flowjax.launch", "--config=a.py:b"],
    "code": {"commit": "abc", "dirty": True, "changed_files": ["a", "b"], "version": "0.1.0"},
    "versions": {"jax": "1"},
    "machine": {"host": "secret-host", "cpu": "AMD", "cpus": 2, "gpus": []},
}
LORA = {"rank": 3, "alpha": 6.0, "targets": ("q_proj", "up_proj"), "rslora": True, "dropout": 0.1}


def random_state(state, seed: int):
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    return jax.tree.map(lambda leaf: leaf + 0.2 * jax.random.normal(next(keys), leaf.shape), state)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs with a checkpoint of step 4 each: an adapter, and all weights."""
    folder = tmp_path_factory.mktemp("exported")
    decoder = Decoder(MODEL, dtype=jnp.float32, key=jax.random.key(0))
    nnx.update(decoder, random_state(nnx.state(decoder), 1))
    save_decoder(decoder, folder / "model")
    for train in ("lora", "full"):
        config = default_config()
        config.model.path, config.model.dtype = str(folder / "model"), "float32"
        config.policy.train = train
        config.policy.lora.update(LORA)
        save_run(config, folder / train)
        model = load_decoder(folder / "model", lora=Lora(**LORA) if train == "lora" else None, dtype=jnp.float32)
        state = random_state(nnx.state(model, LoraParam if train == "lora" else nnx.Param), 2)
        with Checkpoints(folder / train / "checkpoints" / "agent") as checkpoints:
            checkpoints.save(4, state, {}, {})
        nnx.update(model, state)
        np.save(folder / f"{train}.npy", ours(model))
    return folder


def ours(model: Decoder) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    hidden = model(jnp.asarray(TOKENS), positions, jnp.ones_like(TOKENS))
    return np.asarray(jax.nn.log_softmax(hidden @ model.head()))


def theirs(model) -> np.ndarray:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor(TOKENS)).logits, -1).numpy()


@pytest.mark.parametrize("train", ["lora", "full"])
def test_transformers_gives_our_log_probs(runs: Path, tmp_path: Path, train: str):
    export(runs / train / "checkpoints/agent/4", tmp_path / "out", form="hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    np.testing.assert_allclose(theirs(model), np.load(runs / f"{train}.npy"), atol=1e-4)


def test_peft_gives_our_log_probs(runs: Path, tmp_path: Path):
    export(runs / "lora/checkpoints/agent/4", tmp_path / "adapter", form="peft")
    base = AutoModelForCausalLM.from_pretrained(runs / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    np.testing.assert_allclose(theirs(model), np.load(runs / "lora.npy"), atol=1e-4)


@pytest.mark.parametrize("target", ["q_proj", "up_proj"])
def test_an_adapter_that_peft_would_drop_in_part_is_refused(tmp_path: Path, target: str):
    """PEFT applies no adapter to the dense layers beside those with experts."""
    mixed = replace(MODEL, architecture="qwen3_moe", experts=Experts(4, 2, ffn_size=8, dense_layers=(1,)))
    save_decoder(Decoder(mixed, dtype=jnp.float32, key=jax.random.key(0)), tmp_path / "model")
    lora = {"rank": 2, "alpha": 4.0, "targets": (target,)}
    config = default_config()
    config.model.path, config.model.dtype = str(tmp_path / "model"), "float32"
    config.policy.lora.update(lora)
    save_run(config, tmp_path / "run")
    model = load_decoder(tmp_path / "model", lora=Lora(**lora), dtype=jnp.float32)
    with Checkpoints(tmp_path / "run/checkpoints/agent") as checkpoints:
        checkpoints.save(4, nnx.state(model, LoraParam), {}, {})
    whole = target == "q_proj"
    refused = pytest.raises(ConfigError, match="PEFT would drop the adapters of up_proj: use --format=hf")
    with contextlib.nullcontext() if whole else refused:
        export(tmp_path / "run/checkpoints/agent/4", tmp_path / "adapter", form="peft")
    assert (tmp_path / "adapter").exists() == whole


def test_the_precision_is_as_asked(runs: Path, tmp_path: Path):
    export(runs / "full/checkpoints/agent/4", tmp_path / "out", form="hf", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(("form", "weights"), [("hf", "model"), ("peft", "adapter_model")])
def test_weights_can_be_read_by_whom_the_umask_lets(runs: Path, tmp_path: Path, form: str, weights: str):
    usual = os.umask(0o027)
    try:
        export(runs / "lora/checkpoints/agent/4", tmp_path / "out", form=form)
    finally:
        os.umask(usual)
    assert stat.S_IMODE((tmp_path / f"out/{weights}.safetensors").stat().st_mode) == 0o640


def test_the_card_tells_data_algorithm_budget_results_and_provenance(runs: Path, tmp_path: Path):
    run = tmp_path / "my-run"
    shutil.copytree(runs / "lora", run)
    config = load_run(run)
    config.env.name, config.credit.name, config.reward.components = "a.b:World", "gigpo", {"success": 1.0}
    save_run(config, run)
    writer = MetricsWriter(run)
    for step in range(1, 7):  # the last two are not in it
        writer.write("train", step=step, policy="agent", episodes=8, trained_tokens=50.0, total_s=1.5)
    (run / "run.json").write_text(json.dumps({"starts": [STARTED]}))
    export(run / "checkpoints/agent/4", tmp_path / "peft", form="peft")
    card = (tmp_path / "peft/README.md").read_text()
    _, header, text = card.split("---\n")
    told = yaml.safe_load(header)
    assert told["base_model"] == str(runs / "model") and told["library_name"] == "peft" and "lora" in told["tags"]
    for words in (
        "# my-run, agent at step 4",
        "a LoRA adapter of rank 3 of",
        "- world: `a.b:World`",
        "- credit: gigpo",
        '- reward: `{"success": 1.0}`',
        "- trajectories trained on: 32",
        "- sampled tokens trained on: 200",
        "- held-out tasks: not evaluated at this step",
        "- command: `python -m flowjax.launch --config=a.py:b`",
        "commit abc, with changes in 2 files",
    ):
        assert words in text, words
    assert "secret-host" not in card
    later = {"command": ["resumed"], "started_s": time.time() + 9.0, "code": {"commit": "def"}}
    (run / "run.json").write_text(json.dumps({"starts": [STARTED, later]}))
    episodes = [HeldOutEpisode(task, task, "", 0, "ok", 1.0, 3, 6, {}, {}) for task in "xy"]
    write_held_out(run, "agent@4", episodes)
    write_held_out(run, "agent@4,other@9", [])  # no episode ended
    (run / "evaluations/4").mkdir(parents=True)
    (run / "evaluations/4/results.json").write_text('{"played": {"name": "agent@5"}}')
    (run / "evaluations/old").mkdir()
    (run / "evaluations/old/results.json").write_text('{"played": {"name": "agent@4"}}')
    (run / "evaluations/torn").mkdir()
    (run / "evaluations/torn/results.json").write_text('{"pla')
    export(run / "checkpoints/agent/4", tmp_path / "hf", form="hf")
    merged = (tmp_path / "hf/README.md").read_text()
    assert "commit abc" in merged and "starts: 1" in merged, "the start after this step is not where it comes from"
    assert "merged into it" in merged and "- held-out success: 100.0 % [34.2, 100.0] of 2 tasks" in merged
    assert "beside training" in merged and 'library_name: "transformers"' in merged
    results = {**summarise(episodes[:1]), "played": {"name": "agent@4", "samples": 4, "temperature": 0.0}}
    (run / "evaluations/4/results.json").write_text(json.dumps(results))
    longer = {"name": "agent@4", "samples": 8, "temperature": 1.0, "max_turns": config.env.max_turns + 1}
    (run / "evaluations/4-2").mkdir()  # the newest, with other bounds than the card tells of
    (run / "evaluations/4-2/results.json").write_text(json.dumps({**summarise(episodes), "played": longer}))
    export(run / "checkpoints/agent/4", tmp_path / "again", form="peft")
    assert "played with: 4 samples of each task, temperature 0" in (tmp_path / "again/README.md").read_text()
    assert PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(runs / "model"), tmp_path / "again")


def test_the_card_of_one_of_several_policies_has_what_all_of_them_came_to(runs: Path, tmp_path: Path):
    config = default_config()
    config.model.path, config.model.dtype = str(runs / "model"), "float32"
    config.policies = {"agent": {"policy": {"lora": LORA}}, "other": {}}
    save_run(config, tmp_path / "run")
    (tmp_path / "run/checkpoints/agent").mkdir(parents=True)
    (tmp_path / "run/checkpoints/agent/4").symlink_to(runs / "lora/checkpoints/agent/4")
    for version, success in ((4, 1.0), (44, 0.0)):
        episodes = [HeldOutEpisode(task, task, "", 0, "ok", success, 3, 6, {}, {}) for task in "xy"]
        write_held_out(tmp_path / "run", f"agent@{version},other@3", episodes)
    export(tmp_path / "run/checkpoints/agent/4", tmp_path / "out", form="peft")
    card = (tmp_path / "out/README.md").read_text()
    assert "- held-out success: 100.0 % [34.2, 100.0] of 2 tasks" in card
    assert "- played: beside training, by agent@4,other@3" in card
    played = {"name": "agent@4,other@3", "samples": 4, "temperature": 1.0, "top_p": 0.9}
    (tmp_path / "run/evaluations/4").mkdir(parents=True)
    (tmp_path / "run/evaluations/4/results.json").write_text(json.dumps({**summarise(episodes), "played": played}))
    export(tmp_path / "run/checkpoints/agent/4", tmp_path / "again", form="peft")
    how = "- played with: 4 samples of each task, temperature 1, top_p 0.9, by agent@4,other@3"
    assert how in (tmp_path / "again/README.md").read_text()


def test_an_adapter_names_its_base_as_the_config_does_where_that_was_fetched(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "lora", tmp_path / "run")
    config = load_run(tmp_path / "run")
    config.model.path = "maker/model"
    save_run(config, tmp_path / "run")
    fetched = {"path": "maker/model", "revision": "a", "folder": str(runs / "model")}
    write_models(tmp_path / "run", {"base": fetched})
    export(tmp_path / "run/checkpoints/agent/4", tmp_path / "out", form="peft")
    described = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "maker/model"


def test_numbers_that_are_not_finite_are_not_handed_on(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "lora", tmp_path / "run")
    model = load_decoder(runs / "model", lora=Lora(**LORA), dtype=jnp.float32)
    state = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), nnx.state(model, LoraParam))
    with Checkpoints(tmp_path / "run" / "checkpoints" / "agent") as checkpoints:
        checkpoints.save(5, state, {}, {})
    for form in ("hf", "peft"):
        with pytest.raises(
            CheckpointError, match=r"agent/5 has numbers that are not finite in \['adapter'\]\['q_proj'\]\['a'\]"
        ):
            export(tmp_path / "run/checkpoints/agent/5", tmp_path / "out", form=form)
    assert not (tmp_path / "out").exists()


def test_refusals(runs: Path, tmp_path: Path):
    checkpoint, out = runs / "lora/checkpoints/agent/4", tmp_path / "out"
    with pytest.raises(ConfigError, match="--format=gguf is not known: use one of hf, peft"):
        export(checkpoint, out, form="gguf")
    with pytest.raises(ConfigError, match="--dtype=int4 is not known"):
        export(checkpoint, out, form="hf", dtype="int4")
    with pytest.raises(ConfigError, match="--dtype=bfloat16 is for --format=hf: an adapter keeps the precision"):
        export(checkpoint, out, form="peft", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"is not a committed checkpoint: .* has committed steps \[4\]"):
        export(checkpoint.with_name("5"), out, form="hf")
    with pytest.raises(ConfigError, match=r"it is a run folder: give one of its checkpoints, such as .*/agent/4$"):
        export(runs / "lora", out, form="hf")
    with pytest.raises(ConfigError, match=r"--out=.* exists already"):
        export(checkpoint, tmp_path, form="hf")
    for place in (checkpoint.with_name("5"), checkpoint / "out"):
        with pytest.raises(ConfigError, match=r"--out=.* is among the run's checkpoints: name a folder elsewhere"):
            export(checkpoint, place, form="hf")
    with pytest.raises(ConfigError, match="--format=peft is for adapters"):
        export(runs / "full/checkpoints/agent/4", out, form="peft")
    assert not out.exists()


def test_a_checkpoint_is_not_exported_with_another_base(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "model", tmp_path / "model")
    config = load_run(runs / "lora")
    config.model.path, config.model.nano = str(tmp_path / "model"), {"hidden_size": 16}
    save_run(config, tmp_path / "run")
    base = resolve(config).bases["base"]
    state = read_adapter(runs / "lora/checkpoints/agent", 4)
    with Checkpoints(tmp_path / "run/checkpoints/agent") as checkpoints:
        checkpoints.save(4, state, {}, {"base": base.weights_digest()})
    export(tmp_path / "run/checkpoints/agent/4", tmp_path / "out", form="peft")
    with (tmp_path / "model/model.safetensors").open("ab") as weights:
        weights.write(b"of another seed")
    with pytest.raises(ConfigError, match=r"config.model.path is .*model', where another base lies .* bring that back"):
        export(tmp_path / "run/checkpoints/agent/4", tmp_path / "again", form="peft")


def test_from_another_folder_than_the_runs_the_base_is_not_found(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(runs / "lora", tmp_path / "run")
    config = load_run(tmp_path / "run")
    config.model.path = "model"
    save_run(config, tmp_path / "run")
    (tmp_path / "run/run.json").write_text(json.dumps({"starts": [{**STARTED, "folder": str(runs)}]}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"base model is 'model', and there is no .* in which the run was started \({runs}\)"
    ):
        export(tmp_path / "run/checkpoints/agent/4", tmp_path / "out", form="peft")
    monkeypatch.chdir(runs)
    export(tmp_path / "run/checkpoints/agent/4", tmp_path / "out", form="hf")


def test_an_adapter_of_another_shape_is_refused_and_leaves_nothing(runs: Path, tmp_path: Path):
    config = default_config()
    config.model.path = str(runs / "model")
    config.policy.lora.update({**LORA, "rank": 5})
    save_run(config, tmp_path / "run")
    (tmp_path / "run/checkpoints/agent").mkdir(parents=True)
    (tmp_path / "run/checkpoints/agent/4").symlink_to(runs / "lora/checkpoints/agent/4")
    for form in ("hf", "peft"):
        with pytest.raises(ModelError, match="the adapter's rank or base model differs"):
            export(tmp_path / "run/checkpoints/agent/4", tmp_path / "out", form=form)
    assert not (tmp_path / "out").exists()


def test_a_policy_on_another_base_is_exported_with_that(runs: Path, tmp_path: Path):
    config = default_config()
    config.model.path = "absent"
    config.bases = {"judge": {"model": {"path": str(runs / "model"), "dtype": "float32"}}}
    config.policies = {"agent": {"policy": {"base": "judge", "lora": LORA}}, "other": {}}
    save_run(config, tmp_path / "run")
    (tmp_path / "run/checkpoints/agent").mkdir(parents=True)
    (tmp_path / "run/checkpoints/agent/4").symlink_to(runs / "lora/checkpoints/agent/4")
    export(tmp_path / "run/checkpoints/agent/4", tmp_path / "out", form="hf")
    np.testing.assert_allclose(
        ours(load_decoder(tmp_path / "out", dtype=jnp.float32)), np.load(runs / "lora.npy"), atol=1e-5
    )


def test_a_mistake_on_the_command_line_is_one_line(tmp_path: Path):
    command = [sys.executable, "-m", "flowjax.export", f"--checkpoint={tmp_path}/9", f"--out={tmp_path}/out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"export: --checkpoint={tmp_path}/9 is not a committed checkpoint")


def test_a_folder_that_cannot_be_made_is_named(runs: Path, tmp_path: Path):
    (tmp_path / "README.md").touch()
    out = f"{tmp_path}/README.md/m"
    command = [sys.executable, "-m", "flowjax.export", f"--checkpoint={runs}/lora/checkpoints/agent/4", f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"export: [Errno 17] File exists: '{tmp_path}/README.md': --out={out} has to"
    )
