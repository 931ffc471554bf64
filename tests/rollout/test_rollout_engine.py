"""A real vLLM server behind the client: exact log-probabilities, adapters side by side, a crash in mid-request."""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowjax.config import default_config
from flowjax.launch.supervisor import Unhealthy, answers
from flowjax.models.decoder import set_adapter
from flowjax.models.hf import load_decoder
from flowjax.models.lora import Lora, adapter_from_peft
from flowjax.models.nano import create_nano
from flowjax.records import TokenRow
from flowjax.rollout.client import EngineClient, EngineError, SamplingOptions, UnknownModel
from flowjax.rollout.sidecar import engine_command
from flowjax.run import Run, resolve
from flowjax.trainer.batch import pack
from flowjax.trainer.update import sampled_logprobs

pytestmark = [pytest.mark.integration, pytest.mark.engine]

EOS = 1
ADAPTERS = ("agent@3", "agent@4")
START_TIMEOUT_S = 240.0


class Server:
    """One vLLM process group on a fixed port."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = default_config()
        self.config.model.path = str(folder / "base")
        self.config.engine.dtype = "float32"
        self.config.engine.max_model_tokens = 128
        self.config.engine.kv_cache_bytes = 128 * 1024**2
        self.config.policy.lora.rank = 4
        self.config.dataflow.max_staleness = 0  # as many adapter slots as adapters, so that none stays empty
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "logs" / "engine.log"
        self.log.parent.mkdir()
        self.process: subprocess.Popen | None = None

    def run(self) -> Run:
        return resolve(self.config, self.folder / "run")

    def launch(self) -> None:
        run = self.run()
        argv, env = engine_command(run, run.engines[0], self.port)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    async def up(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while not await self.well():
            assert self.process is not None and self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            await asyncio.sleep(0.2)

    async def well(self) -> bool:
        with contextlib.suppress(Unhealthy):
            return await answers("127.0.0.1", self.port, "/health")
        return False

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def client(self, **options) -> EngineClient:
        return EngineClient(self.url, log=self.log, **options)


def _make_adapter(base: Path, folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    adapted.save_pretrained(str(folder))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    create_nano([f"w{i}" for i in range(61)], folder / "base", key=jax.random.key(0), hidden_size=64, layers=2)
    for seed, name in enumerate(ADAPTERS):
        _make_adapter(folder / "base", folder / name, seed)
    server = Server(folder)
    server.launch()
    try:
        asyncio.run(_up_with_adapters(server))
        yield server
    finally:
        server.kill()


async def _up_with_adapters(server: Server) -> None:
    await server.up()
    async with server.client() as client:
        for name in ADAPTERS:
            await client.load_adapter(name, server.folder / name)


@pytest.fixture(scope="module")
def reference(server):
    """Log-probabilities of a completion by transformers and PEFT."""
    models: dict[str, torch.nn.Module] = {
        "base": AutoModelForCausalLM.from_pretrained(server.folder / "base", dtype=torch.float32)
    }
    for name in ADAPTERS:
        base = AutoModelForCausalLM.from_pretrained(server.folder / "base", dtype=torch.float32)
        models[name] = PeftModel.from_pretrained(base, server.folder / name)

    def logprobs(model: str, prompt: list[int], sampled: tuple[int, ...], temperature: float) -> np.ndarray:
        with torch.no_grad():
            logits = models[model](torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits / temperature, dim=-1)
        return table[torch.arange(len(sampled)), torch.tensor(sampled)].numpy()

    return logprobs


def _prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 64, random.integers(5, 60)).tolist() for _ in range(count)]


async def _ask(server: Server, questions, sampling: SamplingOptions):
    async with server.client() as client:
        return await asyncio.gather(*(client.generate(model, prompt, sampling) for model, prompt in questions))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_mixed_batch_equals_transformers_and_peft(server, reference, temperature):
    """Base rows and two adapters in one engine step; log-probabilities are those at the sampling temperature."""
    names = ("base", *ADAPTERS)
    questions = [(names[i % 3], prompt) for i, prompt in enumerate(_prompts(45))]
    completions = asyncio.run(_ask(server, questions, SamplingOptions(temperature, max_new_tokens=4)))
    far_from_base = 0
    for (model, prompt), completion in zip(questions, completions, strict=True):
        expected = reference(model, prompt, completion.sampled_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.spans == ((model, len(completion.sampled_ids)),)
        far_from_base += np.abs(expected - reference("base", prompt, completion.sampled_ids, temperature)).max() > 0.1
    assert far_from_base > 20  # so that mixing adapters up would have been seen


@pytest.mark.parametrize("name", ADAPTERS)
def test_batch_of_one_adapter_equals_peft(server, reference, name):
    """The usual step of a run, which the CPU backend serves from merged weights."""
    prompts = _prompts(16, seed=2)
    completions = asyncio.run(
        _ask(server, [(name, prompt) for prompt in prompts], SamplingOptions(1.0, max_new_tokens=4))
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = reference(name, prompt, completion.sampled_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_end_of_sequence_is_kept_and_equal_prompts_differ(server):
    completions = asyncio.run(_ask(server, [("base", [5, 6, 7])] * 64, SamplingOptions(1.0, max_new_tokens=16)))
    assert len({completion.sampled_ids for completion in completions}) > 32
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert stopped
    assert all(completion.sampled_ids.index(EOS) == len(completion.sampled_ids) - 1 for completion in stopped)
    for completion in completions:
        assert len(completion.logprobs) == len(completion.sampled_ids)
        if completion not in stopped:
            assert completion.finish_reason == "length"
            assert len(completion.sampled_ids) == 16
            assert EOS not in completion.sampled_ids


def test_replies_are_held_to_a_grammar(server):
    words = AutoTokenizer.from_pretrained(server.folder / "base")
    held = SamplingOptions(1.0, 4, structured_outputs=json.dumps({"grammar": 'root ::= "w3" | "w7"'}))
    completions = asyncio.run(_ask(server, [("base", [5, 6, 7])] * 64, held))
    said = {words.decode(completion.sampled_ids, skip_special_tokens=True) for completion in completions}
    assert said == {"w3", "w7"}
    shares = {completion.sampled_ids: sum(completion.logprobs) for completion in completions}
    assert sum(map(math.exp, shares.values())) == pytest.approx(1.0, abs=1e-3), "of the distribution that is left"


@pytest.mark.parametrize(
    ("cut", "name"),
    [
        ({"top_k": 3}, "base"),
        ({"top_p": 0.5}, ADAPTERS[0]),
        ({"min_p": 0.3}, "base"),
        ({"top_k": 9, "top_p": 0.6}, "base"),
    ],
)
def test_log_probs_of_a_cut_distribution_are_of_what_is_left(server, reference, cut, name):
    """They exceed those of the whole vocabulary by the logarithm of the share that is left, at every position.

    The trainer's are of the whole vocabulary: that difference is what config.loss.options.correction has to weigh.
    """
    temperature, prompt = 0.8, [5, 6, 7, 8]
    completions = asyncio.run(_ask(server, [(name, prompt)] * 48, SamplingOptions(temperature, 1, **cut)))
    every = [reference(name, prompt, (token,), temperature)[0] for token in range(64)]
    likeliest = sorted(range(64), key=lambda token: -every[token])
    left = _left(likeliest, [math.exp(every[token]) for token in likeliest], **cut)
    share = sum(math.exp(every[token]) for token in left)
    assert 0 < share < 0.9 and len(left) > 1
    for completion in completions:
        (token,), (logprob,) = completion.sampled_ids, completion.logprobs
        assert token in left
        assert logprob == pytest.approx(every[token] - math.log(share), abs=1e-3)


def _left(
    tokens: list[int], shares: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> set[int]:
    """Tokens, likeliest first, that truncation leaves: top-p of what top-k has left."""
    kept = top_k or len(tokens)
    whole, before = sum(shares[:kept]), 0.0
    left = set()
    for token, share in zip(tokens[:kept], shares[:kept], strict=True):
        if before < top_p * whole and share >= min_p * shares[0]:
            left.add(token)
        before += share
    return left


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts_end_a_reply_and_stay_in_it(server, reference, stream):
    words = AutoTokenizer.from_pretrained(server.folder / "base")
    sampling = SamplingOptions(1.0, max_new_tokens=24, stop=("w7", "w11 ", "w2 w"))

    async def ask():
        async with server.client(stream=stream) as client:
            return await asyncio.gather(*(client.generate("base", [5, 6, 7], sampling) for _ in range(32)))

    stopped = 0
    for completion in asyncio.run(ask()):
        text = words.decode(completion.sampled_ids, skip_special_tokens=True)
        assert len(completion.logprobs) == len(completion.sampled_ids)
        expected = reference("base", [5, 6, 7], completion.sampled_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        before = words.decode(completion.sampled_ids[:-1], skip_special_tokens=True)
        assert not any(stop in before for stop in sampling.stop), "it ends with the token that completes the text"
        if any(stop in text for stop in sampling.stop):
            stopped += 1
            assert completion.finish_reason == "stop" and completion.sampled_ids[-1] != EOS
    assert stopped > 8


def test_stop_token_ends_a_completion_and_is_kept(server):
    sampling = SamplingOptions(1.0, max_new_tokens=16, stop_token_ids=tuple(range(3, 34)))
    completions = asyncio.run(_ask(server, [("base", [5, 6, 7])] * 16, sampling))
    assert all(completion.sampled_ids[-1] in (EOS, *sampling.stop_token_ids) for completion in completions)
    assert all(not set(completion.sampled_ids[:-1]) & set(sampling.stop_token_ids) for completion in completions)


def test_logprobs_keep_float32_precision(server):
    completions = asyncio.run(_ask(server, [("base", prompt) for prompt in _prompts(8)], SamplingOptions(1.0, 4)))
    values = np.array([logprob for completion in completions for logprob in completion.logprobs])
    assert np.array_equal(values, values.astype(np.float32).astype(np.float64))
    assert not np.array_equal(values, values.round(6))


def test_refusals(server):
    async def refusals():
        async with server.client() as client:
            with pytest.raises(UnknownModel, match="agent@99"):
                await client.generate("agent@99", [5], SamplingOptions(1.0, 2))
            too_long, fine = await asyncio.gather(
                client.generate("base", [5] * 500, SamplingOptions(1.0, 2)),
                client.generate("base", [5], SamplingOptions(1.0, 3)),
                return_exceptions=True,
            )
            assert isinstance(too_long, EngineError) and "engine.log" in str(too_long)
            assert not isinstance(fine, BaseException)
            with pytest.raises(EngineError, match="agent@5"):
                await client.load_adapter("agent@5", server.folder / "nowhere")

    asyncio.run(refusals())


def test_adapters_come_and_go(server):
    async def come_and_go():
        async with server.client() as client:
            assert await client.models() == {"base", *ADAPTERS}
            await client.load_adapter("agent@6", server.folder / ADAPTERS[0])
            await client.load_adapter("agent@6", server.folder / ADAPTERS[0])
            assert "agent@6" in await client.models()
            await client.unload_adapter("agent@6")
            await client.unload_adapter("agent@6")
            assert await client.models() == {"base", *ADAPTERS}
            with pytest.raises(UnknownModel):
                await client.generate("agent@6", [5], SamplingOptions(1.0, 2))

    asyncio.run(come_and_go())


@pytest.mark.parametrize("name", ["base", *ADAPTERS])
def test_the_trainer_recomputes_what_the_engine_sampled(server, name):
    """Packed rows through the trainer's own log-prob function, at the sampling temperature."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    lora = Lora(rank=4, alpha=8.0, targets=targets)
    decoder = load_decoder(server.folder / "base", lora=lora, dtype="float32", remat="none", key=jax.random.key(1))
    if name != "base":
        tensors = load_file(server.folder / name / "adapter_model.safetensors")
        set_adapter(decoder, adapter_from_peft(tensors, decoder.config, lora))
    prompts = _prompts(12, seed=3)
    completions = asyncio.run(
        _ask(server, [(name, prompt) for prompt in prompts], SamplingOptions(0.8, max_new_tokens=4))
    )
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = np.array([*prompt, *completion.sampled_ids], np.int32)
        sampled = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[sampled] = completion.logprobs
        rows.append(TokenRow(name, tokens, sampled, logprobs, np.zeros_like(logprobs), sampled.astype(np.int32)))
    for batch in pack(rows, row_tokens=128, micro_batch_rows=4):
        ours, _ = sampled_logprobs(decoder, batch, temperature=0.8, chunk_tokens=16)
        assert np.asarray(batch.mask).any()
        np.testing.assert_allclose(np.where(batch.mask, ours, 0.0), batch.behaviour_logprobs, atol=1e-4)


@pytest.mark.slow  # test_versions_change_and_the_engine_dies_while_episodes_are_played kills one in every change
def test_call_survives_a_killed_engine(server, reference):
    """The engine dies in mid-request and comes back on the same port without its adapters."""
    prompts, sampling = _prompts(48, seed=3), SamplingOptions(1.0, max_new_tokens=60)

    async def generate(client: EngineClient, prompt: list[int], reloads: list[float]):
        while True:
            try:
                return await client.generate(ADAPTERS[0], prompt, sampling)
            except UnknownModel:
                reloads.append(time.monotonic())
                await client.load_adapter(ADAPTERS[0], server.folder / ADAPTERS[0])

    async def crash():
        reloads: list[float] = []
        async with server.client(request_timeout_s=START_TIMEOUT_S) as client:
            assert server.process is not None
            os.killpg(server.process.pid, signal.SIGSTOP)  # so that it certainly dies with requests at hand
            calls = [asyncio.create_task(generate(client, prompt, reloads)) for prompt in prompts]
            await asyncio.sleep(0.3)
            unfinished = sum(not call.done() for call in calls)
            server.kill()
            assert unfinished == len(prompts)
            assert not await client.healthy()
            server.launch()
            completions = await asyncio.gather(*calls)
            assert reloads
            assert await client.healthy()
        return completions

    for prompt, completion in zip(prompts, asyncio.run(crash()), strict=True):
        expected = reference(ADAPTERS[0], prompt, completion.sampled_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
