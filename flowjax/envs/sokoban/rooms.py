"""Sokoban rooms: how a move changes a position, the text grid, and keys of positions and rooms.

Cells are numbered row by row; sets of cells are the bits of an int. A room's border is wall, so that a cell's
neighbours are its number plus a constant offset.
"""

import functools
from dataclasses import dataclass, field

import numpy as np

from flowjax.envs.base import WorldError
from flowjax.records import state_key

DIRECTIONS = ("up", "down", "left", "right")
SYMBOLS = ("#", "_", "O", "√", "X", "P", "S")  # wall, floor, target, box on target, box, player, player on target


@dataclass(frozen=True, slots=True)
class Room:
    """What never changes in a level: its size, the cells that are not wall, and the targets among them."""

    rows: int
    columns: int
    floor: int
    targets: int
    offsets: tuple[int, int, int, int] = field(init=False, compare=False)  # of DIRECTIONS

    def __post_init__(self):
        object.__setattr__(self, "offsets", (-self.columns, self.columns, -1, 1))


@dataclass(frozen=True, slots=True)
class Position:
    """Where the player and the boxes are."""

    player: int
    boxes: int


def move(room: Room, position: Position, direction: int) -> Position:
    """The position after walking or pushing; the same one where a wall or a second box is in the way."""
    player, boxes, offset = position.player, position.boxes, room.offsets[direction]
    ahead = player + offset
    if not room.floor >> ahead & 1:
        return position
    if boxes >> ahead & 1:
        beyond = ahead + offset
        if not (room.floor & ~boxes) >> beyond & 1:
            return position
        boxes ^= 1 << ahead | 1 << beyond
    return Position(ahead, boxes)


def solved(room: Room, position: Position) -> bool:
    return position.boxes == room.targets


def key(room: Room, position: Position) -> int:
    """64-bit state key: the level's walls and targets, the boxes and the player."""
    return state_key("sokoban", room.rows, room.columns, room.floor, room.targets, position.boxes, position.player)


@dataclass(frozen=True, slots=True)
class RoomView:
    """All of a room, as rows of `SYMBOLS`."""

    rows: tuple[str, ...]


def grid(room: Room, position: Position) -> list[str]:
    """One string of symbols for each row."""
    floor, targets, boxes = room.floor, room.targets, position.boxes
    cells = []
    for cell in range(room.rows * room.columns):
        on_target = targets >> cell & 1
        if not floor >> cell & 1:
            cells.append("#")
        elif cell == position.player:
            cells.append("S" if on_target else "P")
        elif boxes >> cell & 1:
            cells.append("√" if on_target else "X")
        else:
            cells.append("O" if on_target else "_")
    return ["".join(cells[start : start + room.columns]) for start in range(0, len(cells), room.columns)]


def parse(text: str) -> tuple[Room, Position]:
    """The level that lines of symbols show.

    Raises:
        WorldError: they do not show a level.
    """
    lines = text.strip().splitlines()
    columns = len(lines[0]) if lines else 0
    cells = "".join(lines)
    unknown = sorted(set(cells) - set(SYMBOLS))
    if columns < 3 or len(lines) < 3 or any(len(line) != columns for line in lines) or unknown:
        raise WorldError(
            f"Sokoban level {text!r} is not a rectangle of at least 3x3 symbols of {' '.join(SYMBOLS)}: correct it"
        )
    marked = {symbols: sum(1 << i for i, c in enumerate(cells) if c in symbols) for symbols in ("#", "O√S", "X√", "PS")}
    walls, targets, boxes, player = marked.values()
    border = lines[0] + lines[-1] + "".join(line[0] + line[-1] for line in lines)
    if player.bit_count() != 1 or not boxes or targets.bit_count() != boxes.bit_count() or set(border) != {"#"}:
        raise WorldError(
            f"Sokoban level {text!r} needs walls all around, one player, and as many targets as boxes: correct it"
        )
    room = Room(len(lines), columns, ((1 << len(cells)) - 1) & ~walls, targets)
    return room, Position(player.bit_length() - 1, boxes)


@functools.lru_cache(maxsize=16)
def _symmetries(rows: int, columns: int) -> np.ndarray:
    """Cell numbers of the grid's rotations and reflections that are no taller than wide, one image per row."""
    cells = np.arange(rows * columns).reshape(rows, columns)
    turned = [np.rot90(image, turns) for image in (cells, cells.T) for turns in range(4)]
    return np.stack([image.ravel() for image in turned if image.shape[0] <= image.shape[1]])


def room_key(room: Room) -> int:
    """64-bit key of walls and targets, equal for all rotations and reflections of a room."""
    cells = range(room.rows * room.columns)
    codes = np.array([(room.floor >> c & 1) + (room.targets >> c & 1) for c in cells], np.uint8)
    images = codes[_symmetries(room.rows, room.columns)]
    shape = sorted((room.rows, room.columns))
    return state_key(*shape, min(image.tobytes() for image in images))
