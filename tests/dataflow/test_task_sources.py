"""Sources of tasks: mixed at their ratios, in an order that the config alone fixes."""

import json
import re
from collections import Counter

import pytest

from flowjax.config import ConfigError, default_config, task_options
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.tasks import held_out_tasks, task_at, train_tasks, trained_in_another_source
from flowjax.run import resolve
from tests.dataflow import flows


def configuration(**sources):
    config = default_config()
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    config.env.options = {"rows": 6, "boxes": 1}
    config.env.train_tasks = 50
    config.env.sources = sources
    config.trainer.update({"steps": 100, "groups_per_step": 4})
    config.rollout.group_size = 1
    config.eval.tasks = 0
    config.reward.components = {"success": 1.0}
    config.dataflow.max_staleness = 0
    return config


SOURCES = {"small": {"weight": 3.0}, "large": {"weight": 1.0, "options": {"rows": 7, "boxes": 2}, "train_tasks": 5}}


def test_one_source_is_the_world_as_it_was():
    config = configuration()
    tasks = train_tasks(config)
    assert task_at(tasks, 0).source == ""
    assert len({task_at(tasks, index).task_id for index in range(50)}) == 50
    assert [task_at(tasks, index).task_id for index in range(50)] != [
        task_at(tasks, index + 50).task_id for index in range(50)
    ]


def test_sources_are_mixed_at_their_ratios():
    tasks = train_tasks(configuration(**SOURCES))
    drawn = [task_at(tasks, index) for index in range(400)]
    assert Counter(task.source for task in drawn) == {"small": 300, "large": 100}
    assert len({task.task_id for task in drawn if task.source == "large"}) == 5
    assert len({task.task_id for task in drawn if task.source == "small"}) == 50
    assert max(Counter(task.source for task in drawn[start : start + 8])["large"] for start in range(392)) <= 3


def test_a_task_says_which_options_it_is_played_with():
    config = configuration(**SOURCES)
    assert task_options(config, "") == {"rows": 6, "boxes": 1} == task_options(config, "small")
    assert task_options(config, "large") == {"rows": 7, "boxes": 2}


def test_held_out_tasks_are_mixed_too_and_are_none_of_training():
    config = configuration(**SOURCES)
    held_out, train = held_out_tasks(config), train_tasks(config)
    drawn = [task_at(held_out, index) for index in range(40)]
    assert Counter(task.source for task in drawn) == {"small": 30, "large": 10}
    assert not {task.task_id for task in drawn} & {task_at(train, index).task_id for index in range(100)}


def test_held_out_tasks_that_another_source_trains_on_are_noted(tmp_path):
    """A world keeps the splits of one set apart; what one set holds out another one may have for training."""
    config = configuration()
    config.env.name, config.env.options, config.eval.tasks = "flowjax.envs.math:Math", {}, 16
    config.env.train_tasks = 200
    problems = [{"question": f"What is {number} + {number}?", "answer": f"#### {2 * number}"} for number in range(200)]
    (tmp_path / "set").mkdir()
    for name, rows in (("all", problems), ("set/train", problems[10:]), ("set/test", problems[:10])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, other = ({"options": {"path": str(tmp_path / name)}} for name in ("all.jsonl", "set"))
    config.env.sources = {"one": one, "same": one}
    assert trained_in_another_source(config) == ""
    config.env.sources = {"one": one, "other": other}
    found = trained_in_another_source(config)
    assert re.search(r"held-out tasks of 'one' \(of them 'math-held_out-.*'\) are training tasks of 'other'", found)
    config.env.sources, config.eval.tasks = {"one": one, "other": {**other, "train_tasks": 1}}, 1
    assert "are training tasks of 'other'" not in trained_in_another_source(config)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"small": {"weight": 0.0}}, r"config.env.sources.small.weight is 0.0: give a positive number"),
        ({"small": {"share": 0.5}}, r"config.env.sources.small.share is no field: use weight, options or train_tasks"),
    ],
)
def test_mistakes_are_named(sources, message):
    with pytest.raises(ConfigError, match=message):
        train_tasks(configuration(**sources))


def open_flow(folder, config) -> Flow:
    flow = Flow(resolve(config, folder), train_tasks=train_tasks(config), held_out_tasks=held_out_tasks(config))
    flow.report_serving("agent", 0)
    return flow


def test_a_restarted_dataflow_goes_on_at_the_very_task(tmp_path):
    def leased(flow: Flow, version: int) -> list[str]:
        flow.report_serving("agent", version)
        return [f"{lease.task.source} {lease.task.task_id}" for lease in flows.lease(flow, "w", 100)]

    config = configuration(**SOURCES)
    config.dataflow.algorithms = {"deduplicate": {}}
    for folder in (whole := tmp_path / "whole", cut := tmp_path / "cut"):
        folder.mkdir()
    config.dataflow.max_staleness = 8
    flow = open_flow(whole, config)
    expected = [leased(flow, version) for version in range(5)]
    found = []
    for version in range(5):
        flow = open_flow(cut, config)  # restarted before every version
        found.append(leased(flow, version))
        flow.close()
    assert found == expected
    assert len({name for names in expected for name in names if name.startswith("large")}) == 5
