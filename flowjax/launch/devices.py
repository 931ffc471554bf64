"""Accelerators of this machine, shared out: the engines get the last ones, the trainers the rest."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from flowjax.run import Run


@dataclass(frozen=True)
class Devices:
    """Accelerators by number; both lists are empty on a machine without any, where everything runs on the CPU.

    `trainers` is how many trainers share theirs out evenly, or use the same ones where too few. `assumed` marks
    a plan for a machine that is not this one. `hosts` as large as this one hold a trainer together.
    """

    trainer: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    cpu_devices: int = 1
    assumed: bool = False
    trainers: int = 1
    hosts: int = 1

    @property
    def trainer_count(self) -> int:
        """Of each trainer."""
        return self._trainer_count_here * self.hosts

    @property
    def _trainer_count_here(self) -> int:
        return max(len(self.trainer) // self.trainers, 1) if self.trainer else self.cpu_devices

    @property
    def shared(self) -> bool:
        return bool(set(self.trainer) & set(self.engine))

    def trainer_env(self, index: int = 0) -> dict[str, str]:
        """Of one of the trainers."""
        if not self.trainer:
            return {}
        count = self._trainer_count_here
        start = index * count % len(self.trainer)
        part = self.trainer[start : start + count]
        crowded = self.shared or len(self.trainer) < self.trainers
        shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if crowded else {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(part), **shared}

    def process_envs(self, count: int) -> list[dict[str, str]]:
        """Of each of the `count` processes of one trainer on this machine: equal parts of its accelerators, or the CPU.

        On the CPU the platform is named, which has JAX take the collectives that go from process to process there.
        """
        if not self.trainer:
            return [{"JAX_PLATFORMS": "cpu"}] * count
        each, env = len(self.trainer) // count, self.trainer_env()
        parts = [self.trainer[each * index : each * (index + 1)] for index in range(count)]
        return [{**env, "CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]

    def engine_env(self, first: int, count: int) -> dict[str, str]:
        """Of an engine that gets `count` of the engines' accelerators, from the `first` on."""
        part = self.engine[first : first + count] or self.engine
        return {"CUDA_VISIBLE_DEVICES": ",".join(part)} if part else {}


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


def engine_accelerators(run: Run) -> int:
    """Accelerators that the engines of a run want of this machine."""
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
) -> Devices:
    """Give the engines the last `engine_count`, each trainer `trainer_count` of the others or its share of them (None).

    Where nothing would be left for the trainers, they share the engine's.
    """
    if not accelerators:
        return Devices(cpu_devices=cpu_devices, assumed=assumed, trainers=trainers, hosts=hosts)
    engine = tuple(accelerators[-engine_count:]) if engine_count else ()
    trainer = tuple(accelerators[: len(accelerators) - len(engine)]) or tuple(accelerators)
    most = None if trainer_count is None else trainer_count // hosts * trainers
    return Devices(trainer[:most], engine, cpu_devices, assumed, trainers, hosts)


def processes_here(trainer: ConfigDict, env: Mapping[str, str] = os.environ) -> int:
    """Processes of the run's trainer that are started on this machine: all of them, or one where FLOWJAX_PROCESS says
    which and other hosts have the others."""
    return 1 if "FLOWJAX_PROCESS" in env else trainer.processes


def mesh_count(sizes: Sequence[int]) -> int | None:
    """Devices that a mesh names; None when one of its sizes is -1 and takes what there is."""
    return None if any(size < 1 for size in sizes) else math.prod(sizes)
