"""A real vLLM that serves a base in int8: its log-probabilities are those of the same rounding in transformers."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from test_rollout_engine import ADAPTERS, Server, _make_adapter, _prompts
from transformers import AutoModelForCausalLM

from flowjax.config import default_config
from flowjax.launch.devices import Devices
from flowjax.launch.roles import int8_roles, run_roles
from flowjax.models.nano import create_nano
from flowjax.rollout.client import SamplingOptions
from flowjax.rollout.sidecar import served_folder
from flowjax.run import resolve


class Rounded(torch.nn.Module):
    """A linear map as W8A8: the stored codes, and each token's inputs rounded to 127 steps of its largest."""

    def __init__(self, codes: np.ndarray, scales: np.ndarray):
        super().__init__()
        self.codes, self.scales = torch.from_numpy(codes).double(), torch.from_numpy(scales).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = x.abs().amax(-1, keepdim=True) / 127
        return ((torch.round(x / steps).double() @ self.codes.T) * steps * self.scales[:, 0]).to(x.dtype)


def rounded(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    stored = load_file(folder / "model.safetensors")
    for name in [name.removesuffix(".weight_scale") for name in stored if name.endswith("_scale")]:
        holder, _, last = name.rpartition(".")
        setattr(model.get_submodule(holder), last, Rounded(stored[f"{name}.weight"], stored[f"{name}.weight_scale"]))
    return model


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("int8")
    create_nano([f"w{i}" for i in range(61)], folder / "base", key=jax.random.key(0), hidden_size=64, layers=2)
    _make_adapter(folder / "base", folder / ADAPTERS[0], seed=0)
    server = Server(folder)
    server.config.engine.quantize = "int8"
    (maker,) = int8_roles(server.run())
    subprocess.run(maker.argv, env={**os.environ, **maker.env}, check=True)
    server.launch()
    yield server
    server.kill()


def _logprobs(model: torch.nn.Module, prompt: list[int], sampled: tuple[int, ...]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(sampled)), torch.tensor(sampled)].numpy()


@pytest.mark.integration
@pytest.mark.skipif("amx_int8" in Path("/proc/cpuinfo").read_text(), reason="with AMX int8 wants bfloat16")
def test_an_int8_engine_multiplies_what_its_folder_holds(server):
    folder, base = served_folder(server.run(), server.run().bases["base"]), server.folder / "base"
    whole, small = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32) for _ in range(2))
    with_adapter = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), server.folder / ADAPTERS[0]
    )
    for name, layer in with_adapter.named_modules():
        if hasattr(layer, "base_layer"):
            inner = name.removeprefix("base_model.model.")
            layer.base_layer = rounded(small, folder).get_submodule(inner)

    async def ask():
        await server.up()
        async with server.client() as client:
            await client.load_adapter(ADAPTERS[0], server.folder / ADAPTERS[0])
            return await asyncio.gather(
                *(client.generate(model, prompt, SamplingOptions(1.0, 4)) for model, prompt in questions)
            )

    questions = [(("base", ADAPTERS[0])[i % 2], prompt) for i, prompt in enumerate(_prompts(32))]
    models, from_whole = {"base": rounded(small, folder), ADAPTERS[0]: with_adapter}, []
    for (model, prompt), completion in zip(questions, asyncio.run(ask()), strict=True):
        # An input half way between two steps may be rounded either way, and moves what comes after it.
        expected = _logprobs(models[model], prompt, completion.sampled_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)
        if model == "base":
            from_whole.append(np.abs(completion.logprobs - _logprobs(whole, prompt, completion.sampled_ids)).max())
    assert np.median(from_whole) > 1e-3  # so that an engine that rounds nothing would have been seen


def test_engines_read_a_copy_that_is_made_first(tmp_path):
    config = default_config()
    config.model.path, config.engine.quantize = str(tmp_path / "base"), "int8"
    run = resolve(config, tmp_path / "run")
    (maker,) = int8_roles(run)
    assert maker.finite and f"--int8={served_folder(run, run.bases['base'])}" in maker.argv
    (engine,) = [role for role in run_roles(run, {"engine": 9000, "dataflow": 1}, Devices()) if role.name == "engine"]
    assert str(served_folder(run, run.bases["base"])) in engine.argv and str(tmp_path / "base") not in engine.argv
    assert "--quantization" not in engine.argv
    config.engine.quantize = "fp8"
    run = resolve(config, tmp_path / "run")
    (engine,) = [role for role in run_roles(run, {"engine": 9000, "dataflow": 1}, Devices()) if role.name == "engine"]
    assert not int8_roles(run) and engine.argv[engine.argv.index("--quantization") + 1] == "fp8"
    assert str(tmp_path / "base") in engine.argv
