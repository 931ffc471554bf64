"""Generated games on alfworld's floor plans: we draw which objects there are, and where; the rest is as in real games.

Drawn, too, are the places of the few receptacles that a floor plan gives no position for.
"""

import functools
import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from flowjax.envs import NotReady, WorldError

# ----------------------------------------------------------------------------------- packages of the extra, floor plans

# Packages are imported when they are first needed. textworld's PDDL engine uses a planner under the GPL, so no module
# outside this folder may import it.

DATA_VARIABLE = "ALFWORLD_DATA"
GRID_M = 0.25  # metres per step of the agent
LAMPS = ("DeskLamp", "FloorLamp")
LAMP_STANDS = {  # classes of receptacles that lamps stand on: alfworld's tables of what holds what have no lamps
    "DeskLamp": ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable", "DiningTable"),
    "FloorLamp": ("SideTable", "ArmChair", "Sofa", "CoffeeTable", "Desk", "Dresser"),
}
BURNERS = 4  # of a stove; other receptacles without a given position occur once
STANDING = ("CoffeeMachine", "GarbageCan", "HandTowelHolder", "LaundryHamper", "Ottoman", "StoveBurner", "Toaster")
STANDING += ("Toilet", "ToiletPaperHanger", "TowelHolder")


@functools.cache
def package(name: str) -> ModuleType:
    """A module of alfworld, or one that imports it or textworld.

    On import, alfworld sets ALFWORLD_DATA and makes that folder. Where the user has not set the variable, it names the
    system's temporary folder during the import, and is unset again afterwards.

    Raises:
        NotReady: it is not installed.
    """
    named = os.environ.get(DATA_VARIABLE)
    if named is None:
        os.environ[DATA_VARIABLE] = tempfile.gettempdir()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotReady(
            f'ALFWorld needs packages that are not installed ({error}): pip install -e ".[alfworld]"'
        ) from error
    finally:
        if named is None:
            del os.environ[DATA_VARIABLE]


def constants() -> ModuleType:
    """alfworld's tables: object classes, which receptacles hold which objects, which scenes are for training."""
    return package("alfworld.gen.constants")


def goal_library() -> ModuleType:
    """alfworld's goals as PDDL, and the sentences that state them."""
    return package("alfworld.gen.goal_library")


def folder() -> Path:
    """The folder of alfworld's package, with its domain, its grammar and its floor plans."""
    return Path(str(package("alfworld").__file__)).parent


@dataclass(frozen=True, slots=True)
class Place:
    """A fixed receptacle. `identity` is alfworld's: class and position in metres; `location` is the viewpoint from
    which the agent uses it."""

    kind: str
    identity: str
    location: str

    @property
    def position(self) -> tuple[float, float, float]:
        x, y, z = self.identity.split("|")[1:4]
        return float(x), float(y), float(z)


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """A room. `classes` are the movable objects seen in it, its lamps included; `middle` are free locations."""

    scene: int
    room: str
    places: tuple[Place, ...]
    classes: tuple[str, ...]
    middle: tuple[str, ...]

    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({place.kind for place in self.places}))


def location(x: float, z: float, rotation: int, horizon: int) -> str:
    """alfworld's name of a viewpoint: metres to steps, degrees of rotation to quarter turns."""
    return f"loc|{round(x / GRID_M)}|{round(z / GRID_M)}|{rotation // 90}|{horizon}"


def number(metres: float) -> str:
    """A coordinate as in identities: sign, two digits, two decimals."""
    return f"{metres:+06.2f}"


@functools.cache
def scenes(split: str) -> tuple[int, ...]:
    """Floor plans of ALFRED's "train" and "held_out" (its unseen validation) scenes."""
    table = constants()
    return tuple(sorted(table.TRAIN_SCENE_NUMBERS if split == "train" else table.TEST_SCENE_NUMBERS))


@functools.cache
def floor_plan(scene: int) -> FloorPlan:
    """The floor plan of a scene number.

    Receptacles without a given position (a garbage can, the burners of a stove) stand at a reachable point that
    depends on the scene alone.

    Raises:
        WorldError: there is no such scene.
    """
    table = constants()
    layouts = folder() / "gen" / "layouts"
    room = next((room for room, numbers in table.SCENE_TYPE.items() if scene in numbers), None)
    if room is None:
        known = ", ".join(f"{numbers[0]}-{numbers[-1]} ({room})" for room, numbers in table.SCENE_TYPE.items())
        raise WorldError(f"env.options scenes names {scene}, which is no floor plan: they are {known}")
    seen = set(json.loads((layouts / f"FloorPlan{scene}-objects.json").read_text()))
    given = json.loads((layouts / f"FloorPlan{scene}-openable.json").read_text())
    points = np.load(layouts / f"FloorPlan{scene}-layout.npy")
    places = [
        Place(_kind(name), name, location(x, z, rotation, horizon)) for name, (x, z, rotation, horizon) in given.items()
    ]
    rng = np.random.default_rng([scene, 120])
    have = {place.kind for place in places}
    for kind in STANDING:
        if kind in seen and kind not in have:
            for _ in range(BURNERS if kind == "StoveBurner" else 1):
                x, z = points[rng.integers(len(points))].tolist()
                height = number(float(rng.integers(100)) / 100)  # keeps burners at one point distinct
                identity = f"{kind}|{number(x)}|{height}|{number(z)}"
                places.append(Place(kind, identity, location(x, z, int(rng.integers(4)) * 90, 30)))
    movable = {name for holds in table.VAL_RECEPTACLE_OBJECTS.values() for name in holds}
    fixed = set(table.RECEPTACLES) - table.MOVABLE_RECEPTACLES_SET
    classes = sorted(name for name in seen if (name in movable and name not in fixed) or name in LAMPS)
    used = {place.location for place in places}
    middle = sorted({location(x, z, 90 * turn, 30) for x, z in points.tolist() for turn in range(4)} - used)
    places.sort(key=lambda place: place.identity)
    return FloorPlan(scene, room, tuple(places), tuple(classes), tuple(middle))


def _kind(identity: str) -> str:
    """The class of a receptacle: the first part of its identity, or a fifth one, as a sink's basin has."""
    parts = identity.split("|")
    return parts[4] if len(parts) > 4 else parts[0]


# ---------------------------------------------------------------------------------------------------------------- games

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
TOOLS = {  # task type -> (receptacle that does it, alfworld's table of suitable objects)
    "pick_clean_then_place_in_recep": ("SinkBasin", "Cleanable"),
    "pick_heat_then_place_in_recep": ("Microwave", "Heatable"),
    "pick_cool_then_place_in_recep": ("Fridge", "Coolable"),
}
MAX_COPIES = 3  # of one class of objects in a room
MANGLE = (("-", "_minus_"), ("|", "_bar_"), ("+", "_plus_"), (".", "_dot_"), (",", "_comma_"))


@dataclass(frozen=True, slots=True)
class Spec:
    """A game as a few parameters. `target` is the class of the receptacle to fill, or of the lamp; `seed` places the
    objects. `clutter` is the share of the room's other object classes that are in the game.
    """

    scene: int
    task_type: str
    object: str
    target: str
    seed: int
    clutter: float = 0.5

    @classmethod
    def read(cls, payload: Mapping[str, Any]) -> "Spec":
        return cls(**{name: payload[name] for name in cls.__dataclass_fields__})

    def payload(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def folder(self) -> str:
        """The name of the task's folder in the real layout."""
        return f"{self.task_type}-{self.object}-None-{self.target}-{self.scene}"


@dataclass(frozen=True, slots=True)
class Thing:
    """A movable object, or a lamp, and the place where it lies at the start."""

    kind: str
    identity: str
    place: Place


def holds(place_kind: str, object_kind: str) -> bool:
    """True where alfworld allows an object of this class on a receptacle of that class."""
    return object_kind in constants().VAL_RECEPTACLE_OBJECTS.get(place_kind, ())


@functools.cache
def choices(scene: int, task_type: str) -> tuple[tuple[str, str], ...]:
    """Every (object, target) that a task of this type can have in a scene."""
    plan, table = floor_plan(scene), constants()
    if plan.room not in table.GOALS_VALID[task_type]:
        return ()
    kinds = plan.kinds()
    objects = [kind for kind in plan.classes if kind not in LAMPS]
    if task_type == "look_at_obj_in_light":
        lamps = [lamp for lamp in LAMPS if lamp in plan.classes and any(kind in kinds for kind in LAMP_STANDS[lamp])]
        return tuple((kind, lamp) for kind in objects for lamp in lamps if any(holds(place, kind) for place in kinds))
    tool, suitable = TOOLS.get(task_type, ("", ""))
    if tool:
        if tool not in kinds:
            return ()
        objects = [kind for kind in objects if kind in table.VAL_ACTION_OBJECTS[suitable]]
    pairs = []
    # More than one spot: `furnish` puts the goal's objects anywhere but into the goal's receptacle.
    for kind in objects:
        spots = [place for place in kinds if holds(place, kind)]
        pairs += [(kind, target) for target in spots if target != tool and len(spots) > 1]
    return tuple(pairs)


def furnish(spec: Spec) -> list[Thing]:
    """The things of a game in their places. The goal's objects lie outside of its receptacles: no game begins won."""
    plan = floor_plan(spec.scene)
    rng = np.random.default_rng([spec.seed, spec.scene, TASK_TYPES.index(spec.task_type)])
    things: list[Thing] = []
    for kind in plan.classes:
        wanted = kind in (spec.object, spec.target)
        if rng.random() >= spec.clutter and not wanted:
            continue
        if kind in LAMPS:
            spots = [place for place in plan.places if place.kind in LAMP_STANDS[kind]]
            copies = 1
        else:
            avoided = spec.target if kind == spec.object else ""
            spots = [place for place in plan.places if holds(place.kind, kind) and place.kind != avoided]
            fewest = 2 if spec.task_type == "pick_two_obj_and_place" and kind == spec.object else 1
            copies = int(rng.integers(fewest, MAX_COPIES + 1))
        for _ in range(copies if spots else 0):
            place = spots[rng.integers(len(spots))]
            things.append(Thing(kind, _identity(rng, kind, place, {thing.identity for thing in things}), place))
    return things


def _identity(rng: np.random.Generator, kind: str, place: Place, used: set[str]) -> str:
    x, y, z = place.position
    while True:
        dx, dy, dz = (rng.integers(-20, 21, size=3) / 100).tolist()
        identity = f"{kind}|{number(x + dx)}|{number(y + dy)}|{number(z + dz)}"
        if identity not in used:
            return identity


def mangle(text: str) -> str:
    """An identity as a name in PDDL, as alfworld writes it: words for the signs of `MANGLE`."""
    for character, word in MANGLE:
        text = text.replace(character, word)
    return text


def problem(spec: Spec) -> str:
    """The text of `initial_state.pddl`."""
    plan, things, table = floor_plan(spec.scene), furnish(spec), constants()
    rng = np.random.default_rng([spec.seed, 1])
    start = plan.middle[rng.integers(len(plan.middle))]
    object_kinds = sorted(set(table.OBJECTS_SET) - (set(table.RECEPTACLES) - table.MOVABLE_RECEPTACLES_SET))
    place_kinds = sorted(set(table.RECEPTACLES) - table.MOVABLE_RECEPTACLES_SET)
    locations = sorted({start, *(place.location for place in plan.places)})
    declared = [
        "agent1 - agent",
        *(f"{kind}Type - otype" for kind in object_kinds),
        *(f"{kind}Type - rtype" for kind in place_kinds),  # not otype: the planner would find nothing reachable
        *(f"{mangle(thing.identity)} - object" for thing in things),
        *(f"{mangle(place.identity)} - receptacle" for place in plan.places),
        *(f"{mangle(name)} - location" for name in locations),
    ]
    facts = [*_room_facts(plan, things), *_thing_facts(things), f"(atLocation agent1 {start})"]
    objects, init = ("\n        ".join(lines) for lines in (declared, map(mangle, facts)))
    return f"""(define (problem plan_{spec.seed})
    (:domain alfred)
    (:objects
        {objects}
    )
    (:init
        (= (total-cost) 0)
        {init}
    )
{_goal(spec)}"""


def _room_facts(plan: FloorPlan, things: list[Thing]) -> list[str]:
    table = constants()
    kinds, classes = plan.kinds(), sorted({thing.kind for thing in things} - set(LAMPS))
    return [
        *(f"(receptacleType {place.identity} {place.kind}Type)" for place in plan.places),
        *(f"(receptacleAtLocation {place.identity} {place.location})" for place in plan.places),
        *(f"(openable {place.identity})" for place in plan.places if place.kind in table.OPENABLE_CLASS_SET),
        *(f"(canContain {place}Type {kind}Type)" for place in kinds for kind in classes if holds(place, kind)),
    ]


def _thing_facts(things: list[Thing]) -> list[str]:
    table = constants()
    abilities = [
        ("cleanable", table.VAL_ACTION_OBJECTS["Cleanable"]),
        ("heatable", table.VAL_ACTION_OBJECTS["Heatable"]),
        ("coolable", table.VAL_ACTION_OBJECTS["Coolable"]),
        ("sliceable", table.VAL_ACTION_OBJECTS["Sliceable"]),
        ("toggleable", table.VAL_ACTION_OBJECTS["Toggleable"]),
        ("isReceptacleObject", table.MOVABLE_RECEPTACLES_SET),
    ]
    facts = []
    for thing in things:
        name, place = thing.identity, thing.place
        facts += [f"(objectType {name} {thing.kind}Type)", f"(inReceptacle {name} {place.identity})"]
        facts += [f"(wasInReceptacle {name} {place.identity})", f"(objectAtLocation {name} {place.location})"]
        facts += [f"({ability} {name})" for ability, kinds in abilities if thing.kind in kinds]
        facts += [] if thing.kind in LAMPS else [f"(pickupable {name})"]
    return facts


def _goal(spec: Spec) -> str:
    text = goal_library().gdict[spec.task_type]["pddl"]
    return text.format(obj=spec.object, recep=spec.target, toggle=spec.target).replace("#", "-")


def sentence(spec: Spec) -> str:
    """The task in words: one of alfworld's sentences of the task type."""
    templates = goal_library().gdict[spec.task_type]["templates"]
    chosen = templates[np.random.default_rng([spec.seed, 2]).integers(len(templates))]
    target = spec.target.lower()
    return chosen.format(obj=spec.object.lower(), recep=target, toggle=target)


@functools.cache
def logic() -> tuple[str, str]:
    """alfworld's PDDL domain and its grammar."""
    data = folder() / "data"
    return (data / "alfred.pddl").read_text(), (data / "alfred.twl2").read_text()


def game_file(spec: Spec) -> dict[str, Any]:
    """The contents of `game.tw-pddl`; `solvable` is not checked yet."""
    domain, grammar = logic()
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", sentence(spec)),
        "pddl_problem": problem(spec),
        "solvable": None,
        "walkthrough": None,
    }


def trajectory_file(spec: Spec, name: str) -> dict[str, Any]:
    """The contents of `traj_data.json`; images and low-level actions are empty in a text world."""
    light = spec.task_type == "look_at_obj_in_light"
    return {
        "task_id": name,
        "task_type": spec.task_type,
        "pddl_params": {
            "mrecep_target": "",
            "object_sliced": False,
            "object_target": spec.object,
            "parent_target": "" if light else spec.target,
            "toggle_target": spec.target if light else "",
        },
        "scene": {"floor_plan": f"FloorPlan{spec.scene}", "scene_num": spec.scene, "random_seed": spec.seed},
        "plan": {"high_pddl": [], "low_actions": []},
        "images": [],
        "turk_annotations": {"anns": [{"task_desc": sentence(spec), "high_descs": []}]},
    }
