"""Each estimator on small tables by hand, the edge cases of groups, and the look-up of names and options."""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest
from credit_tables import Path, paths_table

from flowjax.credit.estimators import ESTIMATORS, CreditError, check_options, credit_parts, estimate, get_estimator
from flowjax.credit.table import TurnTable, segment_statistics, segment_total


def group_of(*scores: float, turns: int = 1, group: int = 0) -> list[Path]:
    return [
        Path([10 * i + t for t in range(turns)] + [1000 + i], [0.0] * (turns - 1) + [s], group=group)
        for i, s in enumerate(scores)
    ]


def advantages(name: str, paths: list[Path], **options) -> np.ndarray:
    table = paths_table(paths)
    return np.asarray(estimate(table, name, **options))[: sum(len(path.rewards) for path in paths)]


def test_grpo():
    values = advantages("grpo", group_of(1, 0, 0, 0))
    expected = (np.array([1, 0, 0, 0]) - 0.25) / (np.std([1, 0, 0, 0], ddof=1) + 1e-6)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    np.testing.assert_allclose(advantages("dr_grpo", group_of(1, 0, 0, 0)), [0.75, -0.25, -0.25, -0.25])


def test_statistics_pooled_over_rows_weigh_long_trajectories():
    paths = [Path([0, 1, 2, 3], [0, 0, 0.0], score=0.0), Path([0, 4], [1.0])]
    np.testing.assert_allclose(advantages("dr_grpo", paths), [-0.5, -0.5, -0.5, 0.5])
    published = advantages("published.grpo", paths, norm="mean")
    np.testing.assert_allclose(published, [-0.25, -0.25, -0.25, 0.75])


def test_rloo_is_the_score_less_the_mean_of_the_others():
    scores = [3.0, 1.0, 0.0, 4.0]
    expected = [s - np.mean(scores[:i] + scores[i + 1 :]) for i, s in enumerate(scores)]
    np.testing.assert_allclose(advantages("rloo", group_of(*scores)), expected, rtol=1e-5)


def parts_of(episodes: Sequence[Sequence[float]]) -> list[Path]:
    """A group in which each episode has parts of these scores."""
    return [
        Path([0, 1], [0.0], score=score, episode=number) for number, scores in enumerate(episodes) for score in scores
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("grpo", {"norm": "mean"}),
        ("dr_grpo", {}),
        ("rloo", {}),
        ("maxrl", {}),
        ("gigpo", {"step_weight": 0.0}),
    ],
)
def test_an_episode_weighs_once_however_many_parts_it_has(name, options):
    scores = [1.0, 0.0, 0.3, 0.7]
    counts = [3, 1, 2, 7]
    in_parts = advantages(name, parts_of([[score] * n for score, n in zip(scores, counts, strict=True)]), **options)
    whole = advantages(name, group_of(*scores), **options)
    np.testing.assert_allclose(in_parts, np.repeat(whole, counts), rtol=1e-5, atol=1e-6)


def test_statistics_over_parts_of_different_scores():
    episodes = [[1.0, 0.0, 0.5], [0.25], [1.0, 0.5]]
    means = np.array([np.mean(scores) for scores in episodes])
    others = (means.sum() - means) / 2
    expected = [score - other for scores, other in zip(episodes, others, strict=True) for score in scores]
    np.testing.assert_allclose(advantages("rloo", parts_of(episodes)), expected, rtol=1e-6)
    variance = sum(np.mean(np.square(np.array(scores) - means.mean())) for scores in episodes) / 2
    expected = [(score - means.mean()) / np.sqrt(variance) for scores in episodes for score in scores]
    np.testing.assert_allclose(advantages("grpo", parts_of(episodes)), expected, rtol=1e-4)


@pytest.mark.parametrize("parts", [3, 7, 49])
def test_an_episode_alone_in_its_group_gets_nothing_by_its_parts(parts):
    for name in ("grpo", "rloo", "maxrl"):
        np.testing.assert_array_equal(advantages(name, parts_of([[0.7] * parts])), 0.0)
    np.testing.assert_array_equal(advantages("rloo", parts_of([[0.1 * part for part in range(parts)]])), 0.0)


def test_rloo_is_unbiased_where_the_policy_decides_how_many_parts_there_are():
    """One choice an episode: with probability p it has three parts and the score 1, else a single part and 0.25. Over
    all groups of three, the expected gradient is three times that of the expected score."""
    p, scores, parts = 0.3, (0.25, 1.0), (1, 3)
    slopes = (-p, 1 - p)  # of log p(choice), by the logit of p; it is the first part that chooses
    expected = 0.0
    for choices in itertools.product((0, 1), repeat=3):
        found = advantages("rloo", parts_of([[scores[choice]] * parts[choice] for choice in choices]))
        firsts = np.cumsum([0, *(parts[choice] for choice in choices[:-1])])
        chance = np.prod([p if choice else 1 - p for choice in choices])
        expected += chance * sum(found[first] * slopes[choice] for first, choice in zip(firsts, choices, strict=True))
    assert expected == pytest.approx(3 * p * (1 - p) * (scores[1] - scores[0]), rel=1e-5)


def test_maxrl_weighs_rare_success_more():
    rare, common = advantages("maxrl", group_of(1, 0, 0, 0)), advantages("maxrl", group_of(1, 1, 1, 0))
    np.testing.assert_allclose(rare, [3, -1, -1, -1])
    np.testing.assert_allclose(common, [1 / 3, 1 / 3, 1 / 3, -1], rtol=1e-6)


def test_maxrl_with_penalties_weighs_no_more_than_a_single_success():
    """The mean of a group lay just above 0, and the advantages were what is over 0.005."""
    values = advantages("maxrl", group_of(0.85, -0.3, -0.3, -0.23))
    shifted = np.array([1.15, 0, 0, 0.07])
    np.testing.assert_allclose(values, shifted / shifted.mean() - 1, rtol=1e-4)
    assert np.abs(values).max() <= 3
    np.testing.assert_array_equal(advantages("maxrl", group_of(*[-0.3] * 3)), 0)
    equal = [-0.11999999731, *[-0.12000000477] * 3]  # two sums of penalties that are the same number
    np.testing.assert_array_equal(advantages("maxrl", group_of(*equal)), 0)


@pytest.mark.parametrize(("successes", "members", "k"), [(1, 6, 3), (3, 6, 2), (2, 4, 4), (1, 3, 8), (3, 5, 1)])
def test_pass_at_k_is_the_mean_over_all_subsets(successes, members, k):
    """The definition: each subset of k is scored 1 if any member succeeds; A is a member's mean normalised score."""
    scores = [1.0] * successes + [0.0] * (members - successes)
    subsets = list(itertools.combinations(range(members), min(k, members)))
    rewards = np.array([max(scores[i] for i in subset) for subset in subsets])
    spread = rewards.std()
    expected = [
        np.mean(
            [(r - rewards.mean()) / spread if spread else 0.0 for s, r in zip(subsets, rewards, strict=True) if i in s]
        )
        for i in range(members)
    ]
    np.testing.assert_allclose(advantages("pass_at_k", group_of(*scores), k=k), expected, rtol=1e-4, atol=1e-6)


def test_best_of_group():
    np.testing.assert_allclose(advantages("best_of_group", group_of(5, 2, 3, turns=2)), [2, 2, 0, 0, 0, 0])
    np.testing.assert_allclose(advantages("best_of_group", group_of(5, 5, 3)), 0)


def test_reinforce_plus_plus():
    paths = group_of(1, 0, turns=2)
    returns = np.array([0.5, 1, 0, 0])
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(advantages("reinforce_plus_plus", paths, gamma=0.5), expected, rtol=1e-4)
    centred = np.array([0.5, 0.5, -0.5, -0.5, 1, 1, -1, -1])
    paths = group_of(1, 0, turns=2) + group_of(2, 0, turns=2, group=1)
    expected = centred / np.sqrt(centred.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(advantages("reinforce_plus_plus_baseline", paths), expected, rtol=1e-4)


def test_discounted_return_of_turns():
    paths = [Path([0, 1, 2, 3], [1.0, 2.0, 4.0]), Path([0, 4], [8.0])]
    returns = np.array([1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4, 8])
    values = advantages("discounted_return", paths, gamma=0.5, rewards="reward")
    np.testing.assert_allclose(values, returns - returns.mean(), rtol=1e-6)


def test_a_success_is_a_score_above_the_threshold():
    scores = group_of(0.2, 0.2, 0.4, 0.4)
    expected = advantages("pass_at_k", group_of(0, 0, 1, 1), k=2)
    assert expected[0] < 0 < expected[2]
    np.testing.assert_allclose(advantages("pass_at_k", scores, k=2, threshold=0.3), expected, rtol=1e-6)
    for threshold in (0.5, 0.1):  # none of them succeeds, and all
        np.testing.assert_array_equal(advantages("pass_at_k", scores, k=2, threshold=threshold), 0)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("discounted_return", {"norm": "mean_std"}, np.array([1, 1, -1, -1]) * np.sqrt(3 / 4)),
        ("rewardflow", {"episode_norm": "mean", "step_norm": "none", "step_weight": 3.0}, [3, 0, -3, 0]),
        ("gigpo", {"step_weight": 3.0}, [3, 0, -3, 0]),
    ],
)
def test_what_turns_earned_weighs_by_its_deviation_or_its_weight(name, options, expected):
    """Both episodes score 0, so that only what the environment paid tells them apart: returns 2, 2, 0, 0, of which the
    first state's value is 1 and the others' are what is to come."""
    paths = [Path([0, 1, 2], [1.0, 2.0], score=0.0), Path([0, 3, 4], [0.0, 0.0], score=0.0)]
    np.testing.assert_allclose(
        advantages(name, paths, gamma=0.5, rewards="reward", **options), expected, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("norm", "scale"), [("mean_std", 1 / np.std([1, 0], ddof=1)), ("mean", 1.0)])
def test_the_episode_part_has_the_norm_that_is_asked_for(norm, scale):
    found = advantages("rewardflow", group_of(3, 2), step_weight=0.0, episode_norm=norm)
    np.testing.assert_allclose(found, np.array([0.5, -0.5]) * scale, rtol=1e-4)


def test_gigpo_compares_turns_from_the_same_state():
    paths = [Path([0, 1, 9], [0.0, 1.0]), Path([0, 2, 8], [0.0, 0.0])]
    values = advantages("gigpo", paths, gamma=0.5)
    returns = [0.5, 1, 0, 0]
    np.testing.assert_allclose(values, [0.5 + 0.25, 0.5, -0.5 - 0.25, -0.5], rtol=1e-6)
    assert returns[0] - np.mean([returns[0], returns[2]]) == pytest.approx(0.25)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
class TestEdgesOfGroups:
    def test_all_equal(self, name):
        paths = [Path([0, 1, 2], [0, 0.5], score=0.5) for _ in range(4)]
        if name in ("gae", "reinforce_plus_plus", "discounted_return"):
            assert np.isfinite(advantages(name, paths)).all()
            return
        np.testing.assert_allclose(advantages(name, paths), 0, atol=1e-5)

    @pytest.mark.parametrize("score", [0.7, 99.3, -350.7])
    def test_all_equal_to_a_number_that_float32_rounds(self, name, score):
        np.testing.assert_allclose(advantages(name, group_of(*[score] * 8)), 0, atol=1e-5)

    @pytest.mark.parametrize(("weight", "pairs"), [(0.1, ((1, 3), (21, 1))), (0.3, ((3, 16), (33, 7)))])
    def test_one_sum_of_other_parts_is_the_same_score(self, name, weight, pairs):
        """Invalid actions at `weight` and turns at 1, as rewards add them up: one number, but for a rounding."""
        scores = [-float(np.float32(weight) * np.float32(invalid) + np.float32(turns)) for invalid, turns in pairs]
        assert scores[0] != scores[1] and scores[0] == pytest.approx(scores[1], rel=1e-6)
        alike = np.asarray(advantages(name, group_of(*[scores[0]] * 2, turns=2)))
        np.testing.assert_allclose(advantages(name, group_of(*scores, turns=2)), alike, rtol=1e-5, atol=1e-5)

    def test_one_member(self, name):
        values = advantages(name, group_of(1, turns=2))
        assert np.isfinite(values).all()
        if name in ("grpo", "dr_grpo", "rloo", "maxrl", "pass_at_k", "best_of_group", "reinforce_plus_plus_baseline"):
            np.testing.assert_array_equal(values, 0)

    def test_no_success(self, name):
        values = advantages(name, group_of(0, 0, 0, turns=3))
        np.testing.assert_allclose(values, 0, atol=1e-6)

    def test_only_failed_members(self, name):
        lost = [Path(p.states, p.rewards, mask=False) for p in group_of(1, 0, turns=2)]
        np.testing.assert_array_equal(advantages(name, lost), 0)

    def test_group_with_a_missing_member_is_a_smaller_group(self, name):
        whole = group_of(1, 0, 0, turns=2)
        missing = [*whole[:2], Path(whole[2].states, whole[2].rewards, mask=False)]
        np.testing.assert_allclose(advantages(name, missing)[:4], advantages(name, whole[:2]), atol=1e-5)
        np.testing.assert_array_equal(advantages(name, missing)[4:], 0)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if not name.startswith("published.")])
@pytest.mark.parametrize("lengths", [(20, 15, 10, 5), (15,) * 7 + (20,)])
def test_penalties_that_add_up_alike_leave_no_difference(name, lengths):
    """Below zero, from one first state, and in sums that float32 rounds to two neighbours."""
    high, low = float(np.float32(-0.19999999)), float(np.float32(-0.2))
    assert high != low

    def paths(*scores: float) -> list[Path]:
        return [
            Path([0, *range(100 * i + 1, 100 * i + turns), 9999], [0.0] * turns, score=score)
            for i, (turns, score) in enumerate(zip(lengths, scores, strict=True))
        ]

    rounded = [high if turns == 20 else low for turns in lengths]
    alike = advantages(name, paths(*[low] * len(lengths)))
    np.testing.assert_allclose(advantages(name, paths(*rounded)), alike, atol=1e-5)


def test_several_absorbing_states():
    """Two ways to win, one to lose, all entered from one state; only the losing turn is blamed."""
    paths = [Path([0, 1, 10], [0, 1.0]), Path([0, 1, 11], [0, 1.0]), Path([0, 1, 12], [0, 0.0])]
    values = advantages("rewardflow", paths, episode_norm="none", step_norm="mean") - [1, 1, 1, 1, 0, 0]
    assert values[1] == pytest.approx(values[3])
    assert values[5] < 0 < values[1]
    np.testing.assert_allclose(values[[0, 2, 4]], 0, atol=1e-6)


def test_one_row_of_an_ordinary_state_that_another_trajectory_ended_in():
    """A failure that ends in a state others pass through must not inherit their success."""
    paths = [Path([0, 1, 2], [0, 1.0]), Path([0, 1], [0.0])]
    values = advantages("rewardflow", paths, episode_norm="none", step_norm="mean") - [1, 1, 0]
    assert values[2] < values[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grop", {}, "config.credit.name is 'grop' .did you mean 'grpo'"),
        ("nowhere:mine", {}, "cannot be imported"),
        ("rewardflow", {"gama": 0.9}, "config.credit.options.gama is no option of 'rewardflow' .did you mean 'gamma'"),
        ("rewardflow", {"gamma": 1.5}, "gamma is 1.5: it must be at least 0 and at most 1"),
        ("rewardflow", {"gamma": "0.9"}, "gamma is '0.9': give a number"),
        ("rewardflow", {"rewards": "rewards"}, "'rewards': use one of score, reward .did you mean 'reward'"),
        ("gae", {"whitened": 1}, "give True or False"),
        ("gigpo", {"anchors": []}, "anchors is no option"),
        ("pass_at_k", {"k": 0}, "k is 0: it must be at least 1"),
        ("pass_at_k", {"k": 2.5}, "give a whole number"),
    ],
)
def test_bad_names_and_options_are_refused(name, options, message):
    with pytest.raises(CreditError, match=message):
        check_options(name, options)


def test_good_options_pass():
    for name in ESTIMATORS:
        check_options(name, {})
        assert get_estimator(name).__doc__
    check_options("rewardflow", {"gamma": 1, "step_norm": "none"})


def stepped(table: TurnTable, *, step_weight: int = 1) -> np.ndarray:
    """An option that another estimator has, too, and that takes no fraction."""
    return np.where(table.mask, table.score * step_weight, 0.0)


def test_what_ones_own_estimator_takes_as_step_weight_is_its_own_matter():
    """It was called with 0.0 for the parts of transcripts, so that no batch could be made."""
    table = paths_table(group_of(1, 0))
    assert credit_parts(table, f"{__name__}:stepped") == {}
    assert set(credit_parts(table, "gigpo")) == {"episode", "step"}


def test_an_estimator_of_ones_own():
    name = f"{__name__}:all_the_same"
    check_options(name, {"value": 2.0})
    with pytest.raises(CreditError, match="did you mean 'value'"):
        check_options(name, {"valu": 2.0})
    np.testing.assert_array_equal(advantages(name, group_of(1, 0), value=2.0), [2, 2])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("without_a_default", "fails on a table of five .* scores 0 and 1 .TypeError: .*missing 1 required keyword"),
        ("one_number", ".*: give a function of the table"),
        ("not_finite", "gives .nan .* for a group of scores 0 and 1, of two turns each"),
        ("by_the_bare_deviation", "gives .nan .* for a group of equal scores, of two turns each"),
        ("beside_the_others", "gives .nan .* for a group of one episode, .* .the others of its group may fail: 0 is"),
        ("over_all_rows", "gives row 0 -0.0078.* instead of -0.2 once a failed episode and padding join"),
        ("less_the_best", "gives row 0 -1 instead of -0.5 once .* join scores -1 and -0.5: let rows"),
        ("less_the_least", "gives row 0 0.5 instead of 0 once .* join scores 0.5 and 1: let rows"),
        ("by_all_rewards", "gives row 0 -7 instead of -1 once .* join scores 0 and 1: let rows"),
        ("unmasked", "gives row 10 1 instead of 0 once .*: let rows whose `mask` is False have 0, and no part in any"),
        ("at_random", "gives row 0 0.5, then 1.5 in a second call with equal arguments: give a function of the table"),
        ("SEVERAL_STEPS", "is no function or class"),
    ],
)
def test_an_estimator_of_ones_own_that_fails_is_refused(name: str, message: str):
    with pytest.raises(CreditError, match=f"config.credit.name is '{__name__}:{name}', which {message}"):
        check_options(f"{__name__}:{name}", {})


def test_an_estimator_of_ones_own_may_be_for_shares_alone():
    """Below 0 it has no number. A trial with other scores ended at its error, as if the estimator were at fault."""
    check_options(f"{__name__}:for_shares_alone", {})
    check_options(f"{__name__}:for_successes_alone", {})


def test_an_estimator_of_ones_own_may_answer_in_bfloat16():
    check_options(f"{__name__}:in_half_precision", {})
    assert advantages(f"{__name__}:in_half_precision", group_of(1, 0)).dtype == np.float32


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rows_that_do_not_count_change_nothing(name: str):
    check_options(ESTIMATORS[name], {})  # by its path, as one of the user's own


def all_the_same(table, *, value: float = 1.0):
    return value * table.mask


def in_half_precision(table):
    return estimate(table, "grpo").astype(jnp.bfloat16)


def without_a_default(table, *, value: float):
    return value * table.mask


def one_number(table):
    return table.score.mean()


def over_all_rows(table):
    return jnp.where(table.mask, table.score - table.score.mean(), 0.0)


def less_the_best(table):
    best = jnp.full(len(table.mask), -jnp.inf).at[table.group].max(table.score)[table.group]
    return jnp.where(table.mask, table.score - best, 0.0)


def less_the_least(table):
    least = jnp.full(len(table.mask), jnp.inf).at[table.group].min(table.score)[table.group]
    return jnp.where(table.mask, table.score - least, 0.0)


def by_all_rewards(table):
    return jnp.where(table.mask, table.score - segment_total(table.reward, table.group), 0.0)


def for_shares_alone(table):
    _, mean, _ = segment_statistics(table.score, table.group, table.mask)
    return jnp.where(table.mask, (table.score - mean) / (jnp.sqrt(mean * (1 - mean)) + 1e-6), 0.0)


def for_successes_alone(table):
    if set(np.asarray(table.score).tolist()) - {0.0, 1.0}:
        raise ValueError("scores have to be 0 or 1")
    return jnp.where(table.mask, table.score - 0.5, 0.0)


def unmasked(table):
    return table.score + 1.0


def at_random(table):
    DRAWN.append(len(DRAWN) + 0.5)
    return table.mask * DRAWN[-1]


def not_finite(table):
    return table.score * float("nan")


def by_the_bare_deviation(table):
    turns, mean, deviation = segment_statistics(table.score, table.group, table.mask * 1.0)
    return jnp.where(table.mask & (turns > 2), (table.score - mean) / deviation, 0.0)


def beside_the_others(table):
    turns, _, _ = segment_statistics(table.score, table.group, table.mask * 1.0)
    return jnp.where(table.mask, 0.0 / (turns - 2), 0.0)


DRAWN: list[float] = []
SEVERAL_STEPS = [Path([0, 1, 0, 5], [0.0, 0.0, 1.0]), Path([0, 6], [1.0])]  # equal scores, and state 0 comes back
OTHERS = [Path([20, 21, 20, 23], [0.0, 0.0, 1.0], group=1), Path([20, 22], [0.0], group=1)]
# docs/credit/README.md, edges of groups: what gives something to a group whose members score alike.
BY_STATES = {"rewardflow", "gigpo", "gae", "published.gigpo", "published.rewardflow"}
BY_TABLE = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
ALWAYS_ONE_TURN = {name for name in ESTIMATORS if name.startswith("published.")}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_equal_scores_and_groups_of_one_give(name: str):
    def something(paths: list[Path]) -> bool:
        turns = sum(len(path.rewards) for path in paths if path.group == 0)
        return bool(np.abs(advantages(name, paths)[:turns]).max() > 1e-5)

    alike = group_of(1, 1, 1)
    assert not something(alike) and something(alike + OTHERS) == (name in BY_TABLE)
    assert something(SEVERAL_STEPS) == (name in {*BY_STATES, "discounted_return"})
    assert something(SEVERAL_STEPS[:1]) == (name in {*BY_STATES, "discounted_return"})
    assert something(group_of(0.7)) == (name in ALWAYS_ONE_TURN)
    assert not something(group_of(0.7, turns=3)) or name == "discounted_return"
