"""`python -m flowjax.canvas`: a workflow from its text or its JSON form, and what it says when something is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chat_server import chat, refusal
from test_outage import endpoint

from flowjax.canvas.__main__ import main


def backends(folder: Path, url: str) -> str:
    file = folder / "backends.json"
    file.write_text(
        json.dumps({"backends": {"small": {"kind": "openai", "base_url": url, "model": "m", "retries": 0}}})
    )
    return f"--backends={file}"


def test_text_and_json_form_are_the_same_workflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved, drawn = tmp_path / "workflow.json", tmp_path / "workflow.svg"
    problem = ["--problem=What is 6 times 7?", "--kind=math"]
    with endpoint(lambda body: chat("Answer: 42")) as server:
        options = [backends(tmp_path, server.url), *problem]
        assert main([*options, "--workflow=Custom -> Format", f"--json={saved}", f"--svg={drawn}"]) == 0
        first = capsys.readouterr()
        assert (first.out, first.err) == ("42\n", "ok: 1 calls, 14 tokens, 0 cost\n")
        assert main([*options, f"--workflow={saved}"]) == 0
        assert capsys.readouterr().out == first.out
        assert server.bodies[0] == server.bodies[1]
        command = [sys.executable, "-m", "flowjax.canvas", *options, "--workflow=Custom"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "42\n"
    assert drawn.read_text().startswith("<svg")


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with endpoint(lambda body: refusal(401)) as server:
        options = [backends(tmp_path, server.url), "--problem=?"]
        assert main([*options, "--workflow=Custm"]) == 2
        assert "Did you mean `Custom`?" in capsys.readouterr().err
        assert main([*options, "--workflow=absent.json"]) == 2
        assert "absent.json cannot be read" in capsys.readouterr().err
        assert main([*options, "--workflow=Custom"]) == 1
        told = capsys.readouterr()
        assert told.out == "" and told.err.startswith("executor_error: ") and "HTTP 401" in told.err
