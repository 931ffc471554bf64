"""The chat client against a real server on this machine that misbehaves in every way that endpoints do."""

import asyncio
import contextlib
import email.utils
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from flowjax.canvas.backends import Backend, BackendError, BackendUnavailable, Prices, Request
from flowjax.canvas.backends.openai import Limiter, OpenAIBackend, Patience, RateLimits, retry_after_s
from flowjax.canvas.context import Budget
from tests.canvas.chat_server import ChatServer, Reply, chat, refusal, serving, streamed
from tests.canvas.toy_operators import Ask, going

QUICK = Patience(timeout_s=2.0, connect_timeout_s=1.0, retries=2, first_retry_s=0.01, last_retry_s=0.02)
REQUEST = Request([{"role": "user", "content": "What is 6 times 7?"}], 0.5, 0.9, 64, 7)
SECRET = "sk-very-secret"
EVENTS = "text/event-stream"
BEYOND = "an answer that goes on beyond what max_new_tokens allows"


@contextlib.asynccontextmanager
async def client(*servers: ChatServer | str, **options: Any) -> AsyncIterator[OpenAIBackend]:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    backend = OpenAIBackend(urls, "m", **({"patience": QUICK, "api_key": SECRET} | options))
    try:
        yield backend
    finally:
        await backend.close()


def go(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120.0))


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def test_a_request_says_what_the_api_wants_to_know():
    async def scenario():
        async with serving() as server, client(server, extra_body={"chat_template_kwargs": {"x": 1}}) as backend:
            schema = {"type": "object"}
            completion = await backend.complete(replace(REQUEST, schema=schema, tags={"operator": "Ask"}))
            assert (completion.text, completion.usage.calls) == ("42", 1)
            assert server.bodies == [
                {
                    "model": "m",
                    "messages": [{"role": "user", "content": "What is 6 times 7?"}],
                    "temperature": 0.5,
                    "top_p": 0.9,
                    "seed": 7,
                    "max_tokens": 64,
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "answer", "strict": True, "schema": schema},
                    },
                    "chat_template_kwargs": {"x": 1},
                }
            ]
            assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"

    go(scenario())


def test_options_for_endpoints_that_are_different():
    async def scenario():
        options: dict[str, Any] = {"token_limit_field": "max_completion_tokens", "structured": False, "api_key": ""}
        options["extra_body"] = {"seed": None, "top_p": None}
        async with serving() as server, client(server, **options) as backend:
            await backend.complete(replace(REQUEST, schema={"type": "object"}))
            assert server.bodies[0]["max_completion_tokens"] == 64
            assert not {"max_tokens", "response_format", "seed", "top_p"} & server.bodies[0].keys()
            assert "Authorization" not in server.headers[0]

    go(scenario())


def test_usage_is_priced_per_million_tokens():
    async def scenario():
        async with serving() as server, client(server, prices=Prices(prompt=2.0, sampled=10.0)) as backend:
            usage = (await backend.complete(REQUEST)).usage
            assert (usage.prompt_tokens, usage.sampled_tokens) == (11, 3)
            assert usage.cost == pytest.approx((11 * 2.0 + 3 * 10.0) / 1e6)

    go(scenario())


@pytest.mark.parametrize(
    "usage",
    [
        *(None, {}, {"prompt_tokens": 5}, {"prompt_tokens": None, "completion_tokens": 1}),
        {"prompt_tokens": -1, "completion_tokens": 1},
    ],
)
def test_usage_that_is_missing_is_estimated_with_a_warning(usage, caplog):
    async def scenario():
        async with serving(lambda body: chat("x" * 40, usage=usage)) as server, client(server) as backend:
            usage_found = (await backend.complete(REQUEST)).usage
            assert (usage_found.prompt_tokens, usage_found.sampled_tokens) == (5, 10)  # four characters a token

    with caplog.at_level(logging.WARNING):
        go(scenario())
    assert "estimated" in caplog.text


def test_a_stream_is_told_as_it_grows_and_adds_up_to_the_same_answer():
    async def scenario():
        told: list[str] = []
        asked = replace(REQUEST, on_text=told.append)
        replies: list[Reply] = [lambda body: streamed("4", "2 ", "apples"), lambda body: chat("whole")]
        async with serving(*replies) as server, client(server) as backend:
            found = await backend.complete(asked)
            assert (found.text, told) == ("42 apples", ["4", "42 ", "42 apples"])
            assert (found.usage.prompt_tokens, found.usage.sampled_tokens, found.finish_reason) == (11, 3, "stop")
            assert server.bodies[0]["stream"] and server.bodies[0]["stream_options"] == {"include_usage": True}
            assert (await backend.complete(asked)).text == "whole"  # by an endpoint that knows no streams
            await backend.complete(REQUEST)
            assert "stream" not in server.bodies[-1] and len(told) == 3

    go(scenario())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda body: streamed("4", "2", end=False), "not a chat completion: (nothing)"),
        (lambda body: web.Response(text='data: {"error": {"message": "full"}}\n\n', content_type=EVENTS), "full"),
        (lambda body: web.Response(text="data: {\n\n", content_type=EVENTS), "not a chat completion: {"),
        (lambda body: web.Response(text="data: [1]\n\n", content_type=EVENTS), "not a chat completion: [1]"),
        (lambda body: web.Response(text="data: " + "x" * 2_000_000, content_type=EVENTS), "not a chat completion: xxx"),
        (lambda body: web.Response(text="data: " + "x" * 5_000_000, content_type=EVENTS), BEYOND),
        (lambda body: refusal(503), "HTTP 503"),
    ],
)
def test_a_stream_that_breaks_off_is_begun_anew(bad: Reply, message: str):
    async def scenario():
        told: list[str] = []
        asked = replace(REQUEST, on_text=told.append)
        async with serving(bad, lambda body: streamed("yes")) as server, client(server) as backend:
            assert (await backend.complete(asked)).text == "yes"
            assert told[-1] == "yes" and len(server.bodies) == 2
        async with serving(bad) as server, client(server) as backend:
            with pytest.raises(BackendError, match=re.escape(message)):
                await backend.complete(asked)

    go(scenario())


def cut_short(body: dict[str, Any]) -> web.Response:
    return web.Response(body=b'{"choices": [', content_type="application/json")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda body: refusal(500, "kaputt"), "HTTP 500: kaputt"),
        (lambda body: refusal(408), "HTTP 408"),
        (lambda body: refusal(409), "HTTP 409"),
        (lambda body: refusal(429), "HTTP 429"),
        (lambda body: web.Response(status=503, text="<html>Bad  gateway</html>"), "HTTP 503: <html>Bad gateway</html>"),
        (cut_short, "not a chat completion"),
        (lambda body: web.json_response({"choices": []}), "not a chat completion"),
        (lambda body: web.json_response([1]), "not a chat completion"),
        (lambda body: web.json_response({"choices": [{"message": {"content": [1]}}]}), "content that is no text"),
        (lambda body: web.Response(), "not a chat completion: (nothing)"),
        (lambda body: chat("x" * 5_000_000), BEYOND),
    ],
)
def test_what_may_pass_is_tried_again(bad: Reply, message: str):
    async def scenario():
        async with serving(bad, bad, lambda body: chat()) as server, client(server) as backend:
            assert (await backend.complete(REQUEST)).text == "42"
            assert len(server.bodies) == 3
        async with serving(bad) as server, client(server) as backend:
            with pytest.raises(BackendError) as error:
                await backend.complete(REQUEST)
            assert len(server.bodies) == 3
            assert message in str(error.value)
            assert str(error.value).startswith(f"no answer after 3 tries, the last at {server.url}")

    go(scenario())


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422])
def test_a_refusal_is_final(status):
    async def scenario():
        async with serving(lambda body: refusal(status, f"not with {SECRET}")) as server, client(server) as backend:
            with pytest.raises(BackendError, match=rf"refuses the request with HTTP {status}: not with \*\*\*"):
                await backend.complete(REQUEST)
            assert len(server.bodies) == 1

    go(scenario())


def test_retry_after_is_honoured_by_all_requests():
    async def scenario():
        replies = [lambda body: refusal(429, **{"Retry-After": "2"}), lambda body: chat()]
        async with serving(*replies) as server, client(server) as backend:
            first = asyncio.create_task(backend.complete(REQUEST))
            await asyncio.sleep(0.5)
            await asyncio.gather(first, backend.complete(REQUEST))
            assert all(sent_s - server.times_s[0] >= 1.99 for sent_s in server.times_s[1:])
            assert len(server.times_s) == 3

    go(scenario())


def test_an_endpoint_that_asks_for_too_long_a_wait_is_given_up():
    async def scenario():
        async with serving(lambda body: refusal(429, **{"Retry-After": "3600"})) as server, client(server) as backend:
            with pytest.raises(BackendError, match=r"asks to wait 3600 s, more than longest_wait_s \(5\)"):
                await backend.complete(REQUEST)

    go(scenario())


def test_waiting_times_grow_and_vary():
    async def scenario():
        patience = replace(QUICK, retries=4, first_retry_s=0.05, last_retry_s=0.2)
        async with serving(lambda body: refusal(500)) as server, client(server, patience=patience) as backend:
            with pytest.raises(BackendError):
                await backend.complete(REQUEST)
            waits = [after - before for before, after in zip(server.times_s, server.times_s[1:], strict=False)]
            for wait, longest in zip(waits, (0.05, 0.1, 0.2, 0.2), strict=True):
                assert longest / 2 <= wait < longest + 0.15
            assert len({round(wait, 5) for wait in waits}) == 4

    go(scenario())


def test_silence_is_a_timeout():
    async def scenario():
        patience = replace(QUICK, timeout_s=0.5, retries=1)
        async with serving(lambda body: 60.0) as server, client(server, patience=patience) as backend:
            with pytest.raises(BackendError, match=r"no answer after 2 tries, .*: no answer within 0\.5 s: raise time"):
                await backend.complete(REQUEST)

    go(scenario())


def test_a_connection_that_does_not_come_about():
    """The message named `timeout_s`, of which nothing had passed."""

    async def scenario():
        with socket.socket() as deaf, contextlib.ExitStack() as stack:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            for _ in range(3):  # more than its queue holds: the kernel lets further ones wait
                queued = stack.enter_context(socket.socket())
                queued.setblocking(False)
                queued.connect_ex(deaf.getsockname())
            url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
            patience = replace(QUICK, timeout_s=100.0, connect_timeout_s=0.25, retries=1)
            async with client(url, patience=patience) as backend:
                with pytest.raises(BackendError) as caught:
                    await backend.complete(REQUEST)
            assert str(caught.value) == (
                f"no answer after 2 tries, the last at {url}/chat/completions: no connection within 0.25 s: see that "
                "the endpoint is up and can be reached from here, or raise connect_timeout_s"
            )

    go(scenario())


def test_nobody_there():
    async def scenario():
        async with client(unused_url()) as backend:
            with pytest.raises(BackendError, match=r"no answer after 3 tries, .*ClientConnectorError"):
                await backend.complete(REQUEST)

    go(scenario())


def test_equal_endpoints_take_turns_and_stand_in_for_each_other():
    async def scenario():
        async with serving() as one, serving() as two, client(one, two) as backend:
            for _ in range(6):
                await backend.complete(REQUEST)
            assert (len(one.bodies), len(two.bodies)) == (3, 3)
        patience = replace(QUICK, first_retry_s=600.0, last_retry_s=600.0)
        async with serving() as good, client(unused_url(), good, patience=patience) as backend:
            for _ in range(4):  # no waiting while another is free
                await backend.complete(REQUEST)
            assert len(good.bodies) == 4
        async with serving(lambda body: refusal(401, "no")) as wrong, serving() as good, client(wrong, good) as backend:
            for _ in range(4):  # one that refuses all is no reason to fail either
                await backend.complete(REQUEST)
            assert (len(wrong.bodies), len(good.bodies)) == (2, 4)
            await asyncio.gather(*(backend.complete(REQUEST) for _ in range(40)))  # 20 refusals in a row pause nothing
        refusing = [lambda body: refusal(403, "no")]
        async with serving(*refusing) as one, serving(*refusing) as two, client(one, two) as backend:
            with pytest.raises(BackendUnavailable, match="refuses the request with HTTP 403: no"):
                await backend.complete(REQUEST)
            assert (len(one.bodies), len(two.bodies)) == (1, 1)

    go(scenario())


def test_one_session_serves_an_event_loop_and_every_loop_has_its_own():
    backend = OpenAIBackend(["http://127.0.0.1:1/v1"], "m", patience=replace(QUICK, retries=0))

    async def session():
        for _ in range(2):
            with pytest.raises(BackendError):
                await backend.complete(REQUEST)
        (connections,) = backend._loops.values()
        await backend.close()
        assert connections.session.closed
        return id(connections)

    assert asyncio.run(session()) and asyncio.run(session())
    assert not backend._loops


def test_no_more_than_so_many_at_one_time():
    async def scenario():
        limits = RateLimits(concurrency=3)
        async with serving(lambda body: 0.05) as server, client(server, limits=limits) as backend:
            await asyncio.gather(*(backend.complete(REQUEST) for _ in range(9)))
            assert server.most_in_flight == 3

    go(scenario())


def sent_s(limiter: Limiter, tokens: list[float]) -> Coroutine[Any, Any, list[float]]:
    """When each of several requests at one time may be sent, from now on."""

    async def send(amount: float) -> float:
        async with limiter.grant(amount):
            return asyncio.get_running_loop().time()

    async def send_all() -> list[float]:
        started_s = asyncio.get_running_loop().time()
        return [time_s - started_s for time_s in await asyncio.gather(*map(send, tokens))]

    return send_all()


def test_requests_and_tokens_per_minute_hold_in_every_window():
    async def scenario():
        by_requests = Limiter(RateLimits(requests_per_minute=3 * 60 / 0.2), window_s=0.2)
        times = await sent_s(by_requests, [1.0] * 8)
        assert times == sorted(times)  # first come, first served
        assert all(later - earlier >= 0.19 for earlier, later in zip(times, times[3:], strict=False))
        assert times[7] < 1.0
        by_tokens = Limiter(RateLimits(tokens_per_minute=100 * 60 / 0.2), window_s=0.2)
        times = await sent_s(by_tokens, [60.0, 40.0, 30.0, 500.0])
        assert times[1] < 0.1
        assert 0.19 <= times[2] < 0.39
        assert times[3] >= times[2] + 0.19  # more than a window allows goes alone

    go(scenario())


def test_tokens_that_were_not_used_are_given_back():
    async def scenario():
        limiter = Limiter(RateLimits(tokens_per_minute=100 * 60 / 10.0), window_s=10.0)
        async with limiter.grant(90.0) as grant:
            grant.tokens = 10.0
        assert max(await sent_s(limiter, [80.0])) < 1.0

    go(scenario())


def test_retry_after_is_seconds_or_a_date():
    in_a_minute = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert retry_after_s({"Retry-After": "1.5"}) == 1.5
    assert retry_after_s({"Retry-After": "-3"}) == 0.0
    assert 50 < (retry_after_s({"Retry-After": in_a_minute}) or 0) <= 60
    for unreadable in ({}, {"Retry-After": ""}, {"Retry-After": "soon"}, {"Retry-After": "nan"}):
        assert retry_after_s(unreadable) is None


def test_the_key_is_nowhere_to_be_seen(caplog):
    async def scenario():
        replies = [lambda body: refusal(500, f"bad {SECRET}"), lambda body: refusal(401, f"wrong {SECRET}")]
        async with serving(*replies) as server, client(server) as backend:
            result = await going("Ask", Ask, backends={"small": backend})
            assert result.status == "executor_error"
            assert "wrong ***" in result.error
            assert SECRET not in f"{result!r} {backend!r} {backend.identity}"

    with caplog.at_level(logging.DEBUG):
        go(scenario())
    assert "bad ***" in caplog.text
    assert SECRET not in caplog.text


def test_what_answers_differently_is_known_by_another_identity():
    urls, other = ["http://a/v1", "http://b/v1"], ["http://c/v1"]
    same = OpenAIBackend(urls, "m").identity
    assert OpenAIBackend(urls[::-1], "m", api_key="k", patience=QUICK, prices=Prices(1.0)).identity == same
    different = [
        OpenAIBackend(urls, "n"),
        OpenAIBackend(other, "m"),
        OpenAIBackend(urls, "m", extra_body={"top_k": 1}),
        OpenAIBackend(urls, "m", structured=False),
        OpenAIBackend(urls, "m", identity="run 2"),
    ]
    assert len({same, *(backend.identity for backend in different)}) == 6


def test_a_workflow_on_a_real_endpoint_with_a_budget():
    async def scenario():
        async with serving() as server, client(server, prices=Prices(prompt=1e6, sampled=0.0)) as backend:
            backends: dict[str, Backend] = {"small": backend}
            result = await going("Ask -> Ask -> Ask", Ask, backends=backends, budget=Budget(cost=20.0))
            assert (result.status, result.answer, result.usage.cost) == ("budget", "42", 22.0)
            assert len(server.bodies) == 2

    go(scenario())


def test_a_cancelled_request_is_taken_back():
    async def scenario():
        async with serving(lambda body: 60.0) as server, client(server) as backend:
            result = await going("Ask", Ask, backends={"small": backend}, budget=Budget(seconds=1))
            assert result.status == "budget"
            assert server.most_in_flight == 1

    go(scenario())
