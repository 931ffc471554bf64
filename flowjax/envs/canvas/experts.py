"""Scripted experts that nano models imitate: editors of workflows, and a teacher that answers operators' requests."""

import asyncio
import itertools
import json
import random
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np

from flowjax.canvas.backends import BackendError, Completion, Request
from flowjax.canvas.graph import Call, Conditional, Node, Workflow
from flowjax.canvas.operators import Operator
from flowjax.canvas.operators.registry import ADVERTISED
from flowjax.canvas.run import run as run_workflow
from flowjax.canvas.text import parse, show
from flowjax.canvas.values import Usage, WorkflowRun
from flowjax.envs import WorldError
from flowjax.envs.canvas import exercises
from flowjax.envs.canvas.offline import (
    KnownPrograms,
    at_once,
    by_products,
    facts,
    first_place,
    function,
    in_order,
    program,
)
from flowjax.envs.canvas.texts import CanvasView
from flowjax.envs.demonstrations import Exchange, Tasks
from flowjax.records import state_key

Expert = Literal["able", "plain", "instructing"]
NAMES = tuple(operator.name for operator in ADVERTISED)
LOOP_COUNTS = (2, 3)
FINISHING = 0.15  # share of random actions that finish
_INSTRUCTED, _SENT = 0.3, 0.3  # of the calls of random edits: with a phrase, with a backend
_PLACED = 0.15  # of random pieces: not at the end
_PHRASES = tuple(exercises.PHRASES)
# Workflows of the able expert, which knows what helps with each kind of exercise or problem.
ABLE: Mapping[str, str] = {
    "arithmetic": "Plan -> Programmer -> (Verify ? done : Revise) -> Format",
    "words": "Plan -> Programmer -> (Verify ? done : Revise) -> Format",
    "list": "[AnswerGenerate, AnswerGenerate, AnswerGenerate] -> ScEnsemble -> (Verify ? done : Revise) -> Format",
    "program": "Plan -> Programmer -> (Test ? done : Revise) -> Format",
    "code": "Plan -> Programmer -> (Test ? done : Revise) -> Format",
    "": "Plan -> [Custom, AnswerGenerate] -> ScEnsemble -> (Verify ? done : Revise) -> Format",
}
# Workflows of the plain expert, for any problem; one of them is drawn by a hash of the problem's text.
PLAIN = (
    *("Custom", "AnswerGenerate", "Plan -> Custom") * 3,
    *("Custom -> Review", "Custom -> Format", "Plan -> AnswerGenerate", "Programmer") * 2,
    *("[Custom, Custom] -> ScEnsemble", "[AnswerGenerate, Custom] -> ScEnsemble -> Format"),
    *("AnswerGenerate -> (Review ? done : Revise)", "Custom -> (Verify ? done : Revise) -> Format"),
    *("Programmer -> (Test ? done : Revise)", "Plan -> Programmer -> Format"),
)
# Workflows of the instructing expert around a solver, for any problem. The solver's phrase is a random one in half of
# the problems, and in the other half one that does not suit their kind: so a model that imitates this learns to tell
# the kinds apart. The solver is sent to a random executor.
MISTAKEN = {"arithmetic": "brief", "words": "exact", "list": "tested", "program": "sorted"}
INSTRUCTING = (
    *("SOLVER", "SOLVER -> Format", "Plan -> SOLVER") * 2,
    *("SOLVER -> Review", "SOLVER -> (Review ? done : Revise)", "SOLVER -> (Verify ? done : Revise) -> Format"),
    *("SOLVER -> (Test ? done : Revise) -> Format", "Plan -> SOLVER -> (Test ? done : Revise)"),
    "[SOLVER, Custom, Programmer] -> ScEnsemble -> Format",
)
SOLVERS = ("Custom", "AnswerGenerate", "Programmer")
HABITS = 8  # plain: of so many problems two get an instruction, one another executor, one a plan in front


def wanted(text: str, kind: str, expert: Expert, others: Sequence[str] = ()) -> tuple[Node, ...]:
    """The steps that the expert wants for a problem; `others` as for `habit`."""
    reading = exercises.read(text)
    source = reading.source if reading else kind
    if expert == "able":
        return parse(ABLE.get(source, ABLE[""])).root.steps
    forms = PLAIN if expert == "plain" else INSTRUCTING
    phrase = _by_words((MISTAKEN.get(source, "brief"), _by_words(_PHRASES, "phrase", text)), "habit", text)
    sent = _by_words(("", *(f"@{other}" for other in others)), "executor", text)
    solver = f'{_by_words(SOLVERS, "solver", text)}{{"{phrase}"}}{sent}'
    return parse(_by_words(forms, expert, text).replace("SOLVER", solver)).root.steps


def _by_words(choices: Sequence[str], what: str, text: str) -> str:
    """One of the choices, by a hash of a problem's text."""
    return choices[state_key(what, text) % len(choices)]


def next_action(steps: tuple[Node, ...], workflow: Workflow, run: WorkflowRun | None, failed_step: str) -> str:
    """A compact action: add the next missing step, delete a step that failed, or finish."""
    if run is not None and failed_step:
        return f"delete {failed_step}"
    built = [show(step, instructions=False) for step in workflow.root.steps]
    missing = list(steps)
    while built and missing and built[0] == show(missing[0], instructions=False):
        built, missing = built[1:], missing[1:]
    if not missing or (run is not None and run.answer and built):
        return "finish"  # further steps, which the expert did not want, stay
    return f"add {show(missing[0])}"


def habit(text: str, workflow: Workflow, others: Sequence[str]) -> str:
    """The edit that the plain expert makes before it finishes, "" for most problems; by a hash of the problem's text.

    `others` are the executors that answer only where they are named.
    """
    calls = list(workflow.calls())
    if not calls or any(call.backend or call.instruction for call in calls):
        return ""
    match state_key("habit", text) % HABITS:
        case 0 | 1:
            return f"prompt {calls[-1].id} {_by_words(_PHRASES, 'phrase', text)}"
        case 2 if others:
            return f"modify {calls[-1].id} @{_by_words(others, 'phrase', text)}"
        case 3 if calls[0].operator != "Plan":
            return "add Plan at 0"
    return ""


def random_edit(view: CanvasView, others: Sequence[str], rng: np.random.Generator) -> str:
    """A compact action of any kind, with operators, phrases, other executors and nodes drawn at random."""
    if rng.random() < FINISHING:
        return "finish"
    nodes = {kind.__name__.lower(): [] for kind in (Call, Conditional)}
    for id, kind in view.nodes:
        nodes.setdefault(kind, []).append(id)
    match int(rng.integers(8)) if (calls := nodes["call"]) else 7:
        case 0:
            return f"delete {_one(calls, rng)}"
        case 1:
            return f"prompt {_one(calls, rng)} {_one(_PHRASES, rng)}"
        case 2 if others:
            return f"modify {_one(calls, rng)} @{_one(others, rng)}"
        case 2 | 3:
            return f"modify {_one(calls, rng)} {_one(NAMES, rng)}"
    into = ""
    if nodes["conditional"] and rng.random() < _PLACED:
        into = f" into {_one(nodes['conditional'], rng)}.{_one(('true', 'false'), rng)}"
    elif rng.random() < _PLACED:
        into = " at 0"
    return f"add {_random_piece(others, rng)}{into}"


def _random_piece(others: Sequence[str], rng: np.random.Generator) -> str:
    a, b = _random_call(others, rng), _random_call(others, rng)
    match int(rng.integers(8)):
        case 0:
            return f"[{a}, {b}]"
        case 1:
            return f"[{', '.join(_one(NAMES, rng) for _ in range(3))}]"
        case 2:
            return f"{a} ? done : {b}"
        case 3:
            return f"({a} -> {b}) * {LOOP_COUNTS[int(rng.integers(len(LOOP_COUNTS)))]}"
        case _:
            return a


def _random_call(others: Sequence[str], rng: np.random.Generator) -> str:
    name = _one(NAMES, rng)
    phrase = f'{{"{_one(_PHRASES, rng)}"}}' if rng.random() < _INSTRUCTED else ""
    executor = f"@{_one(others, rng)}" if others and rng.random() < _SENT else ""
    return name + phrase + executor


def _one(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]


# ------------------------------------------------------------------------------------- a teacher of nano executors
# Nano executors are taught on requests that operators really make about training exercises. The teacher has habits, as
# people do: with the usual instruction it mostly answers at once, which a small model can rarely do, and often wrongly
# (`CARELESS`); a phrase, or a plan, has it write down the steps that the phrase names, whether they suit or not.

# Usual habits: how often the teacher writes down steps for an operator's own instruction.
USUAL = {"Custom": 0.1, "AnswerGenerate": 0.4, "Verify": 0.6, "Review": 0.5, "Programmer": 0.2}
STEPS = {"stepwise": "order", "exact": "products", "sorted": "sorted", "tested": "tested", "brief": "none"}
SUITING = {"words": "order", "arithmetic": "products", "list": "sorted", "program": "tested"}
PLANS = {
    "order": "Begin with the first number and change it sentence by sentence.",
    "products": "Find the products first, and add and take away at the end.",
    "sorted": "Order all facts, and then count from the right end.",
    "tested": "Keep, change, reduce: and think of what there is without numbers.",
}
POOR_PLAN = "Look at the numbers and see what they have in common."
SUBPROBLEMS = "What is the answer then?"
PLANNED = {"words": 0.7, "arithmetic": 0.7, "list": 0.3, "program": 0.4}  # good plans among the usual ones
# Answers at once that are wrong: a slip of the pen, `second` overlooked, half of a program forgotten.
CARELESS = {"words": 0.5, "arithmetic": 0.5, "list": 0.6, "program": 0.7}
_SLIPS = (-10, -2, -1, 1, 2, 10)
KEEPING = 0.5  # repeats a given answer where there is no feedback
WORDY = 0.4  # Custom's answers to questions about lists that are a sentence
BELIEVING = 0.9  # revisions that do what the feedback says
OVERLOOKING = 0.3  # wrong programs that a review passes
EMPTY_LINE = "Without numbers it is 0."
_SENTENCE = "It must be {}, as far as I can see"
_FOUND = re.compile(r"It is ([^.]+)\.")
_FINE, _OTHER = "No mistake was found.", "It does something else than what is asked."
_LONG_WORDS, _OFTEN = 4, 5  # a line of so many words, in so many lessons, is one vocabulary piece
_SAMPLE = 800  # lessons that the vocabulary is read off
_PIECES = (
    " +", " -", " *", " =", " (", "Answer:", "It is ", "```python\n", "\n```", "def compute(numbers):\n    return ",
    " for x in numbers if ", " for x in numbers if not ", "x * x", "2 * x", "x % 2 == 0", "x % 2 == 1", "x % ", " == 0",
    " > ", "sum([", "max([", "min([", "], default=0)", "])", "print(", "order = sorted([(", ", '", "'), (",
    "')], reverse=", "\nprint(order[", "][1])", "count = ", "\ncount = count", "\nprint(count)", "print(max([(",
    "print(min([(", "')])[1])", '{"feedback": "', '", "passed": true}', '", "passed": false}', '{"subproblems": ["',
    '", "', '"]}', '{"choice": "', '"}', "assert compute([", "]) ==", "returned ", ", expected ",
    "Write a Python function compute(numbers) that takes a list of whole numbers and returns", "\n- ",
    ", or 0 if there are none.", "It must be", ", as far as I can see",
)  # fmt: skip


class Teacher:
    """A backend that answers about exercises, and keeps requests and replies as lessons."""

    def __init__(self, seed: int = 0):
        self._seed = seed
        self.lessons: list[Exchange] = []

    @property
    def identity(self) -> str:
        return f"teacher:{self._seed}"

    async def complete(self, request: Request) -> Completion:
        """See `Backend`.

        Raises:
            BackendError: the problem is none of the generated exercises.
        """
        reply = _Taught(self._seed, request).reply(request)
        self.lessons.append(([dict(message) for message in request.messages], reply))
        return Completion(reply, Usage(1))


class _Taught:
    """One request: the exercise, the phrase of its instruction, and its random numbers."""

    def __init__(self, seed: int, request: Request):
        self._text = request.tags.get("input.problem", "")
        reading = exercises.read(self._text)
        if reading is None:
            raise BackendError("the teacher knows generated exercises only: leave env.options path empty")
        self._reading, self._suiting = reading, SUITING[reading.source]
        self._phrase = exercises.PHRASE_OF.get(request.tags["instruction"], "")
        asked = [message["content"] for message in request.messages]
        self._random = random.Random(state_key(seed, *asked, request.seed))

    def reply(self, request: Request) -> str:
        """The teacher's reply."""
        operator, schema = request.tags["operator"], request.schema["properties"] if request.schema else {}
        given = {name.removeprefix("input."): value for name, value in request.tags.items()}
        shown = request.messages[0]["content"]
        if "passed" in schema:
            return self._verdict(operator, given, compared="An independent one" in shown)
        if "choice" in schema:
            return self._vote(shown, schema["choice"]["enum"])
        if "subproblems" in schema:
            return json.dumps({"subproblems": [self._plan(), SUBPROBLEMS]})
        if operator == "Plan":
            return self._plan()
        if operator == "Format":
            before, _, after = _SENTENCE.partition("{}")
            return f"Answer: {given['answer'].removeprefix(before).removesuffix(after)}"
        if operator == "Programmer":
            return f"```python\n{self._program(self._style(operator, shown), again=len(request.messages) > 1)}\n```"
        if operator == "Verify":  # it does not see what it checks
            given = {}
        return self._solution(operator, given, self._style(operator, shown))

    def _happens(self, chance: float) -> bool:
        return self._random.random() < chance

    def _style(self, operator: str, shown: str) -> str:
        """The kind of steps to write down: by a phrase, by a plan, or by habit."""
        if self._phrase:
            return STEPS[self._phrase]
        if any(plan in shown for plan in PLANS.values()):
            return next(style for style, plan in PLANS.items() if plan in shown)
        if operator == "AnswerGenerate" and self._reading.source in ("words", "arithmetic"):
            return "order" if self._happens(USUAL[operator]) else "none"
        return self._suiting if self._happens(USUAL.get(operator, 0.0)) else "none"

    def _plan(self) -> str:
        chance = PLANNED[self._reading.source]
        if self._phrase:
            chance = 0.95 if STEPS[self._phrase] == self._suiting else 0.15
        return PLANS[self._suiting] if self._happens(chance) else POOR_PLAN

    def _solution(self, operator: str, given: Mapping[str, str], style: str) -> str:
        code = self._reading.source == "program"
        proposed, feedback = given.get("code" if code else "answer", ""), given.get("feedback", "")
        found = _FOUND.search(feedback)
        if candidates := json.loads(given.get("candidates", "[]")):
            return self._worded("", Counter(candidates).most_common(1)[0][0])
        if code and feedback and self._happens(BELIEVING):
            return self._worded("", proposed if _is_praise(feedback) else self._program("tested"))
        if proposed and found and self._happens(BELIEVING):
            return self._worded("", found[1])
        if proposed and not self._phrase and self._happens(1.0 if _is_praise(feedback) else KEEPING):
            return self._worded("", proposed)
        if code:
            return self._worded(EMPTY_LINE if style == "tested" else "", self._program(style))
        thought, answer = self._attempt(style)
        if operator == "Custom" and self._reading.source == "list" and not self._phrase and self._happens(WORDY):
            return _SENTENCE.format(answer)
        return self._worded(thought, answer)

    def _worded(self, thought: str, solution: str) -> str:
        said = f"```python\n{solution}\n```" if self._reading.source == "program" else f"Answer: {solution}"
        return f"{thought}\n{said}" if thought else said

    def _attempt(self, style: str) -> tuple[str, str]:
        """The written steps, and the answer that they lead to."""
        source, right = self._reading.source, self._reading.answer
        if style == "sorted" and source == "list":
            return ", ".join(f"{name} {count}" for count, name in sorted(facts(self._text))), right
        if style == "products" and source == "arithmetic":
            return by_products(self._text)
        if style == "order" and source != "list":
            return in_order(self._text, source)
        if not self._happens(CARELESS[source]):
            return "", right
        return "", self._overlooked() if source == "list" else str(int(right) + self._random.choice(_SLIPS))

    def _overlooked(self) -> str:
        """The answer to a question about a list without its `second`."""
        reading = exercises.read(self._text.replace("second ", ""))
        return reading.answer if reading else ""

    def _program(self, style: str, *, again: bool = False) -> str:
        source, wanted = self._reading.source, self._reading.program
        if wanted is not None:
            if style in ("tested", "right") or again or not self._happens(CARELESS["program"]):
                return function(wanted)
            if wanted.reduction != "the sum" and self._happens(0.6):
                return function(wanted).replace(", default=0", "")
            return function(wanted, self._random.randrange(2))
        if source == "arithmetic" or style == self._suiting:
            return program(self._text, self._reading)
        if source == "words":
            return at_once(self._text)
        return first_place(self._text)

    def _verdict(self, operator: str, given: Mapping[str, str], *, compared: bool) -> str:
        if self._reading.program is not None:
            code = given.get("code", "")
            right = code.strip() == function(self._reading.program)
            seen = right or self._happens(OVERLOOKING if self._phrase != "tested" and not compared else 0.0)
            lacks = code.strip() == function(self._reading.program).replace(", default=0", "")
            return _judged(_FINE if seen else EMPTY_LINE if lacks else _OTHER, passed=seen)
        proposed, right = given.get("answer", ""), self._reading.answer
        if compared:
            return _judged(f"It is {right}.", passed=proposed == right)
        style = self._style(operator, "")
        thought, answer = self._attempt(style) if style != "none" else ("", proposed)
        if not thought:
            return _judged(_FINE, passed=True)
        return _judged(f"{' '.join(thought.split())} It is {answer}.", passed=proposed == answer)

    def _vote(self, shown: str, letters: Sequence[str]) -> str:
        listed = shown.rpartition("## Candidates")[2]
        choices = [part.strip() for part in re.split(r"^[A-Z]+\.\n", listed, flags=re.MULTILINE)[1:]]
        right = self._reading.answer if (wanted := self._reading.program) is None else function(wanted)
        found = [letter for letter, choice in zip(letters, choices, strict=False) if choice == right]
        return json.dumps({"choice": found[0] if found else self._random.choice(letters)})


def _judged(feedback: str, *, passed: bool) -> str:
    return json.dumps({"feedback": feedback, "passed": passed})


def _is_praise(feedback: str) -> bool:
    return feedback == _FINE or feedback.startswith(("All ", "An independent solution"))


def lessons(
    tasks: Tasks, rng: np.random.Generator, operators: Mapping[str, type[Operator]], seed: int = 0
) -> Iterator[Exchange]:
    """Requests of operators about the tasks, in workflows as policies build them, and a teacher's replies, without end.

    Raises:
        WorldError: they are no generated exercises.
    """
    loop = asyncio.new_event_loop()
    while True:
        for index in range(len(tasks)):
            task, teacher = tasks[index].payload, Teacher(seed)
            if exercises.read(task.get("text", "")) is None:
                raise WorldError("a nano executor is taught on generated exercises: leave env.options path empty")
            practice = run_workflow(
                parse(_practice(rng)), exercises.problem(task), operators=operators, backends={"teacher": teacher},
                default_backend="teacher", seed=int(rng.integers(1 << 30)), sandbox=KnownPrograms(),
            )  # fmt: skip
            loop.run_until_complete(practice)
            yield from teacher.lessons
        seed += 1


def _practice(rng: np.random.Generator) -> str:
    """A workflow to learn from, as policies build them."""

    def call(names: Sequence[str], instructed: float) -> str:
        phrase = f'{{"{exercises.PHRASES[_one(_PHRASES, rng)]}"}}' if rng.random() < instructed else ""
        return _one(names, rng) + phrase

    solvers = partial(call, SOLVERS, 0.6)
    parts = [call(("Plan", "Plan", "Decompose"), 0.2)] if rng.random() < 0.35 else []
    if rng.random() < 0.2:
        branches = ", ".join(solvers() for _ in range(int(rng.integers(2, 4))))
        parts += [f"[{branches}]", call(("ScEnsemble", "Aggregate"), 0.1)]
    else:
        parts.append(solvers())
    ending = rng.random()
    if ending < 0.45:
        check = call(("Review", "Verify", "Test"), 0.2)
        parts.append(f"({check} ? done : {call(('Revise',), 0.2)})")
    elif ending < 0.6:
        parts.append(call(("Revise", "Custom", "AnswerGenerate"), 0.3))
    return " -> ".join([*parts, *(["Format"] if rng.random() < 0.3 else [])])


def lesson_pieces(tasks: Tasks, operators: Mapping[str, type[Operator]]) -> tuple[str, ...]:
    """Vocabulary of a nano executor: whole lines that requests often repeat, words, digits and signs.

    Exercises and programs are split into words and smaller pieces: the model has to read and to write them.
    """
    said = itertools.islice(lessons(tasks, np.random.default_rng(0), operators), _SAMPLE)
    lines: Counter[str] = Counter()
    words: set[str] = set()
    for messages, reply in said:
        text = "\n".join([*(message["content"] for message in messages), reply])
        lines.update(set(text.split("\n")))
        words.update(re.findall(r" ?[A-Za-z_]+", text))
    often = [
        line
        for line, count in lines.items()
        if line.startswith("## ") or (count >= _OFTEN and len(line.split()) >= _LONG_WORDS and line[0].isupper())
        if exercises.read(line) is None
    ]
    named = [word for word in exercises.vocabulary() if word.isalpha()]
    signs = [sign for sign in string.printable if sign.isprintable()]
    digits = [f" {digit}" for digit in string.digits]
    found = [*signs, "\n", "\n\n", *digits, *_PIECES, *often, *named, *(f" {word}" for word in named), *sorted(words)]
    return tuple(dict.fromkeys(found))
