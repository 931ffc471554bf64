"""Every recipe, with the fields, that a page or a docstring tells one to launch can be launched so."""

import re
import shlex
from pathlib import Path

import pytest

from flowjax.launch.__main__ import read_request

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
