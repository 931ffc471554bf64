"""Multiple choice: what is a list of options, and which of them a reply chooses."""

import pytest

from flowjax.grading.answers import chosen, options_of, right_choice
from flowjax.grading.scoring import stated_answer

PLANETS = "Which planet is the largest?\nA. Mars\nB. Jupiter\nC) Venus\n(D) Earth"
OPTIONS = {"A": "Mars", "B": "Jupiter", "C": "Venus", "D": "Earth"}


def test_options_are_found_in_lists():
    assert options_of(PLANETS) == OPTIONS
    assert options_of("Choose: A. red B. green") == {"A": "red", "B": "green"}
    assert options_of("What is heavier? (A) iron (B) cork") == {"A": "iron", "B": "cork"}


@pytest.mark.parametrize(
    "question",
    [  # all but the last two are multiple choice for the published detector
        "f(a) = a + 1. What is f(2)?",
        "Choose two balls from ten. In how many ways?",
        "In how many ways can one choose the apples?",
        "Find the angle (A) of the triangle.",
        "We go on with plan a. Next, what is 2+3?",
        "def f(a):\n    return a",
        "What is 2+2?",
    ],
)
def test_questions_without_options_have_none(question: str):
    assert options_of(question) == {}


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("**B**.", "B"),
        (r"It is large, so \boxed{B}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"At first I think A. But \boxed{\textbf{(B)}}", "B"),
        (r"\boxed{\mathrm{B}}", "B"),
        ("A, B and C are wrong", None),
        ("A, B", None),
        ("<answer>B</answer>", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B).", "B"),
        ("At first A. But the correct answer is: B", "B"),
        ("B. Jupiter", "B"),
        ("Jupiter", "B"),
        ("jupiter.", "B"),
        ("The answer is B, since option A is too small.", "B"),
        ("Answer: B\nOption A is wrong.", "B"),
        ("I choose B. Choice C is wrong.", "B"),
        ("Option A is small. I pick option B", "B"),
        ("Option B is the correct one, choice A is wrong", "B"),
        ("My choice: **B**, not option C", "B"),
        ("The correct answer is: I think B", "B"),
        ("Option B", "B"),
        ("Option B: Jupiter", "B"),
        ("Choice C is wrong.", None),
        ("Option A is small and option D is smaller.", None),
        ("I choose a planet", None),
        ("The answer is B since option A is too small.", "B"),
        ("The answer" + " " * 20_000 + "is B", "B"),
        ("The answer is E", None),
        ("The answer is a large planet", None),
        ("France", None),
        ("George", None),
        ("The capital of France is Paris.", None),
        ("A planet", None),
        ("Answer: A planet", None),
        ("The answer is A large planet.", None),
        ("I think I cannot say", None),
        ("The answer is A because it is small", "A"),
        ("I choose A over B", "A"),
        ("I pick option A to be safe", "A"),
        ("Answer: A\nJupiter is larger.", "A"),
        ("the Earth", "D"),
        ("", None),
    ],
)
def test_the_chosen_letter(reply: str, letter: str | None):
    assert chosen(reply, OPTIONS) == letter
    assert chosen(stated_answer(reply), OPTIONS) == letter  # as it is graded


@pytest.mark.parametrize(
    ("reply", "letter"),
    [("Answer: A cat", "B"), ("The answer is a cat.", "B"), ("A dog", "C"), ("A", "A"), ("Answer: (A) cat", "A")],
)
def test_an_article_is_no_letter(reply: str, letter: str):
    assert chosen(stated_answer(reply), {"A": "horse", "B": "cat", "C": "a dog"}) == letter
    assert chosen(reply, {"A": "horse", "B": "cat", "C": "a dog"}) in (letter, None)


def test_letters_that_are_not_offered_are_passed_over():
    assert chosen("The answer is B. Is the answer E?", OPTIONS) == "B"


def test_no_word_collapses_to_a_letter():
    for answer, gold in [("France", "Greece"), ("George", "Mike"), ("Mars", "B"), ("A", "Jupiter")]:
        assert not right_choice(answer, gold, OPTIONS)
    assert right_choice("B", "Jupiter", OPTIONS) and right_choice("Jupiter", "(B)", OPTIONS)
