"""Credit of a group as data for the page: its state graph, laid out, and a sentence on the credit of every move."""

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from flowjax.credit import ESTIMATORS, GROUP_RELATIVE
from flowjax.credit.estimators import CreditError, StateValues, get_estimator, state_values
from flowjax.credit.table import build_table
from flowjax.records import COUNTED_STATUSES
from flowjax.report.episodes import RecordedGroup

_SAME = 1e-6  # advantages, rewards and values that differ by less count as equal
_SWEEPS = 6  # passes over a graph's layers that order the states in each

# Estimators by what they compare. Of one's own it is not known.
_BY_VALUES = {"gae", "rewardflow"}  # a move with the value of its state, as it is shown
_BY_STATE = {"gigpo", "published.gigpo", "published.rewardflow"}  # a move with the others from its state
_OVER_BATCH = {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}  # all turns of the batch
# Episodes by their reward and nothing else: in a group of equal ones none is better than another.
_BY_EPISODE = {name for name in GROUP_RELATIVE - _OVER_BATCH if not name.startswith("published.")}


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
            explained = _Explained(group, shown, credit, options, _values(group, options))
            shown["graph"] = {
                **_graph(shown, explained.values),
                "note": " ".join(filter(None, [*explained.about_values(), note])),
            }
            for place, episode in enumerate(shown["episodes"]):
                for number, turn in enumerate(episode["turns"]):
                    turn["why"] = explained.why(place, number)


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
    found: dict[str, list[float]] = defaultdict(list)  # value of a state at each turn; what was earned at an ending
    for place, episode in enumerate(shown["episodes"]):
        turns = episode["turns"]
        for number, turn in enumerate(turns):
            before, _, earned = values[place][number]
            is_last = number == len(turns) - 1
            seen = (turns[number + 1]["view"], turns[number + 1]["picture"]) if not is_last else _last_seen(episode)
            source = _node(nodes, turn["state"], turn["view"], turn["picture"])
            source["start"] |= number == 0
            source["visits"] += 1
            # An ending is a state of its own: one episode may pass through the position at which another ends.
            won = bool(episode["outcome"].get("success", 0.0) >= 1.0)
            # To the state of the next turn: of several agents another one acts in the state that the move led to.
            target_id = f"{turn['next']}/{'won' if won else 'lost'}" if is_last else turns[number + 1]["state"]
            target = _node(nodes, target_id, *seen)
            if episode["status"] in COUNTED_STATUSES:
                found[turn["state"]].append(before)
                found[target_id] += [earned] if is_last else []
            if is_last:
                target["end"], target["visits"] = ("won" if won else "lost"), target["visits"] + 1
            edge = edges.setdefault((turn["state"], target_id), {"moves": [], "given": defaultdict(list)})
            edge["moves"].append([place, number])
            edge["given"][turn["action"] or "no legal action"].append(turn.get("advantage", 0.0))
    for name, node in nodes.items():
        node["value"] = _mean(found[name]) if found[name] else 0.0
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


def _node(nodes: dict[str, dict[str, Any]], name: str, view: int, picture: int) -> dict[str, Any]:
    return nodes.setdefault(name, {"view": view, "picture": picture, "visits": 0, "start": False, "end": ""})


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


@dataclass(frozen=True, slots=True)
class _Explained:
    """A group and what its credit is explained with.

    group: its transcripts.
    shown: what the page shows of them.
    credit: the policy's `config.credit`.
    options: as `value_options` gives them.
    values: value before, value after and reward of every turn, by episode.
    """

    group: RecordedGroup
    shown: Mapping[str, Any]
    credit: ConfigDict
    options: Mapping[str, Any]
    values: Sequence[Sequence[tuple[float, float, float]]]

    def about_values(self) -> Iterator[str]:
        """Sentences on the values of the graph's states."""
        if (lowest := self._lowest()) < 0:
            yield f"V is counted from {lowest:.3g}, the group's lowest reward."
        if self.credit.name in ESTIMATORS.keys() - _BY_VALUES:
            yield f"Credit by {self.credit.name} is not made of this V."

    def why(self, place: int, number: int) -> str:
        """Sentences on the credit of a turn of an episode."""
        line, turns, name = self.group.lines[place], self.shown["episodes"][place]["turns"], self.credit.name
        if line["status"] not in COUNTED_STATUSES:
            ended = f"The episode ended as {line['status']}, which is not the policy's doing"
            return f"{ended}: it counts in nothing, credit 0."
        turn = turns[number]
        if "advantage" not in turn:
            return "No credit was given to this episode."
        given, parts, episode = signed(turn["advantage"]), turn.get("advantage_parts", {}), self._of_episode(place)
        advantages = [each.get("advantage", 0.0) for each in turns]
        if not parts and max(advantages) - min(advantages) < _SAME:
            alike = f"Advantage {given}, the same for every move of the episode ({name})."
            return f"{alike} {episode[0].upper()}{episode[1:]}"
        made = f" ({name})"
        if parts:
            made = f" = {signed(parts['episode'])} for the episode and {signed(parts['step'])} for this move"
        return f"Advantage {given}{made}. The episode: {episode} This move: {self._of_step(place, number)}"

    def _lowest(self) -> float:
        """The score from which `state_values` counts: the group's lowest, where that is negative."""
        if self.options["rewards"] != "score":
            return 0.0
        lines = zip(self.group.lines, self.group.rewards, strict=True)
        return min([0.0, *(reward for line, reward in lines if line["turns"] and line["status"] in COUNTED_STATUSES)])

    def _of_episode(self, place: int) -> str:
        lines = zip(self.group.lines, self.group.rewards, strict=True)
        counted = [reward for line, reward in lines if line["status"] in COUNTED_STATUSES]
        reward, mean, scale = self.group.rewards[place], float(np.mean(counted)), self._scale()
        if max(counted) - min(counted) < _SAME:
            none_better = ", so none is better than another" if self.credit.name in _BY_EPISODE else ""
            return f"all {len(counted)} of its group earned {reward:.3g}{none_better}.{scale}"
        apart = reward - mean
        better = "as much as" if abs(apart) < _SAME else "more than" if apart > 0 else "less than"
        return f"it earned {reward:.3g}, {better} its group of {len(counted)} on average ({mean:.2f}).{scale}"

    def _scale(self) -> str:
        name = self.credit.name
        if name in _OVER_BATCH or (name == "gae" and self.credit.options.get("whitened", True)):
            return " The scale of its credit is that of the whole batch."
        return "" if name in ESTIMATORS else f" With what {name} compares it is not known here."

    def _of_step(self, place: int, number: int) -> str:
        episodes = self.shown["episodes"]
        turns = episodes[place]["turns"]
        turn, is_last = turns[number], number == len(turns) - 1
        said = "" if turn["valid"] else "the reply could not be used as an action. "
        here = [
            (i, each) for i, other in enumerate(episodes) for each in other["turns"] if each["state"] == turn["state"]
        ]
        choices = _choices(here)
        if self.credit.name not in _BY_VALUES:
            return f"{said}{self._compared(len(here))}{choices}"
        before, after, earned = self.values[place][number]
        lowest, gamma = self._lowest(), self.options["gamma"]
        if is_last:
            got, expected = f"{earned:.2f}", f"{before:.2f}"
            if lowest < 0:
                got = f"{earned + lowest:.2f}, {earned:.2f} above the group's lowest"
                expected = f"{before:.2f} above it"
            said += f"it {self._end(place)} and earned {got}, where {expected} was to be expected from here. "
            return f"{said}{choices}"
        then = earned + gamma * after
        went = "rose" if then > before + _SAME else "fell" if then < before - _SAME else "stayed the same"
        path = f"V {before:.2f} before, {after:.2f} after, discounted by {gamma:g} to {then:.2f}"
        stays = turn["state"] == turns[number + 1]["state"] and then < before
        stayed = "the state is the same, and time costs: " if stays else ""
        return f"{said}{stayed}what was to be expected {went} ({path}). {choices}"

    def _compared(self, here: int) -> str:
        name = self.credit.name
        if name not in ESTIMATORS:
            return ""
        among = "batch" if name in _OVER_BATCH else "group"
        others = f"{here} moves from the same state" if name in _BY_STATE else f"moves of the {among}"
        return f"it is compared with all {others}. "

    def _end(self, place: int) -> str:
        """End of an episode, in words that follow on its last move."""
        line = self.group.lines[place]
        if line["turns"][-1]["terminal"]:
            return "ended the episode"
        # A part of an episode has a longer name: others of its parts went on, or ended it. One that was truncated ended
        # before the limit of turns.
        is_whole = line["trajectory_id"].removeprefix(f"{line['group_id']}/").count("/") == 0
        if is_whole and line["status"] == "ok":
            return "was the last before the limit of turns"
        return "was its last turn of the episode"


def signed(value: float | np.floating) -> str:
    """An advantage in two digits; what rounds to zero has no sign, as on the page's buttons."""
    return "0.00" if abs(value) < 0.005 else f"{value:+.2f}"


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
