"""What the agent is told and how its replies are read, for language models (instruct) and nano models (compact)."""

from collections.abc import Sequence

from flowjax.envs.base import Message, Observation, Past, Style
from flowjax.envs.search import compact
from flowjax.envs.search.protocol import (
    ACCESS,
    CLOSING,
    NOTICE,
    OPENING,
    ProtocolName,
    SearchView,
    information,
    parse_tags,
    protocol_of,
)

_RULES: dict[ProtocolName, str] = {
    "rewardflow": """Answer the question below. You can look things up with a search engine before you answer.""",
    "asearcher": """You work on a question together with a search engine. You may search as often as you need. Each
time you are shown what was found, between <information> and </information>.""",
}
_INSTRUCTION: dict[ProtocolName, str] = {
    "rewardflow": """First think about what you know and what is missing, inside <think> </think>. Then do exactly
one of two things. To look something up, write a query inside <search> </search>.
When you know the answer, write it inside <answer> </answer>: only the answer itself, for example
<answer>Lake Como</answer>.""",
    "asearcher": """In each turn, think inside <think> </think>, then do exactly one thing.
To search, write a query inside <search> </search>.{access}
To finish, write the bare answer inside <answer> </answer>, for example <answer>Lake Como</answer>.""",
}
_ACCESS = "\nTo read a page, write its address inside <access> </access>."
_UNREADABLE = "(no action could be read)"


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> str:
    """The question, the past turns and what each found, and the latest result.

    Compact: the question's words, the past turns', the latest result's.
    """
    shown: SearchView = observation.view
    after = [past.view for past in history[1:]] + [shown] if history else []
    steps = [(past, _news(result)) for past, result in zip(history, after, strict=True)]
    latest = None if any(past.action for past, _ in steps) else shown  # what the steps below do not show
    if style == "compact":
        parts = [compact.question(shown), *([compact.result(latest)] if latest else [])]
        for past, result in steps:
            parts += [[compact.write(past.action)] if past.action else [], _compact_result(result)]
        parts.append([] if steps else _notice(shown))
        return " ".join(word for part in parts for word in part)
    name = protocol_of(observation.legal_actions)
    parts = [_RULES[name], f"Question: {shown.question}"]
    if latest and latest.found is not None:
        parts.append("The latest search:\n" + _result(SearchView(shown.question, shown.found), name))
    if steps:
        parts.append(f"Steps taken so far: {history[-1].turn}. The latest:")
        parts += [_step(past, result, name) for past, result in steps]
    elif shown.unreadable:
        parts.append(NOTICE)
    access = _ACCESS if ACCESS in observation.legal_actions else ""
    return "\n\n".join([*parts, _INSTRUCTION[name].format(access=access)])


def follow_up(observation: Observation, style: Style) -> list[Message]:
    """What the last action found; only a notice where it was none, since the conversation holds the rest."""
    shown = _news(observation.view)
    if style == "compact":
        return [{"role": "user", "content": " ".join(_compact_result(shown))}]
    return [{"role": "user", "content": _result(shown, protocol_of(observation.legal_actions))}]


def reply(action: str, style: Style) -> str:
    if style == "compact":
        return compact.write(action)
    verb, _, argument = action.removesuffix("]").partition("[")
    return f"<{verb}>{argument}</{verb}>"


def parse_action(reply: str, legal: tuple[str, ...]) -> str | None:
    """The action inside the reply's only pair of tags, or of a compact reply; one with two actions is unreadable."""
    return compact.parse(reply, legal) or parse_tags(reply, legal)


def _news(view: SearchView) -> SearchView:
    """What an action brought: nothing but a notice where it was none."""
    return SearchView(view.question, None, True) if view.unreadable else view


def _notice(view: SearchView) -> list[str]:
    return [compact.UNREADABLE] if view.unreadable else []


def _compact_result(view: SearchView) -> list[str]:
    return [*compact.result(view), *_notice(view)]


def _step(past: Past, after: SearchView, name: ProtocolName) -> str:
    said = reply(past.action, "instruct") if past.action else _UNREADABLE
    return f"Step {past.turn}: {said}\n{_result(after, name)}".rstrip()


def _result(view: SearchView, name: ProtocolName) -> str:
    found = [] if view.found is None else [f"{OPENING}\n{information(view.found, name)}\n{CLOSING}"]
    return "\n".join([*found, NOTICE] if view.unreadable else found)
