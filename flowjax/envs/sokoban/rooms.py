"""Sokoban rooms: moves, the text grid, keys of positions and rooms, and pictures.

Cells are numbered row by row; a set of cells is an int with a bit for each. A room's border is wall, so that a floor
cell's neighbours are its number plus constant offsets, without checks at the edges.
"""

import functools
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int, UInt8

from flowjax.envs import WorldError
from flowjax.records import state_key

DIRECTIONS = ("up", "down", "left", "right")
SYMBOLS = ("#", "_", "O", "√", "X", "P", "S")  # wall, floor, target, box on target, box, player, player on target

# Pictures: one square tile for each cell, drawn by formulas.
MIN_TILE_PIXELS = 4  # smaller tiles could look alike
BRICK, MORTAR, FLOOR, GRAIN, TARGET = (140, 72, 52), (196, 178, 160), (236, 228, 208), (222, 212, 190), (206, 40, 60)
WOOD, COVERED, EDGE, COAT, SKIN = (186, 130, 62), (86, 158, 70), (70, 48, 24), (38, 84, 170), (240, 196, 150)


@dataclass(frozen=True, slots=True)
class Room:
    """Constant part of a level: its size, and the sets of floor cells (all but walls) and targets."""

    rows: int
    columns: int
    floor: int
    targets: int
    offsets: tuple[int, int, int, int] = field(init=False, compare=False)  # of DIRECTIONS

    def __post_init__(self):
        object.__setattr__(self, "offsets", (-self.columns, self.columns, -1, 1))


@dataclass(frozen=True, slots=True)
class Position:
    """The player's cell and the set of the boxes' cells."""

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


@functools.lru_cache(maxsize=128)
def _symmetries(rows: int, columns: int) -> np.ndarray:
    """Cell numbers of the grid's rotations and reflections that are no taller than wide, one image per row."""
    cells = np.arange(rows * columns).reshape(rows, columns)
    turned = [np.rot90(image, turns) for image in (cells, cells.T) for turns in range(4)]
    return np.stack([image.ravel() for image in turned if image.shape[0] <= image.shape[1]])


def room_key(room: Room) -> int:
    """64-bit key of walls and targets, equal for all rotations and reflections of a room, and for any thickness of the
    walls around it."""
    cells = range(room.rows * room.columns)
    codes = np.array([(room.floor >> c & 1) + (room.targets >> c & 1) for c in cells], np.uint8)
    codes = codes.reshape(room.rows, room.columns)
    rows, columns = np.flatnonzero(codes.any(1)), np.flatnonzero(codes.any(0))
    inner = codes[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    images = inner.ravel()[_symmetries(*inner.shape)]
    return state_key(*sorted(inner.shape), min(image.tobytes() for image in images))


@functools.lru_cache(maxsize=8)
def tiles(tile_pixels: int = 16) -> UInt8[np.ndarray, "symbols pixels pixels 3"]:
    """The tile of every symbol, in the order of SYMBOLS, as RGB.

    Raises:
        WorldError: the tiles are too small to be distinguished.
    """
    if tile_pixels < MIN_TILE_PIXELS:
        raise WorldError(f"env.options tile_pixels={tile_pixels} is too small to draw: give {MIN_TILE_PIXELS} or more")
    drawn = np.stack([_tile(symbol, tile_pixels) for symbol in SYMBOLS])
    drawn.setflags(write=False)
    return drawn


def picture(room: Room, position: Position, tile_pixels: int = 16) -> UInt8[np.ndarray, "height width 3"]:
    """The room as an RGB picture of rows * tile_pixels by columns * tile_pixels."""
    return picture_of(RoomView(tuple(grid(room, position))), tile_pixels)


def picture_of(view: RoomView, tile_pixels: int = 16) -> UInt8[np.ndarray, "height width 3"]:
    """The picture of a view: for agents that see images, in any process, without the environment."""
    numbers = np.array([[SYMBOLS.index(symbol) for symbol in row] for row in view.rows])
    return pictures(numbers[None], tile_pixels)[0]


def svg(view: RoomView, cell_pixels: int = 20) -> str:
    """The picture of a view as SVG, with one path for each kind of cell, which keeps the file small."""
    rows, columns = len(view.rows), len(view.rows[0])
    cells = [(symbol, x, y) for y, row in enumerate(view.rows) for x, symbol in enumerate(row)]

    def squares(symbols: str, colour: str, inset: float) -> str:
        side = 1 - 2 * inset
        path = "".join(
            f"M{x + inset:g} {y + inset:g}h{side:g}v{side:g}h-{side:g}z" for s, x, y in cells if s in symbols
        )
        return f'<path fill="{colour}" d="{path}"/>' if path else ""

    def rounds(symbols: str, colour: str, radius: float, dx: float = 0.5, dy: float = 0.5) -> str:
        arc = f"a{radius:g} {radius:g} 0 1 0 {2 * radius:g} 0a{radius:g} {radius:g} 0 1 0 -{2 * radius:g} 0"
        path = "".join(f"M{x + dx - radius:g} {y + dy:g}{arc}" for s, x, y in cells if s in symbols)
        return f'<path fill="{colour}" d="{path}"/>' if path else ""

    floor, wall, target, wood, covered = (_hex(colour) for colour in (FLOOR, BRICK, TARGET, WOOD, COVERED))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns} {rows}" width="{columns * cell_pixels}" '
        f'height="{rows * cell_pixels}"><path fill="{floor}" d="M0 0h{columns}v{rows}H0z"/>'
        + squares("#", wall, 0.0)
        + rounds("OS√", target, 0.42)
        + rounds("OS√", floor, 0.26)
        + squares("X√", _hex(EDGE), 0.12)
        + squares("X", wood, 0.19)
        + squares("√", covered, 0.19)
        + rounds("PS", _hex(COAT), 0.24, dy=0.66)
        + rounds("PS", _hex(SKIN), 0.18, dy=0.32)
        + "</svg>"
    )


def _hex(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)


def pictures(
    symbols: Int[np.ndarray, "boards rows columns"], tile_pixels: int = 16
) -> UInt8[np.ndarray, "boards height width 3"]:
    """Pictures of many boards, whose cells are indices of SYMBOLS."""
    boards, rows, columns = symbols.shape
    drawn = tiles(tile_pixels)[symbols].transpose(0, 1, 3, 2, 4, 5)
    return drawn.reshape(boards, rows * tile_pixels, columns * tile_pixels, 3)


def _tile(symbol: str, pixels: int) -> UInt8[np.ndarray, "pixels pixels 3"]:
    across = (np.arange(pixels) + 0.5) / pixels  # middle of each pixel; the tile is the unit square
    x, y = np.meshgrid(across, across)
    tile = np.empty((pixels, pixels, 3), np.uint8)
    if symbol == "#":
        course = np.floor(y * 4)
        joint = (y * 4 % 1 < 0.2) | ((x * 2 + course % 2 / 2) % 1 < 0.1)
        tile[:] = np.where(joint[..., None], MORTAR, BRICK)
        return tile
    tile[:] = np.where(((x + y) * 4 % 1 < 0.25)[..., None], GRAIN, FLOOR)
    from_middle = np.hypot(x - 0.5, y - 0.5)
    if symbol in "O√S":
        tile[(from_middle < 0.46) & (from_middle > 0.3)] = TARGET
        tile[from_middle < 0.14] = TARGET
    if symbol in "X√":
        inside = (abs(x - 0.5) < 0.4) & (abs(y - 0.5) < 0.4)
        rim = inside & ((abs(x - 0.5) > 0.32) | (abs(y - 0.5) > 0.32) | (abs(x - y) < 0.06))
        tile[inside] = COVERED if symbol == "√" else WOOD
        tile[rim] = EDGE
    if symbol in "PS":
        tile[(abs(x - 0.5) < 0.26) & (y > 0.45) & (y < 0.9)] = COAT
        tile[np.hypot(x - 0.5, y - 0.3) < 0.2] = SKIN
    return tile
