"""The dataflow's client against answers that are none yet."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from flowjax.broker import DataflowClient, DataflowError, connect
from flowjax.records import pack


def _push(*statuses: int) -> tuple[int, int]:
    """What a push comes to when it is answered with these statuses in turn, and how often it was sent."""
    asked = []

    async def episodes(request: web.Request) -> web.Response:
        asked.append(await request.read())
        status = statuses[min(len(asked), len(statuses)) - 1]
        return web.Response(status=status, body=pack({"accepted": 1} if status == 200 else {"error": "not now"}))

    async def scenario() -> int:
        app = web.Application()
        app.router.add_post("/episodes", episodes)
        async with TestServer(app) as server, connect(str(server.make_url(""))) as broker:
            return await DataflowClient(broker, worker="test", away_s=0.2).push([])

    return asyncio.run(scenario()), len(asked)


def test_a_dataflow_that_is_behind_is_waited_for_longer_than_one_that_is_away():
    assert _push(429, 429, 429, 429, 200) == (1, 5)
    with pytest.raises(DataflowError, match="has not answered for 0 s"):
        _push(503, 503, 503, 503, 503, 503, 200)


def test_a_refusal_is_final():
    with pytest.raises(DataflowError, match=r"refuses /episodes \(HTTP 400\): not now"):
        _push(400, 200)
