"""What every world offers, finding worlds, and reading actions out of replies."""

import subprocess
import sys
import types

import pytest

from flowjax.envs.base import WorldError, load_world, tagged_action

WORLDS = ("alfworld", "canvas", "code", "math", "search", "sokoban", "webshop")
LEGAL = ("up", "down", "open the box")


@pytest.mark.parametrize("name", WORLDS)
def test_a_shipped_world_offers_everything_and_names_what_it_does_not_take(name: str):
    world = load_world(f"flowjax.envs.{name}")
    assert "success" in world.OUTCOMES
    with pytest.raises(WorldError, match=r"split is 'test': give train or held_out"):
        world.tasks("test", 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorldError, match=r"env\.options\.colour is no option of .*; it has \w+, \w+"):
        world.tasks("train", 0, colour="red")


def test_processes_that_hold_environments_import_no_heavy_library():
    light = [name for name in WORLDS if name != "alfworld"]  # whose extra is heavy
    options = {"code": {"allow_no_isolation": True}, "search": {"documents": 200}, "webshop": {"products": 20}}
    program = (
        "import sys\nfrom flowjax.envs.base import load_world\n"
        f"for name in {light}:\n"
        f"    load_world('flowjax.envs.' + name).make(**{options}.get(name, {{}}))\n"
        "heavy = ('jax', 'grain', 'torch', 'transformers', 'numba', 'spacy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_wrong_path_is_named_with_a_remedy():
    with pytest.raises(WorldError, match=r"env\.module is 'flowjax\.envs\.chess'.*give the dotted path"):
        load_world("flowjax.envs.chess")
    with pytest.raises(WorldError, match=r"env\.module is ''"):
        load_world("")


def test_what_a_module_lacks_is_listed(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("half_a_world")
    module.__dict__.update(make=lambda: None, tasks=lambda: None, OUTCOMES=("score",))
    monkeypatch.setitem(sys.modules, "half_a_world", module)
    with pytest.raises(
        WorldError, match="lacks expert, random_action, vocabulary, prompt, follow_up, reply, parse_action"
    ):
        load_world("half_a_world")


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("up", "up"),
        (" Up\n", "up"),
        ("<action>down</action>", "down"),
        ("<think>first <action>up</action>?</think> <ACTION> Open the Box </ACTION>", "open the box"),
        ("<action>up</action> then <action>fly</action>", None),  # only the last pair counts
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
