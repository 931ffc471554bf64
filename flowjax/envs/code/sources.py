"""Where the code world's tasks come from: functions generated when asked for, or files of problems."""

from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.envs.base import Split, WorldError
from flowjax.envs.code.generated import draw
from flowjax.envs.code.options import Options, read_options
from flowjax.envs.code.problems import ProblemFile, open_problems, problem_of
from flowjax.envs.options import check_split
from flowjax.records import Task

if TYPE_CHECKING:
    import grain

TASKS = 1 << 31  # length of the generated task source; slice it
HELD_OUT_ONE_IN = 8  # problems of a file, by content


class _GeneratedSource:
    """The index-th problem of a split, generated when asked for."""

    def __init__(self, split: Split, data_seed: int, options: Options):
        self._split: Split = split
        self._data_seed, self._options = data_seed, options

    def __call__(self, index: int) -> Task:
        rng = np.random.default_rng([self._data_seed, index])
        recipe = draw(rng, self._options.kinds, self._options.steps, self._split)
        payload = {"kind": recipe.kind, "steps": [list(step) for step in recipe.steps]}
        return Task(f"code-{self._split}-{self._data_seed}-{index}", "code", index, payload)


class _FileSource:
    """A problem of a file as a task: its place there."""

    def __init__(self, split: Split, file: str):
        self._split, self._file = split, file

    def __call__(self, offset: int) -> Task:
        return Task(f"code-{self._file}-{offset}", "code", offset, {"file": self._file, "offset": offset})


def tasks(split: Split, data_seed: int, **options: Any) -> "grain.MapDataset[Task]":
    """Generated problems without end, or those of a file in an order that the seed fixes.

    Generated functions are split by what they compute, a file's problems by their text. With `held_out_path`, that
    whole file is held out, and what it shares with `path` is left out of training.
    """
    import grain  # imports jax, which processes that only hold environments do without

    check_split(split)
    read = read_options(options)
    if not read.path:
        return grain.MapDataset.range(TASKS).map(_GeneratedSource(split, data_seed, read))
    file = "held_out_path" if split == "held_out" and read.held_out_path else "path"
    offsets = _offsets(split, read)
    if not offsets:
        raise WorldError(f"env.options path={read.path!r} holds no {split} problems: give more, or held_out_path")
    return grain.MapDataset.source(offsets).shuffle(data_seed).map(_FileSource(split, file))


def _offsets(split: Split, options: Options) -> list[int]:
    if options.held_out_path:
        held_out = open_problems(options.held_out_path)
        if split == "held_out":
            return list(held_out.offsets)
        taken = {_content(held_out, offset) for offset in held_out.offsets}
        file = open_problems(options.path)
        return [offset for offset in file.offsets if _content(file, offset) not in taken]
    file = open_problems(options.path)
    wanted = split == "held_out"
    return [offset for offset in file.offsets if (_content(file, offset) % HELD_OUT_ONE_IN == 0) == wanted]


def _content(file: ProblemFile, offset: int) -> int:
    return problem_of(file.fields(offset)).content
