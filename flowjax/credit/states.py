"""State keys for text worlds that show no state: from observations, inventories, chosen options.

A world that knows its state should use that (`flowjax.records.state_key`). `reference_compatible=True` derives keys as
the published RewardFlow code does; each function says what is wrong with them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flowjax.records import state_key

_TREATMENT = re.compile(r"You (cool|heat|clean) the ([a-z ]+ \d+) using")
_ADJECTIVES = {"cool": "cooled", "heat": "heated", "clean": "cleaned"}
_CARRIED = re.compile(r"\ba ([a-z]+ ?\d+)")
_CLICK = re.compile(r"click\[(.*)\]$")
_NOT_OPTIONS = {"back to search", "< prev", "description", "features", "reviews", "buy now"}


@dataclass(frozen=True)
class TextStep:
    """One action and what the world showed around it."""

    observation: str
    action: str
    next_observation: str
    inventory: str = ""  # before the action
    next_inventory: str = ""
    clickables: Sequence[str] | None = None  # what the next page lets one click
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of the product shown: name -> values
    terminal: bool = False


@dataclass(frozen=True)
class StepKeys:
    """Keys of the states before and after each step. The next step's `before` is this step's `after`."""

    before: Sequence[int]
    after: Sequence[int]


def alfworld_keys(steps: Sequence[TextStep], *, reference_compatible: bool = False) -> StepKeys:
    """Observation and inventory, with what has been heated, cooled or cleaned marked on the objects carried.

    The published code pairs the observation before an action with the inventory after it, so that the same state falls
    apart by the action taken in it; marks an object only in the one step after its treatment; and gives every ending
    the same key.
    """
    if reference_compatible:
        return _chain([*_alfworld_reference(steps)])
    treated: dict[str, str] = {}
    names = [_shown(steps[0].observation, steps[0].inventory, treated)] if steps else []
    for step in steps:
        _note_treatment(step.next_observation, treated)
        names.append(_shown(step.next_observation, step.next_inventory, treated))
    return _chain(names)


def webshop_keys(steps: Sequence[TextStep], *, reference_compatible: bool = False) -> StepKeys:
    """Page text and the options chosen for the product, as a map from option to value.

    Options stay chosen on the product's sub-pages and fall away with the next product. The published code needs the
    clickables of each record but never stores them; keeps the values in the order of clicks; forgets them on sub-pages;
    and looks values up by the page alone, so that a click on an option seems to lead nowhere.

    Raises:
        KeyError: `reference_compatible`, and a step has no clickables: the published code's own failure.
    """
    if reference_compatible:
        return _webshop_reference(steps)
    chosen: dict[str, str] = {}
    names = [_page(steps[0].observation, chosen)] if steps else []
    for step in steps:
        clicked = _CLICK.match(step.action)
        value = clicked.group(1) if clicked else None
        owner = next((name for name, values in step.options.items() if value in values), None)
        if owner is not None and value is not None:
            chosen[owner] = value
        elif step.action.startswith("search[") or value in ("back to search", "next >") or _leaves_product(step):
            chosen.clear()
        names.append(_page(step.next_observation, chosen))
    return _chain(names)


def search_keys(steps: Sequence[TextStep], *, reference_compatible: bool = False) -> StepKeys:
    """Question or result shown. An action that could not be parsed shows nothing and so changes nothing.

    The published code takes the empty text after such an action, and after right and wrong answers alike, for one
    state. Endings are told apart by the table, by what they earned (`terminal_key="per_outcome"`).
    """
    names = [steps[0].observation] if steps else []
    for step in steps:
        unchanged = not step.next_observation and not step.terminal and not reference_compatible
        names.append(names[-1] if unchanged else step.next_observation)
    return _chain(names)


def _chain(names: Sequence[str]) -> StepKeys:
    keys = [state_key(name) for name in names]
    return StepKeys(keys[:-1], keys[1:])


def _shown(observation: str, inventory: str, treated: Mapping[str, str]) -> str:
    def mark(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"{name} ({treated[name]})" if name in treated else name

    return f"{observation} {_CARRIED.sub(mark, inventory)}"


def _note_treatment(observation: str, treated: dict[str, str]) -> bool:
    match = _TREATMENT.search(observation)
    if match:
        treated[match.group(2)] = _ADJECTIVES[match.group(1)]
    return match is not None


def _alfworld_reference(steps: Sequence[TextStep]) -> Iterator[str]:
    treated: dict[str, str] = {}
    for step in steps:
        if _note_treatment(step.observation, treated):
            yield _shown(step.observation, step.next_inventory, treated)
        else:
            yield f"{step.observation} {step.next_inventory}"
    if steps:
        last = steps[-1]
        yield "You Won!" if last.terminal else f"{last.next_observation} {last.next_inventory}"


def _page(text: str, chosen: Mapping[str, str]) -> str:
    return f"{text} {sorted(chosen.items())}" if chosen else text


def _leaves_product(step: TextStep) -> bool:
    return not step.options


def _webshop_reference(steps: Sequence[TextStep]) -> StepKeys:
    clicked: list[str] = []
    before, after = [], []
    for step in steps:
        if step.clickables is None:
            raise KeyError("infos")
        match = _CLICK.match(step.action)
        value = match.group(1) if match else ""
        if "search" in step.clickables or "buy now" not in step.clickables:
            clicked.clear()
        elif value in step.clickables and value not in _NOT_OPTIONS and value not in clicked:
            clicked.append(value)
        suffix = f" clicked attributes: [{', '.join(clicked)}]" if clicked and not step.terminal else ""
        before.append(state_key(step.observation))
        after.append(state_key(step.next_observation + suffix))
    return StepKeys(before, after)
