"""Dataflow: what a call reads, from the state or the nodes that it is bound to, and what is wrong with what it gave."""

from collections.abc import Mapping

from flowjax.canvas.graph import Call
from flowjax.canvas.operators.base import Operator, OperatorError
from flowjax.canvas.values import Field, Kind, State, Value

Outputs = Mapping[str, State]  # node id -> what its newest run gave
Operators = Mapping[str, type[Operator]]


def read_inputs(call: Call, operators: Operators, state: State, outputs: Outputs) -> dict[str, Value]:
    """The call's inputs by name. Optional ones that nobody has written yet are left out.

    An input of kind texts can be bound several times: the values are put one after the other.

    Raises:
        OperatorError: a required input is missing, of another kind, or a binding makes no sense.
    """
    declared = operators[call.operator].inputs
    bound: dict[str, list[str]] = {}
    for name, reference in call.inputs:
        bound.setdefault(name, []).append(reference)
    if unknown := bound.keys() - {field.name for field in declared}:
        raise OperatorError(
            f"{call.operator} has no input {', '.join(sorted(unknown))} to bind; it reads {_names(declared)}"
        )
    inputs: dict[str, Value] = {}
    for field in declared:
        references = bound.get(field.name, [])
        value = _bound(call, field, references, outputs) if references else state.get(field.name)
        if value is None:
            if field.required:
                raise OperatorError(_missing(call, field, references, operators))
        elif not is_of(field.kind, value):
            raise OperatorError(f"{call.operator} reads {field.name} as {field.kind}, but it is {_kind(value)}")
        else:
            inputs[field.name] = value
    return inputs


def fault_of(operator: type[Operator], outputs: object) -> str:
    """What is wrong with an operator's outputs, "" if they are as declared."""
    if not isinstance(outputs, Mapping):
        return f"{operator.name} gave {_kind(outputs)} instead of a mapping of {_names(operator.outputs)}"
    declared = {field.name: field for field in operator.outputs}
    for name, value in outputs.items():
        if name not in declared:
            return f"{operator.name} gave {name!r}, but declares {_names(operator.outputs)}"
        if not is_of(declared[name].kind, value):
            return f"{operator.name} declares {name} as {declared[name].kind}, but gave {_kind(value)}"
    for field in operator.outputs:
        if field.required and field.name not in outputs:
            return f"{operator.name} did not give {field.name}, which it declares"
    return ""


def is_of(kind: Kind, value: object) -> bool:
    """Whether the value is of the kind; programs are texts and texts may be programs."""
    match kind:
        case "text" | "code":
            return isinstance(value, str)
        case "flag":
            return isinstance(value, bool)
        case "texts":
            return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _bound(call: Call, field: Field, references: list[str], outputs: Outputs) -> Value | None:
    """The value that bindings give, None where no node that is named has written it yet."""
    values: list[Value] = []
    for reference in references:
        node_id, _, name = reference.rpartition(".")
        if (value := outputs.get(node_id, {}).get(name)) is not None:
            values.append(value)
    if field.kind != "texts":
        if len(references) > 1:
            raise OperatorError(
                f"{call.operator}'s input {field.name} is bound {len(references)} times; only one of kind texts can be"
            )
        return values[0] if values else None
    texts: list[str] = []
    for value in values:
        if isinstance(value, bool):
            raise OperatorError(f"{call.operator}'s input {field.name} takes texts, but is bound to a flag")
        texts += [value] if isinstance(value, str) else value
    return tuple(texts) if values else None


def _missing(call: Call, field: Field, references: list[str], operators: Operators) -> str:
    if references:
        return f"{call.operator} needs {field.name}, but {' and '.join(references)} was not written before it"
    writers = sorted(name for name, other in operators.items() if field.name in {out.name for out in other.outputs})
    if field.name == "candidates":
        writers.append("a parallel, one for each branch that gives an answer")
    written_by = f"it is written by {', '.join(writers)}" if writers else "no operator writes it"
    return f"{call.operator} needs {field.name}, which no step before it has written: {written_by}"


def _names(declared: tuple[Field, ...]) -> str:
    return ", ".join(field.name for field in declared) or "nothing"


def _kind(value: object) -> str:
    names = {str: "text", bool: "flag"}
    if is_of("texts", value):
        return "texts"
    return names.get(type(value), f"a Python {type(value).__name__}")
