"""Thousands of Sokoban boards at once, as pure jitted functions: levels in; boards, rewards and ends out.

Dynamics and rewards are those of gym_sokoban, with its nine actions. Cells are numbered row by row; a set of cells is a
column of 32-bit words, where cell c is bit c % 32 of word c // 32. So a step is a few elementwise operations on arrays
of words, without gather or scatter. The border of every room is wall, so no cell number ever leaves the board.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from flowjax.envs import WorldError
from flowjax.envs.sokoban.rooms import Position, Room
from flowjax.envs.sokoban.world import BOX_REWARD, FINISH_REWARD, STEP_REWARD

# gym_sokoban's numbers: 0 does nothing, 1 to 4 push or move up, down, left, right, 5 to 8 only move.
ACTIONS = 9
WORD_BITS = 32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("floor", "targets", "boxes", "player", "steps"),
    meta_fields=("rows", "columns"),
)
@dataclass(frozen=True)
class Boards:
    """Boards of one size. `player` is a cell number, `steps` the number of actions taken since the reset."""

    floor: UInt32[Array, "words boards"]
    targets: UInt32[Array, "words boards"]
    boxes: UInt32[Array, "words boards"]
    player: Int[Array, "boards"]
    steps: Int[Array, "boards"]
    rows: int = field(metadata={"static": True})
    columns: int = field(metadata={"static": True})

    def __len__(self) -> int:
        return self.player.shape[-1]


def from_levels(levels: Sequence[tuple[Room, Position]]) -> Boards:
    """Boards at the start of `levels`.

    Raises:
        WorldError: there is no level, or they differ in size.
    """
    sizes = sorted({(room.rows, room.columns) for room, _ in levels})
    if len(sizes) != 1:
        raise WorldError(f"batched Sokoban levels have the sizes {sizes}: give levels of exactly one size")
    rows, columns = sizes[0]
    words = -(-rows * columns // WORD_BITS)

    def packed(sets: list[int]) -> Array:  # a set of cells is one Python int in `Room`, several 32-bit words here
        halves = np.array([[cells >> WORD_BITS * w & 0xFFFFFFFF for cells in sets] for w in range(words)], np.uint32)
        return jnp.asarray(halves)

    return Boards(
        floor=packed([room.floor for room, _ in levels]),
        targets=packed([room.targets for room, _ in levels]),
        boxes=packed([position.boxes for _, position in levels]),
        player=jnp.asarray([position.player for _, position in levels], jnp.int32),
        steps=jnp.zeros(len(levels), jnp.int32),
        rows=rows,
        columns=columns,
    )


def to_levels(boards: Boards) -> list[tuple[Room, Position]]:
    """Every board in the form of the single-board world, for keys, texts and the solver."""
    floor, targets, boxes = (_unpacked(cells) for cells in (boards.floor, boards.targets, boards.boxes))
    players = np.asarray(boards.player).tolist()
    rooms = [Room(boards.rows, boards.columns, f, t) for f, t in zip(floor, targets, strict=True)]
    return [(room, Position(player, box)) for room, player, box in zip(rooms, players, boxes, strict=True)]


def _unpacked(cells: Array) -> list[int]:
    words = np.asarray(cells).tolist()
    return [sum(word << WORD_BITS * w for w, word in enumerate(column)) for column in zip(*words, strict=True)]


@jax.jit
def reset(levels: Boards, which: Int[Array, "boards"]) -> Boards:
    """Boards at the start of `levels[which]`."""
    return replace(
        levels,
        floor=levels.floor[:, which],
        targets=levels.targets[:, which],
        boxes=levels.boxes[:, which],
        player=levels.player[which],
        steps=jnp.zeros(which.shape, jnp.int32),
    )


@jax.jit
def reset_where(over: Bool[Array, "boards"], boards: Boards, levels: Boards, which: Int[Array, "boards"]) -> Boards:
    """`boards`, of which those that are over are replaced by the start of `levels[which]`."""
    # Both sides are computed and one is selected: shapes stay static under jit, and no board waits for another.
    return jax.tree.map(lambda new, old: jnp.where(over, new, old), reset(levels, which), boards)


def solved(boards: Boards) -> Bool[Array, "boards"]:
    """Boards whose targets are all covered."""
    return jnp.all(boards.boxes == boards.targets, axis=0)


@functools.partial(jax.jit, static_argnames="max_steps")
def step(
    boards: Boards, actions: Int[Array, "boards"], *, max_steps: int = 0
) -> tuple[Boards, Float[Array, "boards"], Bool[Array, "boards"]]:
    """One action on every board: the boards after it, the rewards, and which boards are over.

    reward = -0.1 + (1 if a box came onto a target, -1 if one left) + (10 if every target is covered). A board is over
    when it is solved or `max_steps` actions were taken (0: no limit); from then on it stays as it is, with reward 0.
    Numbers that are no action do nothing, as 0 does.
    """
    over = solved(boards)
    if max_steps:
        over |= boards.steps >= max_steps
    acts = (actions >= 1) & (actions < ACTIONS) & ~over
    direction = (actions - 1) % 4
    size = jnp.where(direction < 2, boards.columns, 1)
    offset = jnp.where(direction % 2 == 0, -size, size)
    ahead = boards.player + offset
    beyond = jnp.clip(ahead + offset, 0, boards.rows * boards.columns - 1)  # outside only where ahead is wall

    box_ahead = _holds(boards.boxes, ahead)
    free_beyond = _holds(boards.floor & ~boards.boxes, beyond)
    pushes = acts & box_ahead & free_beyond & (actions <= 4)
    moves = acts & _holds(boards.floor, ahead) & (pushes | ~box_ahead)
    # Exclusive or moves the box: it clears the bit ahead, which is set, and sets the bit beyond, which is clear.
    boxes = boards.boxes ^ jnp.where(pushes, _cell(ahead, boards) | _cell(beyond, boards), jnp.uint32(0))
    player = jnp.where(moves, ahead, boards.player)
    after = replace(boards, boxes=boxes, player=player, steps=boards.steps + ~over)

    # As integers: JAX does not subtract booleans.
    targets_gained = _holds(boards.targets, beyond).astype(jnp.int32) - _holds(boards.targets, ahead)
    gained = jnp.where(pushes, targets_gained, 0)
    done = solved(after)
    reward = jnp.where(over, 0.0, STEP_REWARD + BOX_REWARD * gained + FINISH_REWARD * done)
    if max_steps:
        done |= after.steps >= max_steps
    return after, reward.astype(jnp.float32), done


def _holds(cells: UInt32[Array, "words boards"], cell: Int[Array, "boards"]) -> Bool[Array, "boards"]:
    """True for each board whose set of cells holds its cell."""
    word, bit = cell // WORD_BITS, (cell % WORD_BITS).astype(jnp.uint32)
    # In place of a gather: all words but the board's own become 0, and are combined by or.
    chosen = functools.reduce(jnp.bitwise_or, (jnp.where(word == w, cells[w], 0) for w in range(len(cells))))
    return (chosen >> bit & 1).astype(bool)


def _cell(cell: Int[Array, "boards"], boards: Boards) -> UInt32[Array, "words boards"]:
    """For each board the set with that one cell."""
    word, bit = cell // WORD_BITS, jnp.uint32(1) << (cell % WORD_BITS).astype(jnp.uint32)
    return jnp.where(word == jnp.arange(len(boards.boxes))[:, None], bit, jnp.uint32(0))


@jax.jit
def symbols(boards: Boards) -> UInt8[Array, "boards rows columns"]:
    """Every cell as an index of `rooms.SYMBOLS`, which is also gym_sokoban's number for drawing."""
    cells = jnp.arange(boards.rows * boards.columns)
    words, bits = cells // WORD_BITS, (cells % WORD_BITS).astype(jnp.uint32)[:, None]
    floor, target, box = (
        (column[words] >> bits & 1).astype(bool) for column in (boards.floor, boards.targets, boards.boxes)
    )
    player = cells[:, None] == boards.player
    symbol = jnp.select([~floor, player, box], [0, 5 + target, 4 - target], 1 + target)
    return symbol.T.reshape(-1, boards.rows, boards.columns).astype(jnp.uint8)
