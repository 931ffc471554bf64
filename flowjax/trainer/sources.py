"""Where batches come from: the dataflow, or a fixed stream of rows for supervised training."""

import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowjax.records import TokenRow, pack, unpack


class SourceError(RuntimeError):
    """No batch can be had; the message says where to look."""


@dataclass(frozen=True, slots=True)
class Served:
    """The rows of one batch, and sums over its episodes for the log (see `dataflow.rows.CreditedBatch`)."""

    rows: Sequence[TokenRow]
    totals: Mapping[str, float] = field(default_factory=dict)
    dropped: int = 0


class Source(Protocol):
    """What the loop asks for data."""

    def batch(self, step: int) -> Served:
        """The batch that turns version `step` into `step + 1`; the same one each time it is asked for."""
        ...

    def committed(self, version: int) -> None:
        """Told once a checkpoint of `version` is on disk."""
        ...


class DataflowSource:
    """Batches over HTTP from the dataflow role.

    Args:
        url: the dataflow's address.
        timeout_s: longest wait for a batch, with the dataflow up or down, before `SourceError`.
    """

    def __init__(self, url: str, *, policy: str, timeout_s: float):
        self._url, self._policy, self._timeout_s = url, policy, timeout_s

    def batch(self, step: int) -> Served:
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until:
            answer = self._post("batch", {"policy": self._policy, "step": step}, until)
            if answer["state"] == "run":
                return Served(answer["rows"], answer["totals"], answer["dropped"])
        raise SourceError(
            f"no batch for step {step} within config.trainer.step_timeout_s ({self._timeout_s:g} s): "
            "see logs/rollout.log and logs/dataflow.log for what holds the episodes up"
        )

    def committed(self, version: int) -> None:
        message = {"policy": self._policy, "version": version}
        self._post("committed", message, time.monotonic() + self._timeout_s)

    def _post(self, name: str, message: dict[str, Any], until: float) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._url}/{name}", data=pack(message), method="POST")
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60.0) as answer:
                    return unpack(answer.read())
            except urllib.error.HTTPError as error:
                raise SourceError(f"dataflow refused {name}: {unpack(error.read())['error']}") from error
            except OSError as error:  # the dataflow is starting or restarting
                if time.monotonic() > until:
                    raise SourceError(
                        f"dataflow at {self._url} does not answer ({error}): see logs/dataflow.log"
                    ) from error
                time.sleep(0.1)


class FixedSource:
    """A stream of ready batches, for supervised training."""

    def __init__(self, batches: Iterator[Sequence[TokenRow]]):
        self._batches = batches

    def batch(self, step: int) -> Served:
        return Served(next(self._batches))

    def committed(self, version: int) -> None:
        pass
