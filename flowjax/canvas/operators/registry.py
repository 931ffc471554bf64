"""Finding operators: our own, those of installed packages (entry points), and those named by a dotted path.

A package offers one in its `setup.py`: `entry_points={"flowjax.operators": ["Name = package.module:Class"]}`.

Others are descriptions only, in the published `operator.json`: name -> description and interface.

    {"Merge": {"description": "Merges.", "interface": "merge(solutions: List[str]) -> dict with key 'response'"}}

An operator of a known name keeps its code and gets the new description; an unknown name becomes an operator that asks
a backend for the outputs named in the interface.
"""

import importlib.metadata
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

from flowjax.canvas.operators import (
    PROBLEM,
    SOLUTION,
    Context,
    Operator,
    OperatorError,
    Role,
    ask_object,
    ask_solution,
    object_form,
    object_schema,
    prompt,
    solution_form,
)
from flowjax.canvas.operators.built_in import (
    Aggregate,
    AnswerGenerate,
    Custom,
    CustomCodeGenerate,
    Decompose,
    Format,
    MdEnsemble,
    Plan,
    Programmer,
    Review,
    Revise,
    ScEnsemble,
    Test,
    Verify,
)
from flowjax.canvas.text import NAME
from flowjax.canvas.values import Field, Kind, State, Value
from flowjax.fields import load_named
from flowjax.grading.answers import without_thoughts

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
HIDDEN: tuple[type[Operator], ...] = (CustomCodeGenerate, MdEnsemble)  # work like the others, but are not listed
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
    "instruction": "its instruction where the call has none",
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
    """Check that a class is a complete operator.

    Raises:
        OperatorRegistryError: it is not; the message names the class, the attribute and what that has to be.
    """
    if not inspect.isclass(operator) or not issubclass(operator, Operator):
        raise OperatorRegistryError(
            f"{origin} is {operator!r}, no operator: derive a class from flowjax.canvas.operators.Operator"
        )
    for attribute, meaning in _ATTRIBUTES.items():
        if not hasattr(operator, attribute):
            raise OperatorRegistryError(f"{origin}: {operator.__qualname__}.{attribute} is missing: {meaning}")
    fault = _fault(operator)
    if fault:
        raise OperatorRegistryError(f"{origin}: {operator.__qualname__}.{fault}")


def describe(operators: Mapping[str, type[Operator]], *, hidden: bool = False) -> str:
    """The operators for the policy's prompt, one line each: name, role, purpose, required inputs and outputs."""
    unlisted = set() if hidden else {operator.name for operator in HIDDEN}
    shown = [operator for operator in operators.values() if operator.name not in unlisted]
    return "\n".join(_line(operator) for operator in shown)


def _line(operator: type[Operator]) -> str:
    needed = [field.name for field in operator.inputs if field.required and field.name != "problem"]
    reading = f"; needs {', '.join(needed)}" if needed else ""
    writing = f"; writes {', '.join(field.name for field in operator.outputs)}"
    return f"{operator.name} ({operator.role}): {operator.description}{reading}{writing}"


def _loaded(path: str) -> Any:
    if ":" not in path:
        raise OperatorRegistryError(f"{path!r} names no operator: give package.module:Class")
    return load_named("the operator", path, OperatorRegistryError, "check the path, and that its package is installed")


def _fault(operator: type[Operator]) -> str | None:
    if not isinstance(operator.name, str) or not NAME.fullmatch(operator.name):
        return f"name is {operator.name!r}: give one word of the letters A to Z and a to z, digits and _"
    if operator.name == "done":
        return "name is 'done', which stands for a branch without a step: give another word"
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
    if not inspect.iscoroutinefunction(inspect.unwrap(operator.run)):
        return "run cannot be awaited: write it as async def run(self, inputs, context)"
    try:
        inspect.signature(operator).bind()
    except TypeError as error:
        return f"__init__ cannot be called without arguments ({error}): give each a default"
    try:
        inspect.signature(operator.run).bind("self", "inputs", "context")
    except TypeError as error:
        return f"run cannot be called so ({error}): write it as async def run(self, inputs, context)"
    return None


def _field_fault(fields: Any) -> str | None:
    if not isinstance(fields, tuple) or not all(isinstance(field, Field) for field in fields):
        return f"is {fields!r}: give a tuple of Field"
    names = [field.name for field in fields]
    for field in fields:
        if not isinstance(field.name, str) or not NAME.fullmatch(field.name):
            return f"has a field named {field.name!r}: give one word of the letters A to Z and a to z, digits and _"
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


_INTERFACE = re.compile(r"\s*\w+\s*\((?P<arguments>.*?)\)\s*(?:->(?P<outputs>.*))?", re.DOTALL)
_ARGUMENT = re.compile(r"\s*(\w+)\s*(?::\s*([^=]*))?(=)?")
_SEVERAL = re.compile(r"(optional\[\s*)?(list|sequence|tuple)")
_QUOTED = re.compile(r"['\"`](\w+)['\"`]")
# Our names of the published fields; "" for fields that the context provides, or that are not needed.
_SAME = {
    "input": "problem",
    "question": "problem",
    "solution": "answer",
    "response": "answer",
    "output": "answer",
    "aggregated_answer": "answer",
    "solutions": "candidates",
    "sub_answers": "candidates",
    "sub_problems": "subproblems",
    "analysis": "plan",
    "result": "passed",
    "review_result": "passed",
    "is_correct": "passed",
    "instruction": "",
    "entry_point": "",
    "test": "",
    "mode": "",
}
_TYPES: Mapping[Kind, Mapping[str, Any]] = {
    "text": {"type": "string"},
    "code": {"type": "string"},
    "flag": {"type": "boolean"},
    "texts": {"type": "array", "items": {"type": "string"}},
}


def load_descriptions(path: str | Path, known: Mapping[str, type[Operator]]) -> dict[str, type[Operator]]:
    """`known`, with descriptions from the file, and the operators that only the file has.

    Raises:
        OperatorRegistryError: the file cannot be read, or an entry of it makes no operator.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OperatorRegistryError(f"{path} cannot be read ({error}): give a JSON file of operators") from error
    if not isinstance(entries, Mapping):
        raise OperatorRegistryError(f"{path} holds a {type(entries).__name__}: give an object, name -> description")
    found = dict(known)
    for name, entry in entries.items():
        origin = f"{path}, operator {name}"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("description"), str):
            raise OperatorRegistryError(f'{origin} is {entry!r}: give {{"description": ..., "interface": ...}}')
        description = " ".join(entry["description"].split())
        if name in known:
            found[name] = type(name, (known[name],), {"description": description, "__module__": known[name].__module__})
        else:
            found[name] = prompted(name, description, str(entry.get("interface", "")))
        check(found[name], origin)
    return found


def prompted(name: str, description: str, interface: str) -> type[Operator]:
    """An operator that asks a backend for its outputs, made from a line such as `f(problem: str) -> 'answer'`.

    Raises:
        OperatorRegistryError: the interface cannot be read.
    """
    read = _INTERFACE.fullmatch(interface)
    if read is None:
        raise OperatorRegistryError(
            f"operator {name} has the interface {interface!r}: give name(field: str, ...) -> dict with key 'field'"
        )
    inputs = {PROBLEM.name: PROBLEM}
    for argument in filter(None, map(_ARGUMENT.match, _arguments(read["arguments"]))):
        if (field := _field(argument[1], argument[2] or "", required=not argument[3])) is not None:
            inputs.setdefault(field.name, field)
    outputs: dict[str, Field] = {}
    for key in _QUOTED.findall(read["outputs"] or "") or ["answer"]:
        if (field := _field(key, "")) is not None:
            outputs.setdefault(field.name, field)
    if outputs.keys() & {"answer", "code"}:
        outputs |= {field.name: field for field in SOLUTION}
    return type(
        name,
        (_Prompted,),
        {
            "name": name,
            "description": description,
            "role": _role(set(inputs), set(outputs)),
            "inputs": tuple(inputs.values()),
            "outputs": tuple(outputs.values()),
            "instruction": description,
            "__module__": __name__,
            "__doc__": description,
        },
    )


def _arguments(text: str) -> Iterator[str]:
    """The arguments of an interface: its text cut at the commas that stand in no bracket or quotation."""
    depth, quote, start = 0, "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "," and depth == 0:
            yield text[start:place]
            start = place + 1
        else:
            depth += (sign in "([{") - (sign in ")]}")
    yield text[start:]


class _Prompted(Operator):
    outputs: ClassVar[tuple[Field, ...]]

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        fields: dict[str, Kind] = {field.name: field.kind for field in self.outputs}
        if fields.keys() <= {"thought", "answer", "code"}:
            found = await ask_solution(context, prompt(context, inputs, solution_form(context.problem)))
            return {name: value for name, value in found.items() if name in fields}
        if len(fields) == 1 and "text" in fields.values():
            text = without_thoughts(await context.ask(prompt(context, inputs)))
            if not text:
                raise OperatorError("the backend's reply is empty")
            return dict.fromkeys(fields, text)
        schema = object_schema(**{name: _TYPES[kind] for name, kind in fields.items()})
        found = await ask_object(context, prompt(context, inputs, object_form(schema)), schema)
        return {name: tuple(found[name]) if kind == "texts" else found[name] for name, kind in fields.items()}


def _field(name: str, kind: str, *, required: bool = True) -> Field | None:
    ours = _SAME.get(name, name)
    if not ours:
        return None
    declared: Kind = "texts" if _SEVERAL.match(kind.strip().lower()) else "text"
    return Field(ours, SHARED_KINDS.get(ours, "flag" if kind.strip() == "bool" else declared), required=required)


def _role(inputs: set[str], outputs: set[str]) -> Role:
    if "passed" in outputs:
        return "checker"
    if "candidates" in inputs:
        return "combiner"
    if outputs & {"plan", "subproblems"}:
        return "planner"
    return "reviser" if "feedback" in inputs else "solver"
