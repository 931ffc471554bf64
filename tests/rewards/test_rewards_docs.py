"""docs/rewards.md names every component, its outcomes and its options."""

import inspect
from pathlib import Path
from pkgutil import resolve_name

from flowjax.rewards.scores import COMPONENTS

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"


def test_every_component_is_in_the_table():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    table = {line.split("`")[1]: line for line in lines}
    assert set(table) == set(COMPONENTS)
    for name in COMPONENTS:
        for outcome, parameter in inspect.signature(resolve_name(COMPONENTS[name])).parameters.items():
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                assert outcome in table[name].split("|")[3], (name, outcome)
            elif not outcome.endswith("_weight"):
                assert outcome in table[name].split("|")[4] or outcome == "base", (name, outcome)
