"""A role's counts for Prometheus: its text format, `GET /metrics` for a role that serves nothing else, and the list of
a run's roles that Prometheus reads (`prometheus.json`, its file-based service discovery).

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowjax.files import replace_file
from flowjax.monitor.metrics import read_status
from flowjax.run import read_endpoints

CONTENT_TYPE = "text/plain; version=0.0.4"
# Maps whose keys are data: a key becomes the value of this label, and not a part of the metric's name.
LABELS = {
    "policies": "policy",
    "bases": "base",
    "serving_versions": "policy",
    "workers": "worker",
    "serving": "policy",
    "failed": "cause",
    "dropped": "cause",
    "refused": "cause",
    "ages": "age",
    "trained_ages": "age",
}
_PREFIXES = {"policies": "policy", "bases": "base", "workers": "worker"}  # singular forms for names
LISTS = {"engines": ("engine", "url")}  # lists of maps: name of the label, and key of its value in each map
_UNFIT = re.compile(r"[^a-zA-Z0-9_]")


def exposition(status: Mapping[str, Any], *, role: str) -> str:
    """Every number of a nested map of counts as a gauge `flowjax_<role>_<name>`.

    Keys of the maps in `LABELS` and entries of the lists in `LISTS` become labels; keys of other maps are appended to
    the name. Texts and other lists are left out, and so are numbers of the whole run that every policy has, too. No
    series comes twice: Prometheus would refuse the whole answer.
    """
    of_policies = [set(counts) for counts in status.get("policies", {}).values() if isinstance(counts, Mapping)]
    of_each_policy = set.intersection(*of_policies) if of_policies else set()
    common = {key: value for key, value in status.items() if key not in of_each_policy}
    samples: dict[str, dict[str, float | int]] = {}
    for name, labels, value in _numbers(common, "", {}):
        written = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        samples.setdefault(f"flowjax_{role}_{name}", {}).setdefault(f"{{{written}}}" if written else "", value)
    lines = []
    for name, values in samples.items():
        lines.append(f"# TYPE {name} gauge")
        lines += [f"{name}{labels} {value}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


def _numbers(
    status: Mapping[str, Any], prefix: str, labels: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, str], float | int]]:
    """Name, labels and value of each number in a map whose name is `prefix`."""
    for key, value in status.items():
        fit = _UNFIT.sub("_", str(key))
        name = f"{prefix}_{fit}" if prefix else fit
        if isinstance(value, Mapping) and key in LABELS:
            inner = f"{prefix}_{_PREFIXES.get(key, fit)}" if prefix else _PREFIXES.get(key, fit)
            for text, counts in value.items():
                labelled = {**labels, LABELS[key]: str(text)}
                if isinstance(counts, Mapping):
                    yield from _numbers(counts, inner, labelled)
                else:
                    yield from _number(inner, labelled, counts)
        elif isinstance(value, list) and key in LISTS:
            label, naming = LISTS[key]
            for item in value:
                yield from _numbers(item, name, {**labels, label: str(item.get(naming, ""))})
        elif isinstance(value, Mapping):
            yield from _numbers(value, name, labels)
        else:
            yield from _number(name, labels, value)


def _number(name: str, labels: Mapping[str, str], value: Any) -> Iterator[tuple[str, Mapping[str, str], float | int]]:
    if isinstance(value, bool):
        yield name, labels, int(value)
    elif isinstance(value, int | float):
        yield name, labels, value


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsEndpoint:
    """Context manager that serves `/metrics` on 127.0.0.1 at a free port, from threads of its own.

    Args:
        status: returns the counts to show; called from those threads.
        role: name of the role that has these counts.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]], *, role: str):
        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0  # seconds without data before a connection is dropped

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


# --------------------------------------------------------------------------------------------------- where roles listen

TARGETS_FILE = "prometheus.json"


def metrics_targets(run_dir: Path) -> list[dict[str, Any]]:
    """An entry for each role with a known address: `targets` has its host and port, `labels` the run and role."""
    urls: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        urls = read_endpoints(run_dir)
    for path in sorted(run_dir.glob("status-*.json")):
        role = path.stem.removeprefix("status-")
        if url := read_status(run_dir, role).get("metrics_url"):
            urls[role] = url
    return [
        {"targets": [urlsplit(url).netloc], "labels": {"run": run_dir.name, "role": role}}
        for role, url in sorted(urls.items())
    ]


def write_targets(run_dir: Path) -> None:
    """Bring `prometheus.json` up to date: rollout and trainers answer at another port after every restart."""
    path, text = run_dir / TARGETS_FILE, json.dumps(metrics_targets(run_dir), indent=2)
    if not path.exists() or path.read_text() != text:
        replace_file(path, text, durable=False)
