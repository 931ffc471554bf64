"""Data algorithms where there are several policies, several sources and several algorithms."""

import itertools

import numpy as np
import pytest

from flowjax.config import default_config
from flowjax.dataflow.algorithms import Algorithm, Candidate, Result, build_algorithms
from flowjax.records import Task
from tests.dataflow.test_algorithms import GROUPS, MEMBERS, Population

RIGHT, WRONG, MIXED = [1.0] * 4, [0.0] * 4, [0.0, 1.0, 0.0, 1.0]
PLAYS = 400  # asked for each task, at other positions of the order


def one(name: str, **options) -> Algorithm:
    config = default_config()
    config.dataflow.algorithms = {name: options}
    return build_algorithms(config)[name]


def tell(algorithm: Algorithm, task: Task, times: int, **rewards: list[float]) -> None:
    """What each policy came to in some groups of a task."""
    for number in range(times):
        for policy, values in rewards.items():
            longest = np.full(len(values), 3)
            assert algorithm.keep(Result(f"{task.source}-{number}", task, policy, np.array(values), longest))


def share_chosen(algorithm: Algorithm, task: Task) -> float:
    return sum(algorithm.choose(task, position) for position in range(PLAYS)) / PLAYS


CURRICULA = [
    ("skip_solved", {"decay": 0.5}, RIGHT, 0.0),
    ("difficulty", {"floor": 0.1}, RIGHT, 0.1),
    ("difficulty", {"floor": 0.1}, WRONG, 0.1),
    ("greso", {}, RIGHT, 0.1),
    ("greso", {}, WRONG, 0.4),
]


@pytest.mark.parametrize(("name", "options", "dull", "expected"), CURRICULA)
def test_a_task_is_passed_over_only_when_no_policy_has_a_use_for_it(name, options, dull, expected):
    task = Task("t", "toy", 0)
    for results in itertools.permutations([("solver", dull), ("verifier", MIXED)]):
        algorithm = one(name, **options)
        tell(algorithm, task, 20, **dict(results))
        assert share_chosen(algorithm, task) == 1.0, "the verifier learns from it, whatever the solver does"
    algorithm = one(name, **options)
    tell(algorithm, task, 20, solver=dull, verifier=dull)
    assert share_chosen(algorithm, task) == pytest.approx(expected, abs=0.08)


@pytest.mark.parametrize(("name", "options", "dull", "expected"), CURRICULA)
def test_sources_may_name_their_tasks_alike(name, options, dull, expected):
    algorithm, small, large = one(name, **options), Task("t", "toy", 0, source="small"), Task("t", "toy", 0, source="l")
    tell(algorithm, small, 20, agent=dull)
    assert share_chosen(algorithm, small) == pytest.approx(expected, abs=0.08)
    assert share_chosen(algorithm, large) == 1.0


def test_greso_adjusts_for_each_policy_and_not_before_it_could_have_passed_tasks_over():
    algorithm = one("greso", window=4)
    tasks = [Task(f"{number}", "toy", number) for number in range(40)]
    for task in tasks:
        tell(algorithm, task, 1, solver=RIGHT, verifier=MIXED)
    assert set(algorithm.metrics().values()) == {0.5, 40}, "the first plays of a task are nobody's choice"
    for task in tasks:
        tell(algorithm, task, 1, solver=RIGHT, verifier=MIXED)
    metrics = algorithm.metrics()
    assert metrics["p_easy_solver"] == pytest.approx(0.4) and metrics["p_hard_solver"] == pytest.approx(0.6)
    assert metrics["p_easy_verifier"] == metrics["p_hard_verifier"] == pytest.approx(0.6)


@pytest.mark.parametrize("kind", [RIGHT, WRONG])
@pytest.mark.parametrize("streak", [1, 2, 3])
def test_greso_plays_a_task_with_the_probability_of_the_paper(kind, streak):
    algorithm, task = one("greso", floor_easy=0.0, floor_hard=0.0, start=0.7), Task("t", "toy", 0)
    tell(algorithm, task, streak, agent=kind)
    assert share_chosen(algorithm, task) == pytest.approx(0.7**streak, abs=0.08)
    tell(algorithm, task, 1, agent=MIXED)
    assert share_chosen(algorithm, task) == 1.0


def test_chances_of_greso_follow_the_share_of_each_kind_and_stay_within_their_bounds():
    """Windows of four groups, so many of them easy: a quarter is below the target of one half, a half is not."""
    options = {"target_easy": 0.5, "target_hard": 0.5, "step": 0.3, "easy_above": 0.2}
    algorithm, task = one("greso", window=4, **options), Task("t", "toy", 0)
    tell(algorithm, task, 1, agent=MIXED)  # the first play of a task is not in the share
    for easy, chances in ((1, [0.8, 0.8]), (2, [0.5, 0.99]), (4, [0.2, 0.99]), (4, [0.01, 0.99]), (4, [0.01, 0.99])):
        tell(algorithm, task, easy, agent=[0.3] * 4)
        tell(algorithm, task, 4 - easy, agent=MIXED)
        assert [algorithm.metrics()[name] for name in ("p_easy", "p_hard")] == pytest.approx(chances)


@pytest.mark.parametrize(
    ("options", "results", "expected"),
    [
        ({"rate": 0.25}, [RIGHT, WRONG], 0.5),  # an average of 0.75, half-way from the target to its end
        ({"target": 0.8}, [MIXED], 1 - 0.3 / 0.8),
        ({"target": 0.2}, [MIXED], 1 - 0.3 / 0.8),
        ({"target": 0.8, "floor": 0.3}, [WRONG], 0.3),
    ],
)
def test_difficulty_plays_a_task_the_less_the_further_its_average_lies_from_the_target(options, results, expected):
    algorithm, task = one("difficulty", **options), Task("t", "toy", 0)
    for rewards in results:
        tell(algorithm, task, 1, agent=rewards)
    assert share_chosen(algorithm, task) == pytest.approx(expected, abs=0.08)


@pytest.mark.parametrize(("decay", "threshold", "plays"), [(0.9, 0.8, 16), (0.2, 0.95, 2), (0.5, 0.5, 1)])
def test_skip_solved_passes_a_task_over_once_its_average_is_at_the_threshold(decay, threshold, plays):
    algorithm, task = one("skip_solved", decay=decay, threshold=threshold), Task("t", "toy", 0)
    tell(algorithm, task, plays - 1, agent=RIGHT)
    assert algorithm.choose(task, 0)
    tell(algorithm, task, 1, agent=RIGHT)
    assert not algorithm.choose(task, 0)


ORDERS = ["first_in_first_out", "earliest_deadline", "last_in_first_out"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("replay_first", [False, True])
def test_an_order_before_or_after_a_replay_is_the_same(order, replay_first):
    fresh = [Candidate("a", 13, 1), Candidate("b", 11, 0), Candidate("c", 12, 2)]
    used = [Candidate("old", 1, 1, 1), Candidate("young", 3, 0, 1)]
    algorithms = [one(order), one("replay", ratio=0.5)]
    chosen = fresh
    for algorithm in reversed(algorithms) if replay_first else algorithms:
        chosen = algorithm.serve(chosen, used, 4)
    assert [each.group_id for each in chosen[:2]] == ["young", "old"]
    assert chosen[2:] == one(order).serve(fresh, used, 4)


@pytest.mark.parametrize("order", ORDERS)
def test_replay_saves_rollouts_with_every_order_on_either_side(tmp_path, order):
    rollouts = []
    for names in ([order], [order, "replay"], ["replay", order]):
        (tmp_path / "-".join(names)).mkdir()
        algorithms = {name: {"ratio": 0.5} if name == "replay" else {} for name in names}
        population = Population(tmp_path / "-".join(names), algorithms, max_staleness=2)
        for _ in range(20):
            assert len(population.step().rows) == GROUPS * MEMBERS
        rollouts.append(population.rollouts)
    assert max(rollouts[1:]) < 0.7 * rollouts[0]


def test_replay_is_offered_groups_as_old_as_it_may_take_whatever_checkpoints_are_kept(tmp_path):
    population = Population(tmp_path, {"replay": {"ratio": 0.25, "max_age_versions": 6}})
    population.config.trainer.keep_checkpoints = 1
    population.flow.close()
    population.open()
    replay, offered = population.flow.algorithms.by_name["replay"], []
    serve = replay.serve

    def recording(fresh, used, groups):
        offered.append(max((candidate.age_versions for candidate in used), default=0))
        return serve(fresh, used, groups)

    replay.serve = recording
    for _ in range(20):
        population.step()
    assert 6 <= max(offered) <= 8


@pytest.mark.parametrize(("ratio", "groups", "replayed"), [(0.7, 10, 7), (0.29, 100, 29), (0.25, 2, 0), (0.5, 5, 2)])
def test_replay_takes_its_ratio_rounded_down(ratio, groups, replayed):
    used = [Candidate(f"used-{number}", number, 0, 1) for number in range(200)]
    assert len(one("replay", ratio=ratio).serve([], used, groups)) == replayed


def test_no_more_groups_are_opened_than_a_batch_with_replayed_ones_needs(tmp_path):
    algorithms = {"replay": {"ratio": 0.7, "times": 9, "max_age_versions": 9}}
    population = Population(tmp_path, algorithms, max_staleness=0)
    population.config.trainer.groups_per_step = 10
    population.flow.close()
    population.open()
    for _ in range(8):
        population.step()
    assert population.rollouts == (10 + 7 * 3) * MEMBERS


def test_two_replays_take_no_group_twice():
    used = [Candidate("a", 1, 1, 1), Candidate("b", 2, 1, 1)]
    first, second = one("replay", ratio=0.5), one("replay", ratio=0.5)
    served = second.serve(first.serve([Candidate("c", 3, 0)], used, 2), used, 2)
    assert sorted(each.group_id for each in served) == ["a", "b", "c"]


def test_rewards_that_differ_by_rounding_are_equal():
    algorithm = one("dynamic_sampling")
    lengths = np.full(2, 3)
    for differ, rewards in ((False, [0.3, np.nextafter(0.3, 1)]), (True, [0.3, 0.301])):
        assert algorithm.keep(Result("g", Task("t", "toy", 0), "agent", np.array(rewards), lengths)) == differ
