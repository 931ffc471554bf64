"""A trainer's questions to a dataflow that dies while it answers."""

import http.server
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from flowjax.broker import DataflowError, connect
from flowjax.config import ConfigError, default_config
from flowjax.dataflow.server import limits
from flowjax.records import Bounds, pack, unpack
from flowjax.run import resolve
from flowjax.trainer import sources
from flowjax.trainer.sources import NO_MISMATCHES, DataflowSource, Mismatches, ServedBatch, Shared, SourceError
from flowjax.weights.publish import CheckpointError

BATCH = pack({"state": "run", "policy": "agent", "rows": [], "totals": {}, "dropped": 0})


@contextmanager
def dataflow(*answers: tuple[int, bytes, int], received: list[bytes] | None = None) -> Iterator[str]:
    """Gives (status, body, how many bytes of it before the connection breaks off), one a request; -1: no answer."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            status, body, sent = left.pop(0)
            if received is not None:
                received.append(self.rfile.read(int(self.headers["Content-Length"])))
            if sent >= 0:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[:sent])
            self.close_connection = True

        def log_message(self, format, *args): ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "broken", [(200, BATCH, 5), (200, BATCH, -1), (200, b"\x00", 1), (503, pack({"error": "again"}), 99)]
)
def test_a_broken_answer_is_asked_for_again(broken):
    with dataflow(broken, (200, BATCH, len(BATCH))) as url:
        assert DataflowSource(partial(connect, url), timeout_s=60.0).batch({"agent": 0}).policy == "agent"


def test_a_refusal_is_told_at_once():
    refusal = pack({"error": "agent@9 has never been made"})
    with dataflow((400, refusal, len(refusal))) as url:
        source = DataflowSource(partial(connect, url), timeout_s=60.0)
        with pytest.raises(DataflowError, match="agent@9 has never been made"):
            source.batch({"agent": 9})


def test_mismatches_of_a_large_batch_fit_into_a_message(tmp_path):
    config = default_config()
    bounds = Bounds.of_run(resolve(config.lock(), tmp_path))
    limit = limits(bounds, most_bytes=config.dataflow.max_message_bytes)["committed"]
    names = [f"train-{number:08d}/000/" + 479 * "\N{PILE OF POO}" for number in range(2000)]
    received: list[bytes] = []
    answer = pack({})
    with dataflow((200, answer, len(answer)), received=received) as url:
        DataflowSource(partial(connect, url), timeout_s=60.0).committed("agent", 1, dict.fromkeys(names, (1.0, 2)))
    (body,) = received
    assert len(body) < limit.size_bytes
    found = unpack(body, most_elements=limit.elements)["mismatches"]
    assert set(found) == set(names[-len(found) :]) and len(found) >= 512


def test_a_stranger_at_the_address_is_told_at_once():
    with dataflow((404, b"<html>", 6)) as url:
        source = DataflowSource(partial(connect, url), timeout_s=60.0)
        with pytest.raises(DataflowError, match=r"HTTP 404.*is no dataflow"):
            source.committed("agent", 1)


def test_no_batch_in_time_names_what_holds_it_up():
    waits = pack({"state": "wait"})
    with dataflow(*[(200, waits, len(waits))] * 1000) as url:
        source = DataflowSource(partial(connect, url), timeout_s=0.2)
        with pytest.raises(SourceError, match=r"step 3 of agent .*step_timeout_s \(0\.2 s\).*rollout\.log"):
            source.batch({"agent": 3})


def test_a_dataflow_that_stays_away_is_given_up():
    with pytest.raises(DataflowError, match=r"has not answered for \d s \(Client.*dataflow\.log"):
        DataflowSource(partial(connect, "http://127.0.0.1:9"), timeout_s=0.1).batch({"agent": 0})


def test_an_address_that_no_broker_reaches_is_refused():
    with pytest.raises(ConfigError, match="give an address that begins with http://"):
        DataflowSource(partial(connect, "tcp://127.0.0.1:9"), timeout_s=60.0).committed("agent", 1)


class Counting:
    """A source that answers at once with what it was asked for."""

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        return ServedBatch(next(iter(steps)), [], dict(steps))

    def committed(self, policy: str, version: int, mismatches: Mismatches = NO_MISMATCHES) -> None:
        pass


def test_the_first_process_fetches_the_batch_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(sources, "_LOOK_S", 600.0)
    shared, answers = Shared(Counting()), queue.Queue()
    for version in (3, 4):
        shared.ask({"agent": version})
        threading.Thread(target=lambda: answers.put(shared.take(never)), daemon=True).start()
        assert answers.get(timeout=120).totals == {"agent": version}


@pytest.mark.parametrize("number", [0, 1])
def test_a_batch_goes_to_every_process_in_pieces_with_its_size_in_whole_bytes(monkeypatch, number):
    """Its size was an int32, which one of 2 GiB does not fit into, and all of it went to every device at once."""
    expected = ServedBatch("agent", [], {"agent": 3.0, "filler": 0.0}, dropped=2)
    sent = pack({name: getattr(expected, name) for name in ("policy", "rows", "totals", "dropped")})
    of_first = [len(sent).to_bytes(8, "little"), *(sent[start : start + 10] for start in range(0, len(sent), 10))]
    given = []

    def broadcast(piece: np.ndarray) -> np.ndarray:
        first = np.frombuffer(of_first[len(given)], np.uint8)
        given.append(piece.tobytes())
        assert piece.dtype == np.uint8 and piece.shape == first.shape, "alike in every process"
        return first

    monkeypatch.setattr(sources, "_LOOK_S", 600.0)
    monkeypatch.setattr(sources, "_PIECE_BYTES", 10)
    monkeypatch.setattr(sources.jax, "process_count", lambda: 2)
    monkeypatch.setattr(sources.jax, "process_index", lambda: number)
    monkeypatch.setattr(sources.multihost_utils, "broadcast_one_to_all", broadcast)
    shared = Shared(Answering(expected))
    shared.ask({"agent": 3})
    assert shared.take(never) == expected
    assert len(given) == len(of_first) and (given == of_first) == (number == 0)
    assert sources._from_first(b"", 0) == b""


def never() -> None:
    raise AssertionError("the batch was there")


def test_while_no_batch_comes_a_save_that_has_failed_is_told(monkeypatch):
    """With max_staleness 0 it never comes: nobody plays a version that is not on disk."""
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise CheckpointError("no room")

    monkeypatch.setattr(sources, "_LOOK_S", 0.01)
    with pytest.raises(CheckpointError, match="no room"):
        Shared(Counting()).take(check)  # nothing was asked for


@pytest.mark.parametrize("number", [0, 1])
def test_every_process_looks_while_the_first_has_no_batch(monkeypatch, number):
    looks, expected = [], ServedBatch("agent", [], {}, dropped=2)
    sent = pack({name: getattr(expected, name) for name in ("policy", "rows", "totals", "dropped")})
    of_first = iter([bytes(8), bytes(8), len(sent).to_bytes(8, "little"), sent])

    def check() -> None:
        looks.append(1)
        if len(looks) == 2:
            shared.ask({"agent": 3})

    def broadcast(piece: np.ndarray) -> np.ndarray:
        return piece if number == 0 else np.frombuffer(next(of_first), np.uint8)

    monkeypatch.setattr(sources, "_LOOK_S", 0.01)
    monkeypatch.setattr(sources.jax, "process_count", lambda: 2)
    monkeypatch.setattr(sources.jax, "process_index", lambda: number)
    monkeypatch.setattr(sources.multihost_utils, "broadcast_one_to_all", broadcast)
    shared = Shared(Answering(expected))
    assert shared.take(check) == expected
    assert len(looks) >= 2 if number == 0 else len(looks) == 2


@dataclass(frozen=True)
class Answering(Counting):
    """A source of one batch."""

    served: ServedBatch

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        return self.served
