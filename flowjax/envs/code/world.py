"""The code world's environment and expert.

One task is one problem; an action is a whole program. With `attempts` above 1 the agent hears how its program did on
the public tests and may hand in another. All tests are judged in the sandbox (`flowjax.grading.code`); hidden ones are
never shown, and their expected results never get near the program.
"""

import re
from typing import Any

import numpy as np

from flowjax.envs.base import EnvDied, NotReady, Observation, Step, WorldError
from flowjax.envs.code.generated import OPERATIONS, Recipe, draw
from flowjax.envs.code.generated import problem as generated_problem
from flowjax.envs.code.options import Options, read_options
from flowjax.envs.code.problems import Problem, open_problems, problem_of
from flowjax.envs.code.programs import MAX_PROGRAM_CHARACTERS, normalised
from flowjax.envs.code.statements import read_short, show
from flowjax.grading.code import Verdict, judge
from flowjax.grading.sandbox import STARTS, IsolationError, StarvedError, require_isolation
from flowjax.records import Task, state_key

OUTCOMES = ("success", "score")
LEGAL = ("<program>",)
SLACK_S = 1.5  # of a step beyond the programs' own time: starting the sandbox, ending it, reading results


class Code:
    """One problem at a time."""

    def __init__(self, options: Options):
        self._options = options
        self._problem: Problem | None = None
        self._content = 0
        self._program = ""
        self._left = 0
        self._verdict: Verdict | None = None

    @property
    def problem(self) -> Problem:
        if self._problem is None:
            raise RuntimeError("the environment has not been reset")
        return self._problem

    def reset(self, task: Task, seed: int) -> Observation:
        self._problem = _problem(task, self._options)
        self._content = self._problem.content
        self._program, self._left, self._verdict = "", self._options.attempts, None
        return self._observe()

    def step(self, action: str) -> Step:
        if self._over():
            return Step(self._observe(), 0.0, True, False, self._outcome())
        if not action.strip() or "\0" in action or len(action) > MAX_PROGRAM_CHARACTERS:
            return Step(self._observe(), 0.0, False, False, self._outcome())
        options = self._options
        self._program, self._left = action, self._left - 1
        try:
            self._verdict = judge(
                action,
                self.problem.suite,
                options.limits(),
                case_cpu_s=options.case_cpu_s,
                allow_none=options.allow_no_isolation,
                packages=options.packages,
            )
        except (StarvedError, OSError) as away:  # says nothing about the task, which is played again
            raise EnvDied(f"sandbox: {away}", "executor_error") from away
        over, outcome = self._over(), self._outcome()
        return Step(self._observe(), outcome["success"] if over else 0.0, over, True, outcome)

    def _over(self) -> bool:
        """The attempts are used up, or the last program passes every public test (of which there may be none)."""
        if self._verdict is None:
            return False
        return self._left == 0 or all(self._verdict.passed[: self.problem.public])

    def _outcome(self) -> dict[str, float]:
        if self._verdict is None:
            return {"success": 0.0, "score": 0.0}
        counted = self._verdict.passed[self.problem.unscored :]
        return {"success": float(bool(counted) and all(counted)), "score": sum(counted) / max(1, len(counted))}

    def _observe(self) -> Observation:
        key = state_key("code", self._content, self._left, normalised(self._program))
        return Observation(show(self.problem, self._verdict), LEGAL, key)


def _problem(task: Task, options: Options) -> Problem:
    if "offset" in task.payload:
        file = open_problems(getattr(options, task.payload["file"]))
        return problem_of(file.fields(task.payload["offset"]), public_tests=options.public_tests)
    recipe = Recipe(task.payload["kind"], tuple((index, number) for index, number in task.payload["steps"]))
    return generated_problem(recipe, task.seed, cases=options.cases, public=min(options.public_tests, options.cases))


def make(**options: Any) -> Code:
    """Options: see `Options`.

    Raises:
        WorldError: an option is wrong, or the file has no problems.
        NotReady: there is no such file, or this machine cannot isolate programs.
    """
    chosen = read_options(options)
    for path in filter(None, (chosen.path, chosen.held_out_path)):
        open_problems(path)
    try:
        require_isolation(allow_none=chosen.allow_no_isolation)
    except IsolationError as error:
        raise NotReady(f"{error} with env.options allow_no_isolation=True") from error
    return Code(chosen)


def longest_step_s(**options: Any) -> float:
    """What one step may take; `config.env.step_timeout_s` must not be shorter."""
    return STARTS * read_options(options).wall_guard_s + SLACK_S


def expert(env: Code) -> str:
    """The problem's own solution.

    Raises:
        WorldError: the data has none.
    """
    if not env.problem.solution:
        raise WorldError(
            "this problem comes without a solution, so there is nothing to imitate: take data that has them "
            "(HumanEval, MBPP, DeepCoder), or start from a base model that needs no warm start"
        )
    return env.problem.solution


def random_action(observation: Observation, rng: np.random.Generator) -> str:
    """A random short program: for a generated problem one of the kind it asks for, otherwise one that returns its
    argument."""
    short = read_short(observation.text)
    kind = short.split()[0] if short else ""
    if kind in OPERATIONS:
        return draw(rng, (kind,), short.split().count("then") + 1).program()
    names = re.findall(r"^\s*def (\w+)\(|must be called (\w+)", observation.text, re.MULTILINE)
    name = "".join(names[-1]) if names else "main"
    return f"def {name}(*x):\n    return x[{int(rng.integers(2))}]"
