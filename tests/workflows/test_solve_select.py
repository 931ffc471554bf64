"""Two attempts and a choice: what is recorded, and who is rewarded for what."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from flowjax.envs import find_world
from flowjax.models.nano import build_tokenizer
from flowjax.records import Task
from flowjax.workflows import Played, solve_select
from flowjax.workflows.codec import Codec
from flowjax.workflows.solve_select import demonstrations, play
from flowjax.workflows.solver_verifier import parse_choice
from tests.workflows.scripted import play_scripted

OPTIONS = {"answer": "whole", "digits": 2, "terms": 2, "operators": "+"}
WORLD = find_world("flowjax.envs.math:Math")(**OPTIONS)
SUM = Task("sum", "math", 0, {"question": "12+34=?", "answer": "46", "expression": "12+34"})


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer((*WORLD.vocabulary(), *solve_select.vocabulary(), "<think>", "</think>"), folder)
    return Codec(folder)


def played(codec: Codec, *replies: str) -> tuple[Played, list[str]]:
    """The episode in which the agents reply so, and the prompts that they saw."""
    return play_scripted(play, SUM, world=WORLD, codec=codec, agents=("solver", "selector"), replies=list(replies))


@pytest.mark.parametrize(
    ("replies", "score", "decided", "success", "answer"),
    [
        (("4 6", "4 5", "a"), 1.0, 1.0, 1.0, "46"),
        (("4 6", "4 5", "b"), 0.0, 0.0, 0.0, "45"),
        (("4 5", "4 6", "4 6 b"), 1.0, 1.0, 1.0, "46"),  # it reasons first
        (("4 6", "4 6", "b"), 0.5, None, 1.0, "46"),
        (("4 5", "4 4", "b"), 0.5, None, 0.0, "44"),
        (("4 6", "4 5", "4 6"), 0.0, 0.0, 1.0, "46"),  # no choice: the first attempt counts
        (("4 6", "4 6", ""), 0.0, None, 1.0, "46"),
        (("b", "4 6", "b"), 1.0, 1.0, 1.0, "46"),  # an attempt that is no answer
    ],
)
def test_each_part_is_rewarded_for_its_own_work(codec, replies, score, decided, success, answer):
    episode, _ = played(codec, *replies)
    *attempts, choice = episode.parts
    assert [part.agent for part in episode.parts] == ["solver", "solver", "selector"]
    assert [part.outcome["success"] for part in attempts] == [float(reply == "4 6") for reply in replies[:2]]
    assert (choice.outcome["score"], choice.outcome.get("decided_right")) == (score, decided)
    assert choice.outcome["success"] == episode.outcome["success"] == success
    assert episode.outcome["first_success"] == attempts[0].outcome["success"]
    assert episode.outcome["either_success"] == float("4 6" in replies[:2])
    assert episode.answer == answer and episode.status == "ok"
    assert choice.turns[0].valid == bool(parse_choice(replies[2], "final", ("a", "b"), "compact"))
    assert all(turn.terminal and turn.version == 3 for turn in episode.turns)


def test_the_selector_sees_both_answers_and_no_thoughts(codec):
    _, prompts = played(codec, "<think> 4 4 </think> 4 5", "4 6", "<think> a </think> b")
    assert prompts == ["1 2 + 3 4 = ?", "1 2 + 3 4 = ?", "1 2 + 3 4 = ? pick 4 5 or 4 6"]
    cut, _ = played(codec, "4 5", "4 6", "<think> b")
    assert cut.parts[2].outcome["score"] == 0.0 and not cut.turns[2].valid


def test_choices_between_other_answers_are_other_states(codec):
    pairs = (("4 5", "4 6"), ("4 6", "4 5"), ("4 5", "4 6"))
    keys = [played(codec, *pair, "a")[0].turns[2].state_key for pair in pairs]
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("style", ["compact", "instruct"])
def test_clean_demonstrations_are_right(style):
    walk = demonstrations(
        WORLD, WORLD.tasks("train", 0)[:50], path_noise=0.5, label_noise=0.0, style=style, rng=np.random.default_rng(0)
    )
    chosen = []
    for ((messages, reply),) in itertools.islice(walk, 300):
        choice = parse_choice(reply, "final", ("a", "b"), style)
        if not choice:
            continue
        chosen.append(choice)
        if style == "compact":
            problem, _, answers = messages[-1]["content"].replace(" ", "").partition("pick")
            a, b = problem.removesuffix("=?").split("+")
            right = [int(answer) == int(a) + int(b) for answer in answers.split("or")]
            assert right["ab".index(choice)] or not any(right)
    assert 50 < chosen.count("a") < 100 and len(chosen) == 150


def test_demonstrations_speak_the_vocabulary_and_fit_the_recipe():
    from configs.math_select import get_config

    config, words = get_config("nano"), {*WORLD.vocabulary(), *solve_select.vocabulary()}
    walk = demonstrations(
        WORLD, WORLD.tasks("train", 0)[:50], path_noise=0.5, label_noise=0.3, style="compact",
        rng=np.random.default_rng(0),
    )  # fmt: skip
    for ((messages, reply),) in itertools.islice(walk, 300):
        assert set(messages[0]["content"].split()) | set(reply.split()) <= words
        assert len(messages[0]["content"].split()) <= config.rollout.max_prompt_tokens
        assert len(reply.split()) < config.rollout.max_new_tokens
