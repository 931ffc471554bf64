"""What is evaluated: one checkpoint, or one of each of several policies."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from flowjax.config import ConfigError, save_run
from flowjax.evaluate import prepare, read_request, summarise
from flowjax.launch.checks import check_config
from flowjax.monitor.held_out import HeldOutEpisode
from flowjax.monitor.statistics import pass_at_k, task_interval
from flowjax.weights.publish import Checkpoints

RECIPE = """
from flowjax.config import default_config

def get_config(arg="one"):
    config = default_config()
    config.model.path = "base"
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    if arg != "one":
        config.policies = {"solver": {}, "verifier": {}}
    if arg == "bases":
        config.bases = {"large": {"model": {"path": "large"}}}
        config.policies.verifier.policy = {"base": "large"}
    return config
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.py").write_text(RECIPE)
    for policy, last in (("solver", 2), ("verifier", 1)):
        with Checkpoints(tmp_path / "run" / "checkpoints" / policy, keep=5) as checkpoints:
            for step in range(last + 1):
                checkpoints.save(step, {"q_proj": {"a": jnp.ones((1, 8, 2)), "b": jnp.zeros((1, 2, 8))}}, {}, {})
            checkpoints.wait()
    return tmp_path / "run"


def request(run: Path, recipe: str, *named: str):
    checkpoints = ",".join(str(run / "checkpoints" / name) for name in named)
    return read_request([f"--config={run.parent / 'recipe.py'}:{recipe}", f"--checkpoint={checkpoints}"])


def test_one_checkpoint_is_that_of_the_only_policy(run):
    config, checkpoints = request(run, "one", "solver/2")
    assert (config.policy.name, config.eval.versions) == ("solver", (2,))
    folder = prepare(config, checkpoints).folder
    assert folder == run / "evaluations" / "2"
    assert [path.name for path in (folder / "checkpoints" / "solver").iterdir()] == ["2"]
    assert prepare(config, checkpoints).folder.name == "2-2"


def test_the_base_model_plays_in_place_of_the_checkpoint_and_greedily_if_asked(run):
    where = [f"--config={run.parent / 'recipe.py'}:one", f"--checkpoint={run / 'checkpoints' / 'solver' / '2'}"]
    config, checkpoints = read_request([*where, "--base", "--config.eval.temperature=0"])
    assert config.agents.to_dict() == {"agent": "base"}
    assert (config.eval.temperature, config.eval.versions) == (0.0, (2,))
    assert not [problem for problem in check_config(config) if "agents" in problem or "temperature" in problem]
    assert [prepare(config, checkpoints).folder.name for _ in range(2)] == ["base", "base-2"]
    named = ",".join(str(run / "checkpoints" / name) for name in ("solver/2", "verifier/1"))
    bases = [f"--config={run.parent / 'recipe.py'}:bases", f"--checkpoint={named}", "--base"]
    config, _ = read_request([*bases, "--config.agents={'first': 'solver', 'second': 'verifier'}"])
    assert config.agents.to_dict() == {"first": "base", "second": "large"}


def test_policies_are_evaluated_together_each_at_its_own_version(run):
    config, checkpoints = request(run, "two", "solver/2", "verifier/1")
    assert config.eval.versions == (1, 2)
    folder = prepare(config, checkpoints).folder
    assert folder.name == "solver@2,verifier@1"
    assert (folder / "checkpoints" / "verifier" / "1").resolve() == run / "checkpoints" / "verifier" / "1"


def test_a_checkpoint_belongs_to_its_base(run):
    config, _ = request(run, "bases", "solver/2", "verifier/1")
    save_run(config, run)
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
        (
            "two",
            ["solver/2", "verifier/2"],
            r"verifier/2 is not a committed checkpoint: .* has committed steps \[0, 1\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(run, recipe, named, message):
    with pytest.raises(ConfigError, match=message):
        request(run, recipe, *named)


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
    assert results["pass_at"] == pytest.approx({1: 0.75, 2: at_2, 4: 1.0})


def test_each_source_has_its_success_and_an_outcome_that_some_lack_is_left_out():
    episodes = [played("x", True, source="small", score=1.0), played("y", False, source="large")]
    results = summarise(episodes)
    assert {name: found["mean"] for name, found in results["sources"].items()} == {"large": 0.0, "small": 1.0}
    assert "score" not in results["metrics"] and results["pass_at"] == {}
