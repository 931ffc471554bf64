"""What is held out under one data seed is not trained on under any other, in every world."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from flowjax.envs import find_world
from flowjax.envs.code.problems import PROBES, Recipe
from flowjax.envs.sokoban.rooms import parse, room_key
from flowjax.envs.webshop.goals import goal_words

SEEDS = range(5)
TASKS = 150  # of each split and seed, fewer where there are fewer


def computed(payload: Mapping[str, Any]) -> tuple[str, ...]:
    """A function by what it gives on probes, however it is worded."""
    recipe = Recipe(payload["kind"], tuple(tuple(step) for step in payload["steps"]))
    return (recipe.kind, *(repr(recipe.value(x)) for x in PROBES[recipe.kind]))


def wanted(payload: Mapping[str, Any]) -> tuple[Any, ...]:
    """A purchase without its price."""
    return tuple(sorted(goal_words(payload["goal"]["instruction"].split(", and price")[0])))


CASES: list[tuple[str, dict[str, Any], Callable[[Mapping[str, Any]], Any]]] = [
    ("flowjax.envs.alfworld:Alfworld", {"path": "generated"}, lambda p: p["scene"]),
    (
        "flowjax.envs.alfworld:Alfworld",
        {"path": "generated", "held_out": "seen"},
        lambda p: (p["scene"], p["task_type"], p["object"], p["target"]),
    ),
    ("flowjax.envs.canvas:Canvas", {}, lambda p: p["text"]),
    ("flowjax.envs.code:Code", {}, computed),
    ("flowjax.envs.math:Math", {}, lambda p: p["question"]),
    ("flowjax.envs.search:Search", {"hops": (1, 2)}, lambda p: p["question"]),
    ("flowjax.envs.search:Search", {"documents": 300}, lambda p: p["chain"][-1]),  # nor does an answer come back
    ("flowjax.envs.sokoban:Sokoban", {}, lambda p: room_key(parse(p["level"])[0])),
    ("flowjax.envs.webshop:WebShop", {"products": 300}, wanted),
    ("flowjax.envs.webshop:WebShop", {"products": 300, "goals": "human"}, wanted),
    (
        "flowjax.envs.webshop:WebShop",
        {"products": 100, "split_by": "index"},
        lambda p: (p["goal"]["asin"], tuple(p["goal"]["options"])),
    ),
]


@pytest.mark.parametrize(("name", "options", "content"), CASES)
def test_no_seed_trains_on_what_another_holds_out(name: str, options: dict[str, Any], content: Callable):
    world = find_world(name)(**options)
    seen: dict[str, list[set[Any]]] = {"train": [], "held_out": []}
    for split, contents in seen.items():
        for seed in SEEDS:
            tasks = world.tasks(split, seed)  # pyright: ignore[reportArgumentType] (a split)
            found = [tasks[index] for index in range(min(TASKS, len(tasks)))]
            contents.append({content(task.payload) for task in found if task})
            assert len(contents[-1]) > 1
    assert not set().union(*seen["train"]) & set().union(*seen["held_out"])
