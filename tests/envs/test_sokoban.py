"""Sokoban: dynamics, keys, levels, splits, expert, prompts."""

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_sokoban import PlainSokoban, shortest
from two_processes import printed_in_two_processes

from flowjax.envs import Past, Split, WorldError
from flowjax.envs.sokoban import Sokoban
from flowjax.envs.sokoban.levels import moves_to_go
from flowjax.envs.sokoban.rooms import DIRECTIONS, Room, key, move, parse, room_key
from flowjax.envs.sokoban.world import SokobanEnv
from flowjax.published.worlds import PublishedSokoban
from flowjax.records import Task

SHAPES = [{}, {"rows": 8}, {"boxes": 2}, {"rows": 7, "columns": 9, "boxes": 3}]
CORRIDOR = "#######\n#P_X_O#\n#######"


def take(source: grain.MapDataset[Task], index: int) -> Task:
    task = source[index]
    assert task is not None
    return task


def play_of(level: str) -> SokobanEnv:
    env = Sokoban().env()
    env.reset(Task("t", "sokoban", 0, {"level": level}), 0)
    return env


@pytest.mark.parametrize("options", SHAPES)
def test_dynamics_equal_the_rules_written_down_again(options: dict):
    rng = np.random.default_rng(5)
    source = Sokoban(**options).tasks("train", 3)
    env = Sokoban(**options).env()
    for index in range(60):
        task = take(source, index)
        plain = PlainSokoban(task.payload["level"])
        assert list(env.reset(task, 0).view.rows) == plain.symbols()
        for _ in range(40):
            # half of the time the expert, so that boxes reach and leave targets
            action = Sokoban().expert(env) if rng.random() < 0.5 else [*DIRECTIONS, "", "still"][rng.integers(6)]
            step = env.step(action)
            reward, done = plain.step(action)
            assert list(step.observation.view.rows) == plain.symbols()
            assert step.reward == pytest.approx(reward)
            assert step.terminal == done == bool(step.outcome["success"])
            assert step.valid == (action in DIRECTIONS)
            if done:
                break


def test_rewards_of_a_known_level():
    env = play_of(CORRIDOR)
    assert [env.step("right").reward for _ in range(2)] == [-0.1, -0.1]
    last = env.step("right")
    assert last.reward == pytest.approx(10.9)
    assert last.terminal
    assert last.outcome == {"success": 1.0, "boxes_on_target": 1.0}


def test_after_the_end_nothing_changes():
    env = play_of(CORRIDOR)
    last = [env.step("right") for _ in range(3)][-1]
    after = env.step("left")
    assert (after.observation, after.reward, after.terminal, after.valid) == (last.observation, 0.0, True, False)
    assert after.outcome["success"] == 1.0


def test_a_box_pushed_off_its_target_costs_one():
    env = play_of("########\n#P√_X_O#\n########")
    step = env.step("right")
    assert step.reward == pytest.approx(-1.1)
    assert step.outcome == {"success": 0.0, "boxes_on_target": 0.0}


def effective_actions(env: SokobanEnv) -> list[str]:
    """Those that would change the state."""
    return [name for way, name in enumerate(DIRECTIONS) if move(env.room, env.position, way) != env.position]


def test_a_push_into_a_wall_is_legal_and_changes_nothing():
    env = play_of(CORRIDOR)
    before = env.position
    step = env.step("up")
    assert (step.valid, step.reward, step.terminal, env.position) == (True, -0.1, False, before)
    assert step.observation.legal_actions == DIRECTIONS
    assert effective_actions(env) == ["right"]


@given(reply=st.text(max_size=60), wrapped=st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_reply_crashes_and_no_unreadable_one_changes_the_state(reply: str, wrapped: bool):
    env = play_of(CORRIDOR)
    before = env.position
    text = f"<action>{reply}</action>" if wrapped else reply
    action = Sokoban().parse_action(text, DIRECTIONS)
    assert action is None or action in DIRECTIONS
    for attempt in (reply, action or ""):
        if attempt in DIRECTIONS:
            continue
        step = env.step(attempt)
        assert (step.valid, step.reward, step.terminal, env.position) == (False, -0.1, False, before)


def test_state_keys_are_equal_exactly_where_states_are():
    rng = np.random.default_rng(0)
    by_key: dict[int, tuple] = {}
    source = Sokoban(boxes=2).tasks("train", 0)
    env = Sokoban(boxes=2).env()
    for index in [*range(30), *range(30)]:
        task = take(source, index)
        plain = PlainSokoban(task.payload["level"])
        state_key = env.reset(task, 0).state_key
        for _ in range(20):
            assert by_key.setdefault(state_key, plain.snapshot()) == plain.snapshot()
            assert 0 <= state_key < 1 << 64
            action = DIRECTIONS[rng.integers(4)]
            plain.step(action)
            step = env.step(action)
            state_key = step.observation.state_key
            if step.terminal:
                break
    assert len(set(by_key.values())) == len(by_key)


def test_one_room_with_two_starts_is_two_states_of_one_level():
    near, far = parse("######\n#PX_O#\n#____#\n######"), parse("######\n#_X_O#\n#P___#\n######")
    assert near[0] == far[0]
    assert key(*near) != key(*far)
    env = play_of("######\n#_X_O#\n#P___#\n######")
    assert env.step("up").observation.state_key == key(*near)


@pytest.mark.parametrize("options", SHAPES[:3])
def test_the_expert_solves_every_level_in_the_fewest_moves(options: dict):
    source = Sokoban(**options).tasks("held_out", 1)
    env = Sokoban(**options).env()
    for index in range(40 if options else 100):
        task = take(source, index)
        env.reset(task, 0)
        expected = moves_to_go(env.room, env.position)
        assert expected is not None and expected >= 1
        if index < 10:
            assert expected == shortest(task.payload["level"])
        for _ in range(expected - 1):
            assert not env.step(Sokoban().expert(env)).terminal
        assert env.step(Sokoban().expert(env)).terminal


def test_in_a_lost_position_the_expert_still_moves():
    env = play_of("######\n#X__P#\n#___O#\n######")
    assert moves_to_go(env.room, env.position) is None
    assert Sokoban().expert(env) in effective_actions(env)


GOLDEN = [  # reply, then what the published projection makes of it: its action (0: none) and whether it counts as valid
    ("<think>a</think><action>up</action>", 1, True),
    ("<think>a</think><action>right, then downwards</action>", 2, True),
    ("<think>a</think><action>left</action><action>up</action>", 3, True),
    ("<action>RIGHT</action>", 4, False),
    ("<THINK>a</THINK><action>upwards</action>", 1, False),
    ("<think>a</think>up", 0, False),
    ("<think>a</think><action>stand still</action>", 5, True),
]


@pytest.mark.parametrize(("reply", "number", "valid"), GOLDEN)
def test_published_parsing_executes_what_the_published_projection_does(reply: str, number: int, valid: bool):
    action, counts = PublishedSokoban().parse_action(reply, DIRECTIONS) or "", PublishedSokoban().well_formed(reply)
    assert action == ("", "up", "down", "left", "right", "still")[number]
    assert (counts and action != "") == valid


def test_the_published_no_op_is_valid_and_moves_nothing():
    env, stock = PublishedSokoban().env(), play_of(CORRIDOR)
    before = env.reset(Task("t", "sokoban", 0, {"level": CORRIDOR}), 0)
    step = env.step("still")
    assert step.valid and not stock.step("still").valid
    assert (step.observation, step.reward, step.terminal) == (before, -0.1, False)
    assert not env.step("").valid and env.step("right") == stock.step("right")


def test_our_own_parsing_takes_whole_words_and_needs_no_thoughts():
    cases = {
        "<think>a</think><action>up</action>": "up",
        "<think>a</think><action>push it upwards</action>": None,
        "<think>a</think><action>left</action><action>up</action>": "up",
        "<think>a</think><action>still</action>": None,
        "<action>up</action>": "up",
        "up": "up",
    }
    for text, action in cases.items():
        assert Sokoban().parse_action(text, DIRECTIONS) == action
        assert Sokoban().well_formed(text)


def test_ten_thousand_replies_without_sense():
    rng = np.random.default_rng(0)
    words = ["<action>", "</action>", "<think>", "</think>", "up", "Down", " left ", "right", "\x00", "é√", ""]
    env = Sokoban().env()
    env.reset(Task("t", "sokoban", 3), 0)
    for count in rng.integers(6, size=10_000).tolist():
        text = "".join(words[i] for i in rng.integers(len(words), size=count))
        for reference in (False, True):
            action = (PublishedSokoban if reference else Sokoban)().parse_action(text, DIRECTIONS)
            assert action is None or action in DIRECTIONS
        before = env.position
        step = env.step(text)
        assert step.valid == (text in DIRECTIONS)
        assert step.valid or env.position == before
        if step.terminal:
            env.reset(Task("t", "sokoban", count), 0)


def test_random_actions_are_legal_and_fair():
    rng = np.random.default_rng(0)
    observation = Sokoban().env().reset(Task("t", "sokoban", 3), 0)
    drawn = [Sokoban().random_action(observation, rng) for _ in range(400)]
    assert min(drawn.count(direction) for direction in DIRECTIONS) > 60


def test_an_episode_in_append_mode_says_each_grid_once():
    env = play_of(CORRIDOR)
    first = Sokoban().prompt(env.reset(Task("t", "sokoban", 0, {"level": CORRIDOR}), 0), [], "compact")
    then = Sokoban().follow_up(env.step("right").observation, "compact")
    assert [message["content"] for message in (*first, *then)] == ["P _ X _ O", "_ P X _ O"]
    [instruct] = Sokoban().follow_up(env.step("right").observation, "instruct")
    assert "<action>" in instruct["content"]
    for style in ("compact", "instruct"):
        assert all(Sokoban().parse_action(Sokoban().reply(d, style), DIRECTIONS) == d for d in DIRECTIONS)


def images(level: str) -> set[str]:
    """The eight rotations and reflections of a level, without the walls that lie beyond its floor."""
    grid, found = level.splitlines(), set()
    for _ in range(4):
        while not grid[0].strip("#"):
            grid = grid[1:]
        grid = ["".join(column) for column in zip(*grid[::-1], strict=True)]
    for _ in range(4):
        grid = ["".join(column) for column in zip(*grid[::-1], strict=True)]
        found |= {"\n".join(grid), "\n".join(line[::-1] for line in grid)}
    return found


def without_pieces(level: str) -> str:
    return level.translate(str.maketrans("X√PS", "_O_O"))


@pytest.mark.parametrize("options", [{}, {"rows": 5, "columns": 7}])
def test_no_held_out_room_is_a_training_room_in_any_orientation_or_place(options: dict):
    seen: dict[Split, set[str]] = {"train": set(), "held_out": set()}
    for split, rooms in seen.items():
        for data_seed in range(3):
            source = Sokoban(**options).tasks(split, data_seed)
            for index in range(150):
                rooms |= images(without_pieces(take(source, index).payload["level"]))
    assert not seen["held_out"] & seen["train"]
    assert min(map(len, seen.values())) > 250


def test_room_keys_are_equal_for_orientations_and_places_and_for_nothing_else():
    levels = {take(Sokoban(rows=6, columns=7).tasks("train", 0), index).payload["level"] for index in range(60)}
    by_key: dict[int, set[str]] = {}
    for level in levels:
        room = without_pieces(level)
        by_key.setdefault(room_key(parse(level)[0]), set()).add(min(images(room)))
        for image in images(room):
            lines = [f"##{line}#" for line in image.splitlines()]
            wall = "#" * len(lines[0])
            cells = "".join([wall, wall, *lines, wall])
            moved = Room(len(lines) + 3, len(wall), *(where(cells, symbols) for symbols in ("_O", "O")))
            by_key.setdefault(room_key(moved), set()).add(min(images(image)))
    assert all(len(rooms) == 1 for rooms in by_key.values())
    assert len(by_key) == len(set().union(*by_key.values()))


def where(cells: str, symbols: str) -> int:
    return sum(1 << cell for cell, symbol in enumerate(cells) if symbol in symbols)


def test_levels_are_the_same_in_every_process():
    program = (
        "from flowjax.envs.sokoban import Sokoban\n"
        "from flowjax.envs.sokoban.world import SokobanEnv\n"
        "source = Sokoban(boxes=2).tasks('held_out', 7)\n"
        "env = Sokoban(boxes=2).env()\n"
        "keys = [env.reset(source[i], 0).state_key for i in (40, 3, 17)]\n"
        "print([source[i].payload['level'] for i in range(20)], keys)\n"
    )
    printed_in_two_processes(program)


def test_any_index_in_any_order():
    source = Sokoban().tasks("train", 0)
    forwards = [take(source, index) for index in range(20)]
    assert [take(source, index) for index in reversed(range(20))] == forwards[::-1]
    assert take(source, 1_999_999_999).task_id != take(source, 3).task_id
    assert take(Sokoban().tasks("train", 1), 0) != take(source, 0)
    assert len(source[:500]) == 500


def test_bounds_on_the_moves_are_kept():
    source = Sokoban(min_moves=5).tasks("train", 0)
    lengths = [moves_to_go(*parse(take(source, index).payload["level"])) for index in range(50)]
    assert all(length is not None and length >= 5 for length in lengths)
    source = Sokoban(rows=8, min_moves=3, max_moves=6).tasks("train", 0)
    lengths = {moves_to_go(*parse(take(source, index).payload["level"])) for index in range(50)}
    assert lengths == {3, 4, 5, 6}


def test_level_statistics_are_those_of_the_reference():
    """6x6 with one box: mean optimum about 3.7 over 150 levels; 8x8: 6.0; 6x6 with two boxes: 7.6."""
    for options, mean in [({}, 3.7), ({"rows": 8}, 6.0), ({"boxes": 2}, 7.6)]:
        source = Sokoban(**options).tasks("train", 0)
        lengths = [moves_to_go(*parse(take(source, index).payload["level"])) for index in range(300)]
        assert np.mean([length for length in lengths if length]) == pytest.approx(mean, abs=0.8)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rows": 3}, "rows=3"),
        ({"boxes": 0}, "boxes=0"),
        ({"boxes": 9}, "boxes=9"),
        ({"search_depth": 1}, "search_depth=1"),
        ({"min_moves": 5, "max_moves": 4}, "max_moves=4"),
        ({"size": 6}, "size"),
    ],
)
def test_wrong_options_are_named(options: dict, named: str):
    with pytest.raises(WorldError, match=named):
        Sokoban(**options).env()


@pytest.mark.parametrize(
    "level", ["", "###\n#P#\n###", "#####\n#PXO_\n#####", "#####\n#PXX#\n#####", "####\n#PXO#\n#####"]
)
def test_what_is_not_a_level_is_refused(level: str):
    with pytest.raises(WorldError, match="Sokoban level"):
        parse(level)


def test_compact_prompts_use_only_the_vocabulary_and_tell_states_apart():
    words = set(Sokoban().vocabulary())
    assert all(word.split() == [word] for word in words)
    source = Sokoban().tasks("train", 0)
    env = Sokoban().env()
    prompts = {}
    for index in range(100):
        observation = env.reset(take(source, index), 0)
        [message] = Sokoban().prompt(observation, [Past(1, observation.view, "")], "compact")
        assert set(message["content"].split()) <= words
        [message] = Sokoban().prompt(observation, [], "compact")
        assert len(message["content"].split()) == 16
        prompts.setdefault(message["content"], set()).add(observation.state_key)
    assert all(len(keys) == 1 for keys in prompts.values())


def test_the_instruct_prompt_shows_the_window():
    env = play_of(CORRIDOR)
    before = env.step("right").observation
    after = env.step("fly").observation
    history = [Past(3, before.view, "right"), Past(4, after.view, "")]
    [message] = Sokoban().prompt(after, history, "instruct")
    for part in (
        "4 actions so far",
        "Action 3: 'right'",
        "Action 4: 'none'",
        "The grid now:\n # \t # \t # \t # \t # \t # \t # \n # \t _ \t P \t X \t _ \t O \t # \n",
        "<action>",
        "√ box on a target",
    ):
        assert part in message["content"]
    assert "actions so far" not in Sokoban().prompt(after, [], "instruct")[0]["content"]
