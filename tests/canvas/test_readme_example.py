"""The README's library example runs as it stands, against an endpoint on this machine."""

import asyncio
import gc
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from chat_server import chat, serving

from flowjax.grading import sandbox

README = Path(__file__).parents[2] / "README.md"


def reply(body: dict[str, Any]) -> Any:
    """Something that every operator can read."""
    schema = body.get("response_format", {}).get("json_schema", {}).get("schema", {})
    if "passed" in schema.get("properties", {}):
        return chat(json.dumps({"feedback": "right", "passed": True}))
    return chat("```python\nprint(72)\n```" if "program" in str(body["messages"]) else "Answer: 72")


@pytest.mark.parametrize("without_isolation", [False, True])
def test_a_dozen_lines_build_run_and_draw_a_workflow(
    without_isolation: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, caplog
):
    if without_isolation:
        weak = sandbox.Isolation(sandbox.RLIMITS_ONLY, sandbox.isolation().interpreter, False, "no bubblewrap")
        monkeypatch.setattr(sandbox, "isolation", lambda: weak)
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 12
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
    answer, status, usage, *errors = capsys.readouterr().out.splitlines()
    assert (answer, status) == ("72", "ok") and usage.startswith("Usage(calls=")
    assert bool(errors) == without_isolation, "a step that failed is named although others stood in for it"
    assert not errors or errors[0].startswith("n3 Programmer: IsolationError: ")
    gc.collect()
    assert "Unclosed" not in caplog.text
    assert (tmp_path / "workflow.svg").read_text().startswith("<svg")
