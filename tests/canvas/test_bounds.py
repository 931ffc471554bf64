"""Bounds of an episode: nodes, steps, requests and what is shown end where the options say, and the policy is told."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from test_outage import backends, endpoint, task

from flowjax.canvas.text import show
from flowjax.canvas.values import NodeRun, Usage, WorkflowRun
from flowjax.envs import RUN_VARIABLE
from flowjax.envs.canvas import Canvas, executors
from flowjax.envs.canvas.env import CanvasEnv
from flowjax.envs.canvas.texts import EMPTY, CanvasView, Offer, one_line, view_run, worded
from tests.canvas.chat_server import chat
from tests.canvas.graphs import WORKFLOWS
from tests.canvas.shown_text import read, text_of

NESTED = 'add ((((Custom{"a"} -> Revise) * 10) * 10) * 10) * 10'


def begin(**options: Any) -> CanvasEnv:
    env = Canvas(**options).env()
    env.reset(task(), 0)
    return env


def test_nested_loops_end_at_the_limit_of_steps_and_the_observation_says_so():
    env = begin(observation_characters=6000)
    step = env.step(NESTED)
    assert env.run is not None and env.run.status == "budget"
    assert len(env.run.trace) == 201  # the last entry is the one that was not run
    assert "Limit: the limit of 200 steps in a run is reached." in text_of(env, step.observation)
    assert "steps are not shown: an observation has at most 6000 characters." in text_of(env, step.observation)
    assert len(text_of(env, step.observation)) <= 6000
    assert step.outcome["executor_calls"] <= 100


def test_hundreds_of_operators_are_refused_with_the_limit():
    env = begin()
    step = env.step(f"add [{', '.join(['Custom'] * 400)}]")
    assert not step.valid and "would have 401 nodes; 64 is the most." in text_of(env, step.observation)
    assert step.outcome["executor_calls"] == 0
    assert begin(max_nodes=0).step(f"add [{', '.join(['Custom'] * 70)}]").valid
    env.step(f"add [{', '.join(['Custom'] * 60)}]")
    assert not env.step("add [Custom, Custom, Custom] -> ScEnsemble").valid
    assert env.step("delete n2").valid


def test_requests_end_at_their_limit():
    env = begin(max_calls=7)
    step = env.step(f"add [{', '.join(['Custom'] * 30)}]")
    assert step.outcome["executor_calls"] == 7
    assert "Limit: the budget of 7 calls is spent." in text_of(env, step.observation)
    assert "Budget left: 0 calls" in text_of(env, step.observation)


def test_seconds_of_an_episode_end_at_their_limit():
    with endpoint(lambda body: 0.3) as server:
        env = begin(backends=backends(server), max_seconds=2.0, step_s=8.0)
        for number in range(6):
            env.step(f'add AnswerGenerate{{"{number}"}} -> AnswerGenerate{{"{number} again"}}')
        step = env.step("finish")
        assert step.outcome["executor_seconds"] < 4.0 and "seconds is spent" in text_of(env, step.observation)


TEXTS = st.text(min_size=0, max_size=3000)


@settings(max_examples=60, deadline=None)
@given(
    WORKFLOWS,
    st.lists(st.builds(lambda text: NodeRun("n1", "Custom", "ok", outputs={"answer": text}), TEXTS), max_size=60),
    st.integers(0, 3),
    st.sampled_from((4000, 7000, 20_000)),
    st.integers(1, 20_000),
)
def test_an_observation_is_never_above_its_bound_and_can_be_read(workflow, trace, long: int, most: int, limit: int):
    shown_characters = min(limit, most // 8)
    run = WorkflowRun("42 " * 9000, "budget", {}, tuple(trace), Usage(), 1.0, "the limit is reached")
    view = CanvasView(
        kind="qa",
        problem="What? " * 1000 * long,
        context="Because. " * 5000 * long,
        options=(),
        public_tests=(),
        workflow=show(workflow, ids=True),
        outline=show(workflow, ids=True, instructions=False),
        nodes=(),
        run=view_run(run, shown_characters),
        failed_step="",
        refused=one_line("no " * 500, 600),
        calls=0,
        tokens=0,
        cost=0.0,
        left=(("calls", 5.0),),
        turns_left=3,
    )
    text = worded(view, Offer("Custom (solver): does\n" * 80 * long, "", most)).whole
    assert len(text) <= most
    shown = read(text)
    assert shown.facts["Run"] == "budget" and shown.facts["Turns left"] == "3"
    assert shown.facts["Limit"].startswith("the limit is reached"[:limit])
    if not any(True for _ in workflow.nodes()):
        assert shown.workflow in ("", EMPTY)


@pytest.mark.parametrize("limit", [480, 500])
def test_the_bound_holds_where_next_to_nothing_of_the_problem_has_room(limit: int):
    """The mark of a cut is text, too: there may be less room than it takes."""
    trace = (NodeRun("n1", "Custom", "ok", outputs={"answer": "0" * 400}),) * 60
    run = WorkflowRun("42 " * 900, "budget", {}, trace, Usage(), 1.0, "no")
    refused = one_line("no " * 500, 600)
    view = CanvasView(
        "qa", "What? " * 1000, "", (), (), "x" * 1000, "x" * 900, (), view_run(run, limit), "", refused, 0, 0, 0.0,
        (("calls", 5.0),), 3,
    )  # fmt: skip
    for operators in range(1200, 1400):
        assert len(worded(view, Offer("x" * operators, "", 4000)).whole) <= 4000


def test_the_second_rollout_of_a_group_asks_nothing_twice(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """It is charged what the first was: who comes first makes no difference to a reward by cost."""
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    actions = ("add [Custom, AnswerGenerate] -> ScEnsemble", "add Verify ? done : Revise", "finish")
    numbers = iter(range(1000))
    with endpoint(lambda body: chat(f"Answer: {next(numbers)}")) as server:
        first = begin(backends=backends(server), temperature=1.0)
        outcomes = [first.step(action).outcome for action in actions]
        asked = len(server.bodies)
        assert asked >= 3
        second = begin(backends=backends(server), temperature=1.0)
        again = [second.step(action).outcome for action in actions]
        assert len(server.bodies) == asked
        executors._opened.cache_clear()  # another process of the run
        third = begin(backends=backends(server), temperature=1.0)
        anew = [third.step(action).outcome for action in actions]
        assert len(server.bodies) == asked
        for one, two, three in zip(outcomes, again, anew, strict=True):
            assert one["executor_calls"] == two["executor_calls"] == three["executor_calls"] > 0
            assert one["executor_tokens"] == two["executor_tokens"] == three["executor_tokens"] > 0
            assert one["operators"] == two["operators"] == three["operators"]
        other = begin(backends=backends(server), temperature=1.0, executor_seed=1)
        other.step(actions[0])
        assert len(server.bodies) > asked, "another sample is another request"


def test_executors_and_their_prices_are_told_where_there_is_a_choice():
    with endpoint() as server:
        small = backends(server)["small"]
        large = {**small, "prices": {"prompt": 0.4, "sampled": 1.6}}
        env = Canvas(backends={"small": small, "large": large}).env()
        text = text_of(env, env.reset(task(), 0))
        assert "small (unless one is named): free\nlarge: 0.4 read, 1.6 written" in text
        assert read(text).operators.startswith("Plan (planner)")
        env = Canvas(backends={"small": small}).env()
        assert "Executors" not in text_of(env, env.reset(task(), 0))
