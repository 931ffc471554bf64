"""The doctor: what it says of isolation, operators and backends."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from flowjax.canvas import doctor
from flowjax.canvas.backends import BackendError, BackendUnavailable, Completion, Request
from flowjax.canvas.backends.config import read_options
from flowjax.canvas.values import Usage
from flowjax.grading import sandbox
from flowjax.grading.sandbox import RLIMITS_ONLY, Isolation, IsolationError


class Ready:
    """Answers every request."""

    identity = "ready"

    async def complete(self, request: Request) -> Completion:
        assert doctor.PROBE in request.messages[0]["content"]
        return Completion("Ready.\n", Usage(1, 5, 1))


class Away:
    """Answers none."""

    identity = "away"

    async def complete(self, request: Request) -> Completion:
        raise BackendUnavailable("connection refused")


class Choosy:
    """Knows other requests."""

    identity = "choosy"

    async def complete(self, request: Request) -> Completion:
        raise BackendError("no exercise")


class Asleep:
    """Takes for ever."""

    identity = "asleep"

    async def complete(self, request: Request) -> Completion:
        await asyncio.sleep(60)
        raise AssertionError("never reached")


class Wordy(Ready):
    async def complete(self, request: Request) -> Any:
        return "ready"  # and no Completion


@pytest.fixture
def no_isolation(monkeypatch: pytest.MonkeyPatch):
    """A machine without bubblewrap."""
    weak = Isolation(RLIMITS_ONLY, sandbox.isolation().interpreter, False, "bubblewrap is not installed")
    monkeypatch.setattr(sandbox, "isolation", lambda: weak)


def test_each_backend_is_asked():
    """Published: a backend that is missing from the config becomes another one at another address, without a word."""
    backends = {"small": Ready(), "large": Away(), "slow": Asleep(), "wordy": Wordy(), "choosy": Choosy()}
    found = {finding.subject: finding for finding in asyncio.run(doctor.examine(backends, timeout_s=2.0))}
    assert found["isolation"].works and found["isolation"].text.startswith("bubblewrap")
    assert found["operators"].works and found["operators"].text.startswith("14: Plan, Decompose")
    assert found["backend small"].works and "'Ready.'" in found["backend small"].text
    assert not found["backend large"].works and "connection refused" in found["backend large"].text
    assert found["backend choosy"].works and "no operator's: no exercise" in found["backend choosy"].text
    assert not found["backend slow"].works and "within 2 s" in found["backend slow"].text
    assert not found["backend wordy"].works and "Wordy.complete: the reply is 'ready'" in found["backend wordy"].text


def test_programs_are_refused_without_isolation(no_isolation: None, caplog: pytest.LogCaptureFixture):
    """Published: programs run on the host, with a time limit at most."""
    with pytest.raises(IsolationError, match="install bubblewrap"):
        doctor.require_safe_programs()
    assert doctor.require_safe_programs(allow_no_isolation=True).name == RLIMITS_ONLY
    assert "resource limits only" in caplog.text
    finding = asyncio.run(doctor.examine({}))[0]
    assert not finding.works and "install bubblewrap" in finding.text


def run_doctor(*arguments: str) -> int:
    return doctor.main(arguments)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "backends.json"
    path.write_text(json.dumps({"backends": {"fake": {"kind": "offline", "rules": [{"answer": "ready"}]}}}))
    assert run_doctor(f"--config={path}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1].strip(":") for line in lines] == ["isolation", "operators", "backend"]
    assert all(line.startswith("ok") for line in lines)
    path.write_text(json.dumps({"operators": ["Plan"], "extra_operators": ["flowjax.canvas.operators.built_in:Plan"]}))
    assert run_doctor(f"--config={path}") == 0  # "operators" are names, of those on offer
    capsys.readouterr()
    assert run_doctor("--operators", "no.module:Own") == 1
    assert "FAILS operators: " in capsys.readouterr().out


@pytest.mark.parametrize("outer", [{}, {"default_backend": "small", "allow_no_isolation": True}])
def test_backends_are_asked_in_both_forms_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], outer: dict):
    small = {"kind": "offline", "rules": [{"answer": "ready"}]}
    backends = {"small": small, "large": {"kind": "tests.canvas.test_doctor:Away"}}
    path = tmp_path / "backends.json"
    path.write_text(json.dumps({**outer, "backends": backends} if outer else backends))
    assert run_doctor(f"--config={path}") == 1
    said = [line.split(":")[0].split() for line in capsys.readouterr().out.splitlines()]
    assert said[-2:] == [["ok", "backend", "small"], ["FAILS", "backend", "large"]]


def test_recipes_are_read(tmp_path: Path):
    path = tmp_path / "recipe.py"
    path.write_text(
        "from ml_collections import ConfigDict\n\n\ndef get_config(arg='nano'):\n"
        "    return ConfigDict({'env': {'options': {'backends': {arg: {'kind': 'offline'}}}}})\n"
    )
    assert read_options(f"{path}:large") == {"backends": {"large": {"kind": "offline"}}}
    assert read_options(str(path)) == {"backends": {"nano": {"kind": "offline"}}}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"backends": {"a": {"kind": "nonsense"}}}', '{"a": "http://a/v1"}', '{"backends": {"a": 1}}']
)
def test_configs_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str):
    path = tmp_path / "backends.json"
    path.write_text(text)
    assert run_doctor(f"--config={path}") == 1
    assert "give" in capsys.readouterr().err
    assert run_doctor(f"--config={tmp_path / 'none.py'}") == 1
