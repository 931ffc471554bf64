"""Estimators by name: the ones of this room, the published ones, and one's own by dotted path."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Float

from flowjax.credit import ESTIMATORS
from flowjax.credit.table import TurnTable
from flowjax.fields import declared_types, nearest, option_problems

Estimator = Callable[..., Float[Array, "turns"]]


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
            f"config.credit.name is {name!r}{nearest(name, ESTIMATORS)}; known are {', '.join(ESTIMATORS)}, "
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
    parameters = inspect.signature(function).parameters.values()
    table = {each.name for each in parameters if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)}
    declared = {option: kind for option, kind in declared_types(function).items() if option not in table}
    for problem in option_problems("config.credit.options", options, declared, repr(name)):
        raise CreditError(problem)


def credit_parts(table: TurnTable, name: str, **options: Any) -> dict[str, Float[Array, "turns"]]:
    """Parts of what `estimate` gives: those of the episode and of the step for an estimator that adds them up with a
    `step_weight`, none for others."""
    if "step_weight" not in inspect.signature(get_estimator(name)).parameters:
        return {}
    episode = estimate(table, name, **{**options, "step_weight": 0.0})
    return {"episode": episode, "step": estimate(table, name, **options) - episode}


def estimate(table: TurnTable, name: str, **options: Any) -> Float[Array, "turns"]:
    """Advantage of each row of `table`; zero on rows that do not count."""
    return get_estimator(name)(table, **options)
