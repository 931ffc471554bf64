"""Steps per second of ALFWorld beside the stock engine, and the scores of its expert and of random play.

python -m tests.benchmarks.worlds_alfworld
"""

import time
from collections.abc import Callable

import numpy as np

from flowjax.envs.alfworld import Alfworld
from flowjax.envs.alfworld.generate import Spec, game_file
from flowjax.envs.alfworld.world import AlfworldOptions, GeneratedTasks
from tests.envs.stock_alfworld import StockGame

GAMES, EPISODE_STEPS = 6, 30


def until(seconds: float, play: Callable[[int], int]) -> float:
    """Steps per second of `play`, which plays the index-th game and returns how many steps that were."""
    started, steps, index = time.perf_counter(), 0, 0
    while index < 1 or time.perf_counter() - started < seconds:
        steps += play(index)
        index += 1
    return steps / (time.perf_counter() - started)


def benchmark_steps(seconds: float) -> dict[str, float]:
    """Random play of six generated games, one of each kind: steps and resets per second of one process.

    `steps`: with a reset every 30 steps, the games being known; `stock_steps`: the same without its resets;
    `first_resets` and `stock_resets`: resets to a game that is new to the process; `resets`: to one that is not.
    """
    tasks, rng = GeneratedTasks("train", 0, AlfworldOptions()), np.random.default_rng(0)
    env = Alfworld(path="generated").env()
    started = time.perf_counter()
    for index in range(GAMES):
        env.reset(tasks(index), 0)
    first_resets = GAMES / (time.perf_counter() - started)

    def ours(index: int) -> int:
        observation = env.reset(tasks(index % GAMES), 0)
        for _ in range(EPISODE_STEPS):
            observation = env.step(Alfworld().random_action(observation, rng)).observation
        return EPISODE_STEPS

    def again(index: int) -> int:
        env.reset(tasks(index % GAMES), 0)
        return 1

    started = time.perf_counter()
    stock = [StockGame(game_file(Spec.read(tasks(index).payload))) for index in range(GAMES)]
    stock_resets = GAMES / (time.perf_counter() - started)

    def theirs(index: int) -> int:
        one = stock[index % GAMES]
        one.step(one.commands[rng.integers(len(one.commands))])
        return 1

    return {
        "steps": until(seconds, ours),
        "stock_steps": until(seconds, theirs),
        "resets": until(seconds / 2, again),
        "first_resets": first_resets,
        "stock_resets": stock_resets,
    }


def scores(games: int = 60, max_turns: int = 50) -> dict[str, float]:
    """Share of held-out games won by the expert and by random legal play within so many turns, and the expert's mean
    number of turns."""
    tasks, rng = GeneratedTasks("held_out", 0, AlfworldOptions()), np.random.default_rng(0)
    env = Alfworld(path="generated").env()
    won = {"expert": 0, "random": 0}
    turns = 0
    for index in range(games):
        for player in won:
            observation = env.reset(tasks(index), 0)
            for _ in range(max_turns):
                best = Alfworld().expert(env) if player == "expert" else Alfworld().random_action(observation, rng)
                step = env.step(best)
                observation = step.observation
                turns += player == "expert"
                if step.terminal:
                    won[player] += 1
                    break
    return {**{player: count / games for player, count in won.items()}, "expert_turns": turns / games}


def main() -> None:
    rate = benchmark_steps(5.0)
    print(f"steps/s of one process   {rate['steps']:8.0f}   stock {rate['stock_steps']:6.1f}", end="")
    print(f"   ratio {rate['steps'] / rate['stock_steps']:.0f}")
    print(f"resets/s to a new game   {rate['first_resets']:8.1f}   stock {rate['stock_resets']:6.2f}", end="")
    print(f"   ratio {rate['first_resets'] / rate['stock_resets']:.1f}")
    print(f"resets/s to a known game {rate['resets']:8.0f}")
    score = scores()
    print(f"60 held-out games: expert {score['expert']:.0%} in {score['expert_turns']:.1f} turns on average, ", end="")
    print(f"random legal actions {score['random']:.0%} within 50")


if __name__ == "__main__":
    main()
