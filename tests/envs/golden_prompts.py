"""Prompts of every world, word for word as they were: `python -m tests.envs.golden_prompts` writes them anew.

Each case is a few turns of two held-out tasks, half the expert's, half random, one of them unreadable. All prompts of
both styles are kept as digests; of the first task the short ones also as text, so that a difference can be read.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np

from flowjax.envs import Past, Style, find_world

FILE = Path(__file__).parent / "golden_prompts.json"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "alfworld": ("alfworld:Alfworld", {"path": "generated"}),
    "canvas": ("canvas:Canvas", {}),
    "code": ("code:Code", {"attempts": 3}),
    "math": ("math:Math", {}),
    "math with a calculator": ("math:Math", {"calculator": 3, "terms": 3}),
    "search": ("search:Search", {"documents": 300}),
    "search as in ASearcher": ("search:Search", {"documents": 300, "protocol": "asearcher", "access": True}),
    "sokoban": ("sokoban:Sokoban", {}),
    "webshop": ("webshop:WebShop", {"products": 100}),
}
TURNS, TASKS, WINDOW = 6, 2, 2
LONGEST_TEXT = 1500  # characters that are kept as they are


def prompts(name: str) -> Iterator[str]:
    """The messages of a case as JSON, in the order of play."""
    path, options = CASES[name]
    world, rng = find_world(f"flowjax.envs.{path}")(**options), np.random.default_rng(7)
    tasks, env = world.tasks("held_out", 0), world.env()
    for index in range(TASKS):
        task = tasks[index]
        assert task is not None
        observation, past = env.reset(task, task.seed), []
        for turn in range(1, TURNS + 1):
            for style in get_args(Style):
                yield json.dumps(world.prompt(observation, past[-WINDOW:], style), ensure_ascii=False)
                yield json.dumps(world.follow_up(observation, style), ensure_ascii=False)
            action = world.expert(env) if turn % 2 else world.random_action(observation, rng)
            action = "" if turn == 3 else action
            past.append(Past(turn, observation.view, action))
            step = env.step(action)
            observation = step.observation
            if step.terminal:
                break


def golden(name: str) -> dict[str, Any]:
    """What is kept of a case."""
    said = list(prompts(name))
    return {
        "digests": [hashlib.sha256(text.encode()).hexdigest()[:16] for text in said],
        "texts": {str(n): text for n, text in enumerate(said[: 4 * TURNS]) if len(text) <= LONGEST_TEXT},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: golden(name) for name in CASES}, indent=1, ensure_ascii=False) + "\n")
