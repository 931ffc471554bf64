"""Operators that are descriptions only, in the published `operator.json`: name -> description and interface.

    {"Merge": {"description": "Merges.", "interface": "merge(solutions: List[str]) -> dict with key 'response'"}}

A name that is known keeps its work and gets the description; an unknown one becomes an operator that asks a backend
for the outputs that its interface names.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from flowjax.canvas.operators.base import Context, Operator, OperatorError, Role
from flowjax.canvas.operators.prompts import (
    PROBLEM,
    SOLUTION,
    ask_object,
    ask_solution,
    object_form,
    object_schema,
    prompt,
    solution_form,
    visible,
)
from flowjax.canvas.operators.registry import SHARED_KINDS, OperatorRegistryError, check
from flowjax.canvas.values import Field, Kind, State, Value

_INTERFACE = re.compile(r"\s*\w+\s*\((?P<arguments>.*)\)\s*(?:->(?P<outputs>.*))?", re.DOTALL)
_ARGUMENT = re.compile(r"(?:^|,)\s*(\w+)\s*(?::\s*([^,=\[\]]*(?:\[[^\]]*\])?))?(\s*=)?")
_QUOTED = re.compile(r"['\"`](\w+)['\"`]")
# The published fields by ours; "" are those that the context gives, or nobody needs.
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
    arguments = [(argument, kind, bool(default)) for argument, kind, default in _ARGUMENT.findall(read["arguments"])]
    inputs = {PROBLEM.name: PROBLEM}
    for argument, kind, optional in arguments:
        if (field := _field(argument, kind, required=not optional)) is not None:
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


class _Prompted(Operator):
    outputs: ClassVar[tuple[Field, ...]]

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        fields: dict[str, Kind] = {field.name: field.kind for field in self.outputs}
        if fields.keys() <= {"thought", "answer", "code"}:
            found = await ask_solution(context, prompt(context, inputs, solution_form(context.problem)))
            return {name: value for name, value in found.items() if name in fields}
        if len(fields) == 1 and "text" in fields.values():
            text = visible(await context.ask(prompt(context, inputs)))
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
    told: Kind = "texts" if kind.strip().lower().startswith(("list", "sequence", "tuple")) else "text"
    return Field(ours, SHARED_KINDS.get(ours, "flag" if kind.strip() == "bool" else told), required=required)


def _role(inputs: set[str], outputs: set[str]) -> Role:
    if "passed" in outputs:
        return "checker"
    if "candidates" in inputs:
        return "combiner"
    if outputs & {"plan", "subproblems"}:
        return "planner"
    return "reviser" if "feedback" in inputs else "solver"
