"""Counts as Prometheus reads them, over HTTP, and where it finds the roles of a run."""

import json
import urllib.error
import urllib.request

import pytest

from flowjax.monitor.metrics import write_status
from flowjax.monitor.prometheus import TARGETS_FILE, MetricsEndpoint, exposition, write_targets


def test_every_number_is_a_gauge_and_policies_are_labels():
    status = {
        "leased": 3,
        "engine_up": True,
        "worker": "a-1",
        "leases": ["x"],
        "algorithms": {"greso": {"p_easy": 0.25}},
        "policies": {"solver": {"version": 4}, 'odd "name"\\': {"version": 5}},
    }
    assert exposition(status, role="dataflow").splitlines() == [
        "# TYPE flowjax_dataflow_leased gauge",
        "flowjax_dataflow_leased 3",
        "# TYPE flowjax_dataflow_engine_up gauge",
        "flowjax_dataflow_engine_up 1",
        "# TYPE flowjax_dataflow_algorithms_greso_p_easy gauge",
        "flowjax_dataflow_algorithms_greso_p_easy 0.25",
        "# TYPE flowjax_dataflow_policy_version gauge",
        'flowjax_dataflow_policy_version{policy="solver"} 4',
        'flowjax_dataflow_policy_version{policy="odd \\"name\\"\\\\"} 5',
    ]


def test_causes_and_ages_are_labels_within_their_policy():
    status = {
        "failed": {"env_error": 2},
        "policies": {"solver": {"dropped": {"too_old": 3}, "ages": {"0": 5, "1": 1}}},
    }
    assert exposition(status, role="dataflow").splitlines() == [
        "# TYPE flowjax_dataflow_failed gauge",
        'flowjax_dataflow_failed{cause="env_error"} 2',
        "# TYPE flowjax_dataflow_policy_dropped gauge",
        'flowjax_dataflow_policy_dropped{policy="solver",cause="too_old"} 3',
        "# TYPE flowjax_dataflow_policy_ages gauge",
        'flowjax_dataflow_policy_ages{policy="solver",age="0"} 5',
        'flowjax_dataflow_policy_ages{policy="solver",age="1"} 1',
    ]


def test_what_policies_tell_is_told_once():
    status = {"version": 4, "waiting": 2, "policies": {"solver": {"version": 4}, "verifier": {"version": 1}}}
    assert [line for line in exposition(status, role="dataflow").splitlines() if not line.startswith("#")] == [
        "flowjax_dataflow_waiting 2",
        'flowjax_dataflow_policy_version{policy="solver"} 4',
        'flowjax_dataflow_policy_version{policy="verifier"} 1',
    ]


def test_engines_are_told_apart():
    engines = [{"url": "http://a:1", "up": True, "models": ["x"]}, {"url": "http://b:1", "up": False, "models": []}]
    assert exposition({"engine_up": True, "engines": engines}, role="rollout").splitlines()[2:] == [
        "# TYPE flowjax_rollout_engines_up gauge",
        'flowjax_rollout_engines_up{engine="http://a:1"} 1',
        'flowjax_rollout_engines_up{engine="http://b:1"} 0',
    ]


def test_names_that_become_one_are_one_series():
    text = exposition({"reward": {"format.ok": 1.0, "format_ok": 2.0}}, role="trainer")
    assert text == "# TYPE flowjax_trainer_reward_format_ok gauge\nflowjax_trainer_reward_format_ok 1.0\n"


def test_counts_are_those_of_the_moment():
    counts = {"step": 1}
    with MetricsEndpoint(lambda: counts, role="trainer") as endpoint:
        for step in (1, 2):
            counts["step"] = step
            with urllib.request.urlopen(endpoint.url, timeout=60) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain")
                assert f"flowjax_trainer_step {step}\n" in answer.read().decode()
        assert endpoint.url.startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(endpoint.url, timeout=60)


def test_there_is_nothing_else():
    with MetricsEndpoint(dict, role="trainer") as endpoint, pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(endpoint.url.replace("/metrics", "/token"), timeout=60)


def targets(run_dir):
    entries = json.loads((run_dir / TARGETS_FILE).read_text())
    return {entry["labels"]["role"]: entry["targets"] for entry in entries}


def test_every_role_that_listens_is_there_under_its_newest_port(tmp_path):
    write_targets(tmp_path)
    assert targets(tmp_path) == {}
    endpoints = {"engine": "http://127.0.0.1:8000", "dataflow": "http://127.0.0.1:8001"}
    (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))
    write_status(tmp_path, "dataflow", {})
    write_status(tmp_path, "trainer-solver", {"metrics_url": "http://127.0.0.1:9000/metrics"})
    write_targets(tmp_path)
    known = {"engine": ["127.0.0.1:8000"], "dataflow": ["127.0.0.1:8001"], "trainer-solver": ["127.0.0.1:9000"]}
    assert targets(tmp_path) == known
    write_status(tmp_path, "trainer-solver", {"metrics_url": "http://127.0.0.1:9001/metrics"})
    write_targets(tmp_path)
    assert targets(tmp_path) == {**known, "trainer-solver": ["127.0.0.1:9001"]}


def test_an_unchanged_list_is_not_written_again(tmp_path):
    write_targets(tmp_path)
    before = (tmp_path / TARGETS_FILE).stat().st_ino
    write_targets(tmp_path)
    assert (tmp_path / TARGETS_FILE).stat().st_ino == before
