"""Small data for the ALFWorld world, in the format of the real: `python -m data.alfworld.build --out=FOLDER --seed=0`.

Writes json_2.1.1/{train,valid_seen,valid_unseen}/<task>/<trial>/ with traj_data.json, initial_state.pddl and
game.tw-pddl, which `env.world.path`, ALFWORLD_DATA and alfworld itself take. A game is marked solvable if the
scripted expert wins it in the engine; what it did is the walkthrough. No planner is asked.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowjax.envs import Split, WorldError
from flowjax.envs.alfworld import Alfworld, generate, world
from flowjax.records import Task

if TYPE_CHECKING:
    from flowjax.envs.alfworld.env import AlfworldEnv

MAX_STEPS = 60  # of the expert, whose longest way is some 15
SPLITS: dict[str, tuple[Split, world.HeldOut]] = {  # folder -> our split, and what held-out means in it
    "train": ("train", "seen"),
    "valid_seen": ("held_out", "seen"),
    "valid_unseen": ("held_out", "unseen"),
}


def walkthrough(env: "AlfworldEnv", task: Task) -> list[str] | None:
    """The expert's way through a generated game; None if it does not win."""
    env.reset(task, 0)
    taken: list[str] = []
    while len(taken) < MAX_STEPS:
        taken.append(env.best_action())
        if env.step(taken[-1]).terminal:
            return taken
    return None


def write_game(folder: Path, env: "AlfworldEnv", task: Task) -> bool:
    """Write one game; returns whether it is solvable."""
    spec = generate.Spec.read(task.payload)
    game, way = generate.game_file(spec), walkthrough(env, task)
    game.update(solvable=way is not None, walkthrough=way)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "initial_state.pddl").write_text(game["pddl_problem"])
    (folder / world.GAME).write_text(json.dumps(game))
    (folder / world.TRAJECTORY).write_text(json.dumps(generate.trajectory_file(spec, folder.name), indent=4))
    return way is not None


def build(out: Path, *, seed: int, counts: dict[str, int]) -> dict[str, int]:
    """Write so many games of each folder of `SPLITS`; returns how many of each are solvable. The same seed writes the
    same bytes."""
    env = Alfworld(path=world.GENERATED, games_kept=1).env()
    solvable = {}
    for name, count in counts.items():
        split, held_out = SPLITS[name]
        given = world.AlfworldOptions(path=world.GENERATED, held_out=held_out)
        games = world.GeneratedTasks(split, seed, given)
        folder = out / world.FOLDER / name
        won = 0
        for index in range(count):
            task = games(index)
            trial = f"trial_T{task.payload['seed']:010d}_{index:06d}"
            won += write_game(folder / generate.Spec.read(task.payload).folder / trial, env, task)
        solvable[name] = won
    return solvable


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m data.alfworld.build")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    for name, count in (("train", 120), ("valid_seen", 24), ("valid_unseen", 24)):
        parser.add_argument(f"--{name}", type=int, default=count, help="games")
    given = parser.parse_args(argv)
    try:
        solvable = build(given.out, seed=given.seed, counts={name: getattr(given, name) for name in SPLITS})
    except WorldError as error:
        sys.exit(str(error))
    for name, count in solvable.items():
        print(f"{name}: {getattr(given, name)} games, {count} solvable")


if __name__ == "__main__":
    main(sys.argv[1:])
