"""Sokoban's environment, tasks and expert."""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from flowjax.envs.base import Observation, Split, Step
from flowjax.envs.options import check_split
from flowjax.envs.sokoban.levels import Shape, generate
from flowjax.envs.sokoban.options import Options, read_options
from flowjax.envs.sokoban.pictures import picture, tiles
from flowjax.envs.sokoban.rooms import DIRECTIONS, Position, Room, View, grid, key, move, parse, solved
from flowjax.envs.sokoban.solver import best_direction
from flowjax.records import Task

if TYPE_CHECKING:
    import grain

OUTCOMES = ("success", "boxes_on_target")
STEP_REWARD, BOX_REWARD, FINISH_REWARD = -0.1, 1.0, 10.0
TASKS = 1 << 31  # length of a task source; slice it


class Sokoban:
    """One level at a time. A task carries its level in `payload["level"]`, or else its seed generates one."""

    def __init__(self, options: Options):
        if options.tile_pixels:
            tiles(options.tile_pixels)  # refuses a size that cannot be drawn
        self._options = options
        self._room: Room | None = None
        self._position = Position(0, 0)

    @property
    def room(self) -> Room:
        if self._room is None:
            raise RuntimeError("the environment has not been reset")
        return self._room

    @property
    def position(self) -> Position:
        return self._position

    @property
    def picture(self) -> UInt8[np.ndarray, "height width 3"] | None:
        """The room as it is now in RGB, None without the option `tile_pixels`."""
        tile_pixels = self._options.tile_pixels
        return picture(self.room, self._position, tile_pixels) if tile_pixels else None

    def reset(self, task: Task, seed: int) -> Observation:
        level = task.payload.get("level")
        self._room, self._position = (
            parse(level) if level else generate(np.random.default_rng(task.seed), self._options)
        )
        return self._observe()

    def step(self, action: str) -> Step:
        room, before = self.room, self._position
        if solved(room, before):
            return Step(self._observe(), 0.0, True, False, self._outcome())
        if action not in DIRECTIONS:
            return Step(self._observe(), STEP_REWARD, False, False, self._outcome())
        after = self._position = move(room, before, DIRECTIONS.index(action))
        gained = (after.boxes & room.targets).bit_count() - (before.boxes & room.targets).bit_count()
        finished = solved(room, after)
        reward = STEP_REWARD + BOX_REWARD * gained + FINISH_REWARD * finished
        return Step(self._observe(), reward, finished, True, self._outcome())

    def _observe(self) -> Observation:
        view = View(tuple(grid(self.room, self._position)))
        return Observation(view, DIRECTIONS, key(self.room, self._position))

    def _outcome(self) -> dict[str, float]:
        room, boxes = self.room, self._position.boxes
        share = (boxes & room.targets).bit_count() / boxes.bit_count()
        return {"success": float(solved(room, self._position)), "boxes_on_target": share}


def make(**options: Any) -> Sokoban:
    """An environment; see `Options`."""
    return Sokoban(read_options(options))


class _LevelSource:
    """The index-th level of a split, generated when asked for."""

    def __init__(self, split: Split, data_seed: int, shape: Shape):
        self._split: Split = split
        self._data_seed, self._shape = data_seed, shape

    def __call__(self, index: int) -> Task:
        shape = self._shape
        room, position = generate(np.random.default_rng([self._data_seed, index]), shape, self._split)
        name = f"{shape.rows}x{shape.columns}x{shape.boxes}-{self._split}-{self._data_seed}-{index}"
        return Task(f"sokoban-{name}", "sokoban", index, {"level": "\n".join(grid(room, position))})


def tasks(split: Split, data_seed: int, **options: Any) -> "grain.MapDataset[Task]":
    """Levels without end: any index, in any order, in any process. Train and held-out rooms differ by content."""
    import grain  # imports jax, which processes that only hold environments do without

    check_split(split)
    return grain.MapDataset.range(TASKS).map(_LevelSource(split, data_seed, read_options(options)))


def expert(env: Sokoban) -> str:
    """First move of a shortest solution. Where the level can no longer be solved: any move that changes something."""
    return DIRECTIONS[best_direction(env.room, env.position)]


def random_action(observation: Observation, rng: np.random.Generator) -> str:
    return observation.legal_actions[rng.integers(len(observation.legal_actions))]
