"""Groups that cannot be trained on: refused by the trainer, put aside with their sender's name, and replaced."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowjax.broker import connect
from flowjax.config import ConfigError
from flowjax.dataflow import batches as batches_room
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.ledger import StepError
from flowjax.dataflow.service import DataflowService
from flowjax.records import Episode, Lease, TokenRow, pack, unpack
from flowjax.trainer.batch import BatchError, unusable_rows
from flowjax.trainer.batch import pack as pack_rows
from flowjax.trainer.sources import DataflowSource
from tests.dataflow import flows
from tests.dataflow.test_flow import configuration, make_flow, played
from tests.dataflow.test_server_clients import serving

ROW_TOKENS, VOCABULARY = 32, 64
ROLES = {"row_tokens": ROW_TOKENS, "vocabulary": VOCABULARY}


def changed(episode: Episode, **changes: Any) -> Episode:
    """With another first turn."""
    (part,) = episode.trajectories
    first, *rest = part.turns
    return replace(episode, trajectories=[replace(part, turns=[replace(first, **changes), *rest])])


BAD = {
    "a long prompt": {"prompt_ids": np.zeros(5000, np.int32)},
    "no prompt": {"prompt_ids": np.zeros(0, np.int32)},
    "a token beyond the vocabulary": {"sampled_ids": np.array([VOCABULARY], np.int32)},
    "a log-probability that is no number": {"logprobs": np.array([np.nan], np.float32)},
    "log-probabilities of other tokens": {"logprobs": np.zeros(7, np.float32)},
}


def unusable(policy: str, rows: Sequence[TokenRow]) -> Mapping[str, str]:
    del policy
    return unusable_rows(rows, **ROLES)


def accept(flow: Flow, leases: Sequence[Lease], bad: Mapping[str, Any], which: int) -> None:
    """Everything as leased, but one episode, straight into the ledger: as one that an older door let in."""
    for index, lease in enumerate(leases):
        episode = played(lease, version=0)
        made = changed(episode, **bad) if index == which else episode
        assert flows.accept_all(flow, [(lease.lease_id, made)], worker="honest" if index != which else "stranger")[0]


async def trained(url: str, steps: Sequence[int]) -> list[list[TokenRow]]:
    """The rows of each step as a trainer gets them that was just started."""

    def run() -> list[list[TokenRow]]:
        source = DataflowSource(partial(connect, url), timeout_s=60.0, unusable=unusable)
        source.claim({"agent": steps[0]})
        found = []
        for step in steps:
            found.append(list(source.batch({"agent": step}).rows))
            pack_rows(found[-1], row_tokens=ROW_TOKENS, micro_batch_rows=2)
            source.committed("agent", step + 1)
        return found

    return await asyncio.to_thread(run)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("resumed", [False, True], ids=["at once", "resumed"])
def test_a_batch_that_cannot_be_trained_on_is_made_anew_without_its_group(tmp_path, bad, resumed):
    """The trainer died of it, and of the same batch again on every resume."""

    async def scenario() -> None:
        flow = make_flow(tmp_path, configuration(max_staleness=1))
        flow.report_serving("agent", 0)
        leases = flows.lease(flow, "w", 100, "train")
        assert len(leases) == 12
        accept(flow, leases, BAD[bad], which=2)
        if resumed:  # the batch is written down, and trainer and dataflow have died since
            assert flows.take(flow, "agent", 0) is not None
            flow.close()
            flow = make_flow(tmp_path, configuration(max_staleness=1))
            flow.report_serving("agent", 0)
        bad_group = leases[2].group_id
        async with serving(flow, tmp_path) as url:
            (first,) = await trained(url, [0])
            assert len(first) == 12 and not unusable("", first)
            assert not any(row.trajectory_id.startswith(bad_group) for row in first)
            status = flow.status()
            assert status["quarantined_groups"] == 1
            (aside,) = status["put_aside"]
            assert (aside["group_id"], aside["worker"], aside["step"]) == (bad_group, "stranger", 0)
            assert aside["trajectory_id"] == leases[2].episode_id and aside["reason"]
            assert flows.lease(flow, "w", 100, "train"), "another task is played in its place"
            assert [e.episode_id for e in flow.ledger.episodes(bad_group)], "it is kept"

    asyncio.run(scenario())


def test_a_refusal_that_comes_twice_or_late_moves_nothing(tmp_path):
    flow = make_flow(tmp_path, configuration(max_staleness=1))
    flow.report_serving("agent", 0)
    accept(flow, leases := flows.lease(flow, "w", 100, "train"), BAD["a long prompt"], which=0)
    flows.take(flow, "agent", 0)
    reasons = {leases[0].episode_id: "too long"}
    assert flow.batches.quarantine("agent", 0, {"no such trajectory": "why"}) == []
    assert flow.batches.quarantine("agent", 0, reasons) == [leases[0].group_id]
    taken = flows.take(flow, "agent", 0)
    assert taken is not None and flow.batches.quarantine("agent", 0, reasons) == []
    assert flows.take(flow, "agent", 0) == taken or [g.group_id for g in taken.groups] == flow.ledger.batch("agent", 0)
    assert flow.status()["quarantined_groups"] == 1


@pytest.mark.parametrize("algorithms", [{}, {"greso": {}}], ids=["no algorithm", "greso"])
def test_a_group_that_no_credit_can_be_given_for_is_put_aside(tmp_path, algorithms):
    """The batch failed with a stack trace each time that it was asked for; with an algorithm the episodes did, too."""

    async def scenario() -> None:
        flow = make_flow(tmp_path, configuration(max_staleness=1, algorithms=algorithms))
        flow.report_serving("agent", 0)
        leases = flows.lease(flow, "w", 100, "train")
        for index, lease in enumerate(leases):
            episode = played(lease, version=0)
            (part,) = episode.trajectories
            unrewarded = replace(episode, trajectories=[replace(part, outcome={})])  # by another reward
            assert flows.accept(flow, lease.lease_id, unrewarded if index == 3 else episode)
        async with serving(flow, tmp_path) as url:
            (first,) = await trained(url, [0])
            assert len(first) == 12
            (aside,) = flow.status()["put_aside"]
            assert aside["group_id"] == leases[3].group_id and "no credit" in aside["reason"]
        if algorithms:
            seen = flow.algorithms.by_name["greso"].state()["_verdicts"]
            assert leases[0].task.task_id in seen and leases[3].task.task_id not in seen

    asyncio.run(scenario())


def two_batches(folder: Path) -> tuple[Flow, list[list[str]]]:
    """A flow that has served two batches, and their groups."""
    flow, groups = make_flow(folder, configuration(max_staleness=1)), []
    flow.batches.claim("trainer", {"agent": 0}, 0)
    for step in (0, 1):
        flow.report_serving("agent", step)
        for lease in flows.lease(flow, "w", 100, "train"):
            assert flows.accept(flow, lease.lease_id, played(lease, version=step))
        taken = flows.take(flow, "agent", step)
        assert taken is not None
        groups.append([group.group_id for group in taken.groups])
        flow.batches.commit("agent", step + 1)
    return flow, groups


def test_only_the_newest_batch_can_be_refused(tmp_path):
    """A late copy of /batch whose credit failed put the groups of later batches back: they were trained on twice."""
    flow, groups = two_batches(tmp_path)
    ready = flow.ledger.groups("agent", "ready")
    with pytest.raises(StepError, match=r"batch 0 of agent cannot be refused any more: the newest is 1"):
        flow.batches.quarantine("agent", 0, {f"{groups[0][0]}/000": "why"})
    assert [flow.ledger.batch("agent", step) for step in (0, 1)] == groups
    assert flow.ledger.groups("agent", "ready") == ready and flow.ledger.batches_made("agent") == 2
    assert flow.batches.quarantine("agent", 0, {"none of its trajectories": "why"}) == []


def with_a_batch(folder: Path) -> tuple[Flow, int]:
    """A flow that has the groups of a batch, and its trainer's epoch."""
    flow = make_flow(folder, configuration(max_staleness=1))
    flow.report_serving("agent", 0)
    for lease in flows.lease(flow, "w", 100, "train"):
        assert flows.accept(flow, lease.lease_id, played(lease, version=0))
    return flow, flow.batches.claim("trainer", {"agent": 0}, 0)[1]


@pytest.mark.parametrize("lacking", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: out of memory"), OSError(24, "")])
def test_a_machine_that_is_short_of_memory_puts_no_group_aside(tmp_path, monkeypatch, lacking):
    """It put the whole batch aside: every group of it failed alone, too."""

    def credit_batch(*_: Any, **__: Any) -> None:
        raise lacking

    async def scenario() -> None:
        flow, epoch = with_a_batch(tmp_path)
        service = DataflowService(flow)
        with monkeypatch.context() as short:
            short.setattr(batches_room, "credit_batch", credit_batch)
            with pytest.raises(type(lacking)):
                await service.answer("batch", {"policy": "agent", "step": 0, "epoch": epoch})
        assert flow.status()["put_aside"] == []
        assert (await service.answer("batch", {"policy": "agent", "step": 0, "epoch": epoch}))["state"] == "run"

    asyncio.run(scenario())


def test_credit_that_fails_for_the_batch_alone_ends_the_dataflow_in_words(tmp_path, monkeypatch):
    """Each /batch was answered with 500: the trainer ended, was started again, and asked for the same batch."""
    credit_batch = batches_room.credit_batch

    def fails_on_several(groups: Sequence[Any], **options: Any) -> Any:
        if len(groups) > 1:
            raise ValueError("one group, please")
        return credit_batch(groups, **options)

    async def scenario() -> None:
        flow, epoch = with_a_batch(tmp_path)
        service = DataflowService(flow)
        monkeypatch.setattr(batches_room, "credit_batch", fails_on_several)
        with pytest.raises(ValueError):
            await service.answer("batch", {"policy": "agent", "step": 0, "epoch": epoch})
        assert isinstance(service.failure, ConfigError)
        assert "no group alone (ValueError: one group, please): mend it" in str(service.failure)
        assert flow.status()["put_aside"] == []

    asyncio.run(scenario())


def test_a_dataflow_that_serves_a_refused_batch_again_ends_the_trainer_in_words():
    class Stubborn:
        async def call(self, name: str, message: Mapping[str, Any], *, away_s: float) -> dict[str, Any]:
            del message, away_s
            rows = [row([0, 1], sampled=[0])]
            return (
                {"state": "run", "policy": "agent", "rows": rows, "totals": {}, "dropped": 0} if name == "batch" else {}
            )

    @contextlib.asynccontextmanager
    async def stubborn():
        yield Stubborn()

    source = DataflowSource(stubborn, timeout_s=20.0, unusable=unusable)
    with pytest.raises(BatchError, match=r"batch 3 of agent came again.*first token"):
        source.batch({"agent": 3})


def row(tokens: Sequence[int], *, sampled: Sequence[int], **changes: Any) -> TokenRow:
    count = len(tokens)
    mask = np.isin(np.arange(count), sampled)
    nothing = np.zeros(count, np.float32)
    made = TokenRow("agent", np.array(tokens, np.int32), mask, nothing, nothing, np.zeros(count, np.int32), 0, "e/1")
    return replace(made, **changes)


ROWS = [
    (row([1, 2], sampled=[0, 1]), "first token is a sampled one"),
    (row(range(ROW_TOKENS + 1), sampled=[1]), "config.trainer.row_tokens is 32"),
    (row([1, VOCABULARY], sampled=[1]), "the model has 64"),
    (row([-1, 2], sampled=[1]), "tokens from -1"),
    (row([1, 2], sampled=[1], advantages=np.array([0, np.inf], np.float32)), "advantages that are not finite"),
    (row([1, 2], sampled=[1], logprobs=np.array([0, np.nan], np.float32)), "logprobs that are not finite"),
    (row([1, 2], sampled=[1], logprobs=np.zeros(3, np.float32)), "logprobs have the shape"),
    (row([1, 2], sampled=[1]), ""),
    (row([], sampled=[]), ""),
]


@pytest.mark.parametrize(("bad", "reason"), ROWS, ids=[reason or "sound" for _, reason in ROWS])
def test_rows_that_cannot_be_trained_on_are_named_with_the_reason(bad, reason):
    found = unusable_rows([row([1, 2], sampled=[1], trajectory_id="good"), bad], **ROLES)
    assert reason in found.get("e/1", "") and set(found) == ({"e/1"} if reason else set())


def test_a_row_that_begins_with_a_sampled_token_is_never_packed():
    """It was scored from the last hidden state of its neighbour in the pack."""
    with pytest.raises(BatchError, match="begins with a sampled token"):
        pack_rows([row([1, 2, 3], sampled=[1]), row([4, 5], sampled=[0, 1])], row_tokens=16, micro_batch_rows=1)


def test_the_wire_carries_the_name_of_the_trajectory(tmp_path: Path):
    assert unpack(pack(row([1, 2], sampled=[1]))).trajectory_id == "e/1"
