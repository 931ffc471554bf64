"""docs/losses.md names everything there is, and its picture is the one that the losses draw."""

import runpy
import typing
from pathlib import Path

from flowjax.losses.policy import Aggregation, Correction, Kind

DOCS = Path(__file__).parents[2] / "docs"


def test_every_name_is_in_the_page():
    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    for names in (Kind, Correction, Aggregation):
        for name in typing.get_args(names):
            assert name == "none" or f"`{name}`" in text, name


def test_picture_is_up_to_date():
    drawn = runpy.run_path(str(DOCS / "draw_losses.py"))["drawing"]()
    assert drawn == (DOCS / "images" / "clip_regions.svg").read_text(encoding="utf-8"), "run python docs/draw_losses.py"
