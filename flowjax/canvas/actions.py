"""Actions of a policy on the canvas: read from its responses, carried out on a workflow, written for demonstrations.

The grammar is in `flowjax.canvas.actions_grammar`. A response may start with thinking (`<think>...</think>`) and plain
text; then comes exactly one action, and nothing after it. Whatever else comes gives an `Unreadable` with a reason for
the policy. Reading takes time linear in the response's length.
"""

from collections.abc import Collection, Mapping

from flowjax.canvas.actions_compact import parse_compact, show_compact
from flowjax.canvas.actions_grammar import GrammarError
from flowjax.canvas.actions_kinds import Action, Add, Delete, Finish, Modify, SetPrompt, Unreadable
from flowjax.canvas.actions_reading import read
from flowjax.canvas.actions_repair import needs_repair, repaired
from flowjax.canvas.actions_schema import schema
from flowjax.canvas.actions_writing import show
from flowjax.canvas.checks import problems, unknown_name
from flowjax.canvas.edits import EditError, add, delete, modify, set_instruction
from flowjax.canvas.graph import Call, Workflow, walk
from flowjax.canvas.operators.base import Operator

__all__ = [
    "Action",
    "Add",
    "Delete",
    "Finish",
    "Modify",
    "SetPrompt",
    "Unreadable",
    "apply",
    "parse",
    "parse_compact",
    "schema",
    "show",
    "show_compact",
]

_TOLD_FAULTS = 3


def parse(text: str, *, lenient: bool = False, operators: Collection[str] = ()) -> Action | Unreadable:
    """The action of a response.

    Strict reading takes the grammar and nothing else; whether names and ids exist is found out by `apply`. Lenient
    reading takes what is probably meant, with names put right to those of `operators`, and says in the action's
    `repairs` what it had to mend (`flowjax.canvas.actions_repair`).
    """
    try:
        action = read(text)
    except GrammarError as error:
        action = Unreadable(str(error))
    if not lenient or not (isinstance(action, Unreadable) or needs_repair(action, operators)):
        return action
    try:
        return repaired(text, operators)
    except GrammarError as error:
        return Unreadable(str(error))


def apply(
    action: Action, workflow: Workflow, operators: Mapping[str, type[Operator]], backends: Collection[str] = ()
) -> Workflow:
    """The workflow after the action; `finish` leaves it as it is.

    Raises:
        EditError: it cannot be done, or would leave the workflow with a fault that it has not now.
    """
    match action:
        case Add(piece, into, position):
            for call in walk(piece):
                if isinstance(call, Call) and call.operator not in operators:
                    raise EditError(unknown_name("operator", call.operator, operators))
            edited = add(workflow, piece, into=into, position=position)
        case Delete(target):
            edited = delete(workflow, target)
        case Modify(target, operator, backend, count, prompt):
            if operator and operator not in operators:
                raise EditError(unknown_name("operator", operator, operators))
            edited = modify(workflow, target, operator=operator, backend=backend or None, count=count)
            edited = set_instruction(edited, target, prompt) if prompt else edited
        case SetPrompt(target, prompt):
            edited = set_instruction(workflow, target, prompt)
        case Finish():
            return workflow
    before = set(problems(workflow, operators, backends))
    faults = [fault for fault in problems(edited, operators, backends) if fault not in before]
    if faults:
        raise EditError(" ".join(faults[:_TOLD_FAULTS]))
    return edited
