import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from flowjax.monitor.metrics import METRICS_FILE, MetricsWriter, read_metrics


def test_lines_come_back_in_order_with_their_kind_and_step(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("train", step=1, loss=np.float32(0.5), episodes=np.int64(128))
    writer.write("run", role="engine", text="started")
    first, second = read_metrics(tmp_path)
    assert (first["kind"], first["step"], first["loss"], first["episodes"]) == ("train", 1, 0.5, 128)
    assert second["role"] == "engine"
    assert "step" not in second
    assert first["time_s"] <= second["time_s"]


def test_a_value_that_is_not_finite_does_not_make_the_line_unreadable(tmp_path):
    MetricsWriter(tmp_path).write("train", step=1, loss=math.nan, gradient_norm=math.inf)
    text = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["gradient_norm"] == "inf"


def test_small_values_keep_their_digits(tmp_path):
    MetricsWriter(tmp_path).write("train", step=1, mismatch_kl=1.23456789e-9)
    assert read_metrics(tmp_path)[0]["mismatch_kl"] == 1.23456789e-9


def test_torn_last_line_is_left_out_and_does_not_swallow_the_next(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("train", step=1)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"kind": "train", "st')
    assert [e["step"] for e in read_metrics(tmp_path)] == [1]
    writer.write("train", step=2)
    assert [e["step"] for e in read_metrics(tmp_path)] == [1, 2]


def test_lines_that_nobody_writes_again_are_on_the_disk(tmp_path, monkeypatch):
    """A checkpoint and the ledger outlive a power cut, and say that these are there."""
    writer, fsync, kinds = MetricsWriter(tmp_path), os.fsync, []

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        kinds.append(read_metrics(tmp_path)[-1]["kind"])

    monkeypatch.setattr(os, "fsync", flush)
    for kind in ("batch", "train", "run", "eval"):
        writer.write(kind, step=1)
    assert kinds == ["train", "eval"]


def test_resuming_drops_later_steps_only(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("run", text="start")
    for step in range(1, 6):
        writer.write("train", step=step)
    writer.write("eval", step=0, success_rate=0.4)
    writer.write("eval", step=5, success_rate=0.6)
    resumed = MetricsWriter(tmp_path, resume_step=3)
    resumed.write("train", step=4)
    writer.write("run", text="a writer opened before the file was replaced")
    entries = read_metrics(tmp_path)
    assert [e["step"] for e in entries if e["kind"] == "train"] == [1, 2, 3, 4]
    assert [e["step"] for e in entries if e["kind"] == "eval"] == [0]
    assert [e["text"] for e in entries if e["kind"] == "run"][-1].startswith("a writer")


def test_a_trainer_that_resumes_drops_lines_of_its_own_policies_only(tmp_path):
    writer = MetricsWriter(tmp_path)
    for policy in ("solver", "verifier"):
        for step in range(1, 4):
            writer.write("train", step=step, policy=policy)
    MetricsWriter(tmp_path, resume_step={"solver": 1})
    lines = [(e["policy"], e["step"]) for e in read_metrics(tmp_path)]
    assert lines == [("solver", 1), *(("verifier", step) for step in (1, 2, 3))]


def test_an_evaluation_with_a_version_that_is_lost_is_dropped_whichever_policy_it_was_of(tmp_path):
    writer = MetricsWriter(tmp_path)
    for solver, verifier in ((50, 40), (60, 40), (60, 50)):
        writer.write("eval", step=min(solver, verifier), versions={"solver": solver, "verifier": verifier})
    MetricsWriter(tmp_path, resume_step={"solver": 50})
    assert [line["versions"] for line in read_metrics(tmp_path)] == [{"solver": 50, "verifier": 40}]


def test_processes_append_at_once_and_one_replaces_the_file_without_losing_a_line(tmp_path):
    script = (
        "import sys; from pathlib import Path; from flowjax.monitor.metrics import MetricsWriter\n"
        "writer = MetricsWriter(Path(sys.argv[1]))\n"
        "for i in range(200): writer.write('run', text=sys.argv[2], i=i)\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name]) for name in ("a", "b")]
    while any(child.poll() is None for child in children):
        MetricsWriter(tmp_path, resume_step=0)
    assert [child.returncode for child in children] == [0, 0]
    entries = read_metrics(tmp_path)
    for name in ("a", "b"):
        assert [e["i"] for e in entries if e["text"] == name] == list(range(200))


def test_no_file_is_no_metrics(tmp_path):
    assert read_metrics(tmp_path) == []


def test_a_line_that_the_disk_takes_only_a_part_of_is_an_error_and_leaves_nothing(tmp_path):
    MetricsWriter(tmp_path).write("train", step=1)
    size = (tmp_path / METRICS_FILE).stat().st_size
    code = f"""
import resource, signal, sys
from pathlib import Path
from flowjax.monitor.metrics import MetricsWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 20}, {size + 20}))
try:
    MetricsWriter(Path(sys.argv[1])).write("train", step=2)
except OSError:
    print("refused")
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert told == "refused\n"
    assert (tmp_path / METRICS_FILE).stat().st_size == size
    MetricsWriter(tmp_path).write("train", step=3)
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 3]
