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


@pytest.mark.parametrize("case", ["all well", "no programs", "no isolation"])
def test_a_dozen_lines_build_run_and_draw_a_workflow(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, caplog
):
    if case == "no isolation":
        weak = sandbox.Isolation(sandbox.RLIMITS_ONLY, sandbox.isolation().interpreter, False, "no bubblewrap")
        monkeypatch.setattr(sandbox, "isolation", lambda: weak)
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 12
    monkeypatch.chdir(tmp_path)
    started, done = threading.Event(), threading.Event()
    url, asked = "", []

    async def serve() -> None:
        nonlocal url
        answered = reply if case == "all well" else lambda body: chat("Answer: 72")
        async with serving(answered) as server:
            url = server.url
            started.set()
            await asyncio.to_thread(done.wait)
            asked.extend(server.bodies)

    server = threading.Thread(target=lambda: asyncio.run(serve()))
    server.start()
    try:
        assert started.wait(10)
        exec(program.replace("http://127.0.0.1:8000/v1", url), {})
    finally:
        done.set()
        server.join()
    answer, status, usage, *errors = capsys.readouterr().out.splitlines()
    assert usage.startswith("Usage(calls=")
    if case == "no isolation":
        assert (answer, status, asked) == ("", "executor_error", []), "refused before anything is asked"
        assert len(errors) == 1 and "apt-get install bubblewrap" in errors[0]
    else:
        assert (answer, status) == ("72", "ok") and asked
        assert bool(errors) == (case == "no programs"), "a step that failed is named although others stood in for it"
        assert not errors or errors[0].startswith("n3 Programmer: no program in 3 rounds")
    gc.collect()
    assert "Unclosed" not in caplog.text
    assert (tmp_path / "workflow.svg").read_text().startswith("<svg")
