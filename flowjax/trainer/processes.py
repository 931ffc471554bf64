"""A trainer's processes, one for each host: their programs on disk, how they meet, and a batch on all their devices."""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from flowjax.config import ConfigError
from flowjax.models.sharding import ROW_AXES
from flowjax.records import pack, unpack
from flowjax.trainer.sources import Ahead, Served, Source

NUMBER_VARIABLE = "FLOWJAX_PROCESS"
COORDINATOR_VARIABLE = "FLOWJAX_COORDINATOR"  # of processes that the launcher starts on one machine
_WORTH_KEEPING_S = 0.2  # seconds of compilation


def use_compile_cache(folder: str) -> None:
    """Keep compiled programs in `folder`, for the next start of this run or one like it.

    "auto" is ~/.cache/flowjax/xla, "" is nowhere.
    """
    if not folder:
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flowjax" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(cache if folder == "auto" else Path(folder).absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)


def join(trainer: ConfigDict) -> None:
    """Join the other processes of the trainer, if `config.trainer.processes` says that there are any.

    Every process runs the same command with its own number, from 0, in the environment variable FLOWJAX_PROCESS. To be
    called before anything else touches a device.

    Raises:
        ConfigError: the number is missing or out of range, or there is no coordinator's address.
    """
    count = trainer.processes
    address = trainer.coordinator or os.environ.get(COORDINATOR_VARIABLE, "")
    if count == 1:
        return
    number = os.environ.get(NUMBER_VARIABLE, "")
    if not number.isdigit() or int(number) >= count:
        raise ConfigError(
            f"config.trainer.processes is {count}, but {NUMBER_VARIABLE} is {number!r}: "
            f"set it to the number of this process, 0 to {count - 1}"
        )
    if not address:
        raise ConfigError(
            f"config.trainer.processes is {count}, but config.trainer.coordinator is empty: "
            "give the host:port of process 0"
        )
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, int(number))


def place(tree: Any, mesh: Mesh) -> Any:
    """Put host arrays on the devices, their first axis split over the axes that split rows.

    Every process has the whole arrays and takes its own part of them.
    """
    sharding = NamedSharding(mesh, PartitionSpec(ROW_AXES))
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf), np.shape(leaf)), tree
    )


def on_mesh(array: jax.Array, mesh: Mesh) -> jax.Array:
    """The array as it is if it lies on the mesh already, else a copy on each of its devices."""
    if isinstance(array.sharding, NamedSharding):
        return array
    everywhere = NamedSharding(mesh, PartitionSpec())
    if jax.process_count() == 1:
        return jax.device_put(array, everywhere)
    return jax.make_array_from_process_local_data(everywhere, np.asarray(array), array.shape)


class Shared:
    """The next batch as the first process has it, in every process. Only the first asks the source."""

    def __init__(self, source: Source):
        self._ahead = Ahead(source) if is_first() else None

    def ask(self, steps: Mapping[str, int]) -> None:
        if self._ahead is not None:
            self._ahead.ask(steps)

    def take(self) -> Served:
        served = self._ahead.take() if self._ahead is not None else None
        if jax.process_count() == 1:
            assert served is not None
            return served
        sent = pack({f.name: getattr(served, f.name) for f in fields(Served)}) if served is not None else b""
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(sent))))
        data = np.frombuffer(sent, np.uint8) if sent else np.zeros(size, np.uint8)
        return Served(**unpack(np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes()))


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0
