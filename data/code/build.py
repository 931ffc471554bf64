"""Write generated problems as HumanEval, MBPP, LiveCodeBench and DeepCoder have theirs:

    python -m data.code.build --out=/tmp/code --seed=0 --problems=64

makes humaneval.jsonl, mbpp.jsonl, livecodebench.jsonl and deepcoder.jsonl there. Every solution passes its tests; the
tests check that (tests/envs/test_code_world.py).
"""

import argparse
import base64
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.envs.code.problems import OPERATIONS, Recipe, draw, generated_problem
from flowjax.grading.code import CallCase

CASES, PUBLIC = 8, 2


def _calls(recipe: Recipe, seed: int) -> list[tuple[Any, Any]]:
    cases = generated_problem(recipe, seed, cases=CASES, public=PUBLIC).suite.cases
    return [(case.arguments[0], case.expected) for case in cases if isinstance(case, CallCase)]


def _body(recipe: Recipe) -> list[str]:
    """The solution's statements, laid out as people do."""
    return recipe.program().partition(" : ")[2].replace("[ ", "[").replace(" ]", "]").split(" ; ")


def _function(recipe: Recipe, name: str) -> str:
    return "\n".join([f"def {name}(x):", *(f"    {line}" for line in _body(recipe))]) + "\n"


def _steps(recipe: Recipe) -> str:
    return recipe.statement().partition("\n")[2].rpartition("\n")[0]


def human_eval(recipe: Recipe, number: int) -> dict[str, Any]:
    """A function to complete; a third of the tests loop, as some of the real ones do."""
    calls, entry = _calls(recipe, number), f"transform_{number}"
    shown = "\n".join(f"    >>> {entry}({x!r})\n    {y!r}" for x, y in calls[:PUBLIC])
    steps = "\n".join(f"    {line}" for line in _steps(recipe).splitlines())
    prompt = (
        f'from typing import List\n\n\ndef {entry}(x):\n    """Take x through these steps.\n{steps}\n{shown}\n    """\n'
    )
    if number % 3:
        asserts = "\n".join(f"    assert candidate({x!r}) == {y!r}" for x, y in calls)
    else:
        asserts = f"    for x, y in {calls!r}:\n        assert candidate(x) == y"
    return {
        "task_id": f"Generated/{number}",
        "prompt": prompt,
        "entry_point": entry,
        "canonical_solution": "".join(f"    {line}\n" for line in _body(recipe)),
        "test": f"\n\nMETADATA = {{}}\n\n\ndef check(candidate):\n{asserts}\n",
    }


def mbpp(recipe: Recipe, number: int) -> dict[str, Any]:
    """A problem as a row of MBPP."""
    name = f"transform_{number}"
    return {
        "task_id": number,
        "text": f"Write a function that takes x through these steps and returns it.\n{_steps(recipe)}",
        "code": _function(recipe, name),
        "test_list": [f"assert {name}({x!r}) == {y!r}" for x, y in _calls(recipe, number)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def live_code_bench(recipe: Recipe, number: int) -> dict[str, Any]:
    """Every other problem is a method of a class, the rest read standard input; hidden tests are packed as theirs."""
    functional = number % 2 == 0
    tests = [
        {
            "input": json.dumps(x),
            "output": json.dumps(y) if functional else str(y),
            "testtype": "functional" if functional else "stdin",
        }
        for x, y in _calls(recipe, number)
    ]
    hidden = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests[PUBLIC:])))).decode()
    source = f"x is given as JSON. Take it through these steps, then print it.\n{_steps(recipe)}"
    return {
        "question_title": f"Transform {number}",
        "question_content": f"Take x through these steps.\n{_steps(recipe)}" if functional else source,
        "question_id": str(number),
        "starter_code": "class Solution:\n    def transform(self, x):\n        " if functional else "",
        "public_test_cases": json.dumps(tests[:PUBLIC]),
        "private_test_cases": hidden,
        "metadata": json.dumps({"func_name": "transform"} if functional else {}),
    }


def deep_coder(recipe: Recipe, number: int) -> dict[str, Any]:
    """Every other problem calls a function, the rest read standard input."""
    calls = _calls(recipe, number)
    if number % 2 == 0:
        tests = [{"type": "function_call", "fn_name": "transform", "input": [x], "output": [y]} for x, y in calls]
        solution = _function(recipe, "transform")
    else:
        tests = [{"type": "stdin_stdout", "input": json.dumps(x) + "\n", "output": f"{y}\n"} for x, y in calls]
        solution = "import json\nx = json.loads(input())\n" + "\n".join(_body(recipe)[:-1]) + "\nprint(x)\n"
    return {
        "problem": f"x is given. Take it through these steps.\n{_steps(recipe)}",
        "solutions": [f"```python\n{solution}```"],
        "tests": json.dumps(tests),
    }


FORMATS: dict[str, Callable[[Recipe, int], dict[str, Any]]] = {
    "humaneval": human_eval,
    "mbpp": mbpp,
    "livecodebench": live_code_bench,
    "deepcoder": deep_coder,
}


def build(out: Path, seed: int = 0, problems: int = 64) -> dict[str, Path]:
    """Write one file per format; returns them by format."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {}
    for kind, write in FORMATS.items():
        rng = np.random.default_rng([seed, *kind.encode()])
        rows = [write(draw(rng, tuple(OPERATIONS), 3), number) for number in range(problems)]
        paths[kind] = out / f"{kind}.jsonl"
        paths[kind].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=64, help="of each format")
    options = parser.parse_args()
    for path in build(options.out, options.seed, options.problems).values():
        print(path)


if __name__ == "__main__":
    main()
