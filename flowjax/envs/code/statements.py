"""What an agent is told: the problem, and how its program did on the public tests, never on hidden ones."""

from flowjax.envs.code.generated import SHORT
from flowjax.envs.code.problems import Problem
from flowjax.grading.code import Call, Lines, Suite, Verdict

_FEEDBACK = "\n\nYour last program: "


def show(problem: Problem, verdict: Verdict | None) -> str:
    """The text of an observation."""
    text = _statement(problem)
    return text if verdict is None else text + _FEEDBACK + _feedback(problem, verdict)


def read(text: str) -> tuple[str, str]:
    """An observation's statement and feedback, "" where no program has been judged."""
    statement, _, feedback = text.partition(_FEEDBACK)
    return statement, feedback


def read_short(text: str) -> str:
    """The statement in a few words, "" where the problem was not generated."""
    line = next((line for line in text.splitlines() if line.startswith(SHORT)), "")
    return line.removeprefix(SHORT)


def _statement(problem: Problem) -> str:
    """The statement; for generated problems with the public tests, which files have in their statements."""
    if not problem.short or not problem.public:
        return problem.statement
    return problem.statement + "\n\nFor example:\n" + "\n".join(_case(problem.suite, i) for i in range(problem.public))


def _case(suite: Suite, number: int) -> str:
    case = suite.cases[number]
    if isinstance(case, Call):
        return f"{suite.entry}({', '.join(map(repr, case.arguments))}) returns {case.expected!r}"
    if isinstance(case, Lines):
        return f"input {case.input!r} prints {case.output!r}"
    return case.source


def _feedback(problem: Problem, verdict: Verdict) -> str:
    """How the program did on the public tests, and on nothing else."""
    passed, remarks = verdict.passed[: problem.public], verdict.remarks[: problem.public]
    if not passed:
        return "handed in."
    lines = [f"passed {sum(passed)} of {len(passed)} public tests."]
    for number, remark in enumerate(remarks):
        if remark:
            lines.append(f"- {_case(problem.suite, number)}: {remark}")
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()
