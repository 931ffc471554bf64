"""Diagnosis in words: faults of a run, found in the lines of its steps, each with a remedy.

One table of rules, for the live screen, the summary and the report alike. A rule gets the lines of one policy, oldest
first, and returns a sentence, or "" where it finds nothing.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

RECENT_STEPS = 10
_FEWEST_STEPS = 5  # that a rule judges: fewer are too noisy
_BEGINNING = 3  # steps: what breaks within the first ten is seen beside these
_NO_SIGNAL = 0.9  # share of the groups
_SPLIT = 0.2  # a success rate above this and below 1 - this is neither nearly none nor nearly all
_CUT = 0.1  # share of the replies
_INVALID = 0.5  # share of the replies: a policy that acts so seldom learns little, even if it never got worse
_COLLAPSED = 0.1  # times the entropy of the first steps
_MASTERED = 0.95  # success rate from which low entropy is mastery of the task and no collapse
_MISMATCH_KL = 0.05  # nats per token; bfloat16 engines are at 1e-4 to 1e-2
_SKIPPED = 0.2  # share of the steps that had skipped updates
_LOST = 0.5  # share of the best success rate of as many earlier steps
_SEEN_TO_FALL = 0.1  # success rate by which it has to have fallen
_BROKEN = 0.05  # share of the episodes that fail: if these are those that succeed, nothing is learnt
_OLD_VERSIONS = 2.0  # mean age of tokens from which objectives differ (docs/losses.md)

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Symptom:
    """One sentence about a policy; `rule` is the name of the rule that it broke."""

    policy: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.policy or 'the policy'}: {self.text}"


def diagnose(train: Lines, batches: Lines = ()) -> list[Symptom]:
    """Everything that is wrong in the newest steps of each policy, after what is wrong with the run's episodes.

    Args:
        train: lines of steps, of all policies, oldest first.
        batches: lines of batches, likewise.
    """
    broken = _broken(batches)
    of_run = [Symptom("the run", "failed episodes", broken)] if broken else []
    policies = dict.fromkeys(str(line.get("policy", "")) for line in train)
    by_policy = {policy: [line for line in train if line.get("policy", "") == policy] for policy in policies}
    return of_run + [
        Symptom(policy, rule, text)
        for policy, lines in by_policy.items()
        for rule, find in RULES.items()
        if (text := find(lines))
    ]


def not_judged(train: Lines) -> list[str]:
    """Sentences on the policies that have made too few steps for some rules, or for all."""
    found = []
    for policy, steps in Counter(str(line.get("policy", "")) for line in train).items():
        if steps < _FEWEST_STEPS:
            found.append(f"{policy or 'the policy'}: fewer than {_FEWEST_STEPS} steps, not judged yet")
        elif steps < 2 * _FEWEST_STEPS:
            late = "entropy, the rise of invalid replies and the fall of success are not judged yet"
            found.append(f"{policy or 'the policy'}: fewer than {2 * _FEWEST_STEPS} steps, {late}")
    return found


def _broken(batches: Lines) -> str:
    """Episodes that an error or the time limit has ended. They are played again: their tasks still come to batches."""
    before, newest = (batches[:-RECENT_STEPS] or [{}])[-1], batches[-RECENT_STEPS:]
    if len(newest) < _FEWEST_STEPS:
        return ""
    causes = {
        cause: max(count - before.get("failed", {}).get(cause, 0), 0)  # a ledger may have begun anew
        for cause, count in newest[-1].get("failed", {}).items()
        if cause in ("env_error", "timeout")
    }
    failed, played = sum(causes.values()), sum(line.get("episodes", 0) for line in newest)
    if failed <= _BROKEN * (failed + played):
        return ""
    named = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in causes.items() if count)
    return (
        f"{100 * failed / (failed + played):.0f} % of the last episodes failed ({named}) and were played again: if it "
        "is those that succeed, the policy never learns from a success. logs/rollout.log has the errors: mend the "
        "world or workflow, or raise config.rollout.episode_timeout_s"
    )


def _no_signal(lines: Lines) -> str:
    share = mean(_newest(lines, "no_signal_share"), "no_signal_share", by="episodes")
    if share is None or share < _NO_SIGNAL or _lost_success(lines):  # what was won before is not too hard
        return ""
    success = mean(_newest(lines, "success_rate"), "success_rate", by="episodes") or 0.0
    if _SPLIT < success < 1 - _SPLIT:  # each group is all won or all lost, or its credit is made by a user's code
        cause = "episodes of one group end alike, unless an estimator, reward or trains() of your own gives none"
        remedy = "tasks between those that are always won and never"
    elif success > 0.5:
        cause, remedy = "nearly all episodes are won", "harder tasks"
    else:
        cause, remedy = "nearly all episodes are lost", "easier tasks, a longer warm start"
    return (
        f"{100 * share:.0f} % of the groups of the last steps had no signal, since all their advantages are 0: "
        f"{cause}. Take {remedy}, a larger config.rollout.group_size, or the data algorithm dynamic_sampling, which "
        "leaves out groups of equal rewards"
    )


def _entropy(lines: Lines) -> str:
    for first, newest in _both_ends(lines, "entropy"):
        began, now = mean(first, "entropy", by="trained_tokens"), mean(newest, "entropy", by="trained_tokens")
        success = mean(newest, "success_rate", by="episodes") or 0.0
        if began is None or now is None or now >= _COLLAPSED * began or success >= _MASTERED:
            continue
        return (
            f"the entropy of replies has collapsed from {began:.3g} to {now:.3g} nats a token: the policy hardly "
            "tries anything else any more. Raise config.loss.entropy_coefficient, or lower "
            "config.optimizer.learning_rate"
        )
    return ""


def _cut(lines: Lines) -> str:
    share = mean(_newest(lines, "cut_share"), "cut_share", by="turns")
    if share is None or share < _CUT:
        return ""
    return (
        f"{100 * share:.0f} % of the replies of the last steps were cut at config.rollout.max_new_tokens. Raise it, "
        "or ask for shorter replies"
    )


def _invalid(lines: Lines) -> str:
    for first, newest in _both_ends(lines, "invalid_share"):
        began, now = mean(first, "invalid_share", by="turns"), mean(newest, "invalid_share", by="turns")
        if began is None or now is None or now <= began + max(0.05, began / 2):
            continue
        return (
            f"invalid replies have risen from {100 * began:.1f} % (first {len(first)} steps) to {100 * now:.1f} % "
            f"(last {len(newest)}): it may be learning not to act; read the report's episodes, and see config.credit"
        )
    return _mostly_invalid(lines)


def _mostly_invalid(lines: Lines) -> str:
    share = mean(_newest(lines, "invalid_share"), "invalid_share", by="turns")
    if share is None or share <= _INVALID:
        return ""
    return (
        f"{100 * share:.0f} % of the replies of the last steps name no legal action: read them in the report's "
        "episodes; a longer warm start, or another config.env.prompt, shows the policy how actions are written"
    )


def _mismatch(lines: Lines) -> str:
    newest = _newest(lines, "mismatch_kl")
    if infinite := sum(isinstance(line["mismatch_kl"], str) for line in newest):  # written as "nan" or "inf"
        return (
            f"the mismatch KL of engine and trainer is not finite in {infinite} of the last {len(newest)} steps: their "
            "log-probs are no numbers, or very far apart. Lower config.optimizer.learning_rate, or take float32 for "
            "config.engine.dtype and config.model.dtype"
        )
    found = mean(newest, "mismatch_kl")
    if found is None or found < _MISMATCH_KL:
        return ""
    return (
        f"the mismatch KL of engine and trainer is {found:.2g} a token: they compute different policies, and training "
        "is off-policy by that much. Compare config.engine.dtype with config.model.dtype, and see docs/losses.md"
    )


def _skipped(lines: Lines) -> str:
    counts = [line["skipped_updates"] for line in _newest(lines, "skipped_updates")]  # cumulative over the run
    skipped, steps = sum(after > before for before, after in pairwise(counts)), len(counts) - 1
    if not skipped or skipped < _SKIPPED * steps:
        return ""
    return (
        f"updates of {skipped} of the last {steps} steps were skipped, since their gradients were not finite: skipped "
        "updates change nothing. See gradient_norm of the steps before, and lower config.optimizer.learning_rate"
    )


def _lost_success(lines: Lines) -> str:
    having = [line for line in lines if isinstance(line.get("success_rate"), int | float)]
    steps = min(RECENT_STEPS, len(having) // 2)
    if steps < _FEWEST_STEPS:
        return ""

    def success(span: slice) -> float:
        return mean(having[span], "success_rate", by="episodes") or 0.0

    now = success(slice(-steps, None))
    spans = [slice(start, start + steps) for start in range(len(having) - 2 * steps + 1)]  # before the newest steps
    for span in (max(spans, key=success), slice(0, _BEGINNING)):
        if now < _LOST * success(span) and success(span) - now >= _SEEN_TO_FALL:
            return _fallen(having, span, success(span), having[-steps:], now)
    return ""


def _fallen(having: Lines, span: slice, best: float, newest: Lines, now: float) -> str:
    """That success has fallen from `best`, in the `span` of lines, to `now`, in the newest; why it may have, and where
    the best checkpoint is."""
    age = mean(newest, "staleness_mean", by="trained_tokens") or 0.0
    if age >= _OLD_VERSIONS:
        remedy = (
            f"trained tokens are {age:.1f} versions old. Lower config.dataflow.max_staleness, or take ppo or gspo for "
            "config.loss.kind and no truncated weights: see docs/losses.md, Old tokens"
        )
    else:
        remedy = (
            "unless its tasks have become harder, lower config.optimizer.learning_rate or raise "
            "config.loss.kl_coefficient"
        )
    first, last = (having[place].get("step", place + 1) for place in (span.start, span.stop - 1))
    threes = [having[place : place + 3] for place in range(span.start, span.stop - 2)]
    highest = max(threes, key=lambda three: mean(three, "success_rate", by="episodes") or 0.0)
    then_age = mean(highest, "staleness_mean", by="trained_tokens") or 0.0
    middle = highest[1].get("step", having.index(highest[1]) + 1)
    played_by = max(0, round(middle - 1 - then_age))  # a step trains on what the version before it played
    return (
        f"success in training has fallen from {100 * best:.0f} % (steps {first} to {last}) to {100 * now:.0f} % (last "
        f"{len(newest)}): {remedy}. The version of about step {played_by} played best: config.trainer.keep_every_steps "
        "keeps such checkpoints"
    )


RULES: Mapping[str, Callable[[Lines], str]] = {
    "no signal": _no_signal,
    "entropy": _entropy,
    "cut replies": _cut,
    "invalid replies": _invalid,
    "mismatch": _mismatch,
    "skipped updates": _skipped,
    "lost success": _lost_success,
}


def mean(lines: Lines, name: str, *, by: str = "") -> float | None:
    """Mean of a metric over the lines that have it, each weighted by its metric `by`; None where none has it."""
    found = [(line[name], line.get(by, 1.0)) for line in lines if isinstance(line.get(name), int | float)]
    weights = sum(weight for _, weight in found)
    return sum(value * weight for value, weight in found) / weights if weights else None


def _newest(lines: Lines, name: str) -> Lines:
    """The newest lines with a metric; none where they are too few."""
    having = [line for line in lines if name in line]
    return having[-RECENT_STEPS:] if len(having) >= _FEWEST_STEPS else ()


def _both_ends(lines: Lines, name: str) -> list[tuple[Lines, Lines]]:
    """The first and the newest lines with a metric, disjoint: as many of both, then only those of the beginning, beside
    which a change within the first steps is seen; none where they are too few."""
    having = [line for line in lines if name in line]
    steps = min(RECENT_STEPS, len(having) // 2)
    firsts = (steps, _BEGINNING) if steps >= _FEWEST_STEPS else ()
    return [(having[:first], having[-steps:]) for first in firsts]
