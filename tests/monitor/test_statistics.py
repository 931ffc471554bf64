"""Intervals cover what they should, and a comparison errs as seldom as it says; on simulated policies."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from flowjax.monitor.statistics import difference, pass_at_k, task_interval, wilson


def play(chances: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Mean over samples of each task that a policy solves with these probabilities."""
    return rng.binomial(samples, np.clip(chances, 0.0, 1.0)) / samples


@pytest.mark.parametrize(
    ("samples", "repeats", "lowest", "highest"),
    [(1, 300, 0.92, 0.99), pytest.param(4, 1000, 0.93, 0.97, marks=pytest.mark.slow)],
)
def test_task_intervals_cover_the_truth(samples: int, repeats: int, lowest: float, highest: float):
    rng, covered = np.random.default_rng(0), 0
    for _ in range(repeats):
        _, low, high = task_interval(play(rng.beta(1.2, 0.8, 128), samples, rng))
        covered += low <= 0.6 <= high
    assert lowest <= covered / repeats <= highest


def test_samples_of_one_task_are_no_further_tasks():
    rng = np.random.default_rng(1)
    means = play(rng.beta(0.2, 0.2, 32), 1, rng)
    many = play(means, 64, rng)  # each task asked for 64 times, and answered alike
    assert task_interval(many) == task_interval(means)


def test_intervals_hang_on_neither_the_order_of_tasks_nor_the_rounding_of_floats():
    """Resamples whose mean is that of all are counted, and thirds differ by how they are added up."""
    rng = np.random.default_rng(3)
    for tasks, samples in ((20, 3), (20, 6), (50, 3), (50, 6)):
        right = rng.binomial(samples, rng.beta(0.5, 0.5, tasks))
        found = task_interval(right / samples)
        assert task_interval(np.array([pass_at_k(samples, int(count), 1) for count in right])) == pytest.approx(found)
        assert task_interval(rng.permutation(right / samples)) == pytest.approx(found)


def test_tasks_that_are_all_alike_have_an_interval_too():
    mean, low, high = task_interval(np.ones(50))
    assert (mean, high) == (1.0, 1.0) and 0.90 < low < 0.95
    mean, low, high = task_interval(np.zeros(50))
    assert (mean, low) == (0.0, 0.0) and 0.05 < high < 0.10
    assert task_interval(np.full(50, -3.5)) == (-3.5, -3.5, -3.5)


@pytest.mark.parametrize(("samples", "k"), [(4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int, k: int):
    for right in range(samples + 1):
        subsets = list(itertools.combinations([True] * right + [False] * (samples - right), k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_more_than_was_sampled_is_refused():
    with pytest.raises(ValueError, match="pass@5 cannot be told from 4 samples"):
        pass_at_k(4, 2, 5)


def test_a_policy_is_rarely_found_to_differ_from_itself():
    rng, found = np.random.default_rng(2), 0
    for _ in range(400):
        chances = rng.beta(1.2, 0.8, 256)
        found += difference(play(chances, 1, rng)[None], play(chances, 1, rng)[None]).p_value < 0.05
    assert found / 400 < 0.09


@pytest.mark.parametrize(("tasks", "samples", "power"), [(256, 1, 0.27), (512, 1, 0.50), (256, 4, 0.80)])
def test_five_points_are_found_as_often_as_the_page_says(tasks: int, samples: int, power: float):
    """The figures of docs/evaluation.md, which this prints where they no longer hold."""
    rng, found, covered = np.random.default_rng(3), 0, 0
    for _ in range(400):
        chances = 0.95 * rng.beta(1.2, 0.8, tasks)
        better, other = play(chances + 0.05, samples, rng)[None], play(chances, samples, rng)[None]
        one = difference(better, other)
        found, covered = found + (one.p_value < 0.05), covered + (one.low <= 0.05 <= one.high)
    assert found / 400 == pytest.approx(power, abs=0.03) and covered / 400 > 0.91


def train(chances: np.ndarray, seeds: int, rng: np.random.Generator) -> np.ndarray:
    """Evaluations of policies that differ by seed as a whole, and on each task."""
    return np.stack(
        [play(chances + rng.normal(0, 0.03) + rng.normal(0, 0.1, len(chances)), 1, rng) for _ in range(seeds)]
    )


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_method_is_rarely_found_to_differ_from_itself(seeds: int):
    """Were seeds left out, as by a test over tasks alone, it would be found to in half of all cases."""
    rng, found, naive = np.random.default_rng(4), 0, 0
    for _ in range(400):
        chances = 0.05 + 0.8 * rng.beta(4, 3, 2048)
        first, second = train(chances, seeds, rng), train(chances, seeds, rng)
        found += difference(first, second).p_value < 0.05
        naive += difference(first.mean(0, keepdims=True), second.mean(0, keepdims=True)).p_value < 0.05
    assert found / 400 < 0.09 < 0.40 < naive / 400


def test_a_difference_is_that_of_the_means_and_changes_sign_with_the_sides():
    rng = np.random.default_rng(5)
    first, second = rng.random((3, 40)), rng.random((2, 40))
    one, other = difference(first, second), difference(second, first)
    assert one.mean == pytest.approx(first.mean() - second.mean()) and one.low < one.mean < one.high
    assert (one.mean, one.low, one.p_value) == pytest.approx((-other.mean, -other.high, other.p_value))
    assert one.improvement == pytest.approx(1 - other.improvement)
    assert (one.tasks, one.seeds) == (40, (3, 2))


def test_of_a_single_pair_it_is_the_paired_t_test():
    rng = np.random.default_rng(6)
    first, second = rng.random(50), rng.random(50)
    found, known = difference(first[None], second[None]), stats.ttest_rel(first, second)
    assert found.p_value == pytest.approx(known.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval()))


@pytest.mark.parametrize(("tasks", "p_value", "differs"), [(2, 0.5, False), (5, 1 / 16, False), (6, 1 / 32, True)])
def test_tasks_that_all_say_the_same_are_no_certainty(tasks: int, p_value: float, differs: bool):
    """Two tasks of equal policies that are right half of the time say so in one of eight cases."""
    found = difference(np.ones((1, tasks)), np.zeros((1, tasks)))
    assert (found.mean, found.high, found.p_value) == (1.0, 1.0, p_value) and (found.low > 0.0) == differs
    other = difference(np.zeros((1, tasks)), np.ones((1, tasks)))
    assert (other.low, other.high) == (-found.high, -found.low)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tasks", [2, 3, 10, 21])
def test_rounding_is_no_spread_of_the_tasks(rows: int, tasks: int):
    """Means of three samples are no exact numbers, and depend in their last digit on the order of the samples."""
    found = difference(np.ones((rows, tasks)), np.full((rows, tasks), 1 / 3))
    assert found.p_value == 2.0 ** (1 - tasks) and found.high == pytest.approx(2 / 3)
    scores = np.full((rows, tasks), np.mean([0.1, 0.2, 0.3]))
    scores[:, 0] = np.mean([0.3, 0.2, 0.1])
    same = difference(scores, np.full((rows, tasks), 0.2))
    assert (same.mean, same.low, same.high, same.p_value, same.detectable) == (0.0, 0.0, 0.0, 1.0, 0.0)
    assert task_interval(scores[0]) == pytest.approx(task_interval(np.full(tasks, 0.2)))


def test_what_would_have_been_found_is_a_shift_that_four_tests_in_five_see():
    """Of one seed, whose tasks are paired: the noncentral t, as power tables have it to a good approximation."""
    differences = np.random.default_rng(3).normal(size=(1, 30))
    found = difference(differences, np.zeros((1, 30)))
    error = differences.std(ddof=1) / np.sqrt(30)
    assert found.detectable == pytest.approx(error * (stats.t.ppf(0.975, 29) + stats.t.ppf(0.8, 29)))


def test_what_is_zero_everywhere_has_no_interval_below_it():
    found = difference(np.zeros((1, 3)), np.zeros((1, 3)))
    assert [f"{value:+.3f}" for value in (found.low, found.high)] == ["+0.000", "+0.000"]


def test_what_is_the_same_differs_by_nothing():
    same = np.random.default_rng(7).random((1, 20))
    found = difference(same, same)
    assert (found.mean, found.p_value, found.improvement) == (0.0, 1.0, 0.5)
    assert not math.isnan(found.low)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [((1, 1), (1, 1), "two or more are needed"), ((3, 9), (1, 9), "give one on each side, or two or more on each")],
)
def test_what_cannot_be_compared_is_refused(first: tuple[int, int], second: tuple[int, int], message: str):
    with pytest.raises(ValueError, match=message):
        difference(np.zeros(first), np.zeros(second))


# Newcombe (1998), Statistics in Medicine 17, table I, method 3 (score without continuity correction).
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_equals_published_intervals(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_without_observations_says_nothing():
    assert wilson(0, 0) == (0.0, 1.0)
