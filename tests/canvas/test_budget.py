"""Budgets end a run cleanly, keep what there is, and are not overshot by more than what was in flight."""

import asyncio
import time

import pytest

from flowjax.canvas.cache import Cache
from flowjax.canvas.context import Budget
from flowjax.canvas.values import Usage
from tests.canvas.toy_operators import Ask, Echo, appending, go, going, merging, operator, order, step, text_in, until

A, MERGE = appending("A", "a"), merging()


@pytest.mark.parametrize("limit", range(5))
def test_calls_are_never_exceeded(limit):
    backend = Echo()
    result = go("A -> Ask -> Ask -> Ask -> A", Ask, A, backends={"small": backend}, budget=Budget(calls=limit))
    assert len(backend.asked) == result.usage.calls == min(limit, 3)
    if limit < 3:
        assert (result.status, result.error) == ("budget", f"the budget of {limit} calls is spent")
        assert [node.status for node in result.trace] == ["ok"] * (1 + limit) + ["budget"]
        assert result.answer == result.trace[limit].outputs["answer"]  # the last there was
    else:
        assert result.status == "ok"


def test_a_budget_that_is_just_enough_does_not_end_a_run():
    assert go("Ask -> A", Ask, A, budget=Budget(calls=1, tokens=10)).status == "ok"


def test_tokens_are_exceeded_by_what_is_in_flight_at_most():
    backend = Echo(tokens=10)
    result = go("Ask -> Ask -> Ask", Ask, backends={"small": backend}, budget=Budget(tokens=15))
    assert (result.status, len(backend.asked)) == ("budget", 2)
    assert result.error == "the budget of 15 tokens is spent: 20 were used"
    backend = Echo(tokens=10, delay_s=0.01)
    branches = ", ".join(["Ask"] * 9)
    result = go(f"[{branches}]", Ask, backends={"small": backend}, budget=Budget(tokens=15), max_concurrent=3)
    assert result.status == "budget"
    assert 2 <= len(backend.asked) <= 2 + 2  # two use it up, at most two more are in flight then


def test_money_ends_a_run():
    backend = Echo(cost=0.5)
    result = go("Ask -> Ask -> Ask", Ask, backends={"small": backend}, budget=Budget(cost=1.0))
    assert (result.status, result.usage.cost) == ("budget", 1.0)
    assert result.error == "the budget of 1 in cost is spent: 1 were used"


def test_time_cancels_what_is_in_flight():
    backend = Echo(delay_s=3600.0)
    result = go("A -> [Ask, Ask -> A] -> A", Ask, A, backends={"small": backend}, budget=Budget(seconds=1))
    assert (result.status, result.answer) == ("budget", "a")
    assert result.error == "the budget of 1 seconds is spent"
    assert [(node.operator, node.status) for node in result.trace] == [
        ("A", "ok"),
        ("Ask", "budget"),
        ("Ask", "budget"),
    ]
    assert result.usage.calls == 2  # they were sent
    assert backend.in_flight == 0


def test_time_also_ends_runs_that_never_wait():
    async def at_work(self, inputs, context):
        time.sleep(0.4)
        return {"answer": "slow"}

    slow = operator("Slow", (), text_in("answer"), lambda *_: {})
    slow.run = at_work
    result = go("(Slow) * 10", slow, budget=Budget(seconds=0.6))
    assert (result.status, result.answer) == ("budget", "slow")
    assert len(result.trace) <= 3


def test_time_is_over_while_waiting_for_another_run_that_does_the_same():
    async def scenario():
        backend, cache = Echo(delay_s=1.0), Cache()
        options = {"cache": cache, "backends": {"small": backend}}
        patient = asyncio.create_task(going("Ask", Ask, **options))
        await until(lambda: backend.asked)
        hasty = await going("Ask", Ask, budget=Budget(seconds=0.02), **options)
        assert (hasty.status, (await patient).status) == ("budget", "ok")
        assert len(backend.asked) == 1

    asyncio.run(scenario())


def test_one_that_waits_takes_over_from_a_run_whose_budget_is_spent():
    async def scenario():
        cache = Cache()
        poor = asyncio.create_task(going("A -> Ask", Ask, A, cache=cache, budget=Budget(calls=0)))
        rich = asyncio.create_task(going("A -> Ask", Ask, A, cache=cache))
        assert ((await poor).status, (await rich).status) == ("budget", "ok")

    asyncio.run(scenario())


def test_other_branches_come_to_their_end_and_their_candidates_are_kept():
    result = go("A -> [Ask, A -> A, Ask] -> Merge", Ask, A, MERGE, budget=Budget(calls=1), max_concurrent=1)
    assert result.status == "budget"
    assert [node.status for node in result.trace] == ["ok", "ok", "ok", "ok", "budget"]
    assert result.state["candidates"] == (result.trace[1].outputs["answer"], "aaa")
    assert result.answer == "a"


def test_cached_results_cost_nothing():
    cache = Cache()
    go("Ask -> Ask", Ask, cache=cache)
    result = go("Ask -> Ask", Ask, cache=cache, budget=Budget(calls=0, tokens=0, cost=0.0))
    assert (result.status, result.usage) == ("ok", Usage())


def test_requests_that_fail_count():
    backend = Echo(fails=1)
    result = go("[Ask -> A] -> Ask", Ask, A, backends={"small": backend}, budget=Budget(calls=1))
    assert [node.status for node in result.trace] == ["error", "budget"]
    assert result.usage.calls == 1


def test_an_operator_that_makes_do_without_an_answer_ends_the_run_all_the_same():
    class Stubborn(Ask):
        name = "Stubborn"

        async def run(self, inputs, context):
            try:
                return await super().run(inputs, context)
            except Exception:
                return {"answer": "no matter"}

    cache = Cache()
    result = go("A -> Stubborn -> A", Stubborn, A, cache=cache, budget=Budget(calls=0))
    assert (result.status, result.answer, order(result)) == ("budget", "a", "A Stubborn")
    assert step(result, "Stubborn").status == "budget"
    assert len(cache) == 1


def test_what_is_left_is_the_budget_of_the_next_run():
    backend = Echo(tokens=10, cost=0.25)
    budget = Budget(calls=5, tokens=35, seconds=100.0, cost=1.0)
    result = go("Ask -> Ask", Ask, backends={"small": backend}, budget=budget)
    left = budget.left(result.usage, result.seconds)
    assert (left.calls, left.tokens, left.cost) == (3, 15, 0.5)
    assert left.seconds == 100.0 - result.seconds
    assert budget.left(Usage(9, 100, 0, 9.0), 1e9) == Budget(0, 0, 0.0, 0.0)
    assert Budget().left(result.usage, 1.0) == Budget()


@pytest.mark.parametrize("limit", ["calls", "tokens", "seconds", "cost"])
def test_limits_below_zero_are_refused(limit):
    with pytest.raises(ValueError, match=f"budget.{limit} is -1: give a number from 0 on, or None"):
        Budget(**{limit: -1})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="nan"):
        Budget(**{limit: float("nan")})  # pyright: ignore[reportArgumentType]
