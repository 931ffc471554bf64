"""Names that the parts of a run agree on: of its engines, base model and world, of who speaks for an agent."""

from ml_collections import ConfigDict

from flowjax.config import ConfigError, policy_configs, task_options
from flowjax.envs.base import load_world

BASE_NAME = "base"  # what the engine calls the model without an adapter


def engine_names(count: int) -> list[str]:
    """The engines of a run: their roles, logs and endpoints."""
    return ["engine"] if count == 1 else [f"engine-{index}" for index in range(count)]


def engine_logs(config: ConfigDict) -> str:
    """Where to read what the engines say."""
    if config.engine.urls:
        return "the engines' own logs"
    return f"logs/{'engine' if config.engine.replicas == 1 else 'engine-*'}.log"


def world_name(config: ConfigDict) -> str:
    """What the run's tasks call their world (`Task.world`): all of a run are of one, as its first task says."""
    split = "held_out" if config.eval.versions else "train"
    options = task_options(config, next(iter(config.env.sources), ""))
    task = load_world(config.env.module).tasks(split, config.env.data_seed, **options)[0]
    assert task is not None, "a source of tasks must have every index"
    return task.world


def speakers(config: ConfigDict) -> dict[str, str]:
    """The policy that speaks for each agent of the run's workflow, or the base model, which plays and is not trained.

    Raises:
        ConfigError: an agent's policy is none of the run's, or the base model is asked for where nothing keeps it.
    """
    policies = list(policy_configs(config))
    chosen = config.agents.to_dict()
    if not chosen:
        from flowjax.workflows.single import AGENT  # which takes seconds to import

        return {AGENT: policies[0]}
    for agent, policy in chosen.items():
        if policy not in (*policies, BASE_NAME):
            raise ConfigError(
                f"config.agents.{agent} is {policy!r}: use one of the run's policies, {', '.join(policies)}, or "
                f"{BASE_NAME!r} for the base model as it is"
            )
        if policy == BASE_NAME and config.policy.train == "full":
            raise ConfigError(
                f"config.agents.{agent} is {policy!r}, but with config.policy.train 'full' the engine replaces the "
                "base model by what is trained: name a policy, or train 'lora'"
            )
    if set(chosen.values()) == {BASE_NAME}:
        raise ConfigError(
            f"config.agents has {BASE_NAME!r} speak for every agent, so nothing is trained: name a policy for one"
        )
    return chosen
