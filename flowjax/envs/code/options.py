"""Options of the code world: keyword arguments of `make` and `tasks`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowjax.envs.base import WorldError
from flowjax.envs.code.generated import OPERATIONS
from flowjax.envs.options import build_options
from flowjax.grading.code import JUDGE_LIMITS
from flowjax.grading.sandbox import Limits


@dataclass(frozen=True, slots=True)
class Options:
    """`kinds`, `steps` and `cases` shape generated problems; `path` (and `held_out_path`) name files of real ones.

    `case_s` bounds one test and `wall_s` all tests of one program, both in seconds; `public_tests` tests are shown.
    `allow_no_isolation` lets programs run where there is no isolation but resource limits.
    """

    path: str = ""
    held_out_path: str = ""
    kinds: Sequence[str] = ("int", "list", "text")
    steps: int = 3
    cases: int = 8
    public_tests: int = 2
    attempts: int = 1
    case_s: float = 3.0
    wall_s: float = 8.0
    memory_mb: int = 512
    packages: Sequence[str] = ()
    allow_no_isolation: bool = False

    def __post_init__(self):
        unknown = [kind for kind in self.kinds if kind not in OPERATIONS]
        if unknown or not self.kinds:
            raise WorldError(f"env.options kinds={list(self.kinds)}: give some of {', '.join(OPERATIONS)}")
        for name, least in (("steps", 1), ("cases", 1), ("public_tests", 0), ("attempts", 1), ("memory_mb", 64)):
            if getattr(self, name) < least:
                raise WorldError(f"env.options {name}={getattr(self, name)}: give {least} or more")
        if not 0 < self.case_s <= self.wall_s:
            raise WorldError(
                f"env.options case_s={self.case_s}, wall_s={self.wall_s}: one test cannot take longer than all of "
                "them; give 0 < case_s <= wall_s"
            )
        if self.held_out_path and not self.path:
            raise WorldError(f"env.options held_out_path={self.held_out_path!r} needs path, the training problems")

    def limits(self) -> Limits:
        return replace(JUDGE_LIMITS, wall_s=self.wall_s, cpu_s=self.wall_s, memory_bytes=self.memory_mb << 20)


def read_options(options: Mapping[str, Any]) -> Options:
    """Options of keyword arguments; see `build_options`."""
    return build_options(Options, options, "the code world")
