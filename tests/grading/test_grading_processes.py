"""Graders in processes: verdicts from any thread, and what hangs or dies costs one call."""

import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flowjax.grading.processes import GraderError, GraderProcesses
from flowjax.grading.sandbox import NoProcessorError


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def graders() -> Iterator[GraderProcesses]:
    with GraderProcesses("slow_graders:grade", workers=2, cpu_s=1.0) as pool:
        yield pool


def test_what_goes_wrong_costs_one_call_and_is_counted(graders: GraderProcesses):
    assert graders.call("print").startswith("print by ")
    for order, kind, message in [
        ("hang", NoProcessorError, "no answer within 10.0 s on the clock"),  # it did not ask for a processor either
        ("spin", GraderError, "more than 1.0 s of processor time"),
        ("die", GraderError, "died"),
        ("raise", GraderError, "KeyError: 'raise'"),
    ]:
        with pytest.raises(kind, match=message):
            graders.call(order)
        assert graders.call("fine").startswith("fine by ")
    counts = graders.counts
    assert (counts.timeouts, counts.crashes, counts.errors) == (2, 1, 1)


def test_a_process_with_a_thousand_files_open_has_graders_too():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 4096), before[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with GraderProcesses("slow_graders:grade", workers=1) as graders:
            assert graders.call("print").startswith("print by ")
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_cannot_be_started_is_not_the_fault_of_an_answer(graders: GraderProcesses):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(NoProcessorError, match=r"could not be started: .*Too many open files"):
            graders.call("fine")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert graders.call("fine").startswith("fine by ")


def test_arguments_that_cannot_be_sent_leave_the_pool_usable(graders: GraderProcesses):
    for _ in range(3):
        with pytest.raises(TypeError):
            graders.call(object())
    assert graders.call("fine").startswith("fine by ")


def test_threads_share_the_workers(graders: GraderProcesses):
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(graders.call, [f"task-{i}" for i in range(100)]))
    assert [answer.split()[0] for answer in answers] == [f"task-{i}" for i in range(100)]
    assert 1 <= len({answer.split()[-1] for answer in answers}) <= 2


def test_mathematics_is_judged_from_any_thread():
    verdicts: list[bool] = []
    with GraderProcesses("flowjax.grading.math:equal", cpu_s=30.0) as graders:
        asked = [("x+1", "1+x"), ("x+1", "x-1")]
        thread = threading.Thread(target=lambda: verdicts.extend(graders.call(*pair) for pair in asked))
        thread.start()
        thread.join()
    assert verdicts == [True, False]


def test_a_function_that_is_not_there_is_said_so():
    with GraderProcesses("slow_graders:nothing") as graders, pytest.raises(GraderError, match="died"):
        graders.call("x")
