"""Sokoban levels from a random generator: a walked room, boxes pulled away from their targets, a few last steps.

The algorithm and its constants are those of gym_sokoban, with the last steps of its verl-agent descendant.
"""

import functools
from dataclasses import dataclass

import numpy as np

from flowjax.envs.base import Split, WorldError
from flowjax.envs.sokoban.rooms import Position, Room, room_key
from flowjax.envs.sokoban.solver import moves_to_go

TURN_PROBABILITY = 0.35
WALK_STEPS_PER_SIDE = 1.7
MASKS = (  # what the walker clears around itself, as (row, column) offsets
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))
MAX_STATES = 300_000  # explored while pulling, before the best level so far is taken
MAX_ATTEMPTS = 20_000
HELD_OUT_ONE_IN = 8  # rooms, by content


@dataclass(frozen=True, slots=True)
class Shape:
    """Options of the level generator.

    `search_depth` bounds the pulls and steps of reverse play; `min_moves` drops levels with a shorter solution,
    `max_moves` those with a longer one (0: none), so that every level can be solved within a limit of turns.
    """

    rows: int = 6
    columns: int = 0  # 0: as many as rows
    boxes: int = 1
    search_depth: int = 30
    min_moves: int = 1
    max_moves: int = 0

    def __post_init__(self):
        object.__setattr__(self, "columns", self.columns or self.rows)
        if min(self.rows, self.columns) < 5:
            raise WorldError(f"env.options rows={self.rows}, columns={self.columns}: a room needs at least 5 of each")
        if not 1 <= self.boxes <= (self.rows - 2) * (self.columns - 2) // 4:
            raise WorldError(
                f"env.options boxes={self.boxes} does not fit a {self.rows}x{self.columns} room: "
                f"give 1 to {(self.rows - 2) * (self.columns - 2) // 4}, or a larger room"
            )
        if self.search_depth < 3:
            raise WorldError(f"env.options search_depth={self.search_depth} cannot pull a box anywhere: give 3 or more")
        if self.max_moves and self.max_moves < self.min_moves:
            raise WorldError(
                f"env.options max_moves={self.max_moves} is below min_moves={self.min_moves}: raise it, or give 0"
            )


def split_of(room: Room) -> Split:
    """The split of a room, decided by walls and targets up to rotation and reflection, so that no held-out
    level, nor one that differs from it only in where the boxes and the player start, is ever trained on."""
    return "held_out" if room_key(room) % HELD_OUT_ONE_IN == 0 else "train"


def generate(rng: np.random.Generator, shape: Shape, split: Split | None = None) -> tuple[Room, Position]:
    """A solvable, unsolved level, of one split if one is named.

    Raises:
        WorldError: the options allow hardly any level.
    """
    for _ in range(MAX_ATTEMPTS):
        floor = walk_floor(rng, shape)
        cells = [cell for cell in range(floor.bit_length()) if floor >> cell & 1]
        if len(cells) <= shape.boxes + 2:
            continue
        player, *targets = rng.permutation(cells)[: shape.boxes + 1].tolist()
        room = Room(shape.rows, shape.columns, floor, sum(1 << target for target in targets))
        if split is not None and split_of(room) != split:
            continue
        pulled = reverse_play(room, player, targets, shape.search_depth)
        if pulled is None:
            continue
        position, displacement = pulled
        position = last_steps(rng, room, position, 0.8 if displacement == 1 else 0.5)
        if shape.min_moves <= 1 and not shape.max_moves:
            return room, position
        moves = moves_to_go(room, position) or 0
        if shape.min_moves <= moves <= (shape.max_moves or moves):
            return room, position
    raise WorldError(
        f"no Sokoban level in {MAX_ATTEMPTS} attempts with {shape}: lower min_moves or boxes, raise max_moves, or "
        "enlarge the room"
    )


@functools.lru_cache(maxsize=16)
def _stamps(rows: int, columns: int) -> list[list[int]]:
    """Cells that each mask clears at each cell, border excluded."""
    interior = sum(1 << row * columns + column for row in range(1, rows - 1) for column in range(1, columns - 1))
    stamps = []
    for mask in MASKS:
        at_cell = []
        for cell in range(rows * columns):
            row, column = divmod(cell, columns)
            inside = [(row + r, column + c) for r, c in mask if 0 <= row + r < rows and 0 <= column + c < columns]
            at_cell.append(sum(1 << r * columns + c for r, c in inside) & interior)
        stamps.append(at_cell)
    return stamps


def walk_floor(rng: np.random.Generator, shape: Shape) -> int:
    """Cells cleared by a random walk that stamps a random mask at each step."""
    rows, columns = shape.rows, shape.columns
    stamps = _stamps(rows, columns)
    steps = int(WALK_STEPS_PER_SIDE * (rows + columns))
    turns = (rng.random(steps) < TURN_PROBABILITY).tolist()
    directions = rng.integers(4, size=steps + 1).tolist()
    masks = rng.integers(len(MASKS), size=steps).tolist()
    row, column = int(rng.integers(1, rows)), int(rng.integers(1, columns))
    d_row, d_column = STEPS[directions[steps]]
    floor = 0
    for turn, direction, mask in zip(turns, directions[:steps], masks, strict=True):
        if turn:
            d_row, d_column = STEPS[direction]
        row = min(max(row + d_row, 1), rows - 2)
        column = min(max(column + d_column, 1), columns - 2)
        floor |= stamps[mask][row * columns + column]
    return floor


def reverse_play(room: Room, player: int, targets: list[int], search_depth: int) -> tuple[Position, int] | None:
    """Pull the boxes off their targets, depth first, and keep the best position with every target uncovered.

    Score: (changes of the box that is pulled) * (sum of Manhattan distances of the boxes from their targets). A box
    behind a walking player is always pulled. Returns the position and its displacement, None if no box came away.
    """
    floor, columns, uncovered = room.floor, room.columns, room.targets
    explored: set[tuple[int, int]] = set()
    best_score, best = 0, None
    stack = [(player, room.targets, tuple(targets), 0, -1, 1)]
    while stack and len(explored) < MAX_STATES:
        player, boxes, cells, changes, last, depth = stack.pop()
        if (player, boxes) in explored:
            continue
        explored.add((player, boxes))
        if changes and not (boxes | 1 << player) & uncovered:
            displacement = sum(_manhattan(a, b, columns) for a, b in zip(cells, targets, strict=True))
            if changes * displacement > best_score:
                best_score, best = changes * displacement, (Position(player, boxes), displacement)
        if depth >= search_depth - 1:
            continue
        free = floor & ~boxes
        for offset in reversed(room.offsets):  # the stack turns the order round
            ahead, behind = player + offset, player - offset
            if not free >> ahead & 1:
                continue
            if boxes >> behind & 1:
                box = cells.index(behind)
                moved = (*cells[:box], player, *cells[box + 1 :])
                pulled = boxes ^ (1 << behind | 1 << player)
                stack.append((ahead, pulled, moved, changes + (box != last), box, depth + 1))
            else:
                stack.append((ahead, boxes, cells, changes, last, depth + 1))
    return best


def _manhattan(a: int, b: int, columns: int) -> int:
    return abs(a // columns - b // columns) + abs(a % columns - b % columns)


def last_steps(rng: np.random.Generator, room: Room, position: Position, probability: float) -> Position:
    """One to three steps of the player to cells it has not been on, so that it does not always start beside a box."""
    if rng.random() >= probability:
        return position
    player, seen = position.player, {position.player}
    for _ in range(3):
        free = room.floor & ~position.boxes
        ways = [player + offset for offset in room.offsets if free >> player + offset & 1]
        ways = [cell for cell in ways if cell not in seen]
        if not ways:
            break
        player = ways[int(rng.integers(len(ways)))]
        seen.add(player)
        if rng.random() >= 0.5:
            break
    return Position(player, position.boxes)
