"""What times and compares the kernels of accelerators, on the CPU: it finds what is wrong, and runs to its end."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowjax.models.attention import attend
from flowjax.models.cudnn import PACKED_SEGMENTS
from tests.benchmarks import kernels
from tests.benchmarks.trainer_device import Options, time_step

HEADS = (4, 2, 16)


def test_a_kernel_that_crosses_segments_is_found():
    known = kernels.with_gradients(kernels.exact(None, None))
    same = kernels.worst_errors(kernels.with_gradients(attend), known, HEADS, packings=4, tokens=256)
    assert max(same) < kernels.TOLERANCE

    def crossing(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array, *rest: jax.Array):
        one = jnp.ones_like(segments)
        places = jnp.arange(segments.shape[1])[None]
        return attend(query, key, value, one, places, one, places)

    found = kernels.worst_errors(kernels.with_gradients(crossing), known, HEADS, packings=4, tokens=256)
    assert min(found) > kernels.TOLERANCE


def test_a_kernel_without_a_key_s_gradient_is_found():
    def deaf(query: jax.Array, key: jax.Array, value: jax.Array, *where: jax.Array):
        return attend(query, jax.lax.stop_gradient(key), value, *where)

    known = kernels.with_gradients(kernels.exact(None, None))
    result, by_query, by_key, by_value = kernels.worst_errors(
        kernels.with_gradients(deaf), known, HEADS, packings=2, tokens=256
    )
    assert max(result, by_query, by_value) < kernels.TOLERANCE < by_key


def test_packings_fit_their_row_and_some_are_at_and_beyond_what_cudnn_takes():
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(50):
        lengths = kernels.random_packing(rng, 256)
        assert min(lengths) > 0
        assert sum(lengths) <= 256
        counts.append(len(lengths))
    assert min(counts) == 1
    assert {PACKED_SEGMENTS, PACKED_SEGMENTS + 1} <= set(counts)


def test_the_layer_of_experts_is_compared_and_timed(monkeypatch, capsys):
    for name, size in {"EXPERTS": 8, "CHOSEN": 2, "HIDDEN": 64, "FFN": 32}.items():
        monkeypatch.setattr(kernels, name, size)
    assert kernels.compare_experts(tokens=128)
    kernels.time_experts(128, rate=1e9)
    assert capsys.readouterr().out.count("\n") == 2
    right = kernels.mix
    monkeypatch.setattr(kernels, "mix", lambda x, weights, *rest: right(x, weights * 1.1, *rest))
    assert not kernels.compare_experts(tokens=128)


def test_without_a_gpu_it_says_what_it_is_for():
    command = [sys.executable, "-m", "tests.benchmarks.kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "jax sees a cpu: these are kernels for NVIDIA GPUs" in done.stderr


@pytest.mark.parametrize("text", ["32/8", "a/b/c"])
def test_heads_are_three_numbers(text):
    with pytest.raises(SystemExit, match="is not three numbers, as 32/8/128 is"):
        kernels.read_heads(text)


def test_a_step_is_timed_on_whatever_there_is(tmp_path):
    found = time_step("tiny", 64, "none", Options(steps=1, trace=str(tmp_path)))
    assert found["attention"] == "xla"
    assert found["mfu"] is None  # of a CPU no peak is known
    assert found["plan_bytes"] > 0
    assert list(tmp_path.rglob("*.xplane.pb"))
