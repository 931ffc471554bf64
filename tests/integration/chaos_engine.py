"""The fake engine as a process of its own, every sampled token of which has a log-probability of its own.

python chaos_engine.py PORT ACTION [ACTION...]
"""

import asyncio
import itertools
import sys
import time

from aiohttp import web
from fake_engine import EOS, FakeEngine

_TURN_S = 0.02


class ChaosEngine(FakeEngine):
    """No two completions have the same log-probabilities, in the life of any process: they tell them apart."""

    def __init__(self, actions: list[int]):
        super().__init__(actions)
        self._numbers = itertools.count(time.time_ns() // 1_000_000 % 2**40 * 1000)

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(_TURN_S)
        if body["model"] not in self.adapters:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        choices = []
        for index in range(len(body["prompt"])):
            high, low = divmod(next(self._numbers), 2**20)
            tokens = [f"token_id:{self._random.choice(self.actions)}", f"token_id:{EOS}"]
            # Two float32 values that hold 40 bits: each is exact, and a log-probability is above -1000.
            values = [-(512 + number / 2**14) for number in (high % 2**20, low)]
            logprobs = {"tokens": tokens, "token_logprobs": values}
            choices.append({"index": index, "finish_reason": "stop", "logprobs": logprobs})
        return web.json_response({"model": body["model"], "choices": choices})


async def main(port: int, actions: list[int]) -> None:
    runner = web.AppRunner(ChaosEngine(actions).server.app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), list(map(int, sys.argv[2:]))))
