"""Runs a workflow on a problem: `python -m flowjax.canvas.run --workflow=... --problem=... --backends=backends.json`.

    python -m flowjax.canvas.run --workflow="Plan -> Custom -> Format" --problem="What is 6 times 7?" \\
        --backends=backends.json --svg=workflow.svg
    python -m flowjax.canvas.run --workflow=workflow.json --problem=@problem.txt --kind=qa --backends=backends.json

The workflow is its text, or a file of its JSON form; backends.json is as for `flowjax.canvas.doctor`. The answer goes
to standard output; status, cost and what failed to standard error, with --verbose each call as it starts and ends,
with --stream its replies, too, as they are written.
--json writes the run (`WorkflowRun.to_json`), --save the workflow's JSON form, --svg a drawing, --export a Python file
that makes the same requests (`flowjax.canvas.forms`). Exit status: 0 with an answer, 1 without, 2 for what is wrong in
the command.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from flowjax.canvas.backends.config import BackendConfigError, open_backends, read_backends
from flowjax.canvas.checks import problems
from flowjax.canvas.context import Sandbox
from flowjax.canvas.draw import svg
from flowjax.canvas.forms import python_form, read_workflow, to_json
from flowjax.canvas.graph import WorkflowError
from flowjax.canvas.operators.registry import OperatorRegistryError, load_operators
from flowjax.canvas.run import run
from flowjax.canvas.values import NodeEvent, Problem, ProblemKind, WorkflowRun
from flowjax.grading.answers import options_of


async def _run(arguments: argparse.Namespace) -> tuple[WorkflowRun, dict[str, Callable[[], str]]]:
    """The run, and by path the functions that make the texts of its output files."""
    workflow = read_workflow(arguments.workflow)
    operators = load_operators(arguments.operators)
    text = arguments.problem
    text = Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
    config, default = read_backends(arguments.backends)
    problem = Problem(text, arguments.kind, options=options_of(text) if arguments.kind == "choice" else {})
    if arguments.kind == "choice" and not problem.options:
        raise WorkflowError("--kind=choice: --problem lists no options: put each on a line, such as `A. red`")
    async with open_backends(config) as backends:
        if faults := problems(workflow, operators, backends):
            raise WorkflowError(" ".join(faults))
        for path in filter(None, (arguments.svg, arguments.json, arguments.save)):
            Path(path).open("a").close()  # a path that cannot be written fails before any request is paid for
        if arguments.export:
            written = python_form(
                workflow,
                problem,
                operators,
                backends=config,
                default_backend=default,
                extra_operators=arguments.operators,
            )
            Path(arguments.export).write_text(written, encoding="utf-8")
        result = await run(
            workflow,
            problem,
            operators=operators,
            backends=backends,
            default_backend=default,
            sandbox=Sandbox(allow_none=arguments.allow_no_isolation),
            on_event=_EventPrinter() if arguments.verbose or arguments.stream else None,
            stream=arguments.stream,
        )
    wanted = {
        arguments.svg: lambda: svg(workflow, result, operators),
        arguments.json: lambda: json.dumps(result.to_json(), indent=1),
        arguments.save: lambda: json.dumps(to_json(workflow), indent=1),
    }
    return result, {path: text for path, text in wanted.items() if path}


class _EventPrinter:
    """Prints events. Replies are printed line by line, so that calls side by side can be told apart."""

    def __init__(self):
        self._replies: dict[str, str] = {}  # node id -> the part of its reply that is not printed yet
        self._texts: dict[str, str] = {}  # node id -> its reply so far

    def __call__(self, event: NodeEvent) -> None:
        about = f"{event.seconds:7.2f} s  {event.node_id} {event.operator}"
        if event.text is not None:
            before = self._texts.get(event.node_id, "")
            if not event.text.startswith(before):  # another request, or another try
                self._end_reply(event, about)
                before = ""
            *lines, rest = (self._replies.pop(event.node_id, "") + event.text[len(before) :]).split("\n")
            _print_lines(about, lines)
            self._replies[event.node_id], self._texts[event.node_id] = rest, event.text
            return
        run = event.node_run
        if run is not None:
            self._end_reply(event, about)
        said = "starts" if run is None else f"{run.status}{' (cached)' if run.cached else ''}, {run.usage.calls} calls"
        print(f"{about}: {said}", file=sys.stderr)

    def _end_reply(self, event: NodeEvent, about: str) -> None:
        self._texts.pop(event.node_id, None)
        if rest := self._replies.pop(event.node_id, ""):
            _print_lines(about, [rest])


def _print_lines(about: str, lines: Sequence[str]) -> None:
    for line in lines:
        print(f"{about} | {line}", file=sys.stderr)


def _report(result: WorkflowRun) -> None:
    usage = result.usage
    tokens = usage.prompt_tokens + usage.sampled_tokens
    print(f"{result.status}: {usage.calls} calls, {tokens} tokens, {usage.cost:g} cost", file=sys.stderr)
    for line in dict.fromkeys(result.errors):
        print(line, file=sys.stderr)
    if result.answer:
        print(result.answer)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m flowjax.canvas.run", description="Run a workflow on a problem.")
    parser.add_argument("--workflow", required=True, help="a workflow's text, or a file of its JSON form")
    parser.add_argument("--problem", required=True, help="the problem's text, or @file")
    parser.add_argument("--kind", default="general", choices=get_args(ProblemKind), help="of the problem")
    parser.add_argument("--backends", required=True, help="a JSON file, or a recipe")
    parser.add_argument("--operators", nargs="*", default=[], help="further operators, package.module:Class")
    parser.add_argument("--svg", default="", help="where to draw the run")
    parser.add_argument("--json", default="", help="where to write the run as JSON")
    parser.add_argument("--save", default="", help="where to write the workflow's JSON form")
    parser.add_argument("--allow-no-isolation", action="store_true", help="run programs with resource limits only")
    parser.add_argument("--export", default="", help="where to write the workflow as a Python file")
    parser.add_argument("--verbose", action="store_true", help="print each call as it starts and ends")
    parser.add_argument("--stream", action="store_true", help="print replies, too, as they are written")
    try:
        result, texts = asyncio.run(_run(parser.parse_args(argv)))
        _report(result)  # first, since writing the files may fail, and the answer is paid for
        for path, text in texts.items():
            Path(path).write_text(text(), encoding="utf-8")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (WorkflowError, BackendConfigError, OperatorRegistryError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}: give another file", file=sys.stderr)
        return 2
    except UnicodeDecodeError as error:
        print(f"the file of --problem is no text ({error}): give one in UTF-8", file=sys.stderr)
        return 2
    return 0 if result.answer else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
