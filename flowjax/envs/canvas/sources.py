"""Where the canvas world's tasks come from: exercises that are generated when asked for, or files of problems."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.canvas.values import Problem
from flowjax.envs.base import Split, WorldError
from flowjax.envs.canvas import exercises, published_data
from flowjax.envs.canvas.options import read_options
from flowjax.envs.options import check_split
from flowjax.grading.code import Suite
from flowjax.grading.code_asserts import from_assert
from flowjax.records import Task

if TYPE_CHECKING:
    import grain

TASKS = 1 << 31  # length of a source of generated exercises; slice it


class _GeneratedSource:
    """The index-th exercise of a split, generated when asked for."""

    def __init__(self, split: Split, data_seed: int, kinds: Sequence[str]):
        self._split: Split = split
        self._data_seed, self._kinds = data_seed, tuple(kinds)

    def __call__(self, index: int) -> Task:
        rng = np.random.default_rng([self._data_seed, index])
        made = exercises.generate(rng, self._kinds, self._split)
        return Task(f"canvas-{self._split}-{self._data_seed}-{index}", "canvas", index, exercises.payload(made))


class _FileSource:
    """Problems of a file, by place in an order that the data seed draws."""

    def __init__(self, file: str, rows: Sequence[int], data_seed: int):
        self._file = file
        self._rows = [rows[place] for place in np.random.default_rng(data_seed).permutation(len(rows))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:
        row = self._rows[index]
        return Task(f"canvas-{Path(self._file).stem}-{row}", "canvas", row, {"file": self._file, "row": row})


def tasks(split: Split, data_seed: int, **options: Any) -> "grain.MapDataset[Task]":
    """Generated exercises without end, or the problems of a file. Train and held-out problems differ by content."""
    import grain  # imports jax, which processes that only hold environments do without

    check_split(split)
    read = read_options(options)
    if not read.path:
        return grain.MapDataset.range(TASKS).map(_GeneratedSource(split, data_seed, read.kinds))
    file, rows = _split_rows(Path(read.path), split)
    return grain.MapDataset.source(_FileSource(str(file), rows, data_seed))


def _split_rows(path: Path, split: Split) -> tuple[Path, list[int]]:
    """The file that a split is in, and its rows: of a single file by content, of a folder those of its own file."""
    if path.is_dir():
        test = path / "test.jsonl"
        file = path / "train.jsonl" if split == "train" else test
        held_out = {record.problem.text for record in _records(str(test))} if split == "train" else set()
        rows = [row for row, record in enumerate(_records(str(file))) if record.problem.text not in held_out]
    else:
        file = path
        records = enumerate(_records(str(file)))
        rows = [row for row, record in records if exercises.split_of(record.problem.text) == split]
    if not rows:
        raise WorldError(f"env.options path={str(path)!r} holds no {split} problems: give another file")
    return file, rows


def load(payload: Mapping[str, Any]) -> tuple[Problem, tuple[str, ...] | Suite]:
    """The problem of a task, and its gold answers or hidden tests."""
    if "row" in payload:
        record = _records(payload["file"])[payload["row"]]
        return record.problem, record.tests or record.gold
    problem = exercises.problem(payload)
    if problem.kind == "code":
        cases = [case for test in payload["hidden_tests"] for case in from_assert(test, problem.entry_point)]
        return problem, Suite(tuple(cases), problem.entry_point)
    return problem, tuple(payload["answers"])


@functools.lru_cache(maxsize=4)
def _records(file: str) -> tuple[published_data.Record, ...]:
    return published_data.load(file).records
