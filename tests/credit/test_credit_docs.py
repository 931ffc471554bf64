"""The worked examples of docs/credit are what the code computes, and every estimator has a page."""

import ast
import inspect
import re
from pathlib import Path as File

import numpy as np
import pytest
from credit_tables import Path, paths_table

from flowjax.credit.estimators import ESTIMATORS, estimate, get_estimator

DOCS = File(__file__).parents[2] / "docs" / "credit"
COLUMNS = ["group", "episode", "turn", "state", "next", "reward", "score", "ends", "advantage"]


def worked_examples(text: str):
    """Each example of a page: its options and its rows."""
    for section in text.split("## Worked example")[1:]:
        section = section.partition("\n## ")[0]
        options = re.search(r"Options: `(.*?)`", section)
        assert options, "an example names its options"
        call = ast.parse(f"f({'' if options[1] == 'none' else options[1]})", mode="eval").body
        assert isinstance(call, ast.Call)
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
        assert rows[0] == COLUMNS
        yield (
            {str(k.arg): ast.literal_eval(k.value) for k in call.keywords},
            [dict(zip(COLUMNS, row, strict=True)) for row in rows[2:]],
        )


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_page(name):
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert f'config.credit.name = "{name}"' in text
    examples = list(worked_examples(text))
    assert examples
    for options, rows in examples:
        episodes: dict[str, list[dict[str, str]]] = {}
        for row in rows:
            episodes.setdefault(row["episode"], []).append(row)
        paths = [
            Path(
                [int(turn["state"]) for turn in turns] + [int(turns[-1]["next"])],
                [float(turn["reward"]) for turn in turns],
                turns[-1]["ends"] == "yes",
                int(turns[0]["group"]),
                score=float(turns[0]["score"]),
            )
            for turns in episodes.values()
        ]
        got = np.asarray(estimate(paths_table(paths), name, **options))[: len(rows)]
        np.testing.assert_allclose([float(row["advantage"]) for row in rows], got, atol=6e-5)


def test_options_of_rewardflow_are_listed_with_their_defaults_first():
    text = (DOCS / "rewardflow.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", text, flags=re.MULTILINE))
    for name, parameter in inspect.signature(get_estimator("rewardflow")).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            (cell,) = (values for names, values in listed.items() if f"`{name}`" in names)
            assert cell.split(",")[0].split(";")[0].strip("` ") == str(parameter.default), name


def test_index_names_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
    for page in DOCS.glob("*.md"):
        for link in re.findall(r"\]\(((?!http)[^)#]+)", page.read_text(encoding="utf-8")):
            assert (DOCS / link).exists(), f"{page.name} links to {link}"
