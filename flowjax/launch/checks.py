"""Checks of a config on its own, before anything expensive starts.

Every check yields messages of one form: field, value, conflict, remedy. All that can be found are given at once.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ml_collections import ConfigDict

from flowjax.config import BASE_NAME, ConfigError, may_change, task_options
from flowjax.credit import GROUP_RELATIVE, PASS_AT_K
from flowjax.fields import shown
from flowjax.run import PER_BASE, PER_POLICY, Base, Policy, Run, check_agents, field_problems, resolve

_RUN_BACKEND = "run"  # kind of a backend that is an engine of the run


def check_config(config: ConfigDict) -> list[str]:
    """Messages on everything in `config` that cannot work on any machine, without importing the modules it names.

    First the fields one by one, then the rules between them.
    """
    problems = field_problems(config)
    try:
        run = resolve(config)
        rules = [
            *on_each_base(run, lambda base: [*_engines(base), *_served_lengths(run, base)]),
            *on_each_policy(run, lambda policy: [*_batches(run, policy), *_training(run, policy), *_cut(run, policy)]),
            *on_each_policy(run, lambda policy: _overlong(run, policy)),
            *_data_algorithms(run),
            *_episodes(run),
            *_bases(run),
            *_trainers(run),
            *_node(run),
        ]
    except ConfigError as error:
        rules = [str(error)]
    except (AttributeError, KeyError, TypeError):
        if not problems:  # else a rule has stumbled over a field of a wrong type, which is reported already
            raise
        rules = []
    return list(dict.fromkeys([*problems, *rules]))


def _node(run: Run) -> Iterator[str]:
    """A run whose dataflow is on another machine has its trainer elsewhere, too: that is what `--join` sets."""
    url, remote = run.config.dataflow.url, set(run.config.elsewhere)
    if run.is_node != bool(url) or (run.is_node and remote != {"dataflow", "trainer"}):
        yield (
            f"config.elsewhere is {tuple(run.config.elsewhere)} and config.dataflow.url {url!r}: leave both to "
            "--join=<address>, which plays for a run on another machine"
        )


def on_each_base(run: Run, check: Callable[[Base], Iterable[str]]) -> list[str]:
    """Messages of a check on each base model, with fields named as the config has them; common ones once."""
    said: dict[str, str] = {}
    for name, base in run.bases.items():
        for text in check(base):
            said.setdefault(text, in_base(name, text))
    return list(said.values())


def other_bases(run: Run, checkpoints: Mapping[str, Path]) -> list[str]:
    """Messages on nano bases that are not those that policies were trained on, as far as their checkpoints note these.

    Args:
        checkpoints: by policy, the folder that has all of its checkpoints.
    """
    found: list[str] = []
    for name, folder in checkpoints.items():
        base = run.policies[name].base
        if (here := base.weights_digest()) and not set(_noted_bases(folder)) <= {here}:
            found.append(
                in_base(
                    base.name,
                    f"config.model.path is {base.model.path!r}, where another base lies than the one that {name} was "
                    "trained on: bring that back, or start from the folder where the run was started",
                )
            )
    return found


def _noted_bases(folder: Path) -> Iterator[str]:
    for note in folder.glob("*/data/metadata"):  # Orbax's file of a checkpoint's counters
        with suppress(OSError, ValueError):  # deleted meanwhile, or not yet written
            if noted := json.loads(note.read_text()).get("base"):
                yield noted


def on_each_policy(run: Run, check: Callable[[Policy], Iterable[str]]) -> list[str]:
    """Messages of a check on each policy, with fields named as the config has them; common ones once."""
    found = [
        in_base(policy.base.name, _in_policy(run, name, text))
        for name, policy in run.policies.items()
        for text in check(policy)
    ]
    return list(dict.fromkeys(found))


def _in_policy(run: Run, policy: str, text: str) -> str:
    """A message about a policy: sections that the policy has of its own are named as the config has them."""
    sections = [section for section in PER_POLICY if section in run.config.policies.get(policy, {})]
    return _renamed(text, sections, f"config.policies.{policy}")


def in_base(base: str, text: str) -> str:
    """A message about a base model, with its fields named as the config has them."""
    return text if base == BASE_NAME else _renamed(text, PER_BASE, f"config.bases.{base}")


def _renamed(text: str, sections: Iterable[str], holder: str) -> str:
    for section in sections:
        text = re.sub(rf"\bconfig\.{section}\b", f"{holder}.{section}", text)
    return text


def check_unchanged(saved: ConfigDict, config: ConfigDict) -> list[str]:
    """Messages on fields that may not change when the run that `saved` describes is resumed with `config`."""
    return [
        f"config.{field} is {now!r}, but this run was started with {before!r}: "
        "leave it out of --resume, or start a new run"
        for field, before, now in differences(saved, config)
        if not may_change(field)
    ]


def differences(one: ConfigDict, other: ConfigDict) -> list[tuple[str, object, object]]:
    """Fields in which two configs differ, by dotted path, with the value in each; None where there is no such field."""
    before, now = _flat(one), _flat(other)
    fields = sorted(before.keys() | now.keys())
    # A map that is empty on one side alone: what the other side has in it is said.
    filled = {name for name in fields if any(each.startswith(f"{name}.") for each in fields)}
    return [
        (name, before.get(name), now.get(name))
        for name in fields
        if name not in filled and before.get(name) != now.get(name)
    ]


def _engines(base: Base) -> Iterator[str]:
    """Problems with the engines of a base model and their addresses."""
    engine = base.engine
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
    if engine.quantize and engine.urls:
        yield (
            f"config.engine.quantize is {engine.quantize!r}, but config.engine.urls names engines that run elsewhere: "
            "start those with it, and set it to '' here"
        )
    if len(set(engine.urls)) < len(engine.urls):
        yield f"config.engine.urls is {tuple(engine.urls)}, in which an address comes twice: name each engine once"


def _served_lengths(run: Run, base: Base) -> Iterator[str]:
    longest, served = _longest_turn(run), base.engine.max_model_tokens
    if served < longest:
        yield (
            f"config.engine.max_model_tokens is {served}, but config.rollout.max_prompt_tokens + "
            f"max_new_tokens is {longest}: raise max_model_tokens to {longest} or lower one of the two"
        )


def _longest_turn(run: Run) -> int:
    """Tokens of the longest prompt with the longest reply."""
    return run.config.rollout.max_prompt_tokens + run.config.rollout.max_new_tokens


def _batches(run: Run, policy: Policy) -> Iterator[str]:
    """Problems with the rows, batches and updates of a policy, and with its reward."""
    trainer, group_size = policy.trainer, run.config.rollout.group_size
    longest, episodes = _longest_turn(run), trainer.groups_per_step * group_size
    if trainer.row_tokens < longest:
        yield (
            f"config.trainer.row_tokens is {trainer.row_tokens}, but config.rollout.max_prompt_tokens + max_new_tokens "
            f"is {longest}: raise row_tokens to {longest} or lower one of the two"
        )
    if trainer.updates_per_step > episodes:
        yield (
            f"config.trainer.updates_per_step is {trainer.updates_per_step}, but a batch has only {episodes} episodes "
            f"(config.trainer.groups_per_step * config.rollout.group_size): lower it to {episodes} or less"
        )
    if group_size < 2 and policy.credit.name in GROUP_RELATIVE:
        yield (
            f"config.rollout.group_size is {group_size}, but config.credit.name is {policy.credit.name!r}, which "
            "compares the episodes of a group: raise group_size to 2 or more"
        )
    elif policy.credit.name == "pass_at_k" and (k := policy.credit.options.get("k", PASS_AT_K)) >= group_size:
        yield (
            f"config.credit.options.k of 'pass_at_k' is {k}, but config.rollout.group_size is {group_size}: a group "
            "has one subset of k then, with which nothing is compared: lower k or raise group_size above it"
        )
    updates = trainer.steps * trainer.updates_per_step
    if policy.optimizer.warmup_steps >= updates > 0:
        yield (
            f"config.optimizer.warmup_steps is {policy.optimizer.warmup_steps}, but the run has only {updates} "
            "optimiser updates (config.trainer.steps * updates_per_step): lower it"
        )
    if not policy.reward.components:
        yield "config.reward.components is empty: name at least one, for example {'success': 1.0}"


def _overlong(run: Run, policy: Policy) -> Iterator[str]:
    """A component for long replies that no reply is long enough for."""
    given, most = policy.reward.components.get("overlong"), run.config.rollout.max_new_tokens
    if not isinstance(given, ConfigDict) or "path" in given:
        return
    limit, buffer = given.get("limit_tokens"), given.get("buffer_tokens")
    if isinstance(limit, int | float) and isinstance(buffer, int | float) and limit - buffer >= most:
        yield (
            f"config.reward.components.overlong.limit_tokens is {limit} and its buffer_tokens {buffer}, so that "
            f"replies of more than {limit - buffer} tokens cost something, but none is longer than "
            f"config.rollout.max_new_tokens, {most}: lower limit_tokens to {most}"
        )


def _training(run: Run, policy: Policy) -> Iterator[str]:
    """Settings that conflict with full fine-tuning."""
    if policy.train != "full":
        return
    if policy.loss.kl_coefficient:
        yield (
            f"config.loss.kl_coefficient is {policy.loss.kl_coefficient}, but with config.policy.train 'full' no copy "
            "of the base is kept to compare with: set it to 0, or train 'lora'"
        )
    if policy.base.model.quantize:
        yield (
            f"config.model.quantize is {policy.base.model.quantize!r}, but config.policy.train is 'full', and "
            "quantised weights cannot be trained: set it to '' or train 'lora'"
        )
    if policy.base.engine.quantize:
        yield (
            f"config.engine.quantize is {policy.base.engine.quantize!r}, but config.policy.train is 'full', and its "
            "engines take all weights as they are: set it to '' or train 'lora'"
        )
    if len(sharing := run.policies_on(policy.base.name)) > 1:
        yield (
            f"config.policies.{policy.name} trains 'full' weights, but {len(sharing)} policies share the base: "
            "set policy.train to 'lora'"
        )


def _cut(run: Run, policy: Policy) -> Iterator[str]:
    """Sampling that leaves tokens out (top_p, top_k, min_p, grammars), where the loss does not correct for it.

    The engine's log-probs are of the renormalised distribution that is left, the trainer's of the whole vocabulary. The
    importance ratio begins at the kept probability mass instead of 1, so that a clip at 0.8 would take the gradient
    from tokens of negative advantage whose probability no update has changed yet.
    """
    correction = policy.loss.options.get("correction", "none")
    if run.is_evaluation or (correction != "none" and not str(correction).endswith("mask")):
        return
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("structured_outputs", False)):
        if (value := run.config.rollout[name]) != off:
            held_out = f" (of held-out episodes it is config.eval.{name})" if name in run.config.eval else ""
            yield (
                f"config.rollout.{name} is {value}, so that the engine's log-probs are of the tokens that are left and "
                f"the trainer's of all, but config.loss.options.correction is {correction!r}: set it to "
                f"'token_truncate', which weighs tokens by the share that was left, or set {name} back to "
                f"{off}{held_out}"
            )


def _data_algorithms(run: Run) -> Iterator[str]:
    """Problems with the form of the data algorithms' options, and a limit that no reply reaches."""
    longest, algorithms = run.config.rollout.max_new_tokens, run.config.dataflow.algorithms
    for name, options in algorithms.items():
        if not isinstance(options, ConfigDict | Mapping):
            yield (
                f"config.dataflow.algorithms.{name} is {shown(options)}: give a dict of its options, {{}} for none; "
                'one of your own is {"path": "package.module:Class"}'
            )
            return
    limit = algorithms.get("overlong_filter", {}).get("limit_tokens")
    if isinstance(limit, int) and limit > longest:
        yield (
            f"config.dataflow.algorithms.overlong_filter.limit_tokens is {limit}, but no reply is longer than "
            f"config.rollout.max_new_tokens, {longest}, so that none would be left out: lower it to {longest}"
        )


def _episodes(run: Run) -> Iterator[str]:
    """Problems with concurrent episodes, their times and messages, and the agents that play in them."""
    rollout, step_timeout_s = run.config.rollout, run.config.env.step_timeout_s
    if rollout.min_concurrent_episodes > rollout.max_concurrent_episodes:
        yield (
            f"config.rollout.min_concurrent_episodes is {rollout.min_concurrent_episodes}, more than "
            f"config.rollout.max_concurrent_episodes, {rollout.max_concurrent_episodes}: lower it"
        )
    if (lease_s := run.config.dataflow.lease_s) < step_timeout_s:
        yield (
            f"config.dataflow.lease_s is {lease_s}, shorter than one step of the world may take "
            f"(config.env.step_timeout_s is {step_timeout_s}): raise lease_s"
        )
    turns = rollout.max_episode_turns or run.config.env.max_turns * len(run.agents)
    # 4 bytes for each prompt id, 4 + 4 for each sampled id and its log-prob; a turn's names and numbers come on top.
    episode_bytes = turns * (4 * rollout.max_prompt_tokens + 8 * rollout.max_new_tokens)
    if (most_bytes := run.config.dataflow.max_message_bytes) < episode_bytes:
        yield (
            f"config.dataflow.max_message_bytes is {most_bytes}, but an episode of {turns} turns of the longest "
            f"prompts and replies has {episode_bytes} bytes of tokens and log-probs: raise it beyond that"
        )
    if BASE_NAME in run.policies:
        yield f"a policy is named {BASE_NAME!r}, which is the engine's name of the base model: give it another name"
    for policy in run.config.policies if not run.is_evaluation else ():
        if policy not in run.agents.values():
            yield (
                f"config.policies.{policy} speaks for no agent, and its trainer would wait for batches without end: "
                "name it in config.agents, or leave it out"
            )
    try:
        check_agents(run)
    except ConfigError as error:
        yield str(error)


def _bases(run: Run) -> Iterator[str]:
    """Problems with base models that nothing needs, that a backend cannot ask, or that share an engine."""
    asked = _backend_bases(run.config)
    needed = {policy.base.name for policy in run.policies.values()} | {*run.agents.values(), *asked.values()}
    for base in (name for name in run.bases if name not in needed):
        if base == BASE_NAME:
            yield (
                f"config.bases has {', '.join(run.config.bases)}, and the run's own base model (config.model) neither "
                "speaks for an agent nor is trained: make one of config.bases the run's own"
            )
        else:
            yield (
                f"config.bases.{base} speaks for no agent, no policy is trained on it and no backend of the world asks "
                "it: name it in config.agents or in the policy.base of a policy, or leave it out"
            )
    for field, base in asked.items():
        if base not in run.bases:
            yield f"{field} is {base!r}: use one of the run's base models, {', '.join(run.bases)}"
        elif base in run.replaced_bases:
            yield (
                f"{field} is {base!r}, but with policy.train 'full' the engine replaces that base model by what is "
                "trained: name one of config.bases, or train 'lora'"
            )
    users: dict[str, str] = {}
    for name, base in run.bases.items():
        for url in dict.fromkeys(base.engine.urls):
            if url in users:
                fields = " and ".join(in_base(each, "config.engine.urls") for each in (users[url], name))
                yield f"{fields} both have {url!r}, but an engine serves one base model: give each its own"
            users.setdefault(url, name)


def _backend_bases(config: ConfigDict) -> dict[str, str]:
    """Field of the config -> the base model that this backend of the run's world asks, by kind "run"."""
    found = {}
    for source in config.env.sources or ("",):
        field = f"config.env.sources.{source}.options" if source else "config.env.options"
        backends = task_options(config, source).get("backends") or {}
        for name, given in backends.items() if isinstance(backends, Mapping) else ():
            if isinstance(given, Mapping) and given.get("kind") == _RUN_BACKEND:
                found[f"{field}.backends.{name}.base"] = str(given.get("base", BASE_NAME))
    return found


def _trainers(run: Run) -> Iterator[str]:
    """Conflicts of `separate_trainers`: a trainer holds one base; one of several processes trains all policies."""
    trained = list(dict.fromkeys(policy.base.name for policy in run.policies.values()))
    if len(trained) > 1 and not run.config.separate_trainers:
        yield (
            f"config.separate_trainers is False, but policies are trained on {len(trained)} base models "
            f"({', '.join(trained)}) and a trainer holds one: set it to True"
        )
    if run.config.separate_trainers and (processes := run.config.trainer.processes) > 1:
        yield (
            f"config.separate_trainers is True, but config.trainer.processes is {processes}, and a "
            "trainer of several processes is one for all policies: set one of them back"
        )


def _flat(config: ConfigDict, prefix: str = "") -> dict[str, object]:
    """Leaves by dotted path, empty maps among them: {"greso": {}} asks for something. Tuples as lists, since a saved
    config has been through JSON."""
    leaves: dict[str, object] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, ConfigDict) and len(value):
            leaves |= _flat(value, f"{path}.")
        else:
            leaves[path] = {} if isinstance(value, ConfigDict) else _listed(value)
    return leaves


def _listed(value: object) -> object:
    """Tuples as lists, at every depth."""
    return [_listed(item) for item in value] if isinstance(value, tuple | list) else value
