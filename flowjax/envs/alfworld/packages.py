"""The packages of the `alfworld` extra, imported when they are first needed, and the floor plans that come with them.

textworld's PDDL engine rests on a planner under the GPL, so nothing outside this package may import it.
"""

import functools
import importlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from flowjax.envs.base import NotReady, WorldError

DATA_VARIABLE = "ALFWORLD_DATA"
GRID_M = 0.25  # metres per step of the agent
LAMPS = ("DeskLamp", "FloorLamp")
LAMP_STANDS = {  # nothing can be put where a lamp stands by its own right, so alfworld has no table of this
    "DeskLamp": ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable", "DiningTable"),
    "FloorLamp": ("SideTable", "ArmChair", "Sofa", "CoffeeTable", "Desk", "Dresser"),
}
BURNERS = 4  # of a stove; of the other receptacles whose position is not given there is one
STANDING = ("CoffeeMachine", "GarbageCan", "HandTowelHolder", "LaundryHamper", "Ottoman", "StoveBurner", "Toaster")
STANDING += ("Toilet", "ToiletPaperHanger", "TowelHolder")


@functools.cache
def package(name: str) -> ModuleType:
    """A module of alfworld, or one that imports it or textworld.

    alfworld sets ALFWORLD_DATA, and makes a folder for it, when it is imported; here both stay as the user has them.

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
    """alfworld's tables of object classes, what may hold what, and which scenes are for training."""
    return package("alfworld.gen.constants")


def goal_library() -> ModuleType:
    """alfworld's goals as PDDL, and the sentences that state them."""
    return package("alfworld.gen.goal_library")


def folder() -> Path:
    """The folder of alfworld's package, with its domain, its grammar and its floor plans."""
    return Path(str(package("alfworld").__file__)).parent


@dataclass(frozen=True, slots=True)
class Place:
    """A fixed receptacle. `identity` is alfworld's: class and position in metres; `location` is where one stands."""

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
    """A coordinate as identities hold it: two digits, two decimals, always signed."""
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
                height = number(float(rng.integers(100)) / 100)  # tells the burners of one point apart
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
    """The class of a receptacle; a sink's basin is named by its last part."""
    parts = identity.split("|")
    return parts[4] if len(parts) > 4 else parts[0]
