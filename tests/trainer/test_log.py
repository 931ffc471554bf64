"""The trainer tells Prometheus and the status file what it does."""

import urllib.request
from typing import Any

import numpy as np
import pytest

from flowjax.monitor.metrics import read_status
from flowjax.records import TokenRow
from flowjax.trainer.batch import pack
from flowjax.trainer.log import (
    Comparison,
    TrainerStatus,
    _add_mismatches,
    _mismatch_metrics,
    _update_metrics,
    episode_metrics,
    memory_metrics,
    row_metrics,
)
from flowjax.trainer.sources import ServedBatch


def test_each_policys_newest_step_is_told(tmp_path):
    status = TrainerStatus(tmp_path, "trainer", {"solver": 3, "verifier": 0})
    with status.endpoint:
        status.update({"policy": "solver", "step": 4, "loss": 0.5, "staleness_max": 1})
        told = read_status(tmp_path, "trainer")
        assert told["policies"] == {"solver": {"step": 4}, "verifier": {"step": 0}}
        with urllib.request.urlopen(told["metrics_url"], timeout=60) as answer:
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


def test_mismatches_are_of_all_versions_and_trajectories_that_were_compared():
    """By tokens, not by versions; a sequence that is no number is left out, and rounding below 0 is none."""
    versions = [{"k3": 0.5, "max": 0.25, "tokens": 5.0}, {"k3": 1.0, "max": 2.0, "tokens": 1.0}]
    versions += [{"k3": 0.0, "max": 0.125, "tokens": 4.0}]
    assert _mismatch_metrics(versions) == {"mismatch_kl": pytest.approx(0.15), "mismatch_max": 2.0}
    assert _mismatch_metrics([]) == _mismatch_metrics([{"k3": 0.0, "max": 0.0, "tokens": 0.0}]) == {}
    found = {"a": (1.0, 2)}
    sequences = (np.array([0.5, -1e-9, np.nan, 0.25, 9.0]), np.array([3.0, 4.0, 2.0, 1.0, 0.0]))  # the last is none
    of_sequences: Any = sequences
    _add_mismatches(found, ["a", "b", "c", "a"], [Comparison({}, of_sequences)])
    assert found == {"a": (1.75, 6), "b": (0.0, 4)}


def test_the_learning_curve_is_of_means_over_trajectories_turns_and_groups():
    totals = {"groups": 4, "groups_without_signal": 1, "episodes": 8, "turns": 20, "invalid_turns": 5, "cut_turns": 2}
    totals |= {"sampled_tokens": 120, "reward": 2.0, "success": 6.0, "reward/format": 4.0}
    expected = {"episodes": 8, "turns": 20, "dropped_groups": 3, "reward_mean": 0.25, "success_rate": 0.75}
    expected |= {"invalid_share": 0.25, "cut_share": 0.1, "reply_tokens_mean": 6.0, "turns_mean": 2.5}
    expected |= {"no_signal_share": 0.25, "reward/format": 0.5}
    assert episode_metrics(ServedBatch("agent", [], totals, dropped=3)) == expected
    assert episode_metrics(ServedBatch("agent", [])) == {}


def test_lag_and_padding_are_of_the_rows():
    def row(versions: list[int]) -> TokenRow:
        found = np.array(versions, np.int32)
        nothing = np.zeros(len(found), np.float32)
        return TokenRow("agent", np.arange(len(found)), found >= 0, nothing, nothing, found)

    rows = [row([-1, 5, 5, 7]), row([-1, -1, 7])]
    packed = [pack(rows, row_tokens=16, micro_batch_rows=2)]
    found = row_metrics(rows, packed, version=8)
    assert found["row_tokens"] == 7 and found["padding_share"] == pytest.approx(1 - 7 / 32)
    assert found["staleness_mean"] == pytest.approx((3 + 3 + 1 + 1) / 4) and found["staleness_max"] == 3
    assert found["swapped_share"] == pytest.approx(1 / 4), "the last token of the first reply"


def test_memory_of_this_process():
    assert memory_metrics()["host_peak_bytes"] > 1e8
