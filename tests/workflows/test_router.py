"""A choice of a model: who is asked what, and what the choice is worth."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from flowjax.envs import find_world
from flowjax.workflows import Played, router
from flowjax.workflows.codec import Codec
from flowjax.workflows.router import MODELS, demonstrations, play, score_choice, to_route
from tests.workflows.scripted import ASKED, SUM, WORLD, play_scripted, word_folder

RIGHT, WRONG = "1 0", "9"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_folder(tmp_path_factory, router.vocabulary())


def played(tokenizer: Path, *replies: str, most: int = 20) -> tuple[Played, list[str]]:
    """The episode in which router, small and large model reply so, and the prompts that they saw."""
    codec = Codec(tokenizer, max_prompt_tokens=most)
    agents = ("router", *MODELS)
    return play_scripted(play, SUM, world=WORLD, codec=codec, agents=agents, replies=list(replies))


@pytest.mark.parametrize(
    ("choice", "small", "large", "score", "right"),
    [
        ("small", RIGHT, RIGHT, 1.0, 1.0),
        ("large", RIGHT, RIGHT, 0.0, 1.0),  # right, and dearer than it had to be
        ("small", WRONG, RIGHT, 0.0, 0.0),
        ("<think> small </think> large", WRONG, RIGHT, 1.0, 1.0),
        ("large", RIGHT, WRONG, 0.0, 0.0),
        ("small", WRONG, WRONG, 0.5, 0.0),
        ("large", WRONG, WRONG, 0.5, 0.0),
        ("7", RIGHT, WRONG, -0.5, 1.0),  # the small model's answer counts
        ("", WRONG, RIGHT, -0.5, 0.0),
    ],
)
def test_the_cheapest_model_that_is_right_is_to_be_chosen(tokenizer, choice, small, large, score, right):
    episode, prompts = played(tokenizer, choice, small, large)
    assert prompts == [f"{ASKED} route", ASKED, ASKED]
    assert [part.agent for part in episode.parts] == [*MODELS, "router"]
    *answers, routed = (part.outcome for part in episode.parts)
    assert [answer["success"] for answer in answers] == [float(small == RIGHT), float(large == RIGHT)]
    assert routed["score"] == score and routed["success"] == right == episode.outcome["success"]
    assert "score" not in episode.outcome, "what the world calls so is not the choice's"
    for name, answer in zip(MODELS, answers, strict=True):
        assert episode.outcome[f"{name}_success"] == answer["success"]
    assert episode.outcome["either_success"] == float(RIGHT in (small, large))
    assert episode.outcome["large_chosen"] == float(choice.endswith("large"))
    turn = episode.parts[-1].turns[0]
    assert turn.valid == (score >= 0) and turn.terminal and turn.env_reward == score
    assert episode.answer == (large if choice.endswith("large") else small).replace(" ", "")


def test_equal_outcomes_of_all_models_leave_nothing_to_choose_but_the_price():
    assert score_choice("small", {"small": 1.0, "large": 1.0}) > score_choice("large", {"small": 1.0, "large": 1.0})
    assert len({score_choice(choice, {"small": 0.4, "large": 0.0}) for choice in MODELS}) == 1, "almost is not right"


def test_a_prompt_that_is_too_long_for_the_router_ends_the_episode_without_a_choice(tokenizer):
    episode, _ = played(tokenizer, "large", RIGHT, RIGHT, most=len(ASKED.split()))
    assert episode.status == "truncated" and episode.parts == []
    assert episode.outcome["success"] == episode.outcome["large_chosen"] == 0.0


def test_in_words_the_router_is_shown_the_problem_without_the_form_of_its_answer():
    problem = WORLD.env().reset(SUM, 0)
    [asked] = to_route(WORLD, problem, "instruct")
    assert "1+2+3+4=?" in asked["content"] and "boxed" not in asked["content"]
    assert all(f"<model>{name}</model>" in asked["content"] for name in MODELS)


@pytest.mark.parametrize("style", ["compact", "instruct"])
def test_clean_demonstrations_answer_rightly_and_send_longer_problems_to_the_large_model(style):
    world = find_world("flowjax.envs.math:Math")(answer="whole", digits=2, terms=3, operators="+")
    walk = demonstrations(
        world, world.tasks("train", 0)[:50], label_noise=0.0, style=style, rng=np.random.default_rng(0)
    )
    last, chosen = 0, set()
    for ((problem, answer),), ((routed, choice),) in itertools.islice(zip(walk, walk, strict=False), 100):
        named = choice.removeprefix("<model>").removesuffix("</model>")
        chosen.add(named)
        if style == "compact":
            summands, value = problem[-1]["content"].replace(" ", "").partition("=?")[0], "".join(answer.split())
            assert sum(map(int, summands.split("+"))) == int(value) and named == choice
            assert routed[-1]["content"] == f"{problem[-1]['content']} route"
            assert len(summands) == last or named == MODELS[len(summands) > last]
            last = len(summands)
    assert chosen == set(MODELS)
