"""Prompts are equal byte for byte to those that models were taught on.

A change that is meant: `python -m tests.envs.golden_prompts`, and base models made anew.
"""

import json

import pytest

from tests.envs.golden_prompts import CASES, FILE, golden


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_what_they_were(name: str):
    known = json.loads(FILE.read_text(encoding="utf-8"))[name]
    found = golden(name)
    assert found["texts"] == known["texts"]
    assert found["digests"] == known["digests"]
