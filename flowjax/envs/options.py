"""What the options of all worlds have in common: keyword arguments that become a frozen dataclass."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from flowjax.envs.base import Split, WorldError
from flowjax.fields import declared_types, option_problems

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)


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


def check_split(split: str) -> None:
    """Refuse what is no split.

    Raises:
        WorldError: it is not.
    """
    if split not in get_args(Split):
        raise WorldError(f"split is {split!r}: give {' or '.join(get_args(Split))}")
