"""Answers in parts: who is asked what, within which bounds, and who is rewarded for it."""

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowjax.envs import user_says
from flowjax.workflows import Played, spawn
from flowjax.workflows.codec import Codec, PromptTooLong
from flowjax.workflows.spawn import demonstrations, parse_spawn, play, split_sum, worded
from tests.workflows.scripted import ASKED, SUM, WORLD, play_scripted, word_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_folder(tmp_path_factory, spawn.vocabulary())


@pytest.fixture(scope="module")
def codec(tokenizer: Path) -> Codec:
    return Codec(tokenizer)


def played(codec: Codec, *replies: str, most: int = 20) -> tuple[Played, list[str]]:
    """The episode in which the agents reply so, and the prompts that they saw."""
    agents = ("agent", "helper")
    return play_scripted(play, SUM, world=WORLD, codec=codec, agents=agents, replies=list(replies), max_turns=most)


def test_an_answer_without_helpers_is_an_episode_like_any_other(codec):
    episode, prompts = played(codec, "1 0")
    assert prompts == [ASKED] and [part.agent for part in episode.parts] == ["agent"]
    assert episode.outcome["success"] == 1.0 and episode.outcome["helpers"] == 0.0 and episode.answer == "10"


def test_helpers_see_their_task_alone_and_all_are_rewarded_for_the_end(codec):
    episode, prompts = played(codec, "spawn 1 + 2 = ? and 3 + 4 = ?", "<think> 9 </think> 3", "7", "1 0")
    assert prompts == [ASKED, "1 + 2 = ?", "3 + 4 = ?", f"{ASKED} got 3 and 7"]
    assert [(part.agent, len(part.turns)) for part in episode.parts] == [("agent", 2), ("helper", 1), ("helper", 1)]
    assert all(part.outcome["success"] == 1.0 and part.outcome["helpers"] == 2.0 for part in episode.parts)
    assert [turn.terminal for turn in episode.turns] == [False, True, True, True]
    assert all(turn.valid for turn in episode.turns)
    lost, _ = played(codec, "spawn 1 + 2 = ? and 3 + 4 = ?", "3", "7", "9")
    assert [part.outcome["success"] for part in lost.parts] == [0.0, 0.0, 0.0] and lost.answer == "9"


def test_helpers_have_helpers_of_their_own_down_to_the_last_level(codec):
    replies = ["spawn 1 and 2", "spawn 3 and 4", "5", "spawn 6", "7", "", "1 0"]
    episode, prompts = played(codec, *replies)
    # Level by level: both helpers, then those of the first one, whose spawn is in vain; it answers after them.
    assert prompts == [ASKED, "1", "2", "3", "4", "1 got and 7", f"{ASKED} got and 5"]
    assert [turn.valid for part in episode.parts for turn in part.turns] == [True] * 2 + [
        True,
        False,
        True,
        False,
        True,
    ]
    assert episode.outcome == {"success": 1.0, "answered": 1.0, "calculations": 0.0, "helpers": 4.0}


@pytest.mark.parametrize(
    ("first", "most", "helpers"),
    [
        ("spawn 1 and 2", 4, 2),  # three more replies are needed
        ("spawn 1 and 2", 3, 0),
        ("spawn 1 and 2 and 3 and 4", 20, 4),
        ("spawn 1 and 2 and 3 and 4 and 5", 20, 0),
        ("spawn", 20, 0),
        ("spawn and", 20, 0),
    ],
)
def test_a_spawn_that_is_not_allowed_is_no_answer(codec, first, most, helpers):
    episode, prompts = played(codec, first, *["1"] * helpers, "1 0", most=most)
    assert episode.outcome["helpers"] == helpers and episode.status == "ok"
    assert episode.outcome["success"] == float(helpers > 0)
    assert episode.turns[0].valid == (helpers > 0) and len(prompts) == (helpers + 2 if helpers else 1)


def test_a_second_spawn_is_in_vain(codec):
    episode, _ = played(codec, "spawn 1", "1", "spawn 1")
    assert episode.outcome["success"] == 0.0 and [turn.valid for turn in episode.parts[0].turns] == [True, False]


def test_other_answers_of_helpers_are_another_state(codec):
    keys = [played(codec, "spawn 1", said, "1 0")[0].parts[0].turns[1].state_key for said in ("1", "2", "1")]
    assert keys[0] == keys[2] != keys[1]


def test_a_part_that_is_too_long_ends_the_episode_with_what_was_played(tokenizer):
    short = Codec(tokenizer, max_prompt_tokens=len(ASKED.split()) + 1)
    episode, _ = played(short, "spawn 1 + 2 + 3 + 4 + 1 + 2 + 3 + 4 = ?")
    assert episode.status == "truncated" and len(episode.turns) == 1 and episode.outcome["success"] == 0.0


@pytest.mark.parametrize(
    ("reply", "tasks"),
    [
        ('<spawn>{"tasks": ["a", " b "]}</spawn>', ["a", "b"]),
        ('I try. <spawn>{"tasks": ["a"]}</spawn> more', ["a"]),
        ('<spawn>{"tasks": ["a"]}', ["a"]),
        ('<think><spawn>{"tasks": ["a"]}</spawn></think> 4', None),
        ("<spawn>a</spawn>", []),
        ('<spawn>{"tasks": "a"}</spawn>', []),
        ('<spawn>{"tasks": ["a", 3]}</spawn>', []),
        ('<spawn>["a"]</spawn>', []),
        ("<spawn>" + "[" * 100_000, []),
        (r'<spawn>{"tasks": ["\ud800 1+2", "a"]}</spawn>', []),  # half a surrogate pair is no text
        ("spawn a and b", None),
        ("", None),
    ],
)
def test_tasks_are_read_from_any_reply(reply, tasks):
    assert parse_spawn(reply) == tasks


def test_helpers_are_offered_in_words_until_there_are_answers_or_no_more_levels():
    asked = user_says("What is 6 x 7?")
    assert "<spawn>" in worded(asked, (), (), "instruct", 1)[0]["content"]
    assert worded(asked, (), (), "instruct", spawn.DEPTH) == worded(asked, (), (), "compact") == asked
    [answered] = worded(asked, ("6 x 7", "7 x 6"), ("42", "41"), "instruct")
    assert "6 x 7\nAnswer: 42\n\n7 x 6\nAnswer: 41\n" in answered["content"] and "<spawn>" not in answered["content"]


def test_sums_are_split_in_two():
    assert split_sum("1+2+3+4+50=?") == [("1+2=?", "3"), ("3+4+50=?", "57")]
    assert split_sum("1+2+3=?") == split_sum("1+2-3+4=?") == split_sum("Ana has 3+4+5+6 apples") == []


@pytest.mark.parametrize("style", ["compact", "instruct"])
def test_clean_demonstrations_are_right(style):
    walk = demonstrations(
        WORLD, WORLD.tasks("train", 0)[:50], label_noise=0.0, style=style, rng=np.random.default_rng(0)
    )
    spawned = 0
    for ((messages, reply),) in itertools.islice(walk, 300):
        problem = "".join(messages[-1]["content"].split()).partition("=?")[0]
        tasks = parse_spawn(reply, style)
        if tasks is None:
            assert int("".join(reply.split())) == sum(map(int, problem.split("+")))
        else:
            spawned += 1
            assert "+".join("".join(task.split()).removesuffix("=?") for task in tasks) == problem
    assert spawned == 300 // 4  # each sum: a spawn, two helpers' answers, an answer after them


def test_a_share_of_the_problems_is_answered_at_once():
    tasks = WORLD.tasks("train", 0)[:50]
    walk = demonstrations(WORLD, tasks, label_noise=0.8, style="compact", rng=np.random.default_rng(0))
    asked = [(messages[-1]["content"], reply) for ((messages, reply),) in itertools.islice(walk, 800)]
    first = [reply for text, reply in asked if text.count("+") == 3 and text.endswith("?")]
    at_once = sum(parse_spawn(reply, "compact") is None for reply in first)
    assert 0.7 < at_once / len(first) < 0.9


@pytest.mark.parametrize("errors", [(PromptTooLong(9, 8), OSError("away")), (OSError("away"), PromptTooLong(9, 8))])
def test_a_failure_outside_the_policy_comes_before_a_prompt_that_is_too_long(
    errors: tuple[Exception, Exception], monkeypatch: pytest.MonkeyPatch
):
    class Failing:
        def __init__(self, error: Exception):
            self.error = error

        async def act(self, messages: Any) -> Any:
            raise self.error

    monkeypatch.setattr(spawn, "_messages", lambda *_: [])
    ready: list[Any] = [SimpleNamespace(parent=None), SimpleNamespace(parent=1)]
    agents: Any = dict(zip(("agent", "helper"), map(Failing, errors), strict=True))
    options: Any = SimpleNamespace(world=None, prompt="")
    with pytest.raises(OSError, match="away"):
        asyncio.run(spawn._replies(ready, agents, options))
