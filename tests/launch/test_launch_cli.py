"""The command as a user runs it, up to where a run would start."""

import contextlib
import errno
import hashlib
import json
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from ml_collections import ConfigDict

from flowjax.config import ConfigError, load_run, save_run
from flowjax.launch.__main__ import LaunchRequest, _run, main, read_request
from flowjax.launch.devices import Devices, share_out
from flowjax.launch.machine import free_port, hold
from flowjax.launch.preflight import Findings, disk_bytes, examine
from flowjax.launch.session import RunConsole
from flowjax.monitor.metrics import MetricsWriter, write_status
from flowjax.monitor.provenance import read_starts, recorded_start
from flowjax.run import TAUGHT_FILE, Run, resolve, write_models


def launch(*argv, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowjax.launch", *map(str, argv)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_mistyped_field_is_one_line_and_status_two(recipe, tmp_path):
    spent_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = launch(f"--config={recipe}", "--config.trainer.learning_rate=3e-4", cwd=tmp_path)
    now_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert now_s.ru_utime + now_s.ru_stime - spent_s.ru_utime - spent_s.ru_stime < 5
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "config.trainer.learning_rate is not a field of this config: did you mean config.optimizer.learning_rate?\n"
    )
    assert not (tmp_path / "runs").exists()


def test_all_that_is_wrong_is_told_together_and_nothing_is_left_behind(recipe, tmp_path):
    done = launch(
        f"--config={recipe}",
        "--config.trainer.row_tokens=100",
        "--config.credit.name=grppo",
        "--config.loss.kind=pppo",
        "--config.reward.components={'sucess': 1.0}",
        "--config.mesh.data=3",
        "--config.engine.python=/no/such/python",
        "--config.model.nano=None",
        "--config.env.options={'rows': 6, 'colums': 6}",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    for field in (
        "config.trainer.row_tokens is 100",
        "config.credit.name is 'grppo' (did you mean 'grpo'?)",
        "config.loss.kind is 'pppo' (did you mean 'ppo'?)",
        "config.mesh is data=3",
        "config.engine.python is '/no/such/python'",
        "config.model.path is 'absent-model'",
        "config.env.options.colums is no option of Sokoban (did you mean 'columns'?)",
    ):
        assert sum(line.startswith(field) for line in lines) == 1, (field, done.stderr)
    assert any("sucess" in line for line in lines)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_dry_run_of_a_model_that_is_not_here_needs_no_accelerator(recipe, tmp_path):
    done = launch(
        f"--config={recipe}",
        "--config.model.nano=None",
        "--config.model.path=models/Qwen3-8B",
        "--config.engine.tensor_parallel=4",
        "--config.trainer.micro_batch_rows=4",
        "--dry_run",
        "--devices=8",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    plan = " ".join(done.stdout.split())
    assert "8,190,735,360 parameters" in plan  # the published count of Qwen3-8B
    assert "fsdp 4" in plan
    assert "accelerators 4,5,6,7" in plan
    assert "16 groups x 8 members = 128" in plan
    assert "base 3.8 GiB" in plan  # 8.19 G bfloat16 parameters over 4 devices
    for role in ("vllm.entrypoints", "flowjax.dataflow", "flowjax.trainer", "flowjax.rollout"):
        assert role in plan
    assert "not ready on this machine" in plan
    assert "'models/Qwen3-8B', which does not exist" in plan
    assert not (tmp_path / "runs").exists()


def test_mesh_that_does_not_divide_the_model_is_refused_in_the_plan(recipe, tmp_path):
    flags = ["--config.model.nano=None", "--config.model.path=models/Qwen3-8B", "--config.engine.tensor_parallel=2"]
    done = launch(f"--config={recipe}", *flags, "--dry_run", "--devices=8", cwd=tmp_path)
    assert done.returncode == 2
    plan = " ".join(done.stdout.split())
    assert "hidden_size is 4096, which does not divide over the 6 devices" in plan
    assert "config.trainer.micro_batch_rows is 8, but rows are split over 6 devices" in plan


def test_a_name_that_was_asked_for_must_be_free_and_one_from_the_recipe_is_numbered(recipe, tmp_path):
    (tmp_path / "runs" / "given" / "logs").mkdir(parents=True)
    done = launch(f"--config={recipe}:named", "--name=given", cwd=tmp_path)
    assert done.returncode == 2
    assert "runs/given exists already: go on with it by --resume=runs/given" in done.stderr
    done = launch(f"--config={recipe}:named", "--config.trainer.row_tokens=100", cwd=tmp_path)
    assert "starting runs/given-2" in done.stdout


def test_a_launch_that_died_before_it_kept_anything_leaves_its_name_free(recipe, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "given"
    with hold(folder):
        pass
    (folder / ".config.json.cut").touch()
    for name in ([], ["--name=given"]):
        assert read_request([f"--config={recipe}:named", *name]).run.folder == Path("runs/given")
    save_run(config, folder)
    assert read_request([f"--config={recipe}:named"]).run.folder == Path("runs/given-2")


@pytest.mark.parametrize("under_way", [False, True])
def test_of_two_launches_that_chose_one_name_the_second_changes_nothing(
    recipe, config, tmp_path, monkeypatch, capsys, under_way
):
    first = contextlib.ExitStack()

    def meanwhile(run: Run, devices: Devices, *, resume: bool) -> Findings:
        save_run(config, run.folder)
        if under_way:
            first.enter_context(hold(run.folder))
        return Findings()

    monkeypatch.setattr("flowjax.launch.__main__.examine", meanwhile)
    monkeypatch.chdir(tmp_path)
    with first:
        assert main([f"--config={recipe}:named", f"--config.seed={config.seed + 1}"]) == 2
    said = "a new run takes another --name" if under_way else "was made by another launch meanwhile"
    assert said in capsys.readouterr().err
    assert load_run(tmp_path / "runs" / "given").seed == config.seed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/models/a.json"),
            "/models/a.json: No such file",
        ),
        (TimeoutError(), "runs/given: TimeoutError"),
    ],
)
def test_what_ends_a_run_is_named_and_noted(recipe, tmp_path, monkeypatch, capsys, error, said):
    """It was always the run's folder that could not be written."""
    monkeypatch.setattr("flowjax.launch.__main__.examine", lambda *_, **__: Findings())
    monkeypatch.setattr("flowjax.launch.__main__._run", Mock(side_effect=error))
    monkeypatch.chdir(tmp_path)
    assert main([f"--config={recipe}:named"]) == 2
    assert capsys.readouterr().err.startswith(said)
    (start,) = read_starts(tmp_path / "runs" / "given")
    assert start["exit_status"] == 2 and start["ended_s"]


def test_a_folder_for_runs_that_cannot_be_made_is_a_line(recipe, monkeypatch, capsys):
    monkeypatch.setattr("flowjax.launch.__main__.examine", lambda *_, **__: Findings())
    assert main([f"--config={recipe}:named", f"--config.runs={'n' * 300}"]) == 2
    said = capsys.readouterr().err
    assert "File name too long" in said and said.count("\n") == 1


@pytest.mark.parametrize("flag", ["join", "name", "plan", "resume"])
def test_a_flag_without_its_value_starts_no_run(recipe, flag):
    with pytest.raises(ConfigError, match=f"--{flag} is empty"):
        read_request([f"--config={recipe}", f"--{flag}="])


def test_a_file_of_the_run_that_cannot_be_read_is_named(config, tmp_path, capsys):
    save_run(config, tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    assert main([f"--status={tmp_path}"]) == 2
    assert capsys.readouterr().err.rstrip().endswith(f"{tmp_path / 'metrics.jsonl'}: Is a directory")


def test_an_interrupt_before_anything_has_started_is_one_line(recipe, tmp_path, monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> Findings:
        raise KeyboardInterrupt

    monkeypatch.setattr("flowjax.launch.__main__.examine", interrupted)
    monkeypatch.chdir(tmp_path)
    assert main([f"--config={recipe}"]) == 130
    assert capsys.readouterr().err == "stopped\n"
    assert not (tmp_path / "runs").exists()


def test_resume_reads_the_saved_config_and_refuses_another_run(recipe, config, tmp_path):
    done = launch("--resume=runs/none", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("runs/none/config.json cannot be read")
    save_run(config, tmp_path / "runs" / "run")
    done = launch("--resume=runs/run", "--config.policy.lora.rank=8", cwd=tmp_path)
    assert done.returncode == 2
    assert "config.policy.lora.rank is 8, but this run was started with 32" in done.stderr
    done = launch("--resume=runs/run", "--config.trainer.steps=7", "--dry_run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 steps" in done.stdout
    assert load_run(tmp_path / "runs" / "run").trainer.steps == 100


def test_versions_to_evaluate_are_for_another_command(recipe, tmp_path):
    done = launch(f"--config={recipe}", "--config.eval.versions=(3,)", "--dry_run", cwd=tmp_path)
    assert done.returncode == 2
    assert "config.eval.versions is (3,), which is for an evaluation" in done.stderr


def test_a_resumed_run_says_that_ones_own_code_has_changed(config, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_reward.py").write_text("def late(outcome): return outcome['success']\n")
    monkeypatch.syspath_prepend(tmp_path)
    config.reward.components = {"late": {"path": "own_reward:late"}}
    save_run(config, run_dir := tmp_path / "run")
    with recorded_start([run_dir], []):
        (tmp_path / "own_reward.py").write_text("def late(outcome): return 2 * outcome['success']\n")
    for resume in (False, True):
        examine(resolve(config, run_dir), Devices(), resume=resume)
        said = capsys.readouterr().err
        assert ("own_reward.py, which the config names, has changed since the run's last start" in said) == resume


def test_unreadable_checkpoint_is_refused_before_anything_starts(config, tmp_path):
    run_dir = tmp_path / "runs" / "run"
    save_run(config, run_dir)
    step = run_dir / "checkpoints" / "agent" / "3"
    (step / "adapter").mkdir(parents=True)
    (step / "data").mkdir()
    (step / "commit_success.txt").write_text("")
    (step / "adapter" / "_METADATA").write_text("not JSON")
    found = examine(resolve(config, run_dir), Devices(), resume=True)
    (message,) = [text for text in found.problems if "checkpoint" in text]
    assert str(step / "adapter") in message
    assert "cannot be read" in message
    assert examine(resolve(config, run_dir), Devices()).problems == []


@pytest.mark.parametrize(("policies", "field"), [({}, "config"), ({"one": {"trainer": {}}}, "config.policies.one")])
def test_a_run_is_not_resumed_to_a_step_that_it_is_beyond(config, tmp_path, policies, field):
    config.trainer.steps, config.optimizer.warmup_steps, config.policies = 2, 0, policies
    run_dir = tmp_path / "runs" / "run"
    for step in ("2", "3"):
        folder = run_dir / "checkpoints" / next(iter(policies), "agent") / step
        (folder / "data").mkdir(parents=True)
        (folder / "commit_success.txt").write_text("")
    found = examine(resolve(config, run_dir), Devices(), resume=True)
    refusal = f"{field}.trainer.steps is 2, but the run is at step 3: give at least that"
    assert refusal in found.problems
    config.trainer.steps = 3
    found = examine(resolve(config, run_dir), Devices(), resume=True)
    assert not any("trainer.steps" in text for text in found.problems)


def test_a_policy_that_has_lost_its_checkpoints_is_not_trained_anew(config, tmp_path):
    config.policies = ConfigDict({"solver": {}, "verifier": {}, "novice": {}})
    config.agents = ConfigDict({name: name for name in config.policies})
    run = resolve(config, tmp_path / "run")
    metrics = MetricsWriter(run.folder)
    for policy in ("solver", "verifier"):
        metrics.write("train", step=1, policy=policy)
    (run.folder / "checkpoints" / "solver" / "1").mkdir(parents=True)

    def lost(*, resume: bool) -> list[str]:
        return [text for text in examine(run, Devices(), resume=resume).here if "has no checkpoint" in text]

    (message,) = lost(resume=True)
    assert message.startswith(f"{run.folder}/checkpoints/verifier has no checkpoint")
    assert lost(resume=False) == []


def test_a_nano_base_is_not_made_anew_under_what_was_trained_on_it(config, tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints" / "agent" / "3").mkdir(parents=True)
    assert not any("trained on it" in text for text in examine(resolve(config, run_dir), Devices(), resume=True).here)
    (run_dir / "checkpoints" / "agent" / "3" / "commit_success.txt").write_text("")
    (message,) = [
        text for text in examine(resolve(config, run_dir), Devices(), resume=True).here if "trained on it" in text
    ]
    assert message.startswith("config.model.path is 'absent-model', which is not there")


def test_another_nano_base_does_not_take_the_place_of_what_was_trained_on(config, tmp_path):
    config.model.path, noted = str(tmp_path / "nano"), {"skipped": 0, "base": hashlib.sha256(b"of one run").hexdigest()}
    (tmp_path / "nano").mkdir()
    taught = {**json.loads(config.warm_start.to_json()), "steps": 7}  # with the weights another warm start
    for name, text in {"config.json": "{}", "tokenizer.json": "{}", TAUGHT_FILE: json.dumps(taught)}.items():
        (tmp_path / "nano" / name).write_text(text)
    weights, run = tmp_path / "nano" / "model.safetensors", resolve(config, tmp_path / "run")
    data = run.folder / "checkpoints" / "agent" / "3" / "data"
    data.mkdir(parents=True)
    (data / "metadata").write_text(json.dumps(noted))

    def messages(*, resume: bool = True) -> list[str]:
        return [text for text in examine(run, Devices(), resume=resume).here if str(tmp_path / "nano") in text]

    weights.write_bytes(b"made anew by another, with its seed")
    otherwise, other = messages()
    assert other.startswith(
        f"config.model.path is {config.model.path!r}, where another base lies than the one that agent"
    )
    assert otherwise.endswith("give the run's own value, or bring back the base that it was trained on")
    weights.write_bytes(b"of one run")
    assert messages() == [otherwise]
    (anew,) = messages(resume=False)
    assert "remove the folder to have it made anew" in anew
    weights.write_bytes(b"made anew by another, with its seed")
    (data / "metadata").write_text("{}")  # of a run of before, which did not note it
    assert messages() == [otherwise]


def test_a_run_is_resumed_from_within_its_folder(config, tmp_path, monkeypatch):
    run_dir = tmp_path / "runs" / "run"
    save_run(config, run_dir)
    write_models(run_dir, {"base": {"path": "absent-model", "revision": "a", "folder": str(tmp_path)}})
    monkeypatch.chdir(run_dir)
    request = read_request(["--resume=."])
    assert (request.run.config.name, request.run.config.runs) == ("run", str(tmp_path / "runs"))
    assert request.run.bases["base"].model.path == str(tmp_path)


@pytest.mark.parametrize("asked", ["--name=other", "--config.name=other", "--config.runs=others"])
def test_a_resumed_run_keeps_its_folder(config, tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    save_run(config, Path("runs/run"))
    with pytest.raises(ConfigError, match=r"--resume=runs/run keeps that folder, but .* is asked for"):
        read_request(["--resume=runs/run", asked])
    read_request(["--resume=runs/run", "--name=run", f"--config.runs={tmp_path}/runs"])


def test_disk_estimate_counts_what_is_kept(config):
    saved = {"checkpoint_bytes": 30, "adapter_bytes": 10}
    plan = {"bases": {"base": {"model": {"policies": {"agent": saved}}}}}
    config.trainer.steps, config.trainer.keep_checkpoints, config.dataflow.max_staleness = 100, 3, 1
    assert disk_bytes(resolve(config), plan) == 4 * 30 + 3 * 10
    config.trainer.keep_every_steps = 50
    assert disk_bytes(resolve(config), plan) == 6 * 30 + 3 * 10
    saved["version_bytes"] = 1
    config.trainer.checkpoint_every = 10
    assert disk_bytes(resolve(config), plan) == 6 * 30 + 3 * 10 + 4, "the newest versions lie between two checkpoints"
    config.eval.versions = (7,)
    assert disk_bytes(resolve(config), plan) == 10, "an evaluation links one checkpoint, and hands engines an adapter"


def test_memory_is_planned_for_the_devices_that_the_trainer_gets(config, tmp_path):
    config.model.nano, config.model.path = None, "Qwen3-0.6B"
    found = examine(resolve(config, tmp_path / "run"), share_out(tuple("0123"), 2))
    assert found.plan["mesh"] == {"data": 1, "fsdp": 2, "tensor": 1}
    assert found.plan["bases"]["base"]["model"]["parameters"] == 596_049_920  # the published count of Qwen3-0.6B
    assert json.dumps(found.plan)


@pytest.mark.parametrize("module", ["flowjax.launch.__main__", "flowjax.launch.session", "flowjax.launch.preflight"])
def test_the_supervisor_imports_neither_jax_nor_vllm(module):
    code = f"import sys, {module}; print([m for m in ('jax', 'vllm', 'torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_sending_a_worker_away_takes_a_run_and_a_worker_of_another_machine(tmp_path, capsys):
    assert main(["--evict=far-1"]) == 2
    assert "--evict goes with --status=<run folder>" in capsys.readouterr().err
    assert main([f"--status={tmp_path}", "--evict=far-1"]) == 2
    assert "endpoints.json cannot be read" in capsys.readouterr().err
    write_status(tmp_path, "rollout", {"worker": "here-1"})
    (tmp_path / "endpoints.json").write_text("[]")
    assert main([f"--status={tmp_path}", "--evict=far-1"]) == 2
    assert "endpoints.json holds no addresses" in capsys.readouterr().err
    assert main(["--status", str(tmp_path), "--evict", "here-1"]) == 2
    assert "here-1 is the run's own rollout service" in capsys.readouterr().err


def test_nobody_is_sent_away_from_a_run_that_is_not_under_way(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("flowjax.launch.__main__._ANSWERS_S", 0.2)
    (tmp_path / "endpoints.json").write_text(json.dumps({"dataflow": f"http://127.0.0.1:{free_port()}", "engines": []}))
    assert main([f"--status={tmp_path}", "--evict=far-1"]) == 2
    assert "is not under way: nobody plays for it" in capsys.readouterr().err


def test_a_node_is_no_resumed_run(capsys):
    assert main(["--join=http://far:8400", "--resume=runs/here"]) == 2
    assert "--resume goes on with a run of this machine" in capsys.readouterr().err


@pytest.mark.parametrize("config", [["--config=a.py:b"], ["--config", "a.py:b"]])
def test_a_node_has_its_config_from_the_run(config, capsys):
    """Its fields were compared with those of a recipe, and the first that differed was refused."""
    assert main(["--join=http://far:8400", *config]) == 2
    said = "--config=a.py:b beside --join=http://far:8400: leave it out, the run gives the config; --config.<field>=..."
    assert capsys.readouterr().err.startswith(said)


def test_inviting_a_node_takes_a_run_that_others_reach(config, tmp_path, capsys):
    assert main(["--invite=berlin"]) == 2
    assert "--invite goes with --status=<run folder>" in capsys.readouterr().err
    assert main([f"--status={tmp_path / 'none'}", "--invite=berlin"]) == 2
    assert "none" in capsys.readouterr().err
    config.name, config.runs = "run", str(tmp_path)
    save_run(config, tmp_path / "run")
    assert main([f"--status={tmp_path / 'run'}", "--invite=berlin"]) == 2
    assert "config.dataflow.host of" in capsys.readouterr().err
    config.dataflow.host = "0.0.0.0"
    save_run(config, tmp_path / "run")
    for name in ("", "a/b", "..", "a:b", "x" * 65):
        assert main([f"--status={tmp_path / 'run'}", f"--invite={name}"]) == 2
        assert f"--invite={name}: give a name of" in capsys.readouterr().err
    assert main([f"--status={tmp_path / 'run'}", "--invite=berlin"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("FLOWJAX_TOKEN=berlin:") and not printed.err
    assert (tmp_path / "run" / "nodes" / "berlin").stat().st_mode & 0o077 == 0
    assert main([f"--status={tmp_path / 'run'}", "--evict=berlin"]) == 0
    assert "its key is void, and the run is not under way" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "relay", "wanted"),
    [("127.0.0.1", "", False), ("0.0.0.0", "", True), ("127.0.0.1", "nats://host:4222", True)],
)
def test_the_token_is_there_before_any_role_starts(config, tmp_path, monkeypatch, host, relay, wanted):
    """Trainer and rollout read it once: where the dataflow was slow to make it, they were refused and started anew."""
    config.dataflow.update({"host": host, "relay": relay})
    there = []

    async def run(self, *_, **__):
        there.append((tmp_path / "token").exists())
        return 1

    monkeypatch.setattr("flowjax.launch.__main__.RunSession.run", run)
    assert _run(LaunchRequest(resolve(config, tmp_path), False, False, Devices(())), RunConsole()) == 1
    assert there == [wanted]


def test_a_second_invitation_says_that_the_first_key_is_void(config, tmp_path, capsys):
    """Machines with the first key ended, and nobody had been told."""
    config.dataflow.host = "0.0.0.0"
    save_run(config, tmp_path)
    invite = [f"--status={tmp_path}", "--invite=berlin"]
    for command, said in (
        (invite, ""),
        (invite, "the earlier key of berlin is void: machines that use it end\n"),
        ([f"--status={tmp_path}", "--evict=berlin"], ""),
        (invite, ""),  # its key was void before
        ([f"--status={tmp_path}", "--invite=lima"], ""),
    ):
        assert main(command) == 0
        assert capsys.readouterr().err == said
