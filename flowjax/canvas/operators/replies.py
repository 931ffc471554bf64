"""What is read out of a backend's replies: answers, programs, and small JSON objects. Nothing is guessed.

A reply that cannot be read is an `OperatorError` in words: no verdict, vote or answer is made of a chance substring.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowjax.canvas.backends.base import Message
from flowjax.canvas.operators.base import Context, OperatorError
from flowjax.canvas.operators.prompts import solution_form
from flowjax.canvas.values import Problem, Value
from flowjax.grading.code_asserts import parse_quietly
from flowjax.grading.math import last_boxed
from flowjax.grading.multiple_choice import chosen

_ANSWER = re.compile(
    r"^[ \t>*_#-]{0,16}(?:final )?answer[*_]{0,4}[ ]?:[*_]{0,4}[ \t]*(.*)$", re.IGNORECASE | re.MULTILINE
)
_FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_ESCAPE = re.compile(r"\\\\|\\(?=[bfr][a-zA-Z])|\\(?![\"\\/bfnrtu])")
_SHOWN_CHARACTERS = 200


def visible(reply: str) -> str:
    """The reply without the thoughts that some models put before it."""
    return reply.rpartition("</think>")[2].strip()


def answer_of(reply: str) -> str | None:
    r"""The answer on the last `Answer:` line, else in the last `\boxed{}`; None where there is neither."""
    text = visible(reply)
    if found := list(_ANSWER.finditer(text)):
        last = found[-1]
        answer = last.group(1).strip() or text[last.end() :].strip()
        if answer := _undecorated(answer):
            return answer
    return last_boxed(text)


def program_of(reply: str) -> str | None:
    """The last fenced block, or the whole reply where it is a program itself; None where there is none."""
    text = visible(reply)
    if blocks := _FENCED.findall(text):
        return blocks[-1].strip("\n") or None
    module = parse_quietly(text)
    is_program = module is not None and any("=" in text or hasattr(node, "body") for node in module.body)
    return text if is_program else None


def solution(reply: str, problem: Problem) -> dict[str, Value]:
    """`code` for a code problem, else `thought` and `answer`, of a reply in the form of `prompts.solution_form`.

    Raises:
        OperatorError: the reply has neither an answer line nor is it one line.
    """
    text = visible(reply)
    if problem.kind == "code":
        if (program := program_of(text)) is None:
            raise OperatorError(f"the reply has no program in a ```python block: {_short(text)}")
        return {"code": program}
    answer = answer_of(text)
    if problem.kind == "choice" and (letter := chosen(answer or text, problem.options)):
        answer = letter
    if answer is None:
        if not text or "\n" in text:
            raise OperatorError(f"the reply has no line that begins with Answer: {_short(text)}")
        answer = text
    return {"thought": text, "answer": answer}


def object_schema(**types: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with exactly these fields."""
    return {"type": "object", "properties": types, "required": list(types), "additionalProperties": False}


async def ask_solution(context: Context, messages: Sequence[Message]) -> dict[str, Value]:
    """The backend's solution; it is asked a second time where the first reply cannot be read.

    Raises:
        OperatorError: neither reply could be read.
    """
    reply = await context.ask(messages)
    try:
        return solution(reply, context.problem)
    except OperatorError as error:
        again = [*messages, *_reminder(reply, f"{error}. {solution_form(context.problem)}")]
        return solution(await context.ask(again), context.problem)


async def ask_object(context: Context, messages: Sequence[Message], schema: Mapping[str, Any], *, seed: int = 0):
    """The object that the backend replies with; it is asked a second time where the first reply cannot be read.

    Raises:
        OperatorError: neither reply could be read.
    """
    reply = await context.ask(messages, seed=seed, schema=schema)
    try:
        return object_of(reply, schema)
    except OperatorError as error:
        again = [*messages, *_reminder(reply, f"{error}. Reply with the JSON object alone.")]
        return object_of(await context.ask(again, seed=seed, schema=schema), schema)


def object_of(reply: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The one JSON object in a reply that has the schema's fields, in their types.

    Raises:
        OperatorError: there is none, or there are several that differ.
    """
    found = [value for value in _objects(visible(reply)) if _follows(value, schema)]
    names = ", ".join(f"{name} ({_type_name(kind)})" for name, kind in schema["properties"].items())
    if not found:
        raise OperatorError(f"the reply holds no JSON object with {names}: {_short(reply)}")
    if any(value != found[0] for value in found):
        raise OperatorError(f"the reply holds several JSON objects with {names} that differ: {_short(reply)}")
    return found[0]


def object_form(schema: Mapping[str, Any]) -> str:
    """The form that asks for such an object."""
    names = ", ".join(f'"{name}": <{_type_name(kind)}>' for name, kind in schema["properties"].items())
    return f"One JSON object and nothing else: {{{names}}}"


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects in a text, in their order."""
    # LaTeX in JSON is seldom escaped: \frac would be a form feed and "rac".
    text = _ESCAPE.sub(r"\\\\", text)
    decoder, place = json.JSONDecoder(strict=False), text.find("{")
    while place >= 0:
        end = place + 1
        try:
            value, end = decoder.raw_decode(text, place)
            yield value
        except (ValueError, RecursionError):
            pass
        place = text.find("{", end)


def _follows(value: dict[str, Any], schema: Mapping[str, Any]) -> bool:
    types = schema["properties"]
    return types.keys() <= value.keys() and all(_is(value[name], kind) for name, kind in types.items())


def _is(value: Any, kind: Mapping[str, Any]) -> bool:
    if "enum" in kind:
        return isinstance(value, str) and value in kind["enum"]
    match kind["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case _:
            return isinstance(value, str)


def _type_name(kind: Mapping[str, Any]) -> str:
    if "enum" in kind:
        return " or ".join(kind["enum"])
    return {"boolean": "true or false", "array": "list of strings"}.get(kind["type"], "string")


def _undecorated(text: str) -> str:
    text = text.strip().strip("*_").strip()
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] == "`" else text


def _reminder(reply: str, text: str) -> list[Message]:
    reminder = {"role": "user", "content": f"That could not be read: {text}"}
    return [{"role": "assistant", "content": reply}, reminder]


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...")
