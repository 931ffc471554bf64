"""Statistics of evaluations: intervals over tasks, pass@k, and the difference between two sets of them.

The unit is the task: more samples of one task tell nothing about other tasks, so intervals are over tasks' means. A
trained policy is one draw of its method: a statement about the method needs several seeds of it.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

RESAMPLES = 2000
_DRAWS = 200  # of k samples of a task, for the probability of a majority
_ROUNDING = 1e-12  # relative to the largest score: differences up to this are float rounding of equal means


def task_interval(means: Float[np.ndarray, "tasks"], *, share: bool = True) -> tuple[float, float, float]:
    """Mean of the tasks' means, with its 95 % interval by a bootstrap over tasks (BCa; Efron 1987).

    Equal means have no spread to resample: in [0, 1] the interval is then Wilson's for a share of n tasks. Of equal
    counts (`share` is False), and of equal means outside [0, 1], it is the mean alone.

    Returns:
        Mean, low, high.
    """
    from scipy import stats  # takes a second: only for those who ask for an interval

    mean = float(np.mean(means))
    if len(means) < 2 or np.ptp(means) <= _ROUNDING * np.max(np.abs(means)):
        if not share or not 0.0 <= mean <= 1.0:
            return mean, mean, mean
        z = float(stats.norm.ppf(0.975))
        low, high = wilson(mean * len(means), len(means), z)
        return mean, min(low, mean), max(high, mean)
    found = stats.bootstrap(
        (np.sort(means),),  # sorted: with a fixed seed, the order of tasks would change the resamples
        _rounded_mean,
        n_resamples=RESAMPLES,
        confidence_level=0.95,
        method="BCa",
        rng=np.random.default_rng(0),
    )
    return mean, float(found.confidence_interval.low), float(found.confidence_interval.high)


def _rounded_mean(samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean to 12 digits. BCa counts how many resamples' means are below, and equal to, the mean of all tasks: float
    rounding must not make equal ones differ."""
    return np.round(np.mean(samples, axis=axis), 12)


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a share: low and high, 95 % at z = 1.96; (0, 1) when nothing was counted.

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), Wilson (1927), eq. for p = successes / n.
    """
    if n <= 0:
        return 0.0, 1.0
    share = successes / n
    scale = 1.0 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1.0 - share) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples of a task is right.

    1 - C(n - c, k) / C(n, k) with c = `right` of n = `samples` (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    Raises:
        ValueError: k is more than the samples: then there is no unbiased estimate.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be told from {samples} samples: ask for 1 to {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[str], right: Sequence[float], k: int) -> float:
    """Probability that the most frequent answer of k of a task's samples, drawn without replacement, is right.

    A sample without an answer has no vote; equally frequent answers share the probability (self-consistency, Wang et
    al. 2023, arXiv 2203.11171). Exact where there are up to 200 draws, else over so many at random.

    Args:
        answers: of each sample, "" for none.
        right: 1 or 0, of each sample.

    Raises:
        ValueError: k is more than the samples.
    """
    samples = len(answers)
    if not 1 <= k <= samples:
        raise ValueError(f"maj@{k} cannot be found from {samples} samples: ask for 1 to {samples}")
    # A share, not a flag: equal texts may be graded differently where a grade depends on more than the text.
    correct = {
        answer: float(np.mean([r for a, r in zip(answers, right, strict=True) if a == answer])) for answer in answers
    }
    if math.comb(samples, k) <= _DRAWS:
        draws = itertools.combinations(range(samples), k)
    else:
        rng = np.random.default_rng(0)
        draws = (rng.choice(samples, k, replace=False) for _ in range(_DRAWS))
    found: list[float] = []
    for draw in draws:
        votes = Counter(answers[index] for index in draw if answers[index])
        most = max(votes.values(), default=0)
        found.append(float(np.mean([correct[answer] for answer, n in votes.items() if n == most])) if votes else 0.0)
    return float(np.mean(found))


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean score of the first minus that of the second, over the tasks that both have, with its interval."""

    mean: float
    low: float
    high: float
    p_value: float  # two-sided, of the hypothesis that there is no difference
    improvement: float  # probability that the first does better on a task, ties counted half
    detectable: float  # difference that would be found with power 0.8 at a level of 5 %
    tasks: int
    seeds: tuple[int, int]


def difference(
    first: Float[np.ndarray, "seeds tasks"], second: Float[np.ndarray, "others tasks"], *, confidence: float = 0.95
) -> Difference:
    """Compare two sets of evaluations on the same tasks: paired over tasks and, with seeds on both sides, over seeds.

    With one row on each side the result holds for these two policies: only tasks vary. With two or more it holds for
    the methods that made them: the variance of a side's mean over T tasks and S seeds is that of two crossed random
    effects,

        V = s_task^2 / T + s_seed^2 / S + s_both^2 / (T S)

    estimated by mean squares (tasks' part from the paired differences), with Satterthwaite's degrees of freedom
    (Searle, Casella, McCulloch, Variance Components, ch. 4).

    Raises:
        ValueError: fewer than two tasks, or only one side has several seeds.
    """
    seeds, tasks = (len(first), len(second)), first.shape[1]
    if tasks < 2 or first.shape[1] != second.shape[1]:
        raise ValueError(f"{tasks} and {second.shape[1]} tasks: two or more are needed, the same on both sides")
    if (min(seeds) == 1) != (max(seeds) == 1):
        raise ValueError(f"{seeds[0]} and {seeds[1]} seeds: give one on each side, or two or more on each")
    paired = first.mean(axis=0) - second.mean(axis=0)
    by_task = float(np.var(paired, ddof=1)) / tasks
    variance, parts = by_task, [(by_task, tasks - 1)]
    if min(seeds) > 1:
        for side in (first, second):
            by_seed, both = _seed_variance(side)
            variance += by_seed - both  # `by_task`, from paired differences, contains the interaction already
            parts.append((by_seed, len(side) - 1))
    # Where the interaction outweighs the seeds, the sum can fall below its largest part: then it is that part.
    variance = max(variance, max(part for part, _ in parts))
    mean, better = float(paired.mean()), _improvement(first, second)
    rounding = _ROUNDING * max(float(np.max(np.abs(side))) for side in (first, second))
    if math.sqrt(variance) <= rounding:
        # Every task has the same difference: no spread for a t interval, so a sign test. T equal signs bound the
        # probability p of that sign from below by (alpha / 2)^(1 / T) (Clopper-Pearson); a task that may differ by
        # +mean or -mean then does so by (2 p - 1) mean on average. The p-value is that of T equal signs: 2 / 2^T.
        mean = mean if abs(mean) > rounding else 0.0
        kept = 2 * ((1 - confidence) / 2) ** (1 / tasks) - 1
        low, high = sorted((mean, kept * mean + 0.0))  # no -0.0
        return Difference(mean, low, high, 2.0 ** (1 - tasks) if mean else 1.0, better, 0.0, tasks, seeds)
    from scipy import stats

    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
    error = math.sqrt(variance)
    bound = float(stats.t.ppf(0.5 + confidence / 2, freedom))
    return Difference(
        mean,
        mean - bound * error,
        mean + bound * error,
        float(2 * stats.t.sf(abs(mean) / error, freedom)),
        better,
        error * float(stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom)),
        tasks,
        seeds,
    )


def _seed_variance(side: Float[np.ndarray, "seeds tasks"]) -> tuple[float, float]:
    """Variance of a side's mean from its seeds, and the part of it that is interaction of seeds and tasks.

    Sampling within a seed and task cannot be told apart from interaction, and counts as that.
    """
    seeds, tasks = side.shape
    by_seed = float(np.var(side.mean(axis=1), ddof=1)) / seeds
    rest = side - side.mean(axis=1, keepdims=True) - side.mean(axis=0, keepdims=True) + side.mean()
    return by_seed, float(np.sum(rest**2)) / ((seeds - 1) * (tasks - 1)) / (seeds * tasks)


def _improvement(first: Float[np.ndarray, "seeds tasks"], second: Float[np.ndarray, "others tasks"]) -> float:
    """P(first > second) + P(first = second) / 2 of a task and a seed of each (Agarwal et al. 2021, sec. 4.3)."""
    pairs = first[:, None, :] - second[None, :, :]
    return float(np.mean((pairs > 0) + 0.5 * (pairs == 0)))
