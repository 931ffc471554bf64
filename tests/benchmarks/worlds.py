"""Speed of every world beside the stock engines, and what experts and random policies score:

    python -m tests.benchmarks.worlds [--seconds=2] [--only=sokoban,search]

Rates are per second of one process unless they say otherwise. Scores are the mean `success` over held-out tasks of the
generated data; the random policy takes legal actions.
"""

import argparse
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from flowjax.envs import Env, Observation, find_world


@dataclass(frozen=True)
class Measured:
    """A world, the function that times it, and how its scores are taken."""

    path: str  # of the world, after flowjax.envs.
    rates: Callable[[float], Mapping[str, float]] | None
    tasks: int
    turns: int
    options: Mapping[str, Any] = field(default_factory=dict)


def _function(module: str, name: str) -> Callable[[float], Mapping[str, float]]:
    """Imported when called: a world's libraries may be missing."""
    return lambda seconds: getattr(importlib.import_module(f"tests.benchmarks.{module}"), name)(seconds)


WORLDS = {
    "alfworld": Measured(
        "flowjax.envs.alfworld:Alfworld", _function("worlds_alfworld", "benchmark_steps"), 60, 50, {"path": "generated"}
    ),
    "code": Measured("code:Code", _function("worlds_code", "benchmark"), 100, 1),
    "math": Measured("math:Math", None, 100, 1),
    "search": Measured(
        "flowjax.envs.search:Search", _function("worlds_search", "benchmark"), 100, 4, {"documents": 1000, "topk": 1}
    ),
    "sokoban": Measured(
        "flowjax.envs.sokoban:Sokoban", _function("worlds_sokoban", "benchmark"), 100, 15, {"max_moves": 15}
    ),
    "webshop": Measured("webshop:WebShop", _function("worlds_webshop", "benchmark_steps"), 100, 15),
}


def scores(name: str, measured: Measured) -> dict[str, float]:
    """Mean success of the world's expert and of random legal actions."""
    world = find_world(f"flowjax.envs.{measured.path}")(**measured.options)
    source = world.tasks("held_out", 0)
    env = world.env()
    rng = np.random.default_rng(0)
    players: dict[str, Callable[[Env, Observation], str]] = {
        "expert": lambda env, observation: world.expert(env),
        "random": lambda env, observation: world.random_action(observation, rng),
    }
    means = {}
    for player, act in players.items():
        successes = []
        for index in range(measured.tasks):
            task = source[index]
            assert task is not None
            observation, success = env.reset(task, 0), 0.0
            for _ in range(measured.turns):
                step = env.step(act(env, observation))
                observation, success = step.observation, step.outcome["success"]
                if step.terminal:
                    break
            successes.append(success)
        means[player] = float(np.mean(successes))
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each timing")
    parser.add_argument("--only", default=",".join(WORLDS), help="worlds, with commas between")
    arguments = parser.parse_args()
    table = Table("world", "measure", "value")
    for name in arguments.only.split(","):
        measured = WORLDS[name]
        if measured.rates is not None:
            for measure, value in measured.rates(arguments.seconds).items():
                table.add_row(name, measure.replace("_", " "), f"{value:,.2f}" if value < 100 else f"{value:,.0f}")
        for player, mean in scores(name, measured).items():
            table.add_row(name, f"success of {player}, {measured.tasks} tasks", f"{mean:.1%}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
