"""What the agent is told, and how its replies are read."""

import functools
import itertools
import re
from collections.abc import Sequence

from flowjax.envs.alfworld.packages import constants
from flowjax.envs.base import Message, Observation, Past, Style, tagged_action

TASK = "Your task is to: "
RULES = """You are a household robot in a text world. You go to places, look into what can be opened, take one thing at
a time, and clean, heat, cool or switch on what the task asks for."""
INSTRUCTION = """First reason step by step about the state and your plan inside <think> </think>. Then choose one of the
actions above, word for word, and give it inside <action> </action>."""
SENT_CHARACTERS = 30  # of a reply without tags, in the published system
WORD = re.compile(r"[a-z]+|\d+")
NUMBERS = 40  # copies of one class that a compact prompt can name
MARKS = ("task", ";", ">", "none")  # before the task, a turn's text and its action; an unreadable reply
SAID = """
    go open close take move use heat clean cool slice examine look inventory put find
    to from with in on under it them two some hot cold you a at
    nothing closed carrying arrive pick turn off happens normal special facing
"""
UNSAID = {"a", "you"}


def task_of(text: str) -> tuple[str, str]:
    """An observation's text without its task, and the task."""
    seen, _, task = text.partition(TASK)
    return seen.strip(), task.strip().removesuffix(".")


@functools.cache
def words() -> tuple[str, ...]:
    """All that compact prompts and replies are made of."""
    classes = sorted(name.lower() for name in constants().OBJECTS_WSLICED)
    return tuple(dict.fromkeys([*MARKS, *SAID.split(), *classes, *map(str, range(1, NUMBERS + 1))]))


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
    """One user message: the task, the earlier turns that the window shows, what is seen now, what can be done.

    Compact: "task <task> ; <seen> > <action> ; <seen> >", without the list of actions; so reads a conversation too.
    """
    seen, task = task_of(observation.text)
    if style == "compact":
        past = [f"; {compact(task_of(turn.observation)[0])} > {turn.action or 'none'}" for turn in history]
        return [{"role": "user", "content": " ".join(["task", compact(task), *past, ";", compact(seen), ">"])}]
    parts = [RULES, f"{TASK}{task}."]
    if history:
        past = [
            f"[Observation {one.turn}: '{task_of(one.observation)[0]}', Action {one.turn}: '{one.action or 'none'}']"
            for one in history
        ]
        parts.append(f"You have taken {history[-1].turn} actions so far. The latest:\n" + "\n".join(past))
    parts += [f"You see now:\n{seen}", _choices(observation)]
    return [{"role": "user", "content": "\n\n".join(parts)}]


def follow_up(observation: Observation, style: Style) -> list[Message]:
    seen, _ = task_of(observation.text)
    content = f"; {compact(seen)} >" if style == "compact" else f"{seen}\n\n{_choices(observation)}"
    return [{"role": "user", "content": content}]


def _choices(observation: Observation) -> str:
    actions = "\n".join(f"'{action}'" for action in observation.legal_actions)
    return f"Your possible actions are:\n{actions}\n\n{INSTRUCTION}"


def compact(text: str) -> str:
    """What is said, in words of the vocabulary, each thing once. Of the list of a room's receptacles only the highest
    number of each class."""
    text = text.lower().rpartition("=-")[2]
    room = "looking quickly around you" in text
    if room:
        text = text.partition("you see")[2]
    known = _known()
    said = [word for word in WORD.findall(text) if word in known]
    return " ".join(_highest(said) if room else _once(said)) or "nothing"


@functools.cache
def _known() -> frozenset[str]:
    return frozenset(words()) - UNSAID


def _highest(said: list[str]) -> list[str]:
    highest: dict[str, int] = {}
    for word, number in itertools.pairwise(said):
        if number.isdecimal() and not word.isdecimal():
            highest[word] = max(highest.get(word, 0), int(number))
    return [part for word, number in highest.items() for part in (word, str(number))]


def _once(said: list[str]) -> list[str]:
    kept: list[str] = []
    named: set[tuple[str, str]] = set()
    pairs = iter(itertools.pairwise([*said, ""]))
    for word, following in pairs:
        if not following.isdecimal():
            kept.append(word)
            continue
        next(pairs)
        if (word, following) not in named:
            named.add((word, following))
            kept += word, following
    return kept


def reply(action: str, style: Style) -> str:
    return action if style == "compact" else f"<think>I know what to do.</think><action>{action}</action>"


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
    """The legal action that a reply names.

    `reference` gives what the published system sends to its engine, legal or not: what stands between the first tags
    of the lower-cased reply, or the last 30 characters of one without tags. (That system then calls invalid what lacks
    <think> tags or has Chinese characters, and nothing else; here it is the environment that says what is valid: what
    is legal.)
    """
    if not reference:
        return tagged_action(reply, legal)
    text = reply.lower()
    start, end = text.find("<action>"), text.find("</action>")
    if start < 0 or end < 0:
        return text[-SENT_CHARACTERS:]
    return text[start + len("<action>") : end].strip()
