"""Pictures of Sokoban rooms: one square tile for each cell, drawn by formulas."""

import functools

import numpy as np
from jaxtyping import Int, UInt8

from flowjax.envs.base import WorldError
from flowjax.envs.sokoban.rooms import SYMBOLS, Position, Room, RoomView, grid

MIN_TILE_PIXELS = 4  # below which the seven tiles could look alike
BRICK, MORTAR, FLOOR, GRAIN, TARGET = (140, 72, 52), (196, 178, 160), (236, 228, 208), (222, 212, 190), (206, 40, 60)
WOOD, COVERED, EDGE, COAT, SKIN = (186, 130, 62), (86, 158, 70), (70, 48, 24), (38, 84, 170), (240, 196, 150)


@functools.lru_cache(maxsize=8)
def tiles(tile_pixels: int = 16) -> UInt8[np.ndarray, "symbols pixels pixels 3"]:
    """The tile of every symbol, in the order of SYMBOLS, as RGB.

    Raises:
        WorldError: the tiles would be too small to tell apart.
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
    """The picture of an observation's view: for agents that see, wherever the environment itself lives."""
    numbers = np.array([[SYMBOLS.index(symbol) for symbol in row] for row in view.rows])
    return pictures(numbers[None], tile_pixels)[0]


def pictures(
    symbols: Int[np.ndarray, "boards rows columns"], tile_pixels: int = 16
) -> UInt8[np.ndarray, "boards height width 3"]:
    """Pictures of many boards, whose cells are places in SYMBOLS."""
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
