"""Sokoban: push every box onto a target. State: walls, targets, boxes and player."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from flowjax.envs.base import Message, Observation, Past, Split, Step, Style, WorldError, tagged_action
from flowjax.envs.sokoban.levels import Shape, generate
from flowjax.envs.sokoban.pictures import picture, tiles
from flowjax.envs.sokoban.rooms import (
    DIRECTIONS,
    SYMBOLS,
    Position,
    Room,
    grid,
    key,
    move,
    parse,
    solved,
)
from flowjax.envs.sokoban.solver import best_direction
from flowjax.records import Task

if TYPE_CHECKING:
    import grain

OUTCOMES = ("success", "boxes_on_target")
STEP_REWARD, BOX_REWARD, FINISH_REWARD = -0.1, 1.0, 10.0
TASKS = 1 << 31  # length of a task source; slice it

RULES = """You are playing Sokoban. Push every box onto a target.

Symbols: # wall, _ empty floor, O target, X box, √ box on a target, P you, S you on a target.
Moving towards a box pushes it one cell, if the cell behind it is free. Boxes can only be pushed, never pulled, and only
one at a time; walls stop you and the boxes. A box in a corner is stuck for good unless the corner is a target."""
INSTRUCTION = """Your actions are: up, down, left, right.
First reason step by step about the next move inside <think> </think>, then give one action inside
<action> </action>."""


class Sokoban:
    """One level at a time. A task carries its level in `payload["level"]`, or else its seed generates one."""

    def __init__(self, shape: Shape, tile_pixels: int = 0):
        if tile_pixels:
            tiles(tile_pixels)  # refuses a size that cannot be drawn
        self._shape = shape
        self._tile_pixels = tile_pixels
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
        return picture(self.room, self._position, self._tile_pixels) if self._tile_pixels else None

    def reset(self, task: Task, seed: int) -> Observation:
        level = task.payload.get("level")
        self._room, self._position = parse(level) if level else generate(np.random.default_rng(task.seed), self._shape)
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

    def effective_actions(self) -> tuple[str, ...]:
        """The actions that would change the state."""
        return tuple(d for i, d in enumerate(DIRECTIONS) if move(self.room, self._position, i) != self._position)

    def _observe(self) -> Observation:
        lines = grid(self.room, self._position)
        text = "\n".join(" " + " \t ".join(line) + " " for line in lines)
        return Observation(text, DIRECTIONS, key(self.room, self._position))

    def _outcome(self) -> dict[str, float]:
        room, boxes = self.room, self._position.boxes
        share = (boxes & room.targets).bit_count() / boxes.bit_count()
        return {"success": float(solved(room, self._position)), "boxes_on_target": share}


def _shape(rows: int = 6, columns: int | None = None, **options: Any) -> Shape:
    try:
        return Shape(rows, rows if columns is None else columns, **options)
    except TypeError as error:
        raise WorldError(
            f"env.options {sorted(options)}: Sokoban's are rows, columns, boxes, search_depth, min_moves, max_moves, "
            f"tile_pixels ({error})"
        ) from error


def make(*, tile_pixels: int = 0, **options: Any) -> Sokoban:
    """Options: rows, columns (as rows), boxes, search_depth, min_moves, max_moves, see `Shape`; tile_pixels, side
    of a cell in the environment's `picture` (0: it draws none)."""
    return Sokoban(_shape(**options), tile_pixels)


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


def tasks(split: Split, data_seed: int, *, tile_pixels: int = 0, **options: Any) -> "grain.MapDataset[Task]":
    """Levels without end: any index, in any order, in any process. Train and held-out rooms differ by content."""
    del tile_pixels  # levels do not depend on how they are shown
    import grain  # imports jax, which processes that only hold environments do without

    if split not in ("train", "held_out"):
        raise WorldError(f"split is {split!r}: give train or held_out")
    return grain.MapDataset.range(TASKS).map(_LevelSource(split, data_seed, _shape(**options)))


def expert(env: Sokoban) -> str:
    """First move of a shortest solution. Where the level can no longer be solved: any move that changes something."""
    return DIRECTIONS[best_direction(env.room, env.position)]


def random_action(observation: Observation, rng: np.random.Generator) -> str:
    return observation.legal_actions[rng.integers(len(observation.legal_actions))]


def vocabulary(**options: Any) -> tuple[str, ...]:
    del options  # the same for every size
    return (*SYMBOLS, *DIRECTIONS, "none")


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
    """One user message. Compact: earlier turns, each closed by its action ("none" for an unreadable reply), and the
    grid without its outer wall, which is the same in every level; every symbol a word."""
    if style == "compact":
        words = [f"{_compact(past.observation)} {past.action or 'none'}" for past in history]
        return [{"role": "user", "content": " ".join([*words, _compact(observation.text)])}]
    past = [f"[Observation {p.turn}: '\n{p.observation}\n', Action {p.turn}: '{p.action or 'none'}']" for p in history]
    parts = [RULES]
    if history:
        parts.append(f"You have taken {history[-1].turn} actions so far. The latest:\n" + "\n".join(past))
    parts.append(f"The grid now:\n{observation.text}")
    parts.append(INSTRUCTION)
    return [{"role": "user", "content": "\n\n".join(parts)}]


def follow_up(observation: Observation, style: Style) -> list[Message]:
    if style == "compact":
        return [{"role": "user", "content": _compact(observation.text)}]
    return [{"role": "user", "content": f"The grid now:\n{observation.text}\n\n{INSTRUCTION}"}]


def reply(action: str, style: Style) -> str:
    return action if style == "compact" else f"<action>{action}</action>"


def _compact(text: str) -> str:
    return " ".join(cell for row in text.split("\n")[1:-1] for cell in row.split()[1:-1])


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
    """The action that a reply names.

    With `reference`, as RewardFlow reads replies: the first of up, down, left, right, still that occurs anywhere in the
    first `<action>` pair, be it inside another word, and only beside a `<think>` pair.
    """
    if not reference:
        return tagged_action(reply, legal)
    text = reply.lower()
    _, opened, inside = text.partition("<action>")
    inside, closed, _ = inside.partition("</action>")
    if not (opened and closed and "<think>" in reply and "</think>" in reply):
        return None
    found = next((name for name in (*DIRECTIONS, "still") if name in inside), None)
    return found if found in legal else None
