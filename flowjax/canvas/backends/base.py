"""What every backend offers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowjax.canvas.trace import Usage

Message = Mapping[str, str]  # {"role": ..., "content": ...}


class BackendError(RuntimeError):
    """A backend that cannot answer: refused, unreachable after its retries, or answering nonsense."""


@dataclass(frozen=True, slots=True)
class Request:
    """One chat completion.

    `seed` tells apart calls that are meant to differ (the branches of a parallel, the votes of an ensemble). `tags` say
    what the call is for (`operator`, and the operator's `input.<field>` values as text): endpoints ignore them, offline
    backends live by them. `schema` is a JSON schema that the answer must follow, where the backend can hold it to one.
    """

    messages: Sequence[Message]
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0
    schema: Mapping[str, Any] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """The text, and what it cost."""

    text: str
    usage: Usage


class Backend(Protocol):
    """Answers requests. `identity` is equal exactly where equal requests may share an answer: caches go by it."""

    @property
    def identity(self) -> str: ...

    async def complete(self, request: Request) -> Completion:
        """Raises:
        BackendError: there is no answer to be had.
        """
        ...
