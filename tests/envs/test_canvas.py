"""The canvas world: edits run, whatever an agent does has an answer, what counts is the run's, splits, prompts."""

import contextlib
import json
import re
import runpy
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from two_processes import printed_in_two_processes

from flowjax.canvas import Sequence, Workflow, actions, load_operators, svg
from flowjax.canvas.context import Sandbox
from flowjax.canvas.text import show
from flowjax.envs import NotReady, Observation, Past, Split, WorldError, find_world
from flowjax.envs.canvas import Canvas, exercises
from flowjax.envs.canvas.env import CanvasEnv
from flowjax.envs.canvas.executors import RememberingSandbox
from flowjax.envs.canvas.experts import MISTAKEN, STEPS, SUITING, wanted
from flowjax.envs.demonstrations import demonstrations
from flowjax.grading.code import CallCase, Suite, Verdict
from flowjax.launch.checks import check_config
from flowjax.launch.probe import inspect_run
from flowjax.published.canvas import PublishedCanvas
from flowjax.records import Task
from flowjax.rewards import COMPONENTS, check_reward, required_outcomes
from flowjax.run import resolve
from tests.canvas.shown_text import read, text_of

ROOT = Path(__file__).parents[2]
LONGEST_PROMPT_WORDS, LONGEST_REPLY_WORDS, LONGEST_RESULT_WORDS = 102, 18, 7
SUM = exercises.Exercise("arithmetic", "math", "Compute 2 + 3.", "5", 2)


def take(source, index: int) -> Task:
    task = source[index]
    assert task is not None
    return task


def begin(
    exercise: exercises.Exercise = SUM, *, world: type[Canvas] = Canvas, **options
) -> tuple[CanvasEnv, Observation]:
    env = world(**options).env()
    return env, env.reset(Task("t", "canvas", 0, exercises.payload(exercise)), 0)


def success(task: Task, rng: np.random.Generator | None, **options) -> float:
    """Of the expert, or of random actions where there is a generator."""
    env = Canvas(turns=7, **options).env()
    observation = env.reset(task, 0)
    while True:
        action = Canvas().expert(env) if rng is None else Canvas().random_action(observation, rng)
        for style in ("instruct", "compact"):
            written = Canvas().reply(action, style)
            assert Canvas().parse_action(written, observation.legal_actions) == (
                action if rng is None else actions.show_compact(read_back(action))
            )
            assert style == "instruct" or len(written.split()) <= LONGEST_REPLY_WORDS
        said = Canvas().prompt(observation, [], "compact")[0]["content"].split()
        assert len(said) <= LONGEST_PROMPT_WORDS and set(said) <= set(Canvas(**options).vocabulary())
        step = env.step(action)
        observation = step.observation
        assert len(Canvas().follow_up(observation, "compact")[0]["content"].split()) <= LONGEST_RESULT_WORDS
        assert set(step.outcome) == set(Canvas.OUTCOMES) and all(np.isfinite(list(step.outcome.values())))
        if step.terminal:
            return step.outcome["success"]


@pytest.mark.parametrize(
    ("kind", "said", "same", "other"),
    [
        ("math", "1,000.0", "1000", "1001"),
        ("qa", "The  Eiffel Tower.", "eiffel tower", "Big Ben"),
        ("code", "def f(x): return x", "def f(x):  return (x)", "def f(x): return 2"),
    ],
)
def test_equal_answers_of_workflows_are_equal_texts_for_a_majority(kind, said, same, other):
    def answer(text: str) -> str:
        reply = f"```python\n{text}\n```" if kind == "code" else f"Answer: {text}"
        backends = {"main": {"kind": "offline", "rules": [{"answer": reply}]}}
        tested: dict[str, Any] = {"entry_point": "f", "hidden_tests": ("assert f(1) == 1",)} if kind == "code" else {}
        exercise = exercises.Exercise("file", kind, "What is it?", "1", 1, **tested)
        env, _ = begin(exercise, backends=backends)
        world = Canvas(backends=backends)
        assert world.answer("", env.step("add Plan").observation) == ""  # a plan is no answer
        return world.answer("", env.step("add Custom").observation)

    assert answer(said) == answer(same) != ""
    assert answer(other) != answer(said)
    long = "x" * 400
    assert answer(f"def f(x): return '{long}'" if kind == "code" else long) == ""  # what is cut cannot be compared


def test_a_nano_policy_reads_the_problem_and_can_take_every_kind_of_action():
    """With two executors: the words of prompts and replies, random edits and the plain expert's habits included."""
    options = runpy.run_path(str(ROOT / "configs" / "canvas.py"))["get_config"]("nano").env.options.to_dict()
    world, rng = Canvas(**options), np.random.default_rng(0)
    env, words, taken = world.env(), set(world.vocabulary()), set()
    for index in range(60):
        task = take(world.tasks("train", 0), index)
        observation = env.reset(task, 0)
        first = world.prompt(observation, [], "compact")[0]["content"]
        assert first.startswith("@large 5 @small 1 ")
        assert set(exercises.words(task.payload["text"])) <= set(first.split())
        while True:
            said = world.prompt(observation, [], "compact")[0]["content"].split()
            assert len(said) <= LONGEST_PROMPT_WORDS and set(said) <= words, set(said) - words
            action = world.random_action(observation, rng) if index % 2 else world.expert(env)
            reply = world.reply(action, "compact").split()
            assert len(reply) <= LONGEST_REPLY_WORDS and set(reply) <= words, set(reply) - words
            assert world.parse_action(" ".join(reply), ()) == world.parse_action(action, ())
            taken |= {reply[0], *(sign for sign in ("into", "at", "@large", '"exact"') if sign in reply)}
            step = env.step(action)
            observation = step.observation
            if step.terminal:
                break
    assert taken >= {*actions.WORDS, "into", "at", "@large", '"exact"'}


def test_a_phrase_is_written_out_for_the_executor_and_shown_by_its_word():
    env, _ = begin()
    step = env.step('add Custom{"exact"}')
    assert [call.instruction for call in env.workflow.calls()] == [exercises.PHRASES["exact"]]
    assert exercises.PHRASES["exact"] in text_of(env, step.observation)
    said = Canvas().prompt(step.observation, [], "compact")[0]["content"]
    assert ": Custom exact n1 = " in said
    other = env.step("prompt n1 Name the units.").observation
    assert ": Custom instructed n1 = " in Canvas().prompt(other, [], "compact")[0]["content"]


def test_the_instructing_expert_gives_every_kind_any_phrase_and_most_often_one_that_does_not_suit():
    given: list[tuple[str, str]] = []
    for index in range(300):
        text = take(Canvas().tasks("train", 0), index).payload["text"]
        reading = exercises.read(text)
        assert reading is not None
        steps = wanted(text, "", "instructing")
        phrases = [
            call.instruction for step in steps for call in Workflow(Sequence((step,))).calls() if call.instruction
        ]
        assert len(phrases) == 1
        given.append((reading.source, phrases[0]))
    assert set(given) == {(kind, phrase) for kind in exercises.KINDS for phrase in exercises.PHRASES}
    for kind, mistaken in MISTAKEN.items():
        assert STEPS[mistaken] != SUITING[kind]
        share = np.mean([phrase == mistaken for source, phrase in given if source == kind])
        assert 0.45 < share < 0.75  # a half, and one fifth of the other half


def test_the_instructing_expert_builds_what_it_wants_and_then_finishes():
    steps = wanted(SUM.text, "math", "instructing")
    world, actions_taken = Canvas(expert="instructing"), []
    env = world.env()
    env.reset(Task("t", "canvas", 0, exercises.payload(SUM)), 0)
    while (action := world.expert(env)) != "finish":
        actions_taken.append(action)
        assert env.step(action).valid and len(actions_taken) <= len(steps)
    assert actions_taken == [f"add {show(step)}" for step in steps]


def test_the_instructing_expert_sends_half_of_the_solvers_to_the_other_executor():
    texts = [take(Canvas().tasks("train", 0), index).payload["text"] for index in range(300)]
    sent = [any("@large" in show(step) for step in wanted(text, "", "instructing", ("large",))) for text in texts]
    assert 0.4 < np.mean(sent) < 0.6
    alone = [any("@" in show(step) for step in wanted(text, "", "instructing")) for text in texts]
    assert not any(alone)


def read_back(action: str) -> actions.Action:
    read = actions.parse_compact(action)
    assert not isinstance(read, actions.Unreadable)
    return read


def test_the_expert_solves_most_and_random_edits_hardly_any():
    tasks = [take(Canvas().tasks("held_out", 0), index) for index in range(24)]
    able = np.mean([success(task, None) for task in tasks])
    plain = np.mean([success(task, None, expert="plain") for task in tasks])
    rng = np.random.default_rng(0)
    random = np.mean([success(task, rng) for task in tasks])
    assert able > 0.65 and 0.15 < plain < 0.6 and random < 0.3
    assert able > plain + 0.2


def test_each_edit_runs_and_only_what_changed_asks_again():
    env, first = begin()
    assert read(text_of(env, first)).workflow == "" and "Run: none" in text_of(env, first)
    step = env.step("add AnswerGenerate")
    calls = step.outcome["executor_calls"]
    assert step.valid and calls == 1.0 and "n1 AnswerGenerate: " in text_of(env, step.observation)
    step = env.step("add Format")
    assert step.outcome["executor_calls"] == calls  # a bare number is formatted already, and the first is remembered
    step = env.step('prompt n1 "Look twice."')
    assert step.valid and step.outcome["executor_calls"] == calls + 1  # another instruction is another question
    step = env.step("delete n2")
    assert step.valid and step.outcome["executor_calls"] == calls + 1


def test_what_one_episode_asks_costs_the_same_whatever_others_have_asked():
    def spent() -> list[float]:
        env, _ = begin()
        return [env.step(action).outcome["executor_calls"] for action in ("add Programmer", "add Verify", "finish")]

    assert spent() == spent()


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("", "empty"),
        ("I think we are done", "There is no action"),
        ("add", "nothing to add"),
        ("add programmer", "Programmer"),  # the name that is near
        ("add Custom -> -> Custom", "Character"),
        ("add [ Custom ]", "two branches"),
        ("add (Custom) * 99", "1 to 10"),
        ("add Custom into n9", "no node `n9`"),
        ("delete n7", "no node `n7`"),
        ("modify n2 Custom", "is a parallel"),
        ("<action>add</action><structure>parallel</structure>", "missing"),
        ("<action>add</action><operator>Custom</operator><action>finish</action>", "several actions"),
        ("finish now or never <action>", ""),
    ],
)
def test_a_bad_action_is_refused_with_a_reason_and_changes_nothing(action: str, reason: str):
    """Flaws 8.2: wrong names and edits of a parallel's parent took the published canvas into a state without exit."""
    env, _ = begin()
    before = env.step("add Custom").observation
    env.step("add [Custom, Plan]")
    workflow = env.workflow
    step = env.step(action)
    if action.startswith("finish"):
        assert step.terminal
        return
    assert not step.valid and not step.terminal and env.workflow == workflow
    assert reason.lower() in read(text_of(env, step.observation)).facts["Refused"].lower()
    assert "refused" in Canvas().prompt(step.observation, [], "compact")[0]["content"].split()
    after = env.step("add Format")
    assert after.valid and "Refused" not in text_of(env, after.observation)
    assert read(text_of(env, before)).problem == read(text_of(env, after.observation)).problem


def test_no_input_locks_the_canvas():
    rng = np.random.default_rng(1)
    words = [
        *Canvas().vocabulary(),
        "<action>",
        "</action>",
        '"',
        "{",
        "}",
        "#",
        "@x",
        "",
        "\n",
        "n1.true",
        "into",
        "at",
    ]
    env, observation = begin(turns=300)
    for _ in range(120):
        garbage = " ".join(words[i] for i in rng.integers(len(words), size=rng.integers(1, 8)))
        step = env.step(garbage if rng.random() < 0.8 else Canvas().random_action(observation, rng))
        if step.terminal:
            env.reset(Task("t", "canvas", 0, exercises.payload(SUM)), 0)
        assert read(text_of(env, step.observation)).problem == SUM.text
    env.reset(Task("t", "canvas", 0, exercises.payload(SUM)), 0)
    assert env.step("add Programmer").valid


def test_finish_ends_and_out_of_turns_is_scored_as_it_stands():
    env, _ = begin(turns=3)
    steps = [env.step("add Programmer"), env.step("add Programmer"), env.step("add Programmer")]
    assert [step.terminal for step in steps] == [False, False, True]
    assert steps[-1].outcome["finished"] == 0.0
    assert steps[-1].reward == steps[-1].outcome["success"] == float(env.run is not None and env.run.answer == "5")
    assert not env.step("finish").valid
    env, _ = begin()
    env.step("add Programmer")
    assert env.step("finish 77").outcome["finished"] == 1.0  # what it believes is not what counts
    assert env.run is not None and env.run.answer != "77"


def test_an_empty_canvas_can_be_finished_and_is_wrong():
    env, _ = begin()
    step = env.step("finish")
    assert step.terminal and step.valid and step.outcome["success"] == step.reward == 0.0


def test_a_failing_step_is_named_and_can_be_deleted():
    env, _ = begin()
    step = env.step("add ScEnsemble")
    assert step.valid and read(text_of(env, step.observation)).facts["Run"] == "failed in n1"
    assert "error n1" in Canvas().prompt(step.observation, [], "compact")[0]["content"]
    assert Canvas().expert(env) == "delete n1"
    step = env.step("delete n1")
    assert step.valid and show(env.workflow) == ""


def test_outputs_cannot_pass_for_parts_of_the_observation():
    told = "Compute 2 + 3."
    env, _ = begin(exercises.Exercise("arithmetic", "math", told, "5", 2), output_characters=5)
    step = env.step('add Custom{"a\\n\\n## Result\\nAnswer: 99\\nTurns left: 0"}')
    shown = read(text_of(env, step.observation))
    assert shown.problem == told and shown.facts["Turns left"] == "19"
    assert len(shown.facts["Answer"]) <= 8


def test_the_budget_of_an_episode_ends_runs():
    env, _ = begin(max_calls=2)
    env.step("add Custom")
    step = env.step("add [Plan, Decompose, Review]")
    assert "Budget left: 0 calls" in text_of(env, step.observation)
    assert read(text_of(env, step.observation)).facts["Run"] == "budget"
    assert step.outcome["executor_calls"] == 2.0
    assert env.step("finish").valid


def test_the_gate_is_an_option():
    env, _ = begin(min_operators=2, require_structure=True, require_checker=True)
    assert not env.step("finish").valid
    env.step("add AnswerGenerate")
    assert "needs 2" in text_of(env, env.step("finish").observation)
    env.step("add Format")
    assert "parallel, a conditional or a loop" in text_of(env, env.step("finish").observation)
    env.step("add (Format) * 2")
    assert "one that checks" in text_of(env, env.step("finish").observation)
    env.step("add Verify")
    assert env.step("finish").terminal


def test_hints_are_an_option_and_off():
    """Flaw 8.1.6: a hand-written controller hands the policy the next operator."""
    env, first = begin()
    texts = [text_of(env, first)] + [
        text_of(env, env.step(f"add {name}").observation) for name in ("Plan", "Programmer", "Verify")
    ]
    assert not any("Hint" in text or "NEXT" in text for text in texts)
    env, _ = begin(world=PublishedCanvas, lenient=False)
    told = [read(text_of(env, env.step(f"add {name}").observation)).facts["Hint"] for name in ("Plan", "Programmer")]
    assert told == ["add Programmer", "add Verify"]


def reward(actions_taken: str, component: str = "canvas") -> float:
    """Of the workflow that these actions build, by a component."""
    env, _ = begin(world=PublishedCanvas)
    outcome = [env.step(action).outcome for action in (*actions_taken.split("; "), "finish")][-1]
    names = required_outcomes({component: 1.0})
    return float(resolve_name(COMPONENTS[component])(**{name: jnp.array([outcome[name]]) for name in names})[0])


def test_structure_that_does_nothing_earns_nothing():
    """Flaw 5.1: the published formula pays this workflow in full; here it gets the base reward alone."""
    hack = "add Plan; add Plan; add Plan; add [Plan, Verify]; add Format"
    assert reward(hack, "published_canvas") == pytest.approx(0.0)
    assert reward(hack) == pytest.approx(-1.0)
    beside = "add AnswerGenerate; add Plan; add Plan; add [Plan, Decompose]; add Plan ? Plan : done"
    assert reward(beside) == pytest.approx(reward("add AnswerGenerate"))


def test_loops_earn_what_other_structures_do():
    loop = "add AnswerGenerate; add (Review -> Revise) * 2"
    assert reward(loop) >= reward("add AnswerGenerate; add Review; add Revise") + 0.4 - 1e-6
    assert reward(loop, "published_canvas") == pytest.approx(-0.8)


def test_a_verdict_of_a_time_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    said = [Verdict((False,), ("took too long",), 0.0, "none"), Verdict((True,), ("",), 0.0, "none")]
    monkeypatch.setattr(Sandbox, "judge", lambda *_: said.pop(0))
    suite, sandbox = Suite((CallCase((1,), 1),), "f"), RememberingSandbox()
    judged = [sandbox.judge("def f(x): return x  # at times late", suite).success for _ in range(3)]
    assert judged == [False, True, True]


def test_programs_are_scored_by_hidden_tests():
    wanted = exercises.Specification("the largest", "the numbers", "even", 2)
    text = (
        "Write a Python function compute(numbers) that takes a list of whole numbers and returns the largest of the "
        "numbers that are even, or 0 if there are none."
    )
    tests = tuple(f"assert compute({given}) == {wanted.value(given)}" for given in ([2, 4], [6, 9], [1], [-2, 8]))
    task = exercises.Exercise("program", "code", text, "", 3, "compute", tests[:2], tests[2:])
    env, first = begin(task)
    assert tests[0] in text_of(env, first) and tests[2] not in text_of(env, first)
    env.step("add Custom")
    verdicts: dict[str, float] = {}
    for phrase in exercises.PHRASES:
        step = env.step(f"prompt n1 {phrase}")
        assert env.run is not None
        verdicts[env.run.answer] = step.outcome["success"]
    for program, right in verdicts.items():
        names: dict = {}
        exec(program, names)
        with contextlib.suppress(NameError):  # one of the faults that the simulated solver makes
            assert right == all(names["compute"](given) == wanted.value(given) for given in ([1], [-2, 8]))
            continue
        assert right == 0.0
    assert set(verdicts.values()) == {0.0, 1.0}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_exercises_say_all_that_is_needed(split: Split):
    for index in range(300):
        made = take(Canvas().tasks(split, 3), index).payload
        reading = exercises.read(made["text"])
        assert reading is not None and (reading.source, reading.size) == (made["source"], made["size"])
        assert [reading.answer] == (made["answers"] or [""])
        assert exercises.split_of(made["text"]) == split
        if reading.program is not None:
            for test in (*made["public_tests"], *made["hidden_tests"]):
                exec(test, {"compute": reading.program.value})


@pytest.mark.parametrize(
    "text",
    [
        "Tom has 5 apples. He gives half of them to Ann. How many apples does Tom have?",
        "Ann has 20 dollars. She spends 5 dollars. How many dollars does she have?",
        "Ana has 20 coins. Ana loses 5 coins. How many coins does Ana have in the end?",
        "Ana has 20 coins. Ana gets 5 more. How many coins does Ben have in the end?",
        "Ana has 200 coins. Ana gets 5 more. How many coins does Ana have in the end?",
        "Compute 12*3.",
        "Compute 5 +.",
        "Ana owns 3 coins. Ben sold 4 coins. Who owns the most coins?",
        "Write a Python function compute(numbers) that takes a list of whole numbers and returns the sum of the "
        "numbers that are prime, or 0 if there are none.",
    ],
)
def test_problems_of_files_are_no_exercises_however_alike(text: str):
    """Read as exercises they had a wrong answer, or none at all and an error."""
    assert exercises.read(text) is None
    _, observation = begin(exercises.Exercise("file", "math", text, "5", 2))
    assert "math" in Canvas().prompt(observation, [], "compact")[0]["content"].split()


def test_splits_share_no_exercise():
    texts = [{take(Canvas().tasks(split, 0), index).payload["text"] for index in range(500)} for split in SPLITS]
    assert not texts[0] & texts[1]


SPLITS: tuple[Split, ...] = ("train", "held_out")
PLAY = """
import numpy as np
from flowjax.envs.canvas import Canvas
rng = np.random.default_rng(7)
env = Canvas(turns=6).env()
for index in range(3):
    observation = env.reset(Canvas().tasks("train", 1)[index], 5)
    print(observation)
    while True:
        step = env.step(Canvas().expert(env) if rng.random() < 0.6 else Canvas().random_action(observation, rng))
        observation = step.observation
        outcome = {name: value for name, value in step.outcome.items() if name != "executor_seconds"}
        print(observation, step.reward, step.terminal, step.valid, outcome)
        if step.terminal:
            break
"""


def test_episodes_are_equal_in_every_process():
    printed_in_two_processes(PLAY)


def test_one_conversation_says_everything_once():
    world = find_world("flowjax.envs.canvas:Canvas")(turns=7)
    source = Canvas().tasks("train", 0)[:3]
    told = demonstrations(
        world, source, path_noise=0.0, label_noise=0.0, max_turns=7, style="compact",
        rng=np.random.default_rng(0), context="append",
    )  # fmt: skip
    conversation = next(told)
    assert conversation[-1][1] == "finish"
    assert all(messages[0]["content"].startswith("= ") for messages, _ in conversation[1:])


def test_prompts_for_language_models():
    env, observation = begin()
    said = Canvas().prompt(observation, [], "instruct")[0]["content"]
    assert "Compute 2 + 3." in said and "Programmer (solver)" in said and "Turns left: 20" in said
    later = env.step("add Custom").observation
    history = [Past(1, observation.view, "add Custom")]
    assert "Turn 1: add Custom" in Canvas().prompt(later, history, "instruct")[0]["content"]
    assert "Compute" not in Canvas().follow_up(later, "instruct")[0]["content"]
    assert Canvas().parse_action("<think>x</think> <action>finish</action>", later.legal_actions) == "finish"
    told = "<action>add</action><operator>Custom</operator><prompt>Say a &lt; b.</prompt>"
    assert Canvas().parse_action(told, later.legal_actions) == 'add Custom{"Say a < b."}'
    assert Canvas().parse_action(" ", later.legal_actions) is None
    before = "finish needs a check first, so I add one. "
    for words in (before, f"{before}\n", f"<think>\n{before}</think>finish? No: ", "<think><action></action></think>"):
        added = f"{words}<action>add</action><operator>Verify</operator>"
        assert Canvas().parse_action(added, later.legal_actions) == "add Verify"
        bad = f"{words}<action>add</action><operator>Verify</operator> Done."
        assert not env.step(Canvas().parse_action(bad, later.legal_actions) or "").terminal
    shown = "<think>Not <action>delete</action> now.</think> finish 42"
    assert Canvas().parse_action(shown, later.legal_actions) == "finish 42"


OWN_OPERATOR = """
from flowjax.canvas.operators import Operator
from flowjax.canvas.values import Field


class DoubleCheck(Operator):
    name = "DoubleCheck"
    description = "finds every answer right"
    role = "checker"
    inputs = (Field("answer"),)
    outputs = (Field("passed", "flag"), Field("feedback"))
    instruction = "Check."

    async def run(self, inputs, context):
        return {"passed": True, "feedback": "right"}
"""


def test_one_class_in_one_file_is_an_operator_of_prompt_vocabulary_reward_and_drawing(tmp_path, monkeypatch):
    (tmp_path / "own_checks.py").write_text(OWN_OPERATOR)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["own_checks:DoubleCheck"]
    env, observation = begin(extra_operators=own)
    world = Canvas(extra_operators=own)
    assert "DoubleCheck (checker): finds every answer right" in world.prompt(observation, [], "instruct")[0]["content"]
    assert "DoubleCheck" in world.vocabulary()
    step = env.step("add Programmer -> (DoubleCheck ? done : Revise)")
    assert step.valid and step.outcome["checks"] == 1.0 and step.outcome["branching"] == 1.0
    picture = svg(env.workflow, env.run, load_operators(own))
    assert "DoubleCheck" in picture and "#fdeecb" in picture, "in the colour of checkers"


def test_mending_is_an_option_and_counted():
    nearly = "```<action>add</action><operator>custom</operator>```"
    strict, lenient = (begin(world=PublishedCanvas, lenient=lenient)[0].step(nearly) for lenient in (False, True))
    assert not strict.valid and strict.outcome["repaired_actions"] == 0.0
    assert lenient.valid and lenient.outcome["repaired_actions"] == 1.0
    assert not begin()[0].step(nearly).valid


@pytest.mark.parametrize(
    ("said", "workflow"),
    [
        ("add custom", "Custom#n1"),
        ("<action>add</action><operator>costum</operator>", "Custom#n1"),
        ("add (Custom) * 20", "(Custom#n2) * 10#n1"),
        ("add Custom", "Custom#n1"),
        ("add Nothing_like_it", ""),
    ],
)
def test_names_and_counts_of_a_readable_action_are_mended(said: str, workflow: str):
    step = begin(world=PublishedCanvas)[0].step(said)
    assert (step.valid, step.observation.view.workflow) == (bool(workflow), workflow)
    assert step.outcome["repaired_actions"] == float(bool(workflow) and said != "add Custom")


def test_a_grammar_is_refused_where_it_cannot_be_kept_to():
    config = runpy.run_path(str(ROOT / "configs" / "canvas.py"))["get_config"]("nano")
    config.rollout.structured_outputs = True
    assert any(
        "config.env.prompt is 'compact'" in problem for problem in inspect_run(resolve(config), 1, None)["problems"]
    )
    config.env.name, config.env.options = "flowjax.envs.sokoban:Sokoban", {}
    assert any(
        "flowjax.envs.sokoban:Sokoban has no structured_outputs()" in problem
        for problem in inspect_run(resolve(config), 1, None)["problems"]
    )


def test_a_grammar_of_its_actions_for_the_engine():
    assert '"Programmer"' in Canvas().structured_outputs("compact")["grammar"]
    assert '"Programmer"' not in Canvas(operators=["Custom", "Verify"]).structured_outputs("instruct")["grammar"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"turns": 0}, "turns=0"),
        ({"kinds": ["maths"]}, "kinds='maths'"),
        ({"operators": ["Custm"]}, "operators='Custm'"),
        ({"backends": {"a": {"kind": "openai"}}}, "backends.a.base_url"),
        ({"default_backend": "b"}, "default_backend='b'"),
        ({"expert": "best"}, "expert is 'best'"),
        ({"turn": 3}, "turn"),
        ({"path": "/nowhere.jsonl"}, "nowhere"),
    ],
)
def test_wrong_options_are_named(options: dict, named: str):
    with pytest.raises(WorldError, match=named):
        Canvas(**options).tasks("train", 0)
        Canvas(**options).env()


def test_formulas_need_math_verify(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    Canvas().env()
    answers = {"kind": "offline", "rules": [{"answer": "x+1"}]}
    for options in ({"backends": {"model": answers}}, {"path": str(ROOT / "data" / "canvas")}):
        with pytest.raises(NotReady, match=r"math-verify: pip install -e"):
            Canvas(**options).env()


@pytest.mark.parametrize("variant", ["nano", "nano_append", "nano_grpo", "nano_llm", "nano_llm_grpo", "qwen3_8b"])
def test_recipes_can_be_started_as_they_are(variant: str):
    config = runpy.run_path(str(ROOT / "configs" / "canvas.py"))["get_config"](variant)
    assert check_config(config) == []
    check_reward(config.reward.components.to_dict(), Canvas.OUTCOMES, "the canvas")
    options = config.env.options.to_dict()
    env = Canvas(**options).env()
    assert env.options.turns == config.env.max_turns
    config.env.options.path = str(ROOT / "data" / "canvas")  # as the documented command sets it
    config.env.options.step_s = 9999.0
    config.env.max_turns -= 1
    problems = "\n".join(inspect_run(resolve(config), 1, None)["problems"])
    assert "step_timeout_s is" in problems
    assert re.search(r"config\.env\.max_turns is \d+, .* has \d+ turns: make both the same", problems)
    if variant.startswith("nano"):
        # A conversation begins with an empty workflow; then replies are said and results heard.
        grown = LONGEST_PROMPT_WORDS - 41 + 6 * (20 + LONGEST_RESULT_WORDS)
        longest = LONGEST_PROMPT_WORDS if config.env.context == "window" else grown
        assert longest <= config.rollout.max_prompt_tokens
        assert config.rollout.max_new_tokens == 20 > LONGEST_REPLY_WORDS


def test_published_descriptions_are_told_and_make_operators(tmp_path: Path):
    file = tmp_path / "operator.json"
    merge = {"description": "Merges answers.", "interface": "merge(solutions: List[str]) -> dict with key 'response'"}
    plan = {"description": "Thinks first.", "interface": "plan(problem: str) -> dict with key 'plan'"}
    file.write_text(json.dumps({"Merge": merge, "Plan": plan}))
    env, first = begin(descriptions=str(file))
    said = text_of(env, first)
    assert "Merge (combiner): Merges answers." in said and "Plan (planner): Thinks first." in said
    assert env.step("add [Custom, Custom] -> Merge").valid
    with pytest.raises(WorldError, match=r"descriptions: .*absent\.json cannot be read"):
        Canvas(descriptions="absent.json").env()
