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
    "lost success": (
        {"success_rate": (0.6, 0.02), "staleness_mean": (0.0, 8.0)},
        r"fallen from 57 % \(steps 1 to 10\) to 5 % \(last 10\): trained tokens are 7\.6 versions old\. Lower config",
    ),
}


def test_a_healthy_run_has_nothing_wrong():
    assert diagnose(lines()) == []


def batches(*env_errors: int) -> list[dict[str, Any]]:
    return [{"episodes": 32, "failed": {"env_error": count, "lease_ran_out": 99}} for count in env_errors]


def test_episodes_that_fail_and_are_played_again_are_named_first():
    """A workflow that failed at each success made full batches without one, and was said to have hard tasks."""
    hard = lines({"no_signal_share": (1.0, 1.0), "success_rate": (0.0, 0.0)}, 5)
    broken, no_signal = diagnose(hard, batches(4, 8, 13, 17, 21))
    assert str(broken).startswith("the run: 12 % of the last episodes failed (21 env error) and were played again: if")
    assert no_signal.rule == "no signal"


def test_episodes_that_failed_long_ago_or_seldom_are_no_symptom():
    assert diagnose(lines(), batches(*[50] * 11)) == [], "before the last ten batches"
    assert diagnose(lines(), batches(*range(1, 11))) == [], "1 of 33"
    assert diagnose(lines(), batches(9, 18, 27, 36)) == [], "too few batches"
    assert diagnose(lines(), batches(*[50] * 10, 2)) == [], "of another ledger"


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


# Success in training, in % of each step, of `tests.benchmarks.staleness --objectives=cispo_published --staleness=8`.
COLLAPSED = (
    "9 11 12 20 5 10 15 16 16 13 16 23 18 25 34 20 27 33 36 24 34 22 55 39 36 40 37 12 0 2 9 16 5 1 0 8 7 10 9 15"
)


def test_a_run_that_lost_what_it_had_learnt_is_told_so_and_where_it_was_best():
    rates = [int(percent) / 100 for percent in COLLAPSED.split()]
    run = [{**HEALTHY, "policy": "agent", "step": step, "success_rate": x} for step, x in enumerate(rates, start=1)]
    assert diagnose(run[:29]) == []
    (finding,) = diagnose(run)
    assert finding.rule == "lost success"
    assert "fallen from 36 % (steps 18 to 27) to 8 % (last 10)" in finding.text
    assert "lower config.optimizer.learning_rate" in finding.text  # its tokens' age is left out here
    assert "The version of about step 23 played best: config.trainer.keep_every_steps" in finding.text
    (finding,) = diagnose([{**line, "staleness_mean": 8.0} for line in run])
    assert "tokens are 8.0 versions old" in finding.text and "about step 15" in finding.text
    assert diagnose(run[:9]) == []
    early = [{**line, "success_rate": 0.8 if line["step"] <= 3 else 0.0} for line in run]
    assert "The version of about step 1 played best" in diagnose(early)[0].text, "not one of the steps that it lost"
    without_signal = [{**line, "no_signal_share": 0.97} for line in run]
    assert [finding.rule for finding in diagnose(without_signal)] == ["lost success"]  # easier tasks are no remedy


@pytest.mark.parametrize(
    ("metric", "healthy", "broken", "sentence"),
    [
        ("success_rate", 0.24, 0.0, r"fallen from 24 % \(steps 1 to 3\) to 0 % \(last 10\)"),
        ("entropy", 0.6, 0.02, "collapsed from 0.6 to 0.02"),
        ("invalid_share", 0.05, 0.4, r"risen from 5\.0 % \(first 3 steps\) to 40\.0 % \(last 10\)"),
    ],
)
def test_what_breaks_within_the_first_ten_steps_is_seen_beside_the_first_three(metric, healthy, broken, sentence):
    run = [{**line, metric: healthy if line["step"] <= 3 else broken} for line in lines(count=40)]
    (finding,) = diagnose(run)
    assert re.search(sentence, finding.text), finding.text


def test_success_that_was_never_much_cannot_be_lost():
    assert diagnose(lines({"success_rate": (0.08, 0.01)})) == []


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
