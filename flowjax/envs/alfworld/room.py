"""What a game is about, and what its facts say now: the true state as the expert and the outcomes see it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LIGHT, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"
TREATMENTS = {  # task type -> (what the object must become, the action, the receptacle that does it)
    "pick_clean_then_place_in_recep": ("isclean", "cleanobject", "sinkbasintype"),
    "pick_heat_then_place_in_recep": ("ishot", "heatobject", "microwavetype"),
    "pick_cool_then_place_in_recep": ("iscool", "coolobject", "fridgetype"),
}


@dataclass(frozen=True, slots=True)
class Goal:
    """The task: `object` is a class of objects, `target` one of receptacles or lamps, both as facts name them."""

    task_type: str
    object: str
    target: str

    @classmethod
    def read(cls, trajectory: Mapping[str, Any]) -> "Goal":
        """The goal of a `traj_data.json`."""
        named, task_type = trajectory["pddl_params"], trajectory["task_type"]
        target = named["toggle_target"] if task_type == LIGHT else named["parent_target"]
        return cls(task_type, f"{named['object_target']}type".lower(), f"{target}type".lower())


class Room:
    """The facts of a game that never change, by what they are asked for."""

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


class View:
    """One state: where the agent is, what it holds, what lies where, what has which property."""

    def __init__(self, room: Room, state: Iterable[tuple[str, ...]]):
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


def conditions_met(view: View, goal: Goal) -> float:
    """The share of the goal's conditions that hold, for the object that is furthest."""
    objects = view.of_kind(goal.object)
    if goal.task_type == LIGHT:
        lit = [lamp for lamp in view.of_kind(goal.target) if view.has(lamp, "istoggled")]
        holding = view.held is not None and view.room.kind.get(view.held) == goal.object
        return (holding + any(view.is_here(view.place_of[lamp]) for lamp in lit)) / 2
    placed = [thing for thing in objects if view.room.place_kind.get(view.place_of[thing]) == goal.target]
    if goal.task_type == TWO:
        most = max((view.inside(view.place_of[thing], goal.object) for thing in placed), default=0)
        return min(most, 2) / 2
    if goal.task_type not in TREATMENTS:
        return float(bool(placed))
    wanted = TREATMENTS[goal.task_type][0]
    held = [view.held] if view.held is not None and view.room.kind.get(view.held) == goal.object else []
    return max(((view.has(thing, wanted) + (thing in placed)) / 2 for thing in (*objects, *held)), default=0.0)
