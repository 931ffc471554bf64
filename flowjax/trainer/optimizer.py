"""The optimiser of a run: an optax chain from its config, with rules for parameters that differ."""

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict
from optax.contrib import MuonDimensionNumbers, muon

from flowjax.config import ConfigError
from flowjax.fields import NotNegative, option_problems

Arrays = Any
NAMES = ("adamw", "muon", "sgd")
SCHEDULES = ("constant", "cosine", "linear")
_RULE_SETTINGS: dict[str, Any] = {"learning_rate_scale": NotNegative, "weight_decay": NotNegative, "frozen": bool}
_NOT_MATRICES = ("embedding", "lm_head")  # Muon is for maps between hidden states, not for tables of rows
_HOST_MEMORY = "pinned_host"


def learning_rate_schedule(config: ConfigDict, updates: int) -> optax.Schedule:
    """Linear warm-up to `learning_rate`, then constant, cosine or linear decay to 0 at `updates`.

    Raises:
        ConfigError: an unknown schedule, or a warm-up as long as the run.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if warmup >= updates:
        raise ConfigError(
            f"config.optimizer.warmup_steps is {warmup}, but the run has only {updates} optimiser updates "
            "(config.trainer.steps * updates_per_step): lower it"
        )
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, updates - warmup)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, 0.0, updates - warmup)
    else:
        raise ConfigError(f"config.optimizer.schedule is {config.schedule!r}: use one of {', '.join(SCHEDULES)}")
    if not warmup:
        return after
    # From peak / warmup on, not from 0: otherwise the first update would change nothing.
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), after], [warmup])


def make_optimizer(config: ConfigDict, updates: int, trained: Arrays | None = None) -> optax.GradientTransformation:
    """Clipping by global norm, then the optimiser named in the config, by parameter where there are rules.

    Args:
        config: the section `optimizer`.
        updates: optimiser updates of the whole run, for the schedule.
        trained: the trained parameters (or their shapes), which the rules are matched against.

    Raises:
        ConfigError: an unknown optimiser, schedule or setting, or a parameter that no rule covers.
    """
    rules = parse_rules(config.get("rules", ()))
    if not rules:
        return optax.chain(optax.clip_by_global_norm(config.clip_norm), _named(config, updates, {}))
    names = parameter_names(trained)
    labels = [_first_match(rules, name) for name in jax.tree.leaves(names)]
    tree = jax.tree.unflatten(jax.tree.structure(names), labels)
    steps: dict[Hashable, optax.GradientTransformation] = {
        index: _named(config, updates, settings) for index, (_, settings) in enumerate(rules)
    }
    # Clipped before the rules split the parameters: the norm is that of the whole gradient.
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.partition(steps, tree))


def still_leaves(config: ConfigDict, trained: Arrays) -> frozenset[int]:
    """Indices of the leaves of `trained` that rules of the section `optimizer` freeze.

    Raises:
        ConfigError: see `make_optimizer`.
    """
    rules = parse_rules(config.get("rules", ()))
    names = jax.tree.leaves(parameter_names(trained)) if rules else ()
    return frozenset(i for i, name in enumerate(names) if rules[_first_match(rules, name)][1].get("frozen"))


def parse_rules(rules: Sequence[Any]) -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    """`config.optimizer.rules`: pairs of a regular expression and the settings of the parameters that it finds.

    Raises:
        ConfigError: a rule is not such a pair, its expression is invalid, or a setting is unknown or has a value that
            it does not take.
    """
    parsed = []
    for rule in rules:
        try:
            pattern, settings = rule
            parsed.append((re.compile(pattern), dict(settings)))
        except (TypeError, ValueError, re.error) as error:
            raise ConfigError(
                f"config.optimizer.rules has {rule!r} ({error}): a rule is (regular expression, settings), for example "
                "('norm', {'weight_decay': 0.0})"
            ) from error
        for problem in option_problems(f"config.optimizer.rules[{pattern!r}]", parsed[-1][1], _RULE_SETTINGS, "a rule"):
            raise ConfigError(problem)
    return parsed


def check_rules(rules: Sequence[Any], names: Sequence[str]) -> None:
    """Raise ConfigError unless the rules can be read and cover every one of the parameters."""
    parsed = parse_rules(rules)
    for name in names:
        _first_match(parsed, name)


def parameter_names(trained: Arrays) -> Arrays:
    """A tree like `trained` of names such as `layers/q_proj`, `embedding` or `adapter/q_proj/a`."""

    def name(path: tuple[Any, ...], _: Any) -> str:
        parts = [jax.tree_util.keystr((part,), simple=True) for part in path]
        return "/".join(part for part in parts if part != "value")

    return jax.tree_util.tree_map_with_path(name, trained)


def _first_match(rules: Sequence[tuple[re.Pattern[str], Mapping[str, Any]]], name: str) -> int:
    for index, (pattern, _) in enumerate(rules):
        if pattern.search(name):
            return index
    raise ConfigError(
        f"config.optimizer.rules do not cover the parameter {name!r}: every one needs a rule, end with ('.*', {{}})"
    )


def _named(config: ConfigDict, updates: int, settings: Mapping[str, Any]) -> optax.GradientTransformation:
    if settings.get("frozen"):
        return optax.set_to_zero()  # and keep no moments
    peak = learning_rate_schedule(config, updates)
    scale = settings.get("learning_rate_scale", 1.0)
    decay = settings.get("weight_decay", config.weight_decay)

    def schedule(count: Any) -> Any:
        return scale * peak(count)

    rate = peak if scale == 1.0 else schedule
    if config.name == "adamw":
        b1, b2 = config.betas
        return optax.adamw(rate, b1=b1, b2=b2, weight_decay=decay)
    if config.name == "muon":
        # Updates as large as Adam's (root mean square 0.2, arXiv 2502.16982), so that one learning rate fits both.
        # The betas are Adam's, for parameters that are no matrices; Muon's momentum is optax's default of 0.95.
        b1, b2 = config.betas
        return muon(
            rate,
            weight_decay=decay,
            adam_b1=b1,
            adam_b2=b2,
            adam_weight_decay=decay,
            muon_weight_dimension_numbers=_stacked_matrices,
            consistent_rms=0.2,
        )
    if config.name == "sgd":
        return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate)) if decay else optax.sgd(rate)
    raise ConfigError(f"config.optimizer.name is {config.name!r}: use one of {', '.join(NAMES)}")


def _stacked_matrices(trained: Arrays) -> Arrays:
    """Axes of the matrices that Muon makes orthogonal: the last two. Those before them (layers, experts) are batches of
    matrices; None, for which Adam is used, for all other parameters."""

    def of(name: Any, leaf: Any) -> MuonDimensionNumbers | None:
        # Above 2, not 1: parameters are stacked over layers, so that a norm's scales are two-dimensional.
        matrix = leaf is not None and jnp.ndim(leaf) > 2 and str(name).split("/")[-1] not in _NOT_MATRICES
        return MuonDimensionNumbers(reduction_axis=-2, output_axis=-1) if matrix else None

    return jax.tree.map(of, parameter_names(trained), trained)


class OptimizerMemory:
    """Keeps the optimiser's state on the host between updates, where `config.trainer.offload_optimizer` asks for it.

    Raises:
        ConfigError: the devices have no pinned host memory.
    """

    def __init__(self, offload: bool):
        self._offload = offload
        if offload:
            device = jax.local_devices()[0]
            kinds = {memory.kind for memory in device.addressable_memories()}
            if _HOST_MEMORY not in kinds or device.default_memory().kind == _HOST_MEMORY:
                raise ConfigError(
                    f"config.trainer.offload_optimizer is true, but {device.device_kind} has no {_HOST_MEMORY} memory "
                    f"(it has {', '.join(sorted(kinds))}): set it to false"
                )

    def to_host(self, state: Arrays) -> Arrays:
        """Start the copy to the host; nothing waits for it."""
        return self._moved(state, _HOST_MEMORY) if self._offload else state

    def to_device(self, state: Arrays) -> Arrays:
        return self._moved(state, jax.local_devices()[0].default_memory().kind) if self._offload else state

    @staticmethod
    def _moved(state: Arrays, kind: str) -> Arrays:
        # Scalars, which are the optimiser's counters, stay on the devices.
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(kind)) if jnp.ndim(leaf) else leaf, state
        )
