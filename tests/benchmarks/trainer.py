"""A LoRA policy-gradient step beside Tunix's and TRL's: python -m tests.benchmarks.trainer

`bash launch/benchmark_peers.sh` makes the peers' environment first. Every trainer is a process of its own, holds the
same base model (a Hugging Face folder), adapter and rows in float32, and they step in turns: one round is `--steps`
steps of each. Printed are real tokens per second (median of all steps; least and greatest of a round), peak memory,
ratios, and first loss and gradient norm, which must agree. docs/benchmarks/trainer.md has the figures. The cases
gpu-even and gpu-long-tailed are Qwen3-1.7B in bfloat16, for a GPU whose memory holds all trainers.

With --device, steps of Qwen3 shapes are timed on whatever accelerator jax sees, without peers.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from absl import app, flags

from tests.benchmarks.runs import peer_environment, peer_python
from tests.benchmarks.trainer_case import CASES, Case, write_case

# Between first losses (absolute; advantages have standard deviation 1) and between gradient norms (relative).
TOLERANCES = {"float32": (1e-5, 1e-3), "bfloat16": (3e-3, 3e-2)}
# All trainers hold a part of one GPU at a time.
ON_GPU = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
TRAINERS = ("flowjax", "tunix", "trl-eager", "trl-compiled", "trl-plain-eager", "trl-plain-compiled")
ON_GPU_ONLY = ("trl-liger",)
FOR_CPUS = [name for name, case in CASES.items() if name != "tiny" and not case.on_gpu]

_CASES = flags.DEFINE_list("cases", FOR_CPUS, f"Of {', '.join(CASES)}.")
_TRAINERS = flags.DEFINE_list("trainers", list(TRAINERS), "Which take part; flowjax is the one compared with.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each trainer.")
_STEPS = flags.DEFINE_integer("steps", 3, "Steps in a turn.")
_THREADS = flags.DEFINE_integer("threads", 2, "Cores that each trainer may use while it is its turn.")
_PEERS = flags.DEFINE_string("peers", ".venv-peers", "Folder of the peers' environment.")
_MEMORY = flags.DEFINE_enum(
    "memory", "all", ("all", "flowjax"), "Who has tcmalloc or huge pages, as the launcher does."
)
_DEVICE = flags.DEFINE_bool("device", False, "Time Qwen3 shapes on the accelerator instead.")
_SHAPES = flags.DEFINE_list("shapes", ["qwen3-1.7b", "qwen3-8b"], "With --device: shapes.")
_TOKENS = flags.DEFINE_list("tokens", ["4096", "16384"], "With --device: packed tokens in a step.")
_REMATS = flags.DEFINE_list("remats", ["dots", "layer"], "With --device: the first that fits is taken.")
_ATTENTION = flags.DEFINE_string("attention", "auto", "With --device: as config.model.attention.")
_TRACE = flags.DEFINE_string("trace", "", "With --device: folder for a profile of one step.")


@dataclass
class Runner:
    """A trainer's process and what it has said so far."""

    name: str
    process: subprocess.Popen[str]
    first: dict[str, Any] = field(default_factory=dict)
    rounds: list[list[float]] = field(default_factory=list)
    peak_bytes: int = 0

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} stopped with status {self.process.wait()}: its messages stand above")
        return json.loads(line)

    def turn(self, steps: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"step {steps}\n")
        self.process.stdin.flush()
        said = self.answer()
        self.rounds.append(said["seconds"])
        self.peak_bytes = said["peak_bytes"]

    def end(self) -> None:
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.close()
        self.process.wait()


def write_base(case: Case, folder: Path) -> None:
    """A random Qwen3 of the case's shape, with a tokenizer, as a Hugging Face folder."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax  # this process only starts the trainers
    import jax.numpy as jnp

    from flowjax.models.decoder import Decoder
    from flowjax.models.hf import save_decoder
    from flowjax.models.nano import SPECIAL_TOKENS, build_tokenizer
    from flowjax.models.shape import ModelConfig

    sizes = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "ffn_size")
    config = ModelConfig(**{name: getattr(case, name) for name in sizes}, eos_token_ids=(1,), pad_token_id=0)
    save_decoder(Decoder(config, dtype=jnp.dtype(case.dtype), key=jax.random.key(0)), folder)
    build_tokenizer([f"w{i}" for i in range(case.vocab_size - len(SPECIAL_TOKENS))], folder)


def start(name: str, case: Case, folder: Path, threads: int, peers: Path, *, memory: bool) -> Runner:
    """Start a trainer on a case; its first line is still to be read."""
    peer, _, variant = name.partition("-")
    python = sys.executable if peer == "flowjax" else str(peer_python(peers))
    process = subprocess.Popen(
        [python, "-m", f"tests.benchmarks.trainer_{peer}", str(folder), variant, str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=peer_environment(threads, memory=memory) | (ON_GPU if case.on_gpu else {}),
        text=True,
    )
    return Runner(name, process)


def measure(case: Case, names: list[str], *, rounds: int, steps: int, threads: int, peers: Path) -> list[Runner]:
    """All trainers on one case, in turns."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_case(case, folder)
        write_base(case, folder / "base")
        runners: list[Runner] = []
        try:
            for name in names:  # one after the other: compilation uses every core
                memory = name == "flowjax" or _MEMORY.value == "all"
                runners.append(start(name, case, folder, threads, peers, memory=memory))
                runners[-1].first = runners[-1].answer()
            for _ in range(rounds):
                for runner in runners:
                    runner.turn(steps)
                    speed = case.tokens / statistics.median(runner.rounds[-1])
                    print(f"{case.name}: {runner.name} {speed:,.0f} tokens/s", file=sys.stderr, flush=True)
        finally:
            for runner in runners:
                runner.end()
    return runners


def report(case: Case, runners: list[Runner]) -> bool:
    """Print a table in Markdown; False if the trainers disagree on the first step."""
    ours = runners[0]
    speeds = {runner.name: case.tokens / statistics.median(itertools.chain(*runner.rounds)) for runner in runners}
    print(f"\n{case.name}: {len(case.lengths)} rows, {case.tokens} real tokens, longest {max(case.lengths)}\n")
    print(
        "| trainer | tokens/s | rounds | ours is | peak memory | of it loaded | ours is | first loss | gradient norm |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    agree, (of_losses, of_norms) = True, TOLERANCES[case.dtype]
    for runner in runners:
        medians = sorted(case.tokens / statistics.median(seconds) for seconds in runner.rounds)
        loss, norm = runner.first["loss"], runner.first["gradient_norm"]
        agree &= abs(loss - ours.first["loss"]) <= of_losses
        agree &= abs(norm / ours.first["gradient_norm"] - 1) <= of_norms
        print(
            f"| {runner.name} | {speeds[runner.name]:,.0f} | {medians[0]:,.0f} to {medians[-1]:,.0f} "
            f"| {speeds[ours.name] / speeds[runner.name]:.2f} x | {runner.peak_bytes / 2**30:.2f} GiB "
            f"| {runner.first['loaded_bytes'] / 2**30:.2f} | {ours.peak_bytes / runner.peak_bytes:.2f} x "
            f"| {loss:.6f} | {norm:.6f} |"
        )
    verdict = "agree" if agree else "DISAGREE"
    print(f"\nFirst losses (to {of_losses}) and gradient norms (to {of_norms:.1%}) {verdict}.", flush=True)
    return agree


def main(argv: list[str]) -> None:
    del argv
    if _DEVICE.value:
        from tests.benchmarks.trainer_device import Options, time_shapes

        options = Options(_STEPS.value, tuple(_REMATS.value), _ATTENTION.value, _TRACE.value)
        time_shapes(_SHAPES.value, [int(tokens) for tokens in _TOKENS.value], options)
        return
    peers = Path(_PEERS.value)
    unknown = [*(set(_CASES.value) - set(CASES)), *(set(_TRAINERS.value) - {*TRAINERS, *ON_GPU_ONLY})]
    if unknown:
        known = f"cases are {', '.join(CASES)}; trainers {', '.join((*TRAINERS, *ON_GPU_ONLY))}"
        raise app.UsageError(f"{', '.join(unknown)}: {known}")
    if set(_TRAINERS.value) != {"flowjax"}:
        peer_python(peers)
    settings = {"rounds": _ROUNDS.value, "steps": _STEPS.value, "threads": _THREADS.value, "peers": peers}
    agree = [report(CASES[name], measure(CASES[name], _TRAINERS.value, **settings)) for name in _CASES.value]
    if not all(agree):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
