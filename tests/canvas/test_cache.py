"""The cache: what is in its key, what it keeps, and equal calls at one time."""

import asyncio
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowjax.canvas.cache import Cache, CacheError, Outcome, key_of, problem_digest
from flowjax.canvas.values import Field, Problem
from tests.canvas.toy_operators import (
    PROBLEM,
    Ask,
    Echo,
    Plan,
    appending,
    checking,
    failing,
    go,
    going,
    merging,
    operator,
    until,
)

B, MERGE = appending("B", "b"), merging()
WORKFLOW = 'Plan -> [Ask{"First."}, Ask{"Second."}] -> Merge -> Ask{"Last."}'


def outcome(value: str) -> Outcome:
    return Outcome({"answer": value}, keep=True)


class Bench:
    """Runs workflows with one cache and counts requests."""

    def __init__(self):
        self.backends = {"small": Echo("small"), "large": Echo("large")}
        self.options: dict[str, Any] = {"cache": Cache(), "backends": self.backends}

    def __call__(self, workflow: str, **options: Any) -> tuple[int, int]:
        """How many requests the run sends, and how many of its calls are cached."""
        before = sum(len(backend.asked) for backend in self.backends.values())
        result = go(workflow, Ask, Plan, MERGE, **(self.options | options))
        assert result.status == "ok"
        sent = sum(len(backend.asked) for backend in self.backends.values()) - before
        assert result.usage.calls == sent
        return sent, sum(node.cached for node in result.trace)


def test_an_unchanged_workflow_asks_nothing():
    bench = Bench()
    assert bench(WORKFLOW) == (4, 0)
    assert bench(WORKFLOW) == (0, 5)


@pytest.mark.parametrize(
    ("edited", "asked"),
    [
        (WORKFLOW.replace("Last", "Final"), 1),  # an instruction
        (WORKFLOW.replace("Second", "Other"), 2),  # of one branch: the step after the parallel reads it
        (WORKFLOW.replace("Plan", 'Plan{"Better."}'), 4),  # upstream of everything
        (WORKFLOW.replace("Plan -> ", ""), 3),
        (WORKFLOW.replace('"Last."}', '"Last."}@large'), 1),  # a backend
        (WORKFLOW.replace("Plan", "Plan@large"), 4),
        (f"{WORKFLOW} -> Ask", 1),  # a node more
        (WORKFLOW.replace(' -> Ask{"Last."}', ""), 0),  # a node less
        (WORKFLOW.replace('Ask{"First."}, Ask{"Second."}', 'Ask{"Second."}, Ask{"First."}'), 1),  # branches in turn
        (f"({WORKFLOW}) * 1", 0),  # the same calls in another structure
    ],
)
def test_after_an_edit_only_what_changed_runs_again(edited, asked):
    bench = Bench()
    bench(WORKFLOW)
    assert bench(edited)[0] == asked
    assert bench(WORKFLOW)[0] == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"max_new_tokens": 7},
        {"seed": 1},
        {"default_backend": "large"},
        {"problem": replace(PROBLEM, text="What is 7 times 6?")},
        {"problem": replace(PROBLEM, context="Numbers are in base 13.")},
        {"problem": replace(PROBLEM, kind="code")},
    ],
)
def test_what_requests_are_made_of_is_in_the_key(changed):
    bench = Bench()
    bench("Ask")
    assert bench("Ask", **changed) == (1, 0)
    assert bench("Ask") == (0, 1)


def test_equal_branches_are_cached_apart():
    bench = Bench()
    assert bench("[Ask, Ask, Ask] -> Merge") == (3, 0)
    assert bench("[Ask, Ask, Ask, Ask] -> Merge") == (1, 3)


def test_a_changed_operator_of_the_same_name_runs_again():
    def version(suffix: str):
        say = operator("Say", (), (Field("answer"),), lambda *_: {"answer": suffix})
        return type("Say", (say, type("Mixin", (), {"template": suffix})), {})

    cache = Cache()
    assert [go("Say", version(text), cache=cache).answer for text in ("one", "two", "one")] == ["one", "two", "one"]


@pytest.mark.parametrize(
    "problem",
    [
        replace(PROBLEM, options={"A": "41", "B": "42"}),
        replace(PROBLEM, options={"A": "42", "B": "41"}),
        replace(PROBLEM, entry_point="f"),
        replace(PROBLEM, public_tests=("assert f(1) == 1",)),
        replace(PROBLEM, part=True),
        PROBLEM,
    ],
)
def test_every_part_of_a_problem_is_in_its_digest(problem):
    parts = [field.name for field in Problem.__dataclass_fields__.values()]
    assert parts == ["text", "kind", "context", "options", "entry_point", "public_tests", "part"]
    assert (problem_digest(problem) == problem_digest(replace(PROBLEM))) == (problem == PROBLEM)


def test_text_cannot_pass_for_another_part_of_the_key():
    options = {"problem": "p", "backend": "b", "sampling": "s", "seed": 0}
    keys = [
        key_of(Ask, "x", {"a": "b"}, **options),
        key_of(Ask, 'x", {"a": "b"}', {}, **options),
        key_of(Ask, "x", {"a": "b", "c": ""}, **options),
        key_of(Ask, "x", {"a": ("b",)}, **options),
        key_of(Ask, "x", {"a": '["b"]'}, **options),
        key_of(Ask, "x", {"a": True}, **options),
        key_of(Ask, "x", {"a": "true"}, **options),
        key_of(Plan, "x", {"a": "b"}, **options),
    ]
    assert len(set(keys)) == len(keys)


def test_operators_that_say_so_are_never_cached():
    dice = operator("Dice", (), (Field("answer"),), lambda *_: {"answer": "4"}, cacheable=False)
    cache = Cache()
    for _ in range(3):
        go("Dice", dice, cache=cache)
    assert dice.runs == 3  # pyright: ignore[reportAttributeAccessIssue]
    assert len(cache) == 0


def test_failures_are_never_kept():
    cache, backend = Cache(), Echo(fails=1)
    first = go("Ask", Ask, cache=cache, backends={"small": backend})
    assert (first.status, first.usage.calls) == ("error", 1)
    assert go("Ask", Ask, cache=cache, backends={"small": backend}).status == "ok"
    fail = failing("Fail")
    for _ in range(2):
        go("Fail", fail, cache=cache)
    assert fail.runs == 2  # pyright: ignore[reportAttributeAccessIssue]
    assert len(cache) == 1


def test_a_result_made_without_an_answer_that_was_asked_for_is_not_kept():
    class Tolerant(Ask):
        name = "Tolerant"

        async def run(self, inputs, context):
            try:
                return await super().run(inputs, context)
            except RuntimeError:
                return {"answer": "unknown"}

    cache, backend = Cache(), Echo(fails=1)
    options = {"cache": cache, "backends": {"small": backend}}
    assert go("Tolerant", Tolerant, **options).answer == "unknown"
    assert go("Tolerant", Tolerant, **options).answer.startswith("echo/0(")


def test_equal_calls_at_one_time_run_once():
    async def scenario():
        backend, cache = Echo(delay_s=0.02), Cache()
        options = {"cache": cache, "backends": {"small": backend}, "max_concurrent": 1}
        results = await asyncio.gather(*(going("Ask -> [B, B -> Ask]", Ask, B, **options) for _ in range(8)))
        assert len({result.answer for result in results}) == 1
        assert len(backend.asked) == 2
        assert sum(result.usage.calls for result in results) == 2

    asyncio.run(scenario())


def test_equal_calls_at_one_time_share_a_failure_and_the_next_one_tries_again():
    async def scenario():
        backend, cache = Echo(delay_s=0.01, fails=1), Cache()
        options = {"cache": cache, "backends": {"small": backend}}
        results = await asyncio.gather(*(going("Ask", Ask, **options) for _ in range(4)))
        assert [result.error for result in results] == ["n1 Ask: the backend is away"] * 4
        assert len(backend.asked) == 1
        assert (await going("Ask", Ask, **options)).status == "ok"

    asyncio.run(scenario())


def test_whoever_waits_takes_over_from_one_that_is_cancelled():
    async def scenario():
        backend, cache = Echo(delay_s=0.5), Cache()
        tasks = [asyncio.create_task(going("Ask", Ask, cache=cache, backends={"small": backend})) for _ in range(3)]
        await until(lambda: backend.asked)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert [result.status for result in results[1:]] == ["ok", "ok"]  # pyright: ignore[reportAttributeAccessIssue]
        assert len(backend.asked) == 2

    asyncio.run(scenario())


def test_one_that_stops_waiting_does_not_stop_the_others():
    async def scenario():
        backend, cache = Echo(delay_s=0.5), Cache()
        tasks = [asyncio.create_task(going("Ask", Ask, cache=cache, backends={"small": backend})) for _ in range(3)]
        await until(lambda: backend.asked)
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        assert len(backend.asked) == 1
        assert [type(result).__name__ for result in results] == ["WorkflowRun", "CancelledError", "WorkflowRun"]

    asyncio.run(scenario())


def through(cache: Cache, key: str, value: str) -> bool:
    """Whether the value was in the cache."""

    async def compute() -> Outcome:
        return outcome(value)

    found, cached = asyncio.run(cache.through(key, compute))
    assert found.outputs == {"answer": value}
    return cached


def test_the_least_recently_used_results_are_dropped_first():
    cache = Cache(max_entries=2)
    assert not through(cache, "a", "1")
    assert not through(cache, "b", "2")
    assert through(cache, "a", "1")
    assert not through(cache, "c", "3")  # drops b
    assert through(cache, "a", "1")
    assert not through(cache, "b", "2")
    assert (len(cache), cache.hits, cache.misses) == (2, 2, 4)


def test_memory_is_bounded_in_bytes():
    cache = Cache(max_bytes=10_000)
    for index in range(50):
        through(cache, str(index), "x" * 1000)
    assert 5 <= len(cache) <= 10
    assert not through(cache, "large", "x" * 20_000)
    assert not through(cache, "large", "x" * 20_000)
    assert 5 <= len(cache) <= 10


def test_a_file_outlives_the_process(tmp_path):
    path = tmp_path / "folder" / "results.sqlite"
    script = f"""
from pathlib import Path
from typing import Any
from flowjax.canvas.cache import Cache
from tests.canvas.toy_operators import *
result = go({WORKFLOW!r}, Ask, Plan, merging(), cache=Cache(path=Path({str(path)!r})))
print(result.usage.calls, result.answer)
"""
    root = Path(__file__).parents[2]
    outputs = [
        subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [output.split(" ", 1)[0] for output in outputs] == ["4", "0"]
    assert outputs[0][1:] == outputs[1][1:]


def test_a_file_gives_back_every_kind_of_value(tmp_path):
    everything = (Field("answer"), Field("sure", "flag"), Field("subproblems", "texts"))
    values = {"answer": "π \U0001d518 \x00", "sure": True, "subproblems": ("a", "", "b\n")}
    say = operator("Say", (), everything, lambda *_: values)
    for _ in range(2):
        cache = Cache(path=tmp_path / "results.sqlite")
        result = go("Say", say, cache=cache)
        assert {name: result.state[name] for name in values} == values
        cache.close()
    assert say.runs == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_file_is_bounded_and_shared(tmp_path):
    path = tmp_path / "results.sqlite"
    one, other = Cache(path=path), Cache(path=path)
    for index in range(10):
        through(one, str(index), "x")
    assert through(other, "9", "x")
    one.close()
    other.close()
    small = Cache(path=path, max_file_entries=3)
    assert [through(small, key, "x") for key in ("9", "8", "7")] == [True] * 3
    assert not through(small, "6", "x")


def test_files_that_are_not_ours_are_refused(tmp_path):
    noise, foreign = tmp_path / "noise", tmp_path / "foreign"
    noise.write_bytes(b"not a data base" * 100)
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE songs (name TEXT)")
    before = foreign.read_bytes()
    for path in (noise, foreign, tmp_path):
        with pytest.raises(CacheError, match=f"the cache file {path} .*delete it or name another"):
            Cache(path=path)
    assert foreign.read_bytes() == before


def test_a_file_that_breaks_does_not_break_runs(tmp_path, caplog):
    cache = Cache(path=tmp_path / "results.sqlite")
    assert cache._file is not None
    cache._file.execute("DROP TABLE results")
    assert not through(cache, "a", "1")
    assert through(cache, "a", "1")
    assert "could not be written" in caplog.text


@pytest.mark.parametrize("damaged", ['{"answ', "[1]", "null", '{"answer": 3}'])
def test_a_damaged_result_is_made_anew_and_mended(tmp_path, damaged):
    for _ in range(2):
        cache = Cache(path=tmp_path / "results.sqlite")
        assert go("B", B, cache=cache).answer == "b" and cache.misses == 1
        assert cache._file is not None
        cache._file.execute("UPDATE results SET outputs = ?", (damaged,))
        cache.close()
    cache = Cache(path=tmp_path / "results.sqlite")
    assert go("B -> B", B, cache=cache).answer == "bb"
    cache.close()
    cache = Cache(path=tmp_path / "results.sqlite")
    assert go("B", B, cache=cache).answer == "b" and cache.hits == 1


def test_the_result_of_a_check_is_cached_with_its_flag():
    yes, cache = checking("Yes", lambda _: True), Cache()
    for _ in range(2):
        assert go("B -> (Yes ? B : done)", B, yes, cache=cache).answer == "bb"
    assert yes.runs == 1  # pyright: ignore[reportAttributeAccessIssue]
