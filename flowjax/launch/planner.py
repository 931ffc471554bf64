"""`--plan=8xH100`: layouts of a run on the GPUs of one machine, the estimated fastest first, as flags to give.

Each layout gives some GPUs to the trainer (mesh axes `data` and `fsdp`, rows for each GPU, `remat`) and the others to
engines (`tensor_parallel`, `replicas`). It is valid if the memory of trainer and engines fits; the trainer's estimate
is close to what XLA's compiler counts (docs/benchmarks/accelerators.md). Times come from data sheets, times the share
of the peak that such programs usually reach: good enough to tell layouts apart, and no promise of seconds.
"""

import itertools
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flowjax.config import ConfigError
from flowjax.launch.devices import MEMORY_FRACTION, adapter_slots_bytes, memory_plan, memory_together
from flowjax.launch.roles import trainer_roles
from flowjax.models import cost
from flowjax.models.config import known_shape, read_config
from flowjax.models.lora import Lora
from flowjax.models.shape import ModelConfig
from flowjax.records import TokenRow
from flowjax.run import Policy, Run

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU by its data sheet. `link` is its bandwidth to the machine's other GPUs, in one direction."""

    memory_gib: float  # usable, which is a little less than the sheet's
    memory_bytes_per_s: float
    link_bytes_per_s: float
    flops: float  # of dense bfloat16

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB


def _gpu(memory_gib: float, memory_gb_per_s: float, link_gb_per_s: float, sheet: str) -> Gpu:
    return Gpu(memory_gib, memory_gb_per_s * 1e9, link_gb_per_s * 1e9, cost.PEAK_FLOPS[sheet])


_PCIE4 = 32.0  # GB/s of sixteen lanes
GPUS = {
    "B200": _gpu(178, 8000, 900, "B200"),
    "H200": _gpu(140, 4800, 450, "H200"),
    "H100": _gpu(79, 3350, 450, "H100"),
    "A100": _gpu(79, 2039, 300, "A100"),
    "A100-40": _gpu(39, 1555, 300, "A100"),
    "L40S": _gpu(44, 864, _PCIE4, "L40S"),
    "L4": _gpu(22, 300, _PCIE4, "L4"),
    "A10": _gpu(22, 600, _PCIE4, "A10"),
    "RTX4090": _gpu(23.5, 1008, _PCIE4, "RTX 4090"),
}

_USED_FLOPS, _USED_BANDWIDTH = 0.5, 0.7  # share of the sheet's figure that large products and large reads reach
# Cost of the backward pass beyond its gradients, in forward passes. Keeping everything ("none") recomputes nothing, but
# costs more than what "dots" recomputes: a step of Qwen3-1.7B takes 0.35 s on an H200 with "none", 0.33 s with "dots"
# and half the memory.
_RECOMPUTED = {"none": 0.3, "dots": 0.1, "layer": 1.0}
_GATHERS = 2  # all-gathers of a sharded base per micro-batch: for its forward and its backward pass
_ENGINE_BYTES = 2 * GIB  # on an engine's GPU beside weights, adapters and cache: activations, CUDA graphs
_LEAST_SEQUENCES = 4  # of full length that an engine's cache has to hold
_MOST_ROWS = 4  # of one GPU in a micro-batch
_SHARES = (0.3, 0.45, 0.6)  # of a machine's only GPU that are tried for the engine; the trainer has the rest
_SHOWN = 4  # layouts


@dataclass(frozen=True)
class RunLayout:
    """A run's trainer on `data * fsdp` GPUs and its engines on `replicas * tensor_parallel` others, or all on one."""

    data: int
    fsdp: int
    rows: int  # of a micro-batch, over all of the trainer's GPUs
    remat: Literal["none", "dots", "layer"]
    tensor_parallel: int
    replicas: int
    gpu_memory_fraction: float  # of an engine

    @property
    def trainer_gpus(self) -> int:
        return self.data * self.fsdp

    @property
    def engine_gpus(self) -> int:
        return self.tensor_parallel * self.replicas

    def flags(self) -> dict[str, float | str]:
        """Its settings, by config field."""
        return {
            "mesh.data": self.data,
            "mesh.fsdp": self.fsdp,
            "trainer.micro_batch_rows": self.rows,
            "model.remat": self.remat,
            "engine.tensor_parallel": self.tensor_parallel,
            "engine.replicas": self.replicas,
            "engine.gpu_memory_fraction": self.gpu_memory_fraction,
        }


@dataclass(frozen=True)
class Estimate:
    """A layout that fits, with its memory and the seconds of a step."""

    layout: RunLayout
    trainer_bytes: int  # on each GPU of the trainer
    cached_tokens: int  # that the key-value cache of one engine holds
    train_s: float
    play_s: float
    step_s: float  # the longer of the two where they overlap, else their sum


def read_machine(text: str) -> tuple[int, str]:
    """The number and kind of GPUs of "8xH100".

    Raises:
        ConfigError: the text has another form, or the kind is not known.
    """
    found = re.fullmatch(r"([1-9]\d?)x(.+)", text)
    kind = next((kind for kind in GPUS if found and kind.lower() == found[2].lower()), None)
    if found is None or kind is None:
        raise ConfigError(f"--plan={text}: give number and kind of a machine's GPUs, as 8xH100 ({', '.join(GPUS)})")
    return int(found[1]), kind


class Planner:
    """Layouts of one run on `count` GPUs of a kind.

    Raises:
        ConfigError: the run is of a kind that is not planned, or its model's shape is not known.
    """

    def __init__(self, run: Run, count: int, kind: str):
        self.run, self.count, self.gpu = run, count, GPUS[kind]
        self.policy, self.model = _planned(run)
        self._lora = _lora_of(self.policy)
        self._engine = self.policy.base.engine
        self._remote_engines = bool(self._engine.urls)
        self._size = cost.DTYPE_BYTES[self.policy.base.model.dtype]
        self._shared = count == 1 and not self._remote_engines
        rollout, trainer = run.config.rollout, self.policy.trainer
        # Prompts and replies are assumed to be half as long as their bounds, which they reach only now and then. With
        # the context "append" an episode is one sequence, else each turn is one.
        turns = 1 if run.config.env.context == "append" else run.config.env.max_turns
        agents = list(run.agents.values())  # each plays as many turns; agents of base models are not trained
        trained = sum(model in run.policies for model in agents)
        self._length = max((rollout.max_prompt_tokens + rollout.max_new_tokens) // 2, 2)
        episodes = trainer.groups_per_step * rollout.group_size
        self._trained_tokens = episodes * trained * turns * self._length  # in one step of each policy
        self._played_tokens = episodes * len(agents) * turns * self._length
        replies = episodes * len(agents) * run.config.env.max_turns
        self._sampled_tokens = min(replies * rollout.max_new_tokens // 2, self._played_tokens)
        row = _row(self._length, sampled_tokens=self._length * self._sampled_tokens // self._played_tokens)
        self._token_flops = cost.step_flops(self.model, self._lora, [row]) / self._length
        self._trainers: dict[tuple[int, int, int, str], int] = {}  # cache of `_trainer_bytes`

    def configured(self) -> RunLayout:
        """The layout that the run's config has."""
        engine, replicas = self._engine, 0 if self._remote_engines else self._engine.replicas
        sizes = self.run.config.mesh.to_dict()
        known = math.prod(size for size in sizes.values() if size > 0)
        left = 1 if self._shared else self.count - replicas * engine.tensor_parallel
        data, fsdp = (max(left // known, 1) if sizes[axis] < 0 else sizes[axis] for axis in ("data", "fsdp"))
        rows, remat = self.policy.trainer.micro_batch_rows, self.policy.base.model.remat
        return RunLayout(data, fsdp, rows, remat, engine.tensor_parallel, replicas, engine.gpu_memory_fraction)

    def estimates(self) -> list[Estimate]:
        """Layouts that fit, the estimated fastest first.

        Of equally fast ones first the one whose base is sharded least, because not every all-gather overlaps with
        products, then the one that leaves more memory.
        """
        found = [estimate for layout in self._layouts() if (estimate := self.estimate(layout)) is not None]
        return sorted(found, key=lambda each: (round(each.step_s, 3), each.layout.fsdp, each.trainer_bytes))

    def _layouts(self) -> Iterator[RunLayout]:
        trainers = [self.count] if self._remote_engines or self._shared else range(1, self.count)
        shares = _SHARES if self._shared else [self._engine.gpu_memory_fraction]
        for gpus, remat, rows in itertools.product(trainers, ("dots", "layer"), (1, 2, _MOST_ROWS)):
            for fsdp in (ways for ways in _powers(gpus) if gpus % ways == 0):
                for (parallel, replicas), share in itertools.product(self._engines(gpus), shares):
                    yield RunLayout(gpus // fsdp, fsdp, rows * gpus, remat, parallel, replicas, share)

    def _engines(self, trainer_gpus: int) -> Iterator[tuple[int, int]]:
        """Pairs of `tensor_parallel` and `replicas` that use all GPUs that the trainer leaves."""
        if self._remote_engines:
            yield self._engine.tensor_parallel, 0
            return
        left = 1 if self._shared else self.count - trainer_gpus
        for parallel in _powers(left):
            if left % parallel == 0 and self.model.kv_heads % parallel == 0:
                yield parallel, left // parallel

    def estimate(self, layout: RunLayout) -> Estimate | None:
        """Memory and time of a layout; None where it does not fit."""
        trainer_bytes = self._trainer_bytes(layout)
        left = MEMORY_FRACTION - layout.gpu_memory_fraction if self._shared else MEMORY_FRACTION
        most_bytes = self.gpu.memory_bytes * left
        if self._gpus(layout) > self.count or trainer_bytes > most_bytes:
            return None
        cached_tokens, sequence = self._cached_tokens(layout), self._engine.max_model_tokens
        # A config may hold the cache to fewer sequences on purpose; without room for one no engine starts.
        least = max(min(_LEAST_SEQUENCES * sequence, self._held_tokens(layout)), sequence)
        if layout.replicas and cached_tokens < least:
            return None
        train_s, play_s = self._train_s(layout), self._play_s(layout, cached_tokens)
        # They overlap, except with staleness 0 (nothing is played while a batch is trained on) or on one shared GPU.
        beside = self.run.config.dataflow.max_staleness > 0 and not self._shared
        step_s = max(train_s, play_s) if beside else train_s + play_s
        return Estimate(layout, trainer_bytes, cached_tokens, train_s, play_s, step_s)

    def _gpus(self, layout: RunLayout) -> int:
        return (
            max(layout.trainer_gpus, layout.engine_gpus) if self._shared else layout.trainer_gpus + layout.engine_gpus
        )

    def _trainer_bytes(self, layout: RunLayout) -> int:
        """Bytes on each GPU of the trainer. The engines do not change them: computed once for each trainer."""
        trainer = (layout.data, layout.fsdp, layout.rows, layout.remat)
        if trainer in self._trainers:
            return self._trainers[trainer]
        axes = {"data": layout.data, "fsdp": layout.fsdp}
        versions = self.run.config.dataflow.max_staleness + 1
        plans = [
            memory_plan(
                policy, self.model, _lora_of(policy), axes, rows=layout.rows, versions=versions, remat=layout.remat
            )
            for policy in self.run.policies.values()
        ]
        self._trainers[trainer] = sum(memory_together(plans).values())
        return self._trainers[trainer]

    def _train_s(self, layout: RunLayout) -> float:
        """Seconds of training in a step: matrix products, or all-gathers of a sharded base, whichever takes longer."""
        # Forward pass, gradients of activations and, in full training, gradients of weights cost about the same.
        forward = self._token_flops / (2 if self._lora else 3)
        flops = (self._token_flops + _RECOMPUTED[layout.remat] * forward) * self._trained_tokens
        products_s = flops / (layout.trainer_gpus * self.gpu.flops * _USED_FLOPS)
        passes = math.ceil(self._trained_tokens / (layout.rows * self.policy.trainer.row_tokens))
        # In an all-gather a GPU receives every shard but its own.
        collected_bytes = self.model.parameter_count() * self._size * (layout.fsdp - 1) / layout.fsdp
        return max(products_s, passes * _GATHERS * collected_bytes / (self.gpu.link_bytes_per_s * _USED_BANDWIDTH))

    def _cached_tokens(self, layout: RunLayout) -> int:
        """Tokens that the key-value cache of one engine holds, over all of its GPUs."""
        per_gpu = self.gpu.memory_bytes * layout.gpu_memory_fraction - _ENGINE_BYTES
        per_gpu -= adapter_slots_bytes(self.run, self.policy.base, self.model, tensor_parallel=layout.tensor_parallel)
        left = per_gpu * layout.tensor_parallel - cost.served_bytes(
            self.model, self._engine.dtype, self._engine.quantize
        )
        return max(min(int(left / self._cached_bytes), self._held_tokens(layout)), 0)

    def _held_tokens(self, layout: RunLayout) -> int:
        """Tokens to which the config holds that cache."""
        given = self._engine.kv_cache_bytes
        return int(given * layout.tensor_parallel / self._cached_bytes) if given else sys.maxsize

    @property
    def _cached_bytes(self) -> int:
        """Bytes of a token in the cache."""
        size = cost.DTYPE_BYTES.get(self._engine.dtype, 2)
        return 2 * self.model.layers * self.model.kv_size * size

    def _play_s(self, layout: RunLayout, cached_tokens: int) -> float:
        """Seconds of playing a step's episodes: prompts by matrix products, replies token by token.

        A decoding step makes one token of each of `at_once` sequences. It takes as long as reading all weights and
        those sequences' caches, or as its products, whichever takes longer.
        """
        if not layout.replicas:
            return 0.0
        size = cost.DTYPE_BYTES.get(self._engine.dtype, 2)
        used = cost.weights_per_token(self.model) + self.model.hidden_size * self.model.vocab_size  # weights of a token
        at_once = min(
            self._engine.max_concurrent_sequences,
            self.run.config.rollout.max_concurrent_episodes / layout.replicas,
            cached_tokens / self._length,
        )
        weights_bytes = cost.served_bytes(self.model, self._engine.dtype, self._engine.quantize)
        read_bytes = weights_bytes + at_once * self._length * 2 * self.model.layers * self.model.kv_size * size
        token_s = read_bytes / (layout.tensor_parallel * self.gpu.memory_bytes_per_s * _USED_BANDWIDTH)
        token_s = max(token_s, at_once * 2 * used / (layout.tensor_parallel * self.gpu.flops * _USED_FLOPS))
        if layout.tensor_parallel > 1:  # two all-reduces over the engine's GPUs per layer, each at least some 10 us
            token_s += 2 * self.model.layers * 1e-5
        prompts = self._played_tokens - self._sampled_tokens
        prompts_s = 2 * used * prompts / (layout.engine_gpus * self.gpu.flops * _USED_FLOPS)
        return self._sampled_tokens / (layout.replicas * at_once) * token_s + prompts_s


def _planned(run: Run) -> tuple[Policy, ModelConfig]:
    if len(run.bases) > 1 or len(trainer_roles(run)) != 1 or run.config.trainer.processes > 1:
        raise ConfigError(
            "--plan is for runs with one base model and one trainer of one process: this one has the bases "
            f"{', '.join(run.bases)}, {len(trainer_roles(run))} trainers here, {run.config.trainer.processes} processes"
        )
    for axis in ("tensor", "expert", "sequence"):
        if (size := run.config.mesh[axis]) != 1:
            raise ConfigError(f"--plan sets mesh.data and fsdp, but config.mesh.{axis} is {size}: set it to 1")
    policy = next(iter(run.policies.values()))
    path = policy.base.model.path
    model = read_config(path) if policy.base.model.nano is None and _is_here(path) else known_shape(_name(path))
    if model is None and policy.base.model.nano is not None:
        raise ConfigError("--plan is for models that need such machines, but config.model.nano is set: leave it out")
    if model is None:
        raise ConfigError(
            f"--plan needs the shape of config.model.path = {path!r}, which is not on this machine and not built in: "
            "download the model, or name one that is"
        )
    return policy, model


def _lora_of(policy: Policy) -> Lora | None:
    return Lora(**policy.lora.to_dict()) if policy.train == "lora" else None


def _is_here(path: str) -> bool:
    return (Path(path) / "config.json").exists()


def _name(path: str) -> str:
    return path.partition("@")[0].rstrip("/").rpartition("/")[2]


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]


def _row(tokens: int, *, sampled_tokens: int) -> TokenRow:
    nothing = np.zeros(tokens, np.float32)
    sampled = np.arange(tokens) >= tokens - sampled_tokens
    return TokenRow("", nothing.astype(np.int32), sampled, nothing, nothing, nothing.astype(np.int32))


# --------------------------------------------------------------------------------------------------------------- shown


def render(run: Run, machine: str) -> RenderableType:
    """The run's own layout on a machine, such as 8xH100, beside the best that were found, and flags of the first.

    Raises:
        ConfigError: `machine` is not understood, or the run is not one that is planned or fits no layout.
    """
    count, kind = read_machine(machine)
    planner = Planner(run, count, kind)
    recipe, found = planner.estimate(planner.configured()), planner.estimates()
    if recipe is not None and all(each.layout != recipe.layout for each in found):
        found = sorted([*found, recipe], key=lambda each: each.step_s)
    if not found:
        smaller = "" if planner.model.experts else ", or config.model.quantize='int8' for the trainer"
        smaller += ", or more config.engine.kv_cache_bytes" * bool(planner.policy.base.engine.kv_cache_bytes)
        raise ConfigError(
            f"--plan={machine}: nothing fits {count} x {kind} of {GPUS[kind].memory_gib:.0f} GiB: take more or larger "
            f"GPUs, a smaller model or shorter config.trainer.row_tokens{smaller}"
        )
    table = Table.grid(padding=(0, 2))
    heads = ("", "trainer", "memory of a GPU", "engines", "sequences in a cache", "train", "play", "step")
    table.add_row(*heads, style="dim")
    table.add_row("recipe", *(_cells(planner, recipe) if recipe else ("does not fit",)))
    best = _differing(found)
    for number, each in enumerate(best, 1):
        table.add_row(str(number), *_cells(planner, each))
    changed = _flags(planner.configured(), best[0].layout)
    command = f"to take 1: {changed}" if changed else "1 is the recipe's own"
    note = (
        "Seconds are estimates from data sheets, with prompts and replies half as long as they may be. Never measured."
    )
    if len(run.agents) > 1:
        note += f" A step is one of each policy; each agent has {run.config.env.max_turns} turns in an episode."
    title = Text(f"{run.config.name} on {count} x {kind} ({GPUS[kind].memory_gib:g} GiB)", "bold")
    given = planner.policy.base.engine.kv_cache_bytes
    held = f"An engine's cache is held to {given / GIB:g} GiB by config.engine.kv_cache_bytes: raise it for more"
    return Group(title, table, *([Text(held)] if given and best[0].layout.replicas else []), Text(note), Text(command))


def _differing(found: Sequence[Estimate]) -> list[Estimate]:
    """The best layout of each split between trainer and engines; four at the most.

    The cache's size is part of the key: shares of a GPU that leave an engine the same cache, because
    config.engine.kv_cache_bytes bounds it, count as one.
    """
    best: dict[tuple[float, ...], Estimate] = {}
    for each in found:
        layout = each.layout
        best.setdefault((layout.trainer_gpus, layout.tensor_parallel, each.cached_tokens), each)
    return list(best.values())[:_SHOWN]


def _cells(planner: Planner, each: Estimate) -> tuple[str, ...]:
    layout = each.layout
    mesh = " x ".join(f"{name} {size}" for name, size in (("data", layout.data), ("fsdp", layout.fsdp)) if size > 1)
    trainer = f"{layout.trainer_gpus} ({mesh or 'one'}), {layout.rows} rows, {layout.remat}"
    engines = f"{layout.replicas} of {layout.tensor_parallel}" if layout.replicas else "elsewhere"
    if layout.replicas and layout.trainer_gpus + layout.engine_gpus > planner.count:
        engines += f", {layout.gpu_memory_fraction:.0%} of its memory"
    sequences = each.cached_tokens // planner.policy.base.engine.max_model_tokens
    seconds = (f"{part_s:,.0f} s" for part_s in (each.train_s, each.play_s, each.step_s))
    return trainer, f"{each.trainer_bytes / GIB:.1f} GiB", engines, str(sequences), *seconds


def _flags(configured: RunLayout, layout: RunLayout) -> str:
    before = configured.flags()
    changed = {field: value for field, value in layout.flags().items() if value != before[field]}
    if not layout.replicas:  # of engines elsewhere
        changed = {field: value for field, value in changed.items() if not field.startswith("engine")}
    return " ".join(f"--config.{field}={value}" for field, value in changed.items())
