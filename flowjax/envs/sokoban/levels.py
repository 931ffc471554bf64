"""Sokoban levels from a random generator, and their shortest solutions.

A level is a room from a random walk, boxes pulled away from their targets, and a few last steps of the player. Levels
are selected by the length of their shortest solution, which the expert plays. The generator and its constants are those
of gym_sokoban, with the last steps of verl-agent's version of it.
"""

import functools
import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np

from flowjax.envs import Split, WorldError
from flowjax.envs.sokoban.rooms import Position, Room, move, room_key

TURN_PROBABILITY = 0.35
WALK_STEPS_PER_SIDE = 1.7
MASKS = (  # cells that the walker clears around itself, as (row, column) offsets
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))
MAX_STATES = 300_000  # explored while pulling; then the best level so far is used
MAX_ATTEMPTS = 20_000
MAX_HARD = 30  # levels too hard for the expert, 5 to 10 s each, before the options are refused
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
        object.__setattr__(self, "columns", self.columns or self.rows)  # the dataclass is frozen
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
        WorldError: the options allow hardly any level, or hardly one that the expert can solve.
    """
    hard = 0
    for _ in range(MAX_ATTEMPTS):
        floor = walk_floor(rng, shape)
        cells = [cell for cell in range(floor.bit_length()) if floor >> cell & 1]
        if len(cells) <= shape.boxes + 2:
            continue
        # Python's integers: a NumPy one would overflow where it is shifted by 64 or more, in rooms of so many cells.
        player, *targets = rng.permutation(cells)[: shape.boxes + 1].tolist()
        room = Room(shape.rows, shape.columns, floor, sum(1 << target for target in targets))
        if split is not None and split_of(room) != split:
            continue
        # Boxes start on their targets and are pulled off: a pull is a push backwards, so the level can be solved.
        pulled = reverse_play(room, player, targets, shape.search_depth)
        if pulled is None:
            continue
        position, displacement = pulled
        position = last_steps(rng, room, position, 0.8 if displacement == 1 else 0.5)
        if shape.min_moves <= 1 and not shape.max_moves:
            return room, position
        try:
            moves = moves_to_go(room, position) or 0
        except WorldError:  # too hard for the expert; the next one may not be
            hard += 1
            if hard == MAX_HARD:
                raise
            continue
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
    # As in gym_sokoban this may be a cell of the border: the first step leads inside.
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
        for offset in reversed(room.offsets):  # a stack reverses the order
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
    """With `probability`, one to three steps of the player to new cells, so that it does not always start at a box."""
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


# ------------------------------------------------------------------------------------------------------------ solutions

MAX_POSITIONS = 200_000  # of a room that is solved for all positions at once; about ten MB
MAX_EXPANDED = 200_000  # positions of A*, 5 to 10 s
FAR = 1 << 20  # bound of a position in which some box cannot reach a target


@functools.lru_cache(maxsize=128)
def distances(room: Room) -> dict[tuple[int, int], int]:
    """Moves to the solution from every solvable (player, boxes), by breadth-first search backwards from all ends.

    Missing positions cannot be solved. The number of positions grows as (floor cells) to the power (boxes + 1).
    """
    floor = room.floor
    ends = [cell for cell in range(floor.bit_length()) if (floor & ~room.targets) >> cell & 1]
    found = {(player, room.targets): 0 for player in ends}
    frontier = list(found)
    moves = 0
    while frontier:
        moves += 1
        earlier: list[tuple[int, int]] = []
        for player, boxes in frontier:
            free = floor & ~boxes
            for offset in room.offsets:
                behind = player - offset
                if not free >> behind & 1:
                    continue
                walked = (behind, boxes)
                if walked not in found:
                    found[walked] = moves
                    earlier.append(walked)
                ahead = player + offset
                if boxes >> ahead & 1:
                    pushed = (behind, boxes ^ (1 << ahead | 1 << player))
                    if pushed not in found:
                        found[pushed] = moves
                        earlier.append(pushed)
        frontier = earlier
    return found


def is_small(room: Room) -> bool:
    """True where all positions of the room are few enough for `distances`."""
    free_cells = room.floor.bit_count()
    return free_cells * math.comb(free_cells - 1, room.targets.bit_count()) <= MAX_POSITIONS


@functools.lru_cache(maxsize=1024)
def shortest_solution(room: Room, position: Position) -> tuple[int, ...] | None:
    """Directions of a shortest solution by A*, None where there is none.

    The bound is consistent (a push changes one box's distance by at most one, a step without a push changes none), so a
    position is first expanded on a shortest path to it, and never again.

    Raises:
        WorldError: the search expands more than MAX_EXPANDED positions.
    """
    start = position.player, position.boxes
    bound = _bound(room, position.boxes)
    came: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    best = {start: 0}
    closed: set[tuple[int, int]] = set()
    queue = [(bound, 0, start)]  # (moves + bound, -moves, position): of equal sums the deepest comes first
    while queue:
        _, minus_moves, state = heapq.heappop(queue)
        if state in closed:
            continue
        closed.add(state)
        if state[1] == room.targets:
            return _way(came, state, start)
        if len(closed) > MAX_EXPANDED:
            raise WorldError(
                f"a Sokoban level of {room.rows}x{room.columns} with {room.targets.bit_count()} boxes took the expert "
                f"more than {MAX_EXPANDED:,} positions: use fewer boxes or a smaller room"
            )
        here = Position(*state)
        moves = 1 - minus_moves
        for direction in range(4):
            after = move(room, here, direction)
            following = after.player, after.boxes
            if after == here or best.get(following, FAR) <= moves:
                continue
            bound = _bound(room, after.boxes)
            if bound >= FAR or (after.boxes != here.boxes and _stuck(room, after.boxes)):
                continue
            best[following] = moves
            came[following] = state, direction
            heapq.heappush(queue, (moves + bound, -moves, following))
    return None


def _way(
    came: dict[tuple[int, int], tuple[tuple[int, int], int]], state: tuple[int, int], start: tuple[int, int]
) -> tuple[int, ...]:
    directions = []
    while state != start:
        state, direction = came[state]
        directions.append(direction)
    return tuple(reversed(directions))


@functools.lru_cache(maxsize=128)
def _pushes_to(room: Room) -> tuple[dict[int, int], ...]:
    """For each target, the number of pushes to it of a box alone in the room, by the box's cell."""
    tables = []
    for target in _members(room.targets):
        pushes = {target: 0}
        frontier = [target]
        while frontier:
            cell = frontier.pop(0)
            for offset in room.offsets:
                before, behind = cell - offset, cell - 2 * offset
                if room.floor >> before & 1 and behind >= 0 and room.floor >> behind & 1 and before not in pushes:
                    pushes[before] = pushes[cell] + 1
                    frontier.append(before)
        tables.append(pushes)
    return tuple(tables)


@functools.lru_cache(maxsize=100_000)
def _bound(room: Room, boxes: int) -> int:
    """Lower bound of the moves: pushes of the cheapest assignment of boxes to targets; FAR where there is none."""
    tables = _pushes_to(room)
    cheapest = {0: 0}  # set of targets that the boxes so far use -> pushes
    for box in _members(boxes):
        following: dict[int, int] = {}
        for (used, pushes), (i, table) in itertools.product(cheapest.items(), enumerate(tables)):
            if not used >> i & 1 and box in table:
                now = used | 1 << i
                following[now] = min(following.get(now, FAR), pushes + table[box])
        cheapest = following
    return min(cheapest.values(), default=FAR)


def _stuck(room: Room, boxes: int) -> bool:
    """True if some 2x2 square is all wall or box, with a box in it off target: none of its boxes can ever move."""
    filled = boxes | ~room.floor
    square = filled & filled >> 1 & filled >> room.columns & filled >> room.columns + 1
    off_target = boxes & ~room.targets
    corners = off_target | off_target >> 1 | off_target >> room.columns | off_target >> room.columns + 1
    return bool(square & corners)


def _members(cells: int) -> list[int]:
    return [cell for cell in range(cells.bit_length()) if cells >> cell & 1]


def moves_to_go(room: Room, position: Position) -> int | None:
    """Length of the shortest solution, None where there is none."""
    if is_small(room):
        return distances(room).get((position.player, position.boxes))
    found = shortest_solution(room, position)
    return None if found is None else len(found)


def best_direction(room: Room, position: Position) -> int:
    """First move of a shortest solution (in a small room the earliest of DIRECTIONS); where there is none, the first
    that changes anything."""
    changing = [d for d in range(4) if move(room, position, d) != position]
    if is_small(room):
        known = distances(room)
        after = {d: move(room, position, d) for d in changing}
        ways = [(known[p.player, p.boxes], d) for d, p in after.items() if (p.player, p.boxes) in known]
        if ways:
            return min(ways)[1]
    elif found := shortest_solution(room, position):
        return found[0]
    return changing[0] if changing else 0
