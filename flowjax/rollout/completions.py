"""What is asked of vLLM's /v1/completions and what it answers, whole or as a stream of server-sent events."""

import json
from dataclasses import dataclass, field
from typing import Any

_EVENT = b"data: "
_LAST_EVENT = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Calls with equal sampling can travel in one request."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    structured_outputs: str = ""  # JSON of what vLLM's parameter of that name takes; "" leaves replies free


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled, the end-of-sequence token included if there was one.

    `logprobs` are those of the distribution that was sampled from, at the sampling temperature. `finish_reason` is
    "stop" or "length"; `model` is the name under which the engine says it served the request.
    """

    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    model: str


@dataclass(slots=True)
class Partial:
    """What has come of a completion so far; `finish_reason` is empty until it is whole, and then also "abort"."""

    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""

    def extend(self, choice: dict[str, Any]) -> None:
        """Add what a choice of an answer, or of one event of a stream, holds."""
        tokens = choice["logprobs"]["tokens"] if choice["logprobs"] else ()  # each "token_id:<id>"
        if tokens:
            self.sampled_ids += [int(token.rpartition(":")[2]) for token in tokens]
            self.logprobs += choice["logprobs"]["token_logprobs"]
        self.finish_reason = choice["finish_reason"] or ""

    def completion(self, model: str) -> Completion:
        return Completion(tuple(self.sampled_ids), tuple(self.logprobs), self.finish_reason, model)


def completion_body(model: str, sampling: Sampling, prompts: list[list[int]], *, stream: bool) -> dict[str, Any]:
    """A request to /v1/completions. Without a seed: with one, equal prompts would be answered equally."""
    held = {"structured_outputs": json.loads(sampling.structured_outputs)} if sampling.structured_outputs else {}
    return {
        "model": model,
        "prompt": prompts,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,  # of the sampled token and no other
        "return_tokens_as_token_ids": True,
        "stream": stream,
        **held,
    }


def read_event(line: bytes) -> dict[str, Any] | None:
    """The message in one line of a stream; None for lines without, and for the last one.

    Raises:
        ValueError: the line was cut off.
    """
    if not line.startswith(_EVENT):
        return None
    text = line.removeprefix(_EVENT).strip()
    return None if text == _LAST_EVENT else json.loads(text)
