"""A node's copy of a run: real files from a real dataflow server, and what may happen to them on the way."""

import asyncio
import contextlib
import gzip
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_run import RolloutRun
from safetensors.numpy import load_file

from flowjax.config import save_run
from flowjax.dataflow import files
from flowjax.dataflow.leases import Capabilities
from flowjax.run import resolve
from flowjax.weights import hand_over as handed_over
from flowjax.weights import mirror
from flowjax.weights.follow import Follower
from flowjax.weights.hand_over import hand_over
from flowjax.weights.mirror import OtherModelError, WeightsMirror, fetch_bases
from flowjax.weights.publish import HANDED_OVER, Checkpoints, commit_of, committed_steps, read_adapter
from flowjax.weights.source import OriginError, _Coming, source
from tests.dataflow.test_flow import played


def read_adapter_of(run: RolloutRun, step: int):
    return read_adapter(run.folder / "checkpoints" / "agent", step)


def level(folder: Path, step: int) -> float:
    """The number that `RolloutRun.publish` fills the adapter of a step with."""
    tensors = load_file(folder / "checkpoints" / "agent" / str(step) / HANDED_OVER / "adapter_model.safetensors")
    return float(next(array for name, array in tensors.items() if "lora_B" in name).mean())


class Slow:
    """A function that takes a while; counts its calls, and those at a time."""

    def __init__(self, work, takes_s: float):
        self.work, self.takes_s = work, takes_s
        self.calls = self.running = self.most = 0

    def __call__(self, *args, **kwargs):
        self.calls, self.running = self.calls + 1, self.running + 1
        self.most = max(self.most, self.running)
        time.sleep(self.takes_s)
        self.running -= 1
        return self.work(*args, **kwargs)


def test_a_node_has_the_versions_that_the_run_has(tmp_path):
    run, node = RolloutRun(tmp_path), tmp_path / "node"

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            copy = WeightsMirror(node, origin)
            await copy.update()
            assert committed_steps(node / "checkpoints" / "agent") == [0]
            for step in (1, 2, 3):
                run.publish(step)
            servers.flow.report_serving("agent", 3)
            await copy.update()
            assert committed_steps(node / "checkpoints" / "agent") == [2, 3], "within max_staleness of what is served"
            assert [level(node, step) for step in (2, 3)] == [2.0, 3.0]
            whole = tmp_path / "whole"
            hand_over(resolve(run.config, run.folder).policies["agent"]).write(whole, read_adapter_of(run, 3))
            copied = node / "checkpoints" / "agent" / "3" / HANDED_OVER
            assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
                path.name: path.read_bytes() for path in whole.iterdir()
            }

    asyncio.run(scenario())


def test_versions_travel_as_what_differs_and_whole_where_the_base_is_another(tmp_path):
    run, node = RolloutRun(tmp_path), tmp_path / "node"
    asked = []

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            copy, ask = WeightsMirror(node, origin), origin.ask

            async def noting(path):
                answer = await ask(path)
                asked.extend([(path, answer["base"])] if "pack" in answer else [])
                return answer

            origin.ask = noting
            await copy.update()
            for step in (1, 2, 3, 4, 5):
                run.publish(step)
                servers.flow.report_serving("agent", step)
                if step != 3:  # the node misses it
                    await copy.update()
                    assert level(node, step) == float(step)
            bases = [base.partition(".")[0] for _, base in asked]
            assert bases[:3] == ["", "0", "1"] and bases[-1] == "4", asked
            assert sum(path.is_dir() for path in (run.folder / "packed").iterdir()) == 3, "no more than nodes may use"

            other = node / "checkpoints/agent/5" / HANDED_OVER / "adapter_model.safetensors"
            data = bytearray(other.read_bytes())
            data[-1] ^= 1  # a bit that nobody has noticed
            other.unlink()
            other.write_bytes(data)
            run.publish(6)
            servers.flow.report_serving("agent", 6)
            await copy.update()
            assert level(node, 6) == 6.0

    asyncio.run(scenario())


def test_a_version_that_is_made_anew_is_fetched_anew(tmp_path):
    run, node = RolloutRun(tmp_path), tmp_path / "node"

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            copy = WeightsMirror(node, origin)
            run.publish(1)
            await copy.update()
            run.checkpoints.close()
            shutil.rmtree(run.folder / "checkpoints" / "agent" / "1")
            again = RolloutRun(tmp_path / "again")
            again.publish(5)
            shutil.copytree(again.folder / "checkpoints/agent/5", run.folder / "checkpoints/agent/1")
            marker = run.folder / "checkpoints/agent/1/commit_success.txt"
            marker.touch()
            await copy.update()
            assert level(node, 1) == 5.0

    asyncio.run(scenario())


def packed(run: RolloutRun) -> list[str]:
    """Versions that the run keeps as engines are given them."""
    return sorted(path.name for path in (run.folder / "packed").iterdir() if path.is_dir())


def test_a_node_that_joins_takes_nothing_from_the_others(tmp_path, monkeypatch):
    """It fetches from the newest version down to the oldest needed one: more than the run keeps for bases."""
    run = RolloutRun(tmp_path, dataflow__max_staleness=4)
    run.checkpoints.close()
    run.checkpoints = Checkpoints(run.folder / "checkpoints" / "agent", keep=8)
    writing = Slow(handed_over.save_file, 0.0)
    monkeypatch.setattr(handed_over, "save_file", writing)

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            copy = WeightsMirror(tmp_path / "node", origin)
            for step in range(1, 8):
                run.publish(step)
                servers.flow.report_serving("agent", step)
                await copy.update()
            written = writing.calls
            await WeightsMirror(tmp_path / "joins", origin).update()
            assert committed_steps(tmp_path / "joins/checkpoints/agent") == [3, 4, 5, 6, 7]
            assert writing.calls == written, "all of them were there"
            assert [name.partition(".")[0] for name in packed(run)] == [f"agent@{step}" for step in range(3, 8)]
            name, size_bytes, digest = (await origin.ask("/files/weights/agent/1"))["pack"]
            await origin.fetch(f"/files/packs/{name}", tmp_path / "pack", size_bytes, digest)

    asyncio.run(scenario())


def test_a_node_that_is_far_behind_gets_what_differs_all_the_same(tmp_path):
    """Whole versions over a slow line would leave it ever further behind, while a faster node plays."""
    run = RolloutRun(tmp_path)
    bases = {}

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            copies = {name: WeightsMirror(tmp_path / name, origin) for name in ("fast", "1", "2", "3", "4")}
            for step in range(1, 12):
                run.publish(step)
                servers.flow.report_serving("agent", step)
                await copies["fast"].update()
                if str(step) in copies:
                    await copies[str(step)].update()
            kept = {name.partition(".")[0] for name in packed(run)}
            assert kept == {f"agent@{step}" for step in (2, 3, 4, 9, 10, 11)}
            ask = origin.ask

            async def noting(path):
                answer = await ask(path)
                if "pack" in answer:
                    bases.setdefault(name, answer["base"].partition(".")[0])
                return answer

            origin.ask = noting
            for name in ("1", "2", "3", "4"):
                await copies[name].update()
                assert level(tmp_path / name, 11) == 11.0
            assert bases == {"1": "", "2": "2", "3": "3", "4": "4"}, "three older ones are held, beside the newest"

    asyncio.run(scenario())


def test_what_a_silent_node_was_at_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_HEARD_S", 0.0)
    run = RolloutRun(tmp_path)

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            fast, silent = WeightsMirror(tmp_path / "fast", origin), WeightsMirror(tmp_path / "silent", origin)
            for step in range(1, 6):
                run.publish(step)
                servers.flow.report_serving("agent", step)
                await fast.update()
                if step == 1:
                    await silent.update()
            assert [name.partition(".")[0] for name in packed(run)] == ["agent@3", "agent@4", "agent@5"]

    asyncio.run(scenario())


def test_a_version_that_an_evaluation_is_pinned_to_can_be_had_until_that_is_over(tmp_path):
    """Also by a node that joins when its checkpoint is gone; what was packed in between is not kept for it."""
    run = RolloutRun(tmp_path, eval__tasks=2)

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            copy = WeightsMirror(tmp_path / "node", origin)
            servers.flow.report_serving("agent", 0)  # which opens an evaluation
            for step in range(1, 9):
                await copy.update()
                run.publish(step)
                servers.flow.report_serving("agent", step)
            await copy.update()
            assert 0 not in committed_steps(run.folder / "checkpoints/agent")
            joins = WeightsMirror(tmp_path / "joins", origin)
            await joins.update()
            here = committed_steps(tmp_path / "joins/checkpoints/agent")
            assert here[0] == 0 and here[-1] == 8 and 2 not in here, "what is needed, and what the run has"
            assert level(tmp_path / "joins", 0) == level(tmp_path / "node", 0)
            for lease in servers.flow.leases.lease("w", 100, Capabilities(kinds=frozenset({"eval"}))):
                servers.flow.groups.accept_all([(lease.lease_id, played(lease, version=0))])
            await servers.flow.evaluations.write_finished()
            await joins.update()
            assert 0 not in committed_steps(tmp_path / "joins/checkpoints/agent"), "it is over"

    asyncio.run(scenario())


def test_a_run_keeps_no_version_that_its_trainer_has_gone_back_behind(tmp_path):
    run = RolloutRun(tmp_path)

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            copy = WeightsMirror(tmp_path / "node", origin)
            for step in (1, 2, 3):
                run.publish(step)
                await copy.update()
            run.checkpoints.close()
            for step in (2, 3):
                shutil.rmtree(run.folder / "checkpoints/agent" / str(step))
            run.checkpoints = Checkpoints(run.folder / "checkpoints" / "agent", keep=3)
            run.publish(2, 22.0)
            await copy.update()
            assert level(tmp_path / "node", 2) == 22.0
        commits = {step: commit_of(run.folder / "checkpoints" / "agent", step) for step in (1, 2)}
        assert packed(run)[-2:] == [f"agent@{step}.{commit}" for step, commit in commits.items()]

    asyncio.run(scenario())


class Slots:
    """Adapters of an engine on the node, by name, each with the number that `RolloutRun.publish` filled it with."""

    def __init__(self):
        self.loaded: dict[str, float] = {}

    async def models(self) -> list[str]:
        return list(self.loaded)

    async def load_adapter(self, name: str, path: Path) -> None:
        tensors = load_file(path / "adapter_model.safetensors")
        self.loaded[name] = float(next(array for key, array in tensors.items() if "lora_B" in key).mean())

    async def unload_adapter(self, name: str) -> None:
        del self.loaded[name]


async def until(condition) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.002)


def test_engines_of_a_node_get_what_was_made_anew_while_it_was_away(tmp_path):
    """A resumed run has lost its newest checkpoints; the node, its copy and its engines are those of before."""
    run, node, engine = RolloutRun(tmp_path), tmp_path / "node", Slots()

    async def scenario():
        forms = {"agent": hand_over(resolve(run.config, run.folder).policies["agent"])}
        follower = Follower([engine], node, forms, max_staleness=1, poll_s=0.005)  # type: ignore[list-item]
        following = asyncio.create_task(follower.run())
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            for step in (1, 2):
                run.publish(step)
            await WeightsMirror(node, origin).update()
            await until(lambda: engine.loaded.get("agent@2") == 2.0)
        run.checkpoints.close()
        shutil.rmtree(run.folder / "checkpoints/agent/2")
        run.checkpoints = Checkpoints(run.folder / "checkpoints" / "agent", keep=3)
        run.publish(2, 22.0)
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            await WeightsMirror(node, origin).update()
        await until(lambda: engine.loaded.get(follower.current("agent")[1]) == 22.0)
        version, name = follower.current("agent")
        commits = [commit_of(folder / "checkpoints" / "agent", 2) for folder in (run.folder, node)]
        assert (version, name, commits[0]) == (2, f"agent@2.{commits[1]}", commits[1])
        await until(lambda: "agent@2" not in engine.loaded)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(scenario())


def test_another_model_under_the_same_name_is_refused(tmp_path):
    run = RolloutRun(tmp_path)
    (run.model / "model.safetensors").write_bytes(b"weights")
    (run.model / "README.md").write_text("a page")

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            config = run.config.copy_and_resolve_references()
            config.model.path = str(tmp_path / "mine")
            shutil.copytree(run.model, tmp_path / "mine")
            (tmp_path / "mine" / "README.md").unlink()
            await fetch_bases(resolve(config), origin)
            for data in (b"weightz", b"other weights"):
                (tmp_path / "mine" / "model.safetensors").write_bytes(data)
                with pytest.raises(OtherModelError, match=r"mine', whose model\.safetensors is not that of base base"):
                    await fetch_bases(resolve(config), origin)
            (tmp_path / "mine" / "model.safetensors").unlink()
            with pytest.raises(OtherModelError, match=r"model\.safetensors"):
                await fetch_bases(resolve(config), origin)

    asyncio.run(scenario())


def test_a_file_more_makes_another_model_too(tmp_path):
    """A chat template beside the tokenizer changes every prompt; so do tokens and settings that the run has not."""
    run, mine = RolloutRun(tmp_path), tmp_path / "mine"
    named = Path("chat_templates/tool_use.jinja")

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            config = run.config.copy_and_resolve_references()
            config.model.path = str(mine)
            shutil.copytree(run.model, mine)
            for name in ("README.md", ".gitattributes.json", ".cache/more.json", "original/params.json"):
                (mine / name).parent.mkdir(exist_ok=True)
                (mine / name).write_text("{}")
            await fetch_bases(resolve(config), origin)
            for name in ("chat_template.jinja", "added_tokens.json", "model-2.safetensors", str(named)):
                (mine / name).parent.mkdir(exist_ok=True)
                (mine / name).write_text("{}")
                with pytest.raises(OtherModelError, match=rf"mine', whose {name} is not in base base of the run: give"):
                    await fetch_bases(resolve(config), origin)
                (mine / name).unlink()

    asyncio.run(scenario())


def test_a_folder_with_something_else_in_it_is_refused_before_anything_comes(tmp_path):
    run, mine = RolloutRun(tmp_path), tmp_path / "mine"

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            config = run.config.copy_and_resolve_references()
            config.model.path = str(mine)
            mine.mkdir()
            (mine / "notes").write_text("of somebody")
            with pytest.raises(OtherModelError, match=r"mine', which holds no config\.json and is not empty: give"):
                await fetch_bases(resolve(config), origin)
            assert not (tmp_path / ".mine.part").exists() and (mine / "notes").exists()
            (mine / "notes").unlink()
            await fetch_bases(resolve(config), origin)
            assert (mine / "config.json").exists()

    asyncio.run(scenario())


def test_a_fetch_that_goes_on_takes_nothing_of_another_model_for_its_own(tmp_path):
    """A model may be made anew while a node is away: what had come of the one before lies there under its names."""
    run = RolloutRun(tmp_path)
    (run.model / "model.safetensors").write_bytes(b"new weights")

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            config = run.config.copy_and_resolve_references()
            config.model.path = str(tmp_path / "mine")
            before = tmp_path / ".mine.part"
            (before / "sub").mkdir(parents=True)
            (before / "model.safetensors").write_bytes(b"old weights")
            (before / "config.json").write_bytes((run.model / "config.json").read_bytes())
            (before / "model.safetensors.index.json").write_text("{}")  # would send a reader to other files
            (before / "sub" / "more.txt").write_text("old")
            await fetch_bases(resolve(config), origin)
            copied = {path.name: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()}
            assert copied == {path.name: path.read_bytes() for path in run.model.iterdir()}

    asyncio.run(scenario())


def test_what_takes_the_run_long_is_made_once_and_arrives(tmp_path, monkeypatch):
    """The node hangs up after half a second of silence; a base's digests and a version take 1.2 s each."""
    monkeypatch.setattr("flowjax.weights.source._SILENT_S", 0.5)
    monkeypatch.setattr("flowjax.weights.source._MADE_EVERY_S", 0.02)
    monkeypatch.setattr(mirror, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(files, "_HELD_S", 0.2, raising=False)
    listing, writing = Slow(files._file_list, 1.2), Slow(handed_over.save_file, 1.2)
    monkeypatch.setattr(files, "_file_list", listing)
    monkeypatch.setattr(handed_over, "save_file", writing)
    run = RolloutRun(tmp_path)

    async def scenario():
        async with run.servers() as servers:
            config = run.config.copy_and_resolve_references()
            config.model.path = str(tmp_path / "mine")
            async with source(servers.dataflow_url, "") as origin:
                await fetch_bases(resolve(config), origin)
                copies = [WeightsMirror(tmp_path / name, origin) for name in ("node", "other")]
                await asyncio.gather(*(copy.update() for copy in copies))
            assert [level(tmp_path / name, 0) for name in ("node", "other")] == [0.0, 0.0]
            assert (listing.calls, listing.most, writing.calls, writing.most) == (1, 1, 1, 1)

    asyncio.run(scenario())


def test_what_a_node_has_not_waited_for_is_there_when_it_asks_again(tmp_path, monkeypatch):
    writing = Slow(handed_over.save_file, 1.0)
    monkeypatch.setattr(handed_over, "save_file", writing)
    run, node = RolloutRun(tmp_path), tmp_path / "node"

    async def scenario():
        async with run.servers() as servers:
            for _ in range(2):
                async with source(servers.dataflow_url, "") as origin:
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(WeightsMirror(node, origin).update(), 0.3)
            async with source(servers.dataflow_url, "") as origin:
                await WeightsMirror(node, origin).update()
            assert (level(node, 0), writing.calls) == (0.0, 1)

    asyncio.run(scenario())


def damage(run: RolloutRun, step: int) -> None:
    """Empty the files of a committed version, whose markers stay."""
    for path in (run.folder / "checkpoints" / "agent" / str(step) / "adapter").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def test_the_run_says_why_a_version_cannot_be_had(tmp_path, monkeypatch):
    run, folder = RolloutRun(tmp_path), tmp_path / "run/checkpoints/agent"
    read = read_adapter

    def thinned_out(checkpoints: Path, step: int):
        shutil.rmtree(checkpoints / str(step))
        return read(checkpoints, step)

    def made_anew(checkpoints: Path, step: int):
        (checkpoints / str(step) / "commit_success.txt").touch()
        return read(checkpoints, step)

    async def scenario():
        run.publish(1)
        damage(run, 1)
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            with pytest.raises(OriginError, match=r"HTTP 500.*1 of agent cannot be packed \(CheckpointError: "):
                await origin.ask("/files/weights/agent/1")
            monkeypatch.setattr("flowjax.weights.hand_over.read_adapter", thinned_out)
            with pytest.raises(OriginError, match=r"HTTP 404.*gone or made anew"):
                await origin.ask("/files/weights/agent/0")
            assert committed_steps(folder) == [1]
            run.publish(2)
            monkeypatch.setattr("flowjax.weights.hand_over.read_adapter", made_anew)
            with pytest.raises(OriginError, match=r"HTTP 404.*gone or made anew"):
                await origin.ask("/files/weights/agent/2")
            assert packed(run) == [], "the new content under the name of the old"

    asyncio.run(scenario())


def test_a_version_that_cannot_be_had_holds_up_no_other(tmp_path):
    run, node = RolloutRun(tmp_path), tmp_path / "node"

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            copy = WeightsMirror(node, origin)
            await copy.update()
            for step in (1, 2):
                run.publish(step)
            servers.flow.report_serving("agent", 2)
            damage(run, 2)
            with pytest.raises(OriginError, match=r"agent 2: .*HTTP 500.*cannot be packed"):
                await copy.update()
            assert committed_steps(node / "checkpoints" / "agent") == [1], "what the run no longer needs is gone"
            for step in (3, 4):
                run.publish(step)
                damage(run, step)
            servers.flow.report_serving("agent", 4)
            with pytest.raises(OriginError, match=r"agent 4: .*; agent 3: "):
                await copy.update()
            assert committed_steps(node / "checkpoints" / "agent") == [1], "what the next try is against"

    asyncio.run(scenario())


def test_versions_that_the_run_has_not_made_go_before_anything_comes(tmp_path):
    """A folder of an earlier run of the same name: engines would take its newest version for the run's."""
    run, node = RolloutRun(tmp_path / "now"), tmp_path / "node"
    here = []

    async def scenario():
        earlier = RolloutRun(tmp_path / "earlier")
        earlier.publish(7)
        async with earlier.servers() as servers, source(servers.dataflow_url, "") as origin:
            await WeightsMirror(node, origin).update()
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            ask = origin.ask

            async def noting(path):
                here.append((path.partition("&node=")[0], committed_steps(node / "checkpoints" / "agent")))
                return await ask(path)

            origin.ask = noting
            await WeightsMirror(node, origin).update()
        assert here[:2] == [("/files/weights", [0, 7]), ("/files/weights/agent/0?base=", [])], here
        assert committed_steps(node / "checkpoints" / "agent") == [0]

    asyncio.run(scenario())


def fetched(copy: WeightsMirror, monkeypatch: pytest.MonkeyPatch, before=lambda step: None) -> list[int]:
    """Steps in the order in which they are fetched from now on; `before` is called as each one begins."""
    steps, unpack = [], copy._unpack

    async def noting(policy, step, base, unfinished):
        steps.append(step)
        before(step)
        return await unpack(policy, step, base, unfinished)

    monkeypatch.setattr(copy, "_unpack", noting)
    return steps


@pytest.mark.parametrize(("in_place", "expected"), [((), [3, 4, 2]), (("agent",), [3, 4])])
def test_a_version_made_meanwhile_goes_before_older_ones(tmp_path, monkeypatch, in_place, expected):
    """A node with a slow link fetched all that it had missed, and was behind again by then."""
    run, node = RolloutRun(tmp_path, dataflow__max_staleness=9), tmp_path / "node"

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            for step in (1, 2, 3):
                run.publish(step)
            copy = WeightsMirror(node, origin, one_at_a_time=in_place)
            steps = fetched(copy, monkeypatch, lambda step: run.publish(4) if step == 3 else None)
            await copy.update()
            assert steps == expected
            assert committed_steps(node / "checkpoints" / "agent") == sorted(expected)

    asyncio.run(scenario())


def test_what_an_evaluation_needs_is_fetched_though_an_engine_holds_one_version(tmp_path):
    run, node = RolloutRun(tmp_path, dataflow__max_staleness=9), tmp_path / "node"

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            for step in (1, 2, 3):
                run.publish(step)
            ask = origin.ask

            async def pinning(path):
                answer = await ask(path)
                return answer | {"pinned": {"agent": [1]}} if path == "/files/weights" else answer

            origin.ask = pinning
            await WeightsMirror(node, origin, one_at_a_time=("agent",)).update()
            assert committed_steps(node / "checkpoints" / "agent") == [1, 3]

    asyncio.run(scenario())


@pytest.mark.parametrize("comes", [False, True], ids=["while it comes", "as it has come"])
def test_a_trainer_that_goes_back_while_a_version_comes_is_noticed(tmp_path, monkeypatch, comes):
    """Such a version was committed, and until then the one before it was played as if it were still there."""
    run, node = RolloutRun(tmp_path, dataflow__max_staleness=9), tmp_path / "node"
    monkeypatch.setattr(mirror, "_LOOK_EVERY_S", 3600 if comes else 0.05)

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            copy = WeightsMirror(node, origin)
            run.publish(1)
            await copy.update()
            run.publish(2)
            unpack = copy._unpack

            async def going_back(policy, step, base, unfinished):
                size_bytes = await unpack(policy, step, base, unfinished)
                for lost in (1, 2):
                    shutil.rmtree(run.folder / "checkpoints" / "agent" / str(lost))
                await asyncio.sleep(0 if comes else 3600)
                return size_bytes

            monkeypatch.setattr(copy, "_unpack", going_back)
            await asyncio.wait_for(copy.update(), 60)
            assert committed_steps(node / "checkpoints" / "agent") == [0]

    asyncio.run(scenario())


def test_a_full_disk_of_a_node_makes_nothing_come_twice(tmp_path, monkeypatch):
    run, node = RolloutRun(tmp_path), tmp_path / "node"

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            copy = WeightsMirror(node, origin)

            def full(packed, known, folder):
                raise OSError(28, "No space left on device")

            with monkeypatch.context() as patched:
                patched.setattr(mirror, "open_folder", full)
                for _ in range(3):
                    with pytest.raises(OSError, match="No space left"):
                        await copy.update()
            (part,) = (node / "checkpoints" / "agent").glob(".part-*")
            (pack,) = part.glob("*.pack")
            size_bytes = pack.stat().st_size
            assert origin.received_bytes == size_bytes
            (part / ".handed_over.killed").mkdir()
            (node / "checkpoints" / "agent" / ".gone-7").mkdir()
            await copy.update()
            assert origin.received_bytes == size_bytes
            (version,) = (node / "checkpoints" / "agent").iterdir()
            assert {path.name for path in version.iterdir()} == {HANDED_OVER, "commit_success.txt"}

    asyncio.run(scenario())


def test_files_of_a_base_may_have_any_name(tmp_path):
    """Signs that mean something in an address, and a compressed file beside another, which aiohttp sends for it."""
    run = RolloutRun(tmp_path)
    for name in ("figure #1.png", "a?b.txt", "50%25.txt", "a b+c.txt", "größe.txt", "tokenizer_config.json.gz"):
        (run.model / name).write_bytes(gzip.compress(name.encode()))
    (run.model / "sub dir").mkdir()
    (run.model / "sub dir" / "x#y.txt").write_text("x")

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            config = run.config.copy_and_resolve_references()
            config.model.path = str(tmp_path / "mine")
            await fetch_bases(resolve(config), origin)
        contents = [
            {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            for folder in (run.model, tmp_path / "mine")
        ]
        assert contents[0] == contents[1]

    asyncio.run(scenario())


class Middlebox:
    """Stands before a dataflow: passes everything on, and one file by `send`."""

    def __init__(self, url: str, name: str):
        self.url, self.name, self.asked = url, name, []

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        server = TestServer(app)
        await server.start_server()
        yield str(server.make_url("")).rstrip("/")
        await server.close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}{request.path}", headers=request.headers) as got,
        ):
            body = await got.read()
        if not request.path.endswith(self.name):
            return web.Response(body=body, status=got.status, content_type="application/msgpack")
        self.asked.append(request.headers["Range"])
        response = web.StreamResponse(status=got.status, headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        await self.send(request, response, body)
        return response

    async def send(self, request: web.Request, response: web.StreamResponse, body: bytes) -> None:
        raise NotImplementedError


class Cut(Middlebox):
    """Of one file it passes on half, then hangs up, once."""

    async def send(self, request: web.Request, response: web.StreamResponse, body: bytes) -> None:
        if len(self.asked) > 1:
            await response.write(body)
            return
        await response.write(body[: len(body) // 2])
        assert request.transport is not None
        request.transport.close()


class Shut(Middlebox):
    """Of one file nothing comes."""

    async def send(self, request: web.Request, response: web.StreamResponse, body: bytes) -> None:
        assert request.transport is not None
        request.transport.close()


class Narrow(Middlebox):
    """One file comes a little at a time, over two seconds."""

    async def send(self, request: web.Request, response: web.StreamResponse, body: bytes) -> None:
        for start in range(0, len(body), len(body) // 20):
            await response.write(body[start : start + len(body) // 20])
            await asyncio.sleep(0.1)


NODE = """
import asyncio, sys
from pathlib import Path
from flowjax.run import read_run
from flowjax.weights.mirror import fetch_bases
from flowjax.weights.source import source

async def fetch():
    async with source(sys.argv[2], "") as origin:
        await fetch_bases(read_run(Path(sys.argv[1])), origin)

print("ready", flush=True)
sys.stdin.readline()
asyncio.run(fetch())
"""


def test_two_nodes_of_a_machine_fetch_a_base_once(tmp_path):
    """Processes of their own, as nodes are; they begin at the same moment."""
    run, node = RolloutRun(tmp_path), tmp_path / "node"
    content = bytes(range(256)) * 4096
    (run.model / "merges.txt").write_bytes(content)
    config = run.config.copy_and_resolve_references()
    config.model.path = str(tmp_path / "models" / "mine")
    save_run(config, node)

    async def scenario():
        async with run.servers() as servers:
            narrow = Narrow(servers.dataflow_url, "merges.txt")
            async with narrow.serving() as url:
                command = (sys.executable, "-W", "ignore", "-c", NODE, str(node), url)
                start = partial(asyncio.create_subprocess_exec, stdin=PIPE, stdout=PIPE)
                nodes = [await start(*command) for _ in range(2)]
                for each in nodes:
                    assert each.stdout is not None and await each.stdout.readline() == b"ready\n"
                await asyncio.gather(*(each.communicate(b"\n") for each in nodes))
            assert [each.returncode for each in nodes] == [0, 0]
            assert len(narrow.asked) == len(set(narrow.asked)) == 16, "each piece once"
            assert (tmp_path / "models/mine/merges.txt").read_bytes() == content

    asyncio.run(scenario())


def test_a_base_whose_transfer_is_cut_goes_on_where_it_was(tmp_path):
    run, content = RolloutRun(tmp_path), random.Random(0).randbytes(1024 * 1024)
    (run.model / "weights.bin").write_bytes(content)

    async def scenario():
        async with run.servers() as servers:
            cut = Cut(servers.dataflow_url, "weights.bin")
            config = run.config.copy_and_resolve_references()
            config.model.path = str(tmp_path / "elsewhere" / "model")
            async with cut.serving() as url, source(url, "") as origin:
                await fetch_bases(resolve(config), origin)
            assert sorted(cut.asked)[0] == "bytes=0-65535" and len(cut.asked) == len(set(cut.asked)) == 16 + 1
            assert {path.name: path.read_bytes() for path in Path(config.model.path).iterdir()} == {
                path.name: path.read_bytes() for path in run.model.iterdir()
            }

    asyncio.run(scenario())


def test_a_base_that_stops_coming_is_given_up_and_no_half_of_it_counts(tmp_path):
    run = RolloutRun(tmp_path)
    (run.model / "weights.bin").write_bytes(bytes(1024 * 1024))

    async def scenario():
        async with run.servers() as servers:
            shut = Shut(servers.dataflow_url, "weights.bin")
            config = run.config.copy_and_resolve_references()
            config.model.path = str(tmp_path / "elsewhere" / "model")
            async with shut.serving() as url, source(url, "") as origin:
                with pytest.raises(aiohttp.ClientError):
                    await fetch_bases(resolve(config), origin)
                assert not Path(config.model.path).exists(), "half a model is none"

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def sending(
    content: bytes, cut: Callable[[int, int], int | None] = lambda start, end: None, *, parts: bool = True
):
    """A source of one file, whose bytes `start` to `end` stop after as many as `cut` says."""

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = request.http_range if parts else slice(0, len(content))
        start, end = asked.start or 0, min(asked.stop or len(content), len(content))
        response = web.StreamResponse(status=206 if parts else 200, headers={"Content-Length": str(end - start)})
        await response.prepare(request)
        if (after := cut(start, end)) is None:
            await response.write(content[start:end])
            return response
        await response.write(content[start : start + after])
        assert request.transport is not None
        request.transport.close()
        return response

    app = web.Application()
    app.router.add_get("/file", answer)
    async with TestServer(app) as server, source(str(server.make_url("")).rstrip("/"), "") as origin:
        yield origin


@given(data=st.data(), size_bytes=st.integers(0, 300_000), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_a_file_comes_once_however_often_its_transfer_is_cut(data, size_bytes, seed):
    """Connections break anywhere, and the fetch begins anew: each byte has come once when it is whole."""
    content, rng = random.Random(seed).randbytes(size_bytes), random.Random(seed)
    breaks = data.draw(st.integers(0, 12))

    def cut(start: int, end: int) -> int | None:
        nonlocal breaks
        breaks -= 1
        return rng.randrange(end - start) if breaks >= 0 else None

    async def scenario(folder: Path) -> None:
        async with sending(content, cut) as origin:
            target, digest = folder / "deep" / "x.bin", hashlib.sha256(content).hexdigest()
            for _ in range(14):
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                    await origin.fetch("/file", target, size_bytes, digest)
                    break
            assert target.read_bytes() == content and origin.received_bytes == size_bytes
            assert list(target.parent.iterdir()) == [target], "nothing else is left"

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


# The last one is half a line with a whole one behind it: nobody has the bytes between.
@pytest.mark.parametrize(
    "left", [b"0 65536\n131072 2", b"0 65536 1310", b"\0\0\0", b"", b"0 65536\n131131072 196608\n"]
)
def test_notes_that_a_power_cut_has_spoilt_are_not_believed(tmp_path, left):
    content, target = random.Random(0).randbytes(200_000), tmp_path / "x.bin"

    async def scenario():
        async with sending(content) as origin:
            target.with_name(".x.bin.part").write_bytes(bytes(200_000))
            target.with_name(".x.bin.came").write_bytes(left)
            digest = hashlib.sha256(content).hexdigest()
            with contextlib.suppress(OriginError):  # notes that can be read and are wrong
                await origin.fetch("/file", target, len(content), digest)
            await origin.fetch("/file", target, len(content), digest)
            assert target.read_bytes() == content

    asyncio.run(scenario())


def test_who_sends_no_pieces_is_named(tmp_path):
    small, large = bytes(60_000), bytes(70_000)

    async def scenario():
        async with sending(small, parts=False) as origin:
            await origin.fetch("/file", tmp_path / "small", len(small), hashlib.sha256(small).hexdigest())
        async with sending(large, parts=False) as origin:
            with pytest.raises(OriginError, match=r"/file cannot be had in pieces \(HTTP 200\)"):
                await origin.fetch("/file", tmp_path / "large", len(large), hashlib.sha256(large).hexdigest())

    asyncio.run(scenario())


def test_a_flipped_bit_is_found_and_that_file_comes_again(tmp_path, monkeypatch):
    run, node = RolloutRun(tmp_path), tmp_path / "node"
    flipped = []

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            write = _Coming.write

            def flip(coming, content, at):
                if not flipped and len(content) > 10:
                    flipped.append(at)
                    content = content[:5] + bytes([content[5] ^ 1]) + content[6:]
                return write(coming, content, at)

            monkeypatch.setattr(_Coming, "write", flip)
            copy = WeightsMirror(node, origin)
            with pytest.raises(OriginError, match=r"did not come as it is there"):
                await copy.update()
            assert committed_steps(node / "checkpoints" / "agent") == []
            await copy.update()
            assert level(node, 0) == 0.0

    asyncio.run(scenario())


def test_nothing_but_what_is_listed_can_be_had(tmp_path):
    run = RolloutRun(tmp_path)
    (tmp_path / "secret").write_text("x")

    async def scenario():
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            for path in (
                "/files/bases/base/../../secret", "/files/bases/base/%2e%2e/secret", "/files/bases/other",
                "/files/weights/agent/7", "/files/weights/agent/0/optimizer/_METADATA",
                "/files/packs/..%2Fconfig.json", "/files/packs/x.pack", "/files/weights/../x",
                f"/files/weights/agent/{'1' * 5000}",
                "/files/bases/base/%2Fetc%2Fpasswd", "/files/weights/agent/-1", "/files/weights/agent/0x1",
            ):  # fmt: skip
                with pytest.raises(OriginError, match=r"HTTP 4\d\d"):
                    await origin.ask(path)

    asyncio.run(scenario())


def test_a_list_that_names_files_elsewhere_is_refused(tmp_path, monkeypatch):
    async def scenario():
        async with source("http://127.0.0.1:9", "") as origin:

            async def ask(path):
                return {"files": [["../../outside", 3, "00"]]}

            monkeypatch.setattr(origin, "ask", ask)
            with pytest.raises(OriginError, match="lies outside"):
                await origin.copy("/files/bases/base", tmp_path / "model")

    asyncio.run(scenario())


def test_the_copy_goes_on_while_the_run_is_away(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mirror, "_LOOK_EVERY_S", 0.02)
    run, node = RolloutRun(tmp_path), tmp_path / "node"

    async def scenario():
        async with source("http://127.0.0.1:9", "") as origin:
            following = asyncio.create_task(WeightsMirror(node, origin).follow())
            await asyncio.sleep(0.2)
            assert not following.done()
            async with run.servers() as servers:
                origin.url = servers.dataflow_url
                async with asyncio.timeout(60):
                    while committed_steps(node / "checkpoints" / "agent") != [0]:
                        await asyncio.sleep(0.02)
            following.cancel()

    asyncio.run(scenario())


def test_what_answers_there_may_be_something_else(tmp_path):
    run = RolloutRun(tmp_path)

    async def scenario():
        async with run.servers() as servers, source(servers.engine.url, "") as origin:
            with pytest.raises(OriginError, match=r"refused|no dataflow"):
                await origin.ask("/run")
        async with run.servers() as servers, source(servers.dataflow_url, "") as origin:
            described = await origin.ask("/run")
            assert json.loads(described["config"])["seed"] == run.config.seed and described["bases"] == ["base"]

    asyncio.run(scenario())
