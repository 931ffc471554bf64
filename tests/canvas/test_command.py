"""`python -m flowjax.canvas.run`: a workflow from its text or JSON form, and what it says when something is wrong."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from chat_server import chat, refusal, streamed
from test_outage import endpoint

from flowjax.canvas.run.__main__ import main
from flowjax.grading import sandbox
from flowjax.grading.sandbox import RLIMITS_ONLY, Isolation


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
        assert main([*options, "--workflow=Custom -> Format", f"--save={saved}", f"--svg={drawn}"]) == 0
        first = capsys.readouterr()
        assert (first.out, first.err) == ("42\n", "ok: 1 calls, 14 tokens, 0 cost\n")
        assert main([*options, f"--workflow={saved}"]) == 0
        assert capsys.readouterr().out == first.out
        assert server.bodies[0] == server.bodies[1]
        command = [sys.executable, "-m", "flowjax.canvas.run", *options, "--workflow=Custom"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "42\n"
        record, program = tmp_path / "run.json", tmp_path / "workflow.py"
        assert main([*options, "--workflow=Custom -> Format", f"--export={program}"]) == 0
        assert capsys.readouterr().out == first.out
        again = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
        assert (again.stdout, server.bodies[-1]) == ("42\n", server.bodies[0])
        assert main([*options, "--workflow=Custom -> Format", "--verbose", f"--json={record}"]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(maxsplit=2)[2] for line in lines[:4]] == [
            "n1 Custom: starts", "n1 Custom: ok, 1 calls", "n2 Format: starts", "n2 Format: ok, 0 calls"
        ]  # fmt: skip
        found = json.loads(record.read_text())
        assert (found["answer"], found["status"], found["errors"]) == ("42", "ok", [])
        assert [(call["operator"], call["usage"]["calls"]) for call in found["trace"]] == [("Custom", 1), ("Format", 0)]
    assert drawn.read_text().startswith("<svg")


def test_a_choice_has_the_options_that_its_problem_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    problem = ["--problem=What is 6 times 7?\nA. 41\nB. 42", "--kind=choice", "--workflow=Custom -> Format"]
    with endpoint(lambda body: chat("Answer: 42")) as server:
        program = tmp_path / "workflow.py"
        assert main([backends(tmp_path, server.url), *problem, f"--export={program}"]) == 0
        assert (capsys.readouterr().out, len(server.bodies)) == ("B\n", 1)
        for given, said in (([], "B\n"), (["And 7 times 6?\nA. 42\nB. 41"], "A\n"), (["And 7 times 6?"], "")):
            command = [sys.executable, str(program), *given]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (done.stdout, done.returncode) == (said, 0 if said else 1), done.stderr
    assert done.stderr.startswith("the problem lists no options: put each on a line") and len(server.bodies) == 3


def test_replies_are_printed_as_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    solved, judged = ("6 times", " 7\nis 4", "2.\nAnswer: 42"), ('{"passed": true,', ' "feedback": "It is."}')
    with endpoint(lambda body: streamed(*solved), lambda body: streamed(*judged)) as server:
        command = [backends(tmp_path, server.url), "--problem=What is 6 times 7?", "--kind=math", "--stream"]
        assert main([*command, "--workflow=Custom -> Review"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "42\n"
    assert [line.split(maxsplit=2)[2] for line in printed.err.splitlines()[:-1]] == [
        "n1 Custom: starts", "n1 Custom | 6 times 7", "n1 Custom | is 42.", "n1 Custom | Answer: 42",
        "n1 Custom: ok, 1 calls", "n2 Review: starts", 'n2 Review | {"passed": true, "feedback": "It is."}',
        "n2 Review: ok, 1 calls",
    ]  # fmt: skip
    assert printed.err.splitlines()[-1] == "ok: 2 calls, 28 tokens, 0 cost"


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with endpoint(lambda body: refusal(401)) as server:
        options = [backends(tmp_path, server.url), "--problem=?"]
        assert main([*options, "--workflow=Custm"]) == 2
        assert "Did you mean `Custom`?" in capsys.readouterr().err
        assert main([*options, "--workflow=absent.json"]) == 2
        assert "absent.json cannot be read" in capsys.readouterr().err
        assert main([*options, "--kind=choice", "--workflow=Custom"]) == 2
        assert "--problem lists no options" in capsys.readouterr().err
        binary = tmp_path / "binary.json"
        binary.write_bytes(b"\xff")
        assert main([*options, f"--workflow={binary}"]) == 2
        assert "binary.json cannot be read" in capsys.readouterr().err
        assert main([options[0], f"--problem=@{binary}", "--workflow=Custom"]) == 2
        assert "the file of --problem is no text" in capsys.readouterr().err
        assert main([*options, "--workflow=Custom"]) == 1
        told = capsys.readouterr()
        assert told.out == "" and told.err.startswith("executor_error: ") and "HTTP 401" in told.err


@pytest.mark.parametrize("flag", ["svg", "json", "save", "export"])
def test_what_cannot_be_written_is_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
):
    with endpoint(lambda body: chat("Answer: 42")) as server:
        command = [backends(tmp_path, server.url), "--problem=?", "--workflow=Custom"]
        assert main([*command, f"--{flag}={tmp_path / 'nowhere/file'}"]) == 2
        assert "nowhere/file: No such file or directory" in capsys.readouterr().err and server.bodies == []


def test_an_answer_is_printed_before_files_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run.json")

    with endpoint(lambda body: chat("Answer: 42")) as server:
        command = [backends(tmp_path, server.url), "--problem=?", "--workflow=Custom"]
        monkeypatch.setattr(Path, "write_text", full)
        assert main([*command, f"--json={tmp_path / 'run.json'}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "42\n" and "run.json: No space left on device" in printed.err


def test_a_recipe_that_leaves_the_executor_to_its_world_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from ml_collections import ConfigDict\n\n\ndef get_config():\n"
        "    return ConfigDict({'env': {'options': {'turns': 7}}})\n"
    )
    assert main([f"--backends={recipe}", "--problem=?", "--workflow=Custom"]) == 2
    assert "names no env.options.backends" in capsys.readouterr().err


def test_who_answers_is_the_first_or_the_one_that_the_config_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "backends.json"
    each = {name: {"kind": "offline", "rules": [{"answer": f"Answer: {name}"}]} for name in ("a", "b")}
    for config, answer in ((each, "a"), ({"backends": each, "default_backend": "b"}, "b")):
        file.write_text(json.dumps(config))
        assert main([f"--backends={file}", "--problem=?", "--workflow=Custom"]) == 0
        assert capsys.readouterr().out == f"{answer}\n"


def test_programs_are_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    weak = Isolation(RLIMITS_ONLY, sandbox.isolation().interpreter, False, "bubblewrap is not installed")
    monkeypatch.setattr(sandbox, "isolation", lambda: weak)
    with endpoint(lambda body: chat("Answer: 42")) as server:
        options = [backends(tmp_path, server.url), "--problem=?"]
        assert main([*options, "--workflow=Custom -> Programmer"]) == 1
        assert "apt-get install bubblewrap" in capsys.readouterr().err and server.bodies == []
        assert main([*options, "--workflow=Custom -> Programmer", "--allow-no-isolation"]) == 0
        assert main([*options, "--workflow=Custom"]) == 0
