"""A plan and an answer: who sees what, and what both are rewarded for."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from flowjax.workflows import Played, plan_solve
from flowjax.workflows.codec import Codec
from flowjax.workflows.plan_solve import demonstrations, play, to_plan, to_solve
from tests.workflows.scripted import ASKED, SUM, WORLD, play_scripted, word_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_folder(tmp_path_factory, plan_solve.vocabulary())


def played(tokenizer: Path, *replies: str, most: int = 20) -> tuple[Played, list[str]]:
    """The episode in which planner and solver reply so, and the prompts that they saw."""
    codec = Codec(tokenizer, max_prompt_tokens=most)
    agents = ("planner", "solver")
    return play_scripted(play, SUM, world=WORLD, codec=codec, agents=agents, replies=list(replies))


@pytest.mark.parametrize(
    ("plan", "answer", "shown", "right"),
    [
        ("3 and 7", "1 0", f"{ASKED} plan 3 and 7", 1.0),
        ("<think> 9 </think> 3", "9", f"{ASKED} plan 3", 0.0),
        ("", "1 0", ASKED, 1.0),
        ("<think> 3", "1 0", ASKED, 1.0),  # cut before there was a plan
    ],
)
def test_the_solver_sees_the_plan_and_both_are_rewarded_for_the_answer(tokenizer, plan, answer, shown, right):
    episode, prompts = played(tokenizer, plan, answer)
    planned = float(shown != ASKED)
    assert prompts == [f"{ASKED} plan", shown]
    assert [part.agent for part in episode.parts] == ["planner", "solver"]
    assert [part.outcome["success"] for part in episode.parts] == [right, right] == [episode.outcome["success"]] * 2
    assert episode.turns[0].valid == bool(planned) and episode.outcome["planned"] == planned
    assert all(turn.terminal for turn in episode.turns) and episode.status == "ok"
    assert episode.answer == answer.replace(" ", "")


def test_other_plans_are_other_states_of_the_solver(tokenizer):
    keys = [played(tokenizer, plan, "1 0")[0].turns[1].state_key for plan in ("3", "7", "3")]
    assert keys[0] == keys[2] != keys[1]


def test_a_plan_that_leaves_no_room_ends_the_episode_with_the_plan(tokenizer):
    episode, _ = played(tokenizer, "3 and 7 and 3", most=len(ASKED.split()) + 2)
    assert episode.status == "truncated" and [part.agent for part in episode.parts] == ["planner"]
    assert episode.parts[0].outcome["success"] == 0.0 and episode.outcome["planned"] == 1.0


def test_in_words_the_planner_is_asked_for_steps_and_the_solver_shown_them():
    problem = WORLD.env().reset(SUM, 0)
    [asked] = to_plan(WORLD, problem, "instruct")
    assert "1+2+3+4=?" in asked["content"] and "boxed" not in asked["content"]
    [shown] = to_solve(WORLD, problem, "instruct", "Add the first two.")
    [alone] = to_solve(WORLD, problem, "instruct", "")
    assert shown["content"].removeprefix(alone["content"]).strip() == "A plan for it:\n\nAdd the first two."


@pytest.mark.parametrize("style", ["compact", "instruct"])
def test_clean_demonstrations_are_right(style):
    walk = demonstrations(
        WORLD, WORLD.tasks("train", 0)[:50], label_noise=0.0, style=style, rng=np.random.default_rng(0)
    )
    for ((planner, plan),), ((_, answer),) in itertools.islice(zip(walk, walk, strict=False), 100):
        values = [int("".join(part.split())) for part in plan.split("and")]
        assert len(values) == 2 and sum(values) == int("".join(answer.split()))
        if style == "compact":
            problem = planner[-1]["content"].replace(" ", "").partition("=?")[0]
            assert sum(map(int, problem.split("+"))) == sum(values)


def test_a_share_of_the_problems_has_no_plan():
    tasks = WORLD.tasks("train", 0)[:50]
    walk = demonstrations(WORLD, tasks, label_noise=0.8, style="compact", rng=np.random.default_rng(0))
    pairs = list(itertools.islice(zip(walk, walk, strict=False), 400))
    assert 0.7 < sum(not plan for ((_, plan),), _ in pairs) / len(pairs) < 0.9
    assert all(bool(plan) == ("plan" in asked[-1]["content"]) for ((_, plan),), ((asked, _),) in pairs)
