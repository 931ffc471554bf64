"""The README's library example runs as it stands, against an endpoint on this machine."""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from chat_server import chat, serving

README = Path(__file__).parents[2] / "README.md"


def reply(body: dict[str, Any]) -> Any:
    """Something that every operator can read."""
    schema = body.get("response_format", {}).get("json_schema", {}).get("schema", {})
    if "passed" in schema.get("properties", {}):
        return chat(json.dumps({"feedback": "right", "passed": True}))
    return chat("```python\nprint(72)\n```" if "program" in str(body["messages"]) else "Answer: 72")


def test_ten_lines_build_run_and_draw_a_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    started, done = threading.Event(), threading.Event()
    url = ""

    async def serve() -> None:
        nonlocal url
        async with serving(reply) as server:
            url = server.url
            started.set()
            await asyncio.to_thread(done.wait)

    server = threading.Thread(target=lambda: asyncio.run(serve()))
    server.start()
    try:
        assert started.wait(10)
        exec(program.replace("http://127.0.0.1:8000/v1", url), {})
    finally:
        done.set()
        server.join()
    assert capsys.readouterr().out.startswith("72 ok Usage(calls=")
    assert (tmp_path / "workflow.svg").read_text().startswith("<svg")
