"""Messages that a dataflow must refuse: every valid one, with each of its fields made wrong in turn."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, cast

import msgpack

Message = dict[str, Any]
WRONG = (None, True, -1, 2**63, 1.5, float("nan"), "", "x" * 100_000, b"\xff", [], [[]], {}, {"a": 1})


def on_the_wire(body: Any, schema: Any = 1) -> bytes:
    return cast(bytes, msgpack.packb({"schema": schema, "body": body}))


def array(kind: str, count: int, data: bytes | None = None) -> Message:
    size = {"<i4": 4, "<f4": 4, "|b1": 1}[kind]
    return {"__array__": kind, "shape": [count], "data": bytes(size * count) if data is None else data}


def episode(lease: Message, **changes: Any) -> Message:
    """A well-formed Episode of one turn, as plain maps."""
    names = {"group_id": lease["group_id"], "task_id": lease["task"]["task_id"], "seed": lease["seed"]}
    turn = {
        "__record__": "Turn",
        "policy": "agent",
        "version": 0,
        "prompt_ids": array("<i4", 3),
        "sampled_ids": array("<i4", 2),
        "logprobs": array("<f4", 2),
        "finish_reason": "stop",
        "state_key": 1,
        "next_state_key": 2,
        "env_reward": 0.0,
        "valid": True,
        "terminal": True,
        "generate_s": 0.1,
        "env_s": 0.1,
        "shown": "{}",
        "spans": [],
    }
    trajectory = {
        "__record__": "Trajectory",
        "trajectory_id": lease["episode_id"],
        **names,
        "turns": [turn],
        "outcome": {"success": 1.0},
        "status": "ok",
        "error": "",
        "policy": "agent",
    }
    whole = {
        "__record__": "Episode",
        "episode_id": lease["episode_id"],
        **names,
        "trajectories": [trajectory],
        "outcome": {"success": 1.0},
        "status": "ok",
        "error": "",
    }
    return whole | changes


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a nested message something stands."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths(child, (*path, key))


def changed(message: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at `path`."""
    copy = deepcopy(message)
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


def without(message: Any, path: tuple[Any, ...]) -> Any:
    """A copy that lacks what stands at `path`."""
    copy = deepcopy(message)
    place = copy
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return copy
