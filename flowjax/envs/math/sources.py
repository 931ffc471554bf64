"""Where the math world's tasks come from: arithmetic that is generated when asked for, or files of problems."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.envs.base import Split
from flowjax.envs.math.generated import Arithmetic, generate
from flowjax.envs.math.options import read_options
from flowjax.envs.math.problems import Problem, load
from flowjax.envs.options import check_split
from flowjax.records import Task

if TYPE_CHECKING:
    import grain

TASKS = 1 << 31  # length of a source of generated problems; slice it


class _GeneratedSource:
    """The index-th problem of a split, generated when asked for."""

    def __init__(self, split: Split, data_seed: int, arithmetic: Arithmetic):
        self._split: Split = split
        self._data_seed, self._arithmetic = data_seed, arithmetic

    def __call__(self, index: int) -> Task:
        problem = generate(np.random.default_rng([self._data_seed, index]), self._arithmetic, self._split)
        return _task(problem, f"math-{self._split}-{self._data_seed}-{index}", index)


class _FileSource:
    """The index-th problem of a file's split, which is shuffled by the data seed."""

    def __init__(self, split: Split, data_seed: int, problems: Sequence[Problem]):
        self._split, self._problems = split, problems
        self._order = np.random.default_rng(data_seed).permutation(len(problems))

    def __call__(self, index: int) -> Task:
        row = int(self._order[index])
        return _task(self._problems[row], f"math-{self._split}-row-{row}", row)


def _task(problem: Problem, task_id: str, seed: int) -> Task:
    payload = {"question": problem.question, "answer": problem.answer, "expression": problem.expression}
    return Task(task_id, "math", seed, payload)


def tasks(split: Split, data_seed: int, **options: Any) -> "grain.MapDataset[Task]":
    """Generated problems without end, or those of a file. Train and held-out problems differ by content."""
    import grain  # imports jax, which processes that only hold environments do without

    check_split(split)
    chosen = read_options(options)
    if not chosen.path:
        return grain.MapDataset.range(TASKS).map(_GeneratedSource(split, data_seed, chosen))
    problems = load(chosen.path, split)
    return grain.MapDataset.range(len(problems)).map(_FileSource(split, data_seed, problems))
