"""Questions, documents and actions of the generated encyclopedia in few words of a small fixed vocabulary.

Names are cut into their syllables, relations stay, everything else is left out: of an encyclopedia of any size, a word
is one of 48 syllables, 15 relations or a few marks, and a name never seen before can still be read and copied.
"""

import re
from collections.abc import Sequence

from flowjax.envs.search.names import RELATIONS, SYLLABLES, split_name
from flowjax.envs.search.protocol import SearchView, action_of, read_action

ASKED, FOUND, EMPTY, UNREADABLE = "?", "found", "nothing", "none"
VERBS = ("search", "answer")
_LEGAL = tuple(f"{verb}[<words>]" for verb in VERBS)
_WORD = re.compile(r"[A-Za-z]+")
_SYLLABLES, _RELATIONS = frozenset(SYLLABLES), frozenset(RELATIONS)


def vocabulary() -> tuple[str, ...]:
    return (*VERBS, ASKED, FOUND, EMPTY, UNREADABLE, *RELATIONS, *SYLLABLES)


def words(text: str) -> list[str]:
    """The text's relations, and its names by their syllables; a name right after itself is told once."""
    told: list[str] = []
    last = ""
    for word in _WORD.findall(text):
        if word in _RELATIONS:
            told.append(word)
            last = word
        elif word != last and (name := split_name(word)):
            told += name
            last = word
    return told


def question(view: SearchView) -> list[str]:
    return [*words(view.question), ASKED]


def result(view: SearchView) -> list[str]:
    """What the latest search found: after `found` each document's words, or `nothing`."""
    if view.found is None:
        return []
    return [word for _, contents in view.found for word in (FOUND, *words(contents))] or [EMPTY]


def write(action: str) -> str:
    """An action as a compact reply, for example `search rem bok`."""
    read = read_action(action, _LEGAL)
    return " ".join([read[0], *words(read[1])]) if read else UNREADABLE


def parse(reply: str, legal: Sequence[str]) -> str | None:
    """The action of a reply that consists of a verb, syllables and relations; syllables in a row are one name."""
    verb, *rest = reply.split() or [""]
    if verb not in VERBS or not _SYLLABLES.union(_RELATIONS).issuperset(rest):
        return None
    spelled, name = [], ""
    for word in (*rest, ""):
        if word in _SYLLABLES:
            name += word
            continue
        spelled += [name.capitalize(), word]
        name = ""
    action = action_of(verb, " ".join(spelled))
    return action if read_action(action, legal) else None
