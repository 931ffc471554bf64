"""Prompts, observations and readings are those that were kept, byte for byte (`tests/canvas/golden.py`)."""

import json

import pytest
from golden import FOLDER, collect

NOW = collect()


@pytest.mark.parametrize("name", sorted(NOW))
def test_nothing_that_anyone_reads_has_changed(name: str):
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    assert json.loads(json.dumps(NOW[name])) == kept
