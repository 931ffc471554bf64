"""The configuration: every field, declared once. Recipes in `configs/` change what differs.

A declaration has the default, a line of documentation, and the allowed values. Checks, suggestions, `--resume` and
docs/config.md, which `python -m flowjax.config` prints, are made from it. Unless a declaration says otherwise, numbers
whose names end in `_s` are positive seconds, in `_tokens` at least 1, in `_bytes` at least 0; every number has an upper
bound, a generous one where none is declared (`flowjax.fields`). Rules between several fields are in
`flowjax/launch/checks.py`.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from flowjax.fields import (
    DATAFLOW_URL,
    FOLDER_NAME,
    HOST,
    HOST_AND_PORT,
    NAME,
    NAMED,
    NO_TILDE,
    NOT_EMPTY,
    OPTIONAL_NATS,
    URL,
    Entry,
    Free,
    Section,
    table_rows,
)
from flowjax.files import replace_file

BASE_NAME = "base"  # name of the run's own base model, also on its engines
# Bounds of fields that training and evaluation both have.
TOP_P: dict[str, Any] = {"above": 0, "at_most": 1}
TOP_K: dict[str, Any] = {"at_least": 0, "at_most": 10**7}
MIN_P: dict[str, Any] = {"at_least": 0, "at_most": 1}


class ConfigError(ValueError):
    """A config that cannot be run; the message names the field, its value and the remedy."""


FIELDS = Section(
    "A run. A recipe fills in what has no sensible default: `env`, `model.path`, `reward.components`, `name`.",
    name=Entry("", "name of the run; its folder is config.runs/name", form=FOLDER_NAME, resume=True),
    runs=Entry("runs", "folder that holds run folders", form=NO_TILDE, resume=True),
    seed=Entry(
        0, "fixes the order of tasks, seeds of episodes, initial weights and shuffles", at_least=0, at_most=2**31 - 1
    ),
    elsewhere=Entry(
        (),
        'roles that are not started, because programs of one\'s own take their place (docs/dataflow.md): "rollout", '
        'with the engines that it plays with, and "trainer"; "dataflow" as well on a node (--join sets it)',
        choices=("rollout", "trainer", "dataflow"),
        resume=True,
    ),
    max_restarts=Entry(
        5, "of a role within an hour before the run gives up; engines have their own", at_least=0, resume=True
    ),
    separate_trainers=Entry(
        False, "a trainer process for each policy, with its share of the trainer's accelerators", resume=True
    ),
    workflow=Entry("flowjax.workflows.single:play", "package.module:function that plays an episode", form=NAMED),
    model=Section(
        "The base model of the policy.",
        path=Entry(
            "",
            "Hugging Face folder with config.json, tokenizer.json and safetensors; or the id of such a model, which is "
            'fetched before anything starts: "Qwen/Qwen3-8B", with "@<revision>" for one of its revisions',
            form=NO_TILDE,
        ),
        dtype=Entry(
            "bfloat16", "of the base weights and activations in the trainer", choices=("float32", "bfloat16", "float16")
        ),
        remat=Entry(
            "layer", "what the backward pass computes again: nothing, little, most", choices=("none", "dots", "layer")
        ),
        attention=Entry(
            "auto",
            "auto is by platform and row length (docs/models.md)",
            choices=("auto", "xla", "cudnn", "flash", "splash"),
            resume=True,
        ),
        template_options=Free(
            "variables of the tokenizer's chat template, such as {'enable_thinking': False} for Qwen3; those that the "
            "template does not read are refused"
        ),
        quantize=Entry(
            "",
            "how the frozen base's matrices but for experts are stored in the trainer, with LoRA",
            choices=("", "int8", "nf4"),
        ),
        nano=Free(
            "shape of a nano base that is built when path is missing (flowjax.models.nano), or None",
            default=None,
            known=Section(
                "",
                hidden_size=Entry(128, "", at_least=1),
                layers=Entry(4, "", at_least=1, at_most=1000),
                heads=Entry(4, "", at_least=1),
                kv_heads=Entry(2, "", at_least=1),
                head_dim=Entry(32, "", at_least=2),
                ffn_size=Entry(384, "", at_least=1),
                max_positions=Entry(2048, "", at_least=1),
                rope_theta=Entry(1e4, "", above=1, at_most=1e9),
            ),
        ),
    ),
    policy=Section(
        "The policy that is trained on it.",
        name=Entry("agent", "a folder of checkpoints and models on the engine are called so", form=NAME),
        base=Entry(BASE_NAME, "base model that it is trained on: config.model, or one of config.bases", form=NAME),
        train=Entry("lora", "an adapter, or all weights", choices=("lora", "full")),
        lora=Section(
            "The adapter.",
            rank=Entry(32, "columns of A", at_least=1, at_most=4096),
            alpha=Entry(32.0, "update is alpha / rank * B A (alpha / sqrt(rank) with rslora)", above=0, at_most=1e6),
            rslora=Entry(False, "scale by the square root of the rank"),
            dropout=Entry(
                0.0, "probability that an input of the adapter is zeroed in a training pass", at_least=0, below=1
            ),
            targets=Entry(
                ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
                "matrices that have an adapter; of a layer with experts, each one's own",
                choices=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "router"),
            ),
        ),
    ),
    bases=Free(
        "further base models, each with engines of its own: name -> the fields of `model`, `engine` and `warm_start` "
        'in which it differs, for example {"judge": {"model": {"path": "models/Qwen3-32B"}, "engine": '
        '{"tensor_parallel": 2}}}. '
        "Addresses (engine.port, engine.urls) are not taken over, nor is model.nano where the path is another"
    ),
    policies=Free(
        "several policies: name -> the sections in which it differs, for example "
        '{"solver": {}, "verifier": {"optimizer": {"learning_rate": 1e-4}}}. Empty: the one named by config.policy. '
        "One that names another estimator or objective starts from that one's own options, else from the run's"
    ),
    agents=Free(
        'agent of the workflow -> the policy that speaks for it; or "base", or one of config.bases: that model as it '
        "is, which is not trained. Empty: the only policy for the only agent",
        form=NAME,
    ),
    env=Section(
        "The world that episodes are played in.",
        name=Entry("", "package.module:Class of a world: one of docs/worlds, or one's own", form=NAMED),
        options=Free("those of the world: its page in docs/worlds"),
        max_turns=Entry(15, "of an episode", at_least=1, at_most=10**6),
        prompt=Entry("instruct", "how the workflow words an observation", choices=("instruct", "compact")),
        context=Entry(
            "window", "each turn its own prompt, or one conversation that grows", choices=("window", "append")
        ),
        history=Entry(
            -1, "past turns that a window prompt shows; -1: 2 for instruct, 0 for compact", at_least=0, also=(-1,)
        ),
        workers=Entry(1, "processes that hold the environments", at_least=1, at_most=10_000, resume=True),
        step_timeout_s=Entry(10.0, "a step that takes longer loses its worker and its episode", resume=True),
        data_seed=Entry(
            0, "fixes the training and held-out tasks, whatever config.seed is", at_least=0, at_most=2**31 - 1
        ),
        train_tasks=Entry(10_000, "number of different training tasks", at_least=1),
        sources=Free(
            "several sources of tasks, mixed: name -> weight (1.0), options (those in which it differs) and "
            'train_tasks, for example {"small": {"weight": 3.0}, "large": {"options": {"rows": 8}}}. Empty: one, with '
            "the options above",
            form=NAME,
            each=Section(
                "",
                weight=Entry(1.0, "", above=0, at_most=1e9),
                options=Free(""),
                train_tasks=Entry(10_000, "", at_least=1),
            ),
        ),
    ),
    rollout=Section(
        "Episodes.",
        group_size=Entry(8, "trajectories per task", at_least=1, at_most=4096),
        max_concurrent_episodes=Entry(
            128, "played at once by one rollout service", at_least=1, at_most=10**6, resume=True
        ),
        min_concurrent_episodes=Entry(
            0,
            "floor where their number follows the engines' load; 0: always the most",
            at_least=0,
            at_most=10**6,
            resume=True,
        ),
        temperature=Entry(1.0, "engines take less than 0.01 as greedy", at_least=0.01, at_most=100),
        top_p=Entry(
            1.0, "share of the probability that is sampled from, likeliest tokens first (docs/rollout.md)", **TOP_P
        ),
        top_k=Entry(0, "likeliest tokens that are sampled from; 0: all", **TOP_K),
        min_p=Entry(0.0, "tokens under this share of the likeliest one's probability are not sampled", **MIN_P),
        stop=Entry(
            (),
            "texts that end a reply, which keeps them; special tokens are no text. Of held-out episodes, too",
            form=NOT_EMPTY,
        ),
        max_prompt_tokens=Entry(1024, "of one turn; a longer prompt ends its episode"),
        max_new_tokens=Entry(256, "of one reply"),
        max_episode_turns=Entry(
            0, "turns of all agents in one episode; 0: 4 x env.max_turns for each agent", at_least=0, at_most=10**6
        ),
        structured_outputs=Entry(False, "hold replies to the world's grammar of actions while they are sampled"),
        episode_timeout_s=Entry(300.0, "an episode that takes longer is ended", resume=True),
    ),
    engine=Section(
        "The engines that answer them.",
        resume=True,
        python=Entry("", 'interpreter that has vLLM; "" is the one running flowjax', form=NO_TILDE),
        dtype=Entry("bfloat16", "serving precision", choices=("float32", "bfloat16", "float16")),
        quantize=Entry(
            "",
            "products of the base's matrices in 8 bits, with LoRA: int8 on CPUs and on GPUs from Turing to Hopper, "
            "fp8 from Ada on (docs/rollout.md)",
            choices=("", "int8", "fp8"),
        ),
        port=Entry(
            0, "0 picks a free port on loopback; further replicas take the ports after it", at_least=0, at_most=65535
        ),
        replicas=Entry(1, "engines that are started, each with tensor_parallel accelerators", at_least=1, at_most=1000),
        urls=Entry(
            (),
            'engines that run elsewhere, for this run alone, instead of any started here: "http://host:port" each',
            form=URL,
        ),
        stream_partial=Entry(False, "have replies streamed, so that one goes on elsewhere when its engine dies"),
        tensor_parallel=Entry(1, "accelerators of one engine", at_least=1, at_most=1024),
        max_model_tokens=Entry(2048, "longest prompt with its reply"),
        max_concurrent_sequences=Entry(256, "replies that one engine samples at once", at_least=1, at_most=10**6),
        kv_cache_bytes=Entry(
            0, "bytes of each device's key-value cache; 0 leaves it to vLLM, on GPUs by gpu_memory_fraction"
        ),
        gpu_memory_fraction=Entry(
            0.85, "of each accelerator's memory, for weights and key-value cache", above=0, at_most=1
        ),
        threads=Entry(1, "CPU: threads of the engine's worker", at_least=1, at_most=4096),
        prompts_per_request=Entry(64, "prompts sent in one HTTP request", at_least=1, at_most=10**5),
        batch_window_s=Entry(0.002, "longest wait for prompts to share a request", at_least=0, at_most=60),
        request_timeout_s=Entry(120.0, "longest wait for the answer to one request"),
        start_timeout_s=Entry(300.0, "longest wait for an engine to come up"),
        max_restarts=Entry(3, "restarts of an engine within an hour before the run gives up", at_least=0),
        extra_args=Entry((), "further arguments of vLLM's server"),
    ),
    dataflow=Section(
        "Tasks, groups, staleness.",
        host=Entry(
            "127.0.0.1",
            "address to listen on; beyond loopback every request must show the run's token",
            form=HOST,
            resume=True,
        ),
        port=Entry(0, "0 picks a free port", at_least=0, at_most=65535, resume=True),
        url=Entry("", "where it listens on another machine (--join sets it)", form=DATAFLOW_URL, resume=True),
        relay=Entry(
            "",
            "NATS servers by which nodes reach the run where it cannot be reached itself (docs/rollout.md)",
            form=OPTIONAL_NATS,
            resume=True,
        ),
        max_message_bytes=Entry(256 * 1024**2, "larger requests are refused", at_least=1024, at_most=2**40),
        max_staleness=Entry(1, "versions a trained token may lag; 0 is synchronous", at_least=0, at_most=10**6),
        max_mismatch_kl=Entry(
            0.1,
            "an invited node further from the trainer's log-probs, k3 a token, is sent away if others are not; 0: none",
            at_least=0,
            at_most=10,
            resume=True,
        ),
        lease_s=Entry(120.0, "an episode not finished or renewed by then is leased again", at_least=1, resume=True),
        max_attempts=Entry(3, "leases of one episode before it is given up", at_least=1, resume=True),
        failed_episodes=Entry(
            "retry", "what an episode that its world broke leads to", choices=("retry", "short", "drop"), resume=True
        ),
        min_group_size=Entry(
            2,
            "a group with fewer episodes in is dropped, where group_size is not smaller",
            at_least=1,
            at_most=4096,
            resume=True,
        ),
        max_ready_groups=Entry(
            0, "groups that wait for a policy's trainer; 0: twice what staleness admits", at_least=0, resume=True
        ),
        algorithms=Free("data algorithms by name, in order, each with its options"),
        keep_trajectories=Entry(
            True, "keep every turn of each batch in trajectories/, for the report (docs/report.md)", resume=True
        ),
    ),
    pool=Section(
        "How many rollout nodes a run wants (docs/rollout.md).",
        resume=True,
        steps=Entry(10, "of each policy between two looks at how long trainers waited", at_least=1, at_most=10**6),
        least_nodes=Entry(1, "that are ever wanted", at_least=0, at_most=10_000),
        most_nodes=Entry(64, "that are ever wanted", at_least=1, at_most=10_000),
        command=Entry(
            "", "shell command that starts or ends nodes, run when FLOWJAX_WANTED_NODES is another than FLOWJAX_NODES"
        ),
    ),
    reward=Section(
        "Outcome -> reward.",
        components=Free("component -> weight, or weight and options; a recipe names them (docs/rewards.md)"),
    ),
    credit=Section(
        "Reward -> advantage per turn.",
        name=Entry("grpo", "an estimator (docs/credit), or package.module:function"),
        options=Free("those of the estimator; left out when another name is given on the command line"),
    ),
    loss=Section(
        "Advantage -> loss.",
        kind=Entry("ppo", "an objective (docs/losses.md)"),
        options=Free(
            "those of the objective; back at their defaults when another kind is given on the command line",
            # A wider clip above lets unlikely tokens rise (the clip-higher of DAPO, arXiv 2503.14476, and its 0.28).
            default={"clip_low": 0.2, "clip_high": 0.28},
        ),
        kl_coefficient=Entry(0.0, "of the KL to the base model (adapter off)", at_least=0, at_most=1e6),
        entropy_coefficient=Entry(0.0, "of the entropy that is added to the objective", at_least=0, at_most=1e6),
    ),
    trainer=Section(
        "Training.",
        steps=Entry(100, "batches to train on = versions to publish", at_least=1, resume=True),
        groups_per_step=Entry(16, "groups in a batch", at_least=1, at_most=10**6),
        updates_per_step=Entry(1, "optimiser updates that one batch is split into", at_least=1, at_most=10**6),
        row_tokens=Entry(2048, "longest packed row; shorter buckets are halves of it"),
        micro_batch_rows=Entry(8, "rows per forward-backward pass, over all devices", at_least=1, at_most=10**6),
        trim_micro_batches=Entry(False, "fewer and shorter rows where tokens need no more; compiles more shapes"),
        logprob_chunk_tokens=Entry(1024, "trained tokens whose full-vocabulary logits exist at once", resume=True),
        checkpoint_every=Entry(
            1, "steps from one checkpoint to the next; versions between are published alone", at_least=1, resume=True
        ),
        keep_checkpoints=Entry(3, "newest checkpoints kept, and newest versions", at_least=1, resume=True),
        keep_every_steps=Entry(0, "also keep every n-th version; 0 keeps none", at_least=0, resume=True),
        step_timeout_s=Entry(1800.0, "longest wait for a batch before the trainer gives up", resume=True),
        steps_in_flight=Entry(
            2,
            "steps dispatched ahead of their results, where no checkpoint waits for them",
            at_least=0,
            at_most=1000,
            resume=True,
        ),
        offload_optimizer=Entry(False, "keep the optimiser's state in host memory between updates", resume=True),
        compile_cache=Entry(
            "auto", 'folder of compiled programs; auto is ~/.cache/flowjax/xla, "" is none', resume=True
        ),
        processes=Entry(
            1,
            "processes of one trainer; on several hosts, where no scheduler says how many there are (docs/clusters.md)",
            at_least=1,
            at_most=10_000,
            resume=True,
        ),
        coordinator=Entry(
            "", "host:port of process 0, for several hosts without a scheduler", form=HOST_AND_PORT, resume=True
        ),
    ),
    optimizer=Section(
        "What makes an update of a gradient.",
        name=Entry("adamw", "how an update is made of a gradient", choices=("adamw", "muon", "sgd")),
        learning_rate=Entry(1e-5, "highest of the schedule", above=0, at_most=100),
        warmup_steps=Entry(5, "optimiser updates of linear warm-up", at_least=0),
        schedule=Entry("constant", "over the run's updates", choices=("constant", "cosine", "linear")),
        betas=Entry((0.9, 0.95), "decay of Adam's moments", at_least=0, below=1, length=2),
        weight_decay=Entry(0.0, "pull of parameters towards zero, times the learning rate", at_least=0, at_most=100),
        clip_norm=Entry(1.0, "longest gradient; longer ones are scaled to it", above=0, at_most=1e9),
        rules=Entry(
            (),
            "parameters that differ: (regular expression, settings) pairs, the first that finds a parameter's name "
            "counts, and every parameter needs one. Settings: learning_rate_scale, weight_decay, frozen. () treats all "
            "alike",
            of=tuple,
        ),
    ),
    mesh=Section(
        "Devices per axis; -1 takes the rest.",
        resume=True,
        data=Entry(1, "whole copies of the model", at_least=1, also=(-1,), at_most=10**6),
        fsdp=Entry(-1, "rows of a batch and parameters", at_least=1, also=(-1,), at_most=10**6),
        tensor=Entry(1, "heads, feed-forward maps and vocabulary", at_least=1, also=(-1,), at_most=10**6),
        expert=Entry(1, "experts, and rows; models with experts only", at_least=1, also=(-1,), at_most=10**6),
        sequence=Entry(1, "tokens of a row", at_least=1, also=(-1,), at_most=10**6),
    ),
    eval=Section(
        "Held-out evaluation.",
        tasks=Entry(512, "held-out tasks", at_least=0),
        samples=Entry(1, "episodes of each held-out task", at_least=1, at_most=1024),
        temperature=Entry(1.0, "0 is greedy", at_least=0, at_most=100),
        top_p=Entry(1.0, "as rollout.top_p, of held-out episodes alone", **TOP_P),
        top_k=Entry(0, "as rollout.top_k", **TOP_K),
        min_p=Entry(0.0, "as rollout.min_p", **MIN_P),
        transcripts=Entry(
            512, "episodes of an evaluation that are kept turn by turn, spread over its tasks", at_least=0, resume=True
        ),
        seed=Entry(
            -1,
            "replies are sampled by seeds made of this one, so that an evaluation is the same twice; each is then a "
            "request of its own. -1: by the engine's own seed; flowjax.evaluate takes 0 then",
            at_least=0,
            also=(-1,),
            at_most=2**31 - 1,
            resume=True,
        ),
        every_steps=Entry(
            0, "also evaluate during the run, every n steps; 0 only before and after", at_least=0, resume=True
        ),
        slots=Entry(
            0.25,
            "of a worker's slots, those evaluation takes before training: a share, or a number from 1",
            at_least=0,
            at_most=1e6,
            resume=True,
        ),
        versions=Entry(
            (), "those that an evaluation plays: flowjax.evaluate sets it, and a launch refuses it", of=int, at_least=0
        ),
    ),
    monitor=Section(
        "Where else the numbers of metrics.jsonl go.",
        resume=True,
        sinks=Entry(
            (),
            "tensorboard writes files into the run's folder; wandb and trackio need their packages and an account or "
            "server of one's own",
            choices=("tensorboard", "wandb", "trackio"),
        ),
    ),
    warm_start=Section(
        "Imitation that makes a nano base model: of the world's expert, or of its lessons where the world asks it.",
        resume=True,
        states=Entry(60_000, "demonstrated states", at_least=1),
        env_options=Free(
            "options of the world in which demonstrated tasks differ from those that are trained on, for example "
            '{"max_moves": 3}: the base is then taught easy ones alone'
        ),
        tasks=Entry(10_000, "number of different training tasks that are demonstrated", at_least=1, at_most=10**9),
        steps=Entry(600, "batches", at_least=1),
        batch_rows=Entry(128, "states per batch", at_least=1, at_most=10**6),
        learning_rate=Entry(2e-3, "highest, with warm-up and a cosine after it", above=0, at_most=100),
        noisy_share=Entry(0.25, "last share of the batches, whose labels are noisy", at_least=0, at_most=1),
        noisy_env_options=Free(
            "further options of the world in those batches: the habit that the base ends with, where env_options is "
            "what it knows (not of executors)"
        ),
        label_noise=Entry(0.6, "share of noisy labels that are a random legal action instead", at_least=0, at_most=1),
        path_noise=Entry(
            0.2, "share of random moves on the expert's path, so that odd states are seen", at_least=0, at_most=1
        ),
    ),
)


def asks_help(argv: Sequence[str], page: str | None) -> bool:
    """Print `page` and return True where a command is asked for help. Not left to absl, which exits with status 1."""
    if asked := bool({"--help", "-h", "--helpfull"} & set(argv)):
        print(page)
    return asked


def default_config() -> ConfigDict:
    """A complete, unlocked config: the default of every field."""
    return FIELDS.defaults()


def may_change(path: str) -> bool:
    """True if a resumed run may have another value in the field at a dotted path, also of one base or policy."""
    path = re.sub(r"^(bases|policies)\.[^.]+\.", "", path)
    while (declared := FIELDS.find(path)) is None and path:  # an entry of an open section goes by that section
        path = path.rpartition(".")[0]
    return isinstance(declared, Entry | Free) and declared.resume


# Options -> the field that names their owner: another estimator, objective or world has other options.
OWNER_OF_OPTIONS = {"credit.options": "credit.name", "loss.options": "loss.kind", "env.options": "env.name"}


def default_options(path: str) -> ConfigDict:
    """The options that the free section at a dotted path has by default."""
    declared = FIELDS.find(path)
    assert isinstance(declared, Free)
    return declared.defaults() or ConfigDict()


def task_options(config: ConfigDict, source: str) -> dict[str, Any]:
    """Options of the world for the tasks of a source of `env.sources`; "" stands for a run without sources."""
    options = config.env.options.to_dict()
    return {**options, **config.env.sources[source].get("options", {})} if source else options


def taught_options(config: ConfigDict, warm_start: ConfigDict, *, noisy: bool = False) -> dict[str, Any]:
    """Options of the world in which a base's demonstrations are made, or (`noisy`) those of its `noisy_share`.

    `warm_start` is the base's own section.
    """
    options = {**config.env.options.to_dict(), **warm_start.env_options.to_dict()}
    return {**options, **warm_start.noisy_env_options.to_dict()} if noisy else options


_UNBEGUN = re.compile(r"launch\.lock|(evaluation|models)\.json|\.\w+\.json\..+")  # files of a start that was cut off
_LEFT = ("trainer.tensorboard",)  # former fields, ignored in configs of older runs: they never changed the training


def save_run(config: ConfigDict, run_dir: Path) -> None:
    """Write the resolved config to `<run_dir>/config.json`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_file(run_dir / "config.json", config.to_json(indent=2))


def is_unbegun(folder: Path) -> bool:
    """True if a folder is missing or empty, or holds only files of a run's or evaluation's start that was cut off."""
    if not os.access(folder, os.F_OK):  # not `Path.exists`, which raises where a parent may not be searched
        return True
    with contextlib.suppress(OSError):  # a file, or a folder of another user
        return all(_UNBEGUN.fullmatch(path.name) for path in folder.iterdir())
    return False


def load_run(run_dir: Path) -> ConfigDict:
    """The locked config of a run folder.

    Raises:
        ConfigError: there is no readable config.json, or it is not a config of a run.
    """
    path = run_dir / "config.json"
    try:
        saved = json.loads(path.read_text())
        for field in _LEFT:  # so that older runs can still be evaluated and exported
            section, _, name = field.partition(".")
            if isinstance(saved, dict) and isinstance(saved.get(section), dict):
                saved[section].pop(name, None)
        config = default_config()
        config.update(saved)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give the folder of a run that flowjax started") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no config of a run ({reason}): correct it, or start a new run") from error
    return config.lock()


def page() -> str:
    """docs/config.md: every field, in Markdown."""
    lines = [_PAGE_HEAD, *table_rows(FIELDS)]
    return "\n".join(lines) + "\n"


_PAGE_HEAD = """\
# Every field of a config

Made by `python -m flowjax.config` from the declarations in [flowjax/config.py](../flowjax/config.py). Set one with
`--config.<section>.<field>=<value>`, or in a recipe. ↻: may differ when a run is resumed. A dict's entries are set one
by one (`--config.credit.options.gamma=0.9`) or together (`--config.agents="{'agent': 'base'}"`). Numbers are finite,
text has at most 4,096 characters; whatever a declaration does not allow is refused before anything starts."""

if __name__ == "__main__" and not asks_help(sys.argv, __doc__):
    print(page(), end="")
