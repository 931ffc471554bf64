"""An executor that is away, slow, or cut short: never the policy's fault, and never taken for an answer."""

import asyncio
import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
from chat_server import ChatServer, Reply, chat, refusal, serving
from shown_text import text_of

from flowjax.canvas import Problem, load_operators, parse, run
from flowjax.canvas.backends import BackendUnavailable, Completion, Request, Usage
from flowjax.canvas.backends.openai import Breaker, OpenAIBackend, Patience
from flowjax.canvas.context import Budget, Sandbox
from flowjax.canvas.values import WorkflowRun
from flowjax.envs import EnvDied
from flowjax.envs.canvas import Canvas, exercises
from flowjax.envs.pool import EnvPool
from flowjax.grading.sandbox import Box, Limits, NoProcessorError, ProgramResult, require_isolation
from flowjax.records import Task

QUICK: dict[str, Any] = {"first_retry_s": 0.01, "last_retry_s": 0.02, "first_pause_s": 0.2, "last_pause_s": 0.4}
REQUEST = Request([{"role": "user", "content": "?"}])
SUM = exercises.Exercise("arithmetic", "math", "Compute 2 + 3.", "5", 2)


@contextlib.contextmanager
def endpoint(*replies: Reply, port: int = 0) -> Iterator[ChatServer]:
    """A server in a thread of its own, for worlds, which block."""
    started, done, found = threading.Event(), threading.Event(), []

    async def serve() -> None:
        async with serving(*replies, port=port) as server:
            found.append(server)
            started.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(10)
        yield found[0]
    finally:
        done.set()
        thread.join()


def backends(server: ChatServer, **patience: Any) -> dict[str, Any]:
    return {"small": {"kind": "openai", "base_url": server.url, "model": "m", **QUICK, **patience}}


def task(number: int = 0) -> Task:
    return Task(f"t{number}", "canvas", number, exercises.payload(SUM))


async def answered(server: ChatServer, workflow: str, **options: Any) -> WorkflowRun:
    backend = OpenAIBackend([server.url], "m", patience=Patience(**QUICK))
    try:
        return await run(
            parse(workflow),
            Problem("What is 2 + 3?", "math"),
            operators=load_operators(entry_points=False),
            backends={"small": backend},
            default_backend="small",
            **options,
        )
    finally:
        await backend.close()


def test_an_endpoint_that_is_away_ends_the_episode_and_not_the_node():
    with endpoint(lambda body: refusal(503)) as server:
        env = Canvas(backends=backends(server, retries=1), kinds=("arithmetic",)).env()
        env.reset(task(), 0)
        with pytest.raises(EnvDied) as died:
            env.step("add Custom")
    assert died.value.status == "executor_error" and "HTTP 503" in str(died.value)


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_what_no_workflow_can_help_is_no_failure_of_a_call(status: int):
    async def scenario() -> None:
        async with serving(lambda body: refusal(status)) as server:
            result = await answered(server, "[Custom, Custom] -> ScEnsemble")
            assert (result.status, result.trace[0].status) == ("executor_error", "executor_error")

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_is_refused_for_what_is_in_it_fails_its_call(status: int):
    async def scenario() -> None:
        async with serving(lambda body: refusal(status, "the prompt is too long")) as server:
            result = await answered(server, "Custom")
            assert result.status == "error" and "too long" in result.error

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_backend_with_a_bug_is_away_and_an_operator_cannot_hide_that():
    class Broken:
        identity = "broken"

        async def complete(self, request: Request) -> Completion:
            if "choice" in (request.schema or {}).get("properties", {}):
                raise OSError("no route to host")
            return Completion(f"Answer: {request.seed}", Usage(1, 1, 1))

    async def scenario() -> None:
        result = await run(
            parse("[Custom, Custom] -> MdEnsemble"),  # which makes do without votes that cannot be read
            Problem("?"),
            operators=load_operators(entry_points=False),
            backends={"broken": Broken()},
            default_backend="broken",
        )
        assert (result.status, result.error) == ("executor_error", "OSError: no route to host")

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        ("Answer: 5", "the reply is 'Answer: 5'"),
        (Completion(cast(Any, None), Usage(1, 1, 1)), "text is None"),  # `message.content` of OpenAI's SDK may be
        (Completion("Answer: 5", cast(Any, {"prompt_tokens": 3})), "usage is {'prompt_tokens': 3}"),
        (Completion("Answer: 5", Usage(1, -1000, 1)), "usage.prompt_tokens is -1000"),
        (Completion("Answer: 5", Usage(1, 1, cast(Any, None))), "usage.sampled_tokens is None"),
        (Completion("Answer: 5", Usage(1, 1, 1, float("nan"))), "usage.cost is nan"),
        (Completion("Answer: 5", Usage(1, 1, 1, float("inf"))), "usage.cost is inf"),
    ],
)
def test_a_reply_that_is_no_completion_is_an_outage(reply: Any, fault: str):
    class Odd:
        identity = "odd"

        async def complete(self, request: Request) -> Any:
            return reply

    result = asyncio.run(
        run(
            parse("Custom"),
            Problem("?"),
            operators=load_operators(entry_points=False),
            backends={"odd": Odd()},
            default_backend="odd",
        )
    )
    assert (result.status, result.usage) == ("executor_error", Usage(1))
    assert result.error.startswith(f"Odd.complete: {fault}: ")


def test_an_endpoint_that_keeps_silent_is_an_outage_but_many_short_answers_are_not():
    with endpoint(lambda body: 30.0) as server:
        env = Canvas(backends=backends(server), step_s=0.3).env()
        env.reset(task(), 0)
        with pytest.raises(EnvDied) as died:
            env.step("add Custom")
        assert died.value.status == "executor_error"
    with endpoint(lambda body: 0.4) as server:
        env = Canvas(backends=backends(server), step_s=3.0).env()
        env.reset(task(), 0)
        step = env.step("add " + " -> ".join(f'AnswerGenerate{{"{number}"}}' for number in range(30)))
        assert "Run: budget" in text_of(env, step.observation)


def test_three_in_ten_refused_is_seen_by_nobody_but_the_status():
    """Every outcome of an episode that counts is what it is on an endpoint that never fails."""
    numbers = itertools.count()

    def flaky(body: dict[str, Any]) -> Any:
        return refusal(503) if next(numbers) * 7 % 10 < 3 else chat("Answer: 5")

    async def played(server: ChatServer) -> list[tuple[str, float]]:
        options = {"backends": backends(server, retries=1), "kinds": ("arithmetic",), "step_s": 5.0}
        found: list[tuple[str, float]] = []

        async def one(pool: EnvPool, number: int) -> None:
            async with pool.session("flowjax.envs.canvas:Canvas", options) as env:
                try:
                    await env.reset(task(number), 0)
                    await env.step("add [Custom, AnswerGenerate, Custom] -> ScEnsemble")
                    step = await env.step("finish")
                    found.append(("ok", step.outcome["success"]))
                except EnvDied as died:
                    found.append((died.status, 0.0))

        async with EnvPool(step_timeout_s=20.0) as pool:
            for number in range(24):
                await asyncio.wait_for(one(pool, number), 60)
        return found

    with endpoint(flaky) as server:
        found = asyncio.run(played(server))
    assert {status for status, _ in found} <= {"ok", "executor_error"}
    counted = [success for status, success in found if status == "ok"]
    assert len(counted) >= 8 and set(counted) == {1.0}


def test_nothing_is_sent_to_an_endpoint_that_keeps_failing_until_one_request_is_answered():
    async def scenario() -> None:
        well = False
        async with serving(lambda body: chat() if well else refusal(500)) as server:
            backend = OpenAIBackend([server.url], "m", patience=Patience(**QUICK))
            for _ in range(2):
                with pytest.raises(BackendUnavailable):
                    await backend.complete(REQUEST)
            sent = len(server.bodies)
            assert sent == 8
            refused = await asyncio.gather(*(backend.complete(REQUEST) for _ in range(20)), return_exceptions=True)
            why = f"8 tries in a row have failed, the last at {server.url}/chat/completions: HTTP 500: "
            assert all(str(error).startswith(why) for error in refused)
            assert len(server.bodies) == sent
            with pytest.raises(BackendUnavailable):
                await backend.ready(0.0)
            await backend.ready(5.0)
            ends = await asyncio.gather(*(backend.complete(REQUEST) for _ in range(20)), return_exceptions=True)
            assert all(isinstance(end, BackendUnavailable) for end in ends)
            assert len(server.bodies) == sent + 1, "one request is on trial, the others wait for its end"
            assert sum("no answer after 1 tries" in str(end) for end in ends) == 1
            well = True
            await backend.ready(5.0)
            ends = await asyncio.gather(*(backend.complete(REQUEST) for _ in range(20)))
            assert [end.text for end in ends] == ["42"] * 20
            await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_pause_doubles_with_each_trial_that_fails_and_not_with_each_request_of_an_outage():
    """Each request under way when an endpoint went away doubled the pause: with 14 of them it was 30 s at once."""

    async def scenario() -> None:
        patience = Patience()
        breaker = Breaker(patience)
        now_s = 0.0
        breaker._clock = lambda: now_s
        for _ in range(14):
            breaker.note_failure("HTTP 503", 0.0)
        assert breaker.wait_s == patience.first_pause_s
        for pause_s in (2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
            now_s += breaker.wait_s
            assert await breaker.admit(), "one request is on trial"
            breaker.note_failure("HTTP 503", now_s)
            breaker.end_trial()
            assert breaker.wait_s == pause_s
        now_s += breaker.wait_s
        assert await breaker.admit()
        breaker.note_success()
        breaker.end_trial()
        assert not await breaker.admit(), "all may send again"

    asyncio.run(scenario())


def test_time_outs_of_one_outage_that_come_late_double_no_pause():
    """Of 40 requests, sent one every half second, the last fails 20 s after the first: the pause was 30 s then."""

    async def scenario() -> None:
        patience = Patience()
        breaker = Breaker(patience)
        now_s = 0.0
        breaker._clock = lambda: now_s
        for number in range(40):
            now_s = patience.timeout_s + 0.5 * number
            breaker.note_failure("no answer", 0.5 * number)
        assert breaker.wait_s == 0.0 and await breaker.admit(), "one request is on trial"
        breaker.note_failure("no answer", now_s)
        breaker.end_trial()
        assert breaker.wait_s == 2 * patience.first_pause_s

    asyncio.run(scenario())


def test_an_episode_waits_with_its_first_turn_for_an_endpoint_that_fails():
    with endpoint(lambda body: refusal(500)) as server:
        env = Canvas(backends=backends(server, last_pause_s=30.0, first_pause_s=30.0), step_s=0.5).env()
        for _ in range(2):
            env.reset(task(), 0)
            with pytest.raises(EnvDied):
                env.step("add Custom")
        sent = len(server.bodies)
        with pytest.raises(EnvDied, match=r"failed again and again, the last time at .*HTTP 500") as died:
            env.reset(task(), 0)
        assert died.value.status == "executor_error" and len(server.bodies) == sent == 8


def cut(text: str | None, reason: str = "length") -> Any:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return chat(choices=[choice])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Answer: 7 or may", "length"),
        ("<think>Answer: 7", "length"),
        (None, "length"),
        ("<think>Answer: 7", "stop"),
        ("Let me see.\n<think>Answer: 7", "stop"),
        ("<think>first</think>Answer: 7<think>or", "stop"),
    ],
)
def test_a_cut_reply_is_asked_for_once_more_with_more_room_and_then_fails_its_call(text: str | None, reason: str):
    async def scenario() -> None:
        bounds = {"max_new_tokens": 64, "retry_new_tokens": 256}
        async with serving(lambda body: cut("Answer: 7 or"), lambda body: chat("<think>so</think>Answer: 5")) as server:
            result = await answered(server, "Custom", **bounds)
            assert (result.answer, result.status, result.usage.calls) == ("5", "ok", 2)
            assert [body["max_tokens"] for body in server.bodies] == [64, 256]
        async with serving(lambda body: cut(text, reason)) as server:
            result = await answered(server, "[Custom, AnswerGenerate] -> ScEnsemble", **bounds)
            assert (result.answer, result.status) == ("", "error")
            assert "cut at 256 tokens" in result.trace[0].error and len(server.bodies) == 4
        async with serving(lambda body: cut(text, reason)) as server:
            result = await answered(server, "Custom", max_new_tokens=64, retry_new_tokens=0)
            assert "cut at 64 tokens" in result.error and len(server.bodies) == 1

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_half_a_character_in_a_reply_is_replaced():
    """It could be sent to nobody: the next request, which quotes it, would pass for an outage."""

    async def scenario() -> None:
        async with serving(lambda body: chat("a plan \ud83d"), lambda body: chat("Answer: 5")) as server:
            result = await answered(server, "Plan -> Custom")
            assert (result.answer, result.state["plan"]) == ("5", "a plan ?")
            assert "a plan ?" in server.bodies[1]["messages"][0]["content"]

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_half_a_character_in_a_json_reply_is_replaced():
    """Its raw text has none: it comes to be when the object is read."""
    asked = [chat(reply) for reply in ("Answer: 5", '{"feedback": "no \\ud83d", "passed": false}', "Answer: 6")]

    async def scenario() -> None:
        async with serving(*(lambda body, said=said: said for said in asked)) as server:
            result = await answered(server, "Custom -> Review -> Revise")
            assert (result.answer, result.state["feedback"]) == ("6", "no ?")

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_what_a_backend_withholds_is_no_answer():
    async def scenario() -> None:
        async with serving(lambda body: cut("Answer:", "content_filter")) as server:
            result = await answered(server, "Custom")
            assert result.status == "error" and "withheld" in result.error

    asyncio.run(asyncio.wait_for(scenario(), 30))


STARVING = Limits(cpu_s=60.0, idle_s=60.0, wall_guard_s=0.3)  # the guard ends it with most of its own time left
SLEEPS = "```python\nimport time\ntime.sleep(60)\n```"


class _Says:
    identity = "says"

    def __init__(self, text: str):
        self._text = text

    async def complete(self, request: Request) -> Completion:
        return Completion(self._text, Usage(1, 1, 1))


@pytest.mark.parametrize(
    ("workflow", "problem"),
    [
        ("Programmer", Problem("What is 2 + 3?", "math")),
        ("[Programmer, Custom] -> Aggregate", Problem("What is 2 + 3?", "math")),
        ("CustomCodeGenerate -> Test", Problem("Print.", "code", entry_point="f", public_tests=("assert f(1) == 1",))),
        ("CustomCodeGenerate -> Test", Problem("Print.", "code", entry_point="f")),
    ],
)
@pytest.mark.parametrize("fault", ["starved", "no process"])
def test_a_machine_that_cannot_run_a_program_is_an_outage(
    workflow: str, problem: Problem, fault: str, monkeypatch: pytest.MonkeyPatch
):
    if fault == "no process":
        monkeypatch.setattr(Box, "_start", _raise_eagain)
    sandbox = Sandbox(STARVING, STARVING, allow_none=bool(os.environ.get("FLOWJAX_TESTS_WITHOUT_BUBBLEWRAP")))

    async def scenario() -> None:
        result = await run(
            parse(workflow),
            problem,
            operators=load_operators(entry_points=False),
            backends={"says": _Says(SLEEPS)},
            default_backend="says",
            sandbox=sandbox,
        )
        assert result.status == "executor_error" and result.error.startswith("sandbox: ")
        assert "executor_error" in {node.status for node in result.trace}
        assert "error" not in {node.status for node in result.trace}

    require_isolation(allow_none=sandbox.allow_none)
    asyncio.run(asyncio.wait_for(scenario(), 120))


def _raise_eagain(*_: object) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_program_that_a_runs_end_cuts_off_is_an_outage_if_it_had_waited_beyond_its_own_time():
    async def scenario(limits: Limits) -> float:
        result = await run(
            parse("Programmer"),
            Problem("What is 2 + 3?", "math"),
            operators=load_operators(entry_points=False),
            backends={"says": _Says(SLEEPS)},
            default_backend="says",
            sandbox=Waits(limits),
            budget=Budget(seconds=0.6),
        )
        assert result.status == "budget"
        return result.unanswered_s

    class Waits(Sandbox):
        def run(self, program: str, stdin: bytes) -> ProgramResult:
            time.sleep(1.5)  # for a processor
            return ProgramResult(b"", b"", "ok", 1.5, 0.0, "none")

    assert asyncio.run(scenario(Limits(cpu_s=0.05, idle_s=0.05))) > 0.3
    assert asyncio.run(scenario(Limits(cpu_s=5.0, idle_s=5.0))) == 0.0


def test_episodes_of_a_starved_machine_are_played_again(monkeypatch: pytest.MonkeyPatch):
    def starved(*_: object, **__: object) -> None:
        raise NoProcessorError("a program waited for a processor")

    env = Canvas(kinds=("arithmetic",)).env()
    env.reset(task(), 0)
    monkeypatch.setattr("flowjax.envs.canvas.env.scored", starved)
    with pytest.raises(EnvDied) as died:
        env.step("add Custom")
    assert died.value.status == "executor_error"
