"""What a sweep does with its runs, on a launcher that starts no engines: begun, resumed, refused, stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowjax.sweep import main
from tests.test_sweep import GOOD, RECIPE, sweep_of

ROOT = Path(__file__).parent.parent
LAUNCHER = '''
"""A launcher that notes how it was called, and finishes, fails or takes its time as a file says."""
import json, os, sys, time
from pathlib import Path
from flowjax.config import save_run
from flowjax.launch.command_line import parse
from flowjax.config import load_run

argv = sys.argv[1:]
with open("called.txt", "a") as file:
    file.write(json.dumps(argv) + "\\n")
if argv[0].startswith("--resume="):
    folder = Path(argv[0].partition("=")[2])
    config, _ = parse(argv[1:], fallback=lambda _: load_run(folder))
else:
    config, _ = parse(argv)
    folder = Path(config.runs) / config.name
    save_run(config, folder)
how = json.loads(Path("how.json").read_text()).get(folder.name, "")
if how == "fails":
    sys.exit(3)
if how == "refused":
    sys.exit(2)
if how == "evaluates nothing":
    sys.exit(0)
if how == "sleeps":
    (folder / "asleep").touch()
    time.sleep(60)
(folder / "held_out").mkdir(exist_ok=True)
line = {"task_id": "t", "source": "", "seed": 0, "status": "ok", "success": 1.0, "turns": 1, "sampled_tokens": 1,
        "outcome": {}, "rewards": {}}
text = "".join(json.dumps({"task": f"t{i}", **line}) + "\\n" for i in range(4))
(folder / "held_out" / f"agent@{config.trainer.steps}.jsonl").write_text(text)
'''


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of `flowjax.launch`: what a sweep starts, without engines."""
    folder = tmp_path
    monkeypatch.chdir(folder)
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "if sys.orig_argv[1:3] == ['-m', 'flowjax.launch']:\n"
        "    import os, runpy, pathlib\n"
        "    sys.argv = sys.orig_argv[2:]\n"
        "    try:\n"
        "        runpy.run_path(str(pathlib.Path(__file__).with_name('launcher.py')), run_name='__main__')\n"
        "    except SystemExit as error:\n"
        "        os._exit(error.code)\n"
        "    os._exit(0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    (folder / "how.json").write_text("{}")
    monkeypatch.setattr("flowjax.sweep._examined", lambda sweep, dry_run: {})
    return folder


def called(folder: Path) -> list[list[str]]:
    path = folder / "called.txt"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_is_finished_is_not_run_again_and_what_is_broken_is_resumed(launcher, capsys):
    (launcher / "how.json").write_text(json.dumps({"slow-0": "fails"}))
    sweep_of(GOOD)
    assert main(["sweep.py"]) == 1
    assert "slow-0: exit status 3, see runs/sweep/logs/slow-0.log" in (out := capsys.readouterr().out)
    assert "Not finished, and left out: slow-0." in out and len(called(launcher)) == 6
    (launcher / "how.json").write_text("{}")
    assert main(["sweep.py"]) == 0
    assert called(launcher)[6:] == [["--resume=runs/sweep/slow-0"]]
    assert "A and B have the same success on every task" in Path("runs/sweep/sweep.md").read_text()
    assert Path("runs/sweep/sweep.svg").read_text().startswith("<svg")
    assert main(["sweep.py"]) == 0 and len(called(launcher)) == 7


def test_runs_go_on_with_the_steps_that_the_file_has_by_then(launcher, capsys):
    sweep_of(GOOD)
    assert main(["sweep.py"]) == 0
    sweep_of(GOOD.replace('"trainer.steps": 3', '"trainer.steps": 9'))
    assert main(["sweep.py"]) == 0, capsys.readouterr().out
    assert called(launcher)[6:] == [[f"--resume=runs/sweep/slow-{seed}", "--config.trainer.steps=9"] for seed in (0, 1)]
    assert "Not finished" not in Path("runs/sweep/sweep.md").read_text()


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(launcher, capsys):
    Path("taken").touch()
    sweep_of(GOOD.replace("helper", "RUNS = 'taken'\nhelper"))
    assert main(["sweep.py"]) == 2 and not called(launcher)
    said = "sweep folder taken/sweep: Not a directory: see that this user may write there, or give another RUNS"
    assert said in capsys.readouterr().err


def test_a_table_stays_where_a_run_is_refused_and_none_has_finished_since(launcher, capsys):
    sweep_of(GOOD)
    assert main(["sweep.py"]) == 0
    table = Path("runs/sweep/sweep.md")
    kept = table.read_text(), table.with_suffix(".svg").read_text()
    sweep_of(GOOD.replace('"trainer.steps": 3', '"trainer.steps": 9'))
    (launcher / "how.json").write_text(json.dumps({"slow-0": "refused", "slow-1": "refused"}))
    assert main(["sweep.py"]) == 1
    assert (table.read_text(), table.with_suffix(".svg").read_text()) == kept
    assert "runs/sweep/sweep.md stays as it was: a run was refused" in capsys.readouterr().out
    (launcher / "how.json").write_text(json.dumps({"slow-0": "refused"}))
    assert main(["sweep.py"]) == 1
    assert "Not finished, and left out: slow-0." in table.read_text()


def test_a_run_that_ends_without_its_evaluation_has_failed(launcher, capsys):
    sweep_of(GOOD.replace("(0, 1)", "(0,)"))
    how = dict.fromkeys(("grpo-0", "slow-0", "gigpo-0"), "evaluates nothing")
    (launcher / "how.json").write_text(json.dumps(how))
    assert main(["sweep.py"]) == 1
    out = capsys.readouterr().out
    assert "slow-0: ended without agent@3.jsonl in runs/sweep/slow-0/held_out, see runs/sweep/logs/slow-0.log" in out
    assert "Not finished, and left out: grpo-0, slow-0, gigpo-0." in out


def test_a_sweep_that_is_killed_takes_its_runs_along_and_goes_on(launcher):
    sweep_of(GOOD.replace("helper", "AT_ONCE = 2\nhelper"))
    (launcher / "how.json").write_text(json.dumps({"grpo-0": "sleeps", "grpo-1": "sleeps"}))
    code = "import sys, flowjax.sweep as s; s._examined = lambda sweep, dry_run: {}; sys.exit(s.main(['sweep.py']))"
    sweep = subprocess.Popen([sys.executable, "-c", code], cwd=launcher)
    asleep = [launcher / "runs/sweep" / name / "asleep" for name in ("grpo-0", "grpo-1")]
    until = time.monotonic() + 60
    while not all(path.exists() for path in asleep) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(called(launcher)) == 2, "so many at a time"
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    (launcher / "how.json").write_text("{}")
    assert main(["sweep.py"]) == 0
    assert sorted(call[0] for call in called(launcher)[2:4]) == [f"--resume=runs/sweep/grpo-{seed}" for seed in (0, 1)]


def test_a_sweep_that_is_interrupted_stops_its_runs_in_order(launcher):
    sweep_of(GOOD)
    (launcher / "how.json").write_text(json.dumps({"grpo-0": "sleeps"}))
    code = "import sys, flowjax.sweep as s; s._examined = lambda sweep, dry_run: {}; sys.exit(s.main(['sweep.py']))"
    sweep = subprocess.Popen([sys.executable, "-c", code], cwd=launcher, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (launcher / "runs/sweep/grpo-0/asleep").exists() and time.monotonic() < until:
        time.sleep(0.1)
    sweep.send_signal(signal.SIGTERM)
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 128 + signal.SIGTERM and "stopped; the same command goes on from here" in out
    assert len(called(launcher)) == 1
