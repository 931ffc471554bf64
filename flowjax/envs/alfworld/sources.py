"""Where tasks come from: games that are generated when asked for, or a folder of game files."""

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.envs.alfworld.generate import Spec, choices, game_file, trajectory_file
from flowjax.envs.alfworld.options import GET_DATA, Options
from flowjax.envs.alfworld.plans import floor_plan, scenes
from flowjax.envs.base import Split, WorldError
from flowjax.envs.options import check_split
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

WORLD = "alfworld"
TASKS = 1 << 31  # length of the source of generated tasks; slice it
HELD_OUT_ONE_IN = 8  # tasks in the training rooms, by content
GAME, TRAJECTORY = "game.tw-pddl", "traj_data.json"
UNUSABLE = ("movable", "Sliced")  # in the name of a folder: tasks that the text world leaves out


def task_source(split: Split, data_seed: int, options: Options) -> "grain.MapDataset[Task]":
    """The tasks of a split.

    Raises:
        WorldError: there are none, or no such split.
    """
    import grain  # imports jax, which processes that only hold environments do without

    check_split(split)
    root = options.root()
    if root is not None:
        return grain.MapDataset.source(data_tasks(root, split, data_seed, options))
    generated = GeneratedTasks(split, data_seed, options)
    generated.check()
    return grain.MapDataset.range(TASKS).map(generated)


class GeneratedTasks:
    """The index-th task of a split: its kind in turn, then the room, what is asked for, and what lies where.

    Training and held-out tasks never ask for the same in the same room, wherever things lie: the unseen rooms are
    ALFRED's, and in the seen ones each (room, kind of task, object, target) belongs to one split for good.
    """

    def __init__(self, split: Split, data_seed: int, options: Options):
        self._split: Split = split
        self._data_seed, self._options = data_seed, options

    def __call__(self, index: int) -> Task:
        kinds = self._options.task_types
        kind = kinds[index % len(kinds)]
        rng = np.random.default_rng([self._data_seed, self._split == "held_out", index])
        rooms = _rooms(self._split, self._options.held_out, self._options.scenes, kind)
        scene, pairs = rooms[rng.integers(len(rooms))]
        asked, target = pairs[rng.integers(len(pairs))]
        spec = Spec(scene, kind, asked, target, int(rng.integers(1 << 31)), self._options.clutter)
        name = f"{self._options.held_out}-{self._split}-{self._data_seed}-{index}"
        return Task(f"{WORLD}-{name}-{spec.folder}", WORLD, index, spec.payload())

    def check(self) -> None:
        """Refuse options that leave a kind of task without a room."""
        for scene in self._options.scenes or ():
            floor_plan(scene)
        for kind in self._options.task_types:
            if not _rooms(self._split, self._options.held_out, self._options.scenes, kind):
                rooms = "any room" if self._options.scenes is None else f"scenes {self._options.scenes}"
                raise WorldError(
                    f"env.options: {rooms} with held_out={self._options.held_out!r} allows no {self._split} task of "
                    f"task_types {kind}: add scenes (unseen ones are 1-6, 201-206, 301-306, 401-406), take "
                    "held_out='seen', or leave that kind out"
                )


@functools.cache
def _rooms(
    split: Split, held_out: str, only: tuple[int, ...] | None, kind: str
) -> tuple[tuple[int, tuple[tuple[str, str], ...]], ...]:
    """Each scene of a split with what a task of this kind may ask for there."""
    unseen = split == "held_out" and held_out == "unseen"
    rooms = []
    for scene in scenes("held_out" if unseen else "train"):
        if only is not None and scene not in only:
            continue
        pairs = choices(scene, kind)
        if not unseen:
            pairs = tuple(pair for pair in pairs if _is_held_out(scene, kind, *pair) == (split == "held_out"))
        if pairs:
            rooms.append((scene, pairs))
    return tuple(rooms)


def _is_held_out(scene: int, kind: str, asked: str, target: str) -> bool:
    return state_key(WORLD, scene, kind, asked, target) % HELD_OUT_ONE_IN == 0


def data_tasks(root: Path, split: Split, data_seed: int, options: Options) -> list[Task]:
    """The games of a folder that are known to be solvable, in an order that the data seed fixes.

    Raises:
        WorldError: there are none; the message says what was found.
    """
    folder = root / options.folder_of(split)
    found = sorted(path.parent for path in folder.rglob(TRAJECTORY))
    games, without_game, unsolvable = [], 0, 0
    for game in found:
        name = game.relative_to(root).as_posix()
        if any(word in name for word in UNUSABLE):
            continue
        if json.loads((game / TRAJECTORY).read_text())["task_type"] not in options.task_types:
            continue
        if not (game / GAME).is_file():
            without_game += 1
        elif not json.loads((game / GAME).read_text()).get("solvable"):
            unsolvable += 1
        else:
            games.append(name)
    if not games:
        raise WorldError(
            f"{folder} holds no game to play: {len(found)} folders with traj_data.json, {without_game} of them without "
            f"game.tw-pddl, {unsolvable} not marked solvable, the others of no kind in task_types: {GET_DATA}"
        )
    order = np.random.default_rng(data_seed).permutation(len(games)).tolist()
    return [Task(f"{WORLD}-{games[index]}", WORLD, place, {"game": games[index]}) for place, index in enumerate(order)]


def contents(task: Task, root: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The game file and the trajectory file of a task.

    Raises:
        WorldError: the task is of data that this environment was not told of, or that is gone.
    """
    if "game" not in task.payload:
        spec = Spec.read(task.payload)
        return game_file(spec), trajectory_file(spec, task.task_id)
    if root is None:
        raise WorldError(f"task {task.task_id} is a game file, but neither env.options path nor ALFWORLD_DATA is set")
    folder = root / task.payload["game"]
    try:
        return json.loads((folder / GAME).read_text()), json.loads((folder / TRAJECTORY).read_text())
    except OSError as error:
        raise WorldError(f"the game of task {task.task_id} cannot be read ({error}): {GET_DATA}") from error
