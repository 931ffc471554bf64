"""A small network learns in a world where success cannot be foreseen, and does not learn to do nothing."""

import jax
import numpy as np

from tests.benchmarks.credit_learning import Guess, imitate, new_network, play, train


def test_rewardflow_does_not_teach_to_do_nothing():
    world, rng = Guess(), np.random.default_rng(0)
    base = imitate(world, new_network(world, jax.random.key(0)), rng)
    numbers, held_out = world.tasks(rng, 200, "train"), world.tasks(rng, 512, "held_out")
    trained = train(world, base, numbers, "rewardflow", {}, rng, steps=25, learning_rate=world.learning_rate)
    before, after = (play(world, network, held_out, np.random.default_rng(1)) for network in (base, trained))
    assert after.idle_share < before.idle_share
    assert after.won.mean() > before.won.mean()
