"""What the agent is told, and how its replies are read."""

import re
from collections.abc import Sequence

from flowjax.envs.base import Message, Observation, Past, Style
from flowjax.envs.webshop.catalog import Catalog
from flowjax.envs.webshop.goals import LIMITS
from flowjax.envs.webshop.pages import (
    ATTRIBUTES,
    BACK,
    BUY,
    NEXT,
    PREVIOUS,
    SEARCH_TEMPLATE,
    SEPARATOR,
    SUB_PAGES,
    read_action,
)

MAX_CHARACTERS = 13_000  # an instruct prompt that is longer is told without its history
TITLE_WORDS = 4  # of a product on a compact results page
PAGES = ("1", "2", "3", "4", "5")  # compact names of results pages; later ones are "more"

ROLE = """You are shopping in WebShop, an online shop. Find the product that the task describes, choose the options it \
asks for, and buy it. Buying ends the task; what you buy is then compared with the task."""
ASK = """First reason step by step about the next action inside <think> </think>, then give one of the actions above \
inside <action> </action>."""

_FILLER_WORDS = "i am looking for need find me want to buy a an the with and price lower than dollars"
_FILLER = frozenset(_FILLER_WORDS.split())
_WORD = re.compile(r"[^\s,;:()\[\]]+")


def words(text: str) -> list[str]:
    """The words that matter of an instruction or a title, lower case, without marks."""
    found = (word.strip(".!?\"'") for word in _WORD.findall(text.lower()))
    return [word for word in found if word and word not in _FILLER]


def goal_words(instruction: str) -> list[str]:
    """An instruction in short: its words, then "under" and the price in whole dollars."""
    said, _, limit = instruction.partition(", and price lower than ")
    return [*words(said), *(("under", limit.split(".")[0]) if limit else ())]


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
    """One user message. Compact: the goal, the actions of the history, the page, each word a word of `vocabulary`."""
    if style == "compact":
        instruction, page = _split(observation.text)
        done = [word for past in history for word in ("then", *_spoken(past.action).split())]
        return _user(" ".join(["goal", *goal_words(instruction), *done, *_compact(page)]))
    text = _instruct(observation, history)
    return _user(text if len(text) <= MAX_CHARACTERS or not history else _instruct(observation, ()))


def follow_up(observation: Observation, style: Style) -> list[Message]:
    _, page = _split(observation.text)
    if style == "compact":
        return _user(" ".join(_compact(page)))
    return _user(f"The page now:\n{_quoted(page)}\n\n{_actions(observation)}\n\n{ASK}")


def reply(action: str, style: Style) -> str:
    return _spoken(action) if style == "compact" else f"<action>{action}</action>"


def parse_action(reply: str, legal: tuple[str, ...]) -> str | None:
    """The action in the last pair of tags, or a whole reply without tags: `click[x]`, or `click x` as in compact."""
    text = reply.lower()
    start, end = text.find("<action>"), text.find("</action>")
    if end >= 0:
        end = text.rfind("</action>")
        start = text.rfind("<action>", 0, end)
        if start < 0:
            return None
        text = text[start + len("<action>") : end]
    elif start >= 0:
        return None
    action = text.strip()
    if "[" not in action and end < 0:
        name, _, argument = action.partition(" ")
        action = f"{name}[{' '.join(argument.split())}]"
    return action if _is_legal(action, legal) else None


def _is_legal(action: str, legal: tuple[str, ...]) -> bool:
    if action == SEARCH_TEMPLATE:
        return False
    name, argument = read_action(action)
    if name == "search":
        return SEARCH_TEMPLATE in legal and bool(argument.strip()) and action == f"search[{argument}]"
    return action in legal


def vocabulary(catalog: Catalog) -> tuple[str, ...]:
    """Every word of compact prompts about this catalog, and of replies to them."""
    names = (BACK, PREVIOUS, NEXT, BUY, *SUB_PAGES, ATTRIBUTES)
    fixed = "goal then none under search click page results item sub done more " + " ".join((*names, *PAGES))
    found: dict[str, None] = dict.fromkeys(fixed.split())
    found.update(dict.fromkeys(f"{limit:.0f}" for limit in LIMITS if limit <= _highest_limit(catalog)))
    texts: list[str] = []
    for product in catalog.products:
        texts += [product.asin, product.name, product.instruction or ""]
        texts += [told["instruction"] for told in catalog.human.get(product.asin, ())]
        for name, values in product.options.items():
            texts += [name, *values]
            found.update(dict.fromkeys(word for text in (name, *values) for word in text.split()))
    found.update(dict.fromkeys(word for text in texts for word in words(text)))
    return tuple(found)


def _highest_limit(catalog: Catalog) -> float:
    return max((max(product.prices) for product in catalog.products), default=0.0) + 50


def _user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


def _split(text: str) -> tuple[str, list[str]]:
    """The instruction and the parts of the page after it; the last page names no instruction."""
    parts = text.split(SEPARATOR)
    for start in (0, 1):
        if len(parts) > start + 1 and parts[start] == "Instruction:":
            return parts[start + 1], parts[start + 2 :]
    return "", parts


def _spoken(action: str) -> str:
    name, argument = read_action(action)
    return f"{name} {argument}" if name else "none"


def _compact(page: list[str]) -> list[str]:
    if page == ["Search"]:
        return ["page", "search"]
    if page and page[0].startswith("Thank you"):
        return ["page", "done"]
    if len(page) > 1 and page[1].startswith("Page "):
        return _compact_results(page)
    return _compact_item(page) if page[-1:] == ["Buy Now"] else ["page", "sub"]


def _compact_results(page: list[str]) -> list[str]:
    number = page[1].split()[1]
    shown = page[page.index("Next >") + 1 :]
    said = [
        word for asin, title in zip(shown[::3], shown[1::3], strict=False) for word in (asin.lower(), *_title(title))
    ]
    return ["page", "results", number if number in PAGES else "more", *said]


def _title(title: str) -> list[str]:
    """Its last words: the brand, which stands first, says nothing about the kind."""
    return words(title)[-TITLE_WORDS:]


def _compact_item(page: list[str]) -> list[str]:
    """Title and options as they stand, between the links and the price; the rest is the same on every such page."""
    price = next(i for i in reversed(range(len(page))) if page[i].startswith("Price: "))
    *options, title = page[2:price]
    return ["page", "item", *_title(title), *(word for part in options for word in part.split())]


def _quoted(page: list[str]) -> str:
    return SEPARATOR.join(f"'{part}'" for part in page)


def _actions(observation: Observation) -> str:
    """The actions a page offers; the search bar, which works everywhere, where it is shown."""
    on_search_page = observation.text.startswith("WebShop" + SEPARATOR)
    offered = ["search[<your query>]"] if on_search_page else []
    offered += [action for action in observation.legal_actions if action != SEARCH_TEMPLATE]
    return "Your actions are:\n[\n" + "\n".join(f"'{action}'," for action in offered) + "\n]"


def _instruct(observation: Observation, history: Sequence[Past]) -> str:
    instruction, page = _split(observation.text)
    parts = [ROLE, f"Your task: {instruction}"]
    if history:
        past = [
            f"[Observation {p.turn}: '{_quoted(_split(p.view)[1])}', Action {p.turn}: '{p.action or 'none'}']"
            for p in history
        ]
        parts.append(f"You have taken {history[-1].turn} actions so far. The latest:\n" + "\n".join(past))
    parts += [f"The page now:\n{_quoted(page)}", _actions(observation), ASK]
    return "\n\n".join(parts)
