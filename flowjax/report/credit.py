"""Credit of a group as data for the page: its state graph, laid out, and a sentence on the credit of every move."""

import inspect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from flowjax.credit.estimators import CreditError, StateValues, get_estimator, state_values
from flowjax.credit.table import build_table
from flowjax.records import COUNTED_STATUSES
from flowjax.report.episodes import RecordedGroup

_SAME = 1e-6  # advantages, rewards and values that differ by less count as equal
_SWEEPS = 6  # passes over a graph's layers that order the states in each


def explain_credit(groups: Sequence[RecordedGroup], piece: dict[str, Any], credit: ConfigDict) -> None:
    """Add to every group of a piece its graph, and to every turn the sentence on its credit.

    Args:
        groups: groups of one batch, of which the piece was made.
        piece: as `EpisodePages.piece` returns it; changed in place.
        credit: the policy's `config.credit`.
    """
    options, note = _value_options(credit)
    for group, shown in zip(groups, piece["groups"], strict=True):
        if any(line["turns"] for line in group.lines):
            values = _values(group, options)
            shown["graph"] = {**_graph(shown, values), "note": note}
            for place, episode in enumerate(shown["episodes"]):
                for number, turn in enumerate(episode["turns"]):
                    turn["why"] = _why(group, shown, values, (place, number), credit.name, options["gamma"])


def value_options(credit: ConfigDict) -> dict[str, Any]:
    """Discount and kind of rewards with which the values of states are shown: the estimator's, where it has them."""
    return _value_options(credit)[0]


def _value_options(credit: ConfigDict) -> tuple[dict[str, Any], str]:
    """The options of `value_options`, and a sentence on those that are not the estimator's, "" if all are."""
    usual = {"gamma": 0.9, "rewards": "score"}
    try:
        parameters = inspect.signature(get_estimator(credit.name)).parameters
    except CreditError as error:  # of one's own, in a module that is not here: a run's folder may be all there is
        return usual, f"V has gamma {usual['gamma']}, for its estimator cannot be read ({error})."
    defaults = {name: parameters[name].default for name in usual if name in parameters}
    given = {**defaults, **{name: value for name, value in credit.options.to_dict().items() if name in usual}}
    # An estimator of one's own may call something else by these names.
    unlike = [name for name, value in given.items() if not _fits(name, value)]
    notes = [f"V has {name} {usual[name]}, for that of {credit.name} is {given[name]!r}." for name in unlike]
    return {**usual, **{name: value for name, value in given.items() if name not in unlike}}, " ".join(notes)


def _fits(name: str, value: Any) -> bool:
    if name == "rewards":
        return value in ("score", "reward")
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _values(group: RecordedGroup, options: Mapping[str, Any]) -> list[list[tuple[float, float, float]]]:
    """Value before, value after and reward of every turn, by episode."""
    table = build_table([group.as_group()], np.array(group.rewards, np.float64))
    found: StateValues = state_values(table, **options)
    columns = np.stack([np.asarray(column) for column in (found.before, found.after, found.earned)], axis=1)
    rows, start = [], 0
    for line in group.lines:
        rows.append([(float(a), float(b), float(c)) for a, b, c in columns[start : start + len(line["turns"])]])
        start += len(line["turns"])
    return rows


# ---------------------------------------------------------------------------------------------------------- the graph


def _graph(shown: Mapping[str, Any], values: Sequence[Sequence[tuple[float, float, float]]]) -> dict[str, Any]:
    """States with their drawing, value and visits; moves with their actions, advantage and the turns that made them.

    A move joins all actions that led from one state to another, such as all steps against a wall.
    """
    nodes: dict[str, dict[str, Any]] = {}
    edges: dict[tuple[str, str], dict[str, Any]] = {}
    for place, episode in enumerate(shown["episodes"]):
        turns = episode["turns"]
        for number, turn in enumerate(turns):
            before, _, earned = values[place][number]
            is_last = number == len(turns) - 1
            seen = (turns[number + 1]["view"], turns[number + 1]["picture"]) if not is_last else _last_seen(episode)
            source = _node(nodes, turn["state"], turn["view"], turn["picture"], before)
            source["start"] |= number == 0
            source["visits"] += 1
            # An ending is a state of its own: one episode may pass through the position at which another ends.
            won = bool(episode["outcome"].get("success", 0.0) >= 1.0)
            target_id = turn["next"] if not is_last else f"{turn['next']}/{'won' if won else 'lost'}"
            target = _node(nodes, target_id, *seen, earned if is_last else 0.0)
            if is_last:
                target["end"], target["visits"] = ("won" if won else "lost"), target["visits"] + 1
            edge = edges.setdefault((turn["state"], target_id), {"moves": [], "given": defaultdict(list)})
            edge["moves"].append([place, number])
            edge["given"][turn["action"] or "no legal action"].append(turn.get("advantage", 0.0))
    _lay_out(nodes, list(edges))
    return {
        "nodes": [{"id": name, **node} for name, node in nodes.items()],
        "edges": [
            {
                "source": source,
                "target": target,
                "moves": edge["moves"],
                "actions": [
                    {"action": action, "count": len(given), "advantage": _mean(given)}
                    for action, given in sorted(edge["given"].items(), key=lambda item: -len(item[1]))
                ],
                "advantage": _mean([each for given in edge["given"].values() for each in given]),
            }
            for (source, target), edge in edges.items()
        ],
    }


def _mean(given: Sequence[float]) -> float:
    return round(float(np.mean(given)), 4)


def _last_seen(episode: Mapping[str, Any]) -> tuple[int, int]:
    return episode["view"], episode["picture"]


def _node(nodes: dict[str, dict[str, Any]], name: str, view: int, picture: int, value: float) -> dict[str, Any]:
    fresh = {"view": view, "picture": picture, "value": 0.0, "visits": 0, "start": False, "end": ""}
    node = nodes.setdefault(name, fresh)
    # A state is often met first as the target of a move, with a value of 0; it gets its own once a turn starts in it.
    node["value"] = node["value"] or round(value, 4)
    return node


def _lay_out(nodes: dict[str, dict[str, Any]], edges: Sequence[tuple[str, str]]) -> None:
    """Give every state a column, its distance from the start, and a row for which few moves cross."""
    onward, back = defaultdict(list), defaultdict(list)
    for source, target in edges:
        onward[source].append(target)
        back[target].append(source)
    queue = [name for name, node in nodes.items() if node["start"]]
    column = dict.fromkeys(queue, 0)
    for name in queue:  # breadth first: the list grows while the loop goes through it
        for target in onward[name]:
            if target not in column:
                column[target] = column[name] + 1
                queue.append(target)
    layers: dict[int, list[str]] = defaultdict(list)
    for name in nodes:
        layers[column.get(name, 0)].append(name)
    row = {name: float(place) for layer in layers.values() for place, name in enumerate(layer)}
    # Barycentre method (Sugiyama et al. 1981): order each layer by the mean row of its states' neighbours, those before
    # and those after in turn.
    for sweep in range(_SWEEPS):
        neighbours = back if sweep % 2 == 0 else onward
        for layer in layers.values():
            middle = {
                name: float(np.mean([row[each] for each in neighbours[name]])) if neighbours[name] else row[name]
                for name in layer
            }
            for place, name in enumerate(sorted(layer, key=lambda name: middle[name])):
                row[name] = float(place)
    tallest = max(len(layer) for layer in layers.values())
    for layer in layers.values():
        for name in layer:
            nodes[name]["column"] = column.get(name, 0)
            nodes[name]["row"] = row[name] + (tallest - len(layer)) / 2


# -------------------------------------------------------------------------------------------------------- in a sentence


def _why(
    group: RecordedGroup,
    shown: Mapping[str, Any],
    values: Sequence[Sequence[tuple[float, float, float]]],
    at: tuple[int, int],
    estimator: str,
    gamma: float,
) -> str:
    """Sentences on the credit of the turn `at`: index of the episode in the group, and of the turn in the episode."""
    place, number = at
    line, turn = group.lines[place], shown["episodes"][place]["turns"][number]
    if line["status"] not in COUNTED_STATUSES:
        return (
            f"The episode ended as {line['status']}, which is not the policy's doing: it counts in nothing, credit 0."
        )
    if "advantage" not in turn:
        return "No credit was given to this episode."
    given, parts = signed(turn["advantage"]), turn.get("advantage_parts", {})
    episode = _of_episode(group, place)
    advantages = [each.get("advantage", 0.0) for each in shown["episodes"][place]["turns"]]
    if parts:
        step = _of_step(shown, values, at, gamma, has_values="rewardflow" in estimator)
        both = f"{signed(parts['episode'])} for the episode and {signed(parts['step'])} for this move"
        return f"Advantage {given} = {both}. The episode: {episode} This move: {step}"
    if max(advantages) - min(advantages) < _SAME:
        alike = f"Advantage {given}, the same for every move of the episode ({estimator})."
        return f"{alike} {episode[0].upper()}{episode[1:]}"
    step = _of_step(shown, values, at, gamma, has_values=True)
    return f"Advantage {given} ({estimator}). The episode: {episode} This move: {step}"


def signed(value: float | np.floating) -> str:
    """An advantage in two digits; what rounds to zero has no sign, as on the page's buttons."""
    return "0.00" if abs(value) < 0.005 else f"{value:+.2f}"


def _of_episode(group: RecordedGroup, place: int) -> str:
    counted = [
        reward for line, reward in zip(group.lines, group.rewards, strict=True) if line["status"] in COUNTED_STATUSES
    ]
    reward, mean = group.rewards[place], float(np.mean(counted))
    if max(counted) - min(counted) < _SAME:
        return f"all {len(counted)} of its group earned {reward:.3g}, so none is better than another."
    apart = reward - mean
    better = "as much as" if abs(apart) < _SAME else "more than" if apart > 0 else "less than"
    return f"it earned {reward:.3g}, {better} its group of {len(counted)} on average ({mean:.2f})."


def _of_step(
    shown: Mapping[str, Any],
    values: Sequence[Sequence[tuple[float, float, float]]],
    at: tuple[int, int],
    gamma: float,
    *,
    has_values: bool,
) -> str:
    place, number = at
    episode = shown["episodes"][place]
    turn, is_last = episode["turns"][number], number == len(episode["turns"]) - 1
    before, after, earned = values[place][number]
    said = "" if turn["valid"] else "the reply could not be used as an action. "
    here = [
        (i, each)
        for i, other in enumerate(shown["episodes"])
        for each in other["turns"]
        if each["state"] == turn["state"]
    ]
    if not has_values:
        return f"{said}it is compared with all {len(here)} moves from the same state. {_choices(here)}"
    if is_last:
        end = "ended the episode" if turn["terminal"] else "was the last before the limit of turns"
        return (
            f"{said}it {end} and earned {earned:.2f}, where {before:.2f} was to be expected from here. {_choices(here)}"
        )
    then = earned + gamma * after
    went = "rose" if then > before + _SAME else "fell" if then < before - _SAME else "stayed the same"
    path = f"V {before:.2f} before, {after:.2f} after, discounted by {gamma:g} to {then:.2f}"
    stayed = "the state is the same, and time costs: " if turn["state"] == turn["next"] and then < before else ""
    return f"{said}{stayed}what was to be expected {went} ({path}). {_choices(here)}"


def _choices(here: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    """Sentence on the actions that were tried from a state, with their mean advantages."""
    passed = len({place for place, _ in here})
    by_action: dict[str, list[float]] = defaultdict(list)
    for _, turn in here:
        by_action[turn["action"] or "no legal action"].append(turn.get("advantage", 0.0))
    if len(here) == 1:
        return "Nobody else of the group was in this state."
    ranked = sorted(by_action.items(), key=lambda item: -float(np.mean(item[1])))
    tried = ", ".join(f"{_short(action)} {signed(np.mean(given))} (×{len(given)})" for action, given in ranked[:4])
    were = "1 episode of the group was" if passed == 1 else f"{passed} episodes of the group were"
    return f"{were} in this state; on average {tried}."


def _short(action: str) -> str:
    text = " ".join(action.split())
    return text if len(text) <= 40 else f"{text[:40]}…"


def interest(group: RecordedGroup, graph: Mapping[str, Any] | None) -> tuple[float, int]:
    """Key by which the page picks the first group to show, the larger the better: how evenly its episodes won and lost,
    then in how many states they went different ways."""
    ways = Counter(edge["source"] for edge in graph["edges"]) if graph else Counter()
    return group.evenness, sum(count > 1 for count in ways.values())
