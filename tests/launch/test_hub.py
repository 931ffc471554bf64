"""Base models by their id: fetched once from a hub on loopback, at a revision that a resumed run keeps."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_hub import SHAS, FakeHub

from flowjax.config import ConfigError, default_config, load_run, save_run
from flowjax.launch.__main__ import read_request
from flowjax.launch.checks import on_each_base
from flowjax.launch.machine import check_model, hub_id, to_fetch
from flowjax.launch.probe import inspect_run
from flowjax.models.nano import build_tokenizer
from flowjax.run import read_run, resolve

# As `python -m flowjax.launch`, up to where roles would be started: then it says what they would find.
LAUNCH = """
import json, sys
from flowjax.launch import __main__ as launch
from flowjax.run import read_run

def show(request, console):
    run = read_run(request.run.folder)
    print("found", json.dumps({name: base.model.path for name, base in run.bases.items()}))
    return 0

launch._run = show
sys.exit(launch.main(sys.argv[1:]))
"""
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


@pytest.fixture
def hub(tmp_path: Path):
    folder = tmp_path / "uploaded"
    build_tokenizer(["up", "down"], folder)
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "pytorch_model.bin").write_bytes(b"the same once more")
    with FakeHub(folder) as hub:
        yield hub


def launch(folder: Path, url: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(folder / "cache"), "HF_HUB_ETAG_TIMEOUT": "1"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "0", **environment}
    command = [sys.executable, "-c", LAUNCH, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def started(recipe: Path) -> list[str]:
    """Arguments of a run whose base model is on the hub."""
    fields = {"runs": "runs", "model.path": "tests/Tiny", "model.nano": "None", "rollout.max_prompt_tokens": 64}
    fields |= {"rollout.max_new_tokens": 8, "name": "run"}
    return [f"--config={recipe}", *(f"--config.{name}={value}" for name, value in fields.items())]


def found(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.partition("found ")[2].splitlines()[0])


def test_a_model_is_fetched_once_and_its_revision_noted(hub, recipe, started):
    folder = recipe.parent
    path = Path(found(launch(folder, hub.url, *started))["base"])
    assert path.name == SHAS["main"] and (path / "model.safetensors").read_bytes() == b"weights"
    assert sorted({name.partition("/")[2] for name in hub.fetched}) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    noted = json.loads((folder / "runs" / "run" / "models.json").read_text())
    assert noted == {"base": {"path": "tests/Tiny", "revision": SHAS["main"], "folder": str(path)}}
    assert json.loads((folder / "runs" / "run" / "config.json").read_text())["model"]["path"] == "tests/Tiny"
    before = len(hub.fetched)
    assert found(launch(folder, hub.url, "--resume=runs/run"))["base"] == str(path)
    nowhere = launch(folder, "http://127.0.0.1:9", "--resume=runs/run", HF_HUB_OFFLINE="1")
    assert found(nowhere)["base"] == str(path) and len(hub.fetched) == before


def test_a_resumed_run_keeps_its_revision_when_the_cache_is_gone(hub, recipe, started, monkeypatch):
    folder = recipe.parent
    found(launch(folder, hub.url, *started))
    shutil.rmtree(folder / "cache")
    monkeypatch.setitem(SHAS, "main", "c" * 40)  # somebody has uploaded another one meanwhile
    assert Path(found(launch(folder, hub.url, "--resume=runs/run"))["base"]).name == "a" * 40
    asked = launch(folder, hub.url, *started, "--config.name=other")
    assert Path(found(asked)["base"]).name == "c" * 40


def test_a_revision_is_asked_for_by_its_name(hub, recipe, started):
    done = launch(recipe.parent, hub.url, *started, "--config.model.path=tests/Tiny@v1")
    assert Path(found(done)["base"]).name == SHAS["v1"]


@pytest.mark.parametrize(
    ("path", "change", "parts"),
    [
        (
            "tests/Tiny",
            {"offline": True},
            ("'tests/Tiny', which is no folder here", "cannot be reached", "hf download"),
        ),
        ("tests/Tiny", {"away": True}, ("'tests/Tiny', which is no folder here", "cannot be reached", "name a folder")),
        ("tests/Tiny", {"broken": True}, ("'tests/Tiny', which is no folder here", "cannot be reached")),
        ("tests/Tiny", {"gated": True}, ("who accept its terms", "HF_TOKEN")),
        ("tests/Tinny", {}, ("'tests/Tinny', which is no folder here and no model on", "correct the name")),
        ("tests/Tiny@v9", {}, ("has no revision 'v9'", "correct or leave it out")),
    ],
)
def test_a_model_that_cannot_be_fetched_takes_one_message(hub, recipe, started, path, change, parts):
    hub.broken, hub.gated = bool(change.get("broken")), bool(change.get("gated"))
    url = "http://127.0.0.1:9" if change.get("away") else hub.url
    environment = {"HF_HUB_OFFLINE": "1"} if change.get("offline") else {}
    done = launch(recipe.parent, url, *started, f"--config.model.path={path}", **environment)
    assert done.returncode == 2
    (message,) = done.stderr.strip().splitlines()
    assert message.startswith(f"config.model.path is {path!r}, ")
    for part in parts:
        assert part in message
    assert not (recipe.parent / "runs").exists()


def test_what_was_fetched_is_checked_before_roles_start(hub, recipe, started):
    (hub.folder / "model.safetensors").unlink()
    done = launch(recipe.parent, hub.url, *started)
    assert done.returncode == 2 and "lacks *.safetensors" in done.stderr


def test_a_plan_fetches_nothing(hub, recipe, started):
    done = launch(recipe.parent, hub.url, *started, "--dry_run")
    assert done.returncode == 0 and not hub.fetched, done.stdout + done.stderr
    assert "first: tests/Tiny is fetched from Hugging Face (there is no folder of that name)" in " ".join(
        done.stdout.split()
    )


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", "")),
        ("Qwen/Qwen3-0.6B@refs/pr/1", ("Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("models/Qwen3-8B", None),
        ("here/model", None),
        ("/abs/model", None),
        ("./a/b", None),
        ("../a/b", None),
        ("a/b/c", None),
        ("model", None),
        ("a b/c", None),
        ("", None),
    ],
)
def test_a_missing_folder_is_no_strangers_model(tmp_path, monkeypatch, path, asked):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    config: Any = default_config()
    config.model.path = path
    base = resolve(config).bases["base"]
    assert hub_id(base) == asked
    assert bool(on_each_base(resolve(config), check_model)) == (asked is None)
    config.model.nano = {"layers": 2}
    assert hub_id(resolve(config).bases["base"]) is None, "it is made, not fetched"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"base": 3}', '{"base": {"path": "a/b"}}', '{"base": null}'])
def test_a_damaged_note_is_named(tmp_path, text):
    save_run(default_config(), tmp_path)
    (tmp_path / "models.json").write_text(text)
    with pytest.raises(ConfigError, match=r"models\.json cannot be read .*: remove it"):
        read_run(tmp_path)


def test_a_note_that_may_not_be_read_is_not_to_be_removed(tmp_path, monkeypatch):
    save_run(default_config(), tmp_path)

    def refused(self: Path, *_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    config = load_run(tmp_path)
    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(ConfigError, match=r"models\.json cannot be read .*: see that this user may read it"):
        resolve(config, tmp_path)


def test_a_note_is_not_looked_for_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    assert resolve(default_config(), tmp_path / "file" / "run").folder == tmp_path / "file" / "run"


def test_a_plan_knows_the_shape_of_a_revision(recipe):
    given = [f"--config={recipe}", "--config.model.nano=None", "--config.model.path=Qwen/Qwen3-0.6B@refs/pr/1"]
    plan = inspect_run(read_request([*given, "--dry_run"]).run, 1, None)["plan"]
    assert plan["bases"]["base"]["model"]["parameters"] > 5e8


def test_each_base_has_a_model_of_its_own(tmp_path):
    config: Any = default_config()
    config.model.path, config.bases = "hub-of/Tiny", {"judge": {"model": {"path": "hub-of/Large"}}}
    assert to_fetch(resolve(config)) == ["base", "judge"]
    save_run(config, tmp_path)
    note = {"path": "hub-of/Large", "revision": "a" * 40, "folder": str(tmp_path)}
    (tmp_path / "models.json").write_text(json.dumps({"judge": note, "gone": note}))
    run = read_run(tmp_path)
    assert [run.bases[name].model.path for name in ("base", "judge")] == ["hub-of/Tiny", str(tmp_path)]
    assert run.config.model.path == "hub-of/Tiny" and to_fetch(run) == ["base"]
