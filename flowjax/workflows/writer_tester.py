"""A writer hands in a program, a tester writes tests for it, and where the program fails them the writer tries again.

For the code world. The tests decide which program is final: the first one if it passes all of them; else the one of the
two that passes more, the second on a tie. A reply without a program is never final in place of one. Every program is a
part of its own and rewarded by the problem's hidden tests; the tests are rewarded for being right and for agreeing with
the hidden ones. After AstraFlow (arXiv 2605.15565, workflow `code_actor_and_verify_v2`), where the last program is
final and the tester's reward depends on it; the rewards are those of its third version.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowjax.envs import EnvDied, Message, Observation, RemoteEnv, Step, Style, World, user_says, with_more
from flowjax.envs.code.problems import Recipe
from flowjax.envs.code.world import action_of_tests
from flowjax.envs.demonstrations import Exchange, Tasks
from flowjax.grading.answers import without_thoughts
from flowjax.grading.code import fenced_blocks
from flowjax.records import Status, Task, state_key
from flowjax.workflows import Agent, AgentTurns, Played, record_turn
from flowjax.workflows.codec import PromptTooLong
from flowjax.workflows.single import EpisodeOptions, Move, take_turn, turn_counts

OUTCOMES = {"tester": ("success", "answer_right", "tests_valid", "score")}
EPISODE_OUTCOMES = ("tests_valid", "first_success", "attempts", "approved")
AGENTS = ("writer", "tester")
WRITER, TESTER = AGENTS
TESTS = 2  # of one reply; more are not run
MAX_NESTING = 100  # of lists and objects in a test; the sandbox refuses data more than twice as deep
ASK, GIVES, AND = "tests", "gives", "and"  # compact: after a problem, between input and result, between tests

WRITE_TESTS = """Another agent has written a program for this problem:

{problem}

The program:
```python
{program}
```

Write {count} tests of different inputs that a right program passes and a wrong one is likely to fail. Work out each
result from the problem, not from the program. Reason first; then end with one ```json block: {form}"""
FORM = {
    True: 'a list of {"input": [the arguments of one call], "output": what it returns}.',
    False: 'a list of {"input": "all of standard input", "output": "all that is printed"}.',
}
RETRY = """

Your first program:
```python
{program}
```

{review}

Hand in another one."""

Test = tuple[Any, Any]  # input and result


async def play(
    task: Task, *, seed: int, env: RemoteEnv, agents: Mapping[str, Agent], options: EpisodeOptions
) -> Played:
    """One program, tests for it, and another program if it fails them.

    The episode's success is that of the program that the tests choose. Its other outcomes: `first_success` of the first
    program, `attempts`, `approved` (the first one passed the tests) and `tests_valid`. The tests' outcomes: `success`
    where their verdict on the first program agrees with the truth; `answer_right`, that truth; and `tests_valid`, also
    their `score`: 1 if the problem's own solution passes them all. A reply without tests approves, with `success` 0.
    """
    parts: list[AgentTurns] = []
    outcome = dict.fromkeys((*options.world.OUTCOMES, *EPISODE_OUTCOMES), 0.0)
    status: Status = "ok"
    error = ""
    try:
        problem = await env.reset(task, seed)
        first = await _write(problem, env, agents[WRITER], options, parts)
        outcome |= {**first.step.outcome, "first_success": first.step.outcome["success"], "attempts": 1.0}
        tests: list[Test] = []
        passed, review = 0.0, "There was no program in that reply."
        if first.action:
            tests, tested = await _test(problem, env, agents[TESTER], options, first, parts)
            passed = tested.outcome.get("passed", 1.0)
            outcome |= {"approved": float(passed == 1.0), "tests_valid": tested.outcome.get("tests_valid", 0.0)}
            review = _review(tested.observation)
        if passed < 1.0:
            await env.reset(task, seed)
            second = await _write(problem, env, agents[WRITER], options, parts, first.action, review)
            outcome["attempts"] = 2.0
            # `second.action`: a reply without a program passes no test, and would win a tie at 0 against a right first
            # program that met wrong tests.
            if second.action and (not tests or await _passed(env, second.action, tests) >= passed):
                outcome |= second.step.outcome
    except PromptTooLong as too_long:
        status, error = "truncated", str(too_long)
    except EnvDied as died:
        status, error = died.status, str(died)
    return Played(parts, outcome, status, error)


async def _write(
    problem: Observation,
    env: RemoteEnv,
    writer: Agent,
    options: EpisodeOptions,
    parts: list[AgentTurns],
    before: str = "",
    review: str = "",
) -> Move:
    """A program and its result on the hidden tests; with `review`, a second one, after the review of `before`."""
    messages = _to_write(options.world, problem, options.prompt, before, review)
    if review:  # a writer that has read a review is in another state than one that has not
        problem = replace(problem, state_key=state_key(problem.state_key, before, review))
    move = await take_turn(writer, messages, problem, options=options, env=env)
    parts.append(AgentTurns(WRITER, [move.turn], {**move.step.outcome, **turn_counts([move.turn])}))
    return move


async def _test(
    problem: Observation,
    env: RemoteEnv,
    tester: Agent,
    options: EpisodeOptions,
    written: Move,
    parts: list[AgentTurns],
) -> tuple[list[Test], Step]:
    """The tester's tests ([] where its reply holds none) and the program's result on them."""
    reply = await tester.act(_to_test(problem, options.world, options.prompt, written.action))
    tests = parse_tests(reply.text, options.prompt, has_entry=bool(problem.view.entry))
    before = replace(problem, state_key=state_key(problem.state_key, written.action))
    if tests:
        step = await env.step(action_of_tests(written.action, tests))
    else:
        step = Step(before, 0.0, False, False)
    right = written.step.outcome["success"] >= 1.0
    agrees = float(bool(tests) and (step.outcome["passed"] == 1.0) == right)
    valid = step.outcome.get("tests_valid", 0.0)
    ended = replace(step, terminal=True, reward=agrees)
    turn = record_turn(reply, before, ended, env_s=0.0, action=json.dumps(tests) if tests else "")
    outcome = {"success": agrees, "answer_right": float(right), "tests_valid": valid, "score": valid}
    parts.append(AgentTurns(TESTER, [turn], {**outcome, **turn_counts([turn])}))
    return tests, step


async def _passed(env: RemoteEnv, program: str, tests: Sequence[Test]) -> float:
    """Share of the tests that a program passes."""
    return (await env.step(action_of_tests(program, tests))).outcome["passed"]


def _review(tested: Observation) -> str:
    """The message to a writer about the tests that its program failed."""
    feedback = tested.view.feedback
    if feedback is None:
        return ""
    failed = [f"- {case}: {remark}" for case, remark in feedback.failed]
    return "\n".join([f"A tester ran it; it passed {feedback.passed} of {feedback.count} tests.", *failed])


def parse_tests(reply: str, style: Style, *, has_entry: bool) -> list[Test]:
    """The first `TESTS` tests of a reply, as pairs of input and result; [] where it holds fewer.

    Tests of the same input count once: one test written twice would be right more often than two tests. They stand in
    the last ```json block, or else between the first "[" and the last "]". Data nested deeper than `MAX_NESTING` is no
    test.
    """
    tests = _compact_tests(reply) if style == "compact" else _json_tests(without_thoughts(reply))
    kept: list[Test] = []
    for given, wanted in tests:
        if not (isinstance(given, list) if has_entry else isinstance(given, str) and isinstance(wanted, str)):
            return []
        if _nested([given, wanted], MAX_NESTING):
            return []
        if len(kept) < TESTS and all(given != other for other, _ in kept):
            kept.append((given, wanted))
    return kept if len(kept) == TESTS else []


def _nested(value: Any, most: int) -> bool:
    """True where lists and objects are nested more than `most` deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(most == 0 or _nested(each, most - 1) for each in inner)


def _compact_tests(reply: str) -> list[Test]:
    """`2 gives 1 0 and 3 gives - 4` as [2] -> 10 and [3] -> -4."""
    tests: list[Test] = []
    for text in "".join(reply.split()).split(AND):
        given, _, wanted = text.partition(GIVES)
        try:
            tests.append(([int(given)], int(wanted)))
        except ValueError:
            return []
    return tests


def _json_tests(reply: str) -> list[Test]:
    blocks = fenced_blocks(reply, ("json",))
    text = blocks[-1] if blocks else reply[max(reply.find("["), 0) : reply.rfind("]") + 1]
    try:
        listed = json.loads(text)
        return [(each["input"], each["output"]) for each in listed]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def _to_write(world: World, problem: Observation, style: Style, before: str, review: str) -> list[Message]:
    more = f" {_AGAIN}" if style == "compact" else RETRY.format(program=before, review=review)
    return with_more(world.prompt(problem, [], style), more if review else "")


_AGAIN = "wrong"  # compact: after the problem, for a second program


def _to_test(problem: Observation, world: World, style: Style, program: str) -> list[Message]:
    if style == "compact":  # the program is left out: a nano model would not find its fault
        return user_says(f"{world.compact(problem, [])} {ASK}")
    form = FORM[bool(problem.view.entry)]
    return user_says(WRITE_TESTS.format(problem=problem.view.question, program=program, count=TESTS, form=form))


def vocabulary() -> tuple[str, ...]:
    """The words that compact prompts and replies of this workflow add to the world's."""
    return (ASK, GIVES, AND, "-", *map(str, range(10)))


# Called in place of `envs.demonstrations.demonstrations`, most of whose parameters mean nothing here.
def demonstrations(
    world: World, tasks: Tasks, *, label_noise: float, style: Style, rng: np.random.Generator, **_: Any
) -> Iterator[list[Exchange]]:
    """Programs, tests and second programs of an expert, in turn, without end, for generated problems of integers.

    A share `label_noise` of the programs is random, and the same share of the tests' results is too large by 1 to 9.
    """
    env = world.env()
    while True:
        for index in range(len(tasks)):
            task: Task = tasks[index]
            problem = env.reset(task, task.seed)
            recipe: Recipe = problem.view.recipe
            for review in ("", "It failed."):
                noisy = rng.random() < label_noise
                program = world.random_action(problem, rng) if noisy else world.expert(env)
                yield [(_to_write(world, problem, style, program, review), world.reply(program, style))]
            tests: list[Test] = []
            for value in rng.choice(10, size=TESTS, replace=False).tolist():
                slip = int(rng.integers(1, 10)) if rng.random() < label_noise else 0
                tests.append(([value], recipe.value(value) + slip))
            yield [(_to_test(problem, world, style, world.expert(env)), reply_with(tests, style))]


def reply_with(tests: Sequence[Test], style: Style) -> str:
    """The reply that holds these tests; `parse_tests` reads them back."""
    if style == "compact":
        return f" {AND} ".join(f"{_spelt(given[0])} {GIVES} {_spelt(wanted)}" for given, wanted in tests)
    return f"```json\n{json.dumps([{'input': given, 'output': wanted} for given, wanted in tests])}\n```"


def _spelt(number: int) -> str:
    """A number as words: its sign and digits."""
    return " ".join(str(number))
