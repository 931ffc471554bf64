"""Finding operators: our own, those of installed packages (entry points), and those named by a dotted path.

A package offers one in its `setup.py`: `entry_points={"flowjax.operators": ["Name = package.module:Class"]}`.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from flowjax.canvas.operators.base import Operator, Role
from flowjax.canvas.operators.ensembles import Aggregate, MdEnsemble, ScEnsemble
from flowjax.canvas.operators.programs import Programmer, Test
from flowjax.canvas.operators.prompted import (
    AnswerGenerate,
    Custom,
    CustomCodeGenerate,
    Decompose,
    Format,
    Plan,
    Review,
    Revise,
    Verify,
)
from flowjax.canvas.values import Field, Kind

ADVERTISED: tuple[type[Operator], ...] = (
    Plan,
    Decompose,
    Programmer,
    Custom,
    AnswerGenerate,
    Test,
    Review,
    Verify,
    Revise,
    ScEnsemble,
    Aggregate,
    Format,
)
HIDDEN: tuple[type[Operator], ...] = (CustomCodeGenerate, MdEnsemble)  # work like the others, but are not told of
ENTRY_POINT_GROUP = "flowjax.operators"
SHARED_KINDS: dict[str, Kind] = {
    "problem": "text",
    "plan": "text",
    "subproblems": "texts",
    "answer": "text",
    "code": "code",
    "candidates": "texts",
    "thought": "text",
    "passed": "flag",
    "feedback": "text",
}
_ATTRIBUTES = {
    "name": "the word that stands for it in workflows",
    "description": "one line, for the policy",
    "role": f"one of {', '.join(get_args(Role))}",
    "inputs": "a tuple of Field",
    "outputs": "a tuple of Field",
    "instruction": "what it is told where the call says nothing",
}


class OperatorRegistryError(ValueError):
    """An operator that cannot be used; the message names the class and the remedy."""


def load_operators(extra: Iterable[str] = (), *, entry_points: bool = True) -> dict[str, type[Operator]]:
    """Name -> operator: the fourteen, then those of installed packages, then `extra`, as `package.module:Class`.

    Raises:
        OperatorRegistryError: one cannot be imported, is no proper operator, or has another's name.
    """
    found = {operator.name: operator for operator in (*ADVERTISED, *HIDDEN)}
    offered: list[tuple[str, Any]] = []
    if entry_points:
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            offered.append((f"entry point {point.name} = {point.value}", _loaded(point.value)))
    offered += [(path, _loaded(path)) for path in extra]
    for origin, operator in offered:
        check(operator, origin)
        if found.get(operator.name, operator) is not operator:
            other = found[operator.name]
            raise OperatorRegistryError(
                f"{origin}: the name {operator.name!r} is taken by {other.__module__}:{other.__qualname__}: give "
                f"{operator.__qualname__}.name another value"
            )
        found[operator.name] = operator
    return found


def check(operator: Any, origin: str) -> None:
    """Refuse what is no proper operator.

    Raises:
        OperatorRegistryError: naming the class, the attribute and what it has to be.
    """
    if not inspect.isclass(operator) or not issubclass(operator, Operator):
        raise OperatorRegistryError(
            f"{origin} is {operator!r}, no operator: derive a class from flowjax.canvas.operators.base.Operator"
        )
    for attribute, meaning in _ATTRIBUTES.items():
        if not hasattr(operator, attribute):
            raise OperatorRegistryError(f"{origin}: {operator.__qualname__}.{attribute} is missing: {meaning}")
    fault = _fault(operator)
    if fault:
        raise OperatorRegistryError(f"{origin}: {operator.__qualname__}.{fault}")


def describe(operators: Mapping[str, type[Operator]], *, hidden: bool = False) -> str:
    """The operators for the policy's prompt: one line each with what it is for, needs and writes."""
    untold = set() if hidden else {operator.name for operator in HIDDEN}
    shown = [operator for operator in operators.values() if operator.name not in untold]
    return "\n".join(_line(operator) for operator in shown)


def _line(operator: type[Operator]) -> str:
    needed = [field.name for field in operator.inputs if field.required and field.name != "problem"]
    reading = f"; needs {', '.join(needed)}" if needed else ""
    writing = f"; writes {', '.join(field.name for field in operator.outputs)}"
    return f"{operator.name} ({operator.role}): {operator.description}{reading}{writing}"


def _loaded(path: str) -> Any:
    module, colon, name = path.partition(":")
    if not colon:
        raise OperatorRegistryError(f"{path!r} names no operator: give package.module:Class")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OperatorRegistryError(
            f"the operator {path!r} cannot be imported ({error}): check the path, and that its package is installed"
        ) from error


def _fault(operator: type[Operator]) -> str | None:
    if not isinstance(operator.name, str) or not operator.name.isidentifier():
        return f"name is {operator.name!r}: give one word of letters, digits and _"
    if not isinstance(operator.description, str) or len(operator.description.splitlines()) != 1:
        return f"description is {operator.description!r}: give one line of text"
    if operator.role not in get_args(Role):
        return f"role is {operator.role!r}: give one of {', '.join(get_args(Role))}"
    if not isinstance(operator.instruction, str):
        return f"instruction is {operator.instruction!r}: give text"
    for side in ("inputs", "outputs"):
        if fault := _field_fault(getattr(operator, side)):
            return f"{side} {fault}"
    if not operator.outputs:
        return "outputs is empty: name at least one field that it writes"
    if operator.role == "checker" and "passed" not in {field.name for field in operator.outputs}:
        return 'outputs lacks the flag that a checker writes: add Field("passed", "flag")'
    if inspect.isabstract(operator):
        return "run is missing: implement async def run(self, inputs, context)"
    return None


def _field_fault(fields: Any) -> str | None:
    if not isinstance(fields, tuple) or not all(isinstance(field, Field) for field in fields):
        return f"is {fields!r}: give a tuple of Field"
    names = [field.name for field in fields]
    for field in fields:
        if field.kind not in get_args(Kind):
            return f"has {field.name!r} of kind {field.kind!r}: give one of {', '.join(get_args(Kind))}"
        shared = SHARED_KINDS.get(field.name, field.kind)
        if field.kind != shared:
            return (
                f"has {field.name!r} of kind {field.kind!r}: that field is {shared!r} everywhere; name yours otherwise"
            )
        if names.count(field.name) > 1:
            return f"has {field.name!r} twice: name each field once"
    return None
