"""Programs and answers judged once per process: many episodes of a group meet the same ones."""

import functools
import threading
from collections.abc import Iterable
from typing import Any

from flowjax.canvas.context import Sandbox
from flowjax.grading.code import Suite, Verdict
from flowjax.grading.sandbox import Result
from flowjax.grading.scoring import Kind, Scorer
from flowjax.grading.scoring import Verdict as Score

_KEPT = 20_000
_results: dict[Any, Any] = {}
_writing = threading.Lock()


class RememberingSandbox(Sandbox):
    """Runs each program once on each input. What a time limit may have cut short is not kept."""

    def run(self, program: str, stdin: bytes) -> Result:
        """See `Sandbox`."""
        key = (program, stdin, self.limits)
        if (known := _results.get(key)) is not None:
            return known
        result = super().run(program, stdin)
        return _keep(key, result) if result.status in ("ok", "error") else result

    def judge(self, program: str, suite: Suite) -> Verdict:
        """See `Sandbox`."""
        key = (program, repr(suite), self.judge_limits)
        if (known := _results.get(key)) is not None:
            return known
        verdict = super().judge(program, suite)
        return verdict if _cut_short(verdict.remarks) else _keep(key, verdict)


def scored(
    answer: str, gold: tuple[str, ...] | Suite, kind: Kind, *, allow_none: bool, options: dict[str, str]
) -> Score:
    """The verdict on an answer, "" being wrong without a look."""
    if not answer.strip():
        return Score(False, 0.0)
    key = (answer, gold if isinstance(gold, tuple) else repr(gold), kind, tuple(options.items()))
    if (known := _results.get(key)) is not None:
        return known
    score = _scorer(allow_none).score(answer, gold, kind, options=options or None)
    return score if _cut_short((score.remark,)) else _keep(key, score)


@functools.cache
def _scorer(allow_none: bool) -> Scorer:
    return Scorer(allow_none=allow_none)


def _keep(key: Any, result: Any) -> Any:
    with _writing:
        while len(_results) >= _KEPT:
            del _results[next(iter(_results))]
        _results[key] = result
    return result


def _cut_short(remarks: Iterable[str]) -> bool:
    """Whether a time limit, or a grader that did not answer, had a part in it."""
    return any("time" in remark or "no verdict" in remark for remark in remarks)
