"""The environment of the canvas: a workflow that is edited, and run after each edit."""

import dataclasses
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from flowjax.canvas import actions
from flowjax.canvas.actions import Action, Finish, Unreadable
from flowjax.canvas.backends import BackendUnavailable
from flowjax.canvas.cache import Cache
from flowjax.canvas.edits import EditError
from flowjax.canvas.graph import Call, Workflow, walk
from flowjax.canvas.graph import Sequence as Steps
from flowjax.canvas.run import answer_field, as_asked
from flowjax.canvas.run import run as run_workflow
from flowjax.canvas.text import show
from flowjax.canvas.values import Problem, Usage, WorkflowRun
from flowjax.envs import EnvDied, Observation, Step
from flowjax.envs.canvas import exercises
from flowjax.envs.canvas.executors import RememberingSandbox, scored, wait_for
from flowjax.envs.canvas.problem_files import record_of
from flowjax.envs.canvas.structure import Structure, measure
from flowjax.envs.canvas.texts import TEMPLATES, CanvasView, one_line, read_action, trace_of, view_run, with_phrases
from flowjax.grading.code import Suite, from_assert
from flowjax.grading.sandbox import NoProcessorError
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    from flowjax.envs.canvas.world import CanvasOptions

OUTCOMES = (
    "success", "correctness", "finished", "operators", "distinct_operators", "operator_entropy", "distinct_siblings",
    "branching", "nesting", "checks", "formats", "executor_calls", "executor_tokens", "executor_cost",
    "executor_seconds",
)  # fmt: skip
_SHARES = ("success", "correctness", "finished", "operator_entropy", "distinct_siblings")
COUNTS = tuple(name for name in OUTCOMES if name not in _SHARES)
GRACE_S = 1.0  # for a run to end after its deadline
_REFUSAL_CHARACTERS = 600  # shown of the reason of a refusal
_STALLED_SHARE = 0.5  # of `step_s`: a single request that waits longer means an outage, not a long workflow


class CanvasEnv:
    """A workflow that is edited, one action per turn, and run after each edit. State: problem, workflow, finished.

    The answer of the last run, when the episode ends, is the one that is graded.
    """

    def __init__(self, options: "CanvasOptions"):
        self._options = options
        self._operators = options.on_offer()
        self._roles = {name: operator.role for name, operator in self._operators.items()}
        self._backends = options.open_backends()
        self._sandbox = RememberingSandbox(allow_none=options.allow_no_isolation, packages=tuple(options.packages))
        self._problem: Problem | None = None

    @property
    def problem(self) -> Problem:
        if self._problem is None:
            raise RuntimeError("the environment has not been reset")
        return self._problem

    @property
    def workflow(self) -> Workflow:
        return self._workflow

    @property
    def run(self) -> WorkflowRun | None:
        """The run of the current workflow; None before the first edit."""
        return self._run

    @property
    def options(self) -> "CanvasOptions":
        return self._options

    def reset(self, task: Task, seed: int) -> Observation:
        self._problem, self._gold = load(task.payload)
        self._await_executors()
        self._workflow = Workflow()
        self._run: WorkflowRun | None = None
        self._cache = Cache(max_entries=1000)  # per episode: a reply that another episode paid for is not free here
        self._usage, self._seconds = Usage(), 0.0
        self._turn = 0
        self._finished = False
        self._refused = ""
        self._score = scored("", (), "math", allow_none=True, options={})
        self._structure = Structure()
        return self._observe()

    def _await_executors(self) -> None:
        """Begin no episode while a backend is known to fail: the policy's turns in it would be wasted."""
        limit_s = self._options.step_s
        for backend in self._backends.values():
            if (ready := getattr(backend, "ready", None)) is not None:
                try:
                    wait_for(ready(limit_s), limit_s + GRACE_S)
                except BackendUnavailable as away:
                    raise EnvDied(f"executor: {away}", "executor_error") from away

    def step(self, action: str) -> Step:
        problem = self.problem
        if self._over:
            return Step(self._observe(), 0.0, True, False, self._outcome())
        self._turn += 1
        read = self._read(action)
        refused = read.reason if isinstance(read, Unreadable) else self._take(read, problem)
        self._refused = one_line(refused, _REFUSAL_CHARACTERS)
        reward = self._score.score if self._over else 0.0
        trace = None if self._run is None or self._refused else trace_of(self._workflow, self._run)
        return Step(self._observe(), reward, self._over, not self._refused, self._outcome(), trace)

    def _read(self, text: str) -> Action | Unreadable:
        return read_action(text)

    @property
    def _over(self) -> bool:
        return self._finished or self._turn >= self._options.turns

    def _take(self, action: Action, problem: Problem) -> str:
        """Carry out the action; returns the reason if it is refused, else "".

        Raises:
            EnvDied: an executor or the grading sandbox is away.
        """
        if isinstance(action, Finish):
            refused = self._gate()
            self._finished = not refused
            return refused
        try:
            action = with_phrases(action)
            edited = actions.apply(action, self._workflow, self._operators, tuple(self._backends))
        except EditError as error:
            return str(error)
        if edited == self._workflow:
            return "That changes nothing."
        nodes, before, most = _size(edited), _size(self._workflow), self._options.max_nodes
        if most and nodes > max(most, before):
            return f"The workflow would have {nodes} nodes; {most} is the most."
        self._workflow = edited
        self._run = run = wait_for(self._execute(edited, problem), self._options.step_s + GRACE_S)
        if run.status == "executor_error" or run.unanswered_s > self._options.step_s * _STALLED_SHARE:
            raise EnvDied(f"executor: {run.error}", "executor_error")
        self._usage, self._seconds = self._usage + run.usage, self._seconds + run.seconds
        gold, options = self._gold, dict(problem.options)
        try:
            self._score = scored(
                run.answer,
                gold,
                problem.kind,
                allow_none=self._options.allow_no_isolation,
                options=options,
                packages=tuple(self._options.packages),
            )
        except (NoProcessorError, OSError) as away:
            raise EnvDied(f"grading: {away}", "executor_error") from away
        root = as_asked(edited.root, self._operators, self._options.first_backend)
        asked = dataclasses.replace(edited, root=root)
        self._structure = measure(asked, run, self._roles, (answer_field(problem),))
        return ""

    def _execute(self, workflow: Workflow, problem: Problem) -> Coroutine[Any, Any, WorkflowRun]:
        options = self._options
        left = options.budget.left(self._usage, self._seconds)
        longest_s = options.step_s if left.seconds is None else min(options.step_s, left.seconds)
        return run_workflow(
            workflow,
            problem,
            operators=self._operators,
            backends=self._backends,
            default_backend=options.first_backend,
            cache=self._cache,
            budget=dataclasses.replace(left, seconds=longest_s),
            seed=options.executor_seed,
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            retry_new_tokens=options.retry_new_tokens,
            sandbox=self._sandbox,
        )

    def _gate(self) -> str:
        """Reason to refuse `finish`, "" to accept it."""
        calls = list(self._workflow.calls())
        roles = {self._roles.get(call.operator) for call in calls}
        options = self._options
        if len(calls) < options.min_operators:
            return f"The workflow has {len(calls)} operators, it needs {options.min_operators}."
        if options.require_structure and all(isinstance(node, Call | Steps) for node in self._workflow.nodes()):
            return "The workflow needs a parallel, a conditional or a loop."
        if options.require_checker and not ("checker" in roles and roles & {"solver", "combiner", "reviser"}):
            return "The workflow needs an operator that solves and one that checks."
        return ""

    def _observe(self) -> Observation:
        left = self._options.budget.left(self._usage, self._seconds)
        # Seconds are left out: a replayed episode must give equal observations, and its runs take other times.
        budget = [(left.calls, "calls"), (left.tokens, "tokens"), (left.cost, "cost")]
        problem, options, usage = self.problem, self._options, self._usage
        workflow = show(self._workflow, ids=True)
        view = CanvasView(
            problem.kind,
            problem.text,
            problem.context,
            tuple(problem.options.items()),
            problem.public_tests,
            workflow,
            show(self._workflow, ids=True, instructions=False),
            tuple((node.id, type(node).__name__.lower()) for node in self._workflow.nodes()),
            view_run(self._run, options.shown_characters),
            failed_step(self._workflow, self._run),
            self._refused,
            usage.calls,
            usage.prompt_tokens + usage.sampled_tokens,
            usage.cost,
            tuple((name, amount) for amount, name in budget if amount is not None),
            options.turns - self._turn,
        )
        asked = (problem.text, problem.context, str(dict(problem.options)))
        return Observation(view, TEMPLATES, state_key("canvas", *asked, workflow, self._finished))

    def _outcome(self) -> dict[str, float]:
        found, score, usage = self._structure, self._score, self._usage
        return {
            "success": float(score.correct),
            "correctness": float(score.score if self.problem.kind == "qa" else score.correct),
            "finished": float(self._finished),
            "operators": float(found.operators),
            "distinct_operators": float(found.distinct),
            "operator_entropy": found.entropy,
            "distinct_siblings": found.siblings,
            "branching": float(found.branching),
            "nesting": float(found.depth),
            "checks": float(found.checks),
            "formats": float(found.formats),
            "executor_calls": float(usage.calls),
            "executor_tokens": float(usage.prompt_tokens + usage.sampled_tokens),
            "executor_cost": usage.cost,
            "executor_seconds": self._seconds,
        }


def _size(workflow: Workflow) -> int:
    return sum(1 for _ in workflow.nodes())


def load(payload: Mapping[str, Any]) -> tuple[Problem, tuple[str, ...] | Suite]:
    """The problem of a task, and its gold answers or hidden tests.

    Raises:
        WorldError: the file has another problem at the task's row.
    """
    if "row" in payload:
        record = record_of(payload)
        return record.problem, record.tests or record.gold
    problem = exercises.problem(payload)
    if problem.kind == "code":
        cases = [case for test in payload["hidden_tests"] for case in from_assert(test, problem.entry_point)]
        return problem, Suite(tuple(cases), problem.entry_point)
    return problem, tuple(payload["answers"])


def failed_step(workflow: Workflow, run: WorkflowRun | None) -> str:
    """Id of the top-level step in which a run failed, "" if it did not."""
    if run is None or run.status != "error" or not run.trace:
        return ""
    failed = run.trace[-1].node_id
    for step in workflow.root.steps:
        if any(isinstance(call, Call) and call.id == failed for call in walk(step)):
            return step.id
    return ""
