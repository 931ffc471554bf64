"""Names that the parts of a run agree on: of its engines, base model and world, of who speaks for an agent."""

from collections.abc import Mapping

from ml_collections import ConfigDict

from flowjax.config import BASE_NAME, ConfigError, base_configs, policy_configs, task_options

RUN_BACKEND = "run"  # kind of a backend that is an engine of the run


def engine_names(count: int, base: str = BASE_NAME) -> list[str]:
    """The engines of a base model: their roles, logs and endpoints."""
    name = "engine" if base == BASE_NAME else f"engine-{base}"
    return [name] if count == 1 else [f"{name}-{index}" for index in range(count)]


def engines_by_base(config: ConfigDict) -> dict[str, list[str]]:
    """The engines of each base model, those that are started here and those at given addresses.

    None where a rollout service elsewhere has engines of its own.
    """
    if "rollout" in config.elsewhere:
        return {}
    return {
        base: engine_names(len(own.engine.urls) or own.engine.replicas, base)
        for base, own in base_configs(config).items()
    }


def engine_logs(config: ConfigDict, base: str = BASE_NAME) -> str:
    """Where to read what the engines of a base model say."""
    if base_configs(config)[base].engine.urls:
        return "the engines' own logs"
    names = engines_by_base(config)[base]
    return f"logs/{names[0] if len(names) == 1 else names[0].removesuffix('0') + '*'}.log"


def world_name(config: ConfigDict) -> str:
    """What the run's tasks call their world (`Task.world`): all of a run are of one, as its first task says."""
    from flowjax.envs.base import find_world  # which imports numpy: the launcher does without

    split = "held_out" if config.eval.versions else "train"
    world = find_world(config.env.name)(**task_options(config, next(iter(config.env.sources), "")))
    task = world.tasks(split, config.env.data_seed)[0]
    assert task is not None, "a source of tasks must have every index"
    return task.world


def speakers(config: ConfigDict) -> dict[str, str]:
    """The policy that speaks for each agent of the run's workflow, or the base model, which plays and is not trained.

    Raises:
        ConfigError: an agent's policy is none of the run's, or a base model is asked for where nothing keeps it.
    """
    policies, bases = policy_configs(config), list(base_configs(config))
    chosen = config.agents.to_dict()
    if not chosen:
        from flowjax.workflows.single import AGENT  # which takes seconds to import

        return {AGENT: next(iter(policies))}
    full = {own.policy.base for own in policies.values() if own.policy.train == "full"}
    for agent, speaker in chosen.items():
        if speaker not in (*policies, *bases):
            frozen = f"{', '.join(map(repr, bases))} for the base model{'s' * (len(bases) > 1)} as it is"
            raise ConfigError(
                f"config.agents.{agent} is {speaker!r}: use one of the run's policies, {', '.join(policies)}, or "
                f"{frozen}"
            )
        if speaker in full:
            raise ConfigError(
                f"config.agents.{agent} is {speaker!r}, but with config.policy.train 'full' the engine replaces the "
                "base model by what is trained: name a policy, or train 'lora'"
            )
    if set(chosen.values()) <= set(bases) and not config.eval.versions:  # nothing is trained in an evaluation anyhow
        spoken = ", ".join(map(repr, dict.fromkeys(chosen.values())))
        raise ConfigError(f"config.agents has {spoken} speak for every agent, so nothing is trained: name a policy")
    return chosen


def executor_bases(config: ConfigDict) -> dict[str, str]:
    """Field of the config -> the base model that this backend of the run's world asks, by kind "run"."""
    found = {}
    for source in config.env.sources or ("",):
        field = f"config.env.sources.{source}.options" if source else "config.env.options"
        backends = task_options(config, source).get("backends") or {}
        for name, given in backends.items() if isinstance(backends, Mapping) else ():
            if isinstance(given, Mapping) and given.get("kind") == RUN_BACKEND:
                found[f"{field}.backends.{name}.base"] = str(given.get("base", BASE_NAME))
    return found


def idle_bases(config: ConfigDict) -> list[str]:
    """Base models that no policy is trained on, that speak for no agent, and that no backend of the world asks."""
    used = {own.policy.base for own in policy_configs(config).values()} | set(config.agents.values())
    used |= set(executor_bases(config).values())
    return [base for base in base_configs(config) if base not in used]
