"""Every option of every world refuses values of another type, by its annotation alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from flowjax.envs import World, WorldError, find_world
from flowjax.fields import declared_types, option_problems

NAMES = ("Alfworld", "Canvas", "Code", "Math", "Search", "Sokoban", "WebShop")
WORLDS = {name: find_world(f"flowjax.envs.{name.lower()}:{name}") for name in NAMES}


def wrong_values(kind: Any) -> list[Any]:
    """Values that an annotated type does not have."""
    if get_origin(kind) is Literal:
        return ["no such choice", 3.5, math.nan]
    plain = {int: [math.nan, 1.5, "many", True], float: [math.nan, math.inf, "fast", True], bool: ["yes", 2]}
    if kind in plain:
        return plain[kind]
    if kind is str:
        return [3, math.nan, ("a",)]
    wrong = [object()]
    return wrong if str in get_args(kind) else [*wrong, "text alone"]


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, own in WORLDS.items() for option in declared_types(own.Options)]
)
def test_an_option_of_another_type_is_refused_by_its_name(name: str, option: str):
    world = WORLDS[name]
    for value in wrong_values(declared_types(world.Options)[option]):
        with pytest.raises(WorldError) as refused:
            world(**{option: value})
        assert option in str(refused.value)


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(WorldError, match=r"env\.options\.colums is no option of Sokoban \(did you mean 'columns'\?\)"):
        WORLDS["Sokoban"](rows=6, colums=6)


def test_an_owner_that_takes_any_name_is_not_asked_about_others():
    def estimator(*, gamma: float = 0.9, **others: Any) -> None: ...

    types = declared_types(estimator)
    assert not list(option_problems("config.credit.options", {"anything": 1}, types, "it"))
    (message,) = option_problems("config.credit.options", {"gamma": "a"}, types, "it")
    assert message == "config.credit.options.gamma is 'a': give a number"


def test_an_option_without_annotation_has_the_type_of_its_default():
    def estimator(table, *, scale=1, base="mean", whole=False, other=None): ...

    types = declared_types(estimator)
    sound = {"scale": 0.5, "base": "none", "whole": True, "other": "anything"}
    assert not list(option_problems("config.credit.options", sound, types, "it"))
    assert list(option_problems("config.credit.options", {"scale": "two", "base": 1, "whole": "yes"}, types, "it")) == [
        "config.credit.options.scale is 'two': give a number",
        "config.credit.options.base is 1: give text",
        "config.credit.options.whole is 'yes': give True or False",
    ]


def test_options_are_tuples_again_where_a_message_has_made_lists_of_them():
    @dataclass(frozen=True)
    class Sizes:
        sizes: tuple[int, ...] = ()
        pairs: Annotated[tuple[tuple[int, ...], ...] | None, "or none"] = None
        names: Sequence[str] | str = ""
        listed: list[int] = field(default_factory=list)

    class Sized(World):
        Options = Sizes
        env = tasks = None  # pyright: ignore

    options = Sized(sizes=[5, 6], pairs=[[1, 2], []], names=["a"], listed=[1]).options
    assert options == Sizes((5, 6), ((1, 2), ()), ["a"], [1])
    assert WORLDS["Alfworld"](scenes=[407]).options == WORLDS["Alfworld"](scenes=(407,)).options
