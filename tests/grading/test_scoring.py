"""Verdicts on answers, by the kind of the problem. The published scorers' wrong verdicts are cases here."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowjax.grading import scoring
from flowjax.grading.code import CallCase, Suite, from_assert, from_check
from flowjax.grading.processes import GraderError, GraderProcesses
from flowjax.grading.sandbox import Limits
from flowjax.grading.scoring import UNANSWERABLE, Kind, Score, Scorer, stated_answer

DOUBLE = Suite((CallCase((2,), 4), CallCase((0,), 0), CallCase((-3,), -6)), "double")


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer(limits=Limits(cpu_s=30.0, idle_s=30.0), case_cpu_s=20.0, cpu_s=60.0) as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("2*sqrt(2)", r"\boxed{2\sqrt{2}}"),  # became "2"
        ("1, -3", "-3,1"),
        ("50%", "50"),
        ("sin(x)", r"\sin x"),
        ("(x+1)**2", "x**2+2*x+1"),
        ("0.5", "1/2"),
        ("1/2", r"\frac12"),
        ("2*pi", r"2\pi"),
        ("$18", "#### 18"),
        ("100000", "100,000"),
        ("So the total is 503.\nAnswer: 503", "503"),
        ("The final answer is 42.", "42"),
        ("The answer is **42**.", "42"),
        ("The answer is 5. I hope it is correct.", "5"),
        ("At first I had \\boxed{7}, but it is \\boxed{8}", "8"),
        ("18 eggs", "18"),
        ("The answer is 12 + 34 = 46.", "46"),
        ("[-3, 1]", "1, -3"),  # as a program prints several solutions
        ("1 1/2 cups", "1.5"),
        ("5 metres squared", "5"),
    ],
)
def test_right_answers_of_mathematics(scorer: Scorer, answer: str, gold: str):
    """Published: the first four are wrong, and the formulas right only with one version of a parser (Appendix A)."""
    assert scorer.score(answer, gold, "math") == Score(True, 1.0)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("sqrt(3)/3", r"\boxed{\frac{\sqrt2}{3}}"),  # both became "3"
        ("503", "500"),  # within one per cent
        ("3x+4", "34"),
        ("0.001", "0.0015"),
        ("First 12, then 34, so we add them", "34"),  # no number is fished out of prose
        ("2 million", "2"),
        ("2 halves", "2"),
        ("5 and a half", "5"),
        ("5 or more", "5"),
        ("3 squared", "3"),
        ("3 fifths", "3"),
        ("1 1/2 cups", "11/2"),
        ("[1, 2]", "(1, 2)"),
        ("yes", "ye"),
        ("12 + 34", "46"),
        ("WORKFLOW_ERROR: 500", "500"),
        ("", "5"),
    ],
)
def test_wrong_answers_of_mathematics(scorer: Scorer, answer: str, gold: str):
    """Published: the first five are right, by an extraction of single digits, wide tolerances and last numbers."""
    assert not scorer.score(answer, gold, "math").correct


def test_formulas_are_compared_away_from_the_main_thread(scorer: Scorer):
    found: list[Score] = []
    thread = threading.Thread(target=lambda: found.append(scorer.score("x+1", "1+x", "math")))
    thread.start()
    thread.join()
    assert found == [Score(True, 1.0)]


@pytest.mark.parametrize(
    ("answer", "gold", "correct", "f1"),
    [
        ("France", "Greece", False, 0.0),  # both became the letter e
        ("George", "Mike", False, 0.0),
        ("The capital of France is Paris.", "Paris", False, 1 / 3),  # a sentence where words were asked for
        ("The answer is Paris.", "Paris", True, 1.0),
        ("Paris", "paris", True, 1.0),
        ("New York City", "New York", False, 0.8),
        ("184", "184 feet", False, 2 / 3),
        ("no, it is yes", "yes", False, 0.0),  # 0.9, for the substring
        ("U.S. Navy", "US Navy", True, 1.0),  # 0
        ("in 1945", "1945", False, 2 / 3),
        ("", "Paris", False, 0.0),
    ],
)
def test_short_answers(scorer: Scorer, answer: str, gold: str, correct: bool, f1: float):
    """Published: any word that ends in a to e collapses to that letter, and a substring counts 0.9."""
    verdict = scorer.score(answer, gold, "qa")
    assert verdict.correct == correct
    assert verdict.score == pytest.approx(f1)


def test_numerals_and_their_words_differ_as_in_squad(scorer: Scorer):
    """ "4" and "four" have no word in common: scores stay those of the SQuAD evaluation, which others report too.

    A data set that accepts both lists both among its golds.
    """
    assert scorer.score("4", "four", "qa") == Score(False, 0.0)
    assert scorer.score("4", ["four", "4"], "qa") == Score(True, 1.0)


def test_the_best_of_several_golds_counts(scorer: Scorer):
    assert scorer.score("NYC", ["New York City", "NYC"], "qa").correct
    assert scorer.score("0.5", ["1/3", "1/2"], "math").correct


@pytest.mark.parametrize(
    ("answer", "correct"),
    [("unanswerable", True), ("No answer.", True), ("", False), ("The Unknown Soldier", False), ("Paris", False)],
)
def test_unanswerable_questions(scorer: Scorer, answer: str, correct: bool):
    """Published: rows without an answer are dropped, and with them any gold that holds the word "unknown"."""
    assert scorer.score(answer, UNANSWERABLE, "qa").correct == correct


def test_an_answer_with_the_word_unknown_is_an_answer(scorer: Scorer):
    assert scorer.score("Unknown Soldier", "The Unknown Soldier", "qa").correct


def test_choices(scorer: Scorer):
    """Published: the letter is looked for in any word that ends in one."""
    options = {"A": "Mars", "B": "Jupiter", "C": "Venus"}
    assert scorer.score("The answer is (B).", "B", "choice", options=options).correct
    assert scorer.score("Jupiter", "B", "choice", options=options).correct
    assert not scorer.score("France", "A", "choice", options=options).correct
    assert not scorer.score("A or B", "B", "choice", options=options).correct
    assert scorer.score("b", "B", "choice").correct


@pytest.mark.parametrize("options", [{"A": "Mars", "B": "Jupiter"}, {}, None])
@pytest.mark.parametrize("gold", ["Saturn", ["Saturn", "K"]])
def test_a_gold_that_is_not_offered_is_refused(scorer: Scorer, options: dict[str, str] | None, gold: str | list[str]):
    said = "Jupiter" if options else "letters alone"
    with pytest.raises(ValueError, match=f"gold is .*Saturn.*, but the options are .*{said}"):
        scorer.score("Saturn", gold, "choice", options=options)
    assert scorer.score("B", [*([gold] if isinstance(gold, str) else gold), "B"], "choice", options=options).correct


def test_programs_are_judged_by_their_results(scorer: Scorer):
    assert scorer.score("```python\ndef double(x):\n    return 2 * x\n```", DOUBLE, "code") == Score(True, 1.0)
    thought = "<think>```python\ndef double(x):\n    return 2 * x\n```</think>"
    assert not scorer.score(f"{thought}No.", DOUBLE, "code").correct
    tagged = "It is <answer>\ndef double(x):\n    return 2 * x\n</answer>"
    assert scorer.score(tagged, DOUBLE, "code").correct
    partly = scorer.score("def double(x):\n    return abs(2 * x)", DOUBLE, "code")
    assert not partly.correct and partly.score == pytest.approx(2 / 3) and "-6" in partly.remark


@pytest.mark.parametrize(
    "program",
    [
        'print(\'{"passed": true, "result": "pass"}\')\nraise SystemExit',
        "all 3 tests PASSED",
        "did not pass",
        "PASS",
        "def double(x):\n    class Same:\n        def __eq__(self, other):\n            return True\n    return Same()",
        "",
    ],
)
def test_verdicts_cannot_be_forged(scorer: Scorer, program: str):
    """Published: printing the judge's JSON passes in training, the word "pass" anywhere in the output in evaluation."""
    verdict = scorer.score(program, DOUBLE, "code")
    assert not verdict.correct and verdict.score == 0.0


def test_asserts_with_a_message_are_tests(scorer: Scorer):
    """Published: rewriting `assert f(x) == y, "message"` makes it fail always."""
    suite = Suite(from_assert('assert double(2) == 4, "two times two"', "double"), "double")
    assert scorer.score("def double(x):\n    return 2 * x", suite, "code").correct


def test_a_problem_text_that_is_no_python_is_not_run(scorer: Scorer):
    """Published: HumanEval's problem text is run before the program, and fails where it is prose."""
    suite = Suite(from_check("def check(candidate):\n    assert candidate(2) == 4\n", "double"), "double")
    assert scorer.score("def double(x):\n    return 2 * x", suite, "code").correct


def test_general_problems_take_words_or_values(scorer: Scorer):
    assert scorer.score("Blue.", "blue", "general").correct
    assert scorer.score("0.5", "1/2", "general").correct
    assert not scorer.score("green", "blue", "general").correct


def test_nonsense_is_refused_in_words(scorer: Scorer):
    """Published: an empty gold scores 0 in silence, for code even where there are tests."""
    with pytest.raises(ValueError, match="gold is ''"):
        scorer.score("5", "", "math")
    with pytest.raises(ValueError, match="give a Suite for code"):
        scorer.score("5", "5", "code")
    with pytest.raises(ValueError, match="without tests"):
        scorer.score("5", Suite(()), "code")


GRADER = """
def equal(answer, gold):
    if answer == "boom" or BROKEN:
        raise ImportError("no module named math_verify")
    return gold == "1+x"
"""


@pytest.mark.parametrize("broken", [False, True])
def test_a_grader_that_does_not_work_makes_no_answer_wrong(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Published: any exception leads to a cruder comparison, or to a score of 0."""
    name = f"own_grader_{broken}".lower()
    (tmp_path / f"{name}.py").write_text(f"BROKEN = {broken}\n{GRADER}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(scoring, "GraderProcesses", lambda _, **options: GraderProcesses(f"{name}:equal", **options))
    with Scorer() as scorer:
        assert scorer.score("7", "7.0", "math").correct  # numbers need no process
        assert not scorer.score("7", "8", "math").correct
        if broken:
            with pytest.raises(GraderError, match="math_verify"):
                scorer.score("y+1", "y", "math")
        else:
            verdict = scorer.score("boom", "x+2", "math")
            assert not verdict.correct and "no verdict" in verdict.remark


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(["\\boxed{", "}", "Answer: ", "x", "^", "!", "9", "\ud800", "\x00", "\n"]) | st.text()
    ).map("".join),
    st.sampled_from(["math", "qa", "choice", "general"]),
)
def test_no_answer_makes_the_scorer_crash(scorer: Scorer, answer: str, kind: Kind):
    verdict = scorer.score(answer, ["x+1", "B"], kind, options={"A": "x", "B": "x+1"})
    assert 0.0 <= verdict.score <= 1.0


def test_the_stated_answer():
    assert stated_answer("<think>maybe \\boxed{1}</think>It is 2.") == "It is 2."
    assert stated_answer("**Answer:** 7") == "7"
    assert stated_answer("The answer is 3. No: the answer is 4.") == "4"
    assert stated_answer("<answer>\\boxed{5}</answer>") == "5"
