"""What answers cost: tokens as the endpoint counts them, money by a price list."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowjax.canvas.backends.base import Message
from flowjax.canvas.trace import Usage

_log = logging.getLogger(__name__)
_CHARACTERS_PER_TOKEN = 4  # rough; only where an endpoint does not count
_TOKENS_PER_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Prices:
    """Per million tokens, in any one currency; 0 is free."""

    prompt: float = 0.0
    sampled: float = 0.0

    def cost(self, prompt_tokens: int, sampled_tokens: int) -> float:
        """What so many tokens cost."""
        return (prompt_tokens * self.prompt + sampled_tokens * self.sampled) / _TOKENS_PER_MILLION


def usage_of(answer: Mapping[str, Any], messages: Sequence[Message], text: str, prices: Prices) -> Usage:
    """The usage that an answer of the chat API states.

    An endpoint that does not state it is warned of, and its tokens are estimated from the length of the texts, so that
    budgets hold there too.
    """
    stated = answer.get("usage")
    stated = stated if isinstance(stated, Mapping) else {}
    prompt_tokens, sampled_tokens = stated.get("prompt_tokens"), stated.get("completion_tokens")
    if not (isinstance(prompt_tokens, int) and isinstance(sampled_tokens, int)):
        _log.warning("The endpoint of model %r does not state its usage: it is estimated", answer.get("model"))
        prompt_tokens, sampled_tokens = prompt_estimate(messages), -(-len(text) // _CHARACTERS_PER_TOKEN)
    return Usage(1, prompt_tokens, sampled_tokens, prices.cost(prompt_tokens, sampled_tokens))


def prompt_estimate(messages: Sequence[Message]) -> int:
    """Roughly how many tokens the messages are."""
    return sum(-(-len(message["content"]) // _CHARACTERS_PER_TOKEN) for message in messages)
