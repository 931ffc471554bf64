"""A small set of word problems in a published format: python -m data.math.build --out=FOLDER --seed=0 --format=gsm8k

Writes FOLDER/train.jsonl and FOLDER/test.jsonl (parquet for dapo, as published). Equal seeds give equal files, and no
test problem is in the training file.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.envs import Split
from flowjax.envs.math.problems import DAPO_AFTER, DAPO_BEFORE, split_of

FORMATS = ("gsm8k", "math", "deepscaler", "aime", "dapo")
NAMES = ("Ana", "Ben", "Chidi", "Dora", "Emre", "Fumi", "Goran", "Hana", "Ivo", "Jun")
THINGS = ("apples", "books", "coins", "stamps", "shells", "tickets", "pencils", "marbles")


def problem(rng: np.random.Generator) -> tuple[str, str, str]:
    """Question, way to the answer, and answer as LaTeX."""
    name, other = (NAMES[i] for i in rng.choice(len(NAMES), 2, replace=False))
    thing = THINGS[rng.integers(len(THINGS))]
    a, b, c = (int(n) for n in rng.integers(2, 40, size=3))
    kind = rng.integers(3)
    if kind == 0:
        question = f"{name} has {a} boxes of {b} {thing} and gives {c} of them to {other}. How many {thing} are left?"
        return (
            question.replace(f"gives {c}", f"gives {min(c, a * b)}"),
            f"{a}*{b}-{min(c, a * b)}",
            str(a * b - min(c, a * b)),
        )
    if kind == 1:
        question = (
            f"{name} buys {a} {thing} for {b} dollars each, {other} buys {c} for as much. What do both pay together?"
        )
        return question, f"({a}+{c})*{b}", str((a + c) * b)
    question = (
        f"Of {a + b} {thing} in a bag, {a} are {name}'s. One is drawn at random. What is the chance that it is hers?"
    )
    common = int(np.gcd(a, a + b))
    return question, f"{a}/{a + b}", rf"\frac{{{a // common}}}{{{(a + b) // common}}}"


def row(form: str, number: int, question: str, way: str, answer: str) -> Mapping[str, Any]:
    """A problem in the fields of one of FORMATS."""
    solution = rf"We have ${way}$, which is $\boxed{{{answer}}}$."
    if form == "gsm8k":
        return {"question": question, "answer": f"We have {way}.\n#### {answer}"}
    if form == "math":
        return {"problem": question, "level": "Level 1", "type": "Prealgebra", "solution": solution}
    if form == "deepscaler":
        return {"problem": question, "answer": answer, "solution": solution}
    if form == "aime":
        return {"ID": f"made-{number}", "Problem": question, "Solution": solution, "Answer": answer}
    before = "Solve the following math problem step by step. The last line of your response should be of the form "
    before += f"Answer: $Answer (without quotes) where $Answer {DAPO_BEFORE}\n\n"
    said = f'{before}{question}\n\n{DAPO_AFTER} "Answer:".'
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": said, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"made-{number}"},
    }


def build(out: Path, seed: int, form: str = "gsm8k", *, train: int = 200, test: int = 50) -> list[Path]:
    """Write both files; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    wanted: dict[Split, int] = {"train": train, "held_out": test}
    rows: dict[Split, list[Mapping[str, Any]]] = {"train": [], "held_out": []}
    seen: set[str] = set()
    while any(len(rows[split]) < count for split, count in wanted.items()):
        question, way, answer = problem(rng)
        split = split_of(question)
        if question not in seen and len(rows[split]) < wanted[split]:
            seen.add(question)
            rows[split].append(row(form, len(seen), question, way, answer))
    return [_write(out / "train", form, rows["train"]), _write(out / "test", form, rows["held_out"])]


def _write(path: Path, form: str, rows: list[Mapping[str, Any]]) -> Path:
    if form == "dapo":
        import pyarrow
        import pyarrow.parquet as parquet

        path = path.with_suffix(".parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path = path.with_suffix(".jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m data.math.build")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--seed", type=int, default=0, help="fixes the problems")
    parser.add_argument("--format", choices=FORMATS, default="gsm8k", help="whose fields the files have")
    parser.add_argument("--train", type=int, default=200, help="training problems")
    parser.add_argument("--test", type=int, default=50, help="test problems")
    given = parser.parse_args(argv)
    for path in build(given.out, given.seed, given.format, train=given.train, test=given.test):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
