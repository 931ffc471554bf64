"""Draw docs/images/state_graph.svg: episodes of a noisy expert on one Sokoban level. python docs/draw_state_graph.py"""

from pathlib import Path

import numpy as np

from flowjax.credit.estimators import estimate
from flowjax.credit.table import TurnTable, table_from_columns
from flowjax.envs.sokoban.levels import Shape, best_direction, generate, moves_to_go
from flowjax.envs.sokoban.rooms import Position, Room, grid, move, solved
from flowjax.report.pictures import state_graph, to_svg

LEVEL_SEED, EPISODE_SEED, EPISODES, MAX_TURNS, NOISE = 20, 1, 6, 8, 0.5


def play(room: Room, start: Position, rng: np.random.Generator) -> list[tuple[Position, Position]]:
    """One episode: the expert's move, or a random one."""
    moves, position = [], start
    while len(moves) < MAX_TURNS and not solved(room, position):
        direction = int(rng.integers(4)) if rng.random() < NOISE else best_direction(room, position)
        after = move(room, position, direction)
        moves.append((position, after))
        position = after
    return moves


def episodes_table(room: Room, episodes: list[list[tuple[Position, Position]]]) -> tuple[TurnTable, dict[int, str]]:
    """The table of the episodes, and a drawing of each state."""
    ids: dict[Position, int] = {}
    rows = []
    for number, moves in enumerate(episodes):
        won = solved(room, moves[-1][1])
        for step, (before, after) in enumerate(moves):
            state, following = (ids.setdefault(position, len(ids)) for position in (before, after))
            rows.append((0, number, step, state, following, 0.0, float(won), True, solved(room, after)))
    names = ("group", "trajectory", "step", "state", "next_state", "reward", "score", "valid", "terminal")
    columns = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    drawn = {}
    for position, index in ids.items():
        stuck = "" if solved(room, position) or moves_to_go(room, position) is not None else "\nstuck"
        drawn[index] = "\n".join(grid(room, position)) + stuck
    return table_from_columns(columns), drawn


def main() -> None:
    room, start = generate(np.random.default_rng(LEVEL_SEED), Shape())
    rng = np.random.default_rng(EPISODE_SEED)
    table, drawn = episodes_table(room, [play(room, start, rng) for _ in range(EPISODES)])
    # The step part alone: the episode's part is the same for all turns of an episode, good and bad.
    step_part = np.asarray(estimate(table, "rewardflow") - estimate(table, "grpo"))
    graph = state_graph(table, step_part, labels=drawn)
    Path(__file__).with_name("images").joinpath("state_graph.svg").write_text(to_svg(graph), encoding="utf-8")


if __name__ == "__main__":
    main()
