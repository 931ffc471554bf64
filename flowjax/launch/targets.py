"""Where the roles of a run answer `/metrics`, as Prometheus's file-based service discovery reads it."""

import contextlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowjax.files import replace_file
from flowjax.monitor.progress import read_status
from flowjax.run import read_endpoints

TARGETS_FILE = "prometheus.json"


def metrics_targets(run_dir: Path) -> list[dict[str, Any]]:
    """One entry for each role that is known to listen: `targets` with its host and port, `labels` with run and role."""
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
