"""Admission, staleness, evaluation and batches, over HTTP as the other roles see them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grain
import numpy as np
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowjax.config import default_config
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.server import Server
from flowjax.dataflow.service import DataflowService
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.transcripts import batch_path, read_lines
from flowjax.records import Episode, Task, Trajectory, Turn, pack, unpack
from flowjax.run import resolve
from tests.dataflow import flows


def configuration(**dataflow):
    config = default_config()
    config.rollout.group_size = 2
    config.trainer.update({"steps": 4, "groups_per_step": 3})
    config.eval.tasks = 5
    config.reward.components = {"success": 1.0}
    config.credit.name = "grpo"
    config.dataflow.update(dataflow)
    return config


def make_flow(folder: Path, config=None, clock: Callable[[], float] = time.monotonic) -> Flow:
    config = config or configuration()
    tasks = grain.MapDataset.range(100).map(lambda index: Task(f"task-{index}", "toy", index))
    held_out = grain.MapDataset.range(100).map(lambda index: Task(f"held-{index}", "toy", index))
    return Flow(resolve(config, folder), train_tasks=tasks, held_out_tasks=held_out, clock=clock)


def played(lease, *, version: int, success: float = 1.0, turns: int = 2) -> Episode:
    ids, logprobs = np.array([lease.seed % 50, 3, 4], np.int32), np.array([-0.5], np.float32)
    made = [
        Turn(
            "agent",
            version,
            ids[:2],
            ids[2:],
            logprobs,
            "stop",
            turn,
            turn + 1,
            0.0,
            True,
            turn == turns,
        )
        for turn in range(1, turns + 1)
    ]
    outcome = {"success": success, "turns": float(turns)}
    names = lease.episode_id, lease.group_id, lease.task.task_id, lease.seed
    return Episode(*names, [Trajectory(*names, made, outcome)], outcome)


def play(flow: Flow, leases, *, version: int, success=lambda lease: 1.0) -> None:
    for lease in leases:
        assert flows.accept(flow, lease.lease_id, played(lease, version=version, success=success(lease)))


def batch(flow: Flow, step: int):
    served = flows.credited(flow, "agent", step)
    assert served is not None
    return served


def train_leases(flow: Flow, most: int = 1000):
    return flows.lease(flow, "w", most, "train")


def test_nothing_is_leased_before_a_version_is_served(tmp_path):
    flow = make_flow(tmp_path)
    assert flows.lease(flow, "w", 10) == []
    flow.report_serving("agent", 0)
    assert flows.lease(flow, "w", 10)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_admission_is_bounded_by_staleness_and_length(tmp_path, max_staleness):
    flow = make_flow(tmp_path, configuration(max_staleness=max_staleness))
    for version in range(6):
        flow.report_serving("agent", version)
        play(flow, train_leases(flow), version=version)
        admitted = flow.status()["ready_groups"]
        assert admitted == min(version + max_staleness + 1, 4) * 3


def test_synchronous_training_serves_exactly_the_groups_of_its_version(tmp_path):
    flow = make_flow(tmp_path, configuration(max_staleness=0))
    for step in range(4):
        flow.report_serving("agent", step)
        assert flows.credited(flow, "agent", step) is None
        play(flow, train_leases(flow), version=step)
        served, dropped = batch(flow, step)
        assert dropped == 0
        assert {version for row in served.rows for version in row.versions[row.sampled].tolist()} == {step}
        assert served.totals["episodes"] == 3 * 2
    flow.report_serving("agent", 4)
    assert train_leases(flow) == []


def test_stale_groups_are_dropped_counted_and_replaced(tmp_path):
    flow = make_flow(tmp_path, configuration(max_staleness=1))
    flow.report_serving("agent", 0)
    leases = train_leases(flow)
    play(flow, leases[:6], version=0)
    assert flows.credited(flow, "agent", 0) is not None
    flow.report_serving("agent", 1)
    play(flow, train_leases(flow), version=1)
    assert flows.credited(flow, "agent", 1) is not None
    play(flow, leases[6:], version=0)  # the trainer has gone on; these are late
    flow.report_serving("agent", 2)
    play(flow, train_leases(flow), version=2)
    served, dropped = batch(flow, 2)
    assert dropped == 3
    assert min(row.versions[row.sampled].min() for row in served.rows) >= 1
    # The dropped groups' places were filled: the last batch is there already.
    assert train_leases(flow) == []
    flow.report_serving("agent", 3)
    assert flows.credited(flow, "agent", 3) is not None


def test_a_reply_is_as_old_as_its_oldest_token(tmp_path):
    flow = make_flow(tmp_path, configuration(max_staleness=1))
    tokens = {"sampled_ids": np.array([3, 4], np.int32), "logprobs": np.zeros(2, np.float32)}

    def play_exchanged(version: int, *spans: tuple[int, int]) -> None:
        """Episodes whose last turn has two tokens of these versions."""
        for lease in train_leases(flow):
            episode = played(lease, version=version)
            (part,) = episode.trajectories
            turns = [part.turns[0], replace(part.turns[1], **tokens, spans=spans)]
            assert flows.accept(flow, lease.lease_id, replace(episode, trajectories=[replace(part, turns=turns)]))

    def ages(step: int) -> Counter[int]:
        served, _ = batch(flow, step)
        found = Counter(step - version for row in served.rows for version in row.versions[row.sampled].tolist())
        assert flow.batches.trained_ages["agent"] == {str(age): count for age, count in sorted(found.items())}
        return found

    flow.report_serving("agent", 0)
    play_exchanged(0)
    assert ages(0) == {0: 3 * 2 * 3}
    flow.report_serving("agent", 1)
    assert ages(1) == {1: 3 * 2 * 3}
    play_exchanged(1, (1, 1), (2, 1))
    flow.report_serving("agent", 2)
    assert ages(2) == {1: 3 * 2 * 2, 0: 3 * 2}
    play_exchanged(1, (2, 1), (1, 1))  # of an engine that went back to an older version for an evaluation
    assert flows.credited(flow, "agent", 3) is None, "their newest token is young enough, their oldest is not"
    assert flow.ledger.count_causes("dropped", "agent") == {"too_old": 3}


def test_a_batch_is_served_again_unchanged_after_a_restart(tmp_path):
    flow = make_flow(tmp_path)
    flow.report_serving("agent", 0)
    play(flow, train_leases(flow), version=0, success=lambda lease: float(lease.seed % 2))
    before, _ = batch(flow, 0)
    flow.close()
    again, _ = batch(make_flow(tmp_path), 0)
    for row, same in zip(before.rows, again.rows, strict=True):
        np.testing.assert_array_equal(row.tokens, same.tokens)
        np.testing.assert_array_equal(row.advantages, same.advantages)
    assert max(abs(row.advantages).max() for row in before.rows) > 0.1


def test_statistics_of_the_batch_span_its_groups(tmp_path):
    """Whitened advantages have mean 0 over the batch, not over each group."""
    config = configuration()
    config.credit.name = "reinforce_plus_plus"
    flow = make_flow(tmp_path, config)
    flow.report_serving("agent", 0)
    leases = train_leases(flow)
    winner = leases[0].group_id
    play(flow, leases, version=0, success=lambda lease: float(lease.group_id == winner))
    served, _ = batch(flow, 0)
    advantages = [float(row.advantages[row.sampled].mean()) for row in served.rows]
    assert abs(sum(advantages)) < 1e-4
    assert max(advantages) > 0.5


def test_evaluation_before_and_after_is_written_once_and_pins_its_version(tmp_path):
    flow = make_flow(tmp_path)
    assert flow.report_serving("agent", 0) == 0
    leases = flows.lease(flow, "w", 1000, "eval")
    assert [(lease.versions, lease.task.task_id) for lease in leases] == [
        ({"agent": 0}, f"held-{index}") for index in range(5)
    ]
    assert flow.report_serving("agent", 3) == 0  # version 0 stays loaded while its evaluation is under way
    play(flow, leases, version=0, success=lambda lease: float(lease.task.seed < 2))
    assert flow.report_serving("agent", 3) == 2
    assert not flow.finished
    flow.batches.commit("agent", 4)
    assert flow.report_serving("agent", 4) == 3
    play(flow, flows.lease(flow, "w", 1000, "eval"), version=4)
    assert flow.finished
    lines = [entry for entry in read_metrics(tmp_path) if entry["kind"] == "eval"]
    assert (lines[0]["version"], lines[0]["success_rate"], lines[0]["episodes"]) == (0, 0.4, 5)
    assert lines[0]["low"] < 0.4 < lines[0]["high"]


def test_finished_means_trained_and_evaluated(tmp_path):
    flow = make_flow(tmp_path)
    flow.report_serving("agent", 4)
    play(flow, flows.lease(flow, "w", 1000, "eval"), version=4)
    assert not flow.finished
    flow.batches.commit("agent", 4)
    assert flow.finished


def test_what_is_finished_is_finished_after_a_restart(tmp_path):
    flow = make_flow(tmp_path)
    flow.report_serving("agent", 4)
    play(flow, flows.lease(flow, "w", 1000, "eval"), version=4)
    flow.batches.commit("agent", 4)
    assert flow.finished
    flow.close()
    again = make_flow(tmp_path)
    assert again.finished and again.policies["agent"].committed == 4


def test_a_group_that_failed_altogether_is_dropped_and_replaced(tmp_path):
    flow = make_flow(tmp_path, configuration(max_attempts=1))
    flow.report_serving("agent", 0)
    leases = train_leases(flow)
    broken = [lease for lease in leases if lease.group_id == leases[0].group_id]
    flows.give_back(flow, [lease.lease_id for lease in broken], "world is gone")
    assert flow.status()["dropped_groups"] == 1
    (replacement,) = {lease.group_id for lease in train_leases(flow)}
    assert replacement not in {lease.group_id for lease in leases}


def test_trajectories_of_a_batch_are_written_down(tmp_path):
    flow = make_flow(tmp_path)
    flow.report_serving("agent", 0)
    play(flow, train_leases(flow), version=0)
    flows.credited(flow, "agent", 0)
    lines = list(read_lines(batch_path(tmp_path, "agent", 0)))
    assert len(lines) == 6
    assert lines[0]["turns"][0]["sampled_ids"] == [4]


def test_order_of_tasks_is_fixed(tmp_path):
    names = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        flow = make_flow(tmp_path / folder)
        flow.report_serving("agent", 0)
        names.append([(lease.task.task_id, lease.seed) for lease in train_leases(flow)])
    assert names[0] == names[1]


def test_a_dataflow_that_was_restarted_asks_for_no_version_that_nobody_needs(tmp_path):
    flow = make_flow(tmp_path)
    assert flow.oldest_needed("agent") == 0
    flow.ledger.commit("agent", 7)
    flow.close()
    flow = make_flow(tmp_path)
    staleness = flow.run.config.dataflow.max_staleness
    assert flow.oldest_needed("agent") == 7 - staleness, "before any engine is heard of"
    assert flow.report_serving("agent", 6) == 6 - staleness


class Served:
    """A server over a real flow, and a client's view of it."""

    def __init__(self, folder: Path, **options):
        self.flow = make_flow(folder)
        self.server = TestServer(Server(self.flow, **options).application())

    async def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict]:
        url = self.server.make_url(path)
        async with ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
            return answer.status, unpack(await answer.read())

    def run(self, scenario) -> None:
        async def main() -> None:
            async with self.server:
                await scenario(self.post)

        asyncio.run(main())


def test_a_batch_travels_over_http(tmp_path):
    served = Served(tmp_path)

    async def scenario(post) -> None:
        status, answer = await post("/versions", pack({"worker": "w", "policy": "agent", "serving": 0}))
        assert (status, answer) == (200, {"oldest_needed": 0})
        _, answer = await post("/lease", pack({"worker": "w", "slots": 100, "can": {"kinds": ["train"]}}))
        items = []
        for lease in answer["leases"]:
            assert lease.temperature == 1.0
            items.append({"lease_id": lease.lease_id, "episode": played(lease, version=0)})
        assert (await post("/episodes", pack({"worker": "w", "items": items})))[1]["accepted"] == len(items)
        assert (await post("/episodes", pack({"worker": "w", "items": items})))[1]["duplicate"] == len(items)
        _, answer = await post("/claim", pack({"trainer": "t", "policies": {"agent": 0}, "after": 0}))
        assert answer == {"claimed": True, "epoch": 1}
        status, answer = await post("/batch", pack({"policy": "agent", "step": 0, "epoch": 1}))
        assert status == 200
        assert answer["totals"]["episodes"] == 6
        assert len(answer["rows"]) == 12

    served.run(scenario)


def test_a_trainer_that_waits_has_its_batch_as_soon_as_it_is_full(tmp_path):
    async def scenario() -> None:
        service = DataflowService(make_flow(tmp_path))
        await service.answer("versions", {"worker": "w", "policy": "agent", "serving": 0})
        leases = (await service.answer("lease", {"worker": "w", "slots": 100, "can": {"kinds": ["train"]}}))["leases"]
        await service.answer("claim", {"trainer": "t", "policies": {"agent": 0}, "after": 0})
        asked = service.answer("batch", {"policy": "agent", "step": 0, "epoch": 1}, hold_s=600.0)
        waiting = asyncio.create_task(asked)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        items = [{"lease_id": lease.lease_id, "episode": played(lease, version=0)} for lease in leases]
        await service.answer("episodes", {"worker": "w", "items": items})
        assert (await asyncio.wait_for(waiting, 120))["totals"]["episodes"] == 6

    asyncio.run(scenario())


REFUSED = [
    ("/lease", {"slots": 1}, "worker is missing"),
    ("/lease", {"worker": "w", "slots": "many"}, "slots is str"),
    ("/lease", {"worker": "w", "slots": 1, "can": {"kinds": ["nap"]}}, "can.kinds names others than"),
    ("/episodes", {"items": [{"lease_id": "x", "episode": {"turns": []}}]}, "episode is dict"),
    ("/episodes", {"items": ["x"]}, "items[0]: the body is a str"),
    ("/lease", {"worker": "w", "slots": 1, "hold_s": "1"}, "field hold_s is '1': send 0 to"),
    ("/episodes", {"items": []}, "worker is missing"),
    ("/episodes", {"worker": "a\n", "items": []}, "field worker has 2 characters: send 1 to"),
    ("/batch", {"policy": "agent", "step": True}, "step is bool"),
    ("/batch", {"policy": "agent", "step": 0}, "epoch is missing: a trainer claims"),
    ("/claim", {"trainer": "t", "policies": {"agent": 9}, "after": 0}, "version is 9"),
    ("/batch", {"policy": "other", "step": 0, "epoch": 1}, "policy is 'other': this run has agent"),
    ("/committed", [], "body is a list"),
]


@pytest.mark.parametrize(("path", "message", "reason"), REFUSED)
def test_bad_messages_are_refused_with_a_reason(tmp_path, path, message, reason):
    served = Served(tmp_path)

    async def scenario(post) -> None:
        status, answer = await post(path, pack(message))
        assert status == 400
        assert reason in answer["error"]

    served.run(scenario)
    assert make_flow(tmp_path).status()["committed"] == -1


def test_without_the_token_nothing_is_told_or_changed(tmp_path):
    served = Served(tmp_path, token="secret")
    message = pack({"worker": "w", "policy": "agent", "serving": 0})

    async def scenario(post) -> None:
        for headers in (None, {"Authorization": "Bearer guess"}, {"Authorization": "secret"}):
            status, answer = await post("/versions", message, headers)
            assert (status, served.flow.policies["agent"].serving) == (401, -1)
            assert "bearer token" in answer["error"]
        async with ClientSession() as session, session.get(served.server.make_url("/status")) as answer:
            assert answer.status == 401
        status, _ = await post("/versions", message, {"Authorization": "Bearer secret"})
        assert (status, served.flow.policies["agent"].serving) == (200, 0)

    served.run(scenario)


def test_a_body_over_the_limit_is_refused_unread(tmp_path):
    served = Served(tmp_path, max_message_bytes=1000)

    async def scenario(post) -> None:
        status, answer = await post("/lease", pack({"worker": "w" * 2000, "slots": 1}))
        assert status == 413 and "max_message_bytes" in answer["error"]

    served.run(scenario)


def test_prometheus_reads_the_counts(tmp_path):
    served = Served(tmp_path)

    async def scenario(post) -> None:
        async with ClientSession() as session, session.get(served.server.make_url("/metrics")) as answer:
            assert 'flowjax_dataflow_policy_version{policy="agent"} -1' in await answer.text()

    served.run(scenario)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=60), min_size=5, max_size=5))
def test_noise_is_refused_and_changes_nothing(tmp_path_factory, bodies):
    served = Served(tmp_path_factory.mktemp("flow"))
    before = served.flow.status()

    async def scenario(post) -> None:
        for path, body in zip(("/lease", "/episodes", "/renew", "/batch", "/versions"), bodies, strict=True):
            status, answer = await post(path, body)
            assert status == 400
            assert answer["error"]
        assert served.flow.status() == before

    served.run(scenario)
