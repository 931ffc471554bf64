"""What the agent is told, and how its replies are read."""

import functools
import re
from collections.abc import Sequence

from flowjax.envs.alfworld.packages import constants
from flowjax.envs.base import Message, Observation, Past, Style, tagged_action

TASK = "Your task is to: "
RULES = """You are a household robot in a text world. You go to places, look into what can be opened, take one thing at a
time, and clean, heat, cool or switch on what the task asks for."""
INSTRUCTION = """First reason step by step about the state and your plan inside <think> </think>. Then choose one of the actions
above, word for word, and give it inside <action> </action>."""
SENT_CHARACTERS = 30  # of a reply without tags, in the published system
WORD = re.compile(r"[a-z]+|\d+")
NUMBERS = 40  # copies of one class that a compact prompt can name
VERBS = "go open close take move use heat clean cool slice examine look inventory put find".split()
GLUE = "to from with in on under it them two some hot cool cold you a".split()
STATES = "nothing closed open carrying arrive pick turn off happens normal special facing".split()
MARKS = ("task", ";", ">", "none")  # the task, the end of a past turn's text, its action, an unreadable reply
UNSAID = {"a", "you", "open"}


def task_of(text: str) -> tuple[str, str]:
    """An observation's text without its task, and the task."""
    seen, _, task = text.partition(TASK)
    return seen.strip(), task.strip().removesuffix(".")


@functools.cache
def words() -> tuple[str, ...]:
    """All that compact prompts and replies are made of."""
    classes = sorted(name.lower() for name in constants().OBJECTS_WSLICED)
    return tuple(dict.fromkeys([*MARKS, *VERBS, *GLUE, *STATES, *classes, *map(str, range(1, NUMBERS + 1))]))


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
    """One user message: the task, the earlier turns that the window shows, what is seen now, what can be done.

    Compact: "task <task> ; <seen> > <action> ; <seen>", without the list of actions.
    """
    seen, task = task_of(observation.text)
    if style == "compact":
        past = [f"; {compact(task_of(turn.observation)[0])} > {turn.action or 'none'}" for turn in history]
        return [{"role": "user", "content": " ".join(["task", compact(task), *past, ";", compact(seen)])}]
    parts = [RULES, f"{TASK}{task}."]
    if history:
        past = [
            f"[Observation {turn.turn}: '{task_of(turn.observation)[0]}', Action {turn.turn}: '{turn.action or 'none'}']"
            for turn in history
        ]
        parts.append(f"You have taken {history[-1].turn} actions so far. The latest:\n" + "\n".join(past))
    parts.append(f"You see now:\n{seen}")
    parts.append(_choices(observation))
    return [{"role": "user", "content": "\n\n".join(parts)}]


def follow_up(observation: Observation, style: Style) -> list[Message]:
    seen, _ = task_of(observation.text)
    content = f"; {compact(seen)}" if style == "compact" else f"{seen}\n\n{_choices(observation)}"
    return [{"role": "user", "content": content}]


def _choices(observation: Observation) -> str:
    actions = "\n".join(f"'{action}'" for action in observation.legal_actions)
    return f"Your possible actions are:\n{actions}\n\n{INSTRUCTION}"


def compact(text: str) -> str:
    """What is said, in the words of the vocabulary. A room's list of receptacles names each class once, with the
    highest number."""
    text = text.lower().rpartition("=-")[2]
    room = "looking quickly around you" in text
    if room:
        text = text.partition("you see")[2]
    said = [word for word in WORD.findall(text) if word in _known() and word not in UNSAID]
    return " ".join(_summary(said) if room else said) or "nothing"


@functools.cache
def _known() -> frozenset[str]:
    return frozenset(words())


def _summary(said: list[str]) -> list[str]:
    highest: dict[str, int] = {}
    for word, number in zip(said, said[1:], strict=False):
        if number.isdecimal() and not word.isdecimal():
            highest[word] = max(highest.get(word, 0), int(number))
    return [part for word, number in highest.items() for part in (word, str(number))]


def reply(action: str, style: Style) -> str:
    return action if style == "compact" else f"<think>I know what to do.</think><action>{action}</action>"


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
    """The legal action that a reply names.

    `reference` gives what the published system sends to its engine, legal or not: what stands between the first tags
    of the lower-cased reply, or the last 30 characters of one without tags. (It then counts as invalid whatever lacks
    <think> tags or has Chinese characters, and only that; here the environment says what is valid: what is legal.)
    """
    if not reference:
        return tagged_action(reply, legal)
    text = reply.lower()
    start, end = text.find("<action>"), text.find("</action>")
    if start < 0 or end < 0:
        return text[-SENT_CHARACTERS:]
    return text[start + len("<action>") : end].strip()
