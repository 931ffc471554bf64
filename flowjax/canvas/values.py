"""What flows between operators: named fields of a few kinds, and the problem that a workflow is run on.

Fields that operators share by name; an operator may add others of its own:

    problem      text   the problem's text, always there
    plan         text   how to go about it                          subproblems  texts  what to solve first
    answer       text   the newest answer                           code         code   the newest program
    candidates   texts  one answer (program) per branch             thought      text   the reasoning behind the answer
    passed       flag   what the newest check found                 feedback     text   why, for whoever revises
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Value = str | bool | tuple[str, ...]
State = Mapping[str, Value]  # field name -> newest value
Kind = Literal["text", "code", "flag", "texts"]  # the Python types: str, str, bool, tuple of str
ProblemKind = Literal["math", "qa", "code", "choice", "general"]


@dataclass(frozen=True, slots=True)
class Field:
    """An input or an output of an operator. An operator fails, in words, where a required input is missing."""

    name: str
    kind: Kind = "text"
    description: str = ""
    required: bool = True


@dataclass(frozen=True, slots=True)
class Problem:
    """What a workflow may see of a task. The right answer and hidden tests are not in it.

    `options` are those of a multiple choice, letter -> text; `public_tests` are assert statements that operators may
    run, and `entry_point` the function that they call.
    """

    text: str
    kind: ProblemKind = "general"
    context: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    entry_point: str = ""
    public_tests: tuple[str, ...] = ()
