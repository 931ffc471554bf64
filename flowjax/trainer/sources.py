"""Sources of batches: the dataflow, or a fixed stream of rows for supervised training; one process asks them ahead of
need, for all."""

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils

from flowjax.broker import Answer, Connect
from flowjax.records import TokenRow, pack, unpack
from flowjax.trainer.batch import BatchError

Unusable = Callable[[str, Sequence[TokenRow]], Mapping[str, str]]
# By trajectory: sum of the k3 KL between engine and trainer over tokens of it that were compared, and their number.
Mismatches = Mapping[str, tuple[float, int]]
NO_MISMATCHES: Mismatches = MappingProxyType({})
_MOST_MISMATCHES = 512  # in one message
_PIECE_BYTES = 64 * 1024**2  # of a batch that goes from one process to the others
_LOOK_S = 1.0  # between two looks at what else may go wrong while no batch comes
_SIZE_BYTES = 8  # of the number of its bytes: 4 are too few for a long batch, and no integer of 8 goes without x64


class SourceError(RuntimeError):
    """No batch can be had; the message says where to look."""


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """The rows of one batch of `policy`, and sums over its episodes (see `dataflow.batches.CreditedBatch`)."""

    policy: str
    rows: Sequence[TokenRow]
    totals: Mapping[str, float] = field(default_factory=dict)
    dropped: int = 0


@runtime_checkable
class Source(Protocol):
    """Anything that the loop may ask for batches."""

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        """A batch of whichever policy has one first.

        `steps` are the policies that still train and the version of each. The batch turns that version of its policy
        into the next; it is the same each time it is asked for.
        """
        ...

    def committed(self, policy: str, version: int, mismatches: Mismatches) -> None:
        """Called once a checkpoint of the policy's `version` is on disk, with what was found since the call before."""
        ...


class DataflowSource:
    """Batches from the dataflow role.

    Each question has a connection, and an event loop, of its own: the trainer has none, and asks seldom.

    Args:
        connect: opens the broker to the dataflow.
        timeout_s: longest wait for a batch, with the dataflow up or down.
        unusable: trajectories of the rows of a policy's batch that cannot be trained on, and why. Such a batch is
            refused for another: the dataflow puts their groups aside.
    """

    def __init__(self, connect: Connect, *, timeout_s: float, unusable: Unusable = lambda policy, rows: {}):
        self._connect, self._timeout_s, self._unusable = connect, timeout_s, unusable
        self._trainer, self._epoch = uuid.uuid4().hex, 0

    def claim(self, versions: Mapping[str, int]) -> None:
        """Become the trainer of these policies, from these versions on; a trainer from before is refused from now on.

        Raises:
            DataflowError: the dataflow does not answer, or refuses.
        """
        claimed = False
        # Refused while `after` is not the newest epoch, as at the first call: the answer names the one to come after.
        while not claimed:
            message = {"trainer": self._trainer, "policies": dict(versions), "after": self._epoch}
            answer = self._call("claim", message, self._timeout_s)
            claimed, self._epoch = answer["claimed"], answer["epoch"]

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        """See `Source`.

        Raises:
            SourceError: there was none in that time.
            BatchError: a batch that was refused came again.
            DataflowError: the dataflow does not answer, or refuses: with `Superseded` once another trainer has claimed.
        """
        until = time.monotonic() + self._timeout_s
        behind_first = dict(sorted(steps.items(), key=lambda item: item[1]))  # a policy always ready starves no other
        refused: Mapping[str, str] = {}
        while (left_s := until - time.monotonic()) > 0:
            answer = self._call("batch", {"policies": behind_first, "epoch": self._epoch}, left_s)
            if answer["state"] != "run":
                continue
            policy, before = answer["policy"], refused
            if not (refused := self._unusable(policy, answer["rows"])):
                return ServedBatch(policy, answer["rows"], answer["totals"], answer["dropped"])
            if refused.keys() & before.keys():
                name, reason = next(iter(refused.items()))
                raise BatchError(f"batch {steps[policy]} of {policy} came again after it was refused: {name}: {reason}")
            self._refuse(policy, steps[policy], refused)
        wanted = ", ".join(f"step {step} of {policy}" for policy, step in steps.items())
        raise SourceError(
            f"no batch for {wanted} within config.trainer.step_timeout_s ({self._timeout_s:g} s): "
            "see logs/rollout.log and logs/dataflow.log for what holds the episodes up"
        )

    def _refuse(self, policy: str, step: int, reasons: Mapping[str, str]) -> None:
        logging.warning("%s, step %d: %d trajectories cannot be trained on: %s", policy, step, len(reasons), reasons)
        message = {"policy": policy, "step": step, "epoch": self._epoch, "trajectories": dict(reasons)}
        self._call("refuse", message, self._timeout_s)

    def committed(self, policy: str, version: int, mismatches: Mismatches = NO_MISMATCHES) -> None:
        """See `Source`.

        Raises:
            DataflowError: the dataflow does not answer, or refuses.
        """
        newest = dict(list(mismatches.items())[-_MOST_MISMATCHES:])
        message = {"policy": policy, "version": version, "epoch": self._epoch, "mismatches": newest}
        self._call("committed", message, self._timeout_s)

    def _call(self, name: str, message: Mapping[str, Any], away_s: float) -> Answer:
        async def call() -> Answer:
            async with self._connect() as broker:
                return await broker.call(name, message, away_s=away_s)

        return asyncio.run(call())


class FixedSource:
    """A stream of ready batches for one policy, for supervised training."""

    def __init__(self, batches: Iterator[Sequence[TokenRow]]):
        self._batches = batches

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        (policy,) = steps
        return ServedBatch(policy, next(self._batches))

    def committed(self, policy: str, version: int, mismatches: Mismatches = NO_MISMATCHES) -> None:
        pass


class Ahead:
    """Asks a source for the next batch while the devices work on this one."""

    def __init__(self, source: Source):
        self._source = source
        self._asked: queue.Queue[Mapping[str, int]] = queue.Queue()
        self._answers: queue.Queue[ServedBatch | BaseException] = queue.Queue()
        # A daemon: a run that ends early must not wait for a batch that may never come.
        threading.Thread(target=self._fetch, name="next batch", daemon=True).start()

    def ask(self, steps: Mapping[str, int]) -> None:
        """Start fetching the batch for these steps; `take` returns it."""
        if steps:
            self._asked.put(dict(steps))

    def take(self, timeout_s: float) -> ServedBatch | None:
        """The batch asked for, or None if it has not come by then; what went wrong there is raised here."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _fetch(self) -> None:
        while True:
            try:
                self._answers.put(self._source.batch(self._asked.get()))
            except BaseException as error:  # a thread that died in silence would leave `take` waiting for ever
                self._answers.put(error)


class Shared:
    """The next batch as the first process has it, in every process. Only the first asks the source."""

    def __init__(self, source: Source):
        self._ahead = Ahead(source) if is_first() else None

    def ask(self, steps: Mapping[str, int]) -> None:
        if self._ahead is not None:
            self._ahead.ask(steps)

    def take(self, check: Callable[[], None]) -> ServedBatch:
        """The batch asked for. While it does not come, every process calls `check` each second, which may raise: a
        version that could not be saved is never played, and the batch of the next one never comes."""
        while True:
            served = self._ahead.take(_LOOK_S) if self._ahead is not None else None
            if jax.process_count() == 1:
                if served is not None:
                    return served
            else:
                sent = (
                    pack({f.name: getattr(served, f.name) for f in fields(ServedBatch)}) if served is not None else b""
                )
                # Its size first: a broadcast takes arrays of one shape in every process. None yet is a size of 0.
                size = int.from_bytes(_from_first(len(sent).to_bytes(_SIZE_BYTES, "little"), _SIZE_BYTES), "little")
                if size:
                    return ServedBatch(**unpack(_from_first(sent, size)))
            check()


def _from_first(sent: bytes, size: int) -> bytes:
    """The bytes that the first process sends, so many, in every process. They go by way of the devices, where a whole
    batch may have no room."""
    pieces = (
        np.frombuffer(sent, np.uint8, min(_PIECE_BYTES, size - start), start)
        if is_first()
        else np.zeros(min(_PIECE_BYTES, size - start), np.uint8)
        for start in range(0, size, _PIECE_BYTES)
    )
    return b"".join(np.asarray(multihost_utils.broadcast_one_to_all(piece)).tobytes() for piece in pieces)


def is_first() -> bool:
    """True in the process that asks for batches and writes what is written once."""
    return jax.process_index() == 0
