"""Accelerators of this machine, shared out between trainers and engines, and the variables that show each its part."""

import math
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from ml_collections import ConfigDict

from flowjax.config import ConfigError
from flowjax.launch.checks import on_each_policy
from flowjax.rollout.sidecar import adapter_slots, served_rank, tpu_chips
from flowjax.run import Base, Policy, Run

if TYPE_CHECKING:
    from flowjax.models.lora import Lora
    from flowjax.models.shape import ModelConfig

# By default XLA starts a collective of several GPUs and waits for it at once. With these flags matrix products run
# meanwhile, as the compiled programs show (docs/benchmarks/accelerators.md).
_OVERLAP = (
    "--xla_gpu_enable_latency_hiding_scheduler",
    "--xla_gpu_enable_pipelined_all_gather",
    "--xla_gpu_enable_pipelined_all_reduce",
    "--xla_gpu_enable_pipelined_reduce_scatter",
)
_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")  # two names of one setting
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
MEMORY_FRACTION = 0.92  # of a GPU that only the trainer uses; JAX's default of 0.75 leaves a fifth of it idle
# Number of TPU chips of one process -> their grid (width, height, depth), as in JAX's own tests.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
_TPU = "tpu"  # prefix of a chip's number
_TPU_PORT = 8476  # libtpu's port for chip 0; each further chip has the next one


@dataclass(frozen=True)
class Devices:
    """Numbers of the accelerators of trainers and of engines; both empty where everything runs on the CPU.

    TPU chips are called tpu0, tpu1 and so on.

    Args:
        cpu_devices: CPU devices that JAX shows to a trainer without accelerators.
        assumed: this is a plan for another machine than this one.
        trainers: trainers that split `trainer` evenly, or use the same accelerators where there are too few.
        hosts: hosts of this one's size that hold one trainer together.
        on_host: accelerators of this host, in use or not.
        remote: accelerators of a trainer that runs on other hosts, on all of them together; 0 where not known.
    """

    trainer: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    cpu_devices: int = 1
    assumed: bool = False
    trainers: int = 1
    hosts: int = 1
    on_host: int = 0
    remote: int = 0

    @property
    def of_tpus(self) -> bool:
        return any(name.startswith(_TPU) for name in (*self.trainer, *self.engine))

    @property
    def platform(self) -> str:
        """JAX's name of the platform that trainers compute on."""
        return "cpu" if not self.trainer else "tpu" if self.of_tpus else "gpu"

    @property
    def trainer_count(self) -> int:
        """Devices of one trainer, on all of its hosts together."""
        return self._trainer_count_here * self.hosts

    @property
    def _trainer_count_here(self) -> int:
        return max(len(self.trainer) // self.trainers, 1) if self.trainer else self.cpu_devices

    @property
    def shared(self) -> bool:
        """True if a trainer and an engine use the same accelerator."""
        return bool(set(self.trainer) & set(self.engine))

    def trainer_env(self, index: int = 0, env: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Variables of trainer number `index`. Settings of XLA's flags and JAX's memory that `env` has are kept."""
        if not self.trainer:
            return {}
        count = self._trainer_count_here
        start = index * count % len(self.trainer)  # round again where there are more trainers than accelerators
        found = self._visible(self.trainer[start : start + count])
        if self.of_tpus:
            return found
        crowded = self.shared or len(self.trainer) < self.trainers
        if crowded:  # by default JAX reserves most of a device's memory at its start: the others would get none
            found |= {} if _PREALLOCATE in env else {_PREALLOCATE: "false"}
        elif not env.keys() & set(_FRACTIONS):  # JAX refuses both of them together
            found[_FRACTIONS[0]] = str(MEMORY_FRACTION)
        if self.trainer_count > 1:
            given = env.get("XLA_FLAGS", "")
            found["XLA_FLAGS"] = " ".join(filter(None, [given, *(f"{x}=true" for x in _OVERLAP if x not in given)]))
        return found

    def process_envs(self, count: int) -> list[dict[str, str]]:
        """Variables of each of the `count` processes of one trainer on this machine, on top of the trainer's own: they
        show each process an equal part of the accelerators, or the CPU.

        On the CPU they name the platform, which is what has the trainer choose collectives between processes (Gloo).
        """
        if not self.trainer:
            return [{"JAX_PLATFORMS": "cpu"}] * count
        each = len(self.trainer) // count
        parts = [self.trainer[each * index : each * (index + 1)] for index in range(count)]
        return [self._visible(part) for part in parts]

    def engine_env(self, first: int, count: int) -> dict[str, str]:
        """Variables of an engine that gets `count` of the engines' accelerators, from index `first` on."""
        return self._visible(self.engine[first : first + count] or self.engine)

    def _visible(self, part: Sequence[str]) -> dict[str, str]:
        """Variables that show a process these accelerators and no others."""
        if not part:
            return {}
        if not self.of_tpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(part)}
        if len(part) == self.on_host:
            return {}  # libtpu finds a whole host by itself; these would cut it off from a slice of several hosts
        chips = [name.removeprefix(_TPU) for name in part]
        port = str(_TPU_PORT + int(chips[0]))
        return {
            "TPU_VISIBLE_CHIPS": ",".join(chips),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS.get(len(part), "?"),  # "?": `check_accelerators` refuses it
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
            "TPU_PROCESS_PORT": port,
            "CLOUD_TPU_TASK_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }


def visible_accelerators(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, ...]:
    """Numbers (or names) of the CUDA devices that this process may use; without any, of the host's TPU chips."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return tuple(part.strip() for part in env["CUDA_VISIBLE_DEVICES"].split(",") if part.strip() not in ("", "-1"))
    found = [len(list(root.glob(each))) for each in ("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*")]
    # In a container /proc lists all GPUs of the host and /dev those that it was granted: so the smaller count. But on a
    # host that has not used its GPUs since it booted, /dev has none yet: so counts of 0 are left out.
    if listed := min(filter(None, found), default=0):
        return tuple(str(number) for number in range(listed))
    return tuple(f"{_TPU}{number}" for number in range(tpu_chips(root)))


def newest_gpu() -> float:
    """Compute capability of the newest NVIDIA GPU; 0 where there is none."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        return max(map(float, said.split()), default=0.0)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0


def host_device_count(env: Mapping[str, str] = os.environ) -> int:
    """Number of CPU devices that JAX will show."""
    found = re.search(r"--xla_force_host_platform_device_count=(\d+)", env.get("XLA_FLAGS", ""))
    return int(found[1]) if found else 1


def engine_accelerators(run: Run) -> int:
    """Number of accelerators that the run's engines on this machine need."""
    return sum(run.bases[engine.base].engine.tensor_parallel for engine in run.engines if not engine.url)


def share_out(
    accelerators: Sequence[str],
    engine_count: int,
    trainer_count: int | None = None,
    *,
    trainers: int = 1,
    cpu_devices: int = 1,
    assumed: bool = False,
    hosts: int = 1,
    remote: int = 0,
) -> Devices:
    """Give the engines the last `engine_count` accelerators, and each trainer `trainer_count` of the others.

    With a `trainer_count` of None a trainer gets an even share of the others. Where none would be left for the
    trainers, they share the engines' accelerators.
    """
    if not accelerators:
        return Devices((), (), cpu_devices, assumed, trainers, hosts, remote=remote)
    engine = tuple(accelerators[-engine_count:]) if engine_count else ()  # [-0:] would be all of them
    trainer = tuple(accelerators[: len(accelerators) - len(engine)]) or tuple(accelerators)
    most = None if trainer_count is None else trainer_count // hosts * trainers  # of this host, for all its trainers
    return Devices(trainer[:most], engine, cpu_devices, assumed, trainers, hosts, len(accelerators), remote)


def processes_here(trainer: ConfigDict) -> int:
    """Number of the trainer's processes that start on this machine: all, or one where FLOWJAX_PROCESS gives its number
    and other hosts start the others."""
    return 1 if "FLOWJAX_PROCESS" in os.environ else trainer.processes


def mesh_count(sizes: Sequence[int]) -> int | None:
    """Number of devices that a mesh names; None when one of its sizes is -1, which takes all there are."""
    return None if any(size < 1 for size in sizes) else math.prod(sizes)


def remote_count(run: Run, on_each: int) -> int:
    """Number of devices of a trainer on other hosts: `on_each` for each process where a plan gives that, else as many
    as the mesh names; 0 if the mesh takes all there are, which only the trainer's processes will know."""
    if not run.trained_remotely:
        return 0
    return on_each * run.config.trainer.processes or mesh_count(tuple(run.config.mesh.to_dict().values())) or 0


def check_mesh(run: Run, device_count: int, plan: dict[str, Any]) -> Iterator[str]:
    """Put the trainer's mesh into `plan`; yield messages on what does not divide over it, of any policy."""
    from flowjax.models.sharding import ROW_AXES, resolve_mesh
    from flowjax.trainer.batch import row_buckets

    mesh = resolve_mesh(run.config.mesh.to_dict(), device_count)
    plan["mesh"] = shown_axes(mesh)
    ways = math.prod(mesh[name] for name in ROW_AXES)

    def check(policy: Policy) -> Iterator[str]:
        rows, tokens = policy.trainer.micro_batch_rows, policy.trainer.row_tokens
        if rows % ways:
            yield (
                f"config.trainer.micro_batch_rows is {rows}, but rows are split over {ways} devices (mesh "
                f"{' x '.join(ROW_AXES)} = {' x '.join(str(mesh[name]) for name in ROW_AXES)}): make it a multiple of "
                f"{ways}"
            )
        shortest = row_buckets(tokens)[-1]
        if shortest % mesh["sequence"]:
            yield (
                f"config.trainer.row_tokens is {tokens}, whose shortest bucket of {shortest} tokens does not divide "
                f"over config.mesh.sequence = {mesh['sequence']}: make row_tokens that number times a power of 2"
            )

    yield from on_each_policy(run, check)


def shown_axes(mesh: Mapping[str, int]) -> dict[str, int]:
    """The axes of a mesh that a plan shows."""
    return {name: size for name, size in mesh.items() if size > 1 or name in ("data", "fsdp", "tensor")}


def check_attention(policy: Policy, model: "ModelConfig", sequence_parts: int, platform: str) -> None:
    """Refuse a form of attention that no device of a platform computes.

    Raises:
        ModelError: the config asks for such a form.
    """
    from flowjax.models.attention import choose_attention

    # Stands for a real device, which this machine may lack; for GPUs it is a new one, so that the kernel is judged and
    # not an old GPU.
    device = SimpleNamespace(platform=platform, compute_capability="10.0" if platform == "gpu" else "")
    section, tokens = policy.base.model, policy.trainer.row_tokens
    options: dict[str, Any] = {"tokens": tokens, "dtype": section.dtype, "sequence_parts": sequence_parts}
    choose_attention(section.attention, model, device=device, **options)


def decoder_shape(run: Run, base: Base) -> "ModelConfig | None":
    """Shape of a base model: from its folder, the nano recipe, or the known shapes; None where it is not known."""
    from flowjax.envs import find_world
    from flowjax.envs.demonstrations import base_words
    from flowjax.models.config import known_shape, read_config
    from flowjax.models.shape import ModelError

    folder, nano = Path(base.model.path), base.model.nano
    if (folder / "config.json").exists():
        try:
            return read_config(folder)
        except ModelError:
            if run.policies_on(base.name):
                raise
            return None  # engines serve more than is trained: quantised models, and other families
    if nano is not None:
        from flowjax.models.nano import SPECIAL_TOKENS, nano_config

        world = find_world(run.config.env.name)(**run.config.env.options.to_dict())
        words = base_words(run, base.name, world)
        return nano_config(len(words) + len(SPECIAL_TOKENS), **nano.to_dict())
    return known_shape(Path(base.model.path.partition("@")[0]).name)  # without a revision


def memory_plan(
    policy: Policy,
    model: "ModelConfig",
    lora: "Lora | None",
    axes: Mapping[str, int],
    *,
    rows: int,
    remat: Literal["none", "dots", "layer"] | None = None,
    versions: int = 0,
) -> dict[str, int]:
    """Bytes on each device of a mesh that a policy's trainer holds, by purpose: see `flowjax.models.cost.estimate`.

    A `remat` of None stands for the config's.
    """
    from flowjax.models import cost

    settings, trainer = policy.base.model, policy.trainer
    sizes: dict[str, Any] = dict(axes)
    return cost.estimate(
        model,
        lora,
        rows=rows,
        tokens=trainer.row_tokens,
        chunk=trainer.logprob_chunk_tokens,
        dtype=settings.dtype,
        remat=remat or settings.remat,
        attention=settings.attention,
        quantize=settings.quantize,
        versions=versions,
        moments=moments_of(policy, model, lora),
        offload=trainer.offload_optimizer,
        **sizes,
    )


def trained_shapes(model: "ModelConfig", lora: "Lora | None") -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that a policy trains, by the names that `config.optimizer.rules` are matched against."""
    from flowjax.models.decoder import base_specs
    from flowjax.models.lora import adapter_specs

    if lora is None:
        outer = ("embedding", "final_norm", "lm_head")
        specs = base_specs(model, "float32").items()
        return {name if name in outer else f"layers/{name}": spec.shape for name, spec in specs}
    adapters = adapter_specs(model, lora).items()
    return {f"adapter/{target}/{part}": spec.shape for target, parts in adapters for part, spec in parts.items()}


def moments_of(policy: Policy, model: "ModelConfig", lora: "Lora | None") -> float:
    """Values that the policy's optimiser keeps for each value that is trained."""
    import jax

    from flowjax.trainer.optimizer import make_optimizer

    shapes = trained_shapes(model, lora)
    trained = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    try:
        optimizer = make_optimizer(policy.optimizer, policy.optimizer.warmup_steps + 1, trained)
    except ConfigError:  # which has a message of its own
        return 2.0
    kept = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, trained)) if leaf.shape)
    return kept / sum(leaf.size for leaf in trained.values())


def adapter_slots_bytes(run: Run, base: Base, model: "ModelConfig", *, tensor_parallel: int) -> int:
    """Bytes on each GPU of an engine for adapters: all versions of all policies on its base it may hold at once."""
    from flowjax.models.cost import adapter_slot_bytes
    from flowjax.models.lora import Lora

    adapters = [each.lora for each in run.policies_on(base.name).values() if each.train == "lora"]
    if not adapters:
        return 0
    # vLLM makes every slot as large as the largest adapter, with a rank rounded up to one that it knows.
    rank = max(lora.rank for lora in adapters)
    rank = served_rank(rank) or rank
    targets = tuple(dict.fromkeys(target for lora in adapters for target in lora.targets))
    slot = adapter_slot_bytes(model, Lora(rank, 1.0, targets=targets), tensor=tensor_parallel, dtype=base.engine.dtype)
    return adapter_slots(len(adapters), run.config.dataflow.max_staleness) * slot


def memory_together(plans: Sequence[Mapping[str, int]], *, apart: bool = False) -> dict[str, int]:
    """Memory of all policies in one trainer, or with a trainer each (`apart`) that of the largest.

    In one trainer they share the base and take turns, so that its passes count once (the maximum); adapters, float32
    weights, moments and versions are kept for each policy (the sum).
    """
    if apart:
        return dict(max(plans, key=lambda plan: sum(plan.values())))
    kept = ("adapter", "float32_weights", "moments", "versions")
    return {name: (sum if name in kept else max)(plan[name] for plan in plans) for name in plans[0]}
