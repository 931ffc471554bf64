"""The words of a workflow's text form, each with its place for error messages. Linear in the text's length."""

import json
import re
from dataclasses import dataclass

from flowjax.canvas.graph import WorkflowError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # of operators, fields and ids
BACKEND_NAME = re.compile(r"[A-Za-z0-9_]+(?:[./-][A-Za-z0-9_]+)*")  # any other backend's name is written as a string

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<arrow>->)
      | (?P<mark>[\[\](){},?:*=])
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<backend>@(?:[A-Za-z0-9_]+(?:[./-][A-Za-z0-9_]+)*)?)
      | (?P<id>\#[A-Za-z_][A-Za-z0-9_]*)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)?)
      | (?P<number>[0-9]+)
      | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_SPACE = re.compile(r"\s*", re.ASCII)
_EXCERPT_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Token:
    """A word of the text. `kind` is a group's name above, or the mark itself."""

    kind: str
    text: str
    start: int


def tokens(source: str) -> list[Token]:
    """The words, with one of kind `end` last.

    Raises:
        WorkflowError: something in the text is no word.
    """
    found, position = [], 0
    while True:
        match = _TOKEN.match(source, position)
        if match is None:
            space = _SPACE.match(source, position)
            position = space.end() if space else position
            raise error(source, position, _remedy(source[position]))
        kind, text = str(match.lastgroup), match[str(match.lastgroup)]
        found.append(Token(text if kind == "mark" else kind, text, match.start(kind)))
        if kind == "end":
            return found
        position = match.end()


def unquoted(source: str, token: Token) -> str:
    """What a string says; line breaks may stand in it as they are.

    Raises:
        WorkflowError: a backslash with no meaning, or half of a surrogate pair.
    """
    try:
        text = json.loads(token.text, strict=False)
        text.encode()
    except json.JSONDecodeError as bad:
        remedy = f'{bad.msg}: write strings as in JSON, \\" for a quote and \\\\ for a backslash'
        raise error(source, token.start + bad.pos, remedy) from bad
    except UnicodeEncodeError as bad:
        raise error(source, token.start, "the string has half of a surrogate pair: write the character itself") from bad
    return text


def error(source: str, position: int, what: str) -> WorkflowError:
    """The error, with where it is."""
    rest = source[position : position + _EXCERPT_CHARACTERS]
    where = f"before `{rest}`" if rest else "at the end"
    return WorkflowError(f"Character {position + 1}, {where}: {what}.")


def _remedy(character: str) -> str:
    if character == '"':
        return 'the string has no end: close it with `"`'
    if character in "→⇒>-":
        return "steps are joined with `->`"
    if character == "#":
        return "after `#` comes an id, such as `#n3`"
    return (
        f"`{character}` has no meaning here: write operators joined with `->`, `[A, B]`, `C ? T : E` and `(A -> B) * 2`"
    )
