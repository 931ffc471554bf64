"""Options of worlds whose functions take keyword arguments: they become a frozen dataclass."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from flowjax.envs.base import WorldError, check_split
from flowjax.fields import declared_types, option_problems

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)

__all__ = ["build_options", "check_split"]


def build_options(kind: "type[Options]", options: Mapping[str, Any], world: str) -> "Options":
    """The options of a world with their defaults.

    Raises:
        WorldError: one is unknown, or has a value that it cannot have.
    """
    for problem in option_problems("env.options", options, declared_types(kind), world):
        raise WorldError(problem)
    try:
        return kind(**options)
    except TypeError as error:
        raise WorldError(f"env.options {dict(options)}: a value has the wrong type ({error})") from error
