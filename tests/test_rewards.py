"""Rewards: each component's formula, gathering of outcomes, and start-up checks."""

import inspect
from pathlib import Path
from pkgutil import resolve_name

import jax.numpy as jnp
import numpy as np
import pytest

from flowjax import rewards
from flowjax.records import Group, Task, Trajectory, Turn
from flowjax.rewards import (
    COMPONENTS,
    RewardError,
    check_reward,
    required_outcomes,
    trajectory_scores,
)


def turn(*, tokens: int = 3, valid: bool = True, reward: float = -0.1) -> Turn:
    ids = np.zeros(tokens, np.int32)
    return Turn("agent", 0, ids, ids, np.zeros(tokens, np.float32), "stop", 1, 2, reward, valid, False)


def trajectory(*turns: Turn, status: str = "ok", **outcome: float) -> Trajectory:
    return Trajectory("t0", "g", "t", 0, turns, outcome, status=status)  # pyright: ignore[reportArgumentType]


def groups(*trajectories: Trajectory) -> list[Group]:
    return [Group("g", Task("t", "world", 0), trajectories)]


def test_weighted_sum_with_each_part_logged():
    played = groups(
        trajectory(turn(), turn(valid=False), turn(), success=1.0),
        trajectory(turn(valid=False), turn(valid=False), success=0.0),
    )
    scores, parts = trajectory_scores(played, {"success": 2.0, "invalid_actions": 0.1, "turn_penalty": 0.01})
    np.testing.assert_allclose(scores, [2 - 0.1 - 0.03, -0.2 - 0.02], rtol=1e-6)
    np.testing.assert_allclose(parts["success"], [1, 0])
    np.testing.assert_allclose(parts["invalid_actions"], [-1, -2])
    np.testing.assert_allclose(parts["turn_penalty"], [-3, -2])


def test_sums_of_other_parts_are_the_same_score():
    """A penalty may cancel a reward: what float32 would leave of both is no reason to prefer one."""
    played = groups(
        trajectory(*[turn()] * 20, success=1.0),
        trajectory(*[turn(valid=False)] * 5, *[turn()] * 8, success=1.0),
        trajectory(*[turn()] * 19, success=1.0),
    )
    scores, _ = trajectory_scores(played, {"success": 1.0, "invalid_actions": 0.07, "turn_penalty": 0.05})
    assert scores[0] == scores[1] == 0.0 and scores[2] == pytest.approx(0.05, rel=1e-6)
    scores, _ = trajectory_scores(played, {"success": 1.001, "invalid_actions": 0.07, "turn_penalty": 0.05})
    assert scores[0] == scores[1] == pytest.approx(0.001, rel=1e-6)


def test_what_the_world_reports_goes_before_what_turns_show():
    played = groups(trajectory(turn(), env_return=7.0), trajectory(turn(), turn()))
    np.testing.assert_allclose(trajectory_scores(played, {"env_return": 1.0})[0], [7.0, -0.2], rtol=1e-6)


def test_options_of_a_component():
    played = groups(*(trajectory(turn(tokens=n)) for n in (50, 80, 95, 100, 120)))
    spec = {"overlong": {"weight": 2.0, "limit_tokens": 100, "buffer_tokens": 40}}
    scores, parts = trajectory_scores(played, spec)
    np.testing.assert_allclose(parts["overlong"], [0, -0.5, -0.875, -1, -1], rtol=1e-6)
    np.testing.assert_allclose(scores, 2 * parts["overlong"], rtol=1e-6)


def test_failed_episodes_report_nothing_and_get_zero():
    failed = trajectory(turn(), turn(), status="env_error", env_return=float("nan"))
    scores, parts = trajectory_scores(groups(failed), {"turn_penalty": 1.0, "env_return": 1.0})
    assert [scores, *parts.values()] == [[0.0]] * 3


def test_failed_episodes_change_no_others_score():
    """They were wrong answers to a component that takes shares of all that are scored together."""
    judged = [trajectory(turn(), success=0.0, answer_right=right) for right in (1.0, 0.0)]
    failed = [trajectory(turn(), status="timeout")] * 2
    components = {"verdict": {"weight": 1.0, "balanced": True}}
    alone, _ = trajectory_scores(groups(*judged), components)
    beside, _ = trajectory_scores(groups(failed[0], *judged, failed[1]), components)
    np.testing.assert_array_equal(beside, [0.0, *alone, 0.0])


@pytest.mark.parametrize(("name", "given"), [("inverse", "inf"), ("no_number", "nan")])
def test_a_component_that_gives_no_number_is_named(name: str, given: str):
    """Taken for 0, with all other components of the trajectory, it would make a failure of a success."""
    played = groups(trajectory(turn(), success=1.0, boxes=1.0), trajectory(turn(), success=1.0, boxes=0.0))
    path = f"tests.test_rewards:{name}"
    with pytest.raises(RewardError, match=f"components.mine gives {given} for trajectory 't0': give a finite number"):
        trajectory_scores(played, {"success": 1.0, "mine": {"weight": 0.1, "path": path}})


def inverse(boxes):
    return 1 / boxes


def no_number(boxes):
    return boxes * 0 / (boxes * 0)


def test_a_component_that_fails_without_a_word_is_named():
    with pytest.raises(RewardError, match=r"components.mine fails when JAX traces it \(AssertionError: \)"):
        check_reward({"mine": {"weight": 1.0, "path": "tests.test_rewards:silent"}}, ["success"], "a world")


@pytest.mark.parametrize(
    ("component", "given"),
    [
        ({"path": f"{__name__}:over_itself"}, "nan for an episode with success = 0, sampled_tokens = 8, of three with"),
        ({"path": f"{__name__}:of_spread"}, "nan for an episode with success = 0, of three with success 0, 0, 0: give"),
        ({"path": f"{__name__}:of_valid"}, "inf for an episode with turns = 1, invalid_actions = 1, of three with"),
        (
            {"path": f"{__name__}:doubled", "weight": -1e12},
            r"-2e\+12 with its weight for an episode with success = 1, of .*, beyond 1e\+09, for which no credit",
        ),
    ],
)
def test_a_component_that_most_episodes_get_no_credit_by_is_refused(component, given):
    with pytest.raises(RewardError, match=f"config.reward.components.mine gives {given}"):
        check_reward({"success": 1.0, "mine": component}, ["success"], "a world")


def over_itself(success, sampled_tokens):
    return success / success


def of_spread(success):
    return (success - success.mean()) / success.std()


def of_valid(turns, invalid_actions):
    return 1 / (turns - invalid_actions)


def test_only_outcomes_that_every_world_has_alike_are_made_up():
    for path in ("inverse", "over_turns", "of_won"):
        check_reward({"mine": {"path": f"{__name__}:{path}"}}, ["boxes", "success"], "a world")
    check_reward({"mine": {"path": f"{__name__}:of_valid"}}, ["turns"], "a world that counts turns otherwise")


def over_turns(success, turns, sampled_tokens):
    return success / turns / sampled_tokens


def of_won(success, turns, invalid_actions):
    return jnp.where(success > 0.5, 1 / (turns - invalid_actions), 0.0)


def silent(success):
    raise AssertionError


@pytest.mark.parametrize(
    ("checker", "formatter", "operator", "control", "correct", "expected"),
    [
        (0, 0, 0, 0, 1, -1.0),
        (1, 0, 0, 0, 1, -0.8),
        (1, 1, 1, 0, 1, -0.4),
        (1, 1, 1, 1, 0, 0.0),
        (1, 1, 1, 1, 0.7, 0.7),
        (1, 1, 1, 1, 1, 1.0),
    ],
)
def test_answer_pays_only_once_the_canvas_has_structure(checker, formatter, operator, control, correct, expected):
    real = {"checks": checker, "formats": formatter, "distinct_operators": 4 * operator, "branching": control}
    assert canvas(correctness=correct, **real) == pytest.approx(expected, abs=1e-6)
    parts = (checker, formatter, operator, control)
    mentioned = {f"canvas_{name}": part for name, part in zip(CANVAS_PARTS, parts, strict=True)}
    published = canvas(name="published_canvas", correctness=correct, **mentioned)
    assert published == pytest.approx(expected, abs=1e-6)
    assert canvas(correctness=correct, **mentioned) == -1.0  # what is only mentioned earns nothing
    assert canvas(name="published_canvas", correctness=correct, **real) == -1.0


CANVAS_PARTS = ("checker", "format", "operator", "control")


def canvas(options: dict | None = None, *, name: str = "canvas", **outcomes: float) -> float:
    """The component for one episode; outcomes that are not given are 0."""
    reported: dict = dict.fromkeys(required_outcomes({name: 1.0}), 0.0) | outcomes
    return float(trajectory_scores(groups(trajectory(turn(), **reported)), {name: options or {}})[0][0])


def test_canvas_release_can_be_lowered():
    parts: dict = {"correctness": 1, "checks": 1, "formats": 1, "distinct_operators": 4}
    assert canvas({"release_at": 0.6}, **parts) == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "most"),
    [({"format_weight": 0.0}, "0.8"), ({"release_at": 2.0}, "1"), ({"base": 0.0, "checker_weight": -1.0}, "0.8")],
)
def test_a_canvas_reward_whose_answer_can_never_pay_is_refused(options: dict, most: str):
    outcomes = required_outcomes({"canvas": 1.0})
    with pytest.raises(RewardError, match=rf"components.canvas releases .* add up to {most} at most: no answer would"):
        check_reward({"canvas": options}, outcomes, "Canvas")
    check_reward({"canvas": {**options, "release_at": 0.5}}, outcomes, "Canvas")


def test_canvas_parts_are_graded_and_bounded():
    assert canvas(distinct_operators=2) == pytest.approx(-0.9)
    assert canvas(distinct_operators=9, checks=5) == pytest.approx(-0.6)
    weights = {"entropy_weight": 0.5, "siblings_weight": 0.25}
    assert canvas(weights, operator_entropy=0.5, distinct_siblings=1.0) == pytest.approx(-0.5)
    assert canvas(weights, operator_entropy=1, distinct_siblings=1, branching=3, checks=1) == pytest.approx(0.0)


def test_executor_cost_in_units_of_its_options():
    spent = [jnp.array([value]) for value in (20.0, 3000.0, 0.5)]
    assert float(rewards.executor_cost(*spent)[0]) == pytest.approx(-2.0)
    costs = rewards.executor_cost(*spent, per_calls=float("inf"), per_tokens=1000.0, per_cost=1.0)
    assert float(costs[0]) == pytest.approx(-3.5)


def test_verdict():
    success, answer_right = jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.array([1.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(rewards.verdict(success, answer_right), success)


@pytest.mark.parametrize("right", [50, 80, 92])
def test_a_balanced_verdict_is_worth_the_balanced_accuracy(right):
    dice = np.random.default_rng(right)
    answer_right = jnp.array([1.0] * right + [0.0] * (100 - right))
    agrees = jnp.array(dice.random(100) < 0.7, jnp.float32)
    accuracy = 0.5 * (float(agrees[:right].mean()) + float(agrees[right:].mean()))
    assert float(rewards.verdict(agrees, answer_right, balanced=True).mean()) == pytest.approx(accuracy, abs=1e-6)
    for constant in (answer_right, 1 - answer_right):  # always approving, always rejecting
        assert float(rewards.verdict(constant, answer_right, balanced=True).mean()) == pytest.approx(0.5, abs=1e-6)


def test_a_lone_wrong_answer_does_not_outweigh_all_others():
    answer_right, approving = jnp.array([1.0] * 99 + [0.0]), jnp.array([1.0] * 99 + [0.0])
    assert float(rewards.verdict(approving, answer_right, balanced=True)[-1]) == -7.0


@pytest.mark.parametrize("answer_right", [jnp.ones(4), jnp.zeros(4)])
def test_verdicts_on_answers_of_one_kind_are_finite(answer_right):
    found = rewards.verdict(jnp.array([1.0, 0.0, 1.0, 1.0]), answer_right, balanced=True)
    np.testing.assert_allclose(found, [1.0, 0.5, 1.0, 1.0])


def test_format_components():
    formed, solved = jnp.array([1.0, 1.0, 0.5]), jnp.array([1.0, 0.0, 1.0])
    np.testing.assert_allclose(rewards.solved_well_formed(solved, formed), [1.0, 0.1, 0.0], rtol=1e-6)
    np.testing.assert_allclose(rewards.well_formed(formed), [1.0, 1.0, 0.5])


def test_other_components():
    one, three = jnp.array([1.0]), jnp.array([3.0])
    assert float(rewards.invalid_actions(one, three, per_turn=True)[0]) == pytest.approx(-1 / 3)
    assert float(rewards.zero_sum(three, one)[0]) == -float(rewards.zero_sum(one, three)[0]) == 1.0
    assert float(rewards.token_penalty(jnp.array([500.0]))[0]) == pytest.approx(-0.5)
    assert float(rewards.partial_score(three)[0]) == 3.0


def test_needs_only_what_turns_do_not_show():
    assert required_outcomes({"success": 1.0, "turn_penalty": 0.1, "env_return": 0.1}) == ("success",)
    assert "correctness" in required_outcomes({"canvas": 1.0})


SOKOBAN = ("success", "turns", "invalid_actions", "env_return")


def test_every_component_is_known_and_described():
    for path in COMPONENTS.values():
        assert resolve_name(path).__doc__, path
    check_reward({"success": 1.0, "invalid_actions": 0.1}, SOKOBAN, "flowjax.envs.sokoban")


def of_reply_tokens(reply_tokens):
    return reply_tokens


def test_an_outcome_is_given_by_its_whole_name():
    with pytest.raises(RewardError, match="needs the outcome 'success', which math does not report"):
        check_reward({"success": 1.0}, ("solver/success",), "math")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({}, "config.reward.components is empty"),
        ({"sucess": 1.0}, "config.reward.components.sucess does not exist .did you mean 'success'"),
        (
            {"verdict": 1.0},
            "config.reward.components.verdict needs the outcome 'answer_right', which sokoban does not report",
        ),
        (
            {"mine": {"path": f"{__name__}:of_reply_tokens"}},
            r"'reply_tokens', which .* does not report .did you mean '\w*_tokens'.*; there are .* no texts$",
        ),
        ({"success": "1"}, "has weight '1', it takes a number"),
        ({"mine": "a.b:c"}, r"has weight 'a.b:c', it takes a number; your own component is {'path': 'a.b:c'}$"),
        ({"success": float("nan")}, "has weight nan"),
        ({"success": {"weight": 1.0, "scale": 2}}, "success.scale is no option of 'success'; it has none"),
        ({"overlong": 1.0}, "overlong.limit_tokens is missing"),
        ({"token_penalty": {"per_tokens": 0}}, "token_penalty.per_tokens is 0: it must be positive"),
        ({"mine": {"path": "nowhere:reward"}}, "components.mine.path is 'nowhere:reward', which cannot be imported"),
        ({"mine": {"path": f"{__name__}:SOKOBAN"}}, "SOKOBAN', which is no function or class"),
        ({"mine": {"path": f"{__name__}:on_the_host"}}, "components.mine fails when JAX traces it .TracerArray"),
        ({"mine": {"path": f"{__name__}:by_mode", "mode": "lax"}}, "components.mine fails when JAX traces it"),
        (
            {"mine": {"path": f"{__name__}:scaled", "weight": 0.5}},
            "which has an option 'weight', as every component",
        ),
        ({"mine": {"path": f"{__name__}:mean"}}, "components.mine .*: give a function of jax.numpy arrays"),
    ],
)
def test_bad_rewards_are_refused(chosen, message):
    with pytest.raises(RewardError, match=message):
        check_reward(chosen, SOKOBAN, "sokoban")


def scaled(success, *, weight):
    return success * weight


def test_an_episode_without_the_outcome_is_named():
    with pytest.raises(RewardError, match="trajectory 't0' reports no outcome 'success', only \\['score'\\]"):
        trajectory_scores(groups(trajectory(turn(), score=1.0)), {"success": 1.0})
    with pytest.raises(RewardError, match="reports success = nan"):
        trajectory_scores(groups(trajectory(turn(), success=float("nan"))), {"success": 1.0})


def test_a_component_of_ones_own():
    scores, _ = trajectory_scores(
        groups(trajectory(turn(), success=1.0)), {"doubled": {"path": f"{__name__}:doubled", "weight": 3.0}}
    )
    np.testing.assert_allclose(scores, [6.0])


def doubled(success):
    return 2 * success


def on_the_host(success, *, mode=""):
    return np.asarray(success) * (mode == "")


def mean(success):
    return success.mean()


def by_mode(success, *, mode="strict"):
    return success * (mode == "strict")


PAGE = Path(__file__).parents[1] / "docs" / "rewards.md"


def test_every_component_is_in_the_table():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    table = {line.split("`")[1]: line for line in lines}
    assert set(table) == set(COMPONENTS)
    for name in COMPONENTS:
        for outcome, parameter in inspect.signature(resolve_name(COMPONENTS[name])).parameters.items():
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                assert outcome in table[name].split("|")[3], (name, outcome)
            elif not outcome.endswith("_weight"):
                assert outcome in table[name].split("|")[4] or outcome == "base", (name, outcome)
