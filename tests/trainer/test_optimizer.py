"""Optimisers by config: rules that cover every parameter, Muon on stacked matrices, schedules."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flowjax.config import ConfigError, default_config
from flowjax.trainer.optimizer import learning_rate_schedule, make_optimizer, parameter_names, still_leaves

SHAPES = {
    "embedding": (12, 8),
    "final_norm": (8,),
    "layers": {"q_proj": (2, 8, 8), "o_proj": (2, 8, 8), "input_norm": (2, 8), "q_norm": (2, 8)},
}


@pytest.fixture(scope="module")
def trained() -> nnx.State:
    """The parameters of a small decoder, as the trainer holds them."""
    rng = np.random.default_rng(0)

    def made(shape: tuple[int, ...]) -> nnx.Param:
        return nnx.Param(jnp.asarray(rng.normal(size=shape), jnp.float32))

    return nnx.State(jax.tree.map(made, SHAPES, is_leaf=lambda node: isinstance(node, tuple)))


def updates(trained, gradient=jnp.ones_like, **fields) -> dict[str, np.ndarray]:
    """The first update of every parameter by name, for a made-up gradient."""
    config = default_config().optimizer
    config.update({"learning_rate": 0.1, "warmup_steps": 0, "clip_norm": 1e9, **fields})
    optimizer = make_optimizer(config, 10, trained)

    @jax.jit
    def first(trained):
        return optimizer.update(jax.tree.map(gradient, trained), optimizer.init(trained), trained)[0]

    steps = first(trained)
    return dict(zip(jax.tree.leaves(parameter_names(trained)), map(np.asarray, jax.tree.leaves(steps)), strict=True))


def test_names_are_those_a_rule_is_written_for(trained):
    names = jax.tree.leaves(parameter_names(trained))
    assert {"embedding", "final_norm", "layers/q_proj", "layers/input_norm"} <= set(names)


def test_the_first_rule_that_finds_a_name_counts(trained):
    rules = (("norm", {"frozen": True}), ("embedding", {"learning_rate_scale": 0.5}), (".*", {"weight_decay": 0.1}))
    found = updates(trained, name="sgd", rules=rules)
    weights = dict(zip(jax.tree.leaves(parameter_names(trained)), jax.tree.leaves(trained), strict=True))
    assert not found["final_norm"].any() and not found["layers/q_norm"].any()
    np.testing.assert_allclose(found["embedding"], -0.05, rtol=1e-6)
    np.testing.assert_allclose(found["layers/q_proj"], -0.1 * (1 + 0.1 * weights["layers/q_proj"]), rtol=1e-5)


def test_leaves_that_rules_freeze_have_numbers(trained):
    config = default_config().optimizer
    names = jax.tree.leaves(parameter_names(trained))
    assert still_leaves(config, trained) == frozenset()
    config.rules = (("q_proj", {}), ("norm", {"frozen": False}), (".*", {"frozen": True}))
    assert {names[i] for i in still_leaves(config, trained)} == {"embedding", "layers/o_proj"}


@pytest.mark.parametrize("rules", [(), ((".*", {}),)])
def test_a_gradient_is_clipped_by_the_norm_of_all(trained, rules):
    long = updates(trained, name="sgd", clip_norm=1.0, rules=rules)
    assert np.sqrt(sum(np.sum(step**2) for step in long.values())) == pytest.approx(0.1, rel=1e-5)
    short = updates(trained, lambda leaf: 1e-3 * jnp.ones_like(leaf), name="sgd", clip_norm=1.0, rules=rules)
    assert all(np.allclose(step, -1e-4) for step in short.values())


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_decay_is_taken_from_every_weight(trained, name):
    weights = dict(
        zip(jax.tree.leaves(parameter_names(trained)), map(np.asarray, jax.tree.leaves(trained)), strict=True)
    )
    without, decayed = (updates(trained, name=name, weight_decay=decay) for decay in (0.0, 0.1))
    for parameter, step in decayed.items():
        np.testing.assert_allclose(step - without[parameter], -0.1 * 0.1 * weights[parameter], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_fade_by_the_configs_betas(trained, name):
    """The second step of a vector, whose gradient turned: by Adam's formula; Muon has Nesterov's form of it there."""
    config = default_config().optimizer
    config.update({"name": name, "learning_rate": 0.1, "warmup_steps": 0, "clip_norm": 1e9, "betas": (0.5, 0.8)})
    optimizer = make_optimizer(config, 10, trained)
    state = optimizer.init(trained)
    for slope in (1.0, -3.0):
        gradient = jax.tree.map(partial(jnp.full_like, fill_value=slope), trained)
        step, state = jax.jit(optimizer.update)(gradient, state, trained)
    mean = 0.5 * 0.5 * 1 + 0.5 * -3
    first = mean / (1 - 0.5**2) if name == "adamw" else 0.5 * mean / (1 - 0.5**3) + 0.5 * -3 / (1 - 0.5**2)
    second = (0.8 * 0.2 * 1 + 0.2 * 9) / (1 - 0.8**2)
    np.testing.assert_allclose(np.asarray(step["final_norm"].get_value()), -0.1 * first / second**0.5, rtol=1e-4)


def test_one_rule_for_all_is_no_rule(trained):
    plain, ruled = updates(trained), updates(trained, rules=((".*", {}),))
    for name, step in plain.items():
        np.testing.assert_array_equal(step, ruled[name])


def test_muon_makes_each_layers_matrix_orthogonal(trained):
    key = jax.random.key(1)
    found = updates(trained, lambda leaf: jax.random.normal(key, leaf.shape), name="muon")
    for step in found["layers/o_proj"]:
        values = np.linalg.svd(step, compute_uv=False)
        assert values.max() / values.min() < 2.5, "a random matrix of this size has a far wider range"
        assert np.sqrt((step**2).mean()) == pytest.approx(0.1 * 0.2, rel=0.2), "as large as Adam's"
    for name in ("layers/input_norm", "embedding"):  # vectors and tables: Adam, whose first steps are all as large
        assert np.ptp(np.abs(found[name])) < 1e-3 and 0.05 < np.abs(found[name]).mean() < 0.2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rules": (("norm", {}),)}, r"rules do not cover the parameter '.+': every one needs a rule"),
        ({"rules": (("(", {}),)}, r"config\.optimizer\.rules has \('\(', \{\}\) .*a rule is"),
        ({"rules": ("norm",)}, r"config\.optimizer\.rules has 'norm'"),
        ({"rules": ((".*", {"lr": 1}),)}, r"rules\['\.\*'\]\.lr is no option of a rule.*it has learning_rate_scale"),
        ({"rules": ((".*", {"frozen": "False"}),)}, r"rules\['\.\*'\]\.frozen is 'False': give True or False"),
        ({"rules": (("q", {"weight_decay": "0"}), (".*", {}))}, r"rules\['q'\]\.weight_decay is '0': give a number"),
        ({"rules": ((".*", {"learning_rate_scale": -1}),)}, r"learning_rate_scale is -1: it must be at least 0"),
        ({"name": "adam"}, r"config\.optimizer\.name is 'adam': use one of adamw, muon, sgd"),
        ({"schedule": "step"}, r"config\.optimizer\.schedule is 'step'"),
        ({"warmup_steps": 10}, r"config\.optimizer\.warmup_steps is 10, but the run has only 10"),
    ],
)
def test_refusals(trained, fields, message):
    with pytest.raises(ConfigError, match=message):
        updates(trained, **fields)


def test_schedules():
    config = default_config().optimizer
    config.update({"learning_rate": 1.0, "warmup_steps": 2, "schedule": "linear"})
    rate = learning_rate_schedule(config, 6)
    np.testing.assert_allclose([float(np.asarray(rate(step))) for step in range(7)], [0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    config.schedule = "cosine"
    reference = optax.cosine_decay_schedule(1.0, 4)
    assert float(np.asarray(learning_rate_schedule(config, 6)(4))) == pytest.approx(float(np.asarray(reference(2))))
