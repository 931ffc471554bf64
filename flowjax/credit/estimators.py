"""Estimators by name: the ones of this room, and one's own by dotted path."""

import difflib
import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxtyping import Array, Float

from flowjax.credit.table import TurnTable
from flowjax.fields import type_problem

Estimator = Callable[..., Float[Array, "turns"]]

ESTIMATORS = {
    "best_of_group": "flowjax.credit.episode:best_of_group",
    "discounted_return": "flowjax.credit.returns:discounted_return",
    "dr_grpo": "flowjax.credit.episode:dr_grpo",
    "gae": "flowjax.credit.rewardflow:gae",
    "gigpo": "flowjax.credit.gigpo:gigpo",
    "grpo": "flowjax.credit.episode:grpo",
    "maxrl": "flowjax.credit.episode:maxrl",
    "pass_at_k": "flowjax.credit.episode:pass_at_k",
    "published.rewardflow": "flowjax.published.rewardflow:rewardflow",
    "reinforce_plus_plus": "flowjax.credit.returns:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "flowjax.credit.episode:reinforce_plus_plus_baseline",
    "rewardflow": "flowjax.credit.rewardflow:rewardflow",
    "rloo": "flowjax.credit.episode:rloo",
}
_RANGES: dict[str, tuple[float, float]] = {
    "gamma": (0.0, 1.0),
    "trace": (0.0, 1.0),
    "invalid_penalty": (0.0, float("inf")),
    "step_weight": (0.0, float("inf")),
    "k": (1, float("inf")),
}


class CreditError(ValueError):
    """An estimator or an option that does not exist; the message names the nearest that does."""


@functools.cache
def get_estimator(name: str) -> Estimator:
    """The estimator of that name, or the function at `package.module:function`.

    Raises:
        CreditError: there is none.
    """
    if name not in ESTIMATORS and ":" not in name:
        raise CreditError(
            f"config.credit.name is {name!r}{_nearest(name, ESTIMATORS)}; known are {', '.join(ESTIMATORS)}, "
            "or package.module:function for your own"
        )
    module, _, attribute = ESTIMATORS.get(name, name).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise CreditError(f"config.credit.name is {name!r}, which cannot be imported: {error}") from error


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown estimator, an unknown option, or a value that the option does not take.

    Raises:
        CreditError: with the field, the value and what to write instead.
    """
    function = get_estimator(name)
    known = {
        key: parameter
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    hints = typing.get_type_hints(inspect.unwrap(function))
    for option, value in options.items():
        field = f"config.credit.options.{option}"
        if option not in known:
            listed = ", ".join(known) or "none"
            raise CreditError(f"{field} is no option of {name!r}{_nearest(option, known)}; it has {listed}")
        _check_value(field, option, value, hints.get(option))


def estimate(table: TurnTable, name: str, **options: Any) -> Float[Array, "turns"]:
    """Advantage of each row of `table`; zero on rows that do not count."""
    return get_estimator(name)(table, **options)


def _check_value(field: str, option: str, value: Any, hint: Any) -> None:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise CreditError(f"{field} is {value!r}{_nearest(str(value), choices)}; it is one of {', '.join(choices)}")
        return
    expected = {float: (int, float), int: (int,), bool: (bool,)}.get(hint)
    if expected and (not isinstance(value, expected) or (isinstance(value, bool) and hint is not bool)):
        raise CreditError(f"{field} is {value!r}, it takes a {hint.__name__}")
    if not expected and (problem := type_problem(Any if hint is None else hint, value)):
        raise CreditError(f"{field} is {value!r}: {problem}")
    low, high = _RANGES.get(option, (float("-inf"), float("inf")))
    if expected and not low <= value <= high:
        raise CreditError(f"{field} is {value}, it must lie in [{low}, {high}]")


def _nearest(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, [str(known) for known in names], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
