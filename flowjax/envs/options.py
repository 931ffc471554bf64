"""What the options of all worlds have in common: keyword arguments that become a frozen dataclass."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from flowjax.envs.base import Split, WorldError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)


def build_options(kind: "type[Options]", options: Mapping[str, Any], world: str) -> "Options":
    """The options of a world with their defaults.

    Raises:
        WorldError: one is unknown, or has a value that it cannot have.
    """
    known = [field.name for field in fields(kind)]
    if unknown := sorted(options.keys() - set(known)):
        raise WorldError(f"env.options {unknown}: those of {world} are {', '.join(known)}")
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
