"""What is evaluated, in which folder, and what is made of its episodes."""

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from flowjax import evaluate
from flowjax.canvas.backends import Prices
from flowjax.config import ConfigError, default_config, save_run
from flowjax.evaluate import Evaluation, begin, leases_of, main, read_requests, rewards_of, write_results
from flowjax.launch.checks import check_config
from flowjax.launch.command_line import load_recipe
from flowjax.launch.machine import hold
from flowjax.models.decoder import Decoder
from flowjax.models.lora import ALL_TARGETS, Lora, LoraParam
from flowjax.models.nano import nano_config
from flowjax.monitor.held_out import HeldOutEpisode, markdown, rows, summarise
from flowjax.monitor.statistics import pass_at_k, task_interval
from flowjax.records import Episode
from flowjax.rollout.episode import EpisodeFile
from flowjax.run import write_models
from flowjax.weights.publish import CheckpointError, Checkpoints, commit_of, newest_first, read_adapter

RECIPE = """
from flowjax.config import default_config

def get_config(arg="one"):
    config = default_config()
    config.model.path = "base"
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    if arg != "one":
        config.policies = {"solver": {}, "verifier": {}}
        config.agents = {"first": "solver", "second": "verifier"}
    if arg == "bases":
        config.bases = {"large": {"model": {"path": "large"}}}
        config.policies.verifier.policy = {"base": "large"}
    return config
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of two policies; that of a run with one alone is made by `request`."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    for policy, last in (("solver", 2), ("verifier", 1)):
        with Checkpoints(tmp_path / "run" / "checkpoints" / policy, keep=5) as checkpoints:
            for step in range(last + 1):
                checkpoints.save(step, {"q_proj": {"a": jnp.ones((1, 8, 2)), "b": jnp.zeros((1, 2, 8))}}, {}, {})
            checkpoints.wait()
    return tmp_path / "run"


def request(run: Path, recipe: str, *named: str, more: Sequence[str] = ()) -> Evaluation:
    checkpoints = ",".join(str(run / "checkpoints" / name) for name in named)
    return only([f"--config={run.parent / 'recipe.py'}:{recipe}", f"--checkpoint={checkpoints}", *more])


def only(argv: Sequence[str]) -> Evaluation:
    [found] = read_requests(argv)
    [evaluation] = found.evaluations
    return evaluation


def test_one_checkpoint_is_that_of_the_only_policy(run):
    evaluation = request(run, "one", "solver/2")
    assert (evaluation.run.config.policy.name, evaluation.run.config.eval.versions) == ("solver", (2,))
    assert evaluation.run.folder == run / "evaluations" / "2" and evaluation.name == "solver@2"
    begin(evaluation)
    assert [path.name for path in (evaluation.run.folder / "checkpoints" / "solver").iterdir()] == ["2"]


def test_a_version_that_the_trainer_deletes_meanwhile_is_played_all_the_same(run):
    evaluation, late = request(run, "one", "solver/2"), request(run, "one", "solver/1")
    begin(evaluation)
    commits = [commit_of(folder / "checkpoints" / "solver", 2) for folder in (run, evaluation.run.folder)]
    assert commits[0] == commits[1]
    for step in "12":
        shutil.rmtree(run / "checkpoints" / "solver" / step)
    kept = evaluation.run.folder / "checkpoints" / "solver"
    assert next(newest_first(kept)) == 2
    np.testing.assert_array_equal(read_adapter(kept, 2)["q_proj"]["a"], np.ones((1, 8, 2)))
    assert sorted(path.name for path in (kept / "2").iterdir()) == ["adapter", "commit_success.txt"]
    with pytest.raises(CheckpointError, match=r"solver/1 has been deleted by its trainer, .*: take a newer one"):
        begin(late)
    assert not any(late.run.folder.glob("checkpoints/solver/*"))


def test_the_same_evaluation_goes_on_in_its_folder_and_another_one_gets_its_own(run):
    begin(request(run, "one", "solver/2"))
    assert request(run, "one", "solver/2").run.folder.name == "2"
    assert (
        request(run, "one", "solver/2", more=["--config.eval.samples=4", "--config.eval.tasks=9"]).run.folder.name
        == "2"
    )
    (run / "evaluations" / "2" / "results.json").write_text('{"unfinished": 0}')  # of all its tasks and samples
    few = request(run, "one", "solver/2", more=["--config.eval.samples=1", "--config.eval.tasks=9"])
    whole = request(run, "one", "solver/2").run.config.eval
    assert (few.run.folder.name, few.run.config.eval.tasks) == ("2", whole.tasks) and whole.tasks > 9
    mixed = ["--config.eval.samples=4", "--config.eval.tasks=9"]
    assert request(run, "one", "solver/2", more=mixed).run.folder.name == "2-2"
    greedy = request(run, "one", "solver/2", more=["--config.eval.temperature=0"])
    begin(greedy)
    assert greedy.run.folder.name == "2-2"
    for other in ("eval.seed=7", "engine.dtype=float16", "engine.quantize=int8"):  # other engines, other replies
        assert request(run, "one", "solver/2", more=[f"--config.{other}"]).run.folder.name == "2-3", other
    begin(request(run, "one", "solver/2", more=["--config.engine.quantize=int8"]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flowjax.evaluate.largest_code", lambda base: 127)  # a machine with GPUs goes on with a CPU's
        again = request(run, "one", "solver/2", more=["--config.engine.quantize=int8"])
    assert again.run.folder.name == "2-4"
    written = run / "checkpoints" / "solver" / "2" / "later"
    written.touch()  # other weights at the same place
    os.utime(written, (time.time() + 9, time.time() + 9))
    assert request(run, "one", "solver/2").run.folder.name == "2-4"


def test_code_and_files_of_ones_own_tell_evaluations_apart(run, tmp_path, monkeypatch):
    """With a mended grader, or another file behind an option, old episodes passed for new ones."""
    world, flow, said = (tmp_path / name for name in ("evaluated_world.py", "evaluated_flow.py", "said.json"))
    world.write_text("from flowjax.envs.sokoban import Sokoban\n\n\nclass Own(Sokoban):\n    pass\n")
    flow.write_text("async def play(): ...\n")
    said.write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    config = default_config()
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    assert evaluate._named_code(config) == []
    config.env.name, config.workflow = "evaluated_world:Own", "evaluated_flow:play"
    assert evaluate._named_code(config) == [flow, world]
    config.env.options = ConfigDict({"path": "", "descriptions": ("said", str(said)), "rows": 6, "said": 999 * "long "})
    assert evaluate._named_data(config) == [said]

    def folder() -> str:
        return request(run, "one", "solver/2").run.folder.name

    monkeypatch.setattr(evaluate, "_named_code", lambda config: [world])
    begin(request(run, "one", "solver/2"))
    assert folder() == "2"
    world.write_text(world.read_text().replace("pass", "OUTCOMES = ()"))
    assert folder() == "2-2"


def test_a_start_that_ended_before_anything_was_kept_leaves_its_folder_free(run, monkeypatch):
    out = run.parent / "out"
    out.mkdir()
    assert request(run, "one", "solver/2", more=[f"--out={out}"]).run.folder == out

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for step in ("save_run", "replace_file"):
        for evaluation in (request(run, "one", "solver/2"), request(run, "one", "solver/2", more=[f"--out={out}"])):
            with monkeypatch.context() as patched, hold(evaluation.run.folder):
                patched.setattr(f"flowjax.evaluate.{step}", full)
                with pytest.raises(OSError, match="No space left"):
                    begin(evaluation)
    (run / "evaluations" / "2" / ".config.json.123-456").touch()  # by a kill
    assert request(run, "one", "solver/2").run.folder.name == "2"
    assert request(run, "one", "solver/1", more=[f"--out={out}"]).run.folder == out
    (out / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds another evaluation, or something else"):
        request(run, "one", "solver/1", more=[f"--out={out}"])


@pytest.mark.parametrize("place", ["run/checkpoints/verifier/1", "large"])
def test_other_weights_of_any_policy_or_base_are_another_evaluation(run, monkeypatch, place):
    monkeypatch.chdir(run.parent)
    Path("large").mkdir()
    begin(request(run, "bases", "solver/2", "verifier/1"))
    assert request(run, "bases", "solver/2", "verifier/1").run.folder.name == "solver@2,verifier@1"
    later = Path(place) / "later"
    later.touch()
    os.utime(later, (time.time() + 9, time.time() + 9))
    assert request(run, "bases", "solver/2", "verifier/1").run.folder.name == "solver@2,verifier@1-2"


def test_other_tasks_in_the_same_file_are_another_evaluation(run):
    problems = run.parent / "problems"
    problems.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (problems / name).write_text('{"question": "1 + 1 = ?", "answer": "#### 2"}\n')
    recipe = run.parent / "math.py"
    recipe.write_text((run.parent / "recipe.py").read_text().replace("sokoban:Sokoban", "math:Math"))

    def folder() -> Path:
        argv = [f"--config={recipe}", f"--config.env.options.path={problems}", f"--out={run.parent / 'out'}"]
        evaluation = only([*argv, "--endpoint=http://127.0.0.1:9/v1", "--model_name=adder"])
        begin(evaluation)
        return evaluation.run.folder

    assert folder() == folder() == run.parent / "out"
    (problems / "test.jsonl").write_text('{"question": "2 + 3 = ?", "answer": "#### 5"}\n')
    later_s = time.time() + 9
    os.utime(problems / "test.jsonl", (later_s, later_s))
    with pytest.raises(ConfigError, match="holds another evaluation"):
        folder()


def test_the_base_model_plays_in_place_of_the_checkpoint_and_greedily_if_asked(run):
    evaluation = request(run, "one", "solver/2", more=["--base", "--config.eval.temperature=0"])
    config = evaluation.run.config
    assert config.agents.to_dict() == {"agent": "base"} and not evaluation.checkpoints
    assert (config.eval.temperature, evaluation.run.folder) == (0.0, run / "evaluations" / "base")
    assert not [problem for problem in check_config(config) if "agents" in problem or "temperature" in problem]
    more = ["--base", "--config.agents={'first': 'solver', 'second': 'verifier'}"]
    config = request(run, "bases", "solver/2", "verifier/1", more=more).run.config
    assert config.agents.to_dict() == {"first": "base", "second": "large"}


def test_a_program_of_one_s_own_reads_a_checkpoint_as_the_page_says(tmp_path):
    """One of the trainer's own state: by hand it was saved in another layout, and the page said that."""
    model = nano_config(40, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn_size=16)
    decoder = Decoder(model, lora=Lora(rank=2, alpha=4.0), dtype=jnp.float32, key=jax.random.key(0))
    trained = nnx.state(decoder, LoraParam)
    with Checkpoints(tmp_path / "checkpoints" / "agent") as checkpoints:
        checkpoints.save(60, trained, {}, {})
    page = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text()
    [program] = re.findall(r"```python\n(from pathlib.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(program.replace("runs/sokoban-nano/", f"{tmp_path}/"), found)
    assert found["adapter"].keys() == set(ALL_TARGETS)
    assert found["a"].shape == (2, 16, 2) and found["b"].shape[:2] == (2, 2)
    pure = nnx.to_pure_dict(trained)["adapter"]["q_proj"]
    np.testing.assert_array_equal(found["a"], pure["a"])
    np.testing.assert_array_equal(found["b"], pure["b"])


def test_a_checkpoint_that_speaks_for_no_agent_is_not_evaluated(run):
    """What the base had played was filed as the checkpoint's."""
    with pytest.raises(
        ConfigError, match=r"config.agents is .*, with no agent for solver, whose checkpoint is to play"
    ):
        request(run, "one", "solver/2", more=["--config.agents={'agent': 'base'}"])


def test_an_evaluation_is_named_after_the_policies_that_speak(run):
    """solver against the base was filed as the verifier's, too."""
    against = ["--config.agents={'first': 'solver', 'second': 'base'}"]
    evaluation = request(run, "two", "solver/2", "verifier/1", more=against)
    assert evaluation.name == evaluation.run.folder.name == "solver@2" and evaluation.run.config.eval.versions == (2,)
    assert {policy for lease in leases_of(evaluation) for policy in lease.versions} == {"solver"}


def test_an_evaluation_in_which_no_model_was_asked_has_no_results(run):
    """Levels whose prompts are too long were 0 % of success."""
    evaluation = request(run, "one", "solver/2", more=["--config.eval.tasks=3"])
    begin(evaluation)
    file = EpisodeFile(evaluation.run.folder / "episodes.msgpack")
    for lease in leases_of(evaluation):
        names = lease.episode_id, lease.group_id, lease.task.task_id, lease.seed
        file.add(Episode(*names, [], {"success": 0.0}, "truncated", "the prompt has 90 tokens"))
    with pytest.raises(
        ConfigError, match=r"no first prompt of 3 episodes fits config.rollout.max_prompt_tokens \(the pr"
    ):
        write_results(evaluation, Prices())


def test_the_base_model_is_rewarded_as_the_policy_whose_place_it_takes(run):
    (run.parent / "recipe.py").write_text(
        RECIPE.replace("return", "config.reward.components = {'success': 1.0}; return")
        .replace('{"solver": {}, "verifier": {}}', '{"solver": {"reward": {"components": {"turn_penalty": 0.5}}}}')
        .replace('{"first": "solver", "second": "verifier"}', '{"agent": "solver"}')
    )
    paid = {"turn_penalty": 0.5}  # in place of the run's components
    assert rewards_of(request(run, "own", "solver/2").run) == {"solver": paid}
    assert rewards_of(request(run, "own", "solver/2", more=["--base"]).run) == {"base": paid}
    assert rewards_of(request(run, "one", "solver/2", more=["--base"]).run) == {"base": {"success": 1.0}}


def test_policies_are_evaluated_together_each_at_its_own_version(run):
    evaluation = request(run, "two", "solver/2", "verifier/1")
    assert evaluation.run.config.eval.versions == (1, 2)
    assert evaluation.run.folder.name == evaluation.name == "solver@2,verifier@1"
    begin(evaluation)
    assert [path.name for path in (evaluation.run.folder / "checkpoints" / "verifier").iterdir()] == ["1"]


def saved(run: Path, recipe: str, **eval_fields) -> None:
    config = load_recipe(f"{run.parent / 'recipe.py'}:{recipe}")
    if recipe == "one":
        config.policy.name = "solver"
    config.eval.update(eval_fields)
    save_run(config, run)


def test_a_run_folder_says_all_itself(run):
    saved(run, "one", samples=3)
    evaluation = only([str(run)])
    assert (evaluation.name, evaluation.run.folder) == ("solver@2", run / "evaluations" / "2")
    assert (evaluation.run.config.eval.samples, evaluation.run.config.eval.seed) == (3, 0)
    [several] = read_requests([str(run), "--steps=2,0", "--config.eval.samples=1"])
    assert [each.name for each in several.evaluations] == ["solver@0", "solver@2"]
    assert len(read_requests([str(run), "--steps=all"])[0].evaluations) == 3
    assert only([str(run), "--base"]).run.folder.name == "base"
    assert len(read_requests([str(run), str(run)])) == 2
    begin(evaluation)
    larger = only([str(run), "--config.env.options.rows=9"])
    assert (larger.run.folder.name, larger.run.config.env.options.rows) == ("2-2", 9)


def test_an_evaluation_starts_the_engines_that_its_run_has_elsewhere(run):
    config = load_recipe(f"{run.parent / 'recipe.py'}:one")
    config.policy.name, config.reward.components, config.elsewhere = "solver", {"success": 1.0}, ("rollout",)
    save_run(config, run)
    assert [engine.name for engine in only([str(run)]).run.engines] == ["engine"]
    config.elsewhere, config.dataflow.url = ("dataflow", "trainer"), "http://far:1"  # a node's own folder
    save_run(config, run)
    assert not check_config(only([str(run)]).run.config)


def test_a_checkpoint_is_that_of_its_run_by_a_short_path(run, monkeypatch):
    saved(run, "one")
    write_models(run, {"base": {"path": "base", "revision": "a", "folder": str(run.parent)}})
    argv = [f"--config={run.parent / 'recipe.py'}:one", "--checkpoint=solver/2"]
    monkeypatch.chdir(run / "checkpoints")
    assert only(argv).run.folder == run / "evaluations" / "2"
    assert only(argv).run.bases["base"].model.path == str(run.parent)
    monkeypatch.chdir(run / "checkpoints" / "solver")
    assert only([argv[0], "--checkpoint=2"]).name == "solver@2"
    with pytest.raises(ConfigError, match=r"config\.env\.options is .* but the checkpoint was trained with"):
        read_requests([argv[0], "--checkpoint=2", "--config.env.options.rows=9"])


def test_checkpoints_of_several_runs_each_fit_their_own(run):
    other = run.parent / "other"
    shutil.copytree(run / "checkpoints", other / "checkpoints")
    config = load_recipe(f"{run.parent / 'recipe.py'}:two")
    save_run(config, run)
    config.policies.solver.policy = {"lora": {"rank": 3}}  # of a policy that is not asked for
    save_run(config, other)
    more = [f"--checkpoint={run}/checkpoints/solver/2,{other}/checkpoints/verifier/1"]
    argv = [f"--config={run.parent / 'recipe.py'}:two", *more]
    assert only(argv).run.folder == run / "evaluations" / "solver@2,verifier@1"
    config.env.options.rows = 9
    save_run(config, other)
    with pytest.raises(ConfigError, match=r"env\.options is .* but the checkpoint was trained with .*'rows': 9"):
        read_requests(argv)


def test_policies_without_a_step_in_common_are_named_with_theirs(run):
    saved(run, "two")
    shutil.rmtree(run / "checkpoints" / "verifier" / "0")
    assert [each.name for each in read_requests([str(run), "--steps=all"])[0].evaluations] == ["solver@1,verifier@1"]
    shutil.rmtree(run / "checkpoints" / "solver" / "1")
    for steps in ("all", "2"):
        with pytest.raises(
            ConfigError, match=r"no step in common \(solver has \[0, 2\]; verifier has \[1\]\): leave it out"
        ):
            read_requests([str(run), f"--steps={steps}"])
    assert only([str(run)]).name == "solver@2,verifier@1"


def test_a_nano_base_that_is_not_there_is_not_waited_for(run, capsys):
    config = load_recipe(f"{run.parent / 'recipe.py'}:one")
    config.policy.name, config.model.path, config.model.nano = "solver", str(run.parent / "gone"), {"layers": 2}
    save_run(config, run)
    assert main([str(run), "--base"]) == 2
    assert f"config.model.path is '{run.parent / 'gone'}', which is not there: start the run" in capsys.readouterr().err
    assert not (run / "evaluations").exists()


@pytest.mark.parametrize("more", [[], ["--base"]], ids=["checkpoint", "base"])
def test_a_nano_base_made_anew_does_not_play_for_the_one_that_was_trained_on(run, capsys, more):
    weights = run.parent / "nano" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"made anew by another, with its seed")
    (run / "checkpoints" / "solver" / "1" / "data" / "metadata").write_text('{"base": "0123"}')
    config = load_recipe(f"{run.parent / 'recipe.py'}:one")
    config.policy.name, config.model.path, config.model.nano = "solver", str(weights.parent), {"layers": 2}
    save_run(config, run)
    assert main([str(run), *more]) == 2
    assert "where another base lies than the one that solver was trained on: bring" in capsys.readouterr().err
    assert not (run / "evaluations").exists()


def test_an_option_that_the_world_lacks_is_named_as_the_config_has_it(run, capsys):
    saved(run, "one")
    assert main([str(run), "--config.env.options.max_move=3"]) == 2
    assert capsys.readouterr().err.startswith("config.env.options.max_move is no option of Sokoban")


def test_a_folder_of_weights_or_an_endpoint_needs_no_run(run, monkeypatch):
    recipe = f"--config={run.parent / 'recipe.py'}:one"
    evaluation = only([recipe, "--model=models/Qwen3-8B", "--config.name=sokoban"])
    assert evaluation.run.folder == Path("runs/evaluations/sokoban-Qwen3-8B")
    assert evaluation.run.config.model.path == "models/Qwen3-8B" and evaluation.run.agents == {"agent": "base"}
    monkeypatch.chdir(run)
    assert only([recipe, "--model=."]).name == "run"
    out = run.parent / "here"
    [found] = read_requests([recipe, "--endpoint=http://127.0.0.1:9/v1", "--model_name=a/b", f"--out={out}"])
    assert (found.evaluations[0].run.folder, found.evaluations[0].name) == (out, "a-b")
    assert found.endpoint["model"] == "a/b"


def test_a_checkpoint_belongs_to_its_base(run):
    save_run(request(run, "bases", "solver/2", "verifier/1").run.config, run)
    request(run, "bases", "solver/2", "verifier/1")
    with pytest.raises(ConfigError) as refused:
        request(run, "two", "solver/2", "verifier/1")
    lost, moved = str(refused.value).splitlines()
    assert lost.startswith("config.bases.large.model.path is None, but the checkpoint was trained with large")
    assert moved.startswith("config.policies.verifier.policy is") and "'base': 'large'" in moved


@pytest.mark.parametrize(
    ("recipe", "named", "message"),
    [
        ("two", ["solver/2"], "--checkpoint names solver, but the config has solver, verifier: give one checkpoint of"),
        ("one", ["solver/2", "verifier/1"], "--checkpoint names solver, verifier, but the config has agent"),
        ("one", ["solver/1", "solver/2"], "--checkpoint names solver twice: .* give its run folder and --steps=1,2"),
        (
            "two",
            ["solver/2", "verifier/2"],
            r"verifier/2 is not a committed checkpoint: .* has committed steps \[0, 1\]",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(run, recipe, named, message):
    with pytest.raises(ConfigError, match=message):
        request(run, recipe, *named)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config is missing: give a run folder, or --config with one of"),
        (["nowhere"], "nowhere/config.json cannot be read"),
        (["RUN", "--steps=7"], r"--steps=7: step 7 is not in .*checkpoints, which has \[0, 1, 2\]"),
        (["RUN", "--base", "--steps=1"], "--steps=1 is for checkpoints of a run folder"),
        (["RUN", "--checkpoint=a/b/1"], "--checkpoint=a/b/1 is given besides the run folder"),
        (["RUN", "--model=a", "--endpoint=b"], "--model and --endpoint are given"),
        (["RUN", "--model=a", "--base"], "--model and --base are given"),
        (["RUN", "--model_name=a"], "--model_name=a is for an endpoint"),
        (["RUN", "--price_prompt=-3"], "--price_prompt=-3.0 is no price: give what a million tokens cost, from 0 on"),
        (["RUN", "--price_prompt=nan"], "--price_prompt=nan is no price"),
        (["RUN", "--price_sampled=inf"], "--price_sampled=inf is no price"),
        (["RUN", "--price_prompt=much"], "price_prompt"),
        (["--base", "RUN"], "is not a flag: .*evaluation's run folders stand before them"),
        (["RECIPE"], "it is not said what is to be evaluated"),
        (["RECIPE", "--endpoint=http://a/v1"], "--model_name is missing"),
        (
            ["RECIPE", "--endpoint=http://a/v1", "--model_name=m", "--endpoint_body=3"],
            "--endpoint_body=3 is no JSON obj",
        ),
        (["RUN", "--config.eval.tasks=0"], "config.eval.tasks is 0"),
        (
            ["RUN", "--config.workflow=a:b"],
            "config.workflow is a:b, but the checkpoint was trained with",
        ),
        (["RUN", "--out=OUT"], "--out=.* holds another evaluation, or something else"),
        (["RUN", "--out=new", "--steps=all"], "--out=new is one folder, but there are 3 evaluations"),
        (["RUN", "RUN", "--out=new"], "--out=new is one folder, but there are 2 evaluations"),
        (["RUN", "RUN", "--base", "--out=new"], "--out=new is one folder, but there are 2 evaluations"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(run, argv, message):
    saved(run, "one")
    places = {"RUN": str(run), "RECIPE": f"--config={run.parent / 'recipe.py'}:one", "--out=OUT": f"--out={run.parent}"}
    with pytest.raises(ConfigError, match=message):
        read_requests([str(places.get(each, each)) for each in argv])


@pytest.mark.parametrize("model", ["gone", "nobody/gone"])
def test_a_model_that_cannot_be_had_is_named_by_the_flag_that_named_it(run, capsys, monkeypatch, model):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main([f"--config={run.parent / 'recipe.py'}:one", f"--model={model}"]) == 2
    said = capsys.readouterr().err
    assert f"--model is '{model}', which" in said and "config.model.path" not in said


def test_a_run_of_before_with_a_field_that_is_no_more_is_evaluated_as_ever(run):
    saved(run, "one")
    config = json.loads((run / "config.json").read_text())
    config["trainer"]["tensorboard"] = True
    (run / "config.json").write_text(json.dumps(config))
    assert only([str(run)]).name == "solver@2"


def test_a_run_is_the_same_by_a_relative_and_an_absolute_path(run, monkeypatch):
    saved(run, "one")
    monkeypatch.chdir(run.parent)
    begin(only([run.name, "--out=out"]))
    assert only([str(run), f"--out={run.parent / 'out'}"]).run.folder == run.parent / "out"
    record = run.parent / "out" / "evaluation.json"
    record.write_text(record.read_text().replace(f"{run.parent}/", ""))  # as it was written before
    assert only([run.name, "--out=out"]).name == "solver@2"
    write_models(run, {"base": {"path": "base", "revision": "a", "folder": str(run.parent)}})
    monkeypatch.chdir(run)
    assert only(["."]).run.bases["base"].model.path == str(run.parent)


def test_a_run_without_a_checkpoint_has_its_base_alone(run):
    saved(run, "one")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match="has no committed checkpoint: nothing can be evaluated yet but --base"):
        read_requests([str(run)])
    assert only([str(run), "--base"]).played["name"] == "base"


def played(task: str, won: bool, *, source: str = "", **outcome: float) -> HeldOutEpisode:
    return HeldOutEpisode(task, task, source, 0, "ok", float(won), 2, 8, outcome, {"agent": 3.0 * won})


def test_results_count_tasks_and_not_samples():
    """Two tasks of four samples each: one is solved by half of them, the other by all."""
    episodes = [played("x", index % 2 == 0) for index in range(4)] + [played("y", True) for _ in range(4)]
    results = summarise(episodes)
    assert (results["tasks"], results["episodes"]) == (2, 8)
    success = results["metrics"]["success"]
    assert success["mean"] == 0.75 and (success["low"], success["high"]) == pytest.approx(
        task_interval(np.array([0.5, 1.0]))[1:]
    )
    assert results["metrics"]["reward"]["mean"] == 3 * 0.75 and results["metrics"]["sampled_tokens"]["mean"] == 8
    at_2 = (pass_at_k(4, 2, 2) + 1.0) / 2
    assert {k: found["mean"] for k, found in results["pass_at"].items()} == pytest.approx({1: 0.75, 2: at_2, 4: 1.0})
    assert results["majority_at"] == {} and results["tokens"] == {"prompt": 0, "sampled": 64}


def test_pass_at_k_is_of_the_tasks_that_have_k_samples():
    """One sample of one task came to nothing, and pass@4 was gone; a task that was drawn twice is no second sample."""
    episodes = [played(task, index % 2 == 0) for task in "xyz" for index in range(4)]
    results = summarise(episodes[:-1])
    assert {k: found["tasks"] for k, found in results["pass_at"].items()} == {1: 3, 2: 3, 4: 2}
    assert dict(rows(results))["pass@4"].endswith("] of the 2 tasks with 4 samples or more")
    assert dict(rows(results))["pass@2"].endswith("]")
    assert summarise([played(task, True) for task in "xxyz"])["pass_at"] == {}


def test_a_count_that_is_the_same_in_every_episode_has_no_bounds_of_a_share():
    """Of a world with one turn the table said 'turns 1 [0.76, 1]'."""
    alike = [replace(played(task, True), turns=1, sampled_tokens=0) for task in "abcd"]
    metrics = summarise(alike)["metrics"]
    assert metrics["turns"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert metrics["sampled_tokens"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert metrics["success"]["low"] == pytest.approx(0.510, abs=0.001)


@pytest.mark.parametrize(("rewards", "share"), [({"a": 1.0}, True), ({"a": 0.5, "b": 0.0}, False), ({"a": 0.7}, False)])
def test_a_reward_has_bounds_of_a_share_where_it_is_all_or_nothing(rewards: dict[str, float], share: bool):
    """A quarter in every task, the mean of two policies, was said to be 0.25 [0.0456, 0.699]."""
    found = summarise([replace(played(task, True, attempts=1.0), rewards=rewards) for task in "abcd"])["metrics"]
    assert (found["reward"]["low"] < found["reward"]["high"]) is share
    assert found["attempts"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert found["success"]["low"] == pytest.approx(0.510, abs=0.001)


def test_each_source_has_its_success_and_an_outcome_that_some_lack_is_left_out():
    episodes = [played("x", True, source="small", score=1.0), played("y", False, source="large")]
    results = summarise(episodes)
    assert {name: found["mean"] for name, found in results["sources"].items()} == {"large": 0.0, "small": 1.0}
    assert "score" not in results["metrics"] and results["pass_at"] == {}


def test_the_majority_of_a_task_and_the_success_of_each_kind():
    """Of four samples of x two say 1, which is right, one says 2 and one nothing; y is of another kind, and wrong."""
    said = [("1", True), ("1", True), ("2", False), ("", False)]
    episodes = [replace(played("x", won), answer=answer, kind="sum") for answer, won in said]
    episodes += [replace(played("y", False), answer="3", kind="product") for _ in range(4)]
    results = summarise(episodes)
    # Pairs of x: 11 right; 12 twice over, a tie; 1 with nothing twice, right; 2 with nothing, wrong.
    at_2 = (1 + 2 * 0.5 + 2 * 1 + 0) / 6
    assert [results["majority_at"][k]["mean"] for k in (1, 2, 4)] == pytest.approx([0.25, at_2 / 2, 0.5])
    assert {kind: found["mean"] for kind, found in results["kinds"].items()} == {"product": 0.0, "sum": 0.5}
    page = markdown({**results, "unfinished": 1, "cost": 0.25, "played": {"name": "agent@2", "seed": 0}})
    assert (
        page.startswith("# agent@2\n\n- seed: 0\n")
        and "| maj@4 | 50.0 % [" in page
        and "| cost in all | 0.25 |" in page
    )
    cut = summarise([replace(played("x", False), status="truncated"), played("y", True)])
    assert "; 1 ended at a prompt over config.rollout.max_prompt_tokens" in dict(rows(cut))["held-out success"]
    fewer = {**results, "asked": 9, "played": {"samples": 4}}
    assert dict(rows(fewer))["held-out success"].endswith("; 9 tasks were asked for, and these are all there are")
    assert "all there are" not in markdown({**fewer, "asked": 2})
    assert (
        "2 tasks, 8 episodes (1 came to nothing and are left out)"
        in dict(rows({**results, "unfinished": 1}))["held-out success"]
    )
