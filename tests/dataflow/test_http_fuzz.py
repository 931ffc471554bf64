"""Whatever comes in at the socket: the answer is never a 5xx, and the log never has a stack trace.

`FLOWJAX_FUZZ=10000 python -m pytest tests/dataflow/test_http_fuzz.py` sends 10,000 requests.
"""

import asyncio
import logging
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.dataflow.hostile_messages import array, changed, on_the_wire, paths
from tests.dataflow.test_hostile import VALUES, Dataflow, run

REQUESTS = int(os.environ.get("FLOWJAX_FUZZ", "300"))
PER_SERVER, PATIENCE_S = 20, 0.5
NAMES = ("lease", "renew", "episodes", "give_back", "versions", "batch", "committed", "status", "metrics", "health")
SCHEMAS: list[Any] = [
    [],
    [1],
    {},
    {"a": 1},
    array("<i4", 2),
    array("<f4", 0),
    True,
    1.0,
    "1" * 10_000,
    2**64 - 1,
    -(2**63),
]


async def send(dataflow: Dataflow, request: bytes) -> bytes:
    """The first line of what comes back; nothing where the server waits for more, or closes the connection."""
    reader, writer = await asyncio.open_connection(dataflow.server.host, dataflow.server.port)
    try:
        writer.write(request)
        async with asyncio.timeout(PATIENCE_S):
            line = await reader.readline()
            if b" 100 " in line:  # only says that the body may be sent: the answer comes after it
                await reader.readline()
                line = await reader.readline()
            return line
    except (ConnectionError, TimeoutError):
        return b""
    finally:
        writer.close()


def post(path: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = [
        b"POST " + path + b" HTTP/1.1",
        b"Host: x",
        b"Content-Length: %d" % len(body),
        b"Connection: close",
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def is_sound(status_line: bytes, caplog: Any) -> None:
    assert not status_line or status_line.split()[1][:1] in b"24", status_line
    traces = [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.CRITICAL]
    assert not traces, traces


@pytest.mark.parametrize("schema", SCHEMAS, ids=repr)
def test_a_schema_version_of_any_kind_is_refused_in_words(tmp_path, caplog, schema):
    async def scenario(dataflow: Dataflow) -> None:
        status, answer = await dataflow.raw("/lease", on_the_wire({"worker": "w", "slots": 1}, schema))
        assert status == 400 and "schema version" in answer["error"] and len(answer["error"]) < 400
        is_sound(b"", caplog)

    run(tmp_path, scenario)


@pytest.mark.parametrize("value", [b"\xff\xfe", b"Bearer \xc3\x28", b"Bearer secret\x80"])
def test_a_header_that_is_no_text_is_refused_in_words(tmp_path, caplog, value):
    async def scenario(dataflow: Dataflow) -> None:
        line = await send(dataflow, post(b"/lease", on_the_wire({}), b"Authorization: " + value))
        assert b"401" in line
        is_sound(line, caplog)

    run(tmp_path, scenario, token="secret")


LINE = st.binary(max_size=40).map(lambda data: data.replace(b"\r", b"").replace(b"\n", b""))
HEADERS = st.sampled_from(
    [
        *(b"Content-Encoding: " + kind for kind in (b"gzip", b"deflate", b"br", b"zstd", b"identity", b"\xff")),
        *(b"Transfer-Encoding: " + kind for kind in (b"chunked", b"gzip, chunked", b"x", b"identity")),
        *(b"Content-Length: " + kind for kind in (b"0", b"-1", b"x", b"99999999999999999999", b"+5", b"\xff")),
        *(b"Content-Type: " + kind for kind in (b"multipart/form-data", b"\xff", b"a/b; charset=\xff")),
        *(b"Expect: " + kind for kind in (b"100-continue", b"x", b"\xff")),
        *(b"Connection: " + kind for kind in (b"upgrade", b"close", b"keep-alive, \xff")),
        *(b"Host: " + kind for kind in (b"", b"\xff", b"[::1", b"a:99999999", b"x@y")),
        *(
            b"Upgrade: websocket",
            b"Range: bytes=-1",
            b"Cookie: \xff=\xff",
            b"Accept: text/html",
            b"If-None-Match: \xff",
        ),
        *(b"Authorization: " + kind for kind in (b"", b"Bearer", b"Bearer \xff", b"Bearer secret", b"Basic \xe9")),
        b"X: " + b"x" * 9000,
    ]
) | st.builds(lambda name, value: name + b": " + value, LINE, LINE)
METHODS = st.sampled_from([b"POST", b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"CONNECT", b"\xff"]) | LINE
PATHS = (
    st.sampled_from([*(b"/" + name.encode() for name in NAMES), b"/", b"*", b"//lease", b"/lease%ff", b"/%2e%2e/lease"])
    | st.builds(lambda name, tail: b"/" + name.encode() + tail, st.sampled_from(NAMES), LINE)
    | LINE
)
BODIES = (
    st.binary(max_size=200)
    | st.builds(on_the_wire, VALUES, VALUES)
    | st.builds(lambda body: b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n", st.binary(max_size=50))
)


@st.composite
def requests(draw: Any, messages: dict[str, Any]) -> bytes:
    """A request with anything in any place, or a fair message with one value changed, under strange headers."""
    headers = draw(st.lists(HEADERS, max_size=3))
    if draw(st.booleans()):
        path = draw(st.sampled_from(list(messages)))
        message = messages[path]
        place = draw(st.sampled_from(list(paths(message))))
        return post(
            path.encode(), on_the_wire(changed(message, place, draw(VALUES)), draw(st.just(1) | VALUES)), *headers
        )
    body = draw(BODIES)
    lines = [b" ".join([draw(METHODS), draw(PATHS), draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9", b""]))])]
    lines += [b"Content-Length: %d" % len(body)] * draw(st.integers(0, 1))
    return b"\r\n".join([*lines, *headers]) + b"\r\n\r\n" + body


@settings(
    max_examples=max(REQUESTS // PER_SERVER, 1),
    deadline=None,
    derandomize="FLOWJAX_FUZZ" not in os.environ,  # the same requests in every change; new ones are asked for
    phases=[Phase.explicit, Phase.generate],  # the log names the request; to shrink one takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_no_request_is_a_fault_of_the_server(tmp_path_factory, caplog, data):
    caplog.clear()

    token = data.draw(st.sampled_from(["", "secret"]))

    async def scenario(dataflow: Dataflow) -> None:
        if not token:
            await dataflow.lease()
        messages = dataflow.fair()
        for _ in range(PER_SERVER):
            request = data.draw(requests(messages))
            is_sound(await send(dataflow, request), caplog)

    run(tmp_path_factory.mktemp("flow"), scenario, token=token)
