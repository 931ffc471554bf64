"""What the trainers are measured on: a base model, an adapter and rows, written once and read by each of them.

Only numpy and the standard library are imported here: every peer has an environment of its own.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

CLIP = 0.2
LEARNING_RATE = 1e-4
CLIP_NORM = 1.0
PAD = 0


@dataclass(frozen=True)
class Case:
    """A shape and its rows. `lengths` are tokens per row, half of them prompt.

    `dtype` is that of the base model; cases in bfloat16 are for a GPU, the others for CPUs.
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    lengths: tuple[int, ...]
    rank: int = 16
    dtype: str = "float32"

    @property
    def on_gpu(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def tokens(self) -> int:
        """Real tokens in a step."""
        return sum(self.lengths)


_NANO: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "layers": 6,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "ffn_size": 768,
}
_SMALL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "layers": 8,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "ffn_size": 1536,
}
_LARGE: dict[str, Any] = {  # Qwen3-1.7B
    "vocab_size": 151936,
    "hidden_size": 2048,
    "layers": 28,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn_size": 6144,
    "rank": 64,
    "dtype": "bfloat16",
}
_TINY: dict[str, Any] = {**_NANO, "vocab_size": 256, "hidden_size": 64, "layers": 2, "ffn_size": 128}
CASES = {
    case.name: case
    for case in (
        Case("nano-even", lengths=(512,) * 8, **_NANO),
        Case("nano-long-tailed", lengths=(512, 160, 144, 136, 128, 128, 128, 120), **_NANO),
        Case("small-even", lengths=(512,) * 4, **_SMALL),
        Case("small-long-tailed", lengths=(512, 88, 72, 60), **_SMALL),
        Case("gpu-even", lengths=(2048,) * 4, **_LARGE),
        Case("gpu-long-tailed", lengths=(2048, 352, 288, 240), **_LARGE),
        Case("tiny", lengths=(64, 20, 16, 12), **_TINY),
    )
}


@dataclass(frozen=True)
class Rows:
    """Token rows with one advantage each; `behaviour` holds a log-probability for each token after the prompt."""

    tokens: list[np.ndarray]
    behaviour: list[np.ndarray]
    advantages: np.ndarray

    @staticmethod
    def prompt_tokens(length: int) -> int:
        return length // 2


def make_rows(case: Case, *, seed: int = 0) -> Rows:
    """Random tokens; behaviour log-probs around those of a random model, so that some ratios are clipped."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(1, case.vocab_size, length).astype(np.int32) for length in case.lengths]
    behaviour = [
        rng.normal(-np.log(case.vocab_size), 0.3, length - Rows.prompt_tokens(length)).astype(np.float32)
        for length in case.lengths
    ]
    return Rows(tokens, behaviour, rng.normal(size=len(tokens)).astype(np.float32))


def padded(rows: Rows) -> dict[str, np.ndarray]:
    """The rows as both peers take them: prompts padded on the left, what was sampled on the right."""
    prompts = [row[: Rows.prompt_tokens(len(row))] for row in rows.tokens]
    replies = [row[Rows.prompt_tokens(len(row)) :] for row in rows.tokens]
    prompt_width, reply_width = (max(map(len, parts)) for parts in (prompts, replies))
    count = len(rows.tokens)
    made = {
        "prompt_ids": np.full((count, prompt_width), PAD, np.int32),
        "prompt_mask": np.zeros((count, prompt_width), np.int32),
        "completion_ids": np.full((count, reply_width), PAD, np.int32),
        "completion_mask": np.zeros((count, reply_width), np.int32),
        "behaviour": np.zeros((count, reply_width), np.float32),
    }
    for index, (prompt, reply, behaviour) in enumerate(zip(prompts, replies, rows.behaviour, strict=True)):
        made["prompt_ids"][index, prompt_width - len(prompt) :] = prompt
        made["prompt_mask"][index, prompt_width - len(prompt) :] = 1
        made["completion_ids"][index, : len(reply)] = reply
        made["completion_mask"][index, : len(reply)] = 1
        made["behaviour"][index, : len(reply)] = behaviour
    return {**made, "advantages": rows.advantages}


def adapter_arrays(case: Case, *, seed: int = 1) -> dict[str, np.ndarray]:
    """`layer.target.a` [in, rank] and `.b` [rank, out]. B is not zero, so that A has a gradient from the start."""
    rng = np.random.default_rng(seed)
    d, q, kv, f = case.hidden_size, case.heads * case.head_dim, case.kv_heads * case.head_dim, case.ffn_size
    sizes = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
    sizes |= {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}
    arrays = {}
    for layer in range(case.layers):
        for target, (size_in, size_out) in sizes.items():
            arrays[f"{layer}.{target}.a"] = rng.normal(0, size_in**-0.5, (size_in, case.rank)).astype(np.float32)
            arrays[f"{layer}.{target}.b"] = rng.normal(0, 0.02, (case.rank, size_out)).astype(np.float32)
    return arrays


def write_case(case: Case, folder: Path) -> None:
    """`case.json`, `rows.npz` and `adapter.npz`; the base model is written beside them by flowjax."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    np.savez(folder / "adapter.npz", **adapter_arrays(case))  # pyright: ignore[reportArgumentType]


def read_case(folder: Path) -> tuple[Case, dict[str, np.ndarray]]:
    """The case and its adapter arrays."""
    fields = json.loads((folder / "case.json").read_text())
    fields["lengths"] = tuple(fields["lengths"])
    with np.load(folder / "adapter.npz") as arrays:
        return Case(**fields), dict(arrays)


def peak_bytes() -> int:
    """The most memory this process has ever held (kilobytes on Linux, bytes on macOS)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class Trainer:
    """One trainer, ready to step. `step` returns when the update is done, with its loss and gradient norm.

    `peak_bytes` is the most memory it has ever held, on the GPU where that is where it computes.
    """

    step: Callable[[], tuple[float, float]]
    peak_bytes: Callable[[], int] = peak_bytes


def serve(make: Callable[[Path], Trainer]) -> None:
    """Take turns with other trainers: read `step N` or `end` from standard input, answer in one line of JSON each.

    Arguments: folder of the case, variant of the trainer, cores. The first line, unasked, holds loss and gradient norm
    of the first step and the memory before it. Whatever the trainer itself prints goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    started_s = time.perf_counter()
    if hasattr(os, "sched_setaffinity"):  # before the first computation, which starts the threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[3])])
    trainer = make(Path(sys.argv[1]))
    loaded = trainer.peak_bytes()
    loss, norm = trainer.step()
    trainer.step()  # some compile again for the second
    answer(loss=loss, gradient_norm=norm, loaded_bytes=loaded, start_s=time.perf_counter() - started_s)
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "end":
            break
        seconds = []
        for _ in range(int(rest[0])):
            before_s = time.perf_counter()
            trainer.step()
            seconds.append(time.perf_counter() - before_s)
        answer(seconds=seconds, peak_bytes=trainer.peak_bytes())
