"""Shortest solutions: A* against search backwards from all ends, and rooms of many boxes."""

import numpy as np
import pytest

from flowjax.envs import WorldError
from flowjax.envs.sokoban import Sokoban, levels
from flowjax.envs.sokoban.levels import Shape, generate
from flowjax.envs.sokoban.rooms import Position, Room, grid, move, parse, solved
from flowjax.records import Task


@pytest.mark.parametrize("shape", [Shape(), Shape(7, 6, boxes=2), Shape(7, 7, boxes=3)], ids=str)
def test_both_searches_agree_everywhere(shape: Shape):
    rng = np.random.default_rng(0)
    for _ in range(15):
        room, position = generate(rng, shape)
        known = levels.distances(room)
        for _ in range(4):
            found = levels.shortest_solution(room, position)
            expected = known.get((position.player, position.boxes))
            assert (None if found is None else len(found)) == expected
            assert found is None or ends_solved(room, position, found)
            for _ in range(6):  # astray, often beyond saving
                position = move(room, position, int(rng.integers(4)))


def ends_solved(room: Room, position: Position, directions: tuple[int, ...]) -> bool:
    for direction in directions:
        assert not solved(room, position)
        position = move(room, position, direction)
    return solved(room, position)


def test_the_expert_solves_large_rooms_of_four_boxes():
    shape = Shape(10, 10, boxes=4)
    rng = np.random.default_rng(1)
    env = Sokoban(rows=10, boxes=4).env()
    sizes = []
    for index in range(4):
        room, position = generate(rng, shape)
        sizes.append(levels.is_small(room))
        expected = levels.moves_to_go(room, position)
        assert expected is not None
        level = "\n".join(grid(room, position))
        env.reset(Task(str(index), "sokoban", 0, {"level": level}), 0)
        steps = [env.step(Sokoban().expert(env)) for _ in range(expected)]
        assert [step.terminal for step in steps] == [False] * (expected - 1) + [True]
    assert not all(sizes)


def test_positions_beyond_saving_are_known_at_once():
    wide = ["#" * 12, *["#" + "_" * 10 + "#"] * 8, "#" * 12]
    wide[1], wide[4] = "#X________P#", "#_X_X_OOO__#"
    room, position = parse("\n".join(wide))
    assert not levels.is_small(room)
    assert levels.moves_to_go(room, position) is None
    assert move(room, position, levels.best_direction(room, position)) != position


def test_a_level_too_hard_for_the_expert_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(levels, "MAX_EXPANDED", 200)
    wide = "\n".join(["#" * 14, *["#" + "_" * 12 + "#"] * 4, "#P_X_X_X_____#", "#" + "_" * 9 + "OOO#", "#" * 14])
    env = Sokoban().env()
    env.reset(Task("t", "sokoban", 0, {"level": wide}), 0)
    with pytest.raises(WorldError, match="use fewer boxes or a smaller room"):
        Sokoban().expert(env)


@pytest.mark.parametrize("most", [40, 0])
def test_a_source_of_tasks_leaves_out_levels_too_hard_for_the_expert(most: int, monkeypatch: pytest.MonkeyPatch):
    """And is refused where there are no others."""
    monkeypatch.setattr(levels, "MAX_EXPANDED", most)
    shape, refusals, real = Shape(10, 10, boxes=4, min_moves=5), 0, levels.moves_to_go

    def counted(room: Room, position: Position) -> int | None:
        nonlocal refusals
        try:
            return real(room, position)
        except WorldError:
            refusals += 1
            raise

    monkeypatch.setattr(levels, "moves_to_go", counted)
    if not most:
        monkeypatch.setattr(levels, "is_small", lambda room: False)
        with pytest.raises(WorldError, match="use fewer boxes or a smaller room"):
            generate(np.random.default_rng(0), shape)
        assert refusals == levels.MAX_HARD
        return
    for seed in range(4):
        room, position = generate(np.random.default_rng(seed), shape)
        assert (real(room, position) or 0) >= 5
    assert refusals
