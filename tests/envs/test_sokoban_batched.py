"""The batched boards against gym_sokoban, against the single-board world, and against themselves."""

import contextlib
import io

import jax
import numpy as np
import pytest

from flowjax.envs import WorldError
from flowjax.envs.sokoban import Sokoban, batched
from flowjax.envs.sokoban.levels import Shape, best_direction, generate
from flowjax.envs.sokoban.rooms import DIRECTIONS, SYMBOLS, Position, Room, grid, move, solved
from flowjax.envs.sokoban.world import SokobanEnv
from flowjax.records import Task

with contextlib.redirect_stderr(io.StringIO()):  # gym says at length that it is old
    from gym_sokoban.envs.sokoban_env import SokobanEnv

STEPS = 40
Level = tuple[Room, Position]


def levels_of(shape: Shape, count: int, seed: int = 0) -> list[Level]:
    rng = np.random.default_rng(seed)
    return [generate(rng, shape) for _ in range(count)]


def gym_env(level: Level) -> SokobanEnv:
    """The level in gym_sokoban's numbers; generated levels start with no box on a target, as its own do."""
    room, position = level
    env = SokobanEnv(
        dim_room=(room.rows, room.columns), num_boxes=room.targets.bit_count(), max_steps=STEPS, reset=False
    )
    cells = np.array([[SYMBOLS.index(symbol) for symbol in line] for line in grid(room, position)])
    env.room_fixed = np.select([cells == 0, np.isin(cells, (2, 3, 6))], [0, 2], 1)
    env.room_state = np.where(cells == 6, 5, cells)
    env.player_position = np.argwhere(env.room_state == 5)[0]
    env.num_env_steps = env.reward_last = env.boxes_on_target = 0
    return env


def as_drawn(env: SokobanEnv) -> np.ndarray:
    assert env.room_state is not None
    return np.where((env.room_state == 5) & (env.room_fixed == 2), 6, env.room_state)


def actions_for(levels: list[Level], seed: int) -> np.ndarray:
    """Actions [steps, boards]: most boards follow the expert half of the time, so that boxes reach and leave targets;
    the others draw from all nine."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(batched.ACTIONS, size=(STEPS, len(levels)))
    for board, (room, position) in enumerate(levels):
        follows = board % 4 > 0
        for step in range(STEPS):
            if follows and rng.random() < 0.5:
                actions[step, board] = 1 + best_direction(room, position)
            action = actions[step, board]
            after = move(room, position, (action - 1) % 4) if action else position
            position = position if action > 4 and after.boxes != position.boxes else after
    return actions


@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(8, 8, boxes=2), Shape(7, 9, boxes=3), Shape(10, 6, boxes=2)],
    ids=lambda shape: f"{shape.rows}x{shape.columns}x{shape.boxes}",
)
def test_equal_to_gym_sokoban_step_by_step(shape: Shape):
    levels = levels_of(shape, 50)
    boards = batched.from_levels(levels)
    peers = [gym_env(level) for level in levels]
    running = np.ones(len(levels), bool)
    ends = pushes = 0
    for step, actions in enumerate(actions_for(levels, seed=1)):
        boards, rewards, over = batched.step(boards, actions, max_steps=STEPS)
        drawn = np.asarray(batched.symbols(boards))
        for board in np.flatnonzero(running):
            peer = peers[board]
            _, reward, done, info = peer.step(int(actions[board]), observation_mode="tiny_rgb_array")
            np.testing.assert_array_equal(drawn[board], as_drawn(peer))
            assert float(rewards[board]) == pytest.approx(reward, abs=1e-5)
            assert bool(over[board]) == done
            pushes += info["action.moved_box"]
            ends += done and step < STEPS - 1
        running &= ~np.asarray(over)
    assert not running.any()
    assert ends >= 10 and pushes >= 50


def test_equal_to_the_world_of_one_board():
    levels = levels_of(Shape(boxes=2), 40)
    boards = batched.from_levels(levels)
    envs = [Sokoban(boxes=2).env() for _ in levels]
    for env, (room, position) in zip(envs, levels, strict=True):
        env.reset(Task("t", "sokoban", 0, {"level": "\n".join(grid(room, position))}), 0)
    for actions in np.where((acted := actions_for(levels, seed=2)) > 4, acted - 4, acted):
        boards, rewards, over = batched.step(boards, actions)
        for env, action, reward, done, level in zip(
            envs, actions, rewards, over, batched.to_levels(boards), strict=True
        ):
            step = env.step(DIRECTIONS[action - 1] if action else "")
            assert (env.room, env.position) == level
            assert step.reward == pytest.approx(float(reward), abs=1e-5)
            assert step.terminal == bool(done)


def test_levels_come_back_as_they_were_and_boards_begin_anew():
    levels = levels_of(Shape(9, 13, boxes=4), 20)
    pool = batched.from_levels(levels)
    assert len(pool) == 20 and pool.floor.shape == (4, 20)
    assert batched.to_levels(pool) == levels
    which = np.array([3, 3, 19, 0])
    boards = batched.reset(pool, which)
    assert batched.to_levels(boards) == [levels[i] for i in which]
    boards, _, _ = batched.step(boards, np.array([1, 2, 3, 4]))
    over = np.array([True, False, True, False])
    anew = batched.reset_where(over, boards, pool, np.array([7, 7, 8, 8]))
    after = batched.to_levels(boards)
    assert batched.to_levels(anew) == [levels[7], after[1], levels[8], after[3]]
    assert anew.steps.tolist() == [0, 1, 0, 1]


def test_what_is_over_stays_as_it_is():
    levels = levels_of(Shape(), 30)
    boards = batched.from_levels(levels)
    for _ in range(11):
        boards, _, _ = batched.step(boards, np.full(30, 1), max_steps=12)
    boards, _, over = batched.step(boards, np.full(30, 1), max_steps=12)
    assert np.asarray(over).all()
    after, rewards, over = batched.step(boards, np.full(30, 2), max_steps=12)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), after, boards))
    assert not np.asarray(rewards).any() and np.asarray(over).all()


def test_numbers_that_are_no_action_do_nothing():
    boards = batched.from_levels(levels_of(Shape(), 8))
    after, rewards, _ = batched.step(boards, np.array([-1, -7, 9, 10, 1000, -(2**31), 2**31 - 1, 0]))
    assert batched.to_levels(after) == batched.to_levels(boards)
    np.testing.assert_allclose(rewards, -0.1, atol=1e-6)


def test_a_rollout_is_one_compiled_loop():
    levels = levels_of(Shape(), 16)
    actions = actions_for(levels, seed=3)
    start = batched.from_levels(levels)

    def advance(boards: batched.Boards, acts: jax.Array):
        boards, rewards, _ = batched.step(boards, acts)
        return boards, rewards

    end, rewards = jax.jit(lambda boards, acts: jax.lax.scan(advance, boards, acts))(start, actions)
    for acts in actions:
        start, reward, _ = batched.step(start, acts)
        np.testing.assert_array_equal(reward, rewards[int(start.steps.max()) - 1])
    assert batched.to_levels(end) == batched.to_levels(start)
    assert any(solved(*level) for level in batched.to_levels(end))


def test_levels_of_two_sizes_are_refused():
    with pytest.raises(WorldError, match="one size"):
        batched.from_levels([*levels_of(Shape(), 1), *levels_of(Shape(7, 7), 1)])
