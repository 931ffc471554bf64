"""Lessons of nano executors: what operators really ask about training exercises, and a teacher's replies."""

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flowjax.canvas.operators.registry import ADVERTISED
from flowjax.envs import Message, WorldError
from flowjax.envs.canvas import Canvas, exercises
from flowjax.envs.canvas.experts import PLANS, POOR_PLAN
from flowjax.models.nano import build_tokenizer
from flowjax.workflows.codec import Codec

WORLD = Canvas(backends={"executor": {"kind": "run", "base": "executor"}})
ASKING = {operator.name: operator.instruction for operator in ADVERTISED if operator.name != "Test"}
FORMS = {
    "solution": "End with one line: Answer:",
    "program": "```python block",
    "verdict": '"passed": <true or false>',
    "choice": '"choice": <',
    "subproblems": '"subproblems": <',
    "format": "One line: Answer:",
}


def lessons(count: int, seed: int = 0) -> Iterator[tuple[list[Message], str]]:
    tasks = WORLD.tasks("train", 0)[:2000]
    return itertools.islice(WORLD.lessons(tasks, np.random.default_rng(seed)), count)


@functools.cache
def sample() -> list[tuple[list[Message], str]]:
    return list(lessons(3000))


def problem_of(messages: list[Message]) -> str:
    found = re.search(r"## Problem\n(.*?)(?:\n\n|$)", messages[0]["content"], re.DOTALL)
    assert found
    return found[1]


def sources(said: list[tuple[list[Message], str]]) -> set[str]:
    """Kinds of the exercises that lessons are about."""
    readings = [exercises.read(problem_of(messages)) for messages, _ in said]
    return {reading.source for reading in readings if reading is not None}


def asked_with(instruction: str) -> list[tuple[list[Message], str]]:
    return [lesson for lesson in sample() if lesson[0][0]["content"].startswith(instruction)]


def test_every_operator_and_every_phrase_has_lessons_on_every_kind():
    for name, instruction in ASKING.items():
        # A number is bare, and a program too: nobody is asked to format it.
        kinds = {"list"} if name == "Format" else set(exercises.KINDS)
        assert sources(asked_with(instruction)) == kinds, name
    for sentence in exercises.PHRASES.values():
        said = asked_with(sentence)
        assert sources(said) == set(exercises.KINDS)
        for form in ("solution", "program", "verdict", "subproblems"):
            assert any(FORMS[form] in messages[0]["content"] for messages, _ in said), (sentence, form)


def test_replies_are_read_by_the_operators():
    assert not [messages for messages, _ in sample() if "That could not be read" in messages[-1]["content"]]
    repaired = [messages for messages, _ in sample() if "Your program failed" in messages[-1]["content"]]
    assert len(repaired) < 0.01 * len(sample())


def test_no_lesson_is_about_a_held_out_exercise():
    assert {exercises.split_of(problem_of(messages)) for messages, _ in sample()} == {"train"}


def test_lessons_are_the_same_each_time():
    assert list(lessons(50, seed=3)) == list(lessons(50, seed=3)) != list(lessons(50, seed=4))


def test_requests_are_tens_of_pieces_and_come_back_as_they_were(tmp_path: Path):
    build_tokenizer(WORLD.lesson_pieces(), tmp_path, pieces=True)
    codec = Codec(tmp_path)
    lengths, unknown = [], 0
    for messages, reply in lessons(1000, seed=1):
        prompt, ids = codec.encode(messages), codec.encode_reply(reply)
        assert codec.decode(ids) == reply
        lengths.append(len(prompt) + len(ids))
        unknown += (prompt + ids).count(2)
    assert np.mean(lengths) < 80 and max(lengths) < 300
    assert unknown < 1e-3 * sum(lengths)


def test_the_suiting_phrase_has_steps_written_down_that_lead_to_the_answer():
    steps = {"words": "stepwise", "arithmetic": "exact", "list": "sorted"}
    right, written = defaultdict(list), defaultdict(list)
    for word, sentence in exercises.PHRASES.items():
        for messages, reply in asked_with(sentence):
            reading = exercises.read(problem_of(messages))
            shown = messages[0]["content"]
            if reading is None or reading.program or FORMS["solution"] not in shown or "so far" in shown:
                continue
            if "## Candidates" in shown:
                continue
            key = (reading.source, "suiting" if steps[reading.source] == word else word)
            written[key].append("\n" in reply)
            right[key].append(reply.endswith(f"Answer: {reading.answer}"))
    for source in steps:
        assert all(right[source, "suiting"]) and np.mean(written[source, "suiting"]) > 0.9
        assert not any(written[source, "brief"])
    assert np.mean(right["arithmetic", "stepwise"]) < 0.9, "what is multiplied late is not what is asked"
    assert np.mean(right["list", "brief"]) < 0.8, "who looks once overlooks the second"


def test_a_plan_names_the_steps_and_some_plans_are_poor():
    replies = {reply for messages, reply in asked_with(ASKING["Plan"])}
    assert replies == {*PLANS.values(), POOR_PLAN}


def test_problems_of_a_file_are_no_lessons(tmp_path: Path):
    (tmp_path / "one.jsonl").write_text('{"problem": "What is it?", "answer": "1", "problem_type": "math"}\n' * 2)
    world = Canvas(path=str(tmp_path / "one.jsonl"))
    tasks = [task for split in ("train", "held_out") for task in tasks_of(world, split)]
    with pytest.raises(WorldError, match=r"taught on generated exercises: leave env\.options path empty"):
        next(world.lessons(tasks, np.random.default_rng(0)))


def tasks_of(world: Canvas, split) -> list:
    try:
        return list(world.tasks(split, 0))
    except WorldError:
        return []


def test_before_there_are_engines_the_teacher_answers():
    world = WORLD.without_engines()
    env = world.env()
    (task,) = WORLD.tasks("train", 0)[:1]
    env.reset(task, 0)
    step = env.step("add Custom")
    assert step.valid and step.outcome["executor_calls"] == 1
    assert step.observation.view.run.status == "ok"
    assert WORLD.options.backends["executor"]["kind"] == "run", "of the world itself nothing is changed"
