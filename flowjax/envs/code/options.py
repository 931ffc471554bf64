"""Options of the code world: keyword arguments of `make` and `tasks`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowjax.envs.base import WorldError
from flowjax.envs.code.generated import OPERATIONS
from flowjax.envs.options import build_options
from flowjax.grading.code import CASE_CPU_S, JUDGE_LIMITS
from flowjax.grading.sandbox import Limits


@dataclass(frozen=True, slots=True)
class Options:
    """`kinds`, `steps` and `cases` shape generated problems; `path` (and `held_out_path`) name files of real ones.

    `case_cpu_s` bounds one test and `cpu_s` all tests of one program, in seconds on a processor; `idle_s` is how long
    they may be asleep. `wall_guard_s` bounds what waits for a processor, which makes no verdict. `public_tests` tests
    are shown.
    `allow_no_isolation` lets programs run where there is no isolation but resource limits.
    """

    path: str = ""
    held_out_path: str = ""
    kinds: Sequence[str] = ("int", "list", "text")
    steps: int = 3
    cases: int = 8
    public_tests: int = 2
    attempts: int = 1
    case_cpu_s: float = CASE_CPU_S
    cpu_s: float = JUDGE_LIMITS.cpu_s
    idle_s: float = JUDGE_LIMITS.idle_s
    wall_guard_s: float = JUDGE_LIMITS.wall_guard_s
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
        if not 0 < self.case_cpu_s <= self.cpu_s:
            raise WorldError(
                f"env.options case_cpu_s={self.case_cpu_s}, cpu_s={self.cpu_s}: one test cannot take longer than all "
                "of them; give 0 < case_cpu_s <= cpu_s"
            )
        if not self.idle_s > 0 or not self.cpu_s + self.idle_s <= self.wall_guard_s:
            raise WorldError(
                f"env.options cpu_s={self.cpu_s}, idle_s={self.idle_s}, wall_guard_s={self.wall_guard_s}: the wall "
                "clock only guards; give idle_s above 0 and wall_guard_s of cpu_s + idle_s or more (some times as much)"
            )
        if self.held_out_path and not self.path:
            raise WorldError(f"env.options held_out_path={self.held_out_path!r} needs path, the training problems")

    def limits(self) -> Limits:
        return replace(
            JUDGE_LIMITS,
            cpu_s=self.cpu_s,
            idle_s=self.idle_s,
            wall_guard_s=self.wall_guard_s,
            memory_bytes=self.memory_mb << 20,
        )


def read_options(options: Mapping[str, Any]) -> Options:
    """Options of keyword arguments; see `build_options`."""
    return build_options(Options, options, "the code world")
