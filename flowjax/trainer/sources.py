"""Where batches come from: the dataflow, or a fixed stream of rows for supervised training."""

import http.client
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowjax.monitor.token import bearer
from flowjax.records import TokenRow, WireError, pack, unpack


class SourceError(RuntimeError):
    """No batch can be had; the message says where to look."""


@dataclass(frozen=True, slots=True)
class Served:
    """The rows of one batch of `policy`, and sums over its episodes for the log (see `dataflow.rows.CreditedBatch`)."""

    policy: str
    rows: Sequence[TokenRow]
    totals: Mapping[str, float] = field(default_factory=dict)
    dropped: int = 0


class Source(Protocol):
    """What the loop asks for data."""

    def batch(self, steps: Mapping[str, int]) -> Served:
        """A batch of whichever policy has one first.

        `steps` are the policies that still train and the version of each. The batch turns that version of its policy
        into the next; it is the same each time it is asked for.
        """
        ...

    def committed(self, policy: str, version: int) -> None:
        """Told once a checkpoint of the policy's `version` is on disk."""
        ...


class DataflowSource:
    """Batches over HTTP from the dataflow role.

    Args:
        url: the dataflow's address.
        timeout_s: longest wait for a batch, with the dataflow up or down, before `SourceError`.
        token: of the run, where its dataflow listens beyond loopback.
    """

    def __init__(self, url: str, *, timeout_s: float, token: str = ""):
        self._url, self._timeout_s = url, timeout_s
        self._headers = {"Content-Type": "application/msgpack", **bearer(token)}

    def batch(self, steps: Mapping[str, int]) -> Served:
        until = time.monotonic() + self._timeout_s
        behind_first = dict(sorted(steps.items(), key=lambda item: item[1]))  # a policy always ready starves no other
        while time.monotonic() < until:
            answer = self._post("batch", {"policies": behind_first}, until)
            if answer["state"] == "run":
                return Served(answer["policy"], answer["rows"], answer["totals"], answer["dropped"])
        wanted = ", ".join(f"step {step} of {policy}" for policy, step in steps.items())
        raise SourceError(
            f"no batch for {wanted} within config.trainer.step_timeout_s ({self._timeout_s:g} s): "
            "see logs/rollout.log and logs/dataflow.log for what holds the episodes up"
        )

    def committed(self, policy: str, version: int) -> None:
        message = {"policy": policy, "version": version}
        self._post("committed", message, time.monotonic() + self._timeout_s)

    def _post(self, name: str, message: dict[str, Any], until: float) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._url}/{name}", data=pack(message), headers=self._headers, method="POST"
        )
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60.0) as answer:
                    return unpack(answer.read())
            except (
                OSError,
                http.client.HTTPException,
                WireError,
            ) as error:  # it is starting, or died while it answered
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    raise SourceError(f"dataflow refused {name}: {_reason(error)}") from error
                if time.monotonic() > until:
                    problem = _reason(error) if isinstance(error, urllib.error.HTTPError) else error
                    raise SourceError(
                        f"dataflow at {self._url} does not answer ({problem}): see logs/dataflow.log"
                    ) from error
                time.sleep(0.1)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return unpack(error.read())["error"]
    except (WireError, KeyError, TypeError):  # whoever answers there is no dataflow
        return f"HTTP {error.code}"


class FixedSource:
    """A stream of ready batches for one policy, for supervised training."""

    def __init__(self, batches: Iterator[Sequence[TokenRow]]):
        self._batches = batches

    def batch(self, steps: Mapping[str, int]) -> Served:
        (policy,) = steps
        return Served(policy, next(self._batches))

    def committed(self, policy: str, version: int) -> None:
        pass


class Ahead:
    """Asks a source for the next batch while the devices work on this one."""

    def __init__(self, source: Source):
        self._source = source
        self._asked: queue.Queue[Mapping[str, int]] = queue.Queue()
        self._answers: queue.Queue[Served | BaseException] = queue.Queue()
        # A daemon: a run that ends early must not wait for a batch that may never come.
        threading.Thread(target=self._fetch, name="next batch", daemon=True).start()

    def ask(self, steps: Mapping[str, int]) -> None:
        """Start fetching the batch for these steps; `take` returns it."""
        if steps:
            self._asked.put(dict(steps))

    def take(self) -> Served:
        """The batch asked for; what went wrong there is raised here."""
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _fetch(self) -> None:
        while True:
            try:
                self._answers.put(self._source.batch(self._asked.get()))
            except BaseException as error:
                self._answers.put(error)
