"""The score of an answer, by the kind of its problem, as the canvas world grades.

    with Scorer() as scorer:
        scorer.score("2*sqrt(2)", r"\\boxed{2\\sqrt{2}}", "math")          # Score(correct=True, score=1.0)
        scorer.score("New York", ["New York City", "NYC"], "qa")          # Score(correct=False, score=0.8)
        scorer.score(program, Suite(cases, "f"), "code")                  # hidden tests, in the sandbox

Only a stated answer counts: the last box, answer tag or `Answer:` line, the words after the last "the answer is", or
else the whole text. No number is searched for in prose, no claim in a program's output makes it right, and no model is
asked as a judge.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from flowjax.grading.answers import (
    chosen,
    exact_match,
    f1_score,
    last_answer,
    last_boxed,
    normalise_answer,
    right_choice,
    without_thoughts,
)
from flowjax.grading.code import CASE_CPU_S, JUDGE_LIMITS, Suite, fenced_blocks, judge
from flowjax.grading.math import equal, is_number, plain_form
from flowjax.grading.processes import GraderError, GraderProcesses
from flowjax.grading.sandbox import Limits

Kind = Literal["math", "qa", "code", "choice", "general"]

# Gold answer of SQuAD 2.0's questions that have no answer, and the answers that count as saying so.
UNANSWERABLE = "unanswerable"
_SAYS_UNANSWERABLE = {"unanswerable", "no answer", "not answerable", "question is unanswerable", "cannot be answered"}
_LETTERS = {chr(code): "" for code in range(ord("A"), ord("K"))}
_LINE = re.compile(
    r"^[ \t>*_#-]{0,16}(?:final )?answer[*_]{0,4}[ ]?:[*_]{0,4}[ \t]*(\S.*)$", re.IGNORECASE | re.MULTILINE
)
_DECLARED = re.compile(r"\banswer is\b:?", re.IGNORECASE)
_NEXT_SENTENCE = re.compile(r"(?<=[\d*)$])\.\s+(?=[A-Z][a-z']*\s)")  # behind a number, not `St. Louis`
_LIST = re.compile(r"\[([^\[\]]*,[^\[\]]*)\]")


@dataclass(frozen=True, slots=True)
class Score:
    """`correct` is yes or no; `score`, 0 to 1, is the share of passed tests, the F1 of words, or 1 if correct.

    `remark` is the reason for a wrong answer, where that is more than that the answer differs.
    """

    correct: bool
    score: float
    remark: str = ""


class Scorer:
    """Grades from any thread. A context manager.

    Formulas can be compared only in a main thread, so that is done in processes of their own. Programs run in the
    sandbox, by `flowjax.grading.code.judge`. `cpu_s` bounds the processor time of one comparison of formulas.
    """

    def __init__(
        self,
        *,
        cpu_s: float = 15.0,
        limits: Limits = JUDGE_LIMITS,
        case_cpu_s: float = CASE_CPU_S,
        allow_none: bool = False,
        packages: Sequence[str] = (),
    ):
        self._formulas = GraderProcesses("flowjax.grading.math:equal", cpu_s=cpu_s)
        self._limits, self._case_cpu_s, self._packages = limits, case_cpu_s, packages
        self._allow_none = allow_none

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def close(self) -> None:
        """End the processes."""
        self._formulas.close()

    def score(
        self, answer: str, gold: str | Sequence[str] | Suite, kind: Kind, *, options: Mapping[str, str] | None = None
    ) -> Score:
        """The verdict on an answer. `gold` may be several answers, of which the best counts; for code it is the tests.

        Raises:
            ValueError: `gold` is empty, of a wrong type for the kind, or none of the `options` (by default letters).
            GraderError: formulas cannot be compared here at all, for example because math-verify is not installed.
            NoProcessorError: this machine is too busy to compare formulas, or to run programs.
            IsolationError: programs cannot be isolated here, and nobody has accepted that.
        """
        if isinstance(gold, Suite) != (kind == "code"):
            raise ValueError(f"gold of a {kind} problem is a {type(gold).__name__}: give a Suite for code, else text")
        answer = answer.encode(errors="replace").decode()  # half of a surrogate pair cannot be sent to a process
        if isinstance(gold, Suite):
            return self._code(answer, gold)
        golds = [gold] if isinstance(gold, str) else list(gold)
        if not any(text.strip() for text in golds):
            raise ValueError(f"gold is {gold!r}: give an answer, {UNANSWERABLE!r} where there is none")
        match kind:
            case "qa":
                return words_verdict(answer, golds)
            case "choice":
                stated, offered = stated_answer(answer), options or _LETTERS
                if not any(chosen(text, offered) for text in golds):  # nobody could be right
                    said = dict(options) if options else "letters alone"
                    raise ValueError(f"gold is {gold!r}, but the options are {said}: give a gold of them, or others")
                right = any(right_choice(stated, text, offered) for text in golds)
                return Score(right, float(right))
            case "general":
                words = words_verdict(answer, golds)
                return words if words.correct else self._math(answer, golds)
            case _:
                return self._math(answer, golds)

    def _math(self, answer: str, golds: Sequence[str]) -> Score:
        stated, remark = stated_answer(answer), ""
        for gold in golds:
            try:
                if self._equal(_as_printed(stated, gold), gold):
                    return Score(True, 1.0)
            except GraderError as error:  # the fault of this answer, or of the installation? A trial call tells
                if not self._formulas.call("x+1", "1+x"):
                    raise
                remark = f"no verdict: {error}"
        return Score(False, 0.0, remark)

    def _equal(self, answer: str, gold: str) -> bool:
        """Compare in a process where formulas may have to be computed; numbers are compared here."""
        if is_number(gold):
            return equal(answer, gold)
        return plain_form(answer) == plain_form(gold) or bool(self._formulas.call(answer, gold))

    def _code(self, answer: str, suite: Suite) -> Score:
        if not suite.cases:
            raise ValueError("gold is a Suite without tests: leave the problem out")
        if "think>" in answer:  # else untouched: `without_thoughts` strips blanks, which indent a program's first line
            answer = without_thoughts(answer)
        blocks = fenced_blocks(answer)
        verdict = judge(
            blocks[-1] if blocks else last_answer(answer) or answer,
            suite,
            self._limits,
            case_cpu_s=self._case_cpu_s,
            allow_none=self._allow_none,
            packages=self._packages,
        )
        remark = next((remark for remark in verdict.remarks if remark), "")
        return Score(verdict.success, verdict.score, remark)


def words_verdict(answer: str, golds: Sequence[str]) -> Score:
    """Exact match and F1 as in SQuAD; the right answer to an unanswerable question says so, and is not empty."""
    stated = stated_answer(answer)
    if UNANSWERABLE in golds:
        says_so = normalise_answer(stated) in _SAYS_UNANSWERABLE
        return Score(says_so, float(says_so))
    return Score(exact_match(stated, golds), f1_score(stated, golds))


def stated_answer(text: str) -> str:
    r"""The answer that a text states: the last `\boxed{}`, `<answer>` pair, `Answer:` line or "answer is"; else all."""
    text = without_thoughts(text)
    boxed = last_boxed(text)
    if boxed is None and (tagged := last_answer(text)) is not None:
        boxed = last_boxed(tagged) or tagged
    if boxed is not None:
        return boxed
    found = _LINE.findall(text)
    if not found:
        found = [text[match.end() :].strip().partition("\n")[0] for match in list(_DECLARED.finditer(text))[-1:]]
    # Strip emphasis and full stops around it (`**42**.`), and the next sentence after a declared answer.
    return (_NEXT_SENTENCE.split(found[-1].strip().lstrip("*_"))[0].rstrip("*_. ") if found else "") or text


def _as_printed(answer: str, gold: str) -> str:
    """The answer without the brackets of a printed list, where the gold has none."""
    answer = answer.strip()
    if (printed := _LIST.fullmatch(answer)) and not set("[](){}") & set(gold):
        return printed[1]
    return answer
