"""Pictures of rooms: they show the grid, and nothing but the grid."""

import numpy as np
import pytest

from flowjax.envs import WorldError
from flowjax.envs.sokoban import Sokoban, rooms
from flowjax.envs.sokoban.levels import Shape, generate
from flowjax.envs.sokoban.rooms import SYMBOLS, grid
from flowjax.records import Task


@pytest.mark.parametrize("tile_pixels", [4, 16, 33])
def test_a_picture_can_be_read_back(tile_pixels: int):
    rng = np.random.default_rng(0)
    drawn = rooms.tiles(tile_pixels)
    assert drawn.shape == (7, tile_pixels, tile_pixels, 3) and drawn.dtype == np.uint8
    assert len({tile.tobytes() for tile in drawn}) == len(SYMBOLS)
    for shape in (Shape(), Shape(6, 9, boxes=2)):
        room, position = generate(rng, shape)
        image = rooms.picture(room, position, tile_pixels)
        assert image.shape == (room.rows * tile_pixels, room.columns * tile_pixels, 3)
        cut = [np.hsplit(band, room.columns) for band in np.vsplit(image, room.rows)]
        read = ["".join(SYMBOLS[match(tile, drawn)] for tile in band) for band in cut]
        assert read == grid(room, position)


def match(tile: np.ndarray, drawn: np.ndarray) -> int:
    return int(np.flatnonzero((drawn == tile).all(axis=(1, 2, 3)))[0])


def test_the_environment_draws_where_asked_to():
    task = Task("t", "sokoban", 3)
    plain, drawing = Sokoban().env(), Sokoban(tile_pixels=16).env()
    assert plain.reset(task, 0) == drawing.reset(task, 0)
    assert plain.picture is None
    view = plain.reset(task, 0).view
    np.testing.assert_array_equal(rooms.picture_of(view, 16), drawing.picture)
    before = drawing.picture
    assert before is not None and before.shape == (96, 96, 3)
    drawing.step(Sokoban().expert(drawing))
    after = drawing.picture
    assert after is not None and not np.array_equal(before, after)
    assert Sokoban(tile_pixels=16).tasks("train", 0)[3] == Sokoban().tasks("train", 0)[3]


def test_tiles_too_small_are_refused():
    with pytest.raises(WorldError, match="tile_pixels=2"):
        Sokoban(tile_pixels=2).env()
