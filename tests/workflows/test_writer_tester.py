"""Programs and tests of them: who is rewarded for what, and which program counts."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from configs import code_pair
from flowjax.envs import find_world
from flowjax.envs.code.problems import Recipe
from flowjax.envs.demonstrations import base_words
from flowjax.models.nano import build_tokenizer
from flowjax.records import Group, Task, Trajectory
from flowjax.rewards import trajectory_scores
from flowjax.run import resolve
from flowjax.workflows import AgentTurns, Played, writer_tester
from flowjax.workflows.codec import Codec
from flowjax.workflows.writer_tester import TESTS, demonstrations, parse_tests, play, reply_with
from tests.workflows.scripted import play_scripted

WORLD = find_world("flowjax.envs.code:Code")(kinds=("int",), steps=2)
PLUS_THREE = Task("plus", "code", 0, {"kind": "int", "steps": [[0, 3]]})
RIGHT, WRONG, HALF = (f"def f ( x ) : x = x {step} ; return x" for step in ("+ 3", "- 3", "* 4"))
GOOD, BAD, WORSE = "2 gives 5 and 1 gives 4", "2 gives 6 and 1 gives 4", "2 gives 6 and 1 gives 9"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(base_words(resolve(code_pair.get_config("nano")), "base", WORLD), folder)
    return Codec(folder)


def played(codec: Codec, replies: list[str]) -> tuple[Played, list[str]]:
    """The episode in which the agents reply so, and the prompts that they saw."""
    return play_scripted(play, PLUS_THREE, world=WORLD, codec=codec, agents=("writer", "tester"), replies=replies)


CASES = [
    # replies, successes of the parts, episode: success, first_success, attempts, approved, tests_valid
    ([RIGHT, GOOD], [1, 1], (1, 1, 1, 1, 1)),
    ([WRONG, GOOD, RIGHT], [0, 1, 1], (1, 0, 2, 0, 1)),
    ([WRONG, GOOD, WRONG], [0, 1, 0], (0, 0, 2, 0, 1)),
    ([WRONG, GOOD, "tests"], [0, 1, 0], (0, 0, 2, 0, 1)),
    ([HALF, GOOD, RIGHT], [0, 1, 1], (1, 0, 2, 0, 1)),
    ([RIGHT, BAD, WRONG], [1, 0, 0], (1, 1, 2, 0, 0)),  # the first one passes more of them, and stays
    ([RIGHT, WORSE, WRONG], [1, 0, 0], (0, 1, 2, 0, 0)),
    ([RIGHT, WORSE, "tests"], [1, 0, 0], (1, 1, 2, 0, 0)),  # no program takes no program's place
    ([WRONG, WORSE, RIGHT], [0, 1, 1], (1, 0, 2, 0, 0)),  # the right verdict, for a wrong reason
    ([WRONG, "2 gives"], [0, 0], (0, 0, 1, 1, 0)),  # no tests: approved
    ([RIGHT, "2 gives 5"], [1, 0], (1, 1, 1, 1, 0)),  # too few
    (["tests", RIGHT], [0, 1], (1, 0, 2, 0, 0)),  # nothing to be tested
]


@pytest.mark.parametrize(("replies", "successes", "whole"), CASES)
def test_each_part_is_rewarded_for_its_own_work_and_tests_choose(codec, replies, successes, whole):
    episode, _ = played(codec, replies)
    assert (episode.status, episode.error) == ("ok", "")
    assert [part.outcome["success"] for part in episode.parts] == successes
    names = ("success", "first_success", "attempts", "approved", "tests_valid")
    assert tuple(episode.outcome[name] for name in names) == whole
    agents = ["writer", "tester", "writer"] if replies[0] != "tests" else ["writer", "writer"]
    assert [part.agent for part in episode.parts] == agents[: len(replies)]
    assert all(turn.version == 3 for turn in episode.turns)


def test_what_each_sees(codec):
    assert played(codec, [WRONG, GOOD, RIGHT])[1] == ["int plus 3", "int plus 3 tests", "int plus 3 wrong"]


def test_tests_of_different_programs_are_different_states(codec):
    states = [played(codec, [program, GOOD, RIGHT])[0].turns[1].state_key for program in (WRONG, HALF, WRONG)]
    assert states[0] == states[2] != states[1]


def test_second_programs_are_in_the_state_of_the_first_and_its_review(codec):
    first, other = (played(codec, [program, GOOD, RIGHT])[0].turns for program in (WRONG, HALF))
    assert first[0].state_key == other[0].state_key
    assert len({first[0].state_key, first[2].state_key, other[2].state_key}) == 3


def test_a_tester_is_paid_for_right_tests_and_right_verdicts(codec):
    episodes = [played(codec, replies)[0] for replies in ([RIGHT, GOOD], [WRONG, GOOD, RIGHT], [RIGHT, BAD, RIGHT])]
    parts = [episode.parts[1] for episode in episodes]
    assert [(part.outcome["score"], part.outcome["answer_right"]) for part in parts] == [(1, 1), (1, 0), (0, 1)]
    components = code_pair.get_config("nano").policies.tester.reward.components.to_dict()
    group = Group("g", PLUS_THREE, [trajectory(part) for part in parts])
    total, _ = trajectory_scores([group], components)
    # Two of three programs are right: a verdict on one of them weighs 0.75, on the wrong one 1.5.
    np.testing.assert_allclose(total, [1.0, 1.0, 0.5 * (1 - 0.75)])


def trajectory(part: AgentTurns) -> Trajectory:
    return Trajectory(
        trajectory_id=str(id(part)), group_id="g", task_id="plus", seed=0, turns=part.turns, outcome=part.outcome
    )


@pytest.mark.parametrize(
    ("reply", "has_entry", "tests"),
    [
        ('```json\n[{"input": [1, [2]], "output": 3}, {"input": [0, []], "output": null}]\n```', True,
         [([1, [2]], 3), ([0, []], None)]),
        ('Take 1. [{"input": "1\\n", "output": "2"}, {"input": "", "output": ""}] So.', False,
         [("1\n", "2"), ("", "")]),
        ('```json\n[]\n``` no: ```json\n[{"input": [1], "output": 1}, {"input": [2], "output": 2}]\n```', True,
         [([1], 1), ([2], 2)]),
        ('```python\nf(1)\n```\nso\n```json\n[{"input": [1], "output": 1}, {"input": [2], "output": 2}]\n```', True,
         [([1], 1), ([2], 2)]),
        ('[{"input": 1, "output": 2}, {"input": [1], "output": 2}]', True, []),  # arguments are a list
        ('[{"input": [1], "output": 2}, {"input": [1], "output": 2}]', False, []),  # what is read is a text
        ('[{"input": "1", "output": 2}, {"input": "1", "output": "2"}]', False, []),
        ('[{"input": [1], "output": 2}]', True, []),
        ('[{"input": [1], "output": 2}, {"input": [1.0], "output": 3}]', True, []),
        ('[{"input": [1], "output": 2}, {"input": [1], "output": 2}, {"input": [3], "output": 4}]', True,
         [([1], 2), ([3], 4)]),
        ('[{"input": [1]}, {"output": 2}]', True, []),
        ('{"input": [1], "output": 2}', True, []),
        ("[1, 2]", True, []),
        ('[{"input": [1], "output": ' + "[" * 900 + "]" * 900 + '}, {"input": [1], "output": 2}]', True, []),
        ('[{"input": [' + '{"a": [' * 60 + "]}" * 60 + '], "output": 1}, {"input": [1], "output": 2}]', True, []),
        ("[" * 100_000, True, []),
        ("[" * 100_000 + "]" * 100_000, True, []),
        ("", True, []),
    ],
)  # fmt: skip
def test_tests_are_read_from_a_reply(reply, has_entry, tests):
    assert parse_tests(reply, "instruct", has_entry=has_entry) == tests


def test_one_test_written_twice_is_one():
    assert parse_tests("2 gives 5 and 2 gives 5", "compact", has_entry=True) == []
    assert parse_tests("2 gives 5 and 1 gives 4", "compact", has_entry=True) == [([2], 5), ([1], 4)]


@pytest.mark.parametrize("style", ["compact", "instruct"])
def test_clean_demonstrations_are_right_and_noisy_ones_are_not_always(style, codec):
    tasks = WORLD.tasks("train", 0)[:40]
    words = {*WORLD.vocabulary(), *writer_tester.vocabulary()}
    for noise in (0.0, 0.5):
        env, rights = WORLD.env(), []
        walk = demonstrations(
            WORLD, tasks, path_noise=0.0, label_noise=noise, max_turns=1, style=style, rng=np.random.default_rng(0)
        )
        for index, ((messages, reply),) in enumerate(itertools.islice(walk, 120)):
            task = tasks[index // 3]
            assert isinstance(task, Task)
            env.reset(task, task.seed)
            recipe = Recipe(task.payload["kind"], tuple(map(tuple, task.payload["steps"])))
            if index % 3 == 2:
                tests = parse_tests(reply, style, has_entry=True)
                assert len(tests) == TESTS and reply_with(tests, style) == reply
                rights.append(all(recipe.value(given[0]) == wanted for given, wanted in tests))
            elif index % 9 == 0:  # judging takes time
                rights.append(env.step(WORLD.parse_action(reply, ()) or "").outcome["success"] == 1.0)
            if style == "compact":
                assert set(messages[0]["content"].split()) | set(reply.split()) <= words
        assert all(rights) if not noise else 0.1 < np.mean(rights) < 0.9


def test_prompts_of_a_language_model_hold_what_is_needed():
    problem = WORLD.env().reset(PLUS_THREE, 0)
    asked = writer_tester._to_test(problem, WORLD, "instruct", RIGHT)[0]["content"]
    assert "add 3" in asked and RIGHT in asked and '{"input": [the arguments of one call], "output"' in asked
    again = writer_tester._to_write(WORLD, problem, "instruct", WRONG, "It passed 0 of 2 tests.")[0]["content"]
    assert "add 3" in again and WRONG in again and "It passed 0 of 2 tests." in again
