"""Hostile episodes cannot stop a run; `python -m tests.dataflow.hostile_run` sends 10,000."""

import asyncio

from tests.dataflow.hostile_run import run


def test_hostile_episodes_do_not_stop_a_run(tmp_path):
    report = asyncio.run(run(tmp_path, 300, slow_senders=4))
    refused = sum(count for answer, count in report.answers.items() if answer.startswith("hostile 4"))
    assert refused > 150, "most of them cannot be"
    assert report.steps >= 5 and report.rows > 0
