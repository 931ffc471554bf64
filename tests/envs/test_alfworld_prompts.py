"""ALFWorld: prompts, the words of compact ones, and what becomes of replies."""

import numpy as np
import pytest

from flowjax.envs import Observation, Past
from flowjax.envs.alfworld import Alfworld
from flowjax.envs.alfworld.world import AlfworldOptions, AlfworldView, GeneratedTasks, compact_words
from flowjax.published.worlds import PublishedAlfworld

INTRO = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a "
    "cabinet 2, a cabinet 1, a bed 1, and a sinkbasin 1."
)
LEGAL = ("go to bed 1", "go to cabinet 1", "inventory", "look")
TASK = "put a clean cloth in bed"
FIRST = Observation(AlfworldView(INTRO, TASK), LEGAL, 1)
ON_BED = "You arrive at bed 1. On the bed 1, you see a cloth 1, and a book 2."
AT_BED = Observation(AlfworldView(ON_BED, TASK), LEGAL, 2)
WORLD = Alfworld()


def content(messages: list) -> str:
    [message] = messages
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (INTRO, "cabinet 2 bed 1 sinkbasin 1"),
        ("You arrive at bed 1. On the bed 1, you see a cloth 1, and a book 2.", "arrive at bed 1 on cloth 1 book 2"),
        ("You arrive at fridge 1. The fridge 1 is closed.", "arrive at fridge 1 closed"),
        ("You open the fridge 1. The fridge 1 is open. In it, you see nothing.", "open fridge 1 open in it nothing"),
        ("You pick up the cloth 1 from the bed 1.", "pick cloth 1 from bed 1"),
        ("You are carrying: a cloth 1.", "carrying cloth 1"),
        ("You are not carrying anything.", "carrying"),
        ("This is a hot and clean apple 1.", "hot clean apple 1"),
        ("Nothing happens.", "nothing happens"),
        ("xyzzy!", "nothing"),
    ],
)
def test_the_words_of_a_compact_prompt(text: str, words: str):
    assert compact_words(text) == words


def test_a_compact_window_reads_as_the_conversation_does():
    first = content(WORLD.prompt(FIRST, [], "compact"))
    assert first == "task put clean cloth in bed ; cabinet 2 bed 1 sinkbasin 1 >"
    window = content(WORLD.prompt(AT_BED, [Past(1, FIRST.view, "go to bed 1")], "compact"))
    assert window == f"{first} go to bed 1 {content(WORLD.follow_up(AT_BED, 'compact'))}"
    assert content(WORLD.prompt(AT_BED, [Past(1, FIRST.view, "")], "compact")) == window.replace("go to bed 1", "none")


def test_every_word_of_compact_prompts_and_replies_is_in_the_vocabulary():
    known = set(Alfworld().vocabulary())
    assert all(word.split() == [word] for word in known)
    assert len(known) == len(Alfworld().vocabulary())
    env, rng = Alfworld(path="generated").env(), np.random.default_rng(0)
    tasks = GeneratedTasks(
        "train", 0, AlfworldOptions(clutter=0.3, task_types=("look_at_obj_in_light", "pick_two_obj_and_place"))
    )
    for index in range(6):
        observation, past = env.reset(tasks(index), 0), []
        for turn in range(1, 25):
            assert set(content(WORLD.prompt(observation, past[-2:], "compact")).split()) <= known
            assert set(content(WORLD.follow_up(observation, "compact")).split()) <= known
            assert all(set(action.split()) <= known for action in observation.legal_actions)
            stray = WORLD.random_action(observation, rng)
            action = stray if rng.random() < 0.7 else WORLD.expert(env)
            assert WORLD.parse_action(WORLD.reply(action, "compact"), observation.legal_actions) == action
            past.append(Past(turn, observation.view, action))
            observation = env.step(action).observation


def test_the_instruct_prompt_shows_task_window_and_actions_once():
    past = [Past(3, FIRST.view, "go to bed 1"), Past(4, AT_BED.view, "")]
    text = content(WORLD.prompt(AT_BED, past, "instruct"))
    assert text.count("put a clean cloth in bed") == 1
    assert text.count("'go to cabinet 1'") == 1
    for part in (
        "4 actions so far",
        "Observation 3",
        "Action 4: 'none'",
        "a cloth 1, and a book 2",
        "<think>",
        "<action>",
    ):
        assert part in text
    first = content(WORLD.prompt(FIRST, [], "instruct"))
    assert "so far" not in first and "Looking quickly around you" in first
    later = content(WORLD.follow_up(AT_BED, "instruct"))
    assert "put a clean cloth" not in later and "'look'" in later and "<action>" in later


def test_the_task_is_kept_apart_from_what_is_seen():
    env = Alfworld(path="generated").env()
    first = env.reset(GeneratedTasks("train", 0, AlfworldOptions())(0), 0).view
    assert first.seen.startswith("-= Welcome") and first.task and "task is to" not in first.seen + first.task
    assert env.step("").observation.view == AlfworldView("Nothing happens.", first.task)


@pytest.mark.parametrize("style", ["instruct", "compact"])
def test_the_expert_is_understood(style):
    for action in LEGAL:
        assert WORLD.parse_action(WORLD.reply(action, style), LEGAL) == action


@pytest.mark.parametrize(
    ("reply", "sent"),
    [
        ("<think>hm</think><action>Look</action>", "look"),
        ("<action> go to MARS </action> <action>look</action>", "go to mars"),  # the first pair, legal or not
        ("</action>look<action>", ""),
        ("I would rather go somewhere else: go to bed 1", " go somewhere else: go to bed 1"[-30:]),
        ("<action>look", "<action>look"),
    ],
)
def test_the_published_way_of_reading_is_kept_as_an_option(reply: str, sent: str):
    assert PublishedAlfworld().parse_action(reply, LEGAL) == sent


def fuzz(rng: np.random.Generator, pieces: list[str]) -> str:
    chosen = [pieces[i] for i in rng.integers(len(pieces), size=rng.integers(0, 9))]
    return "".join(chosen) + "".join(map(chr, rng.integers(1, 0x3000, size=rng.integers(0, 6)).tolist()))


def test_ten_thousand_odd_replies():
    env = Alfworld(path="generated").env()
    observation = env.reset(GeneratedTasks("train", 0, AlfworldOptions(clutter=0.2))(1), 0)
    legal, rng = observation.legal_actions, np.random.default_rng(0)
    pieces = [
        "<action>",
        "</action>",
        "<think>",
        "</think>",
        "<action",
        " ",
        "\n",
        "help",
        "LOOK",
        "take",
        "去冰箱",
        "\0",
    ]
    pieces += [*legal[:6], "go to", "1", "{r.name}", "#intro#", "__import__('os')", "x" * 5000]
    before, understood = frozenset(env._play.state), 0
    for number in range(10_000):
        reply = fuzz(rng, pieces)
        action = WORLD.parse_action(reply, legal)
        sent = PublishedAlfworld().parse_action(reply, legal)
        assert action is None or action in legal
        assert isinstance(sent, str)
        understood += action is not None
        if number < 400:
            for attempt in {action or "", sent, reply} - set(legal):
                step = env.step(attempt)
                assert (step.valid, step.reward, step.terminal) == (False, 0.0, False)
                assert (step.observation.state_key, step.observation.legal_actions) == (observation.state_key, legal)
                assert frozenset(env._play.state) == before
    assert 10 < understood < 9000
