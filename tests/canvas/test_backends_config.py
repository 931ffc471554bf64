"""Backends from a config: what is wrong is said at start-up, with its remedy and without secrets."""

import asyncio
import math
import sys
import types

import pytest

from flowjax.canvas.backends import OfflineBackend, Request
from flowjax.canvas.backends.config import BackendConfigError, backends_from_config, open_backends, read_backends
from flowjax.canvas.backends.openai import OpenAIBackend
from tests.canvas.toy_operators import Echo

USUAL = {"kind": "openai", "base_url": "http://127.0.0.1:8000/v1", "model": "base"}
EVERYTHING = {
    **USUAL,
    "base_url": ["https://a.example/v1", "https://b.example/v1/"],
    "api_key_env": "CANVAS_KEY",
    "timeout_s": 5,
    "connect_timeout_s": 1.5,
    "retries": 0,
    "first_retry_s": 0.0,
    "last_retry_s": 1.0,
    "longest_wait_s": 2.0,
    "requests_per_minute": 60,
    "tokens_per_minute": 10_000,
    "concurrency": 4,
    "prices": {"prompt": 0.4, "sampled": 1.6},
    "token_limit_field": "max_completion_tokens",
    "structured": False,
    "extra_body": {"top_k": 5},
    "identity": "run 1",
    "use_proxy": True,
}


def test_every_option_arrives(monkeypatch):
    monkeypatch.setenv("CANVAS_KEY", " sk-secret\n")
    backend = backends_from_config({"large": EVERYTHING})["large"]
    assert isinstance(backend, OpenAIBackend)
    assert backend._urls == ["https://a.example/v1/chat/completions", "https://b.example/v1/chat/completions"]
    assert (backend._model, backend._api_key, backend.identity) == ("base", "sk-secret", "run 1")
    assert (backend._patience.timeout_s, backend._patience.retries, backend._patience.longest_wait_s) == (5, 0, 2.0)
    assert (backend._limits.requests_per_minute, backend._limits.concurrency) == (60, 4)
    assert backend._prices.cost(1_000_000, 1_000_000) == pytest.approx(2.0)
    assert (backend._token_limit_field, backend._structured, backend._use_proxy) == (
        "max_completion_tokens",
        False,
        True,
    )
    assert backend._extra_body == {"top_k": 5}


def test_options_that_are_none_are_not_given():
    (backend,) = backends_from_config({"small": {**USUAL, "api_key_env": None, "concurrency": None}}).values()
    assert isinstance(backend, OpenAIBackend)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base_url": None}, r"backends\.small\.base_url is missing: give an address such as"),
        ({"base_url": ""}, r"base_url is missing"),
        ({"base_url": []}, r"base_url is missing"),
        ({"base_url": "127.0.0.1:8000"}, r"base_url is '127\.0\.0\.1:8000': give an address such as"),
        ({"base_url": "http://a:b/v1"}, r"base_url is 'http://a:b/v1': give"),
        ({"base_url": "http://a:0/v1"}, r"base_url is 'http://a:0/v1': give"),
        ({"base_url": ["http://a/v1", 3]}, r"base_url is 3: give an address"),
        ({"model": None}, r"backends\.small\.model is missing"),
        ({"model": 3}, r"model is 3: give text"),
        ({"base_url": 8000}, r"backends\.small\.base_url is 8000: give text"),
        ({"api_key_env": 3}, r"api_key_env is 3: give text"),
        ({"structured": "false"}, r"structured is 'false': give True or False"),
        ({"use_proxy": "no"}, r"use_proxy is 'no': give True or False"),
        ({"extra_body": "top_k=5"}, r"extra_body is 'top_k=5': give a dict"),
        ({"prices": 0.4}, r"backends\.small\.prices is 0\.4: give a dict"),
        ({"identity": 1}, r"identity is 1: give text"),
        ({"api_key_env": "NOT_SET_HERE"}, r"api_key_env names .* NOT_SET_HERE, which is not set: export it"),
        ({"timeout_s": 0}, r"timeout_s is 0: give a number above 0"),
        ({"timeout_s": math.inf}, r"timeout_s is inf: give a number above 0"),
        ({"timeout_s": "5"}, r"timeout_s is '5': give a number above 0"),
        ({"retries": 1.5}, r"retries is 1\.5: give a whole number from 0 on"),
        ({"concurrency": True}, r"concurrency is True: give a whole number above 0"),
        ({"prices": {"prompt": -1}}, r"backends\.small\.prices\.prompt is -1: give a number from 0 on"),
        ({"prices": {"output": 1}}, r"prices\.output is not an option"),
        ({"token_limit_field": "max"}, r"token_limit_field is 'max': give max_tokens or"),
        ({"base_ulr": "x"}, r"base_ulr is not an option: did you mean base_url\?"),
        ({"kind": "opanai"}, r'kind is \'opanai\': give "openai", "offline" or package'),
        ({"kind": None}, r"kind is None"),
        ({"kind": "no.such:thing"}, r"kind is 'no\.such:thing', which cannot be imported \(No module"),
        ({"kind": "json:nothing"}, r"cannot be imported \(.*nothing"),
        ({"kind": "tests.canvas.toy_operators:Echo"}, r"does not take the options \['base_url', 'model'\]"),
        (
            {"kind": "flowjax.envs.canvas.offline:SimulatedSolver", "base_url": None, "model": None, "skill": "high"},
            r"backends\.small\.skill is 'high': give a number",
        ),
        ({"kind": "offline", "base_url": None, "model": None}, r"rules is missing: give a list such as"),
    ],
)
def test_what_is_wrong_is_said_with_its_remedy(changed, message):
    with pytest.raises(BackendConfigError, match=message):
        backends_from_config({"small": USUAL | changed})


def test_there_is_no_backend_by_default():
    with pytest.raises(BackendConfigError, match="backends is empty"):
        backends_from_config({})


@pytest.mark.parametrize(
    "url", ["https://user:hunter2@a.example/v1", "https://a.example/v1?key=hunter2", "user:hunter2@a.example/v1"]
)
def test_secrets_in_an_address_are_refused_and_not_repeated(url):
    with pytest.raises(BackendConfigError, match="name that in api_key_env") as error:
        backends_from_config({"small": {**USUAL, "base_url": url}})
    assert "hunter2" not in str(error.value)


def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(monkeypatch):
    monkeypatch.setenv("CANVAS_KEY", "sk-one\nsk-two")
    with pytest.raises(BackendConfigError, match="CANVAS_KEY holds characters that no key has") as error:
        backends_from_config({"small": {**USUAL, "api_key_env": "CANVAS_KEY"}})
    assert "sk-" not in str(error.value)


def test_a_backend_of_ones_own():
    kind = "tests.canvas.toy_operators:Echo"
    (backend,) = backends_from_config({"mine": {"kind": kind, "name": "mine", "tokens": 3}}).values()
    assert isinstance(backend, Echo) or type(backend).__name__ == "Echo"
    assert backend.identity == "mine"


OWN = """class Own:
    identity = "own"
    def __init__(self, prices): ...
    async def complete(self, request): ...
"""


@pytest.mark.parametrize(
    ("prices", "message"),
    [({"in": 1}, r"backends\.mine\.prices\.in is not"), ("free", r"mine\.prices is 'free': give a")],
)
def test_prices_of_a_backend_of_ones_own_are_those_that_prompts_show(tmp_path, monkeypatch, prices, message):
    (tmp_path / "own_priced.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"kind": "own_priced:Own", "prices": {"prompt": 1.0, "sampled": 2.0}}
    assert backends_from_config({"mine": own})["mine"].identity == "own"
    with pytest.raises(BackendConfigError, match=message):
        backends_from_config({"mine": {**own, "prices": prices}})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", r"backends\.mine: own_backend:make gives None, which is no backend: give an object with"),
        ("return type('Nameless', (), {'complete': print})()", r"which is no backend: give an object with `identity`"),
        (
            "return type('Plain', (), {'identity': 'p', 'complete': lambda self, request: 'yes'})()",
            r"own_backend:make gives <.*Plain object at .*>, whose `complete` cannot be awaited: write it as",
        ),
        ("raise OSError('no such model folder')", r"own_backend:make cannot be had \(OSError: no such model folder\)"),
    ],
)
def test_what_is_no_backend_is_refused_before_a_workflow_is_blamed(tmp_path, monkeypatch, body, message):
    (tmp_path / "own_backend.py").write_text(f"def make():\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_backend", raising=False)
    with pytest.raises(BackendConfigError, match=message):
        backends_from_config({"mine": {"kind": "own_backend:make"}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"backends": ["a"]}', r"backends is \('a',\): give an object"),
        ('{"backends": "http://127.0.0.1:8000/v1"}', r"backends is 'http://127\.0\.0\.1:8000/v1': give an object"),
        ('{"backends": {"a": {}}, "default_backend": ["a"]}', r"default_backend is \['a'\]: use one of a"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, text, message):
    (tmp_path / "backends.json").write_text(text)
    with pytest.raises(BackendConfigError, match=message):
        read_backends(str(tmp_path / "backends.json"))


def test_an_offline_backend():
    options = {"kind": "offline", "rules": [{"operator": "Ask", "answer": "42"}, {"error": "away"}], "seed": 3}
    (backend,) = backends_from_config({"script": options | {"prices": {"prompt": 1e6}}}).values()
    assert isinstance(backend, OfflineBackend)
    request = Request([{"role": "user", "content": "two words"}], tags={"operator": "Ask"})
    completion = asyncio.run(backend.complete(request))
    assert (completion.text, completion.usage.cost) == ("42", 2.0)
    with pytest.raises(BackendConfigError, match=r"rules\[0\]\.anwser is not an option: did you mean answer"):
        backends_from_config({"s": {"kind": "offline", "rules": [{"anwser": "42"}]}})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (5, r"backends\.s\.rules is 5: give a tuple"),
        (["42"], r"backends\.s\.rules\[0\] is '42': give a dict"),
        ([{"answer": 42}], r"backends\.s\.rules\[0\]\.answer is 42: give text"),
        ([{"answer": []}], r"rules\[0\]\.answer is empty: give a text"),
        ([{"answer": ["42", 41]}], r"rules\[0\]\.answer is \('42', 41\): give text"),
        ([{}, {"delay_s": "1"}], r"rules\[1\]\.delay_s is '1': give a number"),
        ([{"delay_s": -1}], r"rules\[0\]\.delay_s is -1: it must be at least 0"),
        ([{"text": "("}], r"rules\[0\]\.text is '\(', which is no regular expression: missing \)"),
    ],
)
def test_rules_that_could_answer_nothing_are_refused(rules, message):
    with pytest.raises(BackendConfigError, match=message):
        backends_from_config({"s": {"kind": "offline", "rules": rules}})


class Closing(Echo):
    """Closed by a plain method, as clients without asyncio are."""

    closed = 0

    def close(self) -> None:
        type(self).closed += 1


class ClosingLater(Echo):
    closed = 0

    async def close(self) -> None:
        await asyncio.sleep(0)
        type(self).closed += 1


@pytest.mark.parametrize("kind", [Closing, ClosingLater])
def test_backends_of_ones_own_are_closed_by_methods_of_both_kinds(
    kind: type[Closing | ClosingLater], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kind, "closed", 0)
    monkeypatch.setitem(sys.modules, "closing", types.SimpleNamespace(make=kind))

    async def opened() -> None:
        async with open_backends({"own": {"kind": "closing:make"}}) as backends:
            assert isinstance(backends["own"], kind)

    asyncio.run(opened())
    assert kind.closed == 1
