"""The offline backend: rules, in order, and the same answer to the same request everywhere."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from flowjax.canvas.backends import BackendError, OfflineBackend, Prices, Request, Rule
from flowjax.canvas.cache import Cache
from tests.canvas.toy_operators import Ask, go, step


def ask(
    backend: OfflineBackend, text: str = "What is it?", *, seed: int = 0, tags: Mapping[str, str] | None = None
) -> str:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    request = Request(messages, seed=seed, tags=tags or {})
    return asyncio.run(backend.complete(request)).text


def test_the_first_rule_that_matches_answers():
    backend = OfflineBackend(
        [
            Rule("by operator and tag", operator="Verify", tags={"input.answer": "42"}),
            Rule("by operator", operator="Verify"),
            Rule("by text", text=r"(?i)zero\b"),
            Rule(lambda request: request.messages[-1]["content"].upper(), text="^shout|\nshout"),
        ]
    )
    assert ask(backend, tags={"operator": "Verify", "input.answer": "42"}) == "by operator and tag"
    assert ask(backend, tags={"operator": "Verify", "input.answer": "421"}) == "by operator"
    assert ask(backend, "Divide by ZERO!") == "by text"
    assert ask(backend, "shout it") == "SHOUT IT"
    with pytest.raises(BackendError, match="no rule of the offline backend answers Custom: 'Be brief"):
        ask(backend, tags={"operator": "Custom"})


def test_a_rule_can_fail():
    with pytest.raises(BackendError, match="the model is away"):
        ask(OfflineBackend([Rule(error="the model is away")]))


def test_several_answers_are_chosen_by_seed_and_messages():
    backend = OfflineBackend([Rule(("a", "b", "c"))], seed=1)
    answers = [ask(backend, seed=seed) for seed in range(300)]
    assert answers == [ask(backend, seed=seed) for seed in range(300)]
    assert all(70 <= count <= 130 for count in Counter(answers).values())
    assert answers != [ask(OfflineBackend([Rule(("a", "b", "c"))], seed=2), seed=seed) for seed in range(300)]
    assert len({ask(backend, f"question {index}") for index in range(30)}) == 3


def test_another_process_gets_the_same_answers():
    script = (
        "from tests.canvas.test_backends_offline import *\n"
        "print(''.join(ask(OfflineBackend([Rule(('a', 'b', 'c'))]), seed=seed) for seed in range(50)), end='')"
    )
    here = "".join(ask(OfflineBackend([Rule(("a", "b", "c"))]), seed=seed) for seed in range(50))
    root = Path(__file__).parents[2]
    there = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert there.stdout == here


def test_words_are_tokens_and_cost_by_the_price_list():
    backend = OfflineBackend([Rule("forty two")], prices=Prices(prompt=1e6, sampled=1e7))
    usage = step(go("Ask", Ask, backends={"small": backend}), "Ask").usage
    assert (usage.prompt_tokens, usage.sampled_tokens, usage.cost) == (5, 2, 25.0)


def test_backends_with_equal_rules_share_cached_answers_and_others_do_not():
    cache = Cache()

    def calls(backend: OfflineBackend) -> int:
        return go("Ask", Ask, cache=cache, backends={"small": backend}).usage.calls

    assert [calls(OfflineBackend([Rule("42")])) for _ in range(2)] == [1, 0]
    assert calls(OfflineBackend([Rule("43")])) == 1
    assert calls(OfflineBackend([Rule("42")], seed=1)) == 1
    assert [calls(OfflineBackend([Rule(lambda request: "42")])) for _ in range(2)] == [1, 1]
    assert [calls(OfflineBackend([Rule(lambda request: "42")], identity="mine")) for _ in range(2)] == [1, 0]
