"""The follower against real checkpoints and an engine that can be made to fail on purpose."""

import asyncio
import contextlib
import errno
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from flowjax.config import default_config
from flowjax.run import resolve
from flowjax.weights import follow
from flowjax.weights.follow import Follower, WeightsError, _Retry
from flowjax.weights.hand_over import PeftHandOver, hand_over, write_peft_folder
from flowjax.weights.publish import COMMIT_MARKER, CheckpointError, Checkpoints, read_adapter
from flowjax.workflows import served_version


class Engine:
    """Adapter slots of an engine, as vLLM answers for them, with faults on request."""

    def __init__(self):
        self.loaded: dict[str, float] = {}
        self.calls: list[str] = []
        self.alive = True
        self.refuse: set[str] = set()

    async def models(self) -> list[str]:
        self._check_alive()
        return ["base", *self.loaded]

    async def load_adapter(self, name: str, path: Path) -> None:
        self._check_alive()
        self.calls.append(f"load {name}")
        if name in self.loaded:
            raise RuntimeError(f"400: the lora adapter {name!r} has already been loaded")
        if name in self.refuse:
            raise RuntimeError("500: adapter rank is greater than max_lora_rank")
        self.loaded[name] = float(load_file(path / "adapter_model.safetensors")["a"][0])

    async def load_weights(self, name: str, path: Path) -> None:
        self.loaded.clear()
        await self.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        self._check_alive()
        self.calls.append(f"unload {name}")
        del self.loaded[name]

    def restart(self) -> None:
        self.loaded.clear()
        self.alive = True

    def _check_alive(self) -> None:
        if not self.alive:
            raise ConnectionError("connection refused")


class Plain:
    """Hands a checkpoint's arrays over as they are."""

    def __init__(self, in_place: bool = False):
        self.in_place = in_place

    def write(self, folder: Path, arrays) -> None:
        write_peft_folder(folder, arrays, {"r": 1})

    async def load(self, engine, name: str, folder: Path) -> None:
        await (engine.load_weights if self.in_place else engine.load_adapter)(name, folder)


class Run:
    """A run folder with a publishing trainer and a running follower."""

    def __init__(self, folder: Path, *engines: Engine, in_place: bool = False, **options):
        self.folder, self.engine = folder, engines[0]
        self.checkpoints = Checkpoints(folder / "checkpoints" / "agent", keep=3)
        forms = {"agent": Plain(in_place)}
        self.follower = Follower(engines, folder, forms, max_staleness=1, poll_s=0.005, **options)

    def publish(self, step: int, level: float | None = None) -> None:
        arrays = jnp.full(3, float(step) if level is None else level)
        self.checkpoints.save(step, {"a": arrays}, {"m": jnp.zeros(3)}, {})
        self.checkpoints.wait()

    def go_back(self, *lost: int) -> None:
        """Lose these checkpoints, and let another trainer go on from those before."""
        self.checkpoints.close()
        for step in lost:
            shutil.rmtree(self.checkpoints.directory / str(step))
        self.checkpoints = Checkpoints(self.checkpoints.directory, keep=3)

    def folders(self) -> set[str]:
        return {path.name for path in (self.folder / "adapters").iterdir()}

    @contextlib.asynccontextmanager
    async def following(self):
        task = asyncio.create_task(self.follower.run())
        try:
            yield self.follower
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def publish_each(run: Run, follower: Follower, steps: Iterable[int]) -> None:
    """Publish the versions one after the other, each when the one before is served."""
    for step in steps:
        run.publish(step)
        await until(lambda step=step: follower._current.get("agent") == step)


async def until(condition, timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_hands_over_each_published_version(tmp_path, engine):
    async def scenario():
        run = Run(tmp_path, engine)
        async with run.following() as follower:
            waiting = asyncio.create_task(follower.ready())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            run.publish(0)
            await asyncio.wait_for(waiting, 120)
            assert follower.current("agent") == (0, "agent@0")
            run.publish(1)
            await until(lambda: follower.current("agent") == (1, "agent@1"))
        assert engine.loaded == {"agent@0": 0.0, "agent@1": 1.0}
        assert json.loads((tmp_path / "adapters/agent@1/adapter_config.json").read_text()) == {"r": 1}

    asyncio.run(scenario())


def test_retires_only_what_is_old_and_unused_and_deletes_only_what_is_not_needed(tmp_path, engine):
    async def scenario():
        run = Run(tmp_path, engine)
        async with run.following() as follower:
            run.publish(0)
            await follower.ready()
            with follower.using("agent", 0):
                for step in (1, 2, 3, 4):
                    run.publish(step)
                    assert await asyncio.wait_for(follower.changed("agent", step - 1), 120) == step
                await until(lambda: set(engine.loaded) == {"agent@0", "agent@3", "agent@4"})
                assert run.folders() == {f"agent@{step}" for step in range(5)}, "nothing said what is needed"
                assert follower.in_use("agent") == [0]
                follower.keep_from("agent", 2)
                await until(lambda: run.folders() == {"agent@0", "agent@2", "agent@3", "agent@4"})
            await until(lambda: set(engine.loaded) == {"agent@3", "agent@4"})
            await until(lambda: run.folders() == {"agent@2", "agent@3", "agent@4"})

    asyncio.run(scenario())


def test_an_engine_restart_gets_current_and_pinned_versions_back(tmp_path, engine):
    async def scenario():
        run = Run(tmp_path, engine)
        async with run.following() as follower:
            for step in (0, 1, 2):
                run.publish(step)
                await until(lambda: f"agent@{step}" in engine.loaded)  # noqa: B023
            follower.keep_from("agent", 2)
            with follower.using("agent", 0):
                shutil.rmtree(tmp_path / "checkpoints/agent/0")  # the folder of the adapter is all that is left of it
                engine.alive = False
                follower.recheck("agent@2")
                await asyncio.sleep(0.05)
                engine.restart()
                await asyncio.wait_for(follower.serve("agent", 2), 120)
                await until(lambda: engine.loaded.get("agent@0") == 0.0)
            assert engine.loaded["agent@2"] == 2.0 and follower.current("agent")[0] == 2

    asyncio.run(scenario())


def test_a_restart_is_noticed_without_a_hint(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(follow, "_OBSERVE_EVERY_S", 0.05)

    async def scenario():
        run = Run(tmp_path, engine)
        async with run.following() as follower:
            run.publish(0)
            await follower.ready()
            engine.restart()
            await until(lambda: "agent@0" in engine.loaded)

    asyncio.run(scenario())


def test_a_name_the_engine_has_already_counts_as_served(tmp_path, engine):
    async def scenario():
        run = Run(tmp_path, engine)
        run.publish(3)
        hidden = dict(engine.loaded)
        engine.loaded["agent@3"] = 3.0
        seen = engine.models

        async def models_late():  # the first listing is from before another follower's load
            engine.models = seen
            return ["base", *hidden]

        engine.models = models_late
        async with run.following() as follower:
            await asyncio.wait_for(follower.ready(), 120)
            assert follower.current("agent") == (3, "agent@3")
        assert engine.calls == ["load agent@3"]

    asyncio.run(scenario())


def test_a_refused_version_leaves_the_older_one_serving_and_a_newer_one_replaces_it(tmp_path, engine):
    async def scenario():
        run = Run(tmp_path, engine)
        async with run.following() as follower:
            run.publish(0)
            await follower.ready()
            engine.refuse.add("agent@1")
            run.publish(1)
            await until(lambda: "load agent@1" in engine.calls)
            assert follower.current("agent") == (0, "agent@0")
            run.publish(2)
            await until(lambda: follower.current("agent") == (2, "agent@2"))

    asyncio.run(scenario())


def test_gives_up_on_a_version_that_stays_refused(tmp_path, engine):
    async def scenario():
        run = Run(tmp_path, engine, stuck_s=0.2)
        engine.refuse.add("agent@0")
        run.publish(0)
        with pytest.raises(WeightsError, match=r"agent@0 has not reached the engine .*max_lora_rank.*policy\.lora"):
            await asyncio.wait_for(run.follower.run(), 120)

    asyncio.run(scenario())


def test_gives_up_sooner_where_this_machine_cannot_write(tmp_path, engine, monkeypatch):
    def broken(directory, version):
        raise CheckpointError("cannot be read") from OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("flowjax.weights.hand_over.read_adapter", broken)
    monkeypatch.setattr(follow, "_LACKING_S", 0.1)

    async def scenario():
        run = Run(tmp_path, engine, stuck_s=1000.0)
        run.publish(0)
        with pytest.raises(WeightsError, match="agent@0 has not reached the engine for 0 s"):
            await asyncio.wait_for(run.follower.run(), 120)

    asyncio.run(scenario())


def test_gives_up_where_this_machine_cannot_see_the_versions(tmp_path, engine, monkeypatch):
    """It was taken for an engine that is away, for ever, where no episode failed of it."""

    def broken(directory, version):
        raise OSError(errno.EIO, "Input/output error")

    async def scenario():
        run = Run(tmp_path, engine, stuck_s=1000.0)
        run.publish(0)
        following = asyncio.create_task(run.follower.run())
        await asyncio.wait_for(run.follower.ready(), 120)
        monkeypatch.setattr(follow, "_LACKING_S", 0.1)
        monkeypatch.setattr(follow, "commit_of", broken)
        with pytest.raises(WeightsError, match=r"no version could be seen for 0 s .*the disk may be broken"):
            await asyncio.wait_for(following, 120)

    asyncio.run(scenario())


def test_a_checkpoint_that_vanishes_between_listing_and_reading_is_passed_over(tmp_path, engine, monkeypatch):
    listed = follow.newest_first

    async def scenario():
        run = Run(tmp_path, engine)
        run.publish(1)
        monkeypatch.setattr(follow, "newest_first", lambda directory: iter([2, *listed(directory)]))
        async with run.following() as follower:
            await asyncio.sleep(0.1)
            monkeypatch.setattr(follow, "newest_first", listed)
            await asyncio.wait_for(follower.ready(), 120)
            assert follower.current("agent")[0] == 1
        assert engine.calls == ["load agent@1"]

    asyncio.run(scenario())


def test_looking_for_the_newest_version_costs_no_more_where_many_are_kept(tmp_path, engine, monkeypatch):
    """Every look was at each of them, for each engine and policy fifty times a second: with `keep_every_steps` and a
    disk over the network the event loop did nothing else."""
    looked_at: list[Path] = []
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path, **how: looked_at.append(path) or exists(path, **how))
    counts = []
    for kept in (3, 60):
        folder = tmp_path / str(kept)
        run = Run(folder, engine)
        for step in range(kept + 1):
            (folder / "checkpoints" / "agent" / str(step)).mkdir()
            if step < kept:  # the newest is not committed yet
                (folder / "checkpoints" / "agent" / str(step) / COMMIT_MARKER).touch()
        run.follower.keep_from("agent", kept - 2)
        looked_at.clear()
        assert run.follower._newest("agent") == kept - 1
        assert not run.follower.lost(f"agent@{kept - 1}") and run.follower.lost(f"agent@{kept}")
        assert run.follower.held("agent") == [kept - 2, kept - 1]
        counts.append(len(looked_at))
        run.checkpoints.close()
    assert counts[0] == counts[1] > 0


def test_an_old_version_can_be_asked_for_again(tmp_path, engine):
    async def scenario():
        run = Run(tmp_path, engine)
        for step in (1, 2, 3):
            run.publish(step)
        async with run.following() as follower:
            await follower.ready()
            assert set(engine.loaded) == {"agent@3"}
            with follower.using("agent", 1):
                await asyncio.wait_for(follower.serve("agent", 1), 120)
                assert engine.loaded["agent@1"] == 1.0
                assert follower.current("agent")[0] == 3
            await until(lambda: set(engine.loaded) == {"agent@3"})

    asyncio.run(scenario())


def test_folders_of_an_abandoned_future_are_not_served(tmp_path, engine):
    async def scenario():
        first = Run(tmp_path, engine)
        async with first.following() as follower:
            for step in (0, 1, 2):
                first.publish(step)
            await until(lambda: "agent@2" in engine.loaded)
            await follower.ready()
        engine.restart()
        shutil.rmtree(first.checkpoints.directory / "2")
        second = Run(tmp_path, engine)
        async with second.following() as follower:
            await follower.ready()
            assert follower.current("agent")[0] == 1
            second.checkpoints.save(2, {"a": jnp.full(3, 22.0)}, {}, {})
            await until(lambda: follower.current("agent")[0] == 2)
            assert engine.loaded[follower.current("agent")[1]] == 22.0

    asyncio.run(scenario())


@pytest.mark.parametrize("in_place", [False, True], ids=["lora", "full"])
def test_a_version_made_anew_is_another_one_on_engines_that_live_on(tmp_path, engine, in_place):
    async def scenario():
        run = Run(tmp_path, engine, in_place=in_place)
        async with run.following() as follower:
            await publish_each(run, follower, (0, 1, 2, 3))
            with follower.requesting("agent", 2) as before:
                assert before == "agent@2"
                run.go_back(2, 3)
                run.publish(2, 22.0)
                await until(lambda: engine.loaded.get(follower.current("agent")[1]) == 22.0)
                version, name = follower.current("agent")
                assert version == 2 and name != "agent@2" and served_version(name) == ("agent", 2)
                assert in_place or engine.loaded["agent@2"] == 2.0, "a request in flight ends on what it began with"
            await until(lambda: "agent@2" not in engine.loaded)
            await until(lambda: "agent@2" not in run.folders())
            with follower.using("agent", 2, pinned=True):  # an evaluation
                await asyncio.wait_for(follower.serve("agent", 2), 120)
                assert follower.name("agent", 2) == name
            run.publish(3, 33.0)
            await until(lambda: engine.loaded.get(follower.current("agent")[1]) == 33.0)
            assert follower.current("agent")[1] != "agent@3"
            run.publish(4)
            await until(lambda: follower.current("agent") == (4, "agent@4"))

    asyncio.run(scenario())


@pytest.mark.parametrize("in_place", [False, True], ids=["lora", "full"])
def test_a_version_made_anew_while_the_follower_is_away_is_another_one(tmp_path, engine, in_place):
    """Also where its folder was deleted and the engine has unloaded it: the engine's prefixes are cached by name."""

    async def scenario():
        first = Run(tmp_path, engine, in_place=in_place)
        async with first.following() as follower:
            await publish_each(first, follower, (1, 2))
        first.go_back(2)
        first.publish(2, 22.0)
        shutil.rmtree(tmp_path / "adapters/agent@2")
        engine.loaded.pop("agent@1", None)
        first.checkpoints.close()
        second = Run(tmp_path, engine, in_place=in_place)
        async with second.following() as follower:
            await asyncio.wait_for(follower.ready(), 120)
            name = follower.current("agent")[1]
            assert engine.loaded[name] == 22.0 and name != "agent@2"
            second.go_back(1, 2)
            second.publish(1, 11.0)
            await until(lambda: engine.loaded.get(follower.current("agent")[1]) == 11.0)
            assert follower.current("agent")[1] != "agent@1"

    asyncio.run(scenario())


def test_a_version_that_is_made_anew_while_it_is_read_is_not_served_as_the_one_before(tmp_path, engine, monkeypatch):
    async def scenario():
        run = Run(tmp_path, engine)
        run.publish(1)

        def read(directory, version):
            monkeypatch.undo()
            run.go_back(1)
            run.publish(1, 11.0)
            return read_adapter(directory, version)

        named = run.follower._committed("agent", 1)
        monkeypatch.setattr("flowjax.weights.hand_over.read_adapter", read)
        async with run.following() as follower:
            await asyncio.wait_for(follower.ready(), 120)
            assert engine.loaded == {follower.current("agent")[1]: 11.0} and named not in engine.loaded

    asyncio.run(scenario())


def test_a_trainer_that_goes_back_is_followed(tmp_path, engine):
    """Its newest checkpoint was damaged and set aside: it goes on from the one before, and new turns with it."""

    async def scenario():
        run = Run(tmp_path, engine)
        async with run.following() as follower:
            for step in (0, 1, 2):
                run.publish(step)
            await until(lambda: follower._current.get("agent") == 2)
            (run.checkpoints.directory / "2").rename(tmp_path / "damaged")
            assert await asyncio.wait_for(follower.changed("agent", 2), 120) == 1
            assert follower.current("agent") == (1, "agent@1") and engine.loaded["agent@1"] == 1.0

    asyncio.run(scenario())


def test_a_slower_engine_does_not_take_the_current_version_back(tmp_path):
    """One engine has version 1 when the other, asked before 1 was published, answers that it has version 0."""

    async def scenario():
        run = Run(tmp_path, Engine(), Engine())
        run.publish(0)
        run.publish(1)
        await run.follower._advance("agent", 1)
        await run.follower._advance("agent", 0)
        assert run.follower.current("agent") == (1, "agent@1")

    asyncio.run(scenario())


def test_exports_the_models_own_peft_layout(tmp_path):
    config = default_config()
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"head_dim": 4, "intermediate_size": 16, "vocab_size": 64, "max_position_embeddings": 64}
    fixed = {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "model_type": "qwen3"}
    described = {"architectures": ["Qwen3ForCausalLM"], **shape, **sizes, **fixed}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config.model.path = str(tmp_path)
    config.policy.lora.rank = 3
    config.policy.lora.targets = ("q_proj",)
    a, b = np.arange(48.0).reshape(2, 8, 3), np.arange(48.0).reshape(2, 3, 8)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(0, {"q_proj": {"a": jnp.asarray(a), "b": jnp.asarray(b)}}, {}, {})
    form = hand_over(resolve(config).policies["agent"])
    assert isinstance(form, PeftHandOver)
    tensors, adapter_config = form.tensors(read_adapter(tmp_path / "checkpoints", 0))
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_A.weight"], a[1].T)
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_B.weight"], b[1].T)
    assert adapter_config["r"] == 3 and adapter_config["target_modules"] == ["q_proj"]


@pytest.mark.parametrize("in_place", [False, True], ids=["lora", "full"])
def test_versions_that_can_be_served_without_taking_anything_from_others(tmp_path, engine, in_place):
    """With full weights an evaluation took the engine from training, though another worker still served its version;
    and one of a version that a trainer had lost was played with the lost weights."""

    async def scenario():
        run = Run(tmp_path, engine, in_place=in_place)
        async with run.following() as follower:
            run.publish(0)
            run.publish(1)
            async with asyncio.timeout(120):
                await follower.ready()
                while follower.current("agent")[0] != 1:
                    await follower.changed("agent", 0)
            assert follower.held("agent") == ([1] if in_place else [0, 1])
            shutil.rmtree(tmp_path / "checkpoints/agent/1")
            assert follower.held("agent") == ([] if in_place else [0])

    asyncio.run(scenario())


def test_full_weights_replace_each_other_once_no_episode_is_pinned(tmp_path, engine):
    async def scenario():
        run = Run(tmp_path, engine, in_place=True)
        async with run.following() as follower:
            run.publish(0)
            await asyncio.wait_for(follower.ready(), 120)
            with follower.using("agent", 0, pinned=True):
                await asyncio.wait_for(follower.serve("agent", 0), 120)
                run.publish(1)
                await asyncio.sleep(0.1)
                assert engine.loaded == {"agent@0": 0.0} and follower.current("agent")[0] == 0
            with follower.using("agent", 0):  # a single turn holds nothing up: it goes on with what comes
                assert await asyncio.wait_for(follower.changed("agent", 0), 120) == 1
            assert engine.loaded == {"agent@1": 1.0}
            with follower.using("agent", 0, pinned=True):  # an evaluation of an older version
                await asyncio.wait_for(follower.serve("agent", 0), 120)
                assert engine.loaded == {"agent@0": 0.0}
                waiting = asyncio.create_task(follower.serve_current("agent"))
                await asyncio.sleep(0.05)
                assert not waiting.done() and follower.waits("agent@1") and not follower.waits("agent@0")
            await asyncio.wait_for(waiting, 120)
            assert engine.loaded == {"agent@1": 1.0} and not follower.waits("agent@0")
        assert not any(call.startswith("unload") for call in engine.calls)

    asyncio.run(scenario())


def test_an_engine_holds_the_full_weights_of_one_policy_only(tmp_path, engine):
    with pytest.raises(WeightsError, match=r"full weights of one policy: set policy\.train to 'lora'"):
        Follower([engine], tmp_path, {"one": Plain(True), "two": Plain(True)}, max_staleness=1)


def test_every_engine_gets_every_version_and_loses_what_is_old(tmp_path):
    async def scenario():
        engines = Engine(), Engine()
        run = Run(tmp_path, *engines)
        async with run.following() as follower:
            for step in range(4):
                await publish_each(run, follower, (step,))
                follower.keep_from("agent", step - 1)
            await until(lambda: all(set(engine.loaded) == {"agent@2", "agent@3"} for engine in engines))
            await until(lambda: run.folders() == {"agent@2", "agent@3"})
            assert engines[0].loaded == engines[1].loaded == {"agent@2": 2.0, "agent@3": 3.0}

    asyncio.run(scenario())


def test_a_version_is_served_when_one_engine_has_it_and_a_dead_one_catches_up(tmp_path):
    async def scenario():
        engines = Engine(), Engine()
        run = Run(tmp_path, *engines)
        run.publish(0)
        async with run.following() as follower:
            await until(lambda: all("agent@0" in engine.loaded for engine in engines))
            engines[0].alive = False
            with follower.using("agent", 0):
                for step in (1, 2):
                    run.publish(step)
                    await until(lambda: follower.current("agent")[0] == step)  # noqa: B023
                engines[0].restart()
                await until(lambda: set(engines[0].loaded) == {"agent@0", "agent@2"})
            assert set(engines[1].loaded) >= {"agent@1", "agent@2"}

    asyncio.run(scenario())


def test_an_engine_that_hangs_does_not_hold_the_others_up(tmp_path):
    class Hanging(Engine):
        async def models(self) -> list[str]:
            await asyncio.sleep(3600)
            return []

    async def scenario():
        run = Run(tmp_path, Engine(), Hanging())
        run.publish(0)
        async with run.following() as follower:
            await until(lambda: follower._current.get("agent") == 0)
            run.publish(1)
            await until(lambda: follower.current("agent")[0] == 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "_FIRST_LOOK_S", 0.2)
        asyncio.run(scenario())


def test_one_engine_that_refuses_does_not_end_the_run(tmp_path):
    async def scenario():
        engines = Engine(), Engine()
        engines[0].refuse = {"agent@0"}
        run = Run(tmp_path, *engines, stuck_s=0.1)
        run.publish(0)
        async with run.following() as follower:
            await until(lambda: follower._current.get("agent") == 0)
            await asyncio.sleep(0.5)
            engines[0].refuse = set()
            await until(lambda: "agent@0" in engines[0].loaded)

    asyncio.run(scenario())


def test_full_weights_replace_each_other_on_each_engine(tmp_path):
    async def scenario():
        engines = Engine(), Engine()
        run = Run(tmp_path, *engines, in_place=True)
        run.publish(0)
        async with run.following() as follower:
            await until(lambda: all(set(engine.loaded) == {"agent@0"} for engine in engines))
            with follower.using("agent", 0, pinned=True):
                run.publish(1)
                await asyncio.sleep(0.1)
                assert all(set(engine.loaded) == {"agent@0"} for engine in engines)
            await until(lambda: all(set(engine.loaded) == {"agent@1"} for engine in engines))

    asyncio.run(scenario())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_version_of_another_run_under_its_name_is_not_taken_for_its_own(tmp_path, engine, in_place):
    """An engine that runs elsewhere may have served another run, or a node whose folder is gone."""
    engine.loaded["agent@1"] = 99.0

    async def scenario():
        run = Run(tmp_path, engine, in_place=in_place)
        async with run.following() as follower:
            await publish_each(run, follower, (0, 1))
            _, name = follower.current("agent")
            assert engine.loaded[name] == 1.0 and not follower.lost(name)
            await publish_each(run, follower, range(2, 9))
            _, name = follower.current("agent")
            assert in_place or (engine.loaded["agent@1"] == 99.0 and len(engine.loaded) < 8), "that run may still play"
        again = Run(tmp_path, engine, in_place=in_place)
        async with again.following() as follower:
            await follower.ready()
            assert follower.current("agent") == (8, name), "what it wrote down is its own"

    asyncio.run(scenario())


def test_a_version_may_fail_for_days():
    retry = _Retry()
    for _ in range(5000):
        retry.failed()
    assert not retry.due() and retry.failures == 5000
