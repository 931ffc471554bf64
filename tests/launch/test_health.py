"""What a port says of the role behind it."""

import asyncio

import pytest

from flowjax.launch.supervisor import Unhealthy, answers


def test_a_serving_port_a_silent_one_and_those_that_refuse_are_told_apart():
    async def main():
        async def serve(reader, writer):
            line = await reader.readline()
            if b"/health" in line:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            elif b"/dead" in line:
                writer.write(b"HTTP/1.1 503 Dead\r\n\r\n")
            writer.close()

        async def silent(reader, writer):
            await reader.read()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert await answers("127.0.0.1", port, "/health")
            with pytest.raises(Unhealthy, match="answered /dead with status 503"):
                await answers("127.0.0.1", port, "/dead")
            with pytest.raises(Unhealthy, match="broke connections off"):
                await answers("127.0.0.1", port, "/other")
        with pytest.raises(Unhealthy, match="refused connections"):
            await answers("127.0.0.1", port, "/health")
        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert not await answers("127.0.0.1", port, "/health", timeout_s=0.2)

    asyncio.run(main())
