"""Agents that any OpenAI-style endpoint speaks for: text in, text out. Evaluations play with them; nothing is trained.

python -m flowjax.evaluate --config=configs/math.py --endpoint=https://api.openai.com/v1 --model_name=gpt-4.1-mini
"""

from collections.abc import Callable, Sequence

import numpy as np

from flowjax.canvas.backends.base import Backend, BackendUnavailable, Request
from flowjax.envs.base import Message
from flowjax.rollout.client import EngineError, SamplingOptions
from flowjax.workflows.agent import UNVERSIONED, Agent, Reply


class EndpointAgent(Agent):
    """An agent of one episode.

    The endpoint's token ids and log-probs are not known: zeros stand for them, as many as it says that it has read and
    sampled, so that what is counted is right.
    """

    def __init__(self, backend: Backend, model: str, sampling: SamplingOptions, seed_of: Callable[[int], int]):
        """`model` is what the run calls it, `seed_of` gives the seed of the agent's n-th reply."""
        self._backend, self._model, self._sampling, self._seed_of = backend, model, sampling, seed_of
        self._said: list[tuple[Reply, list[Message]]] = []

    async def act(self, messages: Sequence[Message], *, after: Reply | None = None) -> Reply:
        """One reply to `messages`; with `after`, the next one of the conversation that led to that reply.

        Raises:
            EngineError: the endpoint does not answer.
        """
        before = next((conversation for reply, conversation in self._said if reply is after), [])
        asked = [*before, *messages]
        request = Request(
            [dict(message) for message in asked],
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            max_new_tokens=self._sampling.max_new_tokens,
            seed=self._seed_of(len(self._said)),
        )
        try:
            answer = await self._backend.complete(request)
        except BackendUnavailable as error:
            raise EngineError(str(error)) from error
        sampled = np.zeros(answer.usage.sampled_tokens, np.int32)
        reply = Reply(
            text=answer.text,
            prompt_ids=np.zeros(max(answer.usage.prompt_tokens, 1), np.int32),
            sampled_ids=sampled,
            logprobs=np.zeros(len(sampled), np.float32),
            finish_reason=answer.finish_reason,
            policy=self._model,
            version=UNVERSIONED,
            generate_s=0.0,
        )
        self._said.append((reply, [*asked, {"role": "assistant", "content": answer.text}]))
        return reply
