"""What the agent is told and how its replies are read, for language models (instruct) and nano models (compact)."""

import re
from collections.abc import Sequence
from typing import Any

from flowjax.canvas import actions
from flowjax.canvas.actions import Unreadable
from flowjax.canvas.graph import WorkflowError
from flowjax.canvas.text import parse, show
from flowjax.envs.base import Message, Observation, Past, Style
from flowjax.envs.canvas import exercises
from flowjax.envs.canvas.experts import NAMES
from flowjax.envs.canvas.options import Options, read_options
from flowjax.envs.canvas.protocol import RESULT, answer_length, read
from flowjax.envs.canvas.world import read_action

_LONGEST_WORKFLOW = 32  # words of it in a compact prompt; the beginning of longer ones is left out
_SIGNS = ("->", "[", "]", ",", "(", ")", "?", ":", "*", "done")
_VERBS = ("add", "delete", "finish")
_KINDS = (*exercises.KINDS, "math", "qa", "code", "choice", "general")
_STATUSES = ("=", "empty", "none", "ok", "error", "budget", "passed", "failed", "short", "long", "refused", "cut")
_NUMBERS = tuple(str(number) for number in range(21))
_IDS = tuple(f"n{number}" for number in range(1, 41))
_WORD = re.compile(r"->|[\w.]+|[^\w\s]")

_RULES = """You build a workflow of operators that solves the problem below. You do not solve it yourself: after each of
your edits the workflow runs, and you see what every step gave. The answer of its last run counts.

A workflow is steps joined with ->. [A, B] runs branches side by side, after which a combining operator can choose
among their answers. C ? A : B runs A if the check C passes and B if it does not; done stands for no step.
(A -> B) * 2 repeats at most twice and stops where a check passes. Each step reads the newest plan, answer, program and
feedback before it."""
_INSTRUCTION = """Think briefly if you like, then give exactly one action:
<action>add</action><operator>NAME</operator><prompt>what it is told (optional)</prompt>
<action>add</action><workflow>[A, B] -> C</workflow>
<action>delete</action><target>ID</target>
<action>modify</action><target>ID</target><operator>NAME</operator>
<action>set_prompt</action><target>ID</target><prompt>what it is told</prompt>
<action>finish</action>
add can end with <into>ID</into><position>NUMBER</position>. Turns are limited; what stands then is what counts."""


def vocabulary(**options: Any) -> tuple[str, ...]:
    """Words of compact prompts and replies."""
    read = read_options(options)
    names = dict.fromkeys([*NAMES, *read.on_offer()])
    return (*_VERBS, *_SIGNS, *_KINDS, *_STATUSES, *_NUMBERS, *_IDS, *names)


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
    """One user message: the problem, the workflow and what its run gave; the latest actions where they are wanted.

    Compact: the problem's kind and size, the workflow's words, the state of its answer.
    """
    if style == "compact":
        return [{"role": "user", "content": " ".join([*_problem_words(observation), ":", *_state_words(observation)])}]
    parts = [_RULES, observation.text]
    if history:
        taken = [f"Turn {past.turn}: {past.action or '(no action)'}" for past in history]
        parts.append("Your latest actions:\n" + "\n".join(taken))
    return [{"role": "user", "content": "\n\n".join([*parts, _INSTRUCTION])}]


def follow_up(observation: Observation, style: Style) -> list[Message]:
    """What the last action brought; the conversation holds the rest."""
    if style == "compact":
        return [{"role": "user", "content": " ".join(_result_words(observation))}]
    shown = read(observation.text)
    workflow = f"## Workflow\n{shown.workflow or '(empty)'}"
    return [{"role": "user", "content": f"{workflow}{RESULT}{shown.result}\n\nGive the next action."}]


def reply(action: str, style: Style) -> str:
    """Compact: the words of the action. Instruct: its tags."""
    understood = read_action(action)
    if isinstance(understood, Unreadable):
        return action
    if style == "compact":
        return actions.show_compact(understood, spaced=True)
    return actions.show(understood)


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
    """The action on one line, or as it was written where that cannot say it. What is unreadable is handed to the
    environment, which mends it (option `lenient`) or says why it cannot; None stands for an empty reply."""
    del reference  # the published parser's mending is an option of the world
    understood = read_action(reply)
    if isinstance(understood, Unreadable):
        return reply.strip() or None
    line = actions.show_compact(understood)
    return line if read_action(line) == understood else actions.show(understood)


def structured_outputs(style: Style, **options: Any) -> dict[str, str]:
    """A grammar of valid actions for vLLM, without thinking or text before them."""
    chosen = Options(**options)
    return actions.schema(chosen.on_offer(), tuple(chosen.backends)[1:], compact=style == "compact")


def _problem_words(observation: Observation) -> list[str]:
    """The kind of a generated exercise and its size, or the kind of another problem and its tens of words."""
    shown = read(observation.text)
    reading = exercises.read(shown.problem.partition("\n\nPublic tests:\n")[0])
    if reading is not None:
        return [reading.source, str(reading.size)]
    return [shown.kind, str(min(len(shown.problem.split()) // 10, 20))]


def _state_words(observation: Observation) -> list[str]:
    source = read(observation.text).workflow
    try:
        words = _WORD.findall(show(parse(source), instructions=False))
    except WorkflowError:
        words = []
    if len(words) > _LONGEST_WORKFLOW:
        words = ["cut", *words[-_LONGEST_WORKFLOW:]]
    return [*(words or ["empty"]), *_result_words(observation)]


def _result_words(observation: Observation) -> list[str]:
    """Run, check, answer, turns left."""
    facts = read(observation.text).facts
    refused = ["refused"] if "Refused" in facts else []
    status = facts.get("Run", "none").removeprefix("failed in ")
    run = ["error", status] if "Run" in facts and facts["Run"].startswith("failed in ") else [status]
    check = {"passed": ["passed"], "not passed": ["failed"]}.get(facts.get("Check", ""), [])
    answer = answer_length(facts.get("Answer", ""))
    left = min(int(facts.get("Turns left", "0")), 20)
    return ["=", *refused, *run, *check, answer, str(left)]
