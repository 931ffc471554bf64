"""A launch asks data algorithms of the user's own, so that no run is lost by them."""

import io
import json
import re
import sys
from collections import defaultdict

import numpy as np
import pytest

from flowjax.dataflow.algorithms import BUILT_IN, Algorithm, Table
from flowjax.launch import probe, trial
from flowjax.run import resolve


def found(config, path: str, **options) -> list[str]:
    config.dataflow.algorithms = {"mine": {"path": path, **options}}
    return list(trial.check_algorithms(resolve(config)))


class Numbered(Algorithm):
    """Trains on trajectories by their numbers."""

    def trains(self, result):
        return np.flatnonzero(result.rewards)


class Whole(Algorithm):
    """Has whole numbers for flags, which might as well be numbers of trajectories."""

    def trains(self, result):
        return (result.rewards > 0).astype(int)


class Alone(Algorithm):
    """Leaves groups out of a batch."""

    def serve(self, fresh, used, groups):
        return fresh[:1]


class ByPayload(Algorithm):
    """Reads what is not in the payload of its world's tasks."""

    def keep(self, result):
        return result.task.payload["colour"] == "red"


class Nested(Algorithm):
    """Has maps in a map, which come back without their default."""

    def __init__(self, *, seed: int):
        self.seen = defaultdict(lambda: defaultdict(int))

    def keep(self, result):
        self.seen[result.policy][result.task.task_id] += 1
        return True

    def state(self):
        return {"seen": self.seen}


class Gathered(Algorithm):
    """Has a set, once it knows a task."""

    def __init__(self, *, seed: int):
        self.seen = {}

    def keep(self, result):
        self.seen.setdefault(result.policy, set()).add(result.task.task_id)
        return True

    def state(self):
        return {"seen": self.seen}


class Pairs(Algorithm):
    """Has pairs, which come back as lists."""

    def __init__(self, *, seed: int):
        self.seen = {}

    def chosen(self, task, position):
        assert {self.seen.setdefault(task.task_id, (position, "first"))}

    def state(self):
        return {"seen": self.seen}


class Replaced(Algorithm):
    """Has a new table after each group."""

    def __init__(self, *, seed: int):
        self.seen = Table()

    def keep(self, result):
        self.seen = Table({**self.seen, result.task.task_id: 1})
        return True

    def state(self):
        return {"seen": self.seen}


class Last(Algorithm):
    """Asks for the last episode of a whole group."""

    def __init__(self, *, seed: int, members: int = 8):
        self.members = members

    def keep(self, result):
        return bool(result.rewards[self.members - 1] >= 0)


class Curriculum(Algorithm):
    """Knows the tasks alone that it chooses."""

    def __init__(self, *, seed: int):
        self.level = {}

    def choose(self, task, position):
        return position % 5 == 3

    def chosen(self, task, position):
        self.level[task.task_id] = {3: 1.0}[position % 5]

    def keep(self, result):
        return self.level[result.task.task_id] > 0

    def state(self):
        return {"level": self.level}


class Nothing(Algorithm):
    """Wants no task at first."""

    def choose(self, task, position):
        return position > 1000


class Shares(Algorithm):
    """Refuses rewards that success cannot give."""

    def keep(self, result):
        if set(result.rewards.tolist()) - {0.0, 1.0}:
            raise ValueError("for successes alone")
        return True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Numbered", "trains raised TypeError: it answers .*: give a mask.*made up, at last with the .* .1.0, 0.*.$"),
        ("Whole", "trains raised TypeError: it answers .*: give a mask.*made up, at last with the .* .1.0, 0.*.$"),
        ("Alone", "serve raised ValueError: it answers 1 groups, too few for a batch of 4: put the others last"),
        ("ByPayload", "keep raised KeyError: 'colour'"),
        ("Nested", "keep raised KeyError: .* .asked .*, once its state is restored, as plain maps and lists.$"),
        ("Pairs", "chosen raised TypeError: .* .asked .*, once its state is restored, as plain maps and lists.$"),
        ("Gathered", "state raised TypeError: set cannot go on the wire"),
        ("Replaced", "state raised ValueError: seen is another Table than before: empty that one instead"),
        (
            "Last",
            "keep raised IndexError: .* with the rewards .1.0, 1.0. of a group that lost 6 of its 8 episodes.$",
        ),
    ],
)
def test_a_data_algorithm_of_ones_own_that_would_end_the_run_is_refused(config, name, message):
    (problem,) = found(config, f"{__name__}:{name}")
    assert re.search(rf"^config\.dataflow\.algorithms\.mine\.{message}", problem), problem


OWN = [f"{__name__}:{name}" for name in ("Curriculum", "Nothing", "Shares")]


@pytest.mark.parametrize("path", [*BUILT_IN.values(), "tests.dataflow.own_algorithm:EveryOther", *OWN])
@pytest.mark.parametrize("members", [2, 8])
def test_data_algorithms_that_are_sound_pass(config, path, members):
    config.rollout.group_size = members
    options = {"limit_tokens": 8} if path.endswith("OverlongFilter") else {}
    assert found(config, path, **options) == []


@pytest.mark.parametrize("settings", [{"failed_episodes": "drop"}, {"min_group_size": 8}])
def test_groups_are_whole_where_a_run_drops_the_others(config, settings):
    config.dataflow.update(settings)
    assert found(config, f"{__name__}:Last") == []


def test_fields_that_no_task_has_are_refused(config):
    config.dataflow.algorithms = {"deduplicate": {"fields": ["board"]}}
    (problem,) = trial.check_algorithms(resolve(config))
    assert "has 'board'; they have level: name one" in problem
    config.env.name, config.env.options = "flowjax.envs.math:Math", {}
    config.dataflow.algorithms = {"deduplicate": {"fields": ["qestion", "answer"]}}
    (problem,) = trial.check_algorithms(resolve(config))
    assert "deduplicate.fields is ('qestion', 'answer'), but the payload of no task has 'qestion'" in problem
    assert "(did you mean 'question'?)" in problem
    config.dataflow.algorithms = {"deduplicate": {"fields": ["question"]}}
    assert list(trial.check_algorithms(resolve(config))) == []


def test_the_probe_asks_them(config, monkeypatch):
    config.dataflow.algorithms = {"mine": {"path": f"{__name__}:Numbered"}}
    request = {"config": config.to_dict(), "devices": 1, "checkpoints": None, "platform": "cpu"}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(sys, "stdout", answer := io.StringIO())
    probe.main()
    (problem,) = json.loads(answer.getvalue())["problems"]
    assert "mine.trains raised TypeError" in problem
