"""Small data for the canvas world, in the published format: python -m data.canvas.build --out=FOLDER --seed=0

Writes FOLDER/train.jsonl and FOLDER/test.jsonl, which `env.options.path` takes: arithmetic, word problems, questions
about lists and small programs, every answer found a second time in the words of its problem. Equal seeds give equal
files, and no test problem is in the training file.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.envs import Split
from flowjax.envs.canvas.exercises import KINDS, Exercise, generate, read


def row(exercise: Exercise, number: int) -> Mapping[str, Any]:
    """An exercise in the published fields, its answer checked.

    Raises:
        ValueError: its words say something else than its answer.
    """
    reading = read(exercise.text)
    if reading is None or reading.answer != exercise.answer:
        raise ValueError(f"the answer {exercise.answer!r} does not follow from {exercise.text!r}")
    meta: dict[str, Any] = {"task_id": f"{exercise.source}/{number}"}
    if exercise.kind == "code":
        meta |= {
            "entry_point": exercise.entry_point,
            "test": "\n".join(exercise.hidden_tests),
            "public_tests": list(exercise.public_tests),
        }
    return {
        "problem": exercise.text,
        "problem_type": exercise.kind,
        "source": exercise.source,
        "ground_truth": exercise.answer,
        "meta": meta,
    }


def build(out: Path, seed: int, *, train: int = 400, test: int = 100) -> list[Path]:
    """Write both files; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    wanted: list[tuple[str, Split, int]] = [("train", "train", train), ("test", "held_out", test)]
    paths = []
    for name, split, count in wanted:
        found: dict[str, Exercise] = {}
        while len(found) < count:
            exercise = generate(rng, KINDS, split)
            found.setdefault(exercise.text, exercise)
        rows = [json.dumps(row(exercise, number)) for number, exercise in enumerate(found.values(), 1)]
        paths.append(out / f"{name}.jsonl")
        paths[-1].write_text("".join(f"{line}\n" for line in rows), encoding="utf-8")
    return paths


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m data.canvas.build")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--seed", type=int, default=0, help="fixes the problems")
    parser.add_argument("--train", type=int, default=400, help="training problems")
    parser.add_argument("--test", type=int, default=100, help="test problems")
    given = parser.parse_args(argv)
    for path in build(given.out, given.seed, train=given.train, test=given.test):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
