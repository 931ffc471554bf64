"""The world of mathematics: episodes with and without calculator, keys, parsing, splits."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np
import pytest
from two_processes import printed_in_two_processes

from flowjax.envs import EnvDied, Observation, Past, Split, Step, WorldError, find_world
from flowjax.envs.demonstrations import demonstrations
from flowjax.envs.math import Math, world
from flowjax.envs.math.problems import split_of, worked_out
from flowjax.envs.math.world import ANSWER, CALCULATE, CalculatorError, MathEnv, MathView, Rule, calculate
from flowjax.envs.pool import EnvPool
from flowjax.grading.sandbox import NoProcessorError
from flowjax.records import Task

KINDS = [
    {},
    {"answer": "whole", "digits": 1},
    {"answer": "last_number", "operators": "+-*/", "terms": 4},
    {"answer": "last_number", "operators": "+-*/", "terms": 4, "worked_share": 0.5},
    {"calculator": 2, "operators": "+-*/", "terms": 3},
]
WORLD = Math()
SUM = Task("sum", "math", 0, {"question": "12+34=?", "answer": "46", "expression": "12+34"})


def begin(task: Task = SUM, **options) -> tuple[MathEnv, Observation]:
    env = Math(**options).env()
    return env, env.reset(task, 0)


def take(source, index: int) -> Task:
    task = source[index]
    assert task is not None
    return task


@pytest.mark.parametrize("options", KINDS)
def test_the_expert_is_right_in_every_episode(options: dict):
    for split in ("train", "held_out"):
        source = Math(**options).tasks(split, 0)
        env = Math(**options).env()
        for index in range(100):
            observation = env.reset(take(source, index), 0)
            steps: list[Step] = []
            for _ in range(2 if "calculator" in options else 1):
                action = WORLD.expert(env)
                for style in ("instruct", "compact"):
                    assert WORLD.parse_action(WORLD.reply(action, style), observation.legal_actions) == action
                steps.append(env.step(action))
                observation = steps[-1].observation
            assert steps[-1].terminal and steps[-1].reward == steps[-1].outcome["success"] == 1.0


@pytest.mark.parametrize("options", KINDS)
def test_a_random_policy_acts_legally_and_is_hardly_ever_right(options: dict):
    rng = np.random.default_rng(0)
    source = Math(**options).tasks("held_out", 0)
    env = Math(**options).env()
    right = 0.0
    for index in range(200):
        observation = env.reset(take(source, index), 0)
        steps: list[Step] = []
        while not (steps and steps[-1].terminal):
            action = WORLD.random_action(observation, rng)
            assert WORLD.parse_action(action, observation.legal_actions) == action
            steps.append(env.step(action))
            assert steps[-1].valid
            observation = steps[-1].observation
        assert len(steps) <= 3 and set(steps[-1].outcome) == set(Math.OUTCOMES)
        right += steps[-1].outcome["success"]
    assert right < 40


def test_where_the_answer_of_a_single_turn_stands():
    replies = {
        r"12+34 is \boxed{46}": {"boxed", "last_number", "whole", "anywhere"},  # a box in the whole counts
        "12+34 is 46": {"last_number", "anywhere"},
        "46": {"last_number", "whole", "anywhere"},
        r"\boxed{46} and not 47": {"boxed", "whole", "anywhere"},
        "no idea": set(),
    }
    for rule in get_args(Rule):
        for text, right in replies.items():
            env, observation = begin(answer=rule)
            step = env.step(WORLD.parse_action(text, observation.legal_actions) or "")
            assert (step.outcome["success"] == 1.0) == (rule in right), (rule, text)


def test_a_reply_without_an_answer_is_invalid_and_changes_nothing():
    env, before = begin()
    for text in ("", "46", r"\boxed{}", r"\boxed{46"):
        assert WORLD.parse_action(text, before.legal_actions) in (None, r"\boxed{}")
        step = env.step(text)
        assert (step.valid, step.terminal, step.reward, step.observation) == (False, False, 0.0, before)
    assert env.step(r"\boxed{47}").outcome == {"success": 0.0, "answered": 1.0, "calculations": 0.0}
    after = env.step(r"\boxed{46}")
    assert (after.valid, after.terminal, after.reward, after.outcome["success"]) == (False, True, 0.0, 0.0)


def test_the_calculator_helps_and_runs_out():
    env, first = begin(calculator=2)
    assert first.legal_actions == (CALCULATE, ANSWER)
    bad = env.step("calculate[12+]")
    assert (bad.valid, bad.observation) == (False, first)
    step = env.step("calculate[12 + 34]")
    assert step.valid and step.observation.view == MathView("12+34=?", ("12+34=46",))
    assert WORLD.follow_up(step.observation, "compact")[0]["content"] == "1 2 + 3 4 = 4 6"
    step = env.step("calculate[46^2]")
    assert step.observation.legal_actions == (ANSWER,)
    assert WORLD.parse_action("calculate[1+1]", step.observation.legal_actions) is None
    assert not env.step("calculate[1+1]").valid
    end = env.step("answer[46]")
    assert end.terminal and end.outcome == {"success": 1.0, "answered": 1.0, "calculations": 2.0}


def key_after(*actions: str, task: Task = SUM) -> int:
    env, observation = begin(task, calculator=4)
    for action in actions:
        observation = env.step(action).observation
    return observation.state_key


def test_keys_name_the_true_state():
    one, two = "calculate[1+2]", "calculate[3*4]"
    assert key_after(one, two) == key_after(two, one)
    other = Task("t", "math", 0, {"question": "12+34=?", "answer": "47"})
    states = [(), (one,), (two,), (one, two), (one, one), ("answer[46]",), ("answer[45]",), (one, "answer[46]")]
    keys = [key_after(*actions) for actions in states] + [key_after(task=other)]
    assert len(set(keys)) == len(keys)
    assert key_after("calculate[1+]") == key_after("nonsense") == key_after()


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think>hm</think><action>calculate[1+1]</action>", "calculate[1+1]"),
        ("<action>Answer[ 46 ]</action>", "answer[46]"),
        ("answer[46]", "answer[46]"),
        ("answer[ 4 6 ]", "answer[46]"),
        ("calculate[ 1 2 + 3 4 ]", "calculate[12+34]"),
        ("answer[(1,2]]", "answer[(1,2]]"),
        ("<action>calculate[1]</action> no, <action>answer[2]</action>", "answer[2]"),
        ("<ACTION>answer[2]</Action>", "answer[2]"),
        ("answer[]", None),
        ("I say answer[46]", None),
        ("<action>answer[46]", None),
        ("answer[46]</action>", None),
        ("guess[46]", None),
        ("", None),
    ],
)
def test_what_a_reply_with_a_calculator_does(text: str, action: str | None):
    assert WORLD.parse_action(text, (CALCULATE, ANSWER)) == action


@pytest.mark.parametrize(
    ("options", "replies"),
    [({}, 1500), ({"answer": "whole"}, 500), ({"answer": "last_number"}, 3000), ({"calculator": 2}, 5000)],
)
def test_ten_thousand_replies_without_sense(options: dict, replies: int):
    rng = np.random.default_rng(0)
    words = [
        "<action>",
        "</action>",
        "calculate[",
        "answer[",
        "]",
        r"\boxed{",
        "}",
        "46",
        "(",
        ")",
        "^",
        "9",
        "*",
        "/0",
    ]
    words += ["\x00", "é∞", " ", "\n", r"\frac{", "None", "__import__('os')", "![", "1e9"]
    env, observation = begin(**options)
    for number, count in enumerate(rng.integers(8, size=replies).tolist()):
        text = "".join(words[i] for i in rng.integers(len(words), size=count))
        if not number % 5:
            text = f"answer[{text}]" if "calculator" in options else rf"\boxed{{{text}}}"
        action = WORLD.parse_action(text, observation.legal_actions)
        assert action is None or action.strip()
        for attempt in (text, action or ""):
            step = env.step(attempt)
            assert step.valid or step.observation == observation
            observation = step.observation
            if step.terminal:
                assert step.outcome["answered"] == 1.0
                observation = env.reset(SUM, 0)


@pytest.mark.parametrize("options", KINDS)
def test_compact_prompts_and_replies_use_only_the_vocabulary(options: dict):
    words = set(Math(**options).vocabulary())
    assert all(word.split() == [word] for word in words)
    rng = np.random.default_rng(0)
    source = Math(**options).tasks("train", 0)
    env = Math(**options).env()
    for index in range(50):
        observation = env.reset(take(source, index), 0)
        for say in (WORLD.expert(env), *[WORLD.random_action(observation, rng) for _ in range(3)]):
            assert set(WORLD.reply(say, "compact").split()) <= words
            past = [Past(1, observation.view, say)]
            for messages in (WORLD.prompt(observation, past, "compact"), WORLD.follow_up(observation, "compact")):
                assert set(messages[0]["content"].split()) <= words
            observation = env.step(say).observation


def test_instruct_prompts_say_what_is_wanted():
    env, observation = begin()
    [message] = WORLD.prompt(observation, [], "instruct")
    assert "12+34=?" in message["content"] and r"\boxed{}" in message["content"]
    [message] = WORLD.prompt(observation, [Past(1, observation.view, "")], "instruct")
    assert "held no answer" in message["content"]
    env, observation = begin(calculator=2)
    observation = env.step("calculate[12+34]").observation
    for messages in (WORLD.prompt(observation, [], "instruct"), WORLD.follow_up(observation, "instruct")):
        assert "12+34=46" in messages[0]["content"] and "<action>" in messages[0]["content"]


def test_questions_of_several_lines_stay_whole():
    task = Task("t", "math", 0, {"question": "First.\nSecond?", "answer": "1"})
    env, observation = begin(task, calculator=1)
    assert "First.\nSecond?\n\n" in WORLD.prompt(observation, [], "instruct")[0]["content"]
    assert WORLD.follow_up(observation, "instruct")[0]["content"].startswith("First.\nSecond?\n\n")
    observation = env.step("calculate[1+1]").observation
    [message] = WORLD.prompt(observation, [], "instruct")
    assert "First.\nSecond?\n\nCalculated so far:\n1+1=2\n\n" in message["content"]
    assert WORLD.follow_up(observation, "instruct")[0]["content"].startswith("1+1=2\n\n")


def test_splits_share_no_problem_over_ten_data_seeds():
    seen: dict[Split, set[str]] = {"train": set(), "held_out": set()}
    for split, questions in seen.items():
        for data_seed in range(10):
            source = Math(digits=2).tasks(split, data_seed)
            questions.update(take(source, index).payload["question"] for index in range(200))
        assert len(questions) > 300
        assert all(split_of(question) == split for question in questions)
    assert not seen["train"] & seen["held_out"]


def test_tasks_are_the_same_in_every_process_and_order():
    program = (
        "from flowjax.envs.math import Math\n"
        "source = Math(operators='+-*/', terms=3).tasks('held_out', 7)\n"
        "env = Math(calculator=1).env()\n"
        "print([dict(source[i].payload) for i in (40, 3, 17)], [env.reset(source[i], 0).state_key for i in (3, 40)])\n"
    )
    printed_in_two_processes(program)
    source = Math().tasks("train", 0)
    forwards = [take(source, index) for index in range(20)]
    assert [take(source, index) for index in reversed(range(20))] == forwards[::-1]
    assert take(Math().tasks("train", 1), 0) != forwards[0]


def test_generated_answers_are_what_python_says():
    for options in ({"operators": "+-*/", "terms": 5, "digits": 3}, {"digits": 1}, {"operators": "/"}):
        source = Math(**options).tasks("train", 0)
        for index in range(100):
            payload = take(source, index).payload
            assert eval(payload["expression"]) == int(payload["answer"])
            assert payload["question"] == f"{payload['expression']}=?"


def test_problems_of_several_lengths_have_each_of_them_about_as_often():
    source = Math(digits=1, terms=4, fewest_terms=2).tasks("held_out", 0)
    lengths = [take(source, index).payload["expression"].count("+") + 1 for index in range(300)]
    assert set(lengths) == {2, 3, 4} and all(70 < lengths.count(length) < 130 for length in (2, 3, 4))


def test_a_share_of_the_expert_s_replies_is_worked_out_one_operation_at_a_time():
    assert worked_out("12+34+5") == "=46+5=51"
    assert worked_out("7-8/4*3+1") == "=7-2*3+1=7-6+1=1+1=2"
    assert worked_out("3-5+4") == "=-2+4=2"
    env = Math(answer="last_number", operators="+-*/", terms=4, worked_share=0.3).env()
    replies = []
    for task in Math(operators="+-*/", terms=4).tasks("train", 0)[:2000]:
        env.reset(take([task], 0), 0)
        replies.append(env.best_action())
    long = [reply for reply in replies if reply.startswith("=")]
    assert 0.26 < len(long) / 2000 < 0.34
    for reply in long:
        values = {eval(side) for side in reply.replace("/", "//").split("=")[1:]}
        assert len(values) == 1, reply
    env.reset(SUM, 0)
    assert env.step(worked_out("12+34")).reward == 1.0


def test_formulas_are_judged_outside_the_main_thread_too():
    task = Task("t", "math", 0, {"question": "Expand.", "answer": "x^2+2x+1"})
    env, _ = begin(task)
    steps: list[Step] = []
    thread = threading.Thread(target=lambda: steps.append(env.step(r"\boxed{(x+1)^2}")))
    thread.start()
    thread.join()
    assert steps[0].outcome["success"] == 1.0


def test_a_verdict_that_a_busy_machine_does_not_come_to_is_not_the_policys_fault(monkeypatch: pytest.MonkeyPatch):
    class Busy:
        def call(self, *arguments: object) -> bool:
            raise NoProcessorError("flowjax.grading.math:equal gave no answer within 100.0 s on the clock")

    monkeypatch.setattr(world, "_processes", lambda function: Busy())
    env, _ = begin(Task("t", "math", 0, {"question": "Expand.", "answer": "x^2+2x+1"}))
    with ThreadPoolExecutor(1) as thread, pytest.raises(EnvDied, match="grading: flowjax") as died:
        thread.submit(env.step, r"\boxed{(x+1)^2}").result()
    assert died.value.status == "executor_error"


def test_formulas_are_judged_in_environment_processes():
    task = Task("t", "math", 0, {"question": "Expand.", "answer": "x^2+2x+1"})

    async def play() -> list[Step]:
        async with EnvPool(workers=1) as pool:
            answers = [r"\boxed{(x+1)^2}", r"\boxed{9^{9^{9^9}}}", r"\boxed{(x+2)^2}"]
            steps = []
            for answer in answers:
                async with pool.session("flowjax.envs.math:Math", {}) as env:
                    await env.reset(task, 0)
                    steps.append(await env.step(answer))
            assert (pool.counts.timeouts, pool.counts.crashes) == (0, 0)
            return steps

    assert [step.outcome["success"] for step in asyncio.run(play())] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("minuses", "value"), [(40, "7"), (41, None)])
def test_an_expression_is_nested_forty_deep_at_most(minuses: int, value: str | None):
    if value is not None:
        assert calculate("-" * minuses + "7") == value
    else:
        with pytest.raises(CalculatorError, match="nested too deeply"):
            calculate("-" * minuses + "7")


def test_generated_problems_need_no_math_verify(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    for text, right in ((r"\boxed{46.0}", 1.0), (r"\boxed{2x+1}", 0.0)):
        env, _ = begin()
        step = env.step(text)
        assert (step.terminal, step.reward) == (True, right)


def test_demonstrations_in_one_conversation():
    options = {"calculator": 1}
    world = find_world("flowjax.envs.math:Math")(**options)
    source = Math(**options).tasks("train", 0)[:5]
    told = demonstrations(
        world,
        source,
        path_noise=0.0,
        label_noise=0.0,
        max_turns=3,
        style="compact",
        rng=np.random.default_rng(0),
        context="append",
    )
    conversation = next(told)
    assert [reply.split()[0] for _, reply in conversation] == ["calculate[", "answer["]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"digits": 0}, "digits is 0: it must be at least 1 and at most 12"),
        ({"terms": 1}, "terms is 1: it must be at least 2"),
        ({"fewest_terms": 1}, "fewest_terms is 1: "),
        ({"fewest_terms": 3}, "fewest_terms is 3: it must be at most env.options.terms, 2"),
        ({"operators": "+x"}, "operators is '\\+x'"),
        ({"answer": "first"}, "answer is 'first': use one of boxed"),
        ({"calculator": -1}, "calculator is -1"),
        ({"worked_share": 0.5}, 'worked_share is 0.5: .* with answer="last_number"'),
        ({"worked_share": 1.5, "answer": "last_number"}, "worked_share is 1.5: it must be at least 0 and at most 1"),
        ({"level": 3}, "level"),
    ],
)
def test_wrong_options_are_named(options: dict, named: str):
    with pytest.raises(WorldError, match=named):
        Math(**options).env()


@pytest.mark.parametrize(
    ("options", "same", "other"),
    [
        ({"answer": "boxed"}, (r"so \boxed{1/2}", r"\boxed{0.5}"), r"\boxed{2}"),
        ({"answer": "last_number"}, ("I say 1,000", "1000."), "none"),
        ({"calculator": 1}, ("answer[ 07 ]", "answer[7]"), "calculate[3+4]"),
    ],
)
def test_equal_answers_are_equal_texts_for_a_majority(options, same, other):
    world, after = Math(**options), Observation(None, (), 0)
    assert world.answer(same[0], after) == world.answer(same[1], after) != ""
    assert world.answer(other, after) != world.answer(same[0], after)
    assert world.answer("", after) == "" == Math(calculator=1).answer("calculate[3+4]", after)
