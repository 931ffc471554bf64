"""The optimiser of a run: an optax chain from its config."""

import optax
from ml_collections import ConfigDict

from flowjax.config import ConfigError

_SCHEDULES = ("constant", "cosine", "linear")


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
        raise ConfigError(f"config.optimizer.schedule is {config.schedule!r}: use one of {', '.join(_SCHEDULES)}")
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), after], [warmup])


def make_optimizer(config: ConfigDict, updates: int) -> optax.GradientTransformation:
    """Clipping by global norm, then the optimiser named in the config (adamw | sgd)."""
    schedule = learning_rate_schedule(config, updates)
    if config.name == "adamw":
        b1, b2 = config.betas
        step = optax.adamw(schedule, b1=b1, b2=b2, weight_decay=config.weight_decay)
    elif config.name == "sgd":
        step = optax.sgd(schedule)
    else:
        raise ConfigError(f"config.optimizer.name is {config.name!r}: use adamw or sgd")
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), step)
