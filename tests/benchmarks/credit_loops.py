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
    return [(t.score - mean[t.group]) / mean[t.group] if mean[t.group] > 0 else 0.0 for t in turns]


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


def best_of_group(turns: list[Turn]) -> list[float]:
    lead: dict[int, tuple[float, float]] = {}
    for g, scores in members(turns).items():
        ordered = sorted(scores.values(), reverse=True)
        lead[g] = (ordered[0], ordered[0] - ordered[1]) if len(ordered) > 1 else (ordered[0], 0.0)
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


def discounted_return(turns: list[Turn]) -> list[float]:
    values = returns(turns, 0.95, "score")
    groups: dict[int, list[float]] = defaultdict(list)
    for turn, value in zip(turns, values, strict=True):
        groups[turn.group].append(value)
    mean = {g: statistics.fmean(found) for g, found in groups.items()}
    return [value - mean[turn.group] for turn, value in zip(turns, values, strict=True)]


def reinforce_plus_plus(turns: list[Turn]) -> list[float]:
    return whiten(returns(turns, 1.0, "score"))


def reinforce_plus_plus_baseline(turns: list[Turn]) -> list[float]:
    return whiten(dr_grpo(turns))


def gae(turns: list[Turn]) -> list[float]:
    """Without a critic and with gamma = lambda = 1, as by default."""
    return whiten(returns(turns, 1.0, "score"))


def agent_baseline(turns: list[Turn]) -> list[float]:
    return [turn.score for turn in turns]


def gigpo(turns: list[Turn]) -> list[float]:
    values = returns(turns, 0.95, "reward")
    visits: dict[int, list[float]] = defaultdict(list)
    for turn, value in zip(turns, values, strict=True):
        visits[turn.state].append(value)
    mean = {state: statistics.fmean(found) for state, found in visits.items()}
    steps = [value - mean[turn.state] for turn, value in zip(turns, values, strict=True)]
    return [episode + step for episode, step in zip(dr_grpo(turns), steps, strict=True)]


def rewardflow(turns: list[Turn], gamma: float = 0.9, sweeps: int | None = None) -> list[float]:
    """With flowjax's defaults. Goes over the edges `sweeps` times, as published, or until nothing changes."""
    credit = [0.0] * len(turns)
    by_group: dict[int, list[int]] = defaultdict(list)
    for row, turn in enumerate(turns):
        by_group[turn.group].append(row)
    for rows in by_group.values():
        values, edges = _graph(turns, rows)
        for _ in itertools.count() if sweeps is None else range(sweeps):
            fresh = dict(values)
            for source, target in edges:
                fresh[source] = max(fresh[source], gamma * values[target])
            settled, values = fresh == values, fresh
            if settled and sweeps is None:
                break
        for row in rows:
            turn = turns[row]
            credit[row] = gamma * values[_target(turns, row)] - values[turn.state]
    return [a + b for a, b in zip(grpo(turns), _compare(turns, credit), strict=True)]


def _target(turns: list[Turn], row: int) -> int | tuple[str, int]:
    return ("end", row) if turns[row].terminal else turns[row].next_state


def _graph(turns: list[Turn], rows: list[int]):
    values: dict = {}
    edges = []
    for row in rows:
        turn, target = turns[row], _target(turns, row)
        values.setdefault(turn.state, 0.0)
        values[target] = max(values.get(target, 0.0), turn.score if turn.terminal else 0.0)
        if turn.state != target and (turn.state, target) not in edges:
            edges.append((turn.state, target))
    return values, edges


def _compare(turns: list[Turn], credit: list[float]) -> list[float]:
    visits: dict[int, list[float]] = defaultdict(list)
    groups: dict[int, list[float]] = defaultdict(list)
    for turn, value in zip(turns, credit, strict=True):
        visits[turn.state].append(value)
        groups[turn.group].append(value)
    spread = {g: deviation(found) + 1e-6 for g, found in groups.items()}
    result = []
    for turn, value in zip(turns, credit, strict=True):
        companions = visits[turn.state]
        mean = statistics.fmean(companions if len(companions) > 1 else groups[turn.group])
        result.append((value - mean) / spread[turn.group])
    return result


def rewardflow_published(turns: list[Turn], gamma: float = 0.9, invalid_penalty: float = 0.0) -> list[float]:
    """What the published code computes, step by step, with its faults. Scores are episode returns."""
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
    rows: dict[int, list[float]] = defaultdict(list)
    visits: dict[int, list[float]] = defaultdict(list)
    for row, turn in enumerate(turns):
        credit[row] -= invalid_penalty * (not turn.valid)
        visits[turn.state].append(credit[row])
        rows[turn.group].append(turn.score - invalid_penalty * (not turn.valid))
    result = []
    for row, turn in enumerate(turns):
        episode = turn.score - invalid_penalty * (not turn.valid)
        if len(rows[turn.group]) > 1:
            episode -= statistics.fmean(rows[turn.group])
        result.append(episode + credit[row] - statistics.fmean(visits[turn.state]))
    return result


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
