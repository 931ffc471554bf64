"""The Python form of workflows: run by itself, it makes the same requests in the same order as the interpreter."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_server import chat
from test_outage import endpoint

from flowjax.canvas import Problem, Workflow, load_operators, open_backends, parse, run
from flowjax.canvas.forms import python_form
from flowjax.records import state_key

OPERATORS = load_operators(entry_points=False)
HARD_TO_QUOTE = json.dumps('by\n """ hand \\')
WORKFLOWS = (
    f"Plan -> [Custom, Custom, AnswerGenerate{{{HARD_TO_QUOTE}}}] -> ScEnsemble -> (Verify ? done : Revise)",
    "Custom -> (Review -> Revise) * 3 -> Format",
    "[Custom -> [Custom, Custom] -> Aggregate, AnswerGenerate -> ((Verify -> Revise) * 2) * 2, Format] -> MdEnsemble",
    "Custom#first -> AnswerGenerate#second -> ScEnsemble{candidates=first.answer, candidates=second.answer}",
    "Decompose -> Custom@large -> ([Review, Verify] ? Format : Revise@large) -> Custom",
    "([Custom#a, Plan#b] -> Revise{answer=a.answer}) * 3",
    "Format -> Custom",
    f"{'(' * 30}Custom -> Review) * 2{')' * 29} -> Revise",
    f"{'(' * 22}Custom -> Review{') * 1' * 22}",  # deeper than Python nests loops
    "",
)


def reply(body: dict[str, Any]) -> Any:
    """By the messages and the seed, so that checks pass and fail and candidates differ."""
    place = state_key(json.dumps(body["messages"]), body["seed"])
    fields = body.get("response_format", {}).get("json_schema", {}).get("schema", {}).get("properties", {})
    if "passed" in fields:
        return chat(json.dumps({"feedback": f"look {place % 7}", "passed": place % 3 == 0}))
    if "choice" in fields:
        return chat(json.dumps({"choice": fields["choice"]["enum"][place % len(fields["choice"]["enum"])]}))
    if "subproblems" in fields:
        return chat(json.dumps({"subproblems": ["What is 6?", f"What is {place % 9}?"]}))
    return chat(f"Answer: {place % 4}")


def played(workflow: Workflow, config: dict[str, Any], concurrent: int) -> str:
    async def scenario() -> str:
        async with open_backends(config) as backends:
            made = await run(
                workflow, PROBLEM, operators=OPERATORS, backends=backends, default_backend="small",
                max_concurrent=concurrent, seed=3,
            )  # fmt: skip
            return made.answer

    return asyncio.run(scenario())


PROBLEM = Problem("What is 6 times 7?", "math")
_RUN = """import runpy, sys
runpy.run_path(sys.argv.pop(1), run_name="__main__")
assert not [name for name in sys.modules if name in ("jax", "numpy") or name.startswith("flowjax.envs")], sys.modules
"""


@pytest.mark.parametrize("text", WORKFLOWS)
def test_the_same_requests_in_the_same_order(text: str, tmp_path: Path):
    workflow, file = parse(text), tmp_path / "workflow.py"
    with endpoint(reply) as server:
        each = {"kind": "openai", "base_url": server.url, "structured": True}
        config = {"small": {**each, "model": "small"}, "large": {**each, "model": "large"}}
        answer = played(workflow, config, 1)
        asked, server.bodies[:] = list(server.bodies), []
        form = python_form(
            workflow, PROBLEM, OPERATORS, backends=config, default_backend="small", seed=3, max_concurrent=1
        )
        file.write_text(form, encoding="utf-8")
        done = subprocess.run([sys.executable, "-c", _RUN, str(file)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert server.bodies == asked
        assert done.stdout == f"{answer}\n"
        assert bool(asked) == (text not in ("", "Format -> Custom"))


def test_side_by_side_it_asks_the_same_in_some_order(tmp_path: Path):
    workflow, file = parse(WORKFLOWS[2]), tmp_path / "workflow.py"
    with endpoint(reply) as server:
        config = {"small": {"kind": "openai", "base_url": server.url, "model": "m"}}
        answer = played(workflow, config, 8)
        asked, server.bodies[:] = list(server.bodies), []
        form = python_form(workflow, PROBLEM, OPERATORS, backends=config, default_backend="small", seed=3)
        file.write_text(form, encoding="utf-8")
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True, timeout=60)
        assert sorted(map(json.dumps, server.bodies)) == sorted(map(json.dumps, asked))
        assert done.stdout == f"{answer}\n"
