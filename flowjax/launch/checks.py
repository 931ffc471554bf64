"""What can be refused before anything expensive starts: the config on its own.

A check gives messages of one form: field, value, conflict, remedy. All that can be found are given at once.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from ml_collections import ConfigDict

from flowjax.config import (
    BASE_NAME,
    PER_BASE,
    ConfigError,
    base_configs,
    field_problems,
    may_change,
    policies_on,
    policy_configs,
)
from flowjax.rollout.names import executor_bases, idle_bases, speakers

GROUP_RELATIVE = {"grpo", "dr_grpo", "rloo", "gigpo", "rewardflow", "maxrl", "pass_at_k", "best_of_group"}


def check_config(config: ConfigDict) -> list[str]:
    """Everything about `config` that cannot work on any machine, short of looking names up.

    Rules between fields are looked at where every field is of its kind.
    """
    problems = field_problems(config)
    try:
        rules = on_each_base(config, lambda own: [*_engines(own), *_lengths(own), *_batches(own)])
        rules += [*_training(config), *_bases(config)]
    except ConfigError as error:
        rules = [str(error)]
    except (AttributeError, KeyError, TypeError):
        if not problems:  # else a rule has read a field that is refused anyhow
            raise
        rules = []
    return list(dict.fromkeys([*problems, *rules]))


def on_each_base(config: ConfigDict, check: Callable[[ConfigDict], Iterable[str]]) -> list[str]:
    """What a check says of the config of each base model. What several have in common is told once."""
    told: dict[str, str] = {}
    for base, own in base_configs(config).items():
        for text in check(own):
            told.setdefault(text, in_base(base, text))
    return list(told.values())


def in_base(base: str, text: str) -> str:
    """A text about a base model's own config, with its fields named as they are in the run's."""
    sections = "|".join(PER_BASE)
    return text if base == BASE_NAME else re.sub(rf"\bconfig\.({sections})\b", rf"config.bases.{base}.\1", text)


def check_unchanged(saved: ConfigDict, config: ConfigDict) -> list[str]:
    """Fields in which `config` would make another run of the one that `saved` describes."""
    before, now = _flat(saved), _flat(config)
    return [
        f"config.{field} is {now.get(field)!r}, but this run was started with {before.get(field)!r}: "
        "leave it out of --resume, or start a new run"
        for field in sorted(before.keys() | now.keys())
        if before.get(field) != now.get(field) and not may_change(field)
    ]


def _training(config: ConfigDict) -> Iterator[str]:
    """What full fine-tuning cannot be combined with, and rules that cannot be read."""
    for name, own in policy_configs(config).items():
        sharing = policies_on(config, own.policy.base)
        if own.policy.train == "full" and own.loss.kl_coefficient:
            yield (
                f"config.loss.kl_coefficient is {own.loss.kl_coefficient}, but with config.policy.train 'full' no copy "
                "of the base is kept to compare with: set it to 0, or train 'lora'"
            )
        if own.policy.train == "full" and own.model.quantize:
            problem = (
                f"config.model.quantize is {own.model.quantize!r}, but config.policy.train is 'full', and quantised "
                "weights cannot be trained: set it to '' or train 'lora'"
            )
            yield in_base(own.policy.base, problem)
        if own.policy.train == "full" and len(sharing) > 1:
            yield (
                f"config.policies.{name} trains 'full' weights, but {len(sharing)} policies share the base: "
                "set policy.train to 'lora'"
            )
    if config.separate_trainers and config.trainer.processes > 1:
        yield (
            f"config.separate_trainers is True, but config.trainer.processes is {config.trainer.processes}, and a "
            "trainer of several processes is one for all policies: set one of them back"
        )


def _bases(config: ConfigDict) -> Iterator[str]:
    """Whether each base model has something to do and engines of its own, and each trainer one base."""
    for base in idle_bases(config):
        if base == BASE_NAME:
            yield (
                f"config.bases has {', '.join(config.bases)}, and the run's own base model (config.model) neither "
                "speaks for an agent nor is trained: make one of config.bases the run's own"
            )
        else:
            yield (
                f"config.bases.{base} speaks for no agent, no policy is trained on it and no backend of the world asks "
                "it: name it in config.agents or in the policy.base of a policy, or leave it out"
            )
    full = {own.policy.base for own in policy_configs(config).values() if own.policy.train == "full"}
    for field, base in executor_bases(config).items():
        if base not in base_configs(config):
            yield f"{field} is {base!r}: use one of the run's base models, {', '.join(base_configs(config))}"
        elif base in full:
            yield (
                f"{field} is {base!r}, but with policy.train 'full' the engine replaces that base model by what is "
                "trained: name one of config.bases, or train 'lora'"
            )
    trained = list(dict.fromkeys(own.policy.base for own in policy_configs(config).values()))
    if len(trained) > 1 and not config.separate_trainers:
        yield (
            f"config.separate_trainers is False, but policies are trained on {len(trained)} base models "
            f"({', '.join(trained)}) and a trainer holds one: set it to True"
        )
    users: dict[str, str] = {}
    for base, own in base_configs(config).items():
        for url in dict.fromkeys(own.engine.urls):
            if url in users:
                fields = " and ".join(in_base(each, "config.engine.urls") for each in (users[url], base))
                yield f"{fields} both have {url!r}, but an engine serves one base model: give each its own"
            users.setdefault(url, base)


def _engines(config: ConfigDict) -> Iterator[str]:
    """Which engines there are, how many episodes they get, and what their model names leave free."""
    rollout, engine = config.rollout, config.engine
    if engine.urls and engine.replicas > 1:
        yield (
            f"config.engine.replicas is {engine.replicas}, but config.engine.urls names engines that run elsewhere: "
            "leave replicas at 1 or urls empty"
        )
    if engine.port <= 65535 < engine.port + engine.replicas - 1 and not engine.urls:
        yield (
            f"config.engine.port is {engine.port}, but config.engine.replicas is {engine.replicas}, and the last would "
            f"take port {engine.port + engine.replicas - 1}: lower the port to {65536 - engine.replicas} or less"
        )
    if len(set(engine.urls)) < len(engine.urls):
        yield f"config.engine.urls is {tuple(engine.urls)}, in which an address comes twice: name each engine once"
    if rollout.min_concurrent_episodes > rollout.max_concurrent_episodes:
        yield (
            f"config.rollout.min_concurrent_episodes is {rollout.min_concurrent_episodes}, more than "
            f"config.rollout.max_concurrent_episodes, {rollout.max_concurrent_episodes}: lower it"
        )
    if BASE_NAME in (config.policy.name, *config.policies):
        yield f"a policy is named {BASE_NAME!r}, which is the engine's name of the base model: give it another name"
    if config.agents:
        try:
            speakers(config)
        except ConfigError as error:
            yield str(error)


def _lengths(config: ConfigDict) -> Iterator[str]:
    rollout, trainer, engine = config.rollout, config.trainer, config.engine
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if trainer.row_tokens < longest:
        yield (
            f"config.trainer.row_tokens is {trainer.row_tokens}, but config.rollout.max_prompt_tokens + max_new_tokens "
            f"is {longest}: raise row_tokens to {longest} or lower one of the two"
        )
    if engine.max_model_tokens < longest:
        yield (
            f"config.engine.max_model_tokens is {engine.max_model_tokens}, but config.rollout.max_prompt_tokens + "
            f"max_new_tokens is {longest}: raise max_model_tokens to {longest} or lower one of the two"
        )
    if config.dataflow.lease_s < config.env.step_timeout_s:
        yield (
            f"config.dataflow.lease_s is {config.dataflow.lease_s}, shorter than one step of the world may take "
            f"(config.env.step_timeout_s is {config.env.step_timeout_s}): raise lease_s"
        )


def _batches(config: ConfigDict) -> Iterator[str]:
    trainer, group_size = config.trainer, config.rollout.group_size
    episodes = trainer.groups_per_step * group_size
    if trainer.updates_per_step > episodes:
        yield (
            f"config.trainer.updates_per_step is {trainer.updates_per_step}, but a batch has only {episodes} episodes "
            f"(config.trainer.groups_per_step * config.rollout.group_size): lower it to {episodes} or less"
        )
    if group_size < 2 and config.credit.name in GROUP_RELATIVE:
        yield (
            f"config.rollout.group_size is {group_size}, but config.credit.name is {config.credit.name!r}, which "
            "compares the episodes of a group: raise group_size to 2 or more"
        )
    updates = trainer.steps * trainer.updates_per_step
    if config.optimizer.warmup_steps >= updates > 0:
        yield (
            f"config.optimizer.warmup_steps is {config.optimizer.warmup_steps}, but the run has only {updates} "
            "optimiser updates (config.trainer.steps * updates_per_step): lower it"
        )
    if not config.reward.components:
        yield "config.reward.components is empty: name at least one, for example {'success': 1.0}"


def _flat(config: ConfigDict, prefix: str = "") -> dict[str, object]:
    """Leaves by dotted path; tuples as lists, as JSON has them."""
    leaves: dict[str, object] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, ConfigDict):
            leaves |= _flat(value, f"{path}.")
        else:
            leaves[path] = _listed(value)
    return leaves


def _listed(value: object) -> object:
    """Tuples as lists, at every depth."""
    return [_listed(item) for item in value] if isinstance(value, tuple | list) else value
