"""Actions written as the grammar has them, so that they read back."""

from flowjax.canvas.actions_grammar import Elements
from flowjax.canvas.actions_kinds import Action, Add, Delete, Finish, Modify, SetPrompt
from flowjax.canvas.graph import Call, Conditional, Loop, Node, Parallel, Sequence, children
from flowjax.canvas.text import show as text_of
from flowjax.canvas.text_tokens import BACKEND_NAME


def show(action: Action) -> str:
    """The action as the grammar has it; space around prompts and answers is not kept."""
    return "".join(f"<{tag}>{_escaped(value)}</{tag}>" for tag, value in _elements(action))


def _elements(action: Action) -> Elements:
    """The tags and values that say the action."""
    match action:
        case Add(piece, into, position):
            place = [("into", into)] if into else []
            place += [("position", str(position))] if position is not None else []
            return [("action", "add"), *_piece_elements(piece, place)]
        case Delete(target):
            return [("action", "delete"), ("target", target)]
        case Modify(target, operator, backend, count, prompt):
            named = [("operator", operator), ("backend", backend), ("count", "" if count is None else str(count))]
            given = [*named, ("prompt", prompt)]
            return [("action", "modify"), ("target", target), *((tag, value) for tag, value in given if value)]
        case SetPrompt(target, prompt):
            return [("action", "set_prompt"), ("target", target), ("prompt", prompt)]
        case Finish(answer):
            return [("action", "finish"), *([("answer", answer)] if answer else [])]


def _piece_elements(piece: Node, place: Elements) -> Elements:
    """As an operator or a structure where that says all of the piece, else as a workflow."""
    inner = children(piece.body) or (piece.body,) if isinstance(piece, Loop) else children(piece)
    calls = [node for node in inner if isinstance(node, Call)]
    told = [call.instruction.strip() for call in calls]
    plain = len(calls) == len(inner) and not any(call.inputs or call.backend for call in calls)
    plain = plain and (all(told) or not any(told))  # prompts are for all of a structure's operators or for none
    prompts = [("prompt", text) for text in told] if any(told) else []
    names = ", ".join(call.operator for call in calls)
    match piece:
        case Call(operator, instruction, backend, ()) if not backend or BACKEND_NAME.fullmatch(backend):
            optional = [("backend", backend)] if backend else []
            prompt = [("prompt", instruction)] if instruction.strip() else []
            return [("operator", operator), *optional, *place, *prompt]
        case Parallel() if plain and len(calls) > 1:
            return [("structure", "parallel"), ("operators", names), *place, *prompts]
        case Conditional() if plain:
            parts = (("condition", piece.condition), ("true", piece.then), ("false", piece.otherwise))
            named = [(tag, part.operator if isinstance(part, Call) else "done") for tag, part in parts]
            return [("structure", "conditional"), *named, *place, *prompts]
        case Loop(Call() | Sequence(), count) if plain:
            return [("structure", "loop"), ("operators", names), ("count", str(count)), *place, *prompts]
    return [("workflow", text_of(piece)), *place]


def _escaped(value: str) -> str:
    """A value that may stand between tags."""
    return value.replace("&", "&amp;").replace("<", "&lt;")
