"""Who gets which accelerator of this machine: the engine the last ones, the trainer the rest."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Devices:
    """Accelerators by number; both lists are empty on a machine without any, where everything runs on the CPU.

    `assumed` marks a plan for a machine that is not this one.
    """

    trainer: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    cpu_devices: int = 1
    assumed: bool = False

    @property
    def trainer_count(self) -> int:
        return len(self.trainer) or self.cpu_devices

    @property
    def shared(self) -> bool:
        return bool(set(self.trainer) & set(self.engine))

    def trainer_env(self) -> dict[str, str]:
        if not self.trainer:
            return {}
        shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if self.shared else {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.trainer), **shared}

    def engine_env(self, replica: int = 0, replicas: int = 1) -> dict[str, str]:
        """Of one of the engines, which share their accelerators out evenly."""
        count = len(self.engine) // replicas
        own = self.engine[replica * count : (replica + 1) * count] or self.engine
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}


def visible_accelerators(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, ...]:
    """Numbers (or names) of the CUDA devices that this process may use."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return tuple(part.strip() for part in env["CUDA_VISIBLE_DEVICES"].split(",") if part.strip() not in ("", "-1"))
    listed = len(list((root / "proc/driver/nvidia/gpus").glob("*"))) or len(list((root / "dev").glob("nvidia[0-9]*")))
    return tuple(str(number) for number in range(listed))


def host_device_count(env: Mapping[str, str] = os.environ) -> int:
    """CPU devices that JAX will show."""
    found = re.search(r"--xla_force_host_platform_device_count=(\d+)", env.get("XLA_FLAGS", ""))
    return int(found[1]) if found else 1


def share_out(
    accelerators: Sequence[str],
    engine_count: int,
    trainer_count: int | None = None,
    *,
    cpu_devices: int = 1,
    assumed: bool = False,
) -> Devices:
    """Give the engines the last `engine_count`, the trainer `trainer_count` of the others or all of them (None).

    Where nothing would be left for the trainer, it shares the engine's.
    """
    if not accelerators:
        return Devices(cpu_devices=cpu_devices, assumed=assumed)
    engine = tuple(accelerators[-engine_count:]) if engine_count else ()
    trainer = tuple(accelerators[: len(accelerators) - len(engine)]) or tuple(accelerators)
    return Devices(trainer[:trainer_count], engine, cpu_devices, assumed)


def mesh_count(sizes: Sequence[int]) -> int | None:
    """Devices that a mesh names; None when one of its sizes is -1 and takes what there is."""
    return None if any(size < 1 for size in sizes) else math.prod(sizes)
