"""The trainer tells Prometheus and the status file what it does."""

import urllib.request

import pytest

from flowjax.monitor.metrics import read_status
from flowjax.trainer.log import TrainerStatus, _update_metrics, memory_metrics


def test_each_policys_newest_step_is_told(tmp_path):
    status = TrainerStatus(tmp_path, "trainer", {"solver": 3, "verifier": 0})
    with status.endpoint:
        status.update({"policy": "solver", "step": 4, "loss": 0.5, "staleness_max": 1})
        told = read_status(tmp_path, "trainer")
        assert told["policies"] == {"solver": {"step": 4}, "verifier": {"step": 0}}
        with urllib.request.urlopen(told["metrics_url"], timeout=5) as answer:
            text = answer.read().decode()
    assert 'flowjax_trainer_policy_step{policy="solver"} 4\n' in text
    assert 'flowjax_trainer_policy_step{policy="verifier"} 0\n' in text
    assert 'flowjax_trainer_policy_loss{policy="solver"} 0.5\n' in text


def test_updates_weigh_by_their_tokens_and_one_that_was_skipped_not_at_all():
    """A step's loss was not a number where one of its updates was not."""
    of = [{"trained_tokens": 10.0, "loss": 1.0}, {"trained_tokens": 990.0, "loss": 3.0}]
    skipped = {"trained_tokens": 5.0, "loss": float("nan"), "skipped": 1.0}
    found = _update_metrics([*({**update, "skipped": 0.0} for update in of), skipped])
    assert found == {"trained_tokens": 1005.0, "loss": pytest.approx(2.98)}


def test_memory_of_this_process():
    assert memory_metrics()["host_peak_bytes"] > 1e8
