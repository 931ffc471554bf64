"""Sokoban's rules written down a second time, on grids of characters, slowly."""

DELTAS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class PlainSokoban:
    def __init__(self, level: str):
        self.fixed: dict[tuple[int, int], str] = {}
        self.boxes: set[tuple[int, int]] = set()
        for row, line in enumerate(level.splitlines()):
            for column, symbol in enumerate(line):
                place = row, column
                self.fixed[place] = {"#": "wall", "O": "target", "√": "target", "S": "target"}.get(symbol, "floor")
                if symbol in "X√":
                    self.boxes.add(place)
                if symbol in "PS":
                    self.player = place

    def covered(self) -> int:
        return sum(self.fixed[box] == "target" for box in self.boxes)

    def step(self, action: str) -> tuple[float, bool]:
        reward = -0.1
        if action in DELTAS:
            before = self.covered()
            d_row, d_column = DELTAS[action]
            ahead = self.player[0] + d_row, self.player[1] + d_column
            beyond = ahead[0] + d_row, ahead[1] + d_column
            if ahead in self.boxes:
                if self.fixed[beyond] != "wall" and beyond not in self.boxes:
                    self.boxes.remove(ahead)
                    self.boxes.add(beyond)
                    self.player = ahead
            elif self.fixed[ahead] != "wall":
                self.player = ahead
            if self.covered() > before:
                reward += 1
            if self.covered() < before:
                reward -= 1
        done = self.covered() == len(self.boxes)
        return reward + 10 * done, done

    def snapshot(self) -> tuple:
        return tuple(sorted(self.fixed.items())), frozenset(self.boxes), self.player

    def symbols(self) -> list[str]:
        rows: dict[int, str] = {}
        for place, kind in sorted(self.fixed.items()):
            if place == self.player:
                symbol = "S" if kind == "target" else "P"
            elif place in self.boxes:
                symbol = "√" if kind == "target" else "X"
            else:
                symbol = {"wall": "#", "floor": "_", "target": "O"}[kind]
            rows[place[0]] = rows.get(place[0], "") + symbol
        return list(rows.values())


def shortest(level: str) -> int:
    """Length of the shortest solution, by forward search over copies of the grid."""
    start = PlainSokoban(level)
    frontier, seen, moves = [(start.player, frozenset(start.boxes))], set(), 0
    targets = {place for place, kind in start.fixed.items() if kind == "target"}
    while frontier:
        if any(boxes == targets for _, boxes in frontier):
            return moves
        following = []
        for player, boxes in frontier:
            for action in DELTAS:
                start.player, start.boxes = player, set(boxes)
                start.step(action)
                state = start.player, frozenset(start.boxes)
                if state not in seen:
                    seen.add(state)
                    following.append(state)
        frontier, moves = following, moves + 1
    raise AssertionError("no solution")
