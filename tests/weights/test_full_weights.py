"""Full weights reach a real vLLM in place: every answer is of exactly the version that the engine names."""

import asyncio
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from flowjax.config import default_config
from flowjax.models.config import read_config
from flowjax.models.hf import load_decoder, save_decoder
from flowjax.models.nano import create_nano
from flowjax.models.shape import ModelError
from flowjax.rollout.client import EngineClient, EngineError, SamplingOptions, UnknownModel
from flowjax.rollout.engine_side.flowjax_served_weights import ServedWeights, check_folder
from flowjax.rollout.sidecar import engine_command
from flowjax.run import resolve
from flowjax.weights.follow import Follower
from flowjax.weights.hand_over import decoder_of, hand_over, model_name
from flowjax.weights.publish import Checkpoints, read_adapter
from flowjax.workflows import served_version

PROMPT_TOKENS = 300  # more than a block of the prefix cache


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = default_config()
    config.model.path = str(tmp_path_factory.mktemp("full") / "model")
    config.policy.train, config.engine.dtype = "full", "float32"
    config.engine.max_model_tokens, config.engine.kv_cache_bytes = 512, 64 * 1024**2
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


def test_a_folder_that_is_cut_off_is_refused_before_the_engine_sees_it(tmp_path):
    with pytest.raises(ValueError, match="no safetensors file"):
        check_folder(tmp_path)
    save_file({"x": np.ones(100, np.float32)}, tmp_path / "model.safetensors")
    check_folder(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=f"has {len(whole) - 5} bytes and should have {len(whole)}"):
        check_folder(tmp_path)


def test_an_engine_loads_a_version_made_anew_though_it_serves_that_number(tmp_path):
    save_file({"x": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    calls, served = [], SimpleNamespace(name="agent@2")

    class Engine:
        async def collective_rpc(self, method, args):
            calls.append((method, *args))

        async def reset_prefix_cache(self):
            calls.append("emptied")

    models = SimpleNamespace(base_model_paths=[served])
    app = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models, engine_client=Engine()))
    scope = {"type": "http", "method": "POST", "path": "/v1/load_weights", "headers": [], "app": app}

    async def load(name: str) -> None:
        async def receive():
            return {"type": "http.request", "body": json.dumps({"name": name, "path": str(tmp_path)}).encode()}

        async def send(message):
            assert message.get("status", 200) == 200

        await ServedWeights(None)(scope, receive, send)

    asyncio.run(load("agent@2"))
    assert not calls, "it was sent again because its answer was lost"
    asyncio.run(load(model_name("agent", 2, "1732")))
    assert served.name == "agent@2.1732" and calls == [("flowjax_load_folder", str(tmp_path)), "emptied"]


@pytest.mark.integration
def test_every_answer_of_vllm_is_of_the_version_it_names(config, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = resolve(config)
    argv, env = engine_command(run, run.engines[0], port)
    with (tmp_path / "engine.log").open("ab") as log:
        process = subprocess.Popen(
            argv, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        completions, prompts = asyncio.run(_answers(config, tmp_path, port, process))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    versions = {served_version(completion.model) for completion in completions}
    assert versions == {("agent", version) for version in range(4)}
    models = {version: _model(config, version) for _, version in versions}
    for prompt, completion in list(zip(prompts, completions, strict=True))[:: max(1, len(prompts) // 40)]:
        ours = models[served_version(completion.model)[1]](prompt, completion.sampled_ids)
        np.testing.assert_allclose(completion.logprobs, ours, atol=2e-4)
    others = models[0](prompts[-1], completions[-1].sampled_ids)
    assert np.abs(np.asarray(completions[-1].logprobs) - others).max() > 0.01


async def _answers(config, folder: Path, port: int, process: subprocess.Popen):
    """Completions sampled while version after version is published."""
    checkpoints = Checkpoints(folder / "checkpoints" / "agent")
    sampling = SamplingOptions(1.0, 24)
    completions, prompts, rng = [], [], np.random.default_rng(0)
    shared = rng.integers(3, 40, (4, PROMPT_TOKENS))  # the same prompts again and again: the cache must not keep them
    async with EngineClient(f"http://127.0.0.1:{port}", request_timeout_s=240) as engine:
        while not await engine.healthy():
            assert process.poll() is None, (folder / "engine.log").read_text()[-3000:]
            await asyncio.sleep(0.2)
        follower = Follower([engine], folder, {"agent": hand_over(resolve(config).policies["agent"])}, max_staleness=1)
        following = asyncio.create_task(follower.run())
        published = 0

        async def play(prompt):
            while published < 4 or follower.current("agent")[0] < 3 or played[-1] < 2:
                try:
                    completion = await engine.generate(follower.current("agent")[1], prompt.tolist(), sampling)
                except UnknownModel as error:
                    follower.recheck(str(error))
                    await follower.serve_current("agent")
                    continue
                completions.append(completion)
                prompts.append(prompt)
                played[-1] += completion.model == "agent@3"

        played = [0]
        checkpoints.save(0, weights(config, 0), {}, {})
        published = 1
        await follower.ready()
        players = [asyncio.create_task(play(prompt)) for prompt in shared]
        for version in range(1, 4):
            await asyncio.sleep(0.5)
            checkpoints.save(version, weights(config, version), {}, {})
            published += 1
            assert await follower.changed("agent", version - 1) == version
        await asyncio.gather(*players)
        assert await engine.models() == {"agent@3"}
        (folder / "empty").mkdir()
        with pytest.raises(EngineError, match="no safetensors file"):
            await engine.load_weights("agent@9", folder / "empty")
        assert await engine.models() == {"agent@3"} and await engine.healthy()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    checkpoints.close()
    return completions, prompts


def _model(config, version: int):
    decoder = load_decoder(config.model.path, dtype=jnp.float32)
    nnx.update(decoder, weights(config, version))

    def logprobs(prompt, sampled_ids) -> np.ndarray:
        tokens = np.concatenate([prompt, sampled_ids])[None]
        tokens = np.pad(tokens, ((0, 0), (0, PROMPT_TOKENS + 24 - tokens.shape[1])))
        hidden = decoder(jnp.asarray(tokens), jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
        table = jax.nn.log_softmax(hidden[0] @ decoder.head())
        places = PROMPT_TOKENS + np.arange(len(sampled_ids))
        return np.asarray(table[places - 1, np.asarray(sampled_ids)])

    return logprobs
