"""The rollout service between a real dataflow and an engine that can be made to fail."""

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from aiohttp.test_utils import TestServer
from fake_engine import EOS
from rollout_run import RolloutRun, Servers, until

import flowjax.files
from flowjax.broker import DataflowClient, DataflowError, connect
from flowjax.config import ConfigError
from flowjax.dataflow.leases import Groups
from flowjax.dataflow.server import Server
from flowjax.files import place
from flowjax.models.nano import SPECIAL_TOKENS
from flowjax.monitor.metrics import write_status
from flowjax.records import Episode, Lease, Trajectory, Turn, pack
from flowjax.rollout import __main__ as rollout_main
from flowjax.rollout import service as rollout_service
from flowjax.rollout.client import EngineError, SamplingOptions, VersionAway
from flowjax.rollout.engines import ServedBase
from flowjax.rollout.episode import EpisodePlayer, load_workflow
from flowjax.rollout.service import RolloutError
from flowjax.weights.publish import Checkpoints, commit_of
from flowjax.workflows import single
from tests.dataflow import flows

NOBODY = dict.fromkeys(("engine", "dataflow"), "http://127.0.0.1:9")


def test_plays_what_is_admitted_and_hands_it_over(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: len(servers.counted) == 16)  # 2 groups of 4 for version 0, and as many one ahead
            await asyncio.sleep(0.1)
        assert len(servers.counted) == 16 and not servers.refused
        assert len({episode.episode_id for episode in servers.counted}) == 16
        for episode in servers.counted:
            assert episode.status == "ok" and 1 <= len(episode.turns) <= 3
            assert episode.outcome["turns"] == len(episode.turns)
            for turn in episode.turns:
                assert (turn.policy, turn.version) == ("agent", 0)
                assert turn.sampled_ids[0] in servers.engine.actions and turn.sampled_ids[1] == EOS
                np.testing.assert_array_equal(turn.logprobs, np.array([-1.5, -0.25], np.float32))
                assert len(turn.prompt_ids) >= 9 and turn.valid
        status = run.status()
        turns = sum(len(episode.turns) for episode in servers.counted)
        assert (status["episodes"], status["turns"], status["sampled_tokens"]) == (16, turns, 2 * turns)
        assert (status["serving_version"], status["in_flight"], status["failed_episodes"]) == (0, 0, 0)
        assert status["engine_up"] and status["episodes_per_s"] > 0

    asyncio.run(scenario())


def test_says_what_it_can_play_and_is_leased_just_that(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path)
        async with run.servers() as servers, connect(servers.dataflow_url) as broker:
            worker = DataflowClient(broker, worker="w", away_s=5.0)
            servers.engine.away = True  # so that the service takes nothing itself
            async with run.serving(servers) as serving:
                can = serving.service._playable
                assert can == {"worlds": ["sokoban"], "policies": ["agent"], "kinds": ["train", "eval"]}
                await worker.report_versions("agent", 0)
                assert await worker.lease(1, {**can, "worlds": ["chess"]}) == ([], 0.0)
                (lease,), _ = await worker.lease(1, can)
                assert lease.task.world == "sokoban"

    asyncio.run(scenario())


def test_a_turn_stays_on_the_version_it_began_with(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path)
        async with run.servers() as servers, run.serving(servers) as serving:
            servers.engine.hold.clear()
            await until(lambda: serving.service._bases[0].follower.in_use("agent") == [0])
            for step in (1, 2):
                run.publish(step)
                await until(lambda: f"agent@{step}" in servers.engine.adapters)  # noqa: B023
            assert set(servers.engine.adapters) == {"agent@0", "agent@1", "agent@2"}, "version 0 is still sampling"
            servers.engine.hold.set()
            await until(lambda: servers.counted)
            await until(lambda: set(servers.engine.adapters) == {"agent@1", "agent@2"})
        assert servers.counted[0].turns[0].version == 0
        versions = Counter(turn.version for episode in servers.counted for turn in episode.turns)
        assert versions[2] > 0  # and 1, where a slot became free between the two publications

    asyncio.run(scenario())


@pytest.mark.parametrize("anew", [True, False], ids=["made anew", "gone"])
def test_what_a_lost_version_has_played_is_played_again(tmp_path, anew):
    """The dataflow knows versions by number: it would take what the old version 1 did for what the new one does."""

    async def scenario():
        run = RolloutRun(tmp_path)
        run.publish(1)
        async with run.servers() as servers, run.serving(servers) as serving:
            servers.engine.hold.clear()
            follower = serving.service._bases[0].follower
            await until(lambda: len(serving.service._playing) == 8 and follower.in_use("agent") == [1])
            run.checkpoints.close()
            shutil.rmtree(run.folder / "checkpoints/agent/1")
            run.checkpoints = Checkpoints(run.folder / "checkpoints" / "agent", keep=3)
            if anew:
                run.publish(1)
            await until(lambda: follower.current("agent") != (1, "agent@1"))
            servers.engine.hold.set()
            # On a busy machine the first new episode may end before the last old one is given back.
            await until(lambda: servers.counted and serving.service.totals.given_back >= 8)
            assert serving.service.totals.given_back == 8
            assert {turn.version for episode in servers.counted for turn in episode.turns} == {int(anew)}
            commit = commit_of(run.folder / "checkpoints/agent", int(anew))
            assert servers.counted[0].commits == {"agent": {int(anew): commit}}
            assert servers.flow.ledger.count_causes("failed") == {}, "it is no attempt at the task"

    asyncio.run(scenario())


def test_who_stops_gives_back_what_it_plays_though_the_dataflow_has_no_room(tmp_path, monkeypatch):
    """It tried to hand over what was finished for all of its time: the rest lay idle until its leases ran out."""

    async def scenario():
        run = RolloutRun(tmp_path, workflow="unruly_workflows:every_fourth_hangs")
        async with run.servers() as servers:
            monkeypatch.setattr(Groups, "full", property(lambda groups: True))
            async with run.serving(servers) as serving:
                await until(lambda: serving.service._unsent and len(serving.service._playing) == 8)
            assert servers.leased == len(serving.service._unsent) > 0

    asyncio.run(scenario())


def test_an_evaluation_is_played_with_its_own_version_to_the_end(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path, eval__tasks=6, eval__slots=2.0, rollout__max_concurrent_episodes=2)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: servers.counted)
            for step in (1, 2, 3):
                run.publish(step)
            await until(lambda: "agent@3" in servers.engine.adapters)
            await until(lambda: any(turn.version == 3 for episode in servers.counted for turn in episode.turns))
            await until(lambda: sum(episode.group_id.startswith("eval") for episode in servers.counted) >= 6)
        evaluated = [t for t in servers.counted if t.group_id.startswith("eval")]
        assert len(evaluated) == 6
        assert {turn.version for episode in evaluated for turn in episode.turns} == {0}

    asyncio.run(scenario())


def test_a_version_that_does_not_come_uses_up_no_attempt(tmp_path, monkeypatch):
    served, away = ServedBase.served, [None] * 20  # more than an episode has attempts

    async def comes_late(base, policy, version):
        if version is not None and away:
            away.pop()
            raise VersionAway(f"{policy}@{version} has not come to the engine")
        await served(base, policy, version)

    async def scenario():
        monkeypatch.setattr(ServedBase, "served", comes_late)
        run = RolloutRun(tmp_path, eval__tasks=2, eval__slots=2.0)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: sum(episode.group_id.startswith("eval") for episode in servers.counted) == 2)
            status = servers.flow.status()
        assert not away and not status["failed"] and not status["quarantined"]

    asyncio.run(scenario())


def test_training_and_evaluation_sample_each_in_its_own_way(tmp_path):
    training = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    evaluation = {"temperature": 0.6, "top_p": 0.95, "top_k": 3, "min_p": 0.1}

    async def scenario():
        fields = {f"rollout__{name}": value for name, value in training.items()}
        fields |= {f"eval__{name}": value for name, value in evaluation.items()}
        run = RolloutRun(tmp_path, eval__tasks=2, eval__seed=3, rollout__stop=("</action>", "\n"), **fields)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: len({episode.group_id.partition("-")[0] for episode in servers.counted}) == 2)
        return servers.engine.bodies

    bodies = asyncio.run(scenario())
    sent = {body["temperature"]: {name: body[name] for name in training} for body in bodies}
    assert sent == {0.7: training, 0.6: evaluation}
    assert all(body["stop"] == ["</action>", "\n"] and body["stop_token_ids"] == [] for body in bodies)
    # Evaluations can be repeated, reply for reply; equal prompts of a group in training must have different ones.
    assert not any("seed" in body for body in bodies if body["temperature"] == training["temperature"])
    seeds = [body["seed"] for body in bodies if body["temperature"] == evaluation["temperature"]]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0


def test_the_end_of_a_turn_stops_a_reply(tmp_path):
    """Of a model that ends sequences with another token: it would go on with what it is answered, and answer that."""

    async def scenario():
        run = RolloutRun(tmp_path)
        settings = run.model / "tokenizer_config.json"
        template = "{% for message in messages %}{{ message.content }} <pad> {% endfor %}"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: servers.counted)
        return servers.engine.bodies

    bodies = asyncio.run(scenario())
    assert bodies and all(body["stop_token_ids"] == [SPECIAL_TOKENS.index("<pad>")] for body in bodies)


def test_an_engine_that_comes_back_empty_costs_nothing(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: len(servers.counted) >= 2)
            servers.engine.away = True
            await asyncio.sleep(0.5)
            before = len(servers.counted)
            servers.engine.restart()
            await until(lambda: len(servers.counted) == 16)
        assert before < 16 and not servers.refused
        assert servers.engine.lora_loads.count("agent@0") == 2
        assert all(episode.status == "ok" for episode in servers.counted)
        assert run.status()["given_back"] == 0

    asyncio.run(scenario())


def test_an_engine_that_lists_what_it_does_not_serve_is_given_up_on(tmp_path):
    """It was asked again at once, for as long as an episode may take."""

    async def scenario():
        run = RolloutRun(tmp_path, workflow="unruly_workflows:hangs")
        async with run.servers() as servers, run.serving(servers) as serving:
            servers.engine.only_lists = True
            base = serving.service._bases[0]
            await base.follower.ready()
            base._patience_s = 0.3
            with pytest.raises(EngineError):
                await asyncio.wait_for(base.generate("agent", None, [2], SamplingOptions(1.0, 2), group=""), 60)
            assert 1 <= servers.engine.unknown <= 4

    asyncio.run(scenario())


def test_an_engine_that_stays_away_ends_the_service_and_returns_its_leases(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path, engine__request_timeout_s=0.5, engine__start_timeout_s=2.0)
        async with run.servers() as servers:
            with pytest.raises(EngineError, match=r"has been away for \d+ s \(.+\): see .*engine\.log"):
                async with run.serving(servers) as serving:
                    await until(lambda: servers.counted)
                    servers.engine.away = True
                    await asyncio.wait({serving.task}, timeout=60)
            assert servers.leased == 0
            assert all(episode.turns for episode in servers.counted), "an absent engine is no episode"
            assert run.status()["given_back"] > 0

    asyncio.run(scenario())


def test_an_executor_that_is_away_uses_up_no_task_but_does_not_go_unseen_for_ever(tmp_path, monkeypatch):
    async def scenario():
        run = RolloutRun(tmp_path, workflow="unruly_workflows:meets_an_outage", dataflow__max_attempts=2)
        async with run.servers() as servers:
            with pytest.raises(RolloutError, match=r"an executor has been away for .*: the executor sleeps"):
                async with run.serving(servers) as serving:
                    await until(lambda: serving.service.totals.episodes > 100)  # many times slots and attempts
                    assert not serving.task.done()
                    monkeypatch.setattr(rollout_service, "_EXECUTOR_AWAY_S", 0.0)
                    await asyncio.wait({serving.task}, timeout=60)
            assert servers.leased == 0

    asyncio.run(scenario())


def test_two_errors_of_executors_far_apart_are_no_outage(tmp_path, monkeypatch):
    """They were one that had lasted for all the time between them, in which nothing was played."""
    run = RolloutRun(tmp_path)

    async def scenario():
        async with run.servers() as servers, run.serving(servers) as serving:
            now_s = time.monotonic()
            for later_s in (0, 2000, 2800, 3600, 4400):
                monkeypatch.setattr(rollout_service.time, "monotonic", lambda later_s=later_s: now_s + later_s)
                serving.service._count_executor_error("busy")
                assert serving.service._fatal.done() == (later_s == 4400)
            monkeypatch.undo()
            with pytest.raises(RolloutError, match="an executor has been away for 2400 s: busy"):
                await asyncio.wait_for(asyncio.shield(serving.task), 60)

    with contextlib.suppress(RolloutError):
        asyncio.run(scenario())


@pytest.mark.parametrize("cause", ["engine", "workflow"])
def test_endless_failure_ends_the_service_before_all_tasks_are_used_up(tmp_path, cause):
    async def scenario():
        workflow = {"workflow": "unruly_workflows:raises"} if cause == "workflow" else {}
        run = RolloutRun(tmp_path, dataflow__max_attempts=100_000, **workflow)
        async with run.servers() as servers:
            servers.engine.refuse = cause == "engine"
            reason = "this engine refuses" if cause == "engine" else "RuntimeError: this workflow is broken"
            with pytest.raises(RolloutError, match=f"32 episodes in a row came to nothing, .*{reason}"):
                async with run.serving(servers) as serving:
                    await asyncio.wait({serving.task}, timeout=60)
            assert servers.leased == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("cause", ["engine", "workflow"])
def test_a_service_gives_up_after_four_rounds_of_all_slots_and_not_before(tmp_path, cause):
    async def scenario():
        workflow = {"workflow": "unruly_workflows:raises"} if cause == "workflow" else {}
        slots = {"rollout__max_concurrent_episodes": 1}  # one after the other: none ends beside the last one
        run = RolloutRun(tmp_path, dataflow__max_attempts=100_000, **slots, **workflow)
        async with run.servers() as servers:
            servers.engine.refuse = cause == "engine"
            served = []
            with pytest.raises(RolloutError, match="4 episodes in a row came to nothing"):
                async with run.serving(servers) as serving:
                    served.append(serving.service)
                    await asyncio.wait({serving.task}, timeout=60)
            assert served[0].totals.failed_episodes + served[0].totals.given_back == 4

    asyncio.run(scenario())


def test_a_broken_episode_does_not_touch_its_siblings(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path, workflow="unruly_workflows:every_fourth_raises", dataflow__max_attempts=2)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: servers.flow.status()["ready_groups"] == 4)
        ok, broken = [], []
        for episode in servers.counted:
            (broken if episode.seed % 4 == 0 else ok).append(episode)
        assert broken and len(broken) == 2 * len({episode.episode_id for episode in broken}), "two attempts"
        for episode in broken:
            assert (episode.status, episode.turns) == ("env_error", [])
            assert episode.error == "RuntimeError: this episode is broken, at unruly_workflows.py line 12"
        assert len(ok) == 16 - len(broken) // 2
        assert all(episode.status == "ok" and episode.turns for episode in ok)
        assert run.status()["failed_episodes"] == len(broken)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        ("every_fourth_rewards_nothing_that_is_a_number", "success' = nan"),
        ("every_fourth_is_graded", "it ended with success 0.75: make it 1 or 0, and give a grade another name"),
    ],
)
def test_a_success_that_is_neither_0_nor_1_is_the_worlds_fault_and_ends_nothing_else(tmp_path, workflow, said):
    async def scenario():
        run = RolloutRun(tmp_path, workflow=f"unruly_workflows:{workflow}", dataflow__max_attempts=1)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: servers.flow.status()["ready_groups"] == 4)
        broken = [episode for episode in servers.counted if episode.seed % 4 == 0]
        assert broken and len(servers.counted) == 16
        for episode in broken:
            assert (episode.status, episode.turns) == ("env_error", [])
            assert said in episode.error

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("what", "said"),
    [("answers", r"episode.answer is '\ud83d', which has half a surrogate pair"), ("raises", "? is broken")],
)
def test_text_that_cannot_be_sent_is_the_worlds_fault_and_ends_nothing_else(tmp_path, what, said):
    """JSON that a model wrote can spell it. The service ended of it, and its sound episodes were played again."""

    async def scenario():
        workflow = f"unruly_workflows:every_fourth_{what}_half_a_character"
        run = RolloutRun(tmp_path, workflow=workflow, dataflow__max_attempts=1)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: servers.flow.status()["ready_groups"] == 4)
        broken = [episode for episode in servers.counted if episode.seed % 4 == 0]
        assert broken and len(servers.counted) == 16
        assert all(episode.status == "env_error" and said in episode.error for episode in broken)

    asyncio.run(scenario())


def test_an_outcome_that_the_reward_lacks_is_the_worlds_fault_and_ends_nothing_else(tmp_path):
    """The dataflow refused the whole message, its sound episodes too, and the service ended of that."""

    async def scenario():
        run = RolloutRun(tmp_path, workflow="unruly_workflows:every_fourth_lacks_its_outcome", dataflow__max_attempts=1)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: servers.flow.status()["ready_groups"] == 4)
        broken = [episode for episode in servers.counted if episode.seed % 4 == 0]
        assert broken and len(servers.counted) == 16 and not servers.refused
        for episode in broken:
            assert (episode.status, episode.turns) == ("env_error", [])
            assert "outcome lacks 'success', which the reward of agent" in episode.error

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("workflow", "error"),
    [
        ("returns_nothing", "config.workflow returned NoneType: return a flowjax.workflows.Played"),
        ("names_another_agent", "config.workflow returned a part of agent 'critic': config.agents has agent"),
    ],
)
def test_what_a_workflow_returns_that_is_no_episode_is_its_fault(tmp_path, workflow, error):
    async def scenario():
        run = RolloutRun(tmp_path, workflow=f"unruly_workflows:{workflow}", dataflow__max_attempts=1)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: servers.counted)
        assert all((each.status, each.trajectories) == ("env_error", []) for each in servers.counted)
        assert error in servers.counted[0].error

    asyncio.run(scenario())


def test_an_episode_that_flowjax_fails_at_is_given_back_with_the_reason(tmp_path, monkeypatch):
    async def play(player: EpisodePlayer, lease: Lease) -> Episode:
        raise AssertionError("nobody thought of this")

    monkeypatch.setattr(EpisodePlayer, "play", play)

    async def scenario():
        run = RolloutRun(tmp_path, dataflow__max_attempts=100_000)
        async with run.servers() as servers:
            with pytest.raises(RolloutError, match=r"in a row came to nothing, .*AssertionError: nobody thought of"):
                async with run.serving(servers) as serving:
                    await asyncio.wait({serving.task}, timeout=60)
            assert servers.leased == 0

    asyncio.run(scenario())


def test_a_message_of_episodes_stays_below_its_size():
    """64 long episodes were one message, over config.dataflow.max_message_bytes: its 413 ended the service."""
    random = np.random.default_rng(0)

    def long_episode(number: int) -> Episode:
        turns = []
        for _ in range(random.integers(1, 30)):
            ids = np.zeros(random.integers(1, 3000), np.int32)
            sampled, logprobs = ids[: len(ids) // 2], np.zeros(len(ids) // 2, np.float32)
            shown = "ä" * int(random.integers(0, 10_000))
            turns.append(Turn("agent", 1, ids, sampled, logprobs, "stop", 2**63, 2**63, 0.5, True, False, shown=shown))
        names = f"group/{number:03d}", "group", "task", number
        part = Trajectory(*names, turns, {"success": 1.0}, shown="x" * 20_000)
        return Episode(*names, [part], {"success": 1.0})

    finished, most_bytes = [(f"lease-{number}", long_episode(number)) for number in range(200)], 1_500_000
    left, sent = finished, []
    while left:
        items = rollout_service._one_message(left, most_bytes)
        described = [{"lease_id": lease_id, "episode": episode} for lease_id, episode in items]
        assert len(pack({"worker": "w", "items": described})) <= most_bytes and 1 <= len(items) <= 64
        sent, left = sent + items, left[len(items) :]
    assert sent == finished and len(finished) > 20
    assert len(rollout_service._one_message(finished, 1)) == 1, "one that is longer alone is tried all the same"


def test_evaluations_do_not_wait_for_the_trainer(tmp_path, monkeypatch):
    """They stood behind a message of training's, for which there was no room."""
    monkeypatch.setattr(Groups, "full", property(lambda groups: True))

    async def scenario():
        run = RolloutRun(tmp_path, eval__tasks=20, rollout__max_concurrent_episodes=4)
        async with run.servers() as servers:
            async with run.serving(servers):
                await until(lambda: len(servers.counted) == 20, 60)
            assert {episode.group_id.partition("-")[0] for episode in servers.counted} == {"eval"}

    asyncio.run(scenario())


def test_an_episode_that_takes_too_long_is_a_timeout(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path, workflow="unruly_workflows:hangs", rollout__episode_timeout_s=0.1)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: len(servers.counted) == 16)
        assert {episode.status for episode in servers.counted} == {"timeout"}
        assert "rollout.episode_timeout_s=0.1" in servers.counted[0].error

    asyncio.run(scenario())


def test_a_time_out_of_the_worlds_own_is_no_time_out_of_the_episode(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path, workflow="unruly_workflows:tool_takes_too_long")
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: bool(servers.counted))
        assert {episode.status for episode in servers.counted} == {"env_error"}
        assert servers.counted[0].error.startswith("TimeoutError: the tool does not answer, at unruly_workflows.py")

    asyncio.run(scenario())


def test_an_episode_that_runs_out_of_time_without_an_engine_is_played_again(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path, rollout__episode_timeout_s=3.0, engine__request_timeout_s=30.0)
        async with run.servers() as servers, run.serving(servers) as serving:
            servers.engine.hold.clear()
            await until(lambda: servers.leased == 8)
            servers.engine.away = True
            servers.engine.hold.set()
            await until(lambda: serving.service.totals.given_back >= 8)
            assert not servers.counted
            servers.engine.restart()
            await until(lambda: any(episode.status == "ok" for episode in servers.counted))

    asyncio.run(scenario())


def test_leases_are_renewed_and_a_lost_one_stops_its_episode(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path, workflow="unruly_workflows:hangs", dataflow__lease_s=3.0)
        async with run.servers() as servers, run.serving(servers) as serving:
            playing = serving.service._playing
            await until(lambda: len(playing) == 8)
            first = sorted(playing)
            await asyncio.sleep(3.5)
            assert sorted(playing) == first
            flows.give_back(servers.flow, first[:1], "")  # as if it had run out and gone to somebody else
            await until(lambda: first[0] not in playing and len(playing) == 8)
            assert set(first[1:]) < set(playing)

    asyncio.run(scenario())


def test_a_restarted_dataflow_counts_every_episode_once(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path)
        async with run.servers() as servers, run.serving(servers):
            servers.engine.hold.clear()
            await until(lambda: servers.leased == 8)
            port = servers.dataflow.port
            await servers.dataflow.close()
            servers.flow.close()
            servers.engine.hold.set()
            await asyncio.sleep(0.3)
            flow = servers.watch(run.flow())
            servers.dataflow = TestServer(Server(flow).application(), port=port)
            await servers.dataflow.start_server()
            await until(lambda: len(servers.counted) == 16)
        assert len({episode.episode_id for episode in servers.counted}) == 16

    asyncio.run(scenario())


def test_a_dataflow_that_stays_away_ends_the_service(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path, dataflow__lease_s=1.0)
        async with run.servers() as servers:
            with pytest.raises(DataflowError, match=r"has not answered for \d+ s .*dataflow\.log"):
                async with run.serving(servers) as serving:
                    await until(lambda: servers.counted)
                    await servers.dataflow.close()
                    await asyncio.wait({serving.task}, timeout=60)

    asyncio.run(scenario())


def test_the_process_gives_everything_back_on_sigterm(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path)
        async with run.servers() as servers:
            servers.engine.hold.clear()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "flowjax.rollout", f"--run={run.folder}"), stderr=asyncio.subprocess.PIPE
            )
            await until(lambda: servers.leased == 8)
            process.send_signal(signal.SIGTERM)
            _, stderr = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0, stderr.decode()
            assert servers.leased == 0 and not servers.counted
            assert servers.flow.status()["waiting"] >= 8
            assert b"Traceback" not in stderr
        assert not _children_of(process.pid)

    asyncio.run(scenario())


def test_what_a_killed_service_was_playing_is_played_at_once_by_the_next(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path, dataflow__lease_s=3600.0)
        async with run.servers() as servers:
            servers.engine.hold.clear()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "flowjax.rollout", f"--run={run.folder}"
            )
            await until(lambda: servers.leased == 8)
            await until(lambda: len(run.status()["leases"]) == 8)
            process.kill()
            await process.wait()
            servers.engine.hold.set()
            async with run.serving(servers):
                await until(lambda: len(servers.counted) == 16)
        assert not servers.refused and len({episode.episode_id for episode in servers.counted}) == 16
        assert run.status()["leases"] == []

    asyncio.run(scenario())


def test_leases_are_noted_before_anything_is_played(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_service, "_REPORT_EVERY_S", 3600.0)  # they do not wait for the next report

    async def scenario():
        run = RolloutRun(tmp_path)
        async with run.servers() as servers, run.serving(servers):
            servers.engine.hold.clear()
            await until(lambda: servers.leased == 8)
            await until(lambda: len(run.status()["leases"]) == 8)
            servers.engine.hold.set()

    asyncio.run(scenario())


def test_what_a_killed_service_was_playing_is_known_until_it_is_given_back(tmp_path, monkeypatch):
    async def scenario():
        run = RolloutRun(tmp_path, dataflow__lease_s=3600.0)
        async with run.servers() as servers:
            servers.flow.report_serving("agent", 0)
            held = [lease.lease_id for lease in flows.lease(servers.flow, "killed", 8)]
            write_status(run.folder, "rollout", {"place": place(run.folder), "leases": held})
            monkeypatch.setattr(Servers, "dataflow_url", NOBODY["dataflow"])  # away while the next comes and goes
            async with run.serving(servers):
                await until(lambda: "in_flight" in run.status())
                assert run.status()["leases"] == held
            assert run.status()["leases"] == held

    asyncio.run(scenario())


def test_a_cloned_node_gives_nothing_back_that_the_first_one_plays(tmp_path, monkeypatch):
    """With the folder its status file was cloned: the first node lost all that it was playing."""
    path = tmp_path / "status-rollout.json"
    write_status(tmp_path, "rollout", {"place": place(tmp_path), "leases": ["lease"]})
    assert rollout_service.read_leases(path) == ["lease"]
    clone = shutil.copytree(tmp_path, tmp_path / "clone")
    assert rollout_service.read_leases(clone / path.name) == []
    monkeypatch.setattr(flowjax.files, "boot_id", lambda: "of another machine")
    assert rollout_service.read_leases(path) == []


def _children_of(pid: int) -> list[str]:
    """Processes whose command line names `pid`, as environment workers do with their parent's."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in listed if "flowjax.envs.worker" in line and str(pid) in line.split()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workflow": "flowjax.workflows.single:plya"}, "config.workflow is 'flowjax.workflows.single:plya'"),
        ({"env__name": "flowjax.envs.nowhere"}, "env.name is 'flowjax.envs.nowhere'"),
        ({"model__path": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_mistakes_in_the_config_are_one_line_and_their_own_exit_status(tmp_path, change, message, capsys):
    folder = RolloutRun(tmp_path, **change).folder
    (folder / "endpoints.json").write_text(json.dumps(NOBODY))
    assert rollout_main.play(folder) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rollout: ") and message in line


def test_an_absent_engine_is_the_last_line_of_the_log(tmp_path, capsys):
    folder = RolloutRun(tmp_path, engine__start_timeout_s=0.5).folder
    (folder / "endpoints.json").write_text(json.dumps(NOBODY))
    assert rollout_main.play(folder) == 1
    assert "rollout: the engine has been away" in capsys.readouterr().err.splitlines()[-1]


def test_workflows_are_found_by_dotted_path():
    assert load_workflow("flowjax.workflows.single:play") is single.play
    with pytest.raises(ConfigError, match=r"config\.workflow is 'play'"):
        load_workflow("play")
