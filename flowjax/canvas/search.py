"""A search for one workflow that suits all problems, without training: the baseline of a policy at the same budget.

    python -m flowjax.canvas.search --data=train.jsonl --held_out=test.jsonl --backends=backends.json --calls=5000
    python -m flowjax.canvas.search ... --optimizer=large --phrases=phrases.txt

AFlow's search (Zhang et al. 2024, arXiv:2410.10762): a tree of workflows that begins with `--workflow`. Each round
draws one of the best so far (`chances`), changes it in one place, and plays the result on `--problems` of the data. The
change is a random edit or, as in AFlow, a proposal of the backend `--optimizer`, which is shown the workflow, problems
that it fails on, and earlier changes of it. `--phrases` is a file of instructions for random edits, one a line. Random
edits may also send calls to any backend but the optimizer.

A workflow may make `--calls_each` calls for a problem; then it ends, with the answer that it has. When `--calls` are
used up, the optimizer's included, the best workflows are played on as many further problems of the data, or on those
that are left. The best of these on both is played on `--held_out`, beside the workflow that the search began with.
Calls after the search are not part of `--calls`, and are reported beside it.

`--out` (by default `evaluations/search-<data>`) gets `workflow.json` (the one that was found), `search.json` (every
round), and `rows.jsonl`, `results.json` and `results.md` as `flowjax.canvas.evaluate` writes them. The same command
again plays nothing that is in rows.jsonl; the optimizer's proposals are requested again.

Exit status: 0 done, 1 a backend is away (what was played is kept), 2 something to correct in the command.
"""

import argparse
import asyncio
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.canvas import edits
from flowjax.canvas.backends import Backend, BackendError, BackendUnavailable, Request, reply_of
from flowjax.canvas.backends.config import BackendConfigError, open_backends, read_backends
from flowjax.canvas.checks import problems, unknown_name
from flowjax.canvas.forms import read_workflow, to_json
from flowjax.canvas.graph import Call, Conditional, Loop, Parallel, Workflow, WorkflowError
from flowjax.canvas.graph import Sequence as Steps
from flowjax.canvas.operators import Operator, Role
from flowjax.canvas.operators.registry import HIDDEN, describe, load_operators
from flowjax.canvas.problem_rows import (
    ROWS,
    BackendAway,
    Job,
    command_parser,
    exit_status,
    is_refused,
    kept_rows,
    markdown,
    name_of,
    play,
    read_problems,
    refuse_below,
    write_results,
)
from flowjax.canvas.text import parse, show
from flowjax.envs import WorldError
from flowjax.envs.canvas.problem_files import Record, alike
from flowjax.files import replace_file

MAX_NODES = 16  # of a workflow; larger ones are not proposed
BRANCHES, LOOP_COUNTS = 3, (2, 3)
UNIFORM, SHARPNESS, PARENTS = 0.3, 0.2, 4  # as AFlow's code has them: its lambda and alpha, and how many of the best
FINALISTS = 3
_DRAWS = 50  # of a random edit, until one gives a workflow that can run and is new
_ASKED = 3  # times that an optimizer is asked for a workflow that can run and is new
_FAILURES = 3  # problems that an optimizer is shown
_SHOWN_CHARACTERS = 600  # of each
_REPLY_TOKENS = 4096  # of an optimizer
_WORKFLOW = re.compile(r"<workflow>(.*?)</workflow>", re.DOTALL)

_PROMPT = """You improve a workflow: operators that a language model carries out to solve a problem.

Operators:
{operators}
{backends}
How workflows are written:
A -> B            one after the other
[A, B]            side by side; an operator that combines (combiner) must follow
(C ? done : E)    E where the check of C does not pass
(A -> B) * 3      at most three times; ends early where a check passes
A{{"text"}}         an instruction of your own for A

This workflow solves {score:.0f} % of the problems with {calls:.1f} calls each:
<workflow>{workflow}</workflow>
{tried}{failures}
Change it in one place, so that it solves more. Say in one sentence why, and then write the whole new workflow between
<workflow> and </workflow>."""


@dataclass(frozen=True)
class Round:
    """A workflow that was played, the index of the round whose workflow it was made from, and its rows."""

    workflow: Workflow
    parent: int | None
    rows: Sequence[Mapping[str, Any]]

    @property
    def accuracy(self) -> float:
        return float(np.mean([row["correct"] for row in self.rows]))

    @property
    def calls(self) -> int:
        """Calls of all rows, at least one for each problem: workflows that ask nothing would make a search endless."""
        return sum(max(1, row["calls"]) for row in self.rows)

    @property
    def rank(self) -> tuple[float, int]:
        """Higher is better: accuracy first, then fewer calls."""
        return self.accuracy, -self.calls


def chances(accuracies: Sequence[float]) -> np.ndarray:
    """Probabilities of workflows to be changed next: p = u / n + (1 - u) softmax(s * accuracy in percent), shape [n].

    u is `UNIFORM` and s is `SHARPNESS` (Zhang et al. 2024, section 3.2).
    """
    percent = 100 * np.asarray(accuracies)
    weights = np.exp(SHARPNESS * (percent - percent.max()))  # less the maximum: no overflow, and the same softmax
    return UNIFORM / len(percent) + (1 - UNIFORM) * weights / weights.sum()


@dataclass(frozen=True)
class Space:
    """The search space: operators, backends and instructions that workflows may be made of.

    backends: names that a workflow may use.
    drawn: names that random edits choose from, "" for the default backend.
    """

    operators: Mapping[str, type[Operator]]
    backends: Collection[str]
    drawn: Sequence[str] = ("",)
    phrases: Sequence[str] = ()

    def fault(self, workflow: Workflow) -> str:
        """Reason not to play a workflow, "" for one that is played."""
        if sum(1 for _ in workflow.nodes()) > MAX_NODES:
            return f"It has more than {MAX_NODES} nodes."
        if not any(True for _ in workflow.calls()):
            return "It has no operator."
        return " ".join(problems(workflow, self.operators, self.backends))

    def names(self, *roles: Role) -> list[str]:
        """Names of the operators of these roles, hidden ones left out."""
        hidden = {operator.name for operator in HIDDEN}
        return [name for name, of in self.operators.items() if of.role in roles and name not in hidden]


# ------------------------------------------------------------------------------------------------------ random edits


def random_edit(workflow: Workflow, space: Space, rng: np.random.Generator) -> Workflow | None:
    """The workflow with one random change, None where the drawn change cannot be applied to it."""
    calls = list(workflow.calls())
    change = _CHANGES[int(rng.integers(len(_CHANGES)))]
    try:
        return change(workflow, _one(calls, rng), space, rng)
    except edits.EditError:
        return None


def _add_step(workflow: Workflow, call: Call, space: Space, rng: np.random.Generator) -> Workflow | None:
    name = _one(space.names("planner", "solver", "reviser", "formatter"), rng)
    return edits.add(workflow, Call(name), into=call.id, position=int(rng.integers(2)))


def _remove(workflow: Workflow, call: Call, space: Space, rng: np.random.Generator) -> Workflow | None:
    return edits.delete(workflow, _one(list(workflow.nodes()), rng).id)


def _replace(workflow: Workflow, call: Call, space: Space, rng: np.random.Generator) -> Workflow | None:
    role = space.operators[call.operator].role
    alike = [name for name in space.names(role) if name != call.operator]
    return edits.modify(workflow, call.id, operator=_one(alike, rng)) if alike else None


def _instruct(workflow: Workflow, call: Call, space: Space, rng: np.random.Generator) -> Workflow | None:
    others = [phrase for phrase in ("", *space.phrases) if phrase != call.instruction]
    return edits.set_instruction(workflow, call.id, _one(others, rng)) if others else None


def _change_backend(workflow: Workflow, call: Call, space: Space, rng: np.random.Generator) -> Workflow | None:
    others = [name for name in space.drawn if name != call.backend]
    return edits.modify(workflow, call.id, backend=_one(others, rng)) if others else None


def _vote(workflow: Workflow, call: Call, space: Space, rng: np.random.Generator) -> Workflow | None:
    """Replace a solver by `BRANCHES` in parallel and a combiner: copies of it, or, half of the time, it and others."""
    solvers, combiners = space.names("solver"), space.names("combiner")
    if call.operator not in solvers or not combiners:
        return None
    others = [Call(_one(solvers, rng)) for _ in range(BRANCHES - 1)] if rng.random() < 0.5 else [call] * (BRANCHES - 1)
    branches = tuple(Call(each.operator, each.instruction, each.backend) for each in (call, *others))
    piece = Steps((Parallel(branches), Call(_one(combiners, rng))))
    return edits.delete(edits.add(workflow, piece, into=call.id, position=1), call.id)


def _check(workflow: Workflow, call: Call, space: Space, rng: np.random.Generator) -> Workflow | None:
    checker, reviser = _checker_and_reviser(space, rng)
    return edits.add(workflow, Conditional(checker, None, reviser), into=call.id, position=1)


def _repeat(workflow: Workflow, call: Call, space: Space, rng: np.random.Generator) -> Workflow | None:
    steps = Steps(_checker_and_reviser(space, rng))
    return edits.add(workflow, Loop(steps, _one(LOOP_COUNTS, rng)), into=call.id, position=1)


def _checker_and_reviser(space: Space, rng: np.random.Generator) -> tuple[Call, Call]:
    checkers, revisers = space.names("checker"), space.names("reviser", "solver")
    if not checkers or not revisers:
        raise edits.EditError("There is no operator that checks, or none that revises.")
    return Call(_one(checkers, rng)), Call(_one(revisers, rng))


_CHANGES: tuple[Callable[[Workflow, Call, Space, np.random.Generator], Workflow | None], ...]
_CHANGES = (_add_step, _remove, _replace, _instruct, _change_backend, _vote, _check, _repeat)


def _one(choices: Sequence[Any], rng: np.random.Generator) -> Any:
    return choices[int(rng.integers(len(choices)))]


# --------------------------------------------------------------------------------------------------- the optimizer


def optimizer_prompt(rounds: Sequence[Round], parent: int, space: Space) -> str:
    """The message to an optimizer: the workflow, earlier changes of it, and problems that it fails on."""
    current = rounds[parent]
    made = [each for each in rounds if each.parent == parent]
    tried = "".join(f"{100 * each.accuracy:.0f} %: {show(each.workflow)}\n" for each in made)
    wrong = [row for row in current.rows if not row["correct"]][:_FAILURES]
    failures = "".join(
        f"Problem: {_cut(row['question'])}\nAnswer: {_cut(row['answer'])}\nRight: {_cut(row['gold'])}\n\n"
        for row in wrong
    )
    others = ", ".join(filter(None, space.drawn))
    return _PROMPT.format(
        operators=describe(space.operators),
        backends=f"A@name is carried out by another model: {others}.\n" if others else "",
        score=100 * current.accuracy,
        calls=current.calls / len(current.rows),
        workflow=show(current.workflow),
        tried=f"\nWhat was made of it before, and what that solves:\n{tried}" if tried else "",
        failures=f"\nIt fails on these:\n\n{failures}" if failures else "",
    )


def _cut(value: Any) -> str:
    text = " ".join(str(each) for each in value) if isinstance(value, list) else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."


def read_proposal(reply: str, space: Space) -> tuple[Workflow | None, str]:
    """The workflow in an optimizer's reply and ""; None and the reason where it has none that can run."""
    found = _WORKFLOW.findall(reply)
    if not found:
        return None, "There is no <workflow> in your reply."
    try:
        workflow = parse(found[-1].strip())
    except WorkflowError as error:
        return None, str(error)
    fault = space.fault(workflow)
    return (None, fault) if fault else (workflow, "")


# ------------------------------------------------------------------------------------------------------- the search


@dataclass
class WorkflowSearch:
    """Plays rounds of a search.

    play: plays a workflow on the problems of the search, and returns its rows.
    optimizer: None for random edits.
    asked: requests to the optimizer so far.
    """

    space: Space
    play: Callable[[Workflow], Awaitable[Sequence[Mapping[str, Any]]]]
    rng: np.random.Generator
    optimizer: Backend | None = None
    asked: int = 0

    async def run(self, start: Workflow, calls: int) -> list[Round]:
        """All rounds, that of `start` first; none is started once `calls` are used up.

        Raises:
            BackendAway: every request of `start` is refused.
        """
        rounds = [Round(start, None, await self.play(start))]
        if all(map(is_refused, rounds[0].rows)):
            raise BackendAway(f"every request of --workflow is refused: {rounds[0].rows[0]['errors'][0]}")
        seen = {show(start)}
        while self.spent(rounds) < calls:
            changed = await self._changed(rounds, self._parent(rounds), seen)
            if changed is None:
                print(f"no workflow was found that is new: {self.spent(rounds)} of {calls} calls were made")
                break
            workflow, parent = changed
            seen.add(show(workflow))
            rounds.append(Round(workflow, parent, await self.play(workflow)))
            print(f"{self.spent(rounds):6} calls  {100 * rounds[-1].accuracy:5.1f} %  {show(workflow)}", flush=True)
        return rounds

    def spent(self, rounds: Sequence[Round]) -> int:
        """Calls of all rounds and requests to the optimizer."""
        return sum(each.calls for each in rounds) + self.asked

    def _parent(self, rounds: Sequence[Round]) -> int:
        """Index of the round to change next, drawn by `chances` from the `PARENTS` best and the first."""
        best = sorted(range(len(rounds)), key=lambda number: rounds[number].rank, reverse=True)[:PARENTS]
        choices = list(dict.fromkeys([*best, 0]))
        return choices[int(self.rng.choice(len(choices), p=chances([rounds[number].accuracy for number in choices])))]

    async def _changed(self, rounds: Sequence[Round], parent: int, seen: set[str]) -> tuple[Workflow, int] | None:
        """A workflow that was not played yet, and the index of the round it was made from; None where none is found."""
        if self.optimizer is None:
            return self._edited(rounds, parent, seen)
        messages = [{"role": "user", "content": optimizer_prompt(rounds, parent, self.space)}]
        for attempt in range(_ASKED):
            seed = len(rounds) * _ASKED + attempt
            request = Request(messages, temperature=1.0, max_new_tokens=_REPLY_TOKENS, seed=seed)
            self.asked += 1
            try:
                reply = (await reply_of(self.optimizer, request)).text
            except Exception as error:  # as `Backend` says: all but a refusal of this request is an outage
                if not isinstance(error, BackendError) or isinstance(error, BackendUnavailable):
                    raise BackendAway(f"--optimizer: {type(error).__name__}: {error}") from error
                logging.warning("The optimizer refuses (%s): the next edit is random", error)
                break
            workflow, fault = read_proposal(reply, self.space)
            if workflow is not None and show(workflow) not in seen:
                return workflow.numbered(), parent
            fault = fault or "That workflow was tried before."
            message = {"role": "user", "content": f"{fault} Try again."}
            messages = [*messages, {"role": "assistant", "content": reply}, message]
        return self._edited(rounds, parent, seen)  # so that an optimizer which fails does not end the search

    def _edited(self, rounds: Sequence[Round], parent: int, seen: set[str]) -> tuple[Workflow, int] | None:
        """As `_changed`, by a random edit; of another workflow where no edit of this one was new in `_DRAWS` draws."""
        for number in (parent, *range(len(rounds) - 1, -1, -1)):
            for _ in range(_DRAWS):
                workflow = random_edit(rounds[number].workflow, self.space, self.rng)
                if workflow is not None and show(workflow) not in seen and not self.space.fault(workflow):
                    return workflow, number
        return None


@dataclass(frozen=True)
class Data:
    """Problems: `wanted` for the search, `further` to decide between its best, `held_out` to measure what was found."""

    wanted: Sequence[tuple[Path, Record]]
    further: Sequence[tuple[Path, Record]]
    held_out: Sequence[tuple[Path, Record]]
    left_out: Mapping[str, int]


def read_data(arguments: argparse.Namespace) -> Data:
    """The problems of `--held_out`, and those of `--data` that are not among them.

    Raises:
        WorldError: there are none, or too few.
    """
    held_out, left_out = read_problems(Path(arguments.held_out), 0, arguments.packages, flag="--held_out")
    known = {alike(record) for _, record in held_out}
    data = Path(arguments.data)
    data = data / "train.jsonl" if (data / "train.jsonl").is_file() else data
    found, more_left_out = read_problems(data, 0, arguments.packages)
    usable = list({alike(record): (file, record) for file, record in found}.values())
    usable = [(file, record) for file, record in usable if alike(record) not in known]
    if left := len(found) - len(usable):
        print(f"{left} problems of --data are left out: they are in --held_out, or there twice", file=sys.stderr)
    count = arguments.problems
    if len(usable) < count:
        raise WorldError(
            f"--problems={count}, and --data={data} has {len(usable)} that are not held out: ask for fewer"
        )
    order = np.random.default_rng(arguments.seed).permutation(len(usable))
    usable = [usable[int(number)] for number in order]
    return Data(usable[:count], usable[count : 2 * count], held_out, Counter(left_out) + Counter(more_left_out))


async def _search(arguments: argparse.Namespace) -> None:
    data = read_data(arguments)
    config, default = read_backends(arguments.backends)
    operators = load_operators(arguments.operators)
    phrases = _read_phrases(arguments.phrases) if arguments.phrases else []
    out = Path(arguments.out or f"evaluations/search-{name_of(Path(arguments.data))}")
    out.mkdir(parents=True, exist_ok=True)
    kept = kept_rows(out / ROWS)
    async with open_backends(config) as backends:
        if arguments.optimizer and arguments.optimizer not in backends:
            raise BackendConfigError(f"--optimizer: {unknown_name('backend', arguments.optimizer, backends)}")
        others = [name for name in backends if name not in (default, arguments.optimizer)]
        space = Space(operators, set(backends), ("", *others), phrases)
        start = read_workflow(arguments.workflow).numbered()
        if fault := space.fault(start):
            raise WorkflowError(f"--workflow: {fault}")
        settings: dict[str, Any] = {"operators": operators, "backends": backends, "default": default}
        settings |= {"at_once": arguments.at_once, "packages": tuple(arguments.packages)}

        async def played(workflow: Workflow, on: Sequence[tuple[Path, Record]]) -> list[dict[str, Any]]:
            job = Job("search", workflow, arguments.temperature, arguments.calls_each)
            return await play(job, on, kept, out / ROWS, **settings)

        rng = np.random.default_rng([arguments.seed, 1])
        optimizer = backends.get(arguments.optimizer)
        search = WorkflowSearch(space, lambda workflow: played(workflow, data.wanted), rng, optimizer)
        rounds = await search.run(start, arguments.calls)
        best = sorted(rounds, key=lambda each: each.rank, reverse=True)[:FINALISTS]
        decided = [replace(each, rows=[*each.rows, *await played(each.workflow, data.further)]) for each in best]
        found = max(decided, key=lambda each: each.rank)
        rows = {"found": await played(found.workflow, data.held_out), "start": await played(start, data.held_out)}
    replace_file(out / "workflow.json", json.dumps(to_json(found.workflow), indent=2) + "\n")
    replace_file(out / "search.json", json.dumps(_described(rounds, decided, search.asked), indent=2) + "\n")
    results = write_results(out, rows, data.left_out)
    after = sum(each.calls for each in decided) - sum(each.calls for each in best)
    print(markdown(results))
    spent = f"{search.spent(rounds)} calls, {after} more to decide between the best {len(best)}"
    print(f"{len(rounds)} workflows, {spent}. What was found ({out / 'workflow.json'}):\n{show(found.workflow)}")


def _read_phrases(path: str) -> list[str]:
    """The file's lines that are not blank.

    Raises:
        WorldError: it is no text.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise WorldError(f"--phrases={path} is no text ({error}): give a file of instructions, one a line") from error
    return [line.strip() for line in lines if line.strip()]


def _described(rounds: Sequence[Round], decided: Sequence[Round], asked: int) -> dict[str, Any]:
    """Content of search.json."""

    def described(each: Round) -> dict[str, Any]:
        spent = {"problems": len(each.rows), "accuracy": each.accuracy, "calls": each.calls}
        return {"workflow": show(each.workflow), "parent": each.parent, **spent}

    finalists = [described(each) for each in decided]
    return {"rounds": [described(each) for each in rounds], "finalists": finalists, "optimizer_requests": asked}


def main(argv: Sequence[str]) -> int:
    parser = command_parser("search", __doc__ or "")
    parser.add_argument("--data", required=True, help="a JSONL file of problems, or a folder")
    parser.add_argument("--held_out", required=True, help="a JSONL file of other problems, or a folder")
    parser.add_argument("--backends", required=True, help="a JSON file, or a recipe that names backends")
    parser.add_argument("--workflow", default="Custom", help="where the search begins")
    parser.add_argument("--calls", type=int, default=5000, help="of backends, of the whole search")
    parser.add_argument("--calls_each", type=int, default=30, help="most calls of a workflow for one problem")
    parser.add_argument("--problems", type=int, default=64, help="that each workflow is played on")
    parser.add_argument("--optimizer", default="", help="the backend that proposes changes; without it they are random")
    parser.add_argument("--phrases", default="", help="a file of instructions that random changes may give")
    parser.add_argument("--temperature", type=float, default=0.0, help="of calls; at 0 equal branches answer alike")
    parser.add_argument("--seed", type=int, default=0, help="of problems and random changes")
    arguments = parser.parse_args(argv)
    least = {"calls": 1, "calls_each": 1, "problems": 1, "at_once": 1, "seed": 0, "temperature": 0}
    refuse_below(parser, arguments, least)
    return exit_status(lambda: asyncio.run(_search(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
