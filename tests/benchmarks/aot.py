"""The update of every `:qwen3_*` recipe, compiled by XLA's own compilers for GPUs and TPUs that are not there:

    bash launch/compilers.sh                       # once: JAX's plugins for CUDA and TPUs into .venv-compilers
    python -m tests.benchmarks.aot [--recipes=sokoban:qwen3_8b,...] [--machines=a100x8,h100x8,...] [--python=...]
                                   [-- --config.model.remat=dots ...]

A line for each recipe and machine: memory per device as the compiler counts it, beside the plan of `--dry_run`;
collectives of one micro-batch; the kernel of attention; arrays with the scores of all queries and keys. Nothing runs,
and nothing but the compilation is timed. Recipes whose programs are equal are compiled once. On a TPU slice the recipe
has all chips, and the flags TPU_FLAGS of `aot_case.py`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowjax.launch.command_line import load_recipe
from flowjax.launch.devices import share_out
from flowjax.run import resolve
from tests.benchmarks.aot_case import GIB, MACHINES

CONFIGS = Path("configs")
PYTHON = Path(".venv-compilers/bin/python")
HEADER = (
    "recipes",
    "machine",
    "trainer's mesh",
    "rows",
    "attention",
    "remat",
    "compiler",
    "plan",
    "all-gather",
    "reduced",
    "overlapped",
    "scores",
    "compiled in",
)
_LONGEST_S = 3600


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.aot")
    parser.add_argument("--recipes", default=",".join(recipes()))
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--python", type=Path, default=PYTHON)
    parser.add_argument("overrides", nargs="*", help="flags of the launcher, after --")
    flags = parser.parse_args(argv)
    if not flags.python.exists():
        parser.error(f"--python is {flags.python}, which does not exist: run bash launch/compilers.sh")
    machines = flags.machines.split(",")
    if unknown := [machine for machine in machines if machine not in MACHINES]:
        parser.error(f"--machines has {', '.join(unknown)}: use {', '.join(MACHINES)}")
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    failed = 0
    for alike in equal_programs(flags.recipes.split(",")):
        for machine in machines:
            found = compile_recipe(flags.python, alike[0], machine, flags.overrides)
            failed += found is None
            print(
                f"| {', '.join(alike)} | {machine} | " + ("failed" if found is None else line(found)) + " |", flush=True
            )
    return min(failed, 1)


def recipes() -> list[str]:
    """world:variant of every recipe for Qwen3."""
    made = []
    for path in sorted(CONFIGS.glob("*.py")):
        made += [f"{path.stem}:{variant}" for variant in ("qwen3_8b", "qwen3_0_6b")]
    return made


def equal_programs(names: Sequence[str]) -> Iterator[list[str]]:
    """The recipes in groups of one program: same model, rows, mesh, adapter and objective."""
    groups: dict[str, list[str]] = {}
    for name in names:
        run = resolve(load_recipe(_source(name)))
        policy = next(iter(run.policies.values()))
        trainer, model = policy.trainer, policy.base.model
        program = (
            (model.path, model.dtype, model.remat, model.attention, model.quantize, policy.train),
            (trainer.row_tokens, trainer.micro_batch_rows, trainer.logprob_chunk_tokens),
            run.config.rollout.max_new_tokens,  # how much of a row may be sampled
            *(section.to_dict() for section in (policy.lora, policy.loss, run.config.mesh)),
        )
        groups.setdefault(json.dumps(program, sort_keys=True, default=str), []).append(name)
    return iter(groups.values())


def line(found: dict[str, Any]) -> str:
    """The cells of one compiled update."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items()) or "1 device"
    kinds = found["collectives"]
    gathered = kinds.get("all-gather", (0, 0))
    reduced = [kinds.get(kind, (0, 0)) for kind in ("all-reduce", "reduce-scatter", "collective-permute", "all-to-all")]
    ratio = found["plan_bytes"] / found["compiled_bytes"]
    cells = (
        mesh,
        f"{found['rows']} x {found['tokens']:,}",
        found["attention"],
        found["remat"],
        f"{found['compiled_bytes'] / GIB:.1f} of {MACHINES[found['machine']][2]:.0f} GiB",
        f"{ratio:.2f} x",
        _amount(*gathered),
        _amount(sum(count for count, _ in reduced), sum(size for _, size in reduced)),
        "{} of {}".format(*found["overlapped"]) if found["overlapped"][1] else "none",
        ", ".join(found["scores"]) or "none",
        f"{found['compile_s']:.0f} s",
    )
    return " | ".join(cells)


def _amount(count: int, size: int) -> str:
    return f"{count}, {size / GIB:.1f} GiB" if count else "none"


def _source(name: str) -> str:
    world, _, variant = name.partition(":")
    return f"{CONFIGS / world}.py:{variant}"


def compile_recipe(python: Path, name: str, machine: str, overrides: Sequence[str] = ()) -> dict[str, Any] | None:
    command = [str(python), "-m", "tests.benchmarks.aot_case", _source(name), machine, *overrides]
    devices = share_out([str(number) for number in range(MACHINES[machine][0])], 0)
    environment = os.environ | {"XLA_FLAGS": devices.trainer_env()["XLA_FLAGS"]}  # as the launcher has it
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S, env=environment)
    except subprocess.TimeoutExpired:
        print(f"{name} for {machine} was not compiled within {_LONGEST_S} s", file=sys.stderr)
        return None
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
