"""Short answers: normalisation, exact match, F1."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowjax.grading.answers import augmented_f1, chosen, exact_match, f1_score, last_answer, normalise_answer

TEXT = st.text(alphabet="abthen .,'-?!AÉ\n", max_size=30)


def plain_words(text: str) -> list[str]:
    """SQuAD's normalisation, a character and a word at a time."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    words = [word for word in re.split(r"(\W+)", kept) if word not in ("a", "an", "the")]
    return "".join(f" {word} " if not word.strip() else word for word in words).split()


def plain_f1(said: list[str], gold: list[str]) -> float:
    left, common = list(gold), 0
    for word in said:
        if word in left:
            left.remove(word)
            common += 1
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(gold)
    return 2 * precision * recall / (precision + recall)


@given(TEXT)
def test_normalisation_equals_a_slow_one(text: str):
    assert normalise_answer(text).split() == plain_words(text)
    assert normalise_answer(normalise_answer(text)) == normalise_answer(text) or "the" in text.lower()


@given(TEXT, st.lists(TEXT, max_size=3))
def test_scores_equal_slow_ones(prediction: str, answers: list[str]):
    said = plain_words(prediction)
    assert exact_match(prediction, answers) == (bool(said) and any(said == plain_words(answer) for answer in answers))
    expected = max((plain_f1(said, plain_words(answer)) for answer in answers), default=0.0)
    assert f1_score(prediction, answers) == pytest.approx(expected)
    if exact_match(prediction, answers):
        assert f1_score(prediction, answers) == 1.0


@pytest.mark.parametrize(
    ("prediction", "answer", "exact", "f1"),
    [
        ("the Renvorni.", "Renvorni", True, 1.0),
        ("Barack Obama", "Obama", False, 2 / 3),
        ("New York, New York", "New York", False, 2 / 3),
        ("a", "the", False, 0.0),
        ("", "x", False, 0.0),
        ("Yes.", "yes", True, 1.0),
        ("yes no", "yes", False, 0.0),
        ("no", "no one", False, 0.0),
        ("Ångström", "ångström", True, 1.0),
    ],
)
def test_known_scores(prediction: str, answer: str, exact: bool, f1: float):
    assert exact_match(prediction, [answer]) == exact
    assert f1_score(prediction, [answer]) == pytest.approx(f1)


def test_naming_both_is_no_answer_to_a_question_of_yes_or_no():
    assert f1_score("yes or no", ["no"]) == f1_score("yes, no", ["yes"], unique=True) == 0.0
    assert augmented_f1("yes no", ["yes"], ["yes", "it is"]) == 0.0


def test_unique_words_count_once():
    assert f1_score("New York, New York", ["New York"], unique=True) == 1.0


def test_rewordings_count_for_three_tenths():
    assert augmented_f1("sea", ["ocean"], ["sea"]) == pytest.approx(0.3)
    assert augmented_f1("ocean", ["ocean"], ["sea"]) == pytest.approx(1.0)
    assert augmented_f1("ocean", ["ocean"], []) == pytest.approx(1.0)


def test_the_last_answer_counts():
    assert last_answer("<answer>one</answer> no, <ANSWER> two\n</ANSWER>") == "two"
    assert last_answer("<answer>one") is None
    assert last_answer("<answer>one <answer>two</answer>") == "two"


def test_pairs_without_an_end_take_no_time():
    """A reply that repeats itself to its last token; tried from each beginning to the end, it took minutes."""
    reply = "<answer>" * 20_000
    assert last_answer(reply) is None
    assert chosen(reply, {"A": "wood", "B": "stone"}) is None
