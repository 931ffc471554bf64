"""Expert and random scores on held-out Sokoban levels: python -m tests.benchmarks.sokoban_scores"""

from typing import Any

import numpy as np

from flowjax.envs.sokoban import Sokoban
from flowjax.envs.sokoban.levels import moves_to_go

CASES: list[tuple[dict[str, Any], int, int]] = [  # options, turns, levels
    ({"max_moves": 15}, 15, 500),
    ({}, 12, 500),
    ({"min_moves": 4, "max_moves": 12}, 12, 500),
    ({"rows": 8, "max_moves": 15}, 15, 500),
    ({"rows": 8}, 15, 500),
    ({"boxes": 2, "max_moves": 20}, 20, 300),
    ({"rows": 8, "boxes": 2, "max_moves": 25}, 25, 300),
    ({"rows": 10, "boxes": 4, "max_moves": 60}, 60, 20),
]


def scores(options: dict[str, Any], turns: int, levels: int) -> tuple[np.ndarray, float, float]:
    """Lengths of the shortest solutions, and the shares of levels that the expert and a random policy solve in time.

    Raises:
        AssertionError: the expert takes more moves than a shortest solution has.
    """
    source = Sokoban(**options).tasks("held_out", 0)
    env = Sokoban(**options).env()
    rng = np.random.default_rng(0)
    lengths, lucky = [], 0.0
    for index in range(levels):
        task = source[index]
        assert task is not None
        observation = env.reset(task, 0)
        length = moves_to_go(env.room, env.position)
        assert length is not None
        lengths.append(length)
        for _ in range(length - 1):
            assert not env.step(Sokoban().expert(env)).terminal
        assert env.step(Sokoban().expert(env)).outcome["success"] == 1.0
        env.reset(task, 0)
        steps = (env.step(Sokoban().random_action(observation, rng)) for _ in range(turns))
        lucky += any(step.terminal for step in steps)
    return np.array(lengths), float(np.mean(np.array(lengths) <= turns)), lucky / levels


def main() -> None:
    print("| level | turns | levels | mean (longest) solution | expert | random |\n|---|---|---|---|---|---|")
    for options, turns, levels in CASES:
        lengths, expert, random = scores(options, turns, levels)
        rows, boxes = options.get("rows", 6), options.get("boxes", 1)
        bound = "".join(f", {name} {options[name]}" for name in ("min_moves", "max_moves") if name in options)
        print(
            f"| {rows}x{rows}, {boxes} box{'es' if boxes > 1 else ''}{bound} | {turns} | {levels} | "
            f"{lengths.mean():.1f} ({lengths.max()}) | {expert:.1%} | {random:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
