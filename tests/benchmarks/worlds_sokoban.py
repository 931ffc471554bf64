"""Steps per second of Sokoban: thousands of boards at once, one board in Python, and gym_sokoban.

python -m tests.benchmarks.worlds_sokoban
"""

import contextlib
import io
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from flowjax.envs.sokoban import Sokoban, batched
from flowjax.envs.sokoban.levels import Shape, generate
from flowjax.envs.sokoban.rooms import DIRECTIONS, grid
from flowjax.records import Task

BOARDS, STEPS, LEVELS = 8192, 100, 256
EPISODE_STEPS = 15


def steps_per_s(seconds: float, steps: int, run: Callable[[], object]) -> float:
    """Steps per second of calls of `run`, each of so many steps; the first call is not counted."""
    run()
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        run()
        calls += 1
    return calls * steps / (time.perf_counter() - started)


@partial(jax.jit, static_argnames="steps")
def play(
    levels: batched.Boards, boards: batched.Boards, key: jax.Array, *, steps: int
) -> tuple[batched.Boards, jax.Array]:
    """Random moves on all boards, each begun anew on another level when its episode is over; the sum of rewards."""

    def advance(carry: tuple[batched.Boards, jax.Array], key: jax.Array):
        boards, total = carry
        drawn = jax.random.bits(key, (len(boards),), jnp.uint32)
        boards, reward, over = batched.step(boards, (drawn % 4).astype(jnp.int32) + 1, max_steps=EPISODE_STEPS)
        which = (drawn >> 8) % len(levels)
        return (batched.reset_where(over, boards, levels, which), total + reward.sum()), None

    return jax.lax.scan(advance, (boards, jnp.float32(0)), jax.random.split(key, steps))[0]


def many_boards(seconds: float, shape: Shape) -> float:
    rng = np.random.default_rng(0)
    levels = batched.from_levels([generate(rng, shape) for _ in range(LEVELS)])
    boards = batched.reset(levels, jnp.arange(BOARDS) % LEVELS)
    key = jax.random.key(0)
    return steps_per_s(seconds, BOARDS * STEPS, lambda: jax.block_until_ready(play(levels, boards, key, steps=STEPS)))


def one_board(seconds: float) -> float:
    env = Sokoban().env()
    actions = [DIRECTIONS[i] for i in np.random.default_rng(0).integers(4, size=EPISODE_STEPS)]
    room, position = generate(np.random.default_rng(0), Shape())
    task = Task("level", "sokoban", 0, {"level": "\n".join(grid(room, position))})

    def episode() -> None:
        env.reset(task, 0)
        for action in actions:
            env.step(action)

    return steps_per_s(seconds, EPISODE_STEPS, episode)


def gym_sokoban(seconds: float) -> float:
    """Steps of gym_sokoban with its cheapest picture (`tiny_rgb_array`); it draws one at every step."""
    with contextlib.redirect_stderr(io.StringIO()):  # gym says at length that it is old
        from gym_sokoban.envs.sokoban_env import SokobanEnv

        np.random.seed(0)  # the global generator is what it draws levels from
        env = SokobanEnv(dim_room=(6, 6), num_boxes=1, max_steps=EPISODE_STEPS)
    assert env.room_state is not None and env.player_position is not None
    start = env.room_fixed, env.room_state.copy(), env.player_position.copy()
    actions = (1 + np.random.default_rng(0).integers(4, size=EPISODE_STEPS)).tolist()

    def episode() -> None:
        env.room_state, env.player_position = start[1].copy(), start[2].copy()
        env.num_env_steps = env.boxes_on_target = 0
        for action in actions:
            env.step(action, observation_mode="tiny_rgb_array")

    return steps_per_s(seconds, EPISODE_STEPS, episode)


def benchmark(seconds: float = 2.0) -> dict[str, float]:
    """Steps per second, `seconds` for each."""
    return {
        f"sokoban batched, {BOARDS:,} boards of 6x6, steps/s": many_boards(seconds, Shape()),
        f"sokoban batched, {BOARDS:,} boards of 10x10 with 2 boxes, steps/s": many_boards(seconds, Shape(10, 10, 2)),
        "sokoban, one board in Python, steps/s": one_board(seconds),
        "gym_sokoban, steps/s": gym_sokoban(seconds),
    }


def main() -> None:
    measured = benchmark()
    baseline = measured["gym_sokoban, steps/s"]
    print("| | steps/s | against gym_sokoban |\n|---|---|---|")
    for name, value in measured.items():
        print(f"| {name.removesuffix(', steps/s')} | {value:,.0f} | {value / baseline:,.1f} |")


if __name__ == "__main__":
    main()
