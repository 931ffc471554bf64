"""A trainer's questions to a dataflow that dies while it answers."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowjax.records import pack
from flowjax.trainer.sources import DataflowSource, SourceError

BATCH = pack({"state": "run", "policy": "agent", "rows": [], "totals": {}, "dropped": 0})


@contextmanager
def dataflow(*answers: tuple[int, bytes, int]) -> Iterator[str]:
    """Gives (status, body, how many bytes of it before the connection breaks off), one a request; -1: no answer."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            status, body, sent = left.pop(0)
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
        assert DataflowSource(url, timeout_s=10.0).batch({"agent": 0}).policy == "agent"


def test_a_refusal_is_told_at_once():
    refusal = pack({"error": "agent@9 has never been made"})
    with dataflow((400, refusal, len(refusal))) as url, pytest.raises(SourceError, match="agent@9 has never been made"):
        DataflowSource(url, timeout_s=10.0).batch({"agent": 9})
