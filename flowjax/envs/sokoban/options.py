"""Options of Sokoban: keyword arguments of `make` and `tasks`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowjax.envs.options import build_options
from flowjax.envs.sokoban.levels import Shape


@dataclass(frozen=True, slots=True)
class Options(Shape):
    """Those of the levels, where columns are as many as rows unless given, and how the room is drawn."""

    tile_pixels: int = 0  # side of a cell in the environment's `picture`; 0: it draws none


def read_options(options: Mapping[str, Any]) -> Options:
    """Options of keyword arguments; see `build_options`."""
    given = dict(options)
    if given.get("columns") is None:
        given["columns"] = given.get("rows", Options().rows)
    return build_options(Options, given, "Sokoban")
