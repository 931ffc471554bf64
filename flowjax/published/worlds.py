"""Worlds that read replies as the published systems do, faults included.

`config.env.name`: "flowjax.published.worlds:PublishedSokoban" and so on. All else is as in the worlds themselves, also
how replies to compact prompts are read, which no published system has.
"""

import re
from dataclasses import replace
from typing import ClassVar

from flowjax.envs import Step, Style, World
from flowjax.envs.alfworld.world import Alfworld
from flowjax.envs.code.world import Code, runnable
from flowjax.envs.search.protocol import parse_as_published
from flowjax.envs.search.world import Search
from flowjax.envs.sokoban.rooms import DIRECTIONS
from flowjax.envs.sokoban.world import Sokoban, SokobanEnv
from flowjax.envs.webshop.world import WebShop

_CODE_CHARACTERS = 20  # of the shortest text that the published code world takes for a program
_CHAT_TOKEN = re.compile(r"<\|[^>\n]{1,60}?\|>")
_BLOCK = re.compile(r"```(?:python|py)?(.*?)```", re.DOTALL | re.IGNORECASE)
_LOOKS = re.compile(r"(?:def|class|import|from|for|while|return) |print\(|if __name__")
_SENT_CHARACTERS = 30  # at a reply's end, which the published ALFWorld sends where a tag is missing
_STILL = "still"
_TAIL_CHARACTERS = 20  # at a reply's end, which the published WebShop runs where a tag is missing


class _Published(World):
    """A world whose `parse_action` and `well_formed` are a published system's; `Original` is the world itself."""

    Original: ClassVar[type[World]]

    def read(self, reply: str, legal: tuple[str, ...], style: Style) -> tuple[str, bool]:
        if style == "compact":
            return self.Original.parse_action(self, reply, legal) or "", self.Original.well_formed(self, reply)
        return super().read(reply, legal, style)


class PublishedSokoban(_Published, Sokoban):
    """Sokoban in RewardFlow: runs the first of up, down, left, right, still that occurs anywhere between the first
    `<action>` and the first `</action>`, even inside another word. `still` is a valid move without effect."""

    Original = Sokoban

    def env(self) -> "_SokobanWithStill":
        return _SokobanWithStill(self.options)

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        inside = _first_tagged(reply)
        return None if inside is None else next((name for name in (*DIRECTIONS, _STILL) if name in inside), None)

    def well_formed(self, reply: str) -> bool:
        """True if the reply has both `<think>` and `</think>`, in lower case, as RewardFlow asks."""
        return "<think>" in reply and "</think>" in reply


class _SokobanWithStill(SokobanEnv):
    """Sokoban with the published no-op, which prompts do not offer."""

    def step(self, action: str) -> Step:
        step = super().step(action)
        return replace(step, valid=True) if action == _STILL and not step.terminal else step


class PublishedAlfworld(_Published, Alfworld):
    """ALFWorld in RewardFlow: sends its engine the text between the first tags, legal or not, or the last 30 characters
    of a reply that lacks one of the tags.

    That system calls a reply invalid only if it lacks <think> tags or has Chinese characters. Here the environment
    decides: legal actions are valid.
    """

    Original = Alfworld

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        inside = _first_tagged(reply)
        return reply.lower()[-_SENT_CHARACTERS:] if inside is None else inside.strip()


class PublishedWebShop(_Published, WebShop):
    """WebShop in RewardFlow: runs the text between the first tags, whatever it is, or the last 20 characters of a reply
    that lacks one of the tags. The environment says whether that is possible on the page."""

    Original = WebShop

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        inside = _first_tagged(reply)
        return (reply.lower()[-_TAIL_CHARACTERS:] if inside is None else inside.strip()) or None


class PublishedSearch(_Published, Search):
    """Search in RewardFlow or ASearcher, as `Options.protocol` says: runs one action of a reply that has several."""

    Original = Search

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        return parse_as_published(reply, legal)


class PublishedCode(_Published, Code):
    """Code in AstraFlow's workflows: the last fence with at least 20 characters in it, on one line or several. A reply
    without one is a program as a whole if it has 20 characters and looks like Python."""

    Original = Code

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        said = _CHAT_TOKEN.sub("", reply).strip()
        blocks = [block.strip() for block in _BLOCK.findall(said)]
        found = [block for block in blocks if len(block) >= _CODE_CHARACTERS]
        if not found and len(said) >= _CODE_CHARACTERS and _LOOKS.search(said):
            found = [said]
        return found[-1] if found and runnable(found[-1]) else None


def _first_tagged(reply: str) -> str | None:
    """The text between the first `<action>` and the first `</action>`, lower case; None where either is missing."""
    text = reply.lower()
    start, end = text.find("<action>"), text.find("</action>")
    return None if min(start, end) < 0 else text[start + len("<action>") : end]
