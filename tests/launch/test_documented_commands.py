"""Every recipe, with the fields, that a page or a docstring tells one to launch can be launched so."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flowjax.launch.__main__ import read_request
from flowjax.sweep import read_sweep

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "configs").glob("*.py"))]
COMMAND = re.compile(r"--config=(configs/\w+\.py:\w+)((?:[ \\\n]+--config\.[\w.]+=(?:\"[^\"]*\"|[^\s`\"]+))*)")


def documented() -> list[tuple[str, ...]]:
    found = {
        (recipe, *shlex.split(fields.replace("\\", " ")))
        for page in PAGES
        for recipe, fields in COMMAND.findall(page.read_text())
    }
    return sorted(found)


@pytest.mark.parametrize("command", documented(), ids=" ".join)
def test_its_fields_are_there(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    recipe, *fields = command
    request = read_request([f"--config={recipe}", *fields, "--dry_run"])
    assert request.run.config.env.name


def test_some_are_documented():
    assert len(documented()) > 20


def commands() -> list[str]:
    """Every module that `python -m` runs: roles and what they start in processes of their own, too."""
    package, found = ROOT / "flowjax", []
    for path in sorted(package.rglob("*.py")):
        runs = any(
            "__name__" in ast.unparse(node.test)
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.If)
        )
        if runs and path.name != "sandbox_runner.py":  # whose text is sent into a sandbox: nobody starts it as a module
            found.append(".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__main__"))
    return found


def test_commands_are_found():
    assert {"flowjax.launch", "flowjax.evaluate", "flowjax.trainer", "flowjax.canvas.run", "flowjax.config"} <= set(
        commands()
    )


@pytest.mark.parametrize("command", commands())
def test_every_command_has_help(command: str):
    """What `--help` prints is where one begins: it names the command, and its status is that of no error."""
    argv = [sys.executable, "-m", command, "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    started_as_a_file = {"flowjax.launch.guard": "guard.py", "flowjax.launch.together": "together.py"}
    assert started_as_a_file.get(command, command) in done.stdout
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_documented_sweep_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "evaluation.md").read_text().partition("## Sweeps")[2]
    (tmp_path / "sweep.py").write_text(page.split("```python\n")[1].split("```")[0] + f"RUNS = {str(tmp_path)!r}\n")
    sweep = read_sweep(tmp_path / "sweep.py")
    assert len(sweep.runs) == 9 and [sweep.runs[at].config.credit.name for at in (0, 3, 6)] == [*sweep.variants]
