"""Full weights reach a real vLLM in place: every token is of exactly the version that the engine names."""

import asyncio
import errno
import functools
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file
from transformers import DynamicCache, Qwen3ForCausalLM

from flowjax.config import default_config
from flowjax.models.config import read_config
from flowjax.models.hf import load_decoder, save_decoder
from flowjax.models.nano import create_nano
from flowjax.models.shape import ModelError
from flowjax.rollout import client
from flowjax.rollout.client import (
    EngineClient,
    EngineError,
    EngineReply,
    Partial,
    SamplingOptions,
    UnknownModel,
    read_event,
)
from flowjax.rollout.engine_side.flowjax_served_weights import check_folder
from flowjax.rollout.sidecar import engine_command
from flowjax.run import resolve
from flowjax.weights.follow import Follower
from flowjax.weights.hand_over import FullHandOver, decoder_of, hand_over, make_folder, model_name
from flowjax.weights.publish import HANDED_OVER, CheckpointError, Checkpoints, committed_steps, read_adapter
from flowjax.workflows import served_version

PROMPT_TOKENS = 300  # more than a block of the prefix cache


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = default_config()
    config.model.path = str(tmp_path_factory.mktemp("full") / "model")
    config.policy.train, config.engine.dtype = "full", "float32"
    config.engine.max_model_tokens, config.engine.kv_cache_bytes = 2048, 128 * 1024**2
    words = [f"word{index}" for index in range(40)]
    create_nano(words, Path(config.model.path), key=jax.random.key(0), hidden_size=32, layers=2)
    save_decoder(load_decoder(config.model.path, dtype=jnp.float32), config.model.path)
    return config


def weights(config, version: int) -> nnx.State:
    """The base's parameters, moved a good way in a direction of the version's own."""
    state = nnx.state(load_decoder(config.model.path, dtype=jnp.float32), nnx.Param)
    keys = iter(jax.random.split(jax.random.key(version), len(jax.tree.leaves(state))))
    return jax.tree.map(lambda leaf: leaf + 0.2 * version * jax.random.normal(next(keys), leaf.shape), state)


def test_a_checkpoint_becomes_the_same_model_again(config, tmp_path):
    state = weights(config, 1)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {}, {})
    arrays = read_adapter(tmp_path / "checkpoints", 1)
    form = hand_over(resolve(config).policies["agent"])
    form.write(tmp_path / "agent@1", arrays)
    assert form.in_place
    loaded = nnx.state(load_decoder(tmp_path / "agent@1", dtype=jnp.float32), nnx.Param)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)
    arrays["layers"].pop("q_proj")
    with pytest.raises(ModelError, match="the checkpoint's q_proj is missing: it belongs to another model"):
        decoder_of(read_config(Path(config.model.path)), arrays)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_are_given_what_the_trainer_wrote_and_it_is_what_its_arrays_make(config, tmp_path, dtype):
    """Two moves of the served bytes from the trainer to the engine: written once, read once, linked in between."""
    form = FullHandOver(read_config(Path(config.model.path)), dtype)
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights(config, 1))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {}, {}, hand_over=form.writer(state))
        state = jax.tree.map(lambda leaf: leaf * 0, state)  # as a trainer that goes on at once
        checkpoints.wait()
        made = tmp_path / "checkpoints" / "1" / HANDED_OVER
        make_folder(form, tmp_path / "checkpoints", 1, tmp_path / "agent@1")
        form.write(tmp_path / "of the arrays", read_adapter(tmp_path / "checkpoints", 1))
        names = {path.name for path in (tmp_path / "agent@1").iterdir()}
        assert names == {path.name for path in (tmp_path / "of the arrays").iterdir()} and "config.json" in names
        for name in names:
            assert (made / name).read_bytes() == (tmp_path / "of the arrays" / name).read_bytes()
            assert (made / name).samefile(tmp_path / "agent@1" / name)
        restored = checkpoints.restore(1, adapter=state, optimizer={})
        assert jax.tree.leaves(restored.adapter)[0].any()
    assert committed_steps(tmp_path / "checkpoints") == [1]


def test_a_folder_that_cannot_be_made_commits_no_version(config, tmp_path):
    def fails(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = weights(config, 1)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoints.save(1, state, {}, {}, hand_over=fails)
            checkpoints.wait()
        assert checkpoints.committed_steps() == []
        form = FullHandOver(read_config(Path(config.model.path)), "float32")
        checkpoints.save(1, state, {}, {}, hand_over=form.writer(state))
        checkpoints.wait()
        assert checkpoints.committed_steps() == [1]


def test_a_folder_that_is_cut_off_is_refused_before_the_engine_sees_it(tmp_path):
    with pytest.raises(ValueError, match="no safetensors file"):
        check_folder(tmp_path)
    save_file({"x": np.ones(100, np.float32)}, tmp_path / "model.safetensors")
    check_folder(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for start in (b"", b"no header of any length"):
        (tmp_path / "model.safetensors").write_bytes(start)
        with pytest.raises(ValueError):
            check_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=f"has {len(whole) - 5} bytes and should have {len(whole)}"):
        check_folder(tmp_path)


@pytest.fixture(scope="module")
def served(config, tmp_path_factory):
    """A real vLLM at a URL, and the folders of three versions, far from each other."""
    folder = tmp_path_factory.mktemp("served")
    form = hand_over(resolve(config).policies["agent"])
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for version in range(3):
            checkpoints.save(version, weights(config, version), {}, {})
    for version in range(3):
        form.write(folder / model_name("agent", version), read_adapter(folder / "checkpoints", version))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = resolve(config)
    argv, env = engine_command(run, run.engines[0], port)
    with (folder / "engine.log").open("ab") as log:
        process = subprocess.Popen(
            argv, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(_healthy(url, process, folder / "engine.log"))
        yield url, folder
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _healthy(url: str, process: subprocess.Popen, log: Path) -> None:
    async with EngineClient(url) as engine:
        while not await engine.healthy():
            assert process.poll() is None, log.read_text()[-3000:]
            await asyncio.sleep(0.2)


def reference(folder: Path, prompt: Sequence[int], reply: EngineReply) -> np.ndarray:
    """Log-probs of a reply by transformers, its weights exchanged where the engine says, on the cache that is there:
    the keys and values of prompt and reply, each by the weights that read it. The last token before an exchange is read
    by the new weights, which sample what follows."""
    tokens, cache, found = torch.tensor([[*prompt, *reply.sampled_ids]]), DynamicCache(), []
    begin = 0
    for end, name in _reads(len(prompt), reply):
        model = _transformer(folder / name)
        with torch.no_grad():
            logits = model(tokens[:, begin:end], past_key_values=cache, use_cache=True).logits
        found.append(torch.log_softmax(logits[0], -1))
        begin = end
    table = torch.cat(found)[len(prompt) - 1 :]
    return table[torch.arange(len(reply.sampled_ids)), torch.tensor(reply.sampled_ids)].numpy()


@functools.cache
def _transformer(folder: Path) -> Any:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _reads(prompt_tokens: int, reply: EngineReply) -> list[tuple[int, str]]:
    """Ends of what each weights have read: all but the token that they sampled last."""
    ends = prompt_tokens - 1 + np.cumsum([tokens for _, tokens in reply.spans])
    return [(int(end), name) for end, (name, _) in zip(ends, reply.spans, strict=True)]


@pytest.fixture
def endless(monkeypatch):
    """Replies end at their limit alone, as those of a model that thinks for minutes."""
    body = client.completion_body
    monkeypatch.setattr(
        client, "completion_body", lambda *args, **options: body(*args, **options) | {"ignore_eos": True}
    )


async def _watch(session, url: str, prompt, sampling: SamplingOptions, partial: Partial) -> None:
    """Ask for a completion, of which `partial` is what has come so far."""
    body = client.completion_body("agent@0", sampling, [prompt], stream=True)
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            for choice in (read_event(line) or {"choices": ()})["choices"]:
                partial.extend(choice, "agent@0")


@pytest.mark.integration
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_replies_under_way_survive_two_swaps_of_a_real_vllm(served, endless, stream):
    url, folder = served
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 40, (6, PROMPT_TOKENS)).tolist()
    long, short = SamplingOptions(1.0, 700), SamplingOptions(1.0, 8)

    async def play() -> tuple[list[EngineReply], list[EngineReply], list[EngineReply]]:
        async with EngineClient(url, stream=stream) as engine, aiohttp.ClientSession() as session:
            await engine.load_weights("agent@0", folder / "agent@0")
            first = [await engine.generate("agent@0", prompt, short) for prompt in prompts]
            replies = [asyncio.create_task(engine.generate("agent@0", prompt, long)) for prompt in prompts[:5]]
            watched = Partial()
            seen = asyncio.create_task(_watch(session, url, prompts[5], replace(long, temperature=0.0), watched))
            met = []
            for version in (1, 2):
                while len(watched.sampled_ids) < 100 * version:
                    await asyncio.sleep(0.01)
                await engine.load_weights(f"agent@{version}", folder / f"agent@{version}")
                # Neither the load nor what comes after it has waited for the replies under way.
                met += [await engine.generate(f"agent@{version}", prompt, short) for prompt in prompts]
                assert not seen.done() and not any(reply.done() for reply in replies)
                with pytest.raises(UnknownModel):
                    await engine.generate(f"agent@{version - 1}", prompts[0], short)
            await seen
            return [*await asyncio.gather(*replies), watched.completion()], first, met

    replies, first, met = asyncio.run(play())
    for prompt, reply in zip(prompts, replies, strict=True):
        assert [name for name, _ in reply.spans] == ["agent@0", "agent@1", "agent@2"]
        assert sum(tokens for _, tokens in reply.spans) == len(reply.sampled_ids) == 700
        np.testing.assert_allclose(reply.logprobs, reference(folder, prompt, reply), atol=5e-4)
        # A label that is wrong by one token is seen: the weights are far from each other.
        wrong = replace(
            reply, spans=(("agent@0", reply.spans[0][1] + 1), ("agent@1", reply.spans[1][1] - 1), reply.spans[2])
        )
        assert np.abs(np.asarray(reply.logprobs) - reference(folder, prompt, wrong)).max() > 0.01
    # What began between the loads is of one version, prompt and all, though older weights had read the same prompt.
    for index, reply in enumerate([*first, *met]):
        ((name, _),) = reply.spans
        assert name == f"agent@{index // len(prompts)}"
        np.testing.assert_allclose(reply.logprobs, reference(folder, prompts[index % len(prompts)], reply), atol=5e-4)
    # The greedy one begins as the first weights alone would have gone on.
    greedy, before = replies[-1], replies[-1].spans[0][1]
    asked = torch.tensor([prompts[-1]])
    alone = _transformer(folder / "agent@0").generate(
        asked, do_sample=False, min_new_tokens=before, max_new_tokens=before
    )
    assert greedy.sampled_ids[:before] == tuple(alone[0, PROMPT_TOKENS:].tolist())


@pytest.mark.integration
def test_a_pinned_reply_ends_before_the_swap_and_the_others_go_on(served, endless):
    url, folder = served
    prompts = np.random.default_rng(1).integers(3, 40, (2, PROMPT_TOKENS)).tolist()

    async def play() -> list[EngineReply]:
        async with EngineClient(url) as engine, aiohttp.ClientSession() as session:
            await engine.load_weights("agent@0", folder / "agent@0")
            watched = Partial()
            seen = asyncio.create_task(_watch(session, url, prompts[0], SamplingOptions(1.0, 1000), watched))
            pinned = asyncio.create_task(engine.generate("agent@0", prompts[1], SamplingOptions(1.0, 300), pinned=True))
            while len(watched.sampled_ids) < 20:
                await asyncio.sleep(0.01)
            await engine.load_weights("agent@1", folder / "agent@1")
            assert pinned.done() and not seen.done()
            await seen
            return [pinned.result(), watched.completion()]

    pinned, other = asyncio.run(play())
    assert pinned.spans == (("agent@0", 300),)
    assert [name for name, _ in other.spans] == ["agent@0", "agent@1"] and other.spans[0][1] >= 20
    for prompt, reply in zip(reversed(prompts), (pinned, other), strict=True):
        np.testing.assert_allclose(reply.logprobs, reference(folder, prompt, reply), atol=5e-4)


@pytest.mark.integration
def test_every_token_of_vllm_is_of_the_version_it_names(config, served, tmp_path):
    url, _ = served
    replies, prompts = asyncio.run(_replies(config, tmp_path, url))
    assert {served_version(name) for reply in replies for name, _ in reply.spans} == {("agent", v) for v in range(4)}
    crossed = [index for index, reply in enumerate(replies) if len(reply.spans) > 1]
    for index in sorted({*crossed, *range(0, len(replies), max(1, len(replies) // 40))}):
        ours = reference(tmp_path / "adapters", prompts[index], replies[index])
        np.testing.assert_allclose(replies[index].logprobs, ours, atol=5e-4)


async def _replies(config, folder: Path, url: str) -> tuple[list[EngineReply], list[list[int]]]:
    """Replies sampled while version after version is published."""
    checkpoints = Checkpoints(folder / "checkpoints" / "agent", keep=4)
    sampling = SamplingOptions(1.0, 24)
    replies, prompts, rng = [], [], np.random.default_rng(0)
    shared = rng.integers(3, 40, (4, PROMPT_TOKENS))  # the same prompts again and again: the cache must not keep them
    async with EngineClient(url, request_timeout_s=240) as engine:
        follower = Follower([engine], folder, {"agent": hand_over(resolve(config).policies["agent"])}, max_staleness=3)
        following = asyncio.create_task(follower.run())
        newest = 0

        async def play(prompt):
            while newest < 20:
                try:
                    reply = await engine.generate(follower.current("agent")[1], prompt.tolist(), sampling)
                except UnknownModel as error:
                    follower.recheck(str(error))
                    await follower.serve_current("agent")
                    continue
                replies.append(reply)
                prompts.append(prompt.tolist())
                counted(reply)

        def counted(reply: EngineReply) -> None:
            nonlocal newest
            newest += served_version(reply.spans[-1][0]) == ("agent", 3)

        checkpoints.save(0, weights(config, 0), {}, {})
        await follower.ready()
        players = [asyncio.create_task(play(prompt)) for prompt in shared]
        for version in range(1, 4):
            while not any(served_version(name) == ("agent", version - 1) for each in replies for name, _ in each.spans):
                assert not any(player.done() for player in players)
                await asyncio.sleep(0.05)  # until a reply has tokens of the version before, however busy the machine is
            checkpoints.save(version, weights(config, version), {}, {})
            assert await follower.changed("agent", version - 1) == version
        await asyncio.gather(*players)
        assert {served_version(name) for name in await engine.models()} == {("agent", 3)}
        (folder / "empty").mkdir()
        with pytest.raises(EngineError, match="no safetensors file"):
            await engine.load_weights("agent@9", folder / "empty")
        assert {served_version(name) for name in await engine.models()} == {("agent", 3)} and await engine.healthy()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    checkpoints.close()
    return replies, prompts
