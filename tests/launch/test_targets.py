"""Where Prometheus finds the roles of a run."""

import json

from flowjax.launch.session import TARGETS_FILE, write_targets
from flowjax.monitor.progress import write_status


def read(run_dir):
    entries = json.loads((run_dir / TARGETS_FILE).read_text())
    return {entry["labels"]["role"]: entry["targets"] for entry in entries}


def test_every_role_that_listens_is_there_under_its_newest_port(tmp_path):
    write_targets(tmp_path)
    assert read(tmp_path) == {}
    endpoints = {"engine": "http://127.0.0.1:8000", "dataflow": "http://127.0.0.1:8001"}
    (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))
    write_status(tmp_path, "dataflow", {})
    write_status(tmp_path, "trainer-solver", {"metrics_url": "http://127.0.0.1:9000/metrics"})
    write_targets(tmp_path)
    known = {"engine": ["127.0.0.1:8000"], "dataflow": ["127.0.0.1:8001"], "trainer-solver": ["127.0.0.1:9000"]}
    assert read(tmp_path) == known
    write_status(tmp_path, "trainer-solver", {"metrics_url": "http://127.0.0.1:9001/metrics"})
    write_targets(tmp_path)
    assert read(tmp_path) == {**known, "trainer-solver": ["127.0.0.1:9001"]}


def test_an_unchanged_list_is_not_written_again(tmp_path):
    write_targets(tmp_path)
    before = (tmp_path / TARGETS_FILE).stat().st_ino
    write_targets(tmp_path)
    assert (tmp_path / TARGETS_FILE).stat().st_ino == before
