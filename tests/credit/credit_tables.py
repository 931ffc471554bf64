"""Small tables for the tests of this room."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowjax.credit.table import TurnTable, table_from_columns


@dataclass(frozen=True)
class Path:
    """One trajectory: the states it went through (one more than turns) and what each turn earned."""

    states: Sequence[int]
    rewards: Sequence[float]
    terminal: bool = True
    group: int = 0
    score: float | None = None  # sum of the rewards by default
    valid: Sequence[bool] | None = None
    mask: bool = True
    episode: int | None = None  # that it is a part of; one of its own by default
    lookup: Sequence[int] | None = None  # states under which turns look themselves up, when not those of the graph


def paths_table(paths: Sequence[Path], *, pad_to: int | None = None) -> TurnTable:
    """The table of these paths, states of different groups kept apart."""
    lengths = [len(path.rewards) for path in paths]
    before = [(p.group, s) for p in paths for s in (p.lookup or p.states[:-1])]
    after = [(p.group, s) for p in paths for s in p.states[1:]]
    episodes = [len(paths) + i if path.episode is None else path.episode for i, path in enumerate(paths)]
    ids = {key: index for index, key in enumerate(sorted(set(before + after)))}
    columns = {
        "group": np.unique(np.repeat([path.group for path in paths], lengths), return_inverse=True)[1],
        "episode": np.repeat(np.unique(episodes, return_inverse=True)[1], lengths),
        "trajectory": np.repeat(np.arange(len(paths)), lengths),
        "step": np.concatenate([np.arange(length) for length in lengths]),
        "state": np.array([ids[key] for key in before]),
        "next_state": np.array([ids[key] for key in after]),
        "reward": np.concatenate([np.asarray(path.rewards, float) for path in paths]),
        "score": np.repeat([sum(p.rewards) if p.score is None else p.score for p in paths], lengths),
        "valid": np.concatenate([p.valid if p.valid is not None else np.ones(len(p.rewards), bool) for p in paths]),
        "terminal": np.concatenate(
            [np.arange(n) == n - 1 if p.terminal else np.zeros(n, bool) for p, n in zip(paths, lengths, strict=True)]
        ),
        "mask": np.repeat([path.mask for path in paths], lengths),
    }
    return table_from_columns(columns, pad_to=pad_to)
