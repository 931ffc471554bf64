"""The exact advantages that estimators are measured by: against play itself, and an arithmetic of their own."""

import jax
import numpy as np
import pytest

from flowjax.envs.sokoban.levels import Shape, generate
from tests.benchmarks.credit_learning import GROUP, Sokoban, new_network, play
from tests.benchmarks.credit_oracle import Chances, chances, exact_advantages, measure


def levels(count: int) -> list:
    rng = np.random.default_rng(3)
    return [generate(rng, Shape(5, 5, 1, max_moves=6), "train") for _ in range(count)]


class SmallSokoban(Sokoban):
    inputs, max_turns, cells = 100, 6, np.arange(25)


def test_chances_are_those_that_play_finds():
    world = SmallSokoban()
    network = new_network(world, jax.random.key(1))
    rng = np.random.default_rng(0)
    for level in levels(4):
        known = chances(world, network, level)
        played = play(world, network, [level] * 4000, rng)
        expected = known.value[world.max_turns, 0]
        assert played.won.mean() == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 4000))


def test_advantages_have_no_mean_in_any_position_and_add_up_along_an_episode():
    world = SmallSokoban()
    network = new_network(world, jax.random.key(1))
    chosen = [level for level in levels(5) for _ in range(GROUP)]
    known: list[Chances] = [chances(world, network, level) for level in chosen]
    for each in known[::GROUP]:
        for left in range(1, world.max_turns + 1):
            gains = each.value[left - 1][each.after] - each.value[left][:-1, None]
            np.testing.assert_allclose((each.policy * gains).sum(axis=1), 0.0, atol=1e-6)
    played = play(world, network, chosen, np.random.default_rng(0))
    found = exact_advantages(world, known, played)
    for episode, each in enumerate(known):
        # What an episode's moves have changed is its end less what could be expected at its start.
        gained = found[played.columns["trajectory"] == episode].sum()
        assert gained == pytest.approx(played.won[episode] - each.value[world.max_turns, 0], abs=1e-6)


def test_estimators_point_where_the_exact_advantages_do_and_noise_nowhere():
    world = SmallSokoban()
    network = new_network(world, jax.random.key(1))
    variants = {"rewardflow": ("rewardflow", {}), "noise": (f"{__name__}:noise", {})}
    found = {
        label: (correlation, cosines.mean())
        for label, correlation, cosines, _, _ in measure(
            world, network, levels(20), variants, 6, np.random.default_rng(0)
        )
    }
    assert found["exact"][0] == pytest.approx(1.0)
    assert min(found["exact"][1], found["rewardflow"][1]) > found["noise"][1] + 0.3
    assert abs(found["noise"][0]) < 0.1


def noise(table):
    """An estimator that knows nothing."""
    return jax.random.normal(jax.random.key(0), table.mask.shape) * table.mask
