"""What every world offers, finding worlds, and reading actions out of replies."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowjax.envs import WorldError, find_world, tagged_action, view_reader
from flowjax.envs.worker import Frames, frame

WORLDS = {
    name.lower(): f"flowjax.envs.{name.lower()}:{name}"
    for name in ("Alfworld", "Canvas", "Code", "Math", "Search", "Sokoban", "WebShop")
}
LEGAL = ("up", "down", "open the box")


@pytest.mark.parametrize("name", WORLDS)
def test_a_shipped_world_offers_everything_and_names_what_it_does_not_take(name: str):
    world = find_world(WORLDS[name])
    assert "success" in world.OUTCOMES and set(world.COUNTS) < set(world.OUTCOMES)
    with pytest.raises(WorldError, match=r"split is 'test': give train or held_out"):
        world().tasks("test", 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorldError, match=r"env\.options\.colour is no option of .*; it has \w+, \w+"):
        world(colour="red")


def test_processes_that_hold_environments_import_no_heavy_library():
    light = [WORLDS[name] for name in WORLDS if name != "alfworld"]  # whose extra is heavy
    options = {"Code": {"allow_no_isolation": True}, "Search": {"documents": 200}, "WebShop": {"products": 20}}
    program = (
        "import sys\nfrom flowjax.envs import find_world\n"
        f"for path in {light}:\n"
        f"    world = find_world(path)\n    world(**{options}.get(world.__name__, {{}})).env()\n"
        "heavy = ('jax', 'grain', 'torch', 'transformers', 'numba', 'spacy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


OWN_WORLDS = """
from flowjax.envs import World

class Half(World):
    def env(self): ...

class Scored(World):
    OUTCOMES = ("score",)
    def env(self): ...
    def tasks(self, split, data_seed): ...

class Listed(World):
    View = list
    def env(self): ...
    def tasks(self, split, data_seed): ...

class Loose(World):
    Options = dict
    def env(self): ...
    def tasks(self, split, data_seed): ...

def make(): ...
"""


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", r"env\.name is '', which cannot be imported"),
        (
            "flowjax.envs.chess:Chess",
            r"env\.name is 'flowjax\.envs\.chess:Chess', which cannot be imported .*: give",
        ),
        ("flowjax.envs.sokoban", r"has no world '' \(it has Sokoban\): give package\.module:Class, for example"),
        ("flowjax.envs.sokoban:Sokobon", r"has no world 'Sokobon' \(it has Sokoban\)"),
        ("flowjax.records:Task", r"flowjax\.records has no world 'Task' \(a world is a subclass of World\)"),
        ("own_worlds:make", r"own_worlds has no world 'make' \(it has Half, Scored, Listed, Loose\)"),
        ("own_worlds:World", r"World lacks env, tasks: write them"),
        ("own_worlds:Half", r"env\.name is 'own_worlds:Half', but Half lacks tasks: write it"),
        ("own_worlds:Scored", r"OUTCOMES are \('score',\): give a tuple of names with \"success\" among them"),
        ("own_worlds:Listed", r"View is <class 'list'>: make it a frozen dataclass"),
        ("own_worlds:Loose", r"Options are <class 'dict'>: make them a frozen dataclass"),
    ],
)
def test_what_is_no_world_is_named_with_a_remedy(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own_worlds.py").write_text(OWN_WORLDS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorldError, match=message):
        find_world(path)


@dataclass(frozen=True)
class Cell:
    row: int
    mark: str | None


@dataclass(frozen=True)
class Board:
    cells: tuple[Cell, ...]
    best: Cell | None
    pair: tuple[int, tuple[str, ...]]
    share: float


@pytest.mark.parametrize(
    "view",
    [
        "a text",
        Board((), None, (1, ()), 0.5),
        Board((Cell(1, "x"), Cell(2, None)), Cell(3, ""), (2, ("a", "b")), 1.0),
    ],
)
def test_a_view_comes_back_from_another_process_as_it_was(view: Any):
    ((packed,),) = Frames().feed(frame([[view]]))
    assert view_reader(type(view))(packed) == view


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("up", "up"),
        (" Up\n", "up"),
        ("<action>down</action>", "down"),
        ("<think>first <action>up</action>?</think> <ACTION> Open the Box </ACTION>", "open the box"),
        ("<action>up</action> then <action>fly</action>", None),  # only the last pair counts
        ("<action>up</action></action>", "up"),
        ("<action>up</action> and so </action> <action>", "up"),
        ("<action><action>up</action>", "up"),
        ("</action>up<action>", None),
        ("<action>up", None),
        ("up</action>", None),
        ("up down", None),
        ("", None),
        ("<action></action>", None),
    ],
)
def test_the_action_of_a_reply(reply: str, action: str | None):
    assert tagged_action(reply, LEGAL) == action


def test_legal_actions_may_have_capitals():
    assert tagged_action("<action>Move North</action>", ("Move North", "Move South")) == "Move North"
    assert tagged_action("move south", ("Move North", "Move South")) == "Move South"
    assert tagged_action("<ACTION>Bxc3</ACTION>", ("bxc3", "Bxc3")) == "Bxc3"
    assert tagged_action("take ELLIE", ("take Ellie", "take ellie")) == "take ellie"
    assert tagged_action("take ellie", ("take Ellie", "take ELLIE")) is None, "it does not say which"
