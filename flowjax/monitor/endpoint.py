"""`GET /metrics` of a role that serves nothing else: its counts for Prometheus, on loopback."""

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flowjax.monitor.prometheus import CONTENT_TYPE, exposition


class MetricsEndpoint:
    """Answers on 127.0.0.1 at a free port, from a thread of its own, until it is left.

    Args:
        status: gives the counts to show; called from that thread.
        role: whose they are.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]], *, role: str):
        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0  # seconds for a request to come in

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "ask for /metrics")
                    return
                body = exposition(status(), role=role).encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/metrics"

    def __enter__(self) -> "MetricsEndpoint":
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
