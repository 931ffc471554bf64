"""The default configuration: every field, with a comment and a unit. Recipes in `configs/` change what differs."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

BASE_NAME = "base"  # of the run's own base model, also on its engines


class ConfigError(ValueError):
    """A config that cannot be run; the message names the field, its value and the remedy."""


def default_config() -> ConfigDict:
    """A complete, unlocked config. Recipes fill in what has no sensible default (`env`, `model.path`, `name`)."""
    config = ConfigDict()
    config.name = ""  # run name; the run folder is <runs>/<name>
    config.runs = "runs"  # folder that holds run folders
    config.seed = 0  # fixes tasks, initial weights and shuffles
    # Roles that are not started, because programs of one's own take their place (docs/dataflow.md): "rollout", with the
    # engines that it plays with, and "trainer".
    config.elsewhere = ()
    config.max_restarts = 5  # of a role within an hour before the run gives up; engines have a number of their own

    # The policy's base model and the adapter that is trained on it.
    config.model = ConfigDict()
    config.model.path = ""  # Hugging Face folder with config.json, tokenizer.json and safetensors
    config.model.dtype = "bfloat16"  # of the base weights and activations in the trainer
    config.model.remat = "layer"  # none | dots | layer: what the backward pass recomputes (nothing, little, most)
    config.model.attention = "auto"  # auto | xla | cudnn | splash: auto is by platform and row length (docs/models.md)
    config.model.quantize = ""  # "" | int8 | nf4: how the frozen base's matrices are stored in the trainer; with LoRA
    config.model.nano = None  # shape of a nano base to build when path is missing (flowjax.models.nano), or None
    config.policy = ConfigDict()
    config.policy.name = "agent"
    config.policy.base = BASE_NAME  # base model that it is trained on: the one above, or one of config.bases
    config.policy.train = "lora"  # lora | full
    config.policy.lora = ConfigDict()
    config.policy.lora.rank = 32
    config.policy.lora.alpha = 32.0  # update is alpha / rank * B A (alpha / sqrt(rank) with rslora)
    config.policy.lora.rslora = False
    config.policy.lora.dropout = 0.0  # probability that an input of the adapter is zeroed in a training pass
    config.policy.lora.targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    # Further base models, each with engines of its own: name -> the fields of `model` and `engine` in which it differs,
    # for example {"judge": {"model": {"path": "models/Qwen3-32B"}, "engine": {"tensor_parallel": 2}}}. Addresses
    # (engine.port, engine.urls) are not taken over, nor is model.nano where the path is another.
    config.bases = ConfigDict()
    # Several policies: name -> the sections in which it differs, for example
    # {"solver": {}, "verifier": {"optimizer": {"learning_rate": 1e-4}}}. Empty: the one named by config.policy.
    config.policies = ConfigDict()
    config.separate_trainers = False  # a trainer process for each policy, with its share of the trainer's accelerators
    # Agent of the workflow -> the policy that speaks for it; or "base", or one of config.bases: that model as it is,
    # which is not trained. Empty: the only policy for the only agent.
    config.agents = ConfigDict()

    # The world that episodes are played in.
    config.env = ConfigDict()
    config.env.module = ""  # dotted path of a module of flowjax.envs, or of one's own with the same functions
    config.env.options = ConfigDict()  # keyword arguments of the module's make()
    config.env.max_turns = 15
    config.env.prompt = "instruct"  # instruct | compact: how the workflow words an observation
    config.env.context = "window"  # window | append: each turn its own prompt, or one conversation that grows
    config.env.history = -1  # past turns that a window prompt shows; -1: 2 for instruct, 0 for compact
    config.env.reference_parsing = False  # read replies as the published system does, faults included
    config.env.workers = 1  # processes that hold the environments
    config.env.step_timeout_s = 10.0  # a step that takes longer loses its worker and its episode
    config.env.data_seed = 0  # fixes the training and held-out tasks, whatever config.seed is
    config.env.train_tasks = 10_000  # number of distinct training tasks
    # Several sources of tasks, mixed: name -> weight (1.0), options (those in which it differs) and train_tasks, for
    # example {"small": {"weight": 3.0}, "large": {"options": {"rows": 8}}}. Empty: one, with the options above.
    config.env.sources = ConfigDict()
    config.workflow = "flowjax.workflows.single.play"  # dotted path of the episode function

    # Episodes and the engine that answers them.
    config.rollout = ConfigDict()
    config.rollout.group_size = 8  # trajectories per task
    config.rollout.max_concurrent_episodes = 128
    config.rollout.min_concurrent_episodes = 0  # floor where their number follows the engines' load; 0: always the most
    config.rollout.temperature = 1.0
    config.rollout.max_prompt_tokens = 1024
    config.rollout.max_new_tokens = 256
    config.rollout.max_episode_turns = 0  # turns of all agents in one episode; 0: 4 x env.max_turns for each agent
    config.rollout.structured_outputs = False  # hold replies to the world's grammar of actions while they are sampled
    config.rollout.episode_timeout_s = 300.0
    config.engine = ConfigDict()
    config.engine.python = ""  # interpreter that has vLLM; "" is the one running flowjax
    config.engine.dtype = "bfloat16"  # serving precision
    config.engine.port = 0  # 0 picks a free port on loopback; further replicas take the ports after it
    config.engine.replicas = 1  # engines that are started, each with tensor_parallel accelerators
    config.engine.urls = ()  # engines that run elsewhere, instead of any started here: "http://host:port" each
    config.engine.stream_partial = False  # have replies streamed, so that one goes on elsewhere when its engine dies
    config.engine.tensor_parallel = 1
    config.engine.max_model_tokens = 2048
    config.engine.max_concurrent_sequences = 256
    config.engine.kv_cache_bytes = 0  # CPU: bytes of key-value cache; 0 leaves it to vLLM
    config.engine.gpu_memory_fraction = 0.85
    config.engine.threads = 1  # CPU: threads of the engine's worker
    config.engine.prompts_per_request = 64  # prompts sent in one HTTP request
    config.engine.batch_window_s = 0.002  # longest wait for prompts to share a request
    config.engine.request_timeout_s = 120.0
    config.engine.start_timeout_s = 300.0
    config.engine.max_restarts = 3  # restarts of an engine within an hour before the run gives up
    config.engine.extra_args = ()  # further arguments of vLLM's server

    # Tasks, groups, staleness.
    config.dataflow = ConfigDict()
    config.dataflow.host = "127.0.0.1"  # address to listen on; beyond loopback every request must show the run's token
    config.dataflow.port = 0  # 0 picks a free port
    config.dataflow.max_message_bytes = 256 * 1024**2  # larger requests are refused
    config.dataflow.max_staleness = 1  # versions a trained token may lag; 0 is synchronous
    config.dataflow.lease_s = 120.0  # an episode not finished or renewed by then is leased again
    config.dataflow.max_attempts = 3  # leases of one episode before it is given up
    config.dataflow.failed_episodes = "retry"  # retry | short | drop: what an episode that its world broke leads to
    config.dataflow.min_group_size = 2  # a group with fewer episodes in is dropped, where group_size is not smaller
    config.dataflow.max_ready_groups = 0  # groups that wait for a policy's trainer; 0: twice what staleness admits
    config.dataflow.algorithms = ConfigDict()  # data algorithms by name, in order, each with its options
    config.dataflow.keep_trajectories = True  # write trajectories/<step>.jsonl for the report

    # Outcome -> reward -> advantage per turn -> loss. Names are looked up in the rooms of the same name.
    config.reward = ConfigDict()
    config.reward.components = ConfigDict()  # component name -> weight; a recipe names them
    config.credit = ConfigDict()
    config.credit.name = "grpo"
    config.credit.options = ConfigDict()
    config.loss = ConfigDict()
    config.loss.kind = "ppo"
    config.loss.options = ConfigDict()
    config.loss.options.clip_low = 0.2
    config.loss.options.clip_high = 0.28
    config.loss.kl_coefficient = 0.0  # of the KL to the base model (adapter off)
    config.loss.entropy_coefficient = 0.0

    # Training.
    config.trainer = ConfigDict()
    config.trainer.steps = 100  # batches to train on = versions to publish
    config.trainer.groups_per_step = 16
    config.trainer.updates_per_step = 1  # optimiser updates that one batch is split into
    config.trainer.row_tokens = 2048  # longest packed row; shorter buckets are halves of it
    config.trainer.micro_batch_rows = 8  # rows per forward-backward pass, over all devices
    config.trainer.tight_micro_batches = False  # fewer and shorter rows where tokens need no more; compiles more shapes
    config.trainer.logprob_chunk_tokens = 1024  # trained tokens whose full-vocabulary logits exist at once
    config.trainer.keep_checkpoints = 3  # newest checkpoints kept
    config.trainer.keep_every_steps = 0  # also keep every n-th checkpoint; 0 keeps none
    config.trainer.step_timeout_s = 1800.0  # longest wait for a batch before the trainer gives up
    config.trainer.tensorboard = False
    config.trainer.steps_in_flight = 2  # steps dispatched ahead of their results, where no checkpoint waits for them
    config.trainer.offload_optimizer = False  # keep the optimiser's state in host memory between updates
    config.trainer.compile_cache = "auto"  # folder of compiled programs; auto is ~/.cache/flowjax/xla, "" is none
    config.trainer.processes = 1  # processes (hosts) of one trainer; each has its number in FLOWJAX_PROCESS
    config.trainer.coordinator = ""  # host:port of process 0, where there are several
    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # adamw | muon | sgd
    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup_steps = 5  # optimiser updates of linear warm-up
    config.optimizer.schedule = "constant"  # constant | cosine | linear, over the run's updates
    config.optimizer.betas = (0.9, 0.95)
    config.optimizer.weight_decay = 0.0
    config.optimizer.clip_norm = 1.0
    # Parameters that differ: (regular expression, settings) pairs, the first that finds a parameter's name counts, and
    # every parameter needs one. Settings: learning_rate_scale, weight_decay, frozen. () treats all alike.
    config.optimizer.rules = ()
    config.mesh = ConfigDict()  # devices per axis; -1 takes the rest
    config.mesh.data = 1  # whole copies of the model
    config.mesh.fsdp = -1  # rows of a batch and parameters
    config.mesh.tensor = 1  # heads, feed-forward maps and vocabulary
    config.mesh.expert = 1  # experts, and rows; models with experts only
    config.mesh.sequence = 1  # tokens of a row

    # Held-out evaluation.
    config.eval = ConfigDict()
    config.eval.tasks = 512  # held-out tasks, played once each
    config.eval.temperature = 1.0
    config.eval.every_steps = 0  # also evaluate during the run, every n steps; 0 only before and after
    config.eval.slots = 0.25  # of a worker's slots, those evaluation takes before training: a share, or a number from 1
    config.eval.versions = ()  # evaluate these versions and train nothing (set by flowjax.evaluate)

    # Imitation of the world's scripted expert, which makes the nano base model.
    config.warm_start = ConfigDict()
    config.warm_start.states = 60_000  # demonstrated states
    config.warm_start.steps = 600  # batches
    config.warm_start.batch_rows = 128  # states per batch
    config.warm_start.learning_rate = 2e-3
    config.warm_start.noisy_share = 0.25  # last share of the batches, whose labels are noisy
    config.warm_start.label_noise = 0.6  # share of noisy labels that are a random legal action instead
    config.warm_start.path_noise = 0.2  # share of random moves on the expert's path, so that odd states are seen
    return config


PER_BASE = ("model", "engine")  # sections that a base model may have of its own
PER_POLICY = ("policy", "reward", "credit", "loss", "trainer", "optimizer")  # and a policy
_OPEN_FIELDS = {"components", "options"}  # their names are looked up elsewhere


def base_configs(config: ConfigDict) -> dict[str, ConfigDict]:
    """For each base model of the run, by name, the whole config with its model and engines; "base" is the run's own.

    Raises:
        ConfigError: a name that cannot be one, a section that all bases share, or a field that there is not.
    """
    return {BASE_NAME: config, **{name: _base_config(config, name) for name in config.bases}}


def _base_config(config: ConfigDict, name: str) -> ConfigDict:
    if name == BASE_NAME or not re.fullmatch(r"[\w-]+", name) or name.rpartition("-")[2].isdecimal():
        raise ConfigError(
            f"config.bases has {name!r}: give a name of letters, digits, '_' and '-', other than {BASE_NAME!r}, that "
            "is no number and does not end in '-' and one, as replicas do"
        )
    if name in (config.policies or (config.policy.name,)):
        raise ConfigError(f"config.bases.{name} is also the name of a policy: give one of them another")
    changes = config.bases[name]
    if not isinstance(changes, ConfigDict):
        raise ConfigError(f"config.bases.{name} is {changes!r}: give a dict such as {{'model': {{'path': ...}}}}")
    own = ConfigDict(config.to_dict())
    own.engine.update({"port": 0, "urls": ()})
    if "path" in changes.get("model", {}):
        own.model.nano = None
    _change(own, f"config.bases.{name}", changes, PER_BASE)
    return own.lock()


def policy_configs(config: ConfigDict) -> dict[str, ConfigDict]:
    """For each policy of the run, by name, the whole config as that policy alone would have it, on its own base.

    Raises:
        ConfigError: a policy changes a section that all share, or a field that there is not; its base is unknown.
    """
    if not config.policies and config.policy.base == BASE_NAME:
        return {config.policy.name: config}
    return {name: _policy_config(config, name) for name in config.policies or (config.policy.name,)}


def _policy_config(config: ConfigDict, name: str) -> ConfigDict:
    own = ConfigDict(config.to_dict())
    own.policies = ConfigDict()
    own.policy.name = name
    _change(own, f"config.policies.{name}", config.policies.get(name, ConfigDict()), PER_POLICY)
    bases = base_configs(config)
    if own.policy.base not in bases:
        raise ConfigError(
            f"policy {name} is to be trained on {own.policy.base!r} (policy.base): use one of {', '.join(bases)}"
        )
    for section in PER_BASE:
        own[section] = ConfigDict(bases[own.policy.base][section].to_dict())
    return own.lock()


def _change(own: ConfigDict, field: str, changes: ConfigDict, sections: Iterable[str]) -> None:
    """Write into `own` what the sections under `field` say.

    Raises:
        ConfigError: another section than `sections`, an unknown field, or a value of another type.
    """
    for section, values in changes.items():
        if section not in sections:
            remedy = f"set config.{section} for all of them" if section in own else "use one of these"
            allowed = ", ".join(sections)
            raise ConfigError(f"{field}.{section} is set, but {field} may differ only in {allowed}: {remedy}")
        if not isinstance(values, ConfigDict | Mapping):
            raise ConfigError(f"{field}.{section} is {values!r}: give a dict of the fields that differ")
        for name, value in values.items():
            if name not in own[section]:
                raise ConfigError(f"{field}.{section}.{name} is no field: use one of {', '.join(own[section])}")
            try:
                if isinstance(own[section][name], ConfigDict) and name not in _OPEN_FIELDS:
                    own[section][name].update(value)
                else:
                    own[section][name] = value
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{field}.{section}.{name} is {value!r}, which does not fit: {error}") from error


def policies_on(config: ConfigDict, base: str) -> dict[str, ConfigDict]:
    """The policies that are trained on a base model, as `policy_configs` gives them."""
    return {name: own for name, own in policy_configs(config).items() if own.policy.base == base}


def task_options(config: ConfigDict, source: str) -> dict[str, Any]:
    """Options of the world that the tasks of a source are played in; "" is the only one."""
    options = config.env.options.to_dict()
    return {**options, **config.env.sources[source].get("options", {})} if source else options


def save_run(config: ConfigDict, run_dir: Path) -> None:
    """Write the resolved config to `<run_dir>/config.json`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(config.to_json(indent=2))


def load_run(run_dir: Path) -> ConfigDict:
    """The locked config of a run folder.

    Raises:
        ConfigError: there is no readable config.json.
    """
    path = run_dir / "config.json"
    try:
        saved = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give the folder of a run that flowjax started") from error
    config = default_config()
    with config.unlocked():
        config.update(saved)
    return config.lock()
