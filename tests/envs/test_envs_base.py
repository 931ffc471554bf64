"""Finding worlds, and reading actions out of replies."""

import sys
import types

import pytest

from flowjax.envs.base import WorldError, load_world, tagged_action

LEGAL = ("up", "down", "open the box")


def test_the_shipped_world_offers_everything():
    assert "success" in load_world("flowjax.envs.sokoban").OUTCOMES


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
