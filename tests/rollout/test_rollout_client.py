"""The client against a scripted server: how calls share requests, and what it does when the engine misbehaves.

What a real vLLM answers is tested in test_rollout_engine.py.
"""

import asyncio
import contextlib
import errno
import itertools
import json
from collections.abc import Callable
from functools import partial

import pytest
from aiohttp import web

from flowjax.rollout import client as client_module
from flowjax.rollout.client import EngineClient, EngineError, EngineReply, SamplingOptions, UnknownModel

SAMPLING = SamplingOptions(1.0, 2)


class Script:
    """A server that answers each prompt [n, ...] with token n and log-probability -n, in reverse order."""

    def __init__(self):
        self.requests: list[dict] = []
        self.pinned: list[bool] = []
        self.answer: Callable[[dict], web.Response | None] = lambda body: None
        self.delay_s = 0.0
        self.aborted = 0
        self.metrics = ""
        self.loading: asyncio.Event

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.pinned.append("X-Flowjax-Pinned" in request.headers)
        answer = self.answer(body)
        if answer is not None:
            return answer
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        choices = [_choice(index, prompt[0]) for index, prompt in enumerate(body["prompt"])]
        return web.json_response({"model": body["model"], "choices": choices[::-1]})


def _choice(index: int, token: int, finish_reason: str | None = "length") -> dict:
    logprobs = {"tokens": [f"token_id:{token}"], "token_logprobs": [-float(token)]}
    return {"index": index, "finish_reason": finish_reason, "logprobs": logprobs}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _events(request: dict, *events: dict) -> web.Response:
    lines = "".join(f"data: {json.dumps({'model': request['model'], **event})}\n\n" for event in events)
    return web.Response(text=lines + "data: [DONE]\n\n", content_type="text/event-stream")


async def _loads(script: Script, request: web.Request) -> web.Response:
    await script.loading.wait()
    return web.json_response({"loaded": (await request.json())["name"]})


async def _health(request: web.Request) -> web.Response:
    return web.Response()


async def _metrics(script: Script, request: web.Request) -> web.Response:
    return web.Response(body=script.metrics.encode("latin-1"))


@contextlib.asynccontextmanager
async def _serve(script: Script, **options):
    app = web.Application()
    app.router.add_post("/v1/completions", script.completions)
    app.router.add_post("/v1/load_weights", partial(_loads, script))
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", partial(_metrics, script))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    try:
        async with EngineClient(f"http://{host}:{port}", **options) as client:
            yield client
    finally:
        await runner.cleanup()


def _run(scenario, script: Script, **options):
    async def run():
        async with _serve(script, **options) as client:
            return await scenario(client)

    return asyncio.run(run())


@pytest.fixture
def script():
    return Script()


def test_concurrent_calls_share_requests_and_get_their_own_answers(script):
    async def ask(client):
        return await asyncio.gather(*(client.generate("base", [n, 0], SAMPLING) for n in range(20)))

    completions = _run(ask, script, prompts_per_request=8)
    assert [completion.sampled_ids for completion in completions] == [(n,) for n in range(20)]
    assert [completion.logprobs for completion in completions] == [(-float(n),) for n in range(20)]
    assert [len(request["prompt"]) for request in script.requests] == [8, 8, 4]


def test_only_equal_models_and_samplings_share(script):
    async def ask(client):
        cold = SamplingOptions(0.5, 2)
        calls = [("a@1", SAMPLING), ("a@2", SAMPLING), ("a@1", cold), ("a@1", SAMPLING)]
        return await asyncio.gather(*(client.generate(name, [n], how) for n, (name, how) in enumerate(calls)))

    completions = _run(ask, script)
    assert sorted((r["model"], r["temperature"], len(r["prompt"])) for r in script.requests) == [
        ("a@1", 0.5, 1),
        ("a@1", 1.0, 2),
        ("a@2", 1.0, 1),
    ]
    assert [completion.spans[0][0] for completion in completions] == ["a@1", "a@2", "a@1", "a@1"]


def test_a_request_names_every_parameter_of_sampling(script):
    """An engine of somebody else fills in what is missing from its model's generation_config.json."""
    cut = SamplingOptions(0.6, 8, top_p=0.95, top_k=20, min_p=0.1, stop=("</action>", "\n\n"), stop_token_ids=(7,))

    async def ask(client):
        return await asyncio.gather(client.generate("base", [1], SAMPLING), client.generate("base", [2], cut))

    _run(ask, script)
    names = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "stop", "stop_token_ids")
    plain, asked = ([request[name] for name in names] for request in script.requests)
    assert plain == [1.0, 2, 1.0, 0, 0.0, [], []]
    assert asked == [0.6, 8, 0.95, 20, 0.1, ["</action>", "\n\n"], [7]]
    none = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert all(request.items() >= none.items() for request in script.requests)


def test_requests_carry_no_seed(script):
    """vLLM would give equal prompts of one seeded request equal answers."""
    _run(lambda client: client.generate("base", [1], SAMPLING), script)
    assert "seed" not in script.requests[0]


def test_a_call_alone_waits_for_the_window_only(script):
    async def ask(client):
        async with asyncio.timeout(60.0):
            return await client.generate("base", [1], SAMPLING)

    assert _run(ask, script, batch_window_s=0.01).sampled_ids == (1,)


def test_model_is_what_the_engine_says(script):
    script.answer = lambda body: web.json_response({"model": "other", "choices": [_choice(0, 1)]})
    assert _run(lambda client: client.generate("base", [1], SAMPLING), script).spans[0][0] == "other"


@pytest.mark.parametrize("failure", [_error(503, "starting"), _error(500, "EngineDeadError")])
def test_waits_while_the_engine_is_away(script, failure):
    status, text = failure.status, failure.text or ""
    script.answer = lambda body: web.Response(status=status, text=text) if len(script.requests) < 3 else None
    assert _run(lambda client: client.generate("base", [4], SAMPLING), script).sampled_ids == (4,)
    assert len(script.requests) == 3


def test_aborted_requests_are_sent_again(script):
    """vLLM answers them, cut short, when it is told to stop."""
    answer = {"model": "base", "choices": [_choice(0, 4, "abort")]}
    script.answer = lambda body: web.json_response(answer) if len(script.requests) == 1 else None
    assert _run(lambda client: client.generate("base", [4], SAMPLING), script).finish_reason == "length"


def test_gives_up_on_an_engine_that_stays_away(tmp_path):
    async def ask():
        async with EngineClient("http://127.0.0.1:9", request_timeout_s=0.3, log=tmp_path / "engine.log") as client:
            async with asyncio.timeout(120.0):
                await client.generate("base", [1], SAMPLING)

    with pytest.raises(EngineError, match=r"away for .*engine\.log"):
        asyncio.run(ask())


def test_an_engine_that_cannot_be_asked_for_a_reason_of_our_own_is_not_blamed(monkeypatch):
    def without_files(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    client = EngineClient("http://127.0.0.1:9")
    monkeypatch.setattr(client, "_request", without_files)
    assert not asyncio.run(client.healthy())
    assert client.trouble.startswith("Too many open files: raise the limit of open files (ulimit -n)")


def test_gives_up_on_an_engine_that_only_fails(script):
    script.answer = lambda body: _error(500, "kernel exploded")
    with pytest.raises(EngineError, match="kernel exploded"):
        _run(lambda client: client.generate("base", [1], SAMPLING), script, request_timeout_s=0.3)


def test_gives_up_on_an_engine_that_fails_slowly(script, monkeypatch, caplog):
    """As behind a gateway that answers 504: its /health was good meanwhile, and the time began anew with each try."""
    monkeypatch.setattr(client_module, "_PROBE_EVERY_S", 0.01)

    async def fails(request: web.Request) -> web.Response:
        await asyncio.sleep(0.2)
        return _error(504, "upstream timed out")

    monkeypatch.setattr(script, "completions", fails)
    with pytest.raises(EngineError, match=r"away for .*upstream timed out"):
        _run(lambda client: client.generate("base", [1], SAMPLING), script, request_timeout_s=0.5)
    assert [record.getMessage().partition(" fails: ")[2] for record in caplog.records] == [
        "HTTP status 504: upstream timed out"
    ]


def test_long_requests_of_a_living_engine_are_waited_for(script, monkeypatch):
    monkeypatch.setattr(client_module, "_PROBE_EVERY_S", 0.05)
    script.delay_s = 3.0
    completion = _run(lambda client: client.generate("base", [1], SAMPLING), script, request_timeout_s=1.0)
    assert completion.sampled_ids == (1,)
    assert len(script.requests) == 1


def test_requests_under_way_share_the_probes_of_the_engine(script, monkeypatch):
    """512 of them asked for its health about a hundred times a second."""
    monkeypatch.setattr(client_module, "_PROBE_EVERY_S", 0.2)
    script.delay_s, calls = 1.5, 40

    async def ask(client):
        healthy, asked_s = client.healthy, []

        async def counted() -> bool:
            asked_s.append(client._probed_s)
            return await healthy()

        monkeypatch.setattr(client, "healthy", counted)
        waiting = []
        for _ in range(calls):
            waiting.append(asyncio.create_task(client.generate("base", [1], SAMPLING)))
            await asyncio.sleep(0.01)
        assert len(await asyncio.gather(*waiting)) == calls
        return asked_s

    asked_s = _run(ask, script, prompts_per_request=1)
    assert len(script.requests) == calls and len(asked_s) > 1
    assert all(later - earlier >= 0.2 for earlier, later in itertools.pairwise(asked_s))


def test_unknown_model_has_its_own_error_at_once(script):
    script.answer = lambda body: _error(404, "The model `a@1` does not exist.")
    with pytest.raises(UnknownModel, match="a@1"):
        _run(lambda client: client.generate("a@1", [1], SAMPLING), script)
    assert len(script.requests) == 1


def test_a_refused_request_fails_exactly_its_calls(script):
    script.answer = lambda body: _error(400, "prompt too long") if [1] in body["prompt"] else None

    async def ask(client):
        calls = [client.generate("base", [n], SAMPLING) for n in range(4)]
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = _run(ask, script, prompts_per_request=2)
    assert [isinstance(answer, EngineError) for answer in answers] == [True, True, False, False]
    assert "prompt too long" in str(answers[0])
    assert len(script.requests) == 2


def test_wrong_number_of_answers_is_an_error(script):
    script.answer = lambda body: web.json_response({"model": "base", "choices": [_choice(0, 1)]})

    async def ask(client):
        calls = [client.generate("base", [n], SAMPLING) for n in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(answer, EngineError) and "1 of 2" in str(answer) for answer in _run(ask, script))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        "<html>welcome</html>",
        '{"model": "base", "choices": [{"index": 7, "finish_reason": "stop", "logprobs": null}]}',
        '{"model": "base", "choices": [{"index": 0}]}',
        "\xff",
    ],
)
def test_an_answer_that_cannot_be_read_is_the_engines_fault(script, tmp_path, stream, answer):
    """It was a fault of the world, whose episode was never played again."""
    body = f"data: {answer}\n\n" if stream else answer
    script.answer = lambda _: web.Response(body=body.encode("latin-1"), content_type="text/html")
    with pytest.raises(EngineError, match=r"the engine at http.*log"):
        options = {"stream": stream, "log": tmp_path / "engine.log", "request_timeout_s": 0.2}
        _run(lambda client: client.generate("base", [1], SAMPLING), script, **options)


@pytest.mark.parametrize("text", ["vllm:num_requests_running", "vllm:num_requests_waiting inf", "vllm:num_requ\xff"])
def test_metrics_that_cannot_be_read_are_the_engines_fault(script, text):
    """They ended the rollout service."""
    script.metrics = text
    with pytest.raises(EngineError, match="tells no metrics that can be read"):
        _run(lambda client: client.load(), script)


def test_cancelled_calls_leave_the_others_alone_and_end_a_request_nobody_waits_for(script):
    script.delay_s = 2.0

    async def ask(client):
        shared = [asyncio.create_task(client.generate("base", [n], SAMPLING)) for n in range(2)]
        alone = asyncio.create_task(client.generate("other", [1], SAMPLING))
        while len(script.requests) < 2:
            await asyncio.sleep(0.01)
        shared[0].cancel()
        alone.cancel()
        return await asyncio.gather(*shared, alone, return_exceptions=True)

    first, second, alone = _run(ask, script)
    assert isinstance(first, asyncio.CancelledError) and isinstance(alone, asyncio.CancelledError)
    assert isinstance(second, EngineReply) and second.sampled_ids == (1,)
    assert script.aborted == 1


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        ({"message": "prompt too long", "code": 400}, EngineError, r"refuses a request \(HTTP 400\): prompt too long"),
        ({"message": "no such model", "code": 404}, UnknownModel, "does not serve base: no such model"),
    ],
)
def test_an_error_event_in_a_stream_is_the_engines_answer(script, error, raised, text):
    script.answer = lambda body: _events(body, {"choices": [_choice(0, 4, None)]}, {"error": error})
    with pytest.raises(raised, match=text):
        _run(lambda client: client.generate("base", [4], SAMPLING), script, stream=True)
    assert len(script.requests) == 1


@pytest.mark.parametrize("error", [{"message": "EngineDeadError", "code": 500}, {"message": "EngineDeadError"}])
def test_an_error_event_of_a_dying_engine_has_the_request_sent_again(script, error):
    def answer(body: dict) -> web.Response:
        return _events(body, {"error": error} if len(script.requests) == 1 else {"choices": [_choice(0, 4)]})

    script.answer = answer
    completion = _run(lambda client: client.generate("base", [4], SAMPLING), script, stream=True)
    assert completion.sampled_ids == (4,) and len(script.requests) == 2

    script.answer = lambda body: _events(body, {"error": error})
    with pytest.raises(EngineError, match="EngineDeadError"):
        _run(lambda client: client.generate("base", [4], SAMPLING), script, stream=True, request_timeout_s=0.3)


def test_calls_that_must_end_on_their_weights_travel_apart_and_say_so(script):
    async def ask(client):
        calls = [client.generate("base", [n], SAMPLING, pinned=n % 2 == 1) for n in range(4)]
        return await asyncio.gather(*calls)

    assert [completion.sampled_ids for completion in _run(ask, script)] == [(0,), (1,), (2,), (3,)]
    by_pinned = dict(zip(script.pinned, script.requests, strict=True))
    assert {pinned: body["prompt"] for pinned, body in by_pinned.items()} == {False: [[0], [2]], True: [[1], [3]]}


def test_new_weights_are_waited_for_while_the_engine_lives(script, monkeypatch):
    """However long replies that must end before hold them up; an engine that dies meanwhile is named."""
    monkeypatch.setattr(client_module, "_PROBE_EVERY_S", 0.01)
    monkeypatch.setattr(client_module, "_CONTROL_TIMEOUT_S", 0.05)
    alive = [True]

    async def load(client, folder):
        probes = 0

        async def healthy():
            nonlocal probes
            probes += 1
            if probes == 40:
                script.loading.set()
            return alive[0]

        monkeypatch.setattr(client, "healthy", healthy)
        script.loading = asyncio.Event()
        await client.load_weights("agent@1", folder)
        return probes

    assert _run(lambda client: load(client, "/weights"), script) >= 40
    alive[0] = False
    with pytest.raises(EngineError, match="died while it loaded agent@1"):
        _run(lambda client: load(client, "/weights"), script, request_timeout_s=0.0)


def test_closing_fails_what_is_waiting(script):
    script.delay_s = 30.0

    async def close():
        async with _serve(script, batch_window_s=0.01) as client:
            sent = asyncio.create_task(client.generate("base", [1], SAMPLING))
            await asyncio.sleep(0.1)
            unsent = asyncio.create_task(client.generate("base", [2], SAMPLING))
            await asyncio.sleep(0)
        return await asyncio.gather(sent, unsent, return_exceptions=True)

    answers = asyncio.run(close())
    assert all(isinstance(answer, EngineError) and "closed" in str(answer) for answer in answers)
