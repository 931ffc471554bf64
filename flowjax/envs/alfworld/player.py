"""The true state of a game, its goal, and a player that sees both.

The player needs no search: it fetches, treats and puts away the objects that the goal names.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowjax.envs.alfworld.engine import Command

LIGHT, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"
TREATMENTS = {  # task type -> (what the object must become, the action, the receptacle that does it)
    "pick_clean_then_place_in_recep": ("isclean", "cleanobject", "sinkbasintype"),
    "pick_heat_then_place_in_recep": ("ishot", "heatobject", "microwavetype"),
    "pick_cool_then_place_in_recep": ("iscool", "coolobject", "fridgetype"),
}


@dataclass(frozen=True, slots=True)
class GameGoal:
    """The task: `object` is a class of objects, `target` a class of receptacles or lamps, both as facts name them."""

    task_type: str
    object: str
    target: str

    @classmethod
    def read(cls, trajectory: Mapping[str, Any]) -> "GameGoal":
        """The goal of a `traj_data.json`."""
        named, task_type = trajectory["pddl_params"], trajectory["task_type"]
        target = named["toggle_target"] if task_type == LIGHT else named["parent_target"]
        return cls(task_type, f"{named['object_target']}type".lower(), f"{target}type".lower())


class StaticFacts:
    """The facts of a game that never change, indexed by the questions that a player asks."""

    def __init__(self, facts: Iterable[tuple[str, ...]]):
        pairs: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self.openable: set[str] = set()
        self.fits: set[tuple[str, str]] = set()  # (class of receptacle, class of object)
        for name, *arguments in facts:
            if name in ("receptacleatlocation", "receptacletype", "objecttype"):
                pairs[name][arguments[0]] = arguments[1]
            elif name == "cancontain":
                self.fits.add((arguments[0], arguments[1]))
            elif name == "openable":
                self.openable.add(arguments[0])
        self.location = pairs["receptacleatlocation"]
        self.place_kind = {place: kind for place, kind in pairs["receptacletype"].items() if place in self.location}
        self.kind = pairs["objecttype"]


class TrueState:
    """One state: the agent's place, the thing it holds, the place of each thing, and the properties of things."""

    def __init__(self, room: StaticFacts, state: Iterable[tuple[str, ...]]):
        self.room = room
        self.here = ""
        self.held: str | None = None
        self.place_of: dict[str, str] = {}
        self._has: defaultdict[str, set[str]] = defaultdict(set)
        for name, *arguments in state:
            if name == "atlocation":
                self.here = arguments[1]
            elif name == "holds":
                self.held = arguments[1]
            elif name == "inreceptacle":
                self.place_of[arguments[0]] = arguments[1]
            else:
                self._has[name].add(arguments[0])

    def has(self, thing: str, property_name: str) -> bool:
        return thing in self._has[property_name]

    def closed(self, place: str) -> bool:
        return place in self.room.openable and not self.has(place, "opened")

    def is_here(self, place: str) -> bool:
        return self.room.location.get(place) == self.here

    def of_kind(self, kind: str) -> list[str]:
        """Objects of a class that lie somewhere, by name."""
        return sorted(thing for thing in self.place_of if self.room.kind.get(thing) == kind)

    def inside(self, place: str, kind: str) -> int:
        return sum(self.place_of[thing] == place for thing in self.of_kind(kind))

    def places(self, kind: str, holding: str) -> list[str]:
        """Receptacles of a class that objects of the class `holding` may be put on, by name."""
        if (kind, holding) not in self.room.fits:
            return []
        return sorted(place for place, its_kind in self.room.place_kind.items() if its_kind == kind)


def conditions_met(state: TrueState, goal: GameGoal) -> float:
    """The share of the goal's conditions that hold, for the object that fulfils most of them."""
    objects = state.of_kind(goal.object)
    if goal.task_type == LIGHT:
        lit = [lamp for lamp in state.of_kind(goal.target) if state.has(lamp, "istoggled")]
        holding = state.held is not None and state.room.kind.get(state.held) == goal.object
        return (holding + any(state.is_here(state.place_of[lamp]) for lamp in lit)) / 2
    placed = [thing for thing in objects if state.room.place_kind.get(state.place_of[thing]) == goal.target]
    if goal.task_type == TWO:
        most = max((state.inside(state.place_of[thing], goal.object) for thing in placed), default=0)
        return min(most, 2) / 2
    if goal.task_type not in TREATMENTS:
        return float(bool(placed))
    wanted = TREATMENTS[goal.task_type][0]
    held = [state.held] if state.held is not None and state.room.kind.get(state.held) == goal.object else []
    return max(((state.has(thing, wanted) + (thing in placed)) / 2 for thing in (*objects, *held)), default=0.0)


class ScriptedPlayer:
    """The next command in one state. `commands` are those that can be given now, by their text."""

    def __init__(
        self, room: StaticFacts, state: Iterable[tuple[str, ...]], commands: Mapping[str, "Command"], goal: GameGoal
    ):
        self._state, self._commands, self._goal = TrueState(room, state), commands, goal

    def choose(self) -> str:
        """A command that brings the goal nearer; where there is none, one that changes nothing."""
        chosen = self._light() if self._goal.task_type == LIGHT else self._place()
        return chosen or self._give("look") or min(self._commands)

    def _light(self) -> str | None:
        if not self._holds_wanted():
            return self._fetch(self._state.of_kind(self._goal.object))
        lamps = self._state.of_kind(self._goal.target)
        if not lamps:
            return None
        lamp = min(lamps, key=lambda lamp: (not self._state.has(lamp, "istoggled"), lamp))
        return self._go(self._state.place_of[lamp]) or self._give("toggleobject", lamp)

    def _place(self) -> str | None:
        state, goal = self._state, self._goal
        wanted, action, tool_kind = TREATMENTS.get(goal.task_type, ("", "", ""))
        targets = state.places(goal.target, goal.object)
        if not targets:
            return None
        if self._holds_wanted():
            if wanted and not state.has(str(state.held), wanted):
                tools = sorted(place for place, kind in state.room.place_kind.items() if kind == tool_kind)
                return self._treat(action, tools)
            return self._put(self._target(targets))
        things = state.of_kind(goal.object)
        if goal.task_type == TWO:
            target = self._target(targets)
            things = [thing for thing in things if state.place_of[thing] != target]
        return self._fetch(sorted(things, key=lambda thing: not state.has(thing, wanted)), in_order=bool(wanted))

    def _target(self, targets: list[str]) -> str:
        """The receptacle to fill: for two objects the one that already holds most, else the nearest open one."""
        state = self._state
        if self._goal.task_type == TWO:
            kind = self._goal.object
            return min(targets, key=lambda place: (-state.inside(place, kind), state.closed(place), place))
        return min(targets, key=lambda place: (state.closed(place), not state.is_here(place), place))

    def _holds_wanted(self) -> bool:
        held = self._state.held
        return held is not None and self._state.room.kind.get(held) == self._goal.object

    def _treat(self, action: str, tools: list[str]) -> str | None:
        for tool in sorted(tools, key=lambda tool: (not self._state.is_here(tool), tool)):
            return self._go(tool) or self._give(action, str(self._state.held), tool)
        return None

    def _fetch(self, things: list[str], *, in_order: bool = False) -> str | None:
        """Towards holding one of `things`: the first if they are `in_order`, else the one that is easiest to get at."""
        state = self._state
        if state.held is not None:
            return self._drop()
        if not things:
            return None
        effort = {
            thing: (state.closed(state.place_of[thing]), not state.is_here(state.place_of[thing])) for thing in things
        }
        thing = things[0] if in_order else min(things, key=lambda thing: (*effort[thing], thing))
        place = state.place_of[thing]
        return self._go(place) or self._open(place) or self._give("pickupobject", thing, place)

    def _drop(self) -> str | None:
        """Put down a held thing that is not wanted, in any place that takes it."""
        state = self._state
        kind = state.room.kind.get(str(state.held), "")
        places = [place for place, its_kind in state.room.place_kind.items() if (its_kind, kind) in state.room.fits]
        if not places:
            return None
        return self._put(min(places, key=lambda place: (state.closed(place), not state.is_here(place), place)))

    def _put(self, place: str) -> str | None:
        return self._go(place) or self._open(place) or self._give("putobject", str(self._state.held), place)

    def _go(self, place: str) -> str | None:
        return None if self._state.is_here(place) else self._give("gotolocation", place)

    def _open(self, place: str) -> str | None:
        return self._give("openobject", place) if self._state.closed(place) else None

    def _give(self, action: str, *things: str) -> str | None:
        """The text of the command that does `action` to `things`."""
        for text, command in self._commands.items():
            if command.action == action and all(thing in command.arguments for thing in things):
                return text
        return None
