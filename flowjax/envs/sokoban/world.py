"""Sokoban's environment, tasks, texts and expert."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from flowjax.envs import History, Message, Observation, Split, Step, Style, World, check_split, user_says
from flowjax.envs.sokoban.levels import Shape, best_direction, generate
from flowjax.envs.sokoban.rooms import (
    DIRECTIONS,
    SYMBOLS,
    Position,
    Room,
    RoomView,
    grid,
    key,
    move,
    parse,
    picture,
    solved,
    svg,
    tiles,
)
from flowjax.records import Task

if TYPE_CHECKING:
    import grain

STEP_REWARD, BOX_REWARD, FINISH_REWARD = -0.1, 1.0, 10.0
TASKS = 1 << 31  # length of a task source; slice it

_RULES = """You are playing Sokoban. Push every box onto a target.

Symbols: # wall, _ empty floor, O target, X box, √ box on a target, P you, S you on a target.
Moving towards a box pushes it one cell, if the cell behind it is free. Boxes can only be pushed, never pulled, and only
one at a time; walls stop you and the boxes. A box in a corner is stuck for good unless the corner is a target."""
_INSTRUCTION = """Your actions are: up, down, left, right.
First reason step by step about the next move inside <think> </think>, then give one action inside
<action> </action>."""


class Sokoban(World):
    """Push every box onto a target. State: walls, targets, boxes and player."""

    OUTCOMES = ("success", "boxes_on_target")
    View = RoomView

    @dataclass(frozen=True, slots=True)
    class Options(Shape):
        """Options of the levels, and of the picture."""

        tile_pixels: int = 0  # side of a cell in the environment's `picture`; 0: it draws none

    def env(self) -> "SokobanEnv":
        return SokobanEnv(self.options)

    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        """Levels without end, for any index in any process and order. Train and held-out rooms differ by content."""
        import grain  # imports jax, which processes that only hold environments do without

        check_split(split)
        return grain.MapDataset.range(TASKS).map(functools.partial(_task, split, data_seed, self.options))

    def instruct(self, observation: Observation, history: History) -> str:
        parts = [_RULES]
        if history:
            past = "\n".join(
                f"[Observation {p.turn}: '\n{_spaced(p.view)}\n', Action {p.turn}: '{p.action or 'none'}']"
                for p in history
            )
            parts.append(f"You have taken {history[-1].turn} actions so far. The latest:\n{past}")
        return "\n\n".join([*parts, _now(observation.view)])

    def compact(self, observation: Observation, history: History) -> str:
        """Earlier turns, each with its action after it, and the grid, every symbol a word. The outer wall is left out,
        since it is the same in every level."""
        past = [f"{_inside(p.view)} {p.action or 'none'}" for p in history]
        return " ".join([*past, _inside(observation.view)])

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        return user_says(_inside(observation.view) if style == "compact" else _now(observation.view))

    def draw(self, view: RoomView, trace: Any = None) -> str:
        del trace
        return svg(view)

    def vocabulary(self) -> tuple[str, ...]:
        return (*SYMBOLS, *DIRECTIONS, "none")

    def expert(self, env: "SokobanEnv") -> str:
        """First move of a shortest solution; in a level that cannot be solved any more, one that changes something."""
        return DIRECTIONS[best_direction(env.room, env.position)]


def _now(view: RoomView) -> str:
    return f"The grid now:\n{_spaced(view)}\n\n{_INSTRUCTION}"


def _spaced(view: RoomView) -> str:
    return "\n".join(" " + " \t ".join(row) + " " for row in view.rows)


def _inside(view: RoomView) -> str:
    return " ".join(cell for row in view.rows[1:-1] for cell in row[1:-1])


def _task(split: Split, data_seed: int, shape: Shape, index: int) -> Task:
    """The index-th level of a split, generated on demand."""
    room, position = generate(np.random.default_rng([data_seed, index]), shape, split)
    name = f"{shape.rows}x{shape.columns}x{shape.boxes}-{split}-{data_seed}-{index}"
    return Task(f"sokoban-{name}", "sokoban", index, {"level": "\n".join(grid(room, position))})


class SokobanEnv:
    """One level at a time. A task carries its level in `payload["level"]`, or else its seed generates one."""

    def __init__(self, options: Any):
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
        """The present room in RGB, None without the option `tile_pixels`."""
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
        view = RoomView(tuple(grid(self.room, self._position)))
        return Observation(view, DIRECTIONS, key(self.room, self._position))

    def _outcome(self) -> dict[str, float]:
        room, boxes = self.room, self._position.boxes
        share = (boxes & room.targets).bit_count() / boxes.bit_count()
        return {"success": float(solved(room, self._position)), "boxes_on_target": share}
