"""Attempts, verdicts and second attempts: what is recorded, and who is rewarded for what."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from flowjax.envs import find_world
from flowjax.models.nano import build_tokenizer
from flowjax.records import Task
from flowjax.workflows import Played, solver_verifier
from flowjax.workflows.codec import Codec
from flowjax.workflows.solver_verifier import demonstrations, parse_verdict, play
from tests.workflows.scripted import play_scripted

OPTIONS = {"answer": "whole", "digits": 2, "terms": 2, "operators": "+"}
WORLD = find_world("flowjax.envs.math:Math")(**OPTIONS)
SUM = Task("sum", "math", 0, {"question": "12+34=?", "answer": "46", "expression": "12+34"})


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer((*WORLD.vocabulary(), *solver_verifier.vocabulary()), folder)
    return Codec(folder)


def played(codec: Codec, replies: list[str]) -> tuple[Played, list[str]]:
    """The episode in which the agents reply so, and the prompts that they saw."""
    return play_scripted(play, SUM, world=WORLD, codec=codec, agents=("solver", "verifier"), replies=replies)


CASES = [
    # replies, successes of the parts, episode: success, attempts, approved
    (["4 6", "approve"], [1, 1], (1, 1, 1)),
    (["4 5", "approve"], [0, 0], (0, 1, 1)),
    (["4 5", "reject", "4 6"], [0, 1, 1], (1, 2, 0)),
    (["4 6", "reject", "4 7"], [1, 0, 0], (0, 2, 0)),
    (["4 5", "5"], [0, 0], (0, 1, 0)),  # no verdict: not rejected either
    (["approve", "reject", "4 6"], [0, 1, 1], (1, 2, 0)),
    (["4 5", "4 6 reject", "4 6"], [0, 1, 1], (1, 2, 0)),  # it reasons first
]


@pytest.mark.parametrize(("replies", "successes", "whole"), CASES)
def test_each_part_is_rewarded_for_its_own_work(codec, replies, successes, whole):
    episode, _ = played(codec, replies)
    assert [part.outcome["success"] for part in episode.parts] == successes
    assert tuple(episode.outcome[name] for name in ("success", "attempts", "approved")) == whole
    # For a majority: the answer of the last attempt.
    last = [reply for reply, by in zip(replies, ("solver", "verifier", "solver"), strict=False) if by == "solver"][-1]
    assert episode.answer == ("" if last == "approve" else last.replace(" ", ""))
    agents = ["solver", "verifier", "solver"][: len(replies)]
    assert [part.agent for part in episode.parts] == agents
    assert [turn.policy for turn in episode.turns] == agents
    assert all(turn.version == 3 and turn.terminal for turn in episode.turns)


def test_the_verifier_sees_the_answer_and_the_solver_what_was_rejected(codec):
    _, prompts = played(codec, ["4 5", "reject", "4 6"])
    assert prompts == ["1 2 + 3 4 = ?", "1 2 + 3 4 = ? check 4 5", "1 2 + 3 4 = ? not 4 5"]


def test_nobody_reads_what_another_has_thought(tmp_path):
    """Thoughts are many times as long as answers; a verdict within them is none yet."""
    build_tokenizer((*WORLD.vocabulary(), *solver_verifier.vocabulary(), "<think>", "</think>"), tmp_path)
    replies = ["<think> 4 4 </think> 4 5", "<think> approve </think> reject", "<think> 4 6"]
    episode, prompts = played(Codec(tmp_path), replies)
    assert prompts[1:] == ["1 2 + 3 4 = ? check 4 5", "1 2 + 3 4 = ? not 4 5"]
    assert [len(turn.sampled_ids) for turn in episode.turns] == [7, 5, 4]  # trained on as they were sampled
    cut, _ = played(Codec(tmp_path), ["4 5", "<think> approve"])
    assert cut.outcome["approved"] == 0.0 and not cut.turns[1].valid


@pytest.mark.parametrize(
    ("answer", "verdict", "outcome"),
    [
        ("4 6", "approve", {"success": 1.0, "answer_right": 1.0, "approved_right": 1.0}),
        ("4 6", "reject", {"success": 0.0, "answer_right": 1.0, "approved_right": 0.0}),
        ("4 5", "approve", {"success": 0.0, "answer_right": 0.0, "rejected_wrong": 0.0}),
        ("4 5", "reject", {"success": 1.0, "answer_right": 0.0, "rejected_wrong": 1.0}),
    ],
)
def test_a_verdict_says_what_was_called_for(codec, answer, verdict, outcome):
    part = played(codec, [answer, verdict, "4 6"])[0].parts[1]
    assert {name: part.outcome[name] for name in part.outcome if "right" in name or "wrong" in name} == {
        name: value for name, value in outcome.items() if name != "success"
    }
    assert part.outcome["success"] == outcome["success"]


def test_verdicts_on_different_answers_are_different_states(codec):
    states = {played(codec, [answer, "approve"])[0].turns[1].state_key for answer in ("4 5", "4 6", "4 6")}
    assert len(states) == 2


def test_second_attempts_are_in_the_state_of_what_was_rejected(codec):
    first, other = (played(codec, [answer, "reject", "4 6"])[0].turns for answer in ("4 5", "4 7"))
    assert first[0].state_key == other[0].state_key
    assert len({first[0].state_key, first[2].state_key, other[2].state_key}) == 3


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("It is 46. <verdict>Approve</verdict>", "approve"),
        ("<verdict>approve</verdict> no: <verdict> reject </verdict>.", "reject"),
        ("reject", "reject"),
        ("I approve", ""),
        ("<verdict>maybe</verdict>", ""),
        ("<verdict>approve", ""),
        ("", ""),
    ],
)
def test_verdicts_are_read_strictly(reply, verdict):
    assert parse_verdict(reply) == verdict


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [("4 6 approve", "approve"), ("reject", "reject"), ("approve 4 6", ""), ("4 6", ""), ("", "")],
)
def test_compact_verdicts_come_last(reply, verdict):
    assert parse_verdict(reply, "compact") == verdict


@pytest.mark.parametrize("style", ["compact", "instruct"])
def test_clean_demonstrations_are_right(style):
    tasks = WORLD.tasks("train", 0)[:50]
    walk = demonstrations(
        WORLD, tasks, path_noise=0.5, label_noise=0.0, max_turns=1, style=style,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    verdicts = []
    for ((messages, reply),) in itertools.islice(walk, 200):
        content = messages[-1]["content"].replace(" ", "")
        if verdict := parse_verdict(reply, style):
            verdicts.append(verdict)
        if style == "compact":
            problem, checked, answer = content.partition("check")
            a, b = problem.split("not")[0].removesuffix("=?").split("+")
            said = reply.replace(" ", "").removesuffix(verdict)
            assert int(said) == int(a) + int(b)
            assert not checked or (int(answer) == int(said)) == (verdict == "approve")
    assert {"approve", "reject"} == set(verdicts)


def test_demonstrations_speak_the_vocabulary(codec):
    tasks = WORLD.tasks("train", 0)[:50]
    walk = demonstrations(
        WORLD, tasks, path_noise=0.5, label_noise=0.3, max_turns=1, style="compact",
        rng=np.random.default_rng(0),
    )  # fmt: skip
    words = {*WORLD.vocabulary(), *solver_verifier.vocabulary()}
    for ((messages, reply),) in itertools.islice(walk, 300):
        assert set(messages[0]["content"].split()) | set(reply.split()) <= words
