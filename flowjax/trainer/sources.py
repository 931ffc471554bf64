"""Sources of batches: the dataflow, or a fixed stream of rows for supervised training. Of several trainer processes the
first one asks the source, ahead of need, and sends the batch to the others."""

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
_PIECE_BYTES = 64 * 1024**2  # of a batch, in one broadcast
_LOOK_S = 1.0  # between two checks for other failures while no batch comes
# Width of a batch's size, itself sent as bytes: 4 would end at 4 GiB, and JAX has no 64-bit integers without x64.
_SIZE_BYTES = 8


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
        """The next batch of the policy that has one first.

        `steps` has the current version of each policy that still trains. The batch takes its policy from that version
        to the next. Asked for again at the same version, as after a restart, it is the same batch.
        """
        ...

    def committed(self, policy: str, version: int, mismatches: Mismatches) -> None:
        """Called after the policy's `version` is committed on disk, with the mismatches found since the last call;
        again for the same version where there are new ones."""
        ...


class DataflowSource:
    """Batches from the dataflow role.

    Each call has a connection and an event loop of its own: the trainer has no loop that runs, and calls seldom.

    Args:
        connect: opens the broker to the dataflow.
        timeout_s: longest wait for a batch, with the dataflow up or down.
        unusable: why rows of a policy's batch cannot be trained on, by trajectory. A batch with such rows is refused:
            the dataflow puts their groups aside and makes another.
    """

    def __init__(self, connect: Connect, *, timeout_s: float, unusable: Unusable = lambda policy, rows: {}):
        self._connect, self._timeout_s, self._unusable = connect, timeout_s, unusable
        self._trainer, self._epoch = uuid.uuid4().hex, 0

    def claim(self, versions: Mapping[str, int]) -> None:
        """Become the trainer of these policies, from these versions on; an older trainer is refused from now on.

        Raises:
            DataflowError: the dataflow does not answer, or refuses.
        """
        claimed = False
        # Compare and set: refused while `after` is not the newest epoch, as it is not at the first call of a restarted
        # trainer; the answer then has the newest epoch. A copy of a claim that was good changes nothing.
        while not claimed:
            message = {"trainer": self._trainer, "policies": dict(versions), "after": self._epoch}
            answer = self._call("claim", message, self._timeout_s)
            claimed, self._epoch = answer["claimed"], answer["epoch"]

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        """See `Source`.

        Raises:
            SourceError: no batch came within `timeout_s`.
            BatchError: a batch that was refused came again.
            DataflowError: the dataflow does not answer, or refuses: with `Superseded` once another trainer has claimed.
        """
        until = time.monotonic() + self._timeout_s
        # Policies that lag come first, so that one that always has a batch ready does not hold up the others.
        behind_first = dict(sorted(steps.items(), key=lambda item: item[1]))
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
        """The batch asked for, or None after `timeout_s`; an error of the thread that fetches it is raised here."""
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
            except BaseException as error:  # if the thread died in silence, `take` would wait for ever
                self._answers.put(error)


class Shared:
    """The next batch, the same in every process: only the first asks the source, and sends it to the others."""

    def __init__(self, source: Source):
        self._ahead = Ahead(source) if is_first() else None

    def ask(self, steps: Mapping[str, int]) -> None:
        if self._ahead is not None:
            self._ahead.ask(steps)

    def take(self, check: Callable[[], None]) -> ServedBatch:
        """The batch asked for. While it does not come, every process calls `check` each second, which may raise.

        Otherwise a save that failed would show only as a batch that does not come, when the source gives up: its
        version is never played.
        """
        while True:
            served = self._ahead.take(_LOOK_S) if self._ahead is not None else None
            if jax.process_count() == 1:
                if served is not None:
                    return served
            else:
                sent = (
                    pack({f.name: getattr(served, f.name) for f in fields(ServedBatch)}) if served is not None else b""
                )
                # Its size first: a broadcast takes arrays of the same shape in every process. Size 0: no batch yet.
                size = int.from_bytes(_from_first(len(sent).to_bytes(_SIZE_BYTES, "little"), _SIZE_BYTES), "little")
                if size:
                    return ServedBatch(**unpack(_from_first(sent, size)))
            check()


def _from_first(sent: bytes, size: int) -> bytes:
    """The `size` bytes that the first process sends, in every process. They go in pieces: a broadcast goes through the
    devices' memory, which may have no room for a whole batch."""
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
