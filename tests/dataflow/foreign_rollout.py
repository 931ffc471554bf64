"""A rollout service that shares no code with flowjax: it guesses numbers, and speaks as docs/dataflow.md says.

    python foreign_rollout.py URL VERSION_FILE

The "engine" is a number in a file: the version that a trainer has made last. An episode is one guess of a digit; it
is right when it equals the task's seed modulo 4, and later versions guess better.
"""

import math
import random
import struct
import sys
import urllib.request
from pathlib import Path
from typing import Any

import msgpack

SLOTS = 16


def post(url: str, name: str, **body: Any) -> dict[str, Any]:
    data = msgpack.packb({"schema": 1, "body": {"worker": "foreign", **body}})
    with urllib.request.urlopen(f"{url}/{name}", data=data) as answer:
        return msgpack.unpackb(answer.read())["body"]


def array(kind: str, values: list) -> dict[str, Any]:
    code = {"<i4": "i", "<f4": "f", "|b1": "?"}[kind]
    return {"__array__": kind, "shape": [len(values)], "data": struct.pack(f"<{len(values)}{code}", *values)}


def play(lease: dict[str, Any], version: int) -> dict[str, Any]:
    """One guess, as an Episode record."""
    secret, chance = lease["task"]["seed"] % 4, min(0.25 + 0.1 * version, 0.95)
    right = random.Random(lease["seed"] * 1000 + version).random() < chance
    guess = secret if right else (secret + 1) % 4
    turn = {
        "__record__": "Turn",
        "policy": "agent",
        "version": version,
        "prompt_ids": array("<i4", [10, 11]),
        "sampled_ids": array("<i4", [guess]),
        "logprobs": array("<f4", [math.log(chance if right else (1 - chance) / 3)]),
        "finish_reason": "stop",
        "state_key": 1,
        "next_state_key": 2 + guess,
        "env_reward": float(right),
        "valid": True,
        "terminal": True,
    }
    names = {name: lease[name] for name in ("group_id", "seed")} | {"task_id": lease["task"]["task_id"]}
    outcome = {"success": float(right)}
    trajectory = {
        "__record__": "Trajectory",
        "trajectory_id": lease["episode_id"],
        **names,
        "turns": [turn],
        "outcome": outcome,
        "policy": "agent",
    }
    return {
        "__record__": "Episode",
        "episode_id": lease["episode_id"],
        **names,
        "trajectories": [trajectory],
        "outcome": outcome,
    }


def main(url: str, version_file: Path) -> None:
    while True:
        version = int(version_file.read_text()) if version_file.exists() else 0
        post(url, "versions", policy="agent", serving=version)
        answer = post(url, "lease", slots=SLOTS)
        if answer["state"] == "done":
            return
        items = [
            {"lease_id": lease["lease_id"], "episode": play(lease, lease["versions"].get("agent", version))}
            for lease in answer["leases"]
        ]
        if items:
            post(url, "episodes", items=items)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
