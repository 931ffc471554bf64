"""Diagnosis in words: every rule is triggered by what it is about, and by nothing that a healthy run does."""

import re
from typing import Any

import pytest

from flowjax.monitor.diagnosis import RULES, diagnose, not_judged

HEALTHY = {
    "success_rate": 0.5,
    "no_signal_share": 0.4,
    "entropy": 0.3,
    "cut_share": 0.01,
    "invalid_share": 0.02,
    "mismatch_kl": 1e-4,
    "skipped_updates": 1,
    "turns": 900,
    "episodes": 128,
}


def lines(changes: dict[str, tuple[float, float]] | None = None, count: int = 100) -> list[dict[str, Any]]:
    """Steps of a run in which metrics go from a first to a last value."""
    moved = [
        {name: first + (last - first) * step / (count - 1) for name, (first, last) in (changes or {}).items()}
        for step in range(count)
    ]
    return [{"policy": "agent", "step": step + 1, **HEALTHY, **each} for step, each in enumerate(moved)]


WRONG: dict[str, tuple[dict[str, tuple[float, float]], str]] = {
    "no signal": ({"no_signal_share": (0.97, 0.97), "success_rate": (0.0, 0.02)}, "97 % of the groups .* are lost"),
    "entropy": ({"entropy": (0.5, 0.001)}, "collapsed from 0.4.* to 0.0"),
    "cut replies": ({"cut_share": (0.0, 0.3)}, "29 % of the replies .* cut at config.rollout.max_new_tokens"),
    "invalid replies": ({"invalid_share": (0.1, 0.84)}, "have risen from 13.4 % .* to 80.6 %"),
    "mismatch": ({"mismatch_kl": (1e-4, 0.2)}, "mismatch KL of engine and trainer is 0.19"),
    "skipped updates": ({"skipped_updates": (0, 99)}, "updates of 9 of the last 9 steps were skipped"),
}


def test_a_healthy_run_has_nothing_wrong():
    assert diagnose(lines()) == []


def test_every_rule_has_a_case():
    assert WRONG.keys() == RULES.keys()


@pytest.mark.parametrize("rule", WRONG)
def test_a_rule_finds_what_it_is_about_and_no_other_rule_does(rule: str):
    changes, sentence = WRONG[rule]
    (finding,) = diagnose(lines(changes))
    assert (finding.policy, finding.rule) == ("agent", rule)
    assert re.search(sentence, finding.text), finding.text


@pytest.mark.parametrize("rule", WRONG)
def test_a_few_steps_say_nothing(rule: str):
    assert diagnose(lines(WRONG[rule][0], 4)) == []


def test_groups_that_are_all_won_want_harder_tasks():
    (finding,) = diagnose(lines({"no_signal_share": (0.99, 0.99), "success_rate": (0.99, 1.0)}))
    assert "harder tasks" in finding.text


def test_a_policy_that_has_mastered_its_tasks_may_have_no_entropy():
    assert diagnose(lines({"entropy": (0.5, 0.001), "success_rate": (0.5, 1.0)})) == []


@pytest.mark.parametrize("count", [5, 100])
def test_a_policy_that_never_acted_is_told_so_though_nothing_got_worse(count: int):
    (finding,) = diagnose(lines({"invalid_share": (1.0, 1.0)}, count))
    assert finding.rule == "invalid replies" and "100 % of the replies of the last steps" in finding.text


def test_steps_that_are_too_few_for_a_rule_are_named():
    assert not_judged([]) == not_judged(lines(count=10)) == []
    assert not_judged(lines(count=4)) == ["agent: fewer than 5 steps, not judged yet"]
    assert "fewer than 10 steps, entropy" in not_judged(lines(count=9))[0]


def test_every_policy_is_judged_alone():
    other = [{**line, "policy": "judge"} for line in lines({"cut_share": (0.5, 0.5)})]
    mixed = [line for pair in zip(lines(), other, strict=True) for line in pair]
    assert [(finding.policy, finding.rule) for finding in diagnose(mixed)] == [("judge", "cut replies")]


def test_values_that_are_no_numbers_are_passed_over():
    assert diagnose([*lines(), {"policy": "agent", "reward_mean": "nan", "entropy": None, "cut_share": "nan"}]) == []


def test_a_run_that_has_stopped_at_nan_is_named():
    stopped = [{**line, "mismatch_kl": "nan", "entropy": "nan", "loss": "nan"} for line in lines(count=7)]
    skipping = [{**line, "skipped_updates": 2 * number} for number, line in enumerate(stopped)]
    assert [(finding.rule, "not finite" in finding.text) for finding in diagnose([*lines(), *skipping])] == [
        ("mismatch", True),
        ("skipped updates", True),
    ]


def test_one_update_that_was_skipped_is_no_symptom():
    assert diagnose([*lines(), *({**line, "skipped_updates": 2} for line in lines(count=3))]) == []
