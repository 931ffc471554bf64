"""Actions on one line, for models that know few words.

    add Custom        add [ Custom , Custom ]        add Verify ? done : Revise        add ( Review -> Revise ) * 2
    add Custom at 0   add Custom into n4.true        add Custom into n4.true at 0
    delete n3         modify n2 Programmer           modify n2 @small                  modify n5 * 3
    prompt n2 Name the units.                        finish                            finish 42

What `add` takes is the text form of workflows; spaces are free in it.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from flowjax.canvas.actions_grammar import MAX_POSITION, PLACE_NAME, GrammarError
from flowjax.canvas.actions_kinds import Action, Add, Delete, Finish, Modify, SetPrompt, Unreadable
from flowjax.canvas.actions_reading import after_thinking
from flowjax.canvas.checks import nearest
from flowjax.canvas.graph import Call, WorkflowError
from flowjax.canvas.text import parse_piece, show
from flowjax.canvas.text_tokens import BACKEND_NAME, NAME, tokens

WORDS = ("add", "delete", "modify", "prompt", "finish")
_NUMBER = re.compile(r"[0-9]{1,3}")


def parse_compact(text: str) -> Action | Unreadable:
    """The action of a response that is one line, after thinking if there is any."""
    try:
        return _read(after_thinking(text).strip())
    except (GrammarError, WorkflowError) as error:
        return Unreadable(str(error))


def show_compact(action: Action, *, spaced: bool = False) -> str:
    """The action on one line. `spaced` puts white space around every sign, so that each is a word of its own."""
    match action:
        case Add(piece, into, position):
            place = (f" into {into}" if into else "") + (f" at {position}" if position is not None else "")
            text = show(piece)
            return f"add {' '.join(_words(text)) if spaced else text}{place}"
        case Delete(target):
            return f"delete {target}"
        case Modify(target, operator, backend, count, prompt):
            what = show(Call(operator, prompt, backend)) if operator else f"@{backend}" if backend else f"* {count}"
            return f"modify {target} {what}"
        case SetPrompt(target, prompt):
            return f"prompt {target} {' '.join(prompt.split())}"
        case Finish(answer):
            return f"finish {' '.join(answer.split())}".strip()


def _words(text: str) -> Sequence[str]:
    found = tokens(text)
    return [text[token.start : after.start].strip() for token, after in pairwise(found)]


def _read(line: str) -> Action:
    word, *rest = line.split(maxsplit=1) or [""]
    argument = rest[0] if rest else ""
    if "\n" in line:
        raise GrammarError("There are several lines: write one action on one line.")
    match word:
        case "add":
            return _add(argument)
        case "delete":
            return Delete(_id("delete", argument))
        case "modify":
            return _modify(argument)
        case "prompt":
            target, _, prompt = argument.partition(" ")
            if not prompt.strip():
                raise GrammarError("`prompt` takes a node's id and an instruction: `prompt n2 Name the units.`")
            return SetPrompt(_id("prompt", target), prompt.strip())
        case "finish":
            return Finish(argument)
    near = nearest(word, WORDS)
    guess = f"did you mean `{near}`?" if near else f"start with {', '.join(WORDS[:-1])} or {WORDS[-1]}."
    raise GrammarError(f"There is no action `{word[:60]}`: {guess}" if word else f"The response is empty: {guess}")


def _add(argument: str) -> Add:
    into, position = "", None
    words = argument.rsplit(maxsplit=2)
    if len(words) == 3 and words[1] == "at" and '"' not in words[2]:
        if not _NUMBER.fullmatch(words[2]):
            raise GrammarError(f"`at` takes a number from 0 to {MAX_POSITION}, not `{words[2][:60]}`.")
        argument, position = words[0], int(words[2])
        words = argument.rsplit(maxsplit=2)
    if len(words) == 3 and words[1] == "into" and '"' not in words[2]:
        if not PLACE_NAME.fullmatch(words[2]):
            raise GrammarError(f"`into` takes a node's id, such as n3, or n3.true, not `{words[2][:60]}`.")
        argument, into = words[0], words[2]
    return Add(parse_piece(argument), into, position)


def _modify(argument: str) -> Modify:
    target, _, what = argument.partition(" ")
    target, what = _id("modify", target), what.strip()
    if what.startswith("@") and BACKEND_NAME.fullmatch(what[1:]):
        return Modify(target, backend=what[1:])
    if what.startswith("*") and _NUMBER.fullmatch(what[1:].strip()):
        return Modify(target, count=int(what[1:]))
    piece = parse_piece(what) if what and what[0] not in "@*" else None
    if not isinstance(piece, Call) or piece.inputs or piece.id:
        raise GrammarError(
            "`modify` takes a node's id and an operator, a backend or a count: `modify n2 Programmer`, "
            "`modify n2 @small`, `modify n5 * 3`."
        )
    return Modify(target, piece.operator, piece.backend, prompt=piece.instruction)


def _id(word: str, argument: str) -> str:
    if not NAME.fullmatch(argument):
        raise GrammarError(f"`{word}` takes a node's id, such as n3, not `{argument[:60]}`.")
    return argument
