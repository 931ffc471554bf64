"""`run.json`: what made a run, and that nothing about writing it can stop one."""

import json
import subprocess
from pathlib import Path

import pytest

import flowjax
from flowjax.config import default_config, save_run
from flowjax.monitor import provenance
from flowjax.monitor.provenance import changed_code, read_starts, recorded_start


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Path:
    """A git checkout of its own that flowjax seems to run from."""
    folder = tmp_path / "checkout" / "flowjax"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.setattr(flowjax, "__file__", str(folder / "__init__.py"))
    return folder


def git(folder: Path, *arguments: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(
        ["git", "-C", str(folder), *named, *arguments], check=True, capture_output=True, text=True
    ).stdout


def test_a_start_has_its_command_code_packages_machine_and_times(tmp_path: Path, checkout: Path):
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    with recorded_start([tmp_path], ["python", "-m", "flowjax.launch"]) as entry:
        (running,) = read_starts(tmp_path)
        assert "ended_s" not in running  # so that a run that was killed is told from one that ended
        entry["exit_status"] = 0
    (start,) = read_starts(tmp_path)
    assert start["command"] == ["python", "-m", "flowjax.launch"]
    assert start["code"]["commit"] == git(checkout, "rev-parse", "HEAD").strip()
    assert start["code"]["dirty"] is False
    assert {"python", "jax", "flax", "numpy"} <= start["versions"].keys()
    assert start["machine"]["cpus"] >= 1
    assert start["machine"]["memory_bytes"] > 1e8
    assert start["started_s"] <= start["ended_s"]
    assert start["exit_status"] == 0


def test_ones_own_code_that_has_changed_since_the_last_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run went on with another reward than it was begun with, and nothing said so."""
    (tmp_path / "own_rewards.py").write_text("def late(): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = default_config()
    config.reward.components = {"late": {"path": "own_rewards:late"}, "success": 1.0}
    save_run(config, tmp_path)
    assert changed_code(tmp_path) == [], "it has no start yet"
    for text in ("def late(): return 1.0\n", "def late(): return 2.0\n"):
        (tmp_path / "own_rewards.py").write_text(text)
        with recorded_start([tmp_path], []):
            assert changed_code(tmp_path) == []
    first, second = [start["code"]["named"] for start in read_starts(tmp_path)]
    assert first.keys() == second.keys() == {str(tmp_path / "own_rewards.py")} and first != second
    (tmp_path / "own_rewards.py").write_text("def late(): return 1.0\n")
    assert changed_code(tmp_path) == [str(tmp_path / "own_rewards.py")]


def test_a_changed_file_is_named(tmp_path: Path, checkout: Path):
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    (checkout / "__init__.py").write_text("changed = True\n")
    with recorded_start([tmp_path], []):
        pass
    (start,) = read_starts(tmp_path)
    assert start["code"]["dirty"] is True
    assert start["code"]["changed_files"] == ["__init__.py"]


def test_without_a_checkout_it_says_so(tmp_path: Path, checkout: Path):
    with recorded_start([tmp_path], []):
        pass
    (start,) = read_starts(tmp_path)
    assert start["code"]["commit"] == ""
    assert "no git checkout" in start["code"]["problem"]


def test_a_driver_that_hangs_or_a_missing_git_stops_nothing(tmp_path: Path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(provenance, "_LONGEST_WAIT_S", 0.3)
    with recorded_start([tmp_path], []):
        pass
    (start,) = read_starts(tmp_path)
    assert start["machine"]["gpus"] == ["nvidia-smi does not answer"]
    assert start["code"]["problem"]


def test_a_resumed_run_adds_a_start_and_a_broken_file_is_begun_anew(tmp_path: Path):
    (tmp_path / "run.json").write_text("{")
    for number in range(2):
        with pytest.raises(RuntimeError), recorded_start([tmp_path], [str(number)]):
            raise RuntimeError
    assert [start["command"] for start in read_starts(tmp_path)] == [["0"], ["1"]]
    assert all("ended_s" in start for start in read_starts(tmp_path))


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path):
    with recorded_start([tmp_path / "missing"], ["a"]):
        pass
    assert json.dumps(read_starts(tmp_path / "missing")) == "[]"
