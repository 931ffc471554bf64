"""Every estimator written out as plain Python loops over turns: what the jitted ones are timed and checked against."""

import itertools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass


@dataclass
class Turn:
    group: int
    trajectory: int
    step: int
    state: int
    next_state: int
    reward: float
    score: float
    terminal: bool
    valid: bool = True


def members(turns: list[Turn]) -> dict[int, dict[int, float]]:
    """Score of each trajectory of each group."""
    groups: dict[int, dict[int, float]] = defaultdict(dict)
    for turn in turns:
        groups[turn.group][turn.trajectory] = turn.score
    return groups


def paths(turns: list[Turn]) -> list[list[int]]:
    """Row numbers of each trajectory, in the order of their steps."""
    rows: dict[int, list[int]] = defaultdict(list)
    for row, turn in enumerate(turns):
        rows[turn.trajectory].append(row)
    return [sorted(found, key=lambda row: turns[row].step) for found in rows.values()]


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def whiten(values: list[float]) -> list[float]:
    mean, spread = statistics.fmean(values), math.sqrt(statistics.variance(values) + 1e-8)
    return [(value - mean) / spread for value in values]


def grpo(turns: list[Turn]) -> list[float]:
    groups = {g: list(scores.values()) for g, scores in members(turns).items()}
    centre = {g: (statistics.fmean(scores), deviation(scores) + 1e-6) for g, scores in groups.items()}
    return [(turn.score - centre[turn.group][0]) / centre[turn.group][1] for turn in turns]


def dr_grpo(turns: list[Turn]) -> list[float]:
    mean = {g: statistics.fmean(scores.values()) for g, scores in members(turns).items()}
    return [turn.score - mean[turn.group] for turn in turns]


def rloo(turns: list[Turn]) -> list[float]:
    groups = members(turns)
    result = []
    for turn in turns:
        others = [score for trajectory, score in groups[turn.group].items() if trajectory != turn.trajectory]
        result.append(turn.score - statistics.fmean(others) if others else 0.0)
    return result


def maxrl(turns: list[Turn]) -> list[float]:
    mean = {g: statistics.fmean(scores.values()) for g, scores in members(turns).items()}
    rate = {g: mean[g] - min(0.0, *scores.values()) for g, scores in members(turns).items()}
    return [(t.score - mean[t.group]) / rate[t.group] if rate[t.group] > 0 else 0.0 for t in turns]


def pass_at_k(turns: list[Turn], k: int = 4) -> list[float]:
    """From the definition: all subsets of k members."""
    advantage: dict[int, float] = {}
    for scores in members(turns).values():
        names = list(scores)
        subsets = list(itertools.combinations(names, min(k, len(names))))
        rewards = [max(float(scores[name] > 0.5) for name in subset) for subset in subsets]
        mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
        for name in names:
            own = [(r - mean) / spread for s, r in zip(subsets, rewards, strict=True) if name in s] if spread else [0.0]
            advantage[name] = statistics.fmean(own)
    return [advantage[turn.trajectory] for turn in turns]


def best_of_group(turns: list[Turn], norm: str = "mean") -> list[float]:
    lead: dict[int, tuple[float, float]] = {}
    for g, scores in members(turns).items():
        ordered = sorted(scores.values(), reverse=True)
        scale = deviation(ordered) + 1e-6 if norm == "mean_std" else 1.0
        lead[g] = (ordered[0], (ordered[0] - ordered[1]) / scale) if len(ordered) > 1 else (ordered[0], 0.0)
    return [lead[turn.group][1] if turn.score == lead[turn.group][0] else 0.0 for turn in turns]


def returns(turns: list[Turn], gamma: float, rewards: str) -> list[float]:
    result = [0.0] * len(turns)
    for path in paths(turns):
        later = 0.0
        for row in reversed(path):
            last = row == path[-1]
            earned = turns[row].reward if rewards == "reward" else turns[row].score * last
            later = result[row] = earned + gamma * later
    return result


def discounted_return(turns: list[Turn], rewards: str = "score") -> list[float]:
    values = returns(turns, 0.95, rewards)
    groups: dict[int, list[float]] = defaultdict(list)
    for turn, value in zip(turns, values, strict=True):
        groups[turn.group].append(value)
    mean = {g: statistics.fmean(found) for g, found in groups.items()}
    return [value - mean[turn.group] for turn, value in zip(turns, values, strict=True)]


def reinforce_plus_plus(turns: list[Turn], gamma: float = 1.0, rewards: str = "score") -> list[float]:
    return whiten(returns(turns, gamma, rewards))


def reinforce_plus_plus_baseline(turns: list[Turn]) -> list[float]:
    return whiten(dr_grpo(turns))


def gigpo(turns: list[Turn], rewards: str = "reward", norm: str = "mean", invalid_penalty: float = 0.0) -> list[float]:
    values = returns(turns, 0.95, rewards)
    values = [value - invalid_penalty * (not turn.valid) for turn, value in zip(turns, values, strict=True)]
    visits: dict[tuple[int, int], list[float]] = defaultdict(list)
    for turn, value in zip(turns, values, strict=True):
        visits[turn.group, turn.state].append(value)
    steps = []
    for turn, value in zip(turns, values, strict=True):
        found = visits[turn.group, turn.state]
        scale = deviation(found) + 1e-6 if norm == "mean_std" else 1.0
        steps.append((value - statistics.fmean(found)) / scale)
    episodes = grpo(turns) if norm == "mean_std" else dr_grpo(turns)
    return [episode + step for episode, step in zip(episodes, steps, strict=True)]


def temporal_differences(
    turns: list[Turn], gamma: float, rewards: str = "score"
) -> tuple[list[float], dict[tuple[int, int], float]]:
    """r + gamma V(s') - V(s) of each turn, and V of each group's states: swept over until nothing changes."""
    lowest: dict[int, float] = defaultdict(float)
    visits: dict[tuple[int, int], list[int]] = defaultdict(list)
    following: dict[int, int | None] = {}
    for row, turn in enumerate(turns):
        lowest[turn.group] = min(lowest[turn.group], turn.score)
        visits[turn.group, turn.state].append(row)
    for path in paths(turns):
        following |= dict(zip(path, [*path[1:], None], strict=True))
    values = dict.fromkeys(visits, 0.0)

    def ahead(row: int) -> float:
        after = following[row]
        earned = turns[row].reward if rewards == "reward" else 0.0
        if after is None:
            return earned if rewards == "reward" else turns[row].score - lowest[turns[row].group]
        return earned + gamma * values[turns[after].group, turns[after].state]

    while True:
        fresh = {state: statistics.fmean(ahead(row) for row in rows) for state, rows in visits.items()}
        settled = max(abs(fresh[state] - values[state]) for state in values) < 1e-9
        values = fresh
        if settled:
            return [ahead(row) - values[turn.group, turn.state] for row, turn in enumerate(turns)], values


def rewardflow(turns: list[Turn], rewards: str = "score", invalid_penalty: float = 0.0) -> list[float]:
    credit, values = temporal_differences(turns, 0.9, rewards)
    credit = [value - invalid_penalty * (not turn.valid) for turn, value in zip(turns, credit, strict=True)]
    groups: dict[int, list[float]] = defaultdict(list)
    for turn, value in zip(turns, credit, strict=True):
        groups[turn.group].append(value)
    highest = {g: max(value for (group, _), value in values.items() if group == g) for g in groups}
    spread = {g: deviation(found) + 1e-4 * highest[g] for g, found in groups.items()}
    steps = [c / spread[t.group] if spread[t.group] else 0.0 for t, c in zip(turns, credit, strict=True)]
    return [episode + step for episode, step in zip(grpo(turns), steps, strict=True)]


def gae(turns: list[Turn], rewards: str = "score") -> list[float]:
    credit, _ = temporal_differences(turns, 0.95, rewards)
    result = [0.0] * len(turns)
    for path in paths(turns):
        later = 0.0
        for row in reversed(path):
            later = result[row] = credit[row] + 0.95 * 0.9 * later
    return whiten(result)


def grpo_published(turns: list[Turn], invalid_penalty: float = 0.1, norm: str = "mean_std") -> list[float]:
    """Statistics over turns; a group of one turn has mean 0 and deviation 1."""
    earned = {turns[path[0]].trajectory: sum(turns[row].reward for row in path) for path in paths(turns)}
    scores = [earned[turn.trajectory] - invalid_penalty * (not turn.valid) for turn in turns]
    groups: dict[int, list[float]] = defaultdict(list)
    for turn, score in zip(turns, scores, strict=True):
        groups[turn.group].append(score)
    centre = {g: (statistics.fmean(x), deviation(x)) if len(x) > 1 else (0.0, 1.0) for g, x in groups.items()}
    scale = {g: spread + 1e-6 if norm == "mean_std" else 1.0 for g, (_, spread) in centre.items()}
    return [(score - centre[t.group][0]) / scale[t.group] for t, score in zip(turns, scores, strict=True)]


def rloo_published(turns: list[Turn], invalid_penalty: float = 0.1) -> list[float]:
    """The mean of all other turns of the group, those of the same episode among them."""
    earned = {turns[path[0]].trajectory: sum(turns[row].reward for row in path) for path in paths(turns)}
    scores = [earned[turn.trajectory] - invalid_penalty * (not turn.valid) for turn in turns]
    result = []
    for row, turn in enumerate(turns):
        others = [scores[other] for other, each in enumerate(turns) if each.group == turn.group and other != row]
        result.append(scores[row] - (statistics.fmean(others) if others else 0.0))
    return result


def gigpo_published(turns: list[Turn], gamma: float = 0.95, invalid_penalty: float = 0.1) -> list[float]:
    values = returns(turns, gamma, "reward")
    values = [value - invalid_penalty * (not turn.valid) for turn, value in zip(turns, values, strict=True)]
    visits: dict[int, list[float]] = defaultdict(list)
    for turn, value in zip(turns, values, strict=True):
        visits[turn.state].append(value)
    steps = [value - statistics.fmean(visits[turn.state]) for turn, value in zip(turns, values, strict=True)]
    episodes = grpo_published(turns, invalid_penalty, "mean")
    return [episode + step for episode, step in zip(episodes, steps, strict=True)]


def rewardflow_published(turns: list[Turn], gamma: float = 0.9, invalid_penalty: float = 0.1) -> list[float]:
    """The published computation, step by step, with its faults."""
    found = paths(turns)
    iterations = max(len(path) for path in found)
    by_group: dict[int, list[list[int]]] = defaultdict(list)
    for path in found:
        by_group[turns[path[0]].group].append(path)
    credit = [0.0] * len(turns)
    for group in by_group.values():
        values = _published_values(turns, group, iterations, gamma)
        for path in group:
            for step, row in enumerate(path):
                turn = turns[row]
                credit[row] = values.get(turn.next_state, 0.0) - values.get(turn.state, 0.0)
                if step == iterations - 1:
                    credit[row] = turn.reward
    visits: dict[int, list[float]] = defaultdict(list)
    for row, turn in enumerate(turns):
        credit[row] -= invalid_penalty * (not turn.valid)
        visits[turn.state].append(credit[row])
    steps = [credit[row] - statistics.fmean(visits[turn.state]) for row, turn in enumerate(turns)]
    episodes = grpo_published(turns, invalid_penalty, "mean")
    return [episode + step for episode, step in zip(episodes, steps, strict=True)]


def _published_values(turns: list[Turn], group: list[list[int]], iterations: int, gamma: float) -> dict[int, float]:
    edges: list[tuple[int, int]] = []
    values: dict[int, float] = {}
    for path in group:
        arrived = 0.0
        for step, row in enumerate(path):
            turn = turns[row]
            if step < iterations - 1 and turn.state != turn.next_state:
                values.setdefault(turn.state, arrived)
                values.setdefault(turn.next_state, turn.reward)
                edges.append((turn.state, turn.next_state))
            arrived = turn.reward
    for _ in range(1000):
        fresh = dict(values)
        for source, target in edges:
            fresh[source] = max(fresh[source], gamma * values[target])
        if fresh == values:
            break
        values = fresh
    return values


LOOPS = {
    "best_of_group": best_of_group,
    "discounted_return": discounted_return,
    "dr_grpo": dr_grpo,
    "gae": gae,
    "gigpo": gigpo,
    "grpo": grpo,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
    "published.gigpo": gigpo_published,
    "published.grpo": grpo_published,
    "published.rewardflow": rewardflow_published,
    "published.rloo": rloo_published,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "rewardflow": rewardflow,
    "rloo": rloo,
}
