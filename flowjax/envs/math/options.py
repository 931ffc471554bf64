"""Options of the math world: keyword arguments of `make` and `tasks`."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flowjax.envs.base import NotReady, WorldError
from flowjax.envs.math.generated import Arithmetic
from flowjax.envs.options import build_options

Rule = Literal["boxed", "last_number", "whole", "anywhere"]


@dataclass(frozen=True)
class Options(Arithmetic):
    """Those of generated problems, and further ones.

    `path` names a file or folder with problems ("": arithmetic is generated). `calculator` is the number of
    calculations that an episode may hold; 0 makes it a single turn. `answer` says where the answer of a single turn
    stands in the reply: boxed, last_number, whole, or anywhere, which hands the whole reply to math-verify as the
    published recipe does.
    """

    path: str = ""
    calculator: int = 0
    answer: Rule = "boxed"

    def __post_init__(self):
        super().__post_init__()
        if self.answer not in get_args(Rule):
            raise WorldError(f"env.options answer={self.answer!r}: give one of {', '.join(get_args(Rule))}")
        if self.calculator < 0:
            raise WorldError(
                f"env.options calculator={self.calculator}: give the most calculations of an episode, 0 for none"
            )
        if (self.path or self.answer == "anywhere") and importlib.util.find_spec("math_verify") is None:
            raise NotReady('answers that are formulas need math-verify: pip install -e ".[math]"')


def read_options(options: Mapping[str, Any]) -> Options:
    """Options of keyword arguments; see `build_options`."""
    return build_options(Options, options, "math")
