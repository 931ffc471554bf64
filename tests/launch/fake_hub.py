"""A Hugging Face hub on loopback with one model, as `huggingface_hub` asks it; counts what is downloaded."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHAS = {"main": "a" * 40, "v1": "b" * 40}


class FakeHub:
    """`folder` holds the files of `model`; every revision has the same ones. Use as a context manager."""

    def __init__(self, folder: Path, model: str = "tests/Tiny"):
        self.folder, self.model = folder, model
        self.gated = self.broken = False
        self.fetched: list[str] = []  # revision/file
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = request.path.partition("?")[0].strip("/")
        api, files = f"api/models/{self.model}", f"{self.model}/resolve/"
        if self.broken:
            self._send(request, b"{}", status=500)
        elif self.gated:
            self._send(request, b"{}", status=403, headers={"X-Error-Code": "GatedRepo"})
        elif not path.startswith((api, files)):
            self._send(request, b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"})
        elif path.startswith(f"{api}/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in self._files().items()
            ]
            self._send(request, json.dumps(listed).encode())
        elif path.startswith(api):
            revision = path.removeprefix(api).removeprefix("/revision/") or "main"
            if revision in SHAS or revision in SHAS.values():
                found = {"id": self.model, "sha": SHAS.get(revision, revision), "siblings": []}
                self._send(request, json.dumps(found).encode())
            else:
                self._send(request, b"{}", status=404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            revision, _, name = path.removeprefix(files).partition("/")
            data = self._files()[name]
            if body:
                self.fetched.append(f"{revision}/{name}")
            headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": SHAS.get(revision, revision)}
            self._send(request, data, headers=headers, body=body)

    def _files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        data: bytes,
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
        body: bool = True,
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if body and request.command != "HEAD":
            request.wfile.write(data)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
