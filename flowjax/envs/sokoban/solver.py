"""Shortest solutions of Sokoban levels, in moves of the player.

A small room is solved once and for all positions, backwards from all ends. In a larger one each position is solved by
itself: A* over (player, boxes), its bound the cheapest assignment of boxes to targets, each box alone in the room.
"""

import functools
import heapq
import itertools
import math

from flowjax.envs.base import WorldError
from flowjax.envs.sokoban.rooms import Position, Room, move

MAX_POSITIONS = 200_000  # of a room that is solved for all positions at once; some ten MB
MAX_EXPANDED = 200_000  # positions of A*, some ten seconds
FAR = 1 << 20  # bound of a position with a box that no push brings to a target


@functools.lru_cache(maxsize=128)
def distances(room: Room) -> dict[tuple[int, int], int]:
    """Moves to the solution from every (player, boxes) that has one, by breadth-first search backwards from all ends.

    Positions that are missing cannot be solved. Their number grows as (floor cells) to the power (boxes + 1).
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

    The bound is consistent (a push changes one box's distance by at most one, a walk none), so the first time that a
    position is expanded is by a shortest way.

    Raises:
        WorldError: it takes more than MAX_EXPANDED positions to find out.
    """
    start = position.player, position.boxes
    bound = _bound(room, position.boxes)
    came: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    best = {start: 0}
    closed: set[tuple[int, int]] = set()
    queue = [(bound, 0, start)]
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
    """For each target the pushes that a box alone in the room needs to it, from every cell that allows it."""
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
    """Pushes of the cheapest assignment of boxes to targets; FAR where there is none."""
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
    """True if four cells of a square are all wall or box, and a box among them is off target: it never moves again."""
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
