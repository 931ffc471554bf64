"""What an evaluation plays and counts: every held-out task once, and intervals over tasks."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import grain
import numpy as np
import pytest

from flowjax.compare import read_scores
from flowjax.config import default_config
from flowjax.dataflow.built_in_algorithms import Deduplicate
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.ledger import Kind
from flowjax.dataflow.service import DataflowService
from flowjax.dataflow.tasks import content_of, episode_seed, held_out_tasks, task_at
from flowjax.monitor.held_out import read_held_out, summarise
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.statistics import wilson
from flowjax.records import Episode, Lease, Task, Trajectory, Turn
from flowjax.run import resolve
from tests.dataflow import flows
from tests.dataflow.test_flow import played


def task_of(index: int, contents: int) -> Task:
    """Two of them ask the same where they are equal modulo `contents`."""
    return Task(f"held-{index}", "toy", index, {"number": index % contents})


def evaluate(
    folder: Path, tasks: grain.MapDataset[Task], asked: int, success=lambda lease: 1.0, samples: int = 1
) -> list[Lease]:
    """Evaluate version 0 to its end."""
    config = default_config()
    config.eval.tasks, config.eval.samples = asked, samples
    config.reward.components = {"success": 1.0}
    flow = Flow(resolve(config, folder), train_tasks=tasks, held_out_tasks=tasks)
    flow.report_serving("agent", 0)
    leases = flows.lease(flow, "w", 10_000, "eval")
    ids, logprobs = np.array([1, 2], np.int32), np.zeros(2, np.float32)
    for lease in leases:
        names = lease.episode_id, lease.group_id, lease.task.task_id, lease.seed
        turn = Turn("agent", 0, ids, ids, logprobs, "stop", 1, 2, 0.25, True, True)
        outcome = {"success": success(lease)}
        assert flows.accept(flow, lease.lease_id, Episode(*names, [Trajectory(*names, [turn], outcome)], outcome))
    flow.close()
    return leases


def test_rows_of_one_content_are_one_task_wherever_they_stand():
    rows = [
        Task(f"row-{n}", "code", n, {"file": "path", "offset": n, "content": content})
        for n, content in enumerate("aab")
    ]
    assert content_of(rows[0]) == content_of(rows[1]) != content_of(rows[2])


def test_tasks_that_differ_in_the_middle_of_a_long_array_are_two():
    first, second = (Task("t", "toy", 0, {"x": np.arange(2000), "y": 1}) for _ in range(2))
    second.payload["x"][1000] = 0
    assert content_of(first) != content_of(second)
    seen = Deduplicate(seed=0)
    seen.chosen(first, 0)
    assert seen.choose(replace(second, task_id="another"), 1)


def test_a_message_costs_no_more_where_an_evaluation_is_large(tmp_path):
    """Every message counted the groups that are open: with 10,000 tasks half a second of the event loop for each."""
    asked: dict[int, int] = {}
    for tasks in (10, 300):
        config = default_config()
        config.eval.tasks, config.reward.components = tasks, {"success": 1.0}
        source = grain.MapDataset.range(1000).map(lambda index: Task(f"held-{index}", "toy", index))
        (tmp_path / str(tasks)).mkdir()
        flow = Flow(resolve(config, tmp_path / str(tasks)), train_tasks=source, held_out_tasks=source)
        flow.report_serving("agent", 0)
        steps: list[None] = []
        flow.ledger._db.set_progress_handler(lambda: steps.append(None), 1)  # noqa: B023 - SQLite's own steps
        flow.evaluations.start_writing()
        assert not flow.evaluations.finished and flow.evaluations.pinned("agent") == [0]
        asked[tasks] = len(steps)
        flow.close()
    assert 0 < asked[300] < 2 * asked[10]


def test_a_version_that_is_made_again_is_evaluated_again(tmp_path):
    """The trainer has lost version 2 and goes on from 1: what the lost one reached is nobody's result."""
    config = default_config()
    config.trainer.update({"steps": 4, "groups_per_step": 1})
    config.rollout.group_size = 1
    config.eval.tasks, config.eval.every_steps = 2, 1
    config.reward.components = {"success": 1.0}
    tasks = grain.MapDataset.range(100).map(lambda index: task_of(index, 100))
    flow = Flow(resolve(config, tmp_path), train_tasks=tasks, held_out_tasks=tasks)
    service = DataflowService(flow)

    def evaluated(version: int) -> list[str]:
        flow.report_serving("agent", version)
        leases = flows.lease(flow, "w", 10, "eval")
        for lease in leases:
            assert flows.accept(flow, lease.lease_id, played(lease, version=version))
        return [lease.group_id for lease in leases]

    for version in range(3):
        if version:
            (lease,) = flows.lease(flow, "w", 1)
            assert flows.accept(flow, lease.lease_id, played(lease, version=version - 1))
            assert flows.credited(flow, "agent", version - 1)
            flow.batches.commit("agent", version)
        assert len(evaluated(version)) == 2
    (under_way,) = flows.lease(flow, "w", 1)
    asyncio.run(service.answer("claim", {"trainer": "restarted", "policies": {"agent": 1}, "after": 0}))
    assert set(flow.ledger.evaluations()) == {"agent@0", "agent@1"}
    assert flows.accept(flow, under_way.lease_id, played(under_way, version=2))
    assert flows.credited(flow, "agent", 1)
    flow.batches.commit("agent", 2)
    assert evaluated(2) == ["eval-agent@2-000000", "eval-agent@2-000001"]
    flow.close()


def test_tasks_are_made_once_and_a_time_that_began_in_another_process_is_not_said(tmp_path):
    """With 10,000 tasks each evaluation held every lease up for as long as the world took to make them."""
    config = default_config()
    config.trainer.update({"steps": 2, "groups_per_step": 1})
    config.rollout.group_size = 1
    config.eval.tasks, config.eval.every_steps = 5, 1
    config.reward.components = {"success": 1.0}
    made: list[int] = []
    tasks = grain.MapDataset.range(9).map(lambda index: task_of(index, 9))
    held_out = grain.MapDataset.range(5).map(lambda index: made.append(index) or task_of(index, 5))

    def play(flow: Flow, kind: Kind, slots: int, version: int) -> None:
        leases = flows.lease(flow, "w", slots, kind)
        assert len(leases) == slots
        assert all(flows.accept(flow, lease.lease_id, played(lease, version=version)) for lease in leases)

    flow = Flow(resolve(config, tmp_path), train_tasks=tasks, held_out_tasks=held_out)
    flow.report_serving("agent", 0)
    play(flow, "eval", 5, 0)
    play(flow, "train", 1, 0)
    assert flows.credited(flow, "agent", 0)
    flow.batches.commit("agent", 1)
    flow.report_serving("agent", 1)
    assert made == [0, 1, 2, 3, 4] and flow.ledger.is_under_way("agent@1")
    flow.close()
    flow = Flow(resolve(config, tmp_path), train_tasks=tasks, held_out_tasks=held_out)
    flow.report_serving("agent", 1)
    play(flow, "eval", 5, 1)
    flow.close()
    assert ["seconds" in entry for entry in read_metrics(tmp_path) if entry["kind"] == "eval"] == [True, False]


def told(folder: Path) -> dict:
    (line,) = [entry for entry in read_metrics(folder) if entry["kind"] == "eval"]
    return line


def test_a_small_set_is_played_once_and_the_log_says_so(tmp_path):
    tasks = grain.MapDataset.range(7).map(lambda index: task_of(index, 7))
    leases = evaluate(tmp_path, tasks, 50, lambda lease: float(lease.task.seed < 3))
    assert [lease.task.task_id for lease in leases] == [f"held-{index}" for index in range(7)]
    line = told(tmp_path)
    assert (line["tasks"], line["episodes"], line["unfinished"], line["asked"]) == (7, 7, 0, 50)
    assert line["samples"] == 1
    assert (line["low"], line["high"]) == pytest.approx(wilson(3, 7))
    assert line["policies"]["agent"]["low"] == pytest.approx(wilson(3, 7)[0])
    (said,) = [entry for entry in read_metrics(tmp_path) if entry["kind"] == "run"]
    assert said["text"] == "7 tasks, all that are held out; config.eval.tasks asks for 50"


def test_a_set_of_the_asked_size_needs_no_word(tmp_path):
    tasks = grain.MapDataset.range(50).map(lambda index: task_of(index, 50))
    assert len(evaluate(tmp_path, tasks, 50)) == 50
    assert not [entry for entry in read_metrics(tmp_path) if entry["kind"] == "run"]


def test_a_task_that_is_drawn_twice_is_one_task(tmp_path):
    """Of 40 draws of 8 tasks all those of the first four succeed: four successes of eight, not 20 of 40."""
    tasks = grain.MapDataset.range(1 << 31).map(lambda index: task_of(index, 8))
    evaluate(tmp_path, tasks, 40, lambda lease: float(lease.task.payload["number"] < 4))
    line = told(tmp_path)
    assert (line["tasks"], line["episodes"], line["success_rate"]) == (8, 40, 0.5)
    assert (line["low"], line["high"]) == pytest.approx(wilson(4, 8))
    agent = line["policies"]["agent"]
    assert (agent["low"], agent["high"], agent["tasks"]) == pytest.approx((*wilson(4, 8), 8))
    half = 1.96 * np.std([0.0, 1.0] * 4, ddof=1) / np.sqrt(8)  # of the mean of eight rewards, not of 40
    assert agent["reward_high"] - agent["reward_mean"] == pytest.approx(half)


def test_a_task_that_is_drawn_more_often_weighs_no_more(tmp_path):
    """Of eight draws one task has six, all won, and another two, both lost; in the log line as in `results.json`."""
    tasks = grain.MapDataset.range(8).map(lambda index: task_of(int(index > 5), 2))
    evaluate(tmp_path, tasks, 8, lambda lease: float(lease.task.payload["number"] == 0))
    line = told(tmp_path)
    assert (line["tasks"], line["episodes"]) == (2, 8)
    assert line["success_rate"] == line["policies"]["agent"]["success_rate"] == 0.5
    assert line["policies"]["agent"]["reward_mean"] == line["policies"]["agent"]["outcomes"]["success"] == 0.5
    assert summarise(read_held_out(tmp_path))["metrics"]["success"]["mean"] == line["success_rate"]


def test_each_episode_is_kept_with_its_reward_and_outcome(tmp_path):
    """Of three samples of each task the first seed alone succeeds where the task is even."""
    tasks = grain.MapDataset.range(4).map(lambda index: task_of(index, 4))
    first = {task_of(index, 4).task_id: episode_seed(0, index, 0) for index in range(4)}
    won = lambda lease: float(lease.seed == first[lease.task.task_id] and lease.task.payload["number"] % 2 == 0)  # noqa: E731
    leases = evaluate(tmp_path, tasks, 4, won, samples=3)
    lines = [json.loads(line) for line in (tmp_path / "held_out" / "agent@0.jsonl").read_text().splitlines()]
    assert len(leases) == len(lines) == 12 and len({line["seed"] for line in lines}) == 12
    assert [line["task_id"] for line in lines] == [f"held-{index}" for index in range(4) for _ in range(3)]
    assert sum(line["success"] for line in lines) == 2 == sum(line["rewards"]["agent"] for line in lines)
    assert read_scores(tmp_path, "success") == pytest.approx(
        {content_of(task_of(index, 4)): (index % 2 == 0) / 3 for index in range(4)}
    )
    assert {(line["turns"], line["sampled_tokens"], line["status"]) for line in lines} == {(1, 2, "ok")}
    line = told(tmp_path)
    assert (line["tasks"], line["episodes"], line["unfinished"]) == (4, 12, 0)
    assert line["env_return_mean"] == 0.25, "a workflow of one's own names no such outcome"
    assert (line["low"], line["high"]) == pytest.approx(wilson(4 / 6, 4))


def test_tasks_are_told_apart_by_what_they_ask():
    first, same, other = (Task(f"t{i}", "toy", i, {"a": i // 2, "b": [1]}) for i in range(3))
    assert content_of(first) == content_of(same) != content_of(other)
    assert content_of(Task("t0", "toy", 0)) != content_of(Task("t1", "toy", 0))


def test_a_mix_ends_with_its_first_source_that_ends():
    config = default_config()
    config.env.name = "flowjax.envs.webshop:WebShop"
    config.env.options = {"products": 5}
    config.env.sources = {"few": {}, "more": {"weight": 2.0, "options": {"products": 120, "seed": 1}}}
    config.env.train_tasks = 10
    tasks = held_out_tasks(config)
    drawn = [task_at(tasks, index) for index in range(len(tasks))]
    counts = Counter(task.source for task in drawn)
    assert counts["more"] == 2 * counts["few"] > 0
    assert len({content_of(task) for task in drawn}) == len(drawn)
