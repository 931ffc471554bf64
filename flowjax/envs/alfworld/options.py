"""Options of the ALFWorld world, and where its games come from."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowjax.envs.alfworld.generate import TASK_TYPES
from flowjax.envs.alfworld.packages import DATA_VARIABLE
from flowjax.envs.base import NotReady, Split, WorldError
from flowjax.envs.options import build_options

GENERATED = "generated"
FOLDER = "json_2.1.1"
HELD_OUT = ("unseen", "seen")
GET_DATA = (
    "fetch the real games with `alfworld-download`, or make some with "
    "`python -m data.alfworld.build --out=<folder>`, and name the folder that holds json_2.1.1"
)


@dataclass(frozen=True, slots=True)
class Options:
    """What `make` and `tasks` take.

    path         folder with json_2.1.1 in it; "generated" for games of our own; None: what ALFWORLD_DATA names, if
                 it is set, else generated ones
    held_out     "unseen": held-out games play in rooms that no training game has; "seen": in the same rooms
    task_types   kinds of tasks, drawn in turn (generated) or kept (data)
    scenes       floor plans to generate on; None: all
    clutter      share of a room's classes of objects that lie about in generated games
    games_kept   loaded games that a process keeps, some 2 to 5 MB each
    cache        folder where processes leave each other the planner's translations, some 1 MB a game; None: nowhere
    """

    path: str | None = None
    held_out: str = "unseen"
    task_types: tuple[str, ...] = TASK_TYPES
    scenes: tuple[int, ...] | None = None
    clutter: float = 0.5
    games_kept: int = 64
    cache: str | None = None

    def __post_init__(self):
        if self.held_out not in HELD_OUT:
            raise WorldError(f"env.options held_out={self.held_out!r}: give unseen or seen")
        strange = [name for name in self.task_types if name not in TASK_TYPES]
        if strange or not self.task_types:
            raise WorldError(f"env.options task_types={strange or ()}: give some of {', '.join(TASK_TYPES)}")
        if not 0 <= self.clutter <= 1:
            raise WorldError(f"env.options clutter={self.clutter}: give a share from 0 to 1")
        if self.games_kept < 1:
            raise WorldError(f"env.options games_kept={self.games_kept}: give 1 or more")

    def root(self) -> Path | None:
        """The folder whose train, valid_seen and valid_unseen hold the games; None where they are generated.

        Raises:
            NotReady: it is named but does not hold them.
        """
        named = os.environ.get(DATA_VARIABLE) if self.path is None else self.path
        if not named or named == GENERATED:
            return None
        source = f"{DATA_VARIABLE}" if self.path is None else "env.options path"
        folder = Path(named).expanduser()
        for root in (folder / FOLDER, folder):
            if any((root / split).is_dir() for split in ("train", "valid_seen", "valid_unseen")):
                return root
        raise NotReady(
            f"{source} is {named}, which holds no {FOLDER} with train, valid_seen and valid_unseen: {GET_DATA}"
        )

    def folder_of(self, split: Split) -> str:
        """The folder of a split in the real layout."""
        return "train" if split == "train" else f"valid_{self.held_out}"


def read_options(options: Mapping[str, Any]) -> Options:
    """Options of keyword arguments; see `build_options`."""
    lists = {name: tuple(options[name]) for name in ("task_types", "scenes") if isinstance(options.get(name), list)}
    return build_options(Options, {**options, **lists}, "ALFWorld")
