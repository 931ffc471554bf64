"""Who trains a policy: epochs fence the trainers of before, and late copies of whatever they said."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from hostile_messages import changed, episode, on_the_wire

from flowjax.broker import Superseded, connect
from flowjax.dataflow import service
from flowjax.dataflow.service import DataflowService
from flowjax.trainer.sources import DataflowSource
from tests.dataflow.test_hostile import Dataflow, refused, run


async def play(dataflow: Dataflow, version: int) -> None:
    await dataflow.post("/versions", worker="w", policy="agent", serving=version)
    _, answer = await dataflow.post("/lease", worker="w", slots=100)
    path = ("trajectories", 0, "turns", 0, "version")
    items = [{"lease_id": x["lease_id"], "episode": changed(episode(x), path, version)} for x in answer["leases"]]
    assert (await dataflow.post("/episodes", worker="w", items=items))[0] == 200


async def train(dataflow: Dataflow, epoch: int, steps: range) -> list[Any]:
    """The rows of these steps, each committed."""
    rows = []
    for step in steps:
        await play(dataflow, step)
        status, answer = await dataflow.post("/batch", policy="agent", step=step, epoch=epoch)
        assert (status, answer["state"]) == (200, "run")
        rows.append(answer["rows"])
        assert (await dataflow.post("/committed", policy="agent", version=step + 1, epoch=epoch))[0] == 200
    return rows


def test_a_late_copy_of_a_batch_undoes_nothing(tmp_path):
    """It used to delete the batches after it: their groups were trained on twice."""

    async def scenario(dataflow: Dataflow) -> None:
        epoch = await dataflow.claim(0)
        rows = await train(dataflow, epoch, range(3))
        before = dataflow.everything()
        for step in (1, 2, 0):
            status, answer = await dataflow.post("/batch", policy="agent", step=step, epoch=epoch)
            assert (status, answer["rows"]) == (200, rows[step])
            assert dataflow.everything() == before
        newer = await dataflow.claim(3)
        for step in range(3):
            message = on_the_wire({"policy": "agent", "step": step, "epoch": epoch})
            assert f"epoch {epoch} is over, agent is in epoch {newer}" in await refused(
                dataflow, "/batch", message, status=409
            )
        await refused(
            dataflow, "/committed", on_the_wire({"policy": "agent", "version": 1, "epoch": epoch}), status=409
        )
        await refused(dataflow, "/batch", on_the_wire({"policy": "agent", "step": 3, "epoch": 99}), status=409)

    run(tmp_path, scenario)


def test_a_batch_that_is_long_in_the_making_is_made_once(tmp_path, monkeypatch):
    """A trainer hangs up after a minute: each time the credit was begun anew, beside the one before."""
    monkeypatch.setattr(service, "_CREDIT_HELD_S", 0.01)

    async def scenario(dataflow: Dataflow) -> None:
        epoch = await dataflow.claim(0)
        await play(dataflow, 0)
        credit, made, go_on = dataflow.flow.batches.credit, [], threading.Event()

        def slow_credit(*batch: Any) -> Any:
            made.append(batch)
            assert go_on.wait(60)
            return credit(*batch)

        setattr(dataflow.flow.batches, "credit", slow_credit)  # noqa: B010 - a method, which pyright lets nobody assign
        message = {"policy": "agent", "step": 0, "epoch": epoch}
        answers = DataflowService(dataflow.flow)
        hangs_up = asyncio.create_task(answers.answer("batch", message))
        while not made:
            await asyncio.sleep(0.001)
        hangs_up.cancel()
        assert await answers.answer("batch", message) == {"state": "wait"}
        go_on.set()
        while (answer := await answers.answer("batch", message))["state"] == "wait":
            pass
        assert answer["state"] == "run" and len(made) == 1
        while (await answers.answer("batch", message))["state"] == "wait":
            pass
        assert len(made) == 2, "nothing is kept of what was given"

    run(tmp_path, scenario)


def test_a_trainer_that_goes_back_gets_the_same_batch_and_then_the_same_groups(tmp_path):
    async def scenario(dataflow: Dataflow) -> None:
        rows = await train(dataflow, await dataflow.claim(0), range(3))
        epoch = await dataflow.claim(1)
        assert dataflow.flow.policies["agent"].committed == 1
        again = await train(dataflow, epoch, range(1, 3))
        assert again == rows[1:], "each with its own version's groups: those of version 2 were left for batch 2"

    run(tmp_path, scenario)


def test_no_batch_is_made_beyond_the_last_step(tmp_path):
    """A version more than the run has would never be the one that the last evaluation waits for."""

    async def scenario(dataflow: Dataflow) -> None:
        epoch = await dataflow.claim(0)
        await train(dataflow, epoch, range(2))
        told = await refused(dataflow, "/batch", on_the_wire({"policy": "agent", "step": 2, "epoch": epoch}))
        assert "field step is 2: agent makes its last version, 2, of batch 1 (config.trainer.steps)" in told
        assert (await dataflow.post("/batch", policy="agent", step=1, epoch=epoch))[1]["state"] == "run"

    run(tmp_path, scenario, steps=2)


def test_copies_of_a_claim_change_nothing(tmp_path):
    """A copy of the newest, of an older trainer's, and of one that was on its way while another claimed."""

    async def scenario(dataflow: Dataflow) -> None:
        first = {"trainer": "first", "policies": {"agent": 0}, "after": 0}
        assert (await dataflow.post("/claim", **first))[1] == {"claimed": True, "epoch": 1}
        await train(dataflow, 1, range(2))
        before = dataflow.everything()
        assert (await dataflow.post("/claim", **first))[1] == {"claimed": True, "epoch": 1}
        slow = {"trainer": "slow", "policies": {"agent": 0}, "after": 0}
        assert (await dataflow.post("/claim", **slow))[1] == {"claimed": False, "epoch": 1}
        assert dataflow.everything() == before
        second = {"trainer": "second", "policies": {"agent": 2}, "after": 1}
        assert (await dataflow.post("/claim", **second))[1] == {"claimed": True, "epoch": 2}
        before = dataflow.everything()
        for late in (first, slow, slow | {"after": 1}):
            assert (await dataflow.post("/claim", **late))[1] == {"claimed": False, "epoch": 2}
        assert dataflow.everything() == before

    run(tmp_path, scenario)


def test_the_second_of_two_trainers_fences_the_first(tmp_path):
    async def scenario(dataflow: Dataflow) -> None:
        await play(dataflow, 0)
        first, second = await _source(dataflow), await _source(dataflow)
        with pytest.raises(Superseded, match=r"HTTP 409.*started later has it\. A policy has one trainer"):
            await asyncio.to_thread(first.batch, {"agent": 0})
        with pytest.raises(Superseded):
            await asyncio.to_thread(first.committed, "agent", 0)
        assert (await asyncio.to_thread(second.batch, {"agent": 0})).policy == "agent"
        await asyncio.to_thread(first.claim, {"agent": 0})
        with pytest.raises(Superseded):
            await asyncio.to_thread(second.committed, "agent", 0)

    run(tmp_path, scenario)


async def _source(dataflow: Dataflow) -> DataflowSource:
    source = DataflowSource(partial(connect, str(dataflow.server.make_url("/"))), timeout_s=60.0)
    await asyncio.to_thread(source.claim, {"agent": 0})
    return source


def test_a_wait_for_a_batch_ends_when_another_trainer_claims(tmp_path):
    async def scenario(dataflow: Dataflow) -> None:
        epoch = await dataflow.claim(0)
        waiting = asyncio.create_task(dataflow.post("/batch", policy="agent", step=0, epoch=epoch))
        await asyncio.sleep(0)
        await dataflow.claim(0)
        status, answer = await waiting
        assert status == 409, answer

    run(tmp_path, scenario)


def test_what_was_played_with_a_version_that_a_trainer_has_lost_is_no_fault_of_its_worker(tmp_path):
    """It was refused with 400, which ended the rollout service together with all that it was playing."""

    async def scenario(dataflow: Dataflow) -> None:
        await train(dataflow, await dataflow.claim(0), range(2))
        await dataflow.post("/versions", worker="w", policy="agent", serving=2)
        _, answer = await dataflow.post("/lease", worker="w", slots=1)
        path = ("trajectories", 0, "turns", 0, "version")
        items = [{"lease_id": x["lease_id"], "episode": changed(episode(x), path, 2)} for x in answer["leases"]]
        await dataflow.claim(0)  # its checkpoints 1 and 2 were damaged
        assert (await dataflow.post("/versions", worker="w", policy="agent", serving=2))[0] == 200
        assert await dataflow.post("/episodes", worker="w", items=items) == (200, {"accepted": 1, "duplicate": 0})
        status, _ = await dataflow.post("/versions", worker="w", policy="agent", serving=3)
        assert status == 400, "nobody has made that one"

    run(tmp_path, scenario)


def test_a_restarted_dataflow_knows_how_far_a_trainer_was_that_has_gone_back(tmp_path):
    """A worker that was cut off meanwhile says what it serves yet: that was refused, which ended its service."""

    async def goes_back(dataflow: Dataflow) -> None:
        await train(dataflow, await dataflow.claim(0), range(2))
        await dataflow.claim(0)

    async def restarted(dataflow: Dataflow) -> None:
        assert (await dataflow.post("/versions", worker="w", policy="agent", serving=2))[0] == 200
        assert dataflow.flow.policies["agent"].serving == 1, "the one in the making: nobody has the new version 2"
        assert (await dataflow.post("/versions", worker="w", policy="agent", serving=3))[0] == 400

    run(tmp_path, goes_back)
    run(tmp_path, restarted)
