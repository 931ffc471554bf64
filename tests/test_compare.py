"""Two sides are compared on the tasks that both have played, and a mistake is one line."""

import gzip
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from flowjax.compare import compare, compare_variants, evaluations_named, read_scores
from flowjax.config import ConfigError, default_config, load_run, save_run
from flowjax.envs.demonstrations import no_shares_of
from flowjax.evaluate import read_requests
from flowjax.monitor.held_out import NO_SHARES, HeldOutEpisode, read_held_out, summarise, write_held_out
from flowjax.monitor.token import make_run_id

ROOT = Path(__file__).parent.parent
SOKOBAN = "flowjax.envs.sokoban:Sokoban"


def evaluation(folder: Path, successes: dict[str, list[bool]], name: str = "agent@40") -> Path:
    """An evaluation's file in a run folder, with these successes of each task's samples."""
    folder.mkdir(exist_ok=True)
    episodes = [
        HeldOutEpisode(task, task, "", 0, "ok", float(won), 3, 6, {"score": 0.5}, {"agent": 2.0 * won})
        for task, samples in successes.items()
        for won in samples
    ]
    write_held_out(folder, name, episodes)
    return folder


def played(share: float, rng: np.random.Generator, tasks: int = 200) -> dict[str, list[bool]]:
    return {f"{index:04d}": [bool(rng.random() < share)] for index in range(tasks)}


def printed(*sides: list[Path], metric: str = "success") -> str:
    console = Console(width=140, file=(text := io.StringIO()))
    compare(sides[0], sides[1], metric, console)
    return text.getvalue()


def test_a_better_policy_is_called_better_and_nothing_is_said_of_its_method(tmp_path: Path):
    rng = np.random.default_rng(0)
    first = evaluation(tmp_path / "a", played(0.8, rng))
    second = evaluation(tmp_path / "b", played(0.5, rng))
    text = printed([first], [second])
    assert "A's success is higher than B's by 0." in text and "between these two policies" in text
    assert "that takes several seeds of each" in text
    assert "A's success is lower than B's" in printed([second], [first])


def test_what_a_world_or_workflow_counts_has_no_interval_of_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One calculation in every task was said to be 1 [0.76, 1]."""
    config = default_config()
    config.env.name = "flowjax.envs.math:Math"
    save_run(config, tmp_path / "run")
    outcome = {"calculations": 1.0, "answered": 1.0}
    rewards = {"solver": 0.5, "verifier": 0.0}
    episodes = [HeldOutEpisode(task, task, "", 0, "ok", 1.0, 3, 6, outcome, rewards) for task in "abcdefgh"]
    write_held_out(tmp_path / "run", "agent@40", episodes)
    assert printed([tmp_path / "run"], [tmp_path / "run"], metric="calculations").count("[1.000, 1.000]") == 2
    assert printed([tmp_path / "run"], [tmp_path / "run"], metric="answered").count("[0.676, 1.000]") == 2
    assert printed([tmp_path / "run"], [tmp_path / "run"], metric="reward").count("[0.250, 0.250]") == 2
    metrics = summarise(episodes, no_shares_of(tmp_path / "run"))["metrics"]
    assert metrics["calculations"]["low"] == metrics["turns"]["high"] / 3 == 1.0 > metrics["answered"]["low"]
    assert no_shares_of(tmp_path / "no run") == set(NO_SHARES)
    (tmp_path / "counting_flow.py").write_text('EPISODE_OUTCOMES = ("tool_calls",)\nCOUNTS = ("tool_calls",)\n')
    monkeypatch.syspath_prepend(tmp_path)
    config.workflow = "counting_flow:play"
    save_run(config, tmp_path / "run")
    assert {"tool_calls", "calculations"} < no_shares_of(tmp_path / "run")


def test_rewards_of_different_policies_are_not_compared(tmp_path: Path):
    """The mean over solver and verifier was called higher than that of the solver alone."""

    def run(name: str, *rewarded: dict[str, float]) -> list[Path]:
        episodes = [
            HeldOutEpisode(f"{index}", "", "", 0, "ok", 1.0, 3, 6, {}, rewards)
            for index, rewards in enumerate(rewarded)
        ]
        (tmp_path / name).mkdir()
        write_held_out(tmp_path / name, "a@4", episodes)
        return [tmp_path / name]

    both, one, base = {"solver": 0.0, "verifier": 1.0}, {"solver": 0.0}, {"base": 1.0}
    pair, again, solver = run("pair", both, both), run("again", both, one), run("solver", one, one)
    of_base = run("base", base, base)
    for sides in ((pair, solver), (pair, of_base), (pair + solver, pair + again)):
        with pytest.raises(ConfigError, match=r"^--metric is 'reward', the mean .*, but solver, verifier in .*: use"):
            compare(*sides, "reward", Console())
        assert "success on 2 shared tasks" in printed(*sides)
    # An agent need not speak in every episode; and a base model that plays alone is rewarded as its policy.
    assert printed(pair, again, metric="reward") and printed(solver, of_base, metric="reward")


def test_rewards_by_other_functions_are_not_compared(tmp_path: Path):
    """The same play, one side with a penalty for turns, was called better by 1.0."""
    runs = []
    for name, components in {"plain": {"success": 1.0}, "paid": {"success": 1.0, "turn_penalty": 0.5}}.items():
        config = default_config()
        config.env.name, config.reward.components = "flowjax.envs.math:Math", components
        save_run(config, tmp_path / name)
        episodes = [HeldOutEpisode(f"{index}", "", "", 0, "ok", 1.0, 3, 6, {}, {"agent": 1.0}) for index in range(2)]
        write_held_out(tmp_path / name, "agent@4", episodes)
        runs.append(tmp_path / name)
    with pytest.raises(ConfigError, match=r"reward.components is .*turn_penalty.* in .*paid.*, but .* in .*plain"):
        compare(runs[:1], runs[1:], "reward", Console())
    assert "success on 2 shared tasks" in printed(runs[:1], runs[1:])
    # A policy of two, whose other one spoke in no episode, is rewarded as one that was alone.
    pair = load_run(runs[1])
    with pair.unlocked():
        pair.policies = {"agent": {"reward": {"components": {"success": 1.0}}}, "judge": {}}
    save_run(pair, runs[1])
    assert printed(runs[:1], runs[1:], metric="reward")


def test_brackets_in_names_are_no_markup(tmp_path: Path):
    run = evaluation(tmp_path / "exp[lr=2]-a", {"x": [True], "y": [False]})
    assert f"A is {run}/held_out" in printed([run], [run])


def test_what_was_sampled_in_another_way_is_said(tmp_path: Path):
    grown = {"env.context": "append", "rollout.max_prompt_tokens": 64, "env.options": {"topk": 5}}
    changed = {"a": {}, "a2": {}, "short": {"env.max_turns": 4}, "greedy": {"eval.temperature": 0.0}, "grown": grown}
    for name, changes in changed.items():
        evaluation(tmp_path / name, {"x": [True], "y": [False]})
        config = default_config()
        config.update_from_flattened_dict(changes)
        save_run(config, tmp_path / name)
    a, a2, short, greedy, other = (tmp_path / name for name in changed)
    assert "may come from" not in printed([a], [a2])
    assert "config.eval.temperature is 0.0 in A and 1.0 in B: part of" in printed([greedy], [a])
    several = printed([a, greedy], [a2, short])
    assert "config.eval.temperature is 0.0, 1.0 in A and 1.0 in B: part of" in several
    assert "config.env.max_turns is 15 in A and 15, 4 in B" in several
    text = printed([a], [other])
    for said in ("context is 'window' in A and 'append' in B", "max_prompt_tokens is 1024 in A and 64 in B"):
        assert said in text
    assert "config.env.options.topk is left out in A and 5 in B: part of" in text
    (a2 / "config.json").write_text("{")
    text = printed([a], [a2])
    assert f"{a2}: its settings of play are not known, and may differ ({a2 / 'config.json'} cannot be read" in text
    config = default_config()
    config.policies = {"x": {"renamed": 1}}  # a field that there was when the run was made
    save_run(config, a2)
    text = printed([a], [a2])
    assert "its settings of play are not known, and may differ (config.policies.x.renamed is set" in text
    assert "config.json" not in text


def test_every_setting_of_play_that_differs_is_said(tmp_path: Path):
    def run(name: str, changes: dict[str, Any]) -> Path:
        evaluation(tmp_path / name, {"x": [True], "y": [False]})
        config = default_config()
        config.update_from_flattened_dict({"env.name": "flowjax.envs.search:Search", **changes})
        save_run(config, tmp_path / name)
        return tmp_path / name

    plain = run("plain", {})
    for number, (field, value, said) in enumerate((
        ("workflow", "flowjax.workflows.plan_solve:play", "config.workflow is 'flowjax.workflows.single:play' in A"),
        ("env.sources", {"a": {"options": {"topk": 1}}}, "config.env.sources.a.options.topk is 3 in A and 1 in B"),
        ("rollout.stop", ("\n",), "config.rollout.stop is () in A"),
        ("rollout.structured_outputs", True, "config.rollout.structured_outputs is False in A and True in B"),
        ("rollout.max_episode_turns", 2, "config.rollout.max_episode_turns is 0 in A and 2 in B"),
        ("model.template_options", {"thinking": False}, "config.model.template_options is {} in A"),
        ("engine.quantize", "int8", "config.engine.quantize is '' in A and 'int8' in B"),
        ("engine.dtype", "float32", "config.engine.dtype is 'bfloat16' in A and 'float32' in B"),
    )):  # fmt: skip
        text = printed([plain], [run(f"changed{number}", {field: value})])
        assert said in text and text.count("may come from that") == 1
    for field, same in (("env.options", {"topk": 3}), ("env.sources", {"a": {"options": {"topk": 3}}})):
        assert "may come from that" not in printed([plain], [run(field, {field: same})])  # 3 is the world's default
    first, second = (run(end, {"env.options": {"retriever": f"http://{'a' * 200}{end}"}}) for end in "vw")
    assert "config.env.options.retriever is" in printed([first], [second])


def test_other_base_models_and_what_else_speaks_for_agents_are_said(tmp_path: Path):
    def run(name: str, changes: dict[str, Any]) -> Path:
        evaluation(tmp_path / name, {"x": [True], "y": [False]})
        config = default_config()
        config.bases = {"small": {"model": {"path": "models/small"}}}
        config.agents = {"first": "agent", "second": "small", "third": "base"}
        config.update_from_flattened_dict({"model.path": "models/large", **changes})
        save_run(config, tmp_path / name)
        return tmp_path / name

    plain, small = run("plain", {}), {"path": "models/small"}
    for number, (changes, said) in enumerate((
        ({"bases": {"small": {"model": small, "engine": {"quantize": "int8"}}}},
         "config.bases.small.engine.quantize is '' in A and 'int8' in B"),
        ({"bases": {"small": {"model": {**small, "template_options": {"thinking": False}}}}},
         "config.bases.small.model.template_options is {} in A"),
        ({"bases": {"small": {"model": {"path": "models/other"}}}},
         "config.agents.second is 'models/small' in A and 'models/other' in B"),
        ({"agents": {"first": "agent", "second": "base", "third": "base"}},
         "config.agents.second is 'models/small' in A and 'models/large' in B"),
        ({"agents": {"first": "agent", "second": "small", "third": "agent"}},
         "config.agents.third is 'models/large' in A and 'agent' in B"),
        ({"agents": {"first": "agent", "second": "small"}},
         "config.agents.third is 'models/large' in A and left out in B"),
        ({"engine.dtype": "float32"}, "config.engine.dtype is 'bfloat16' in A and 'float32' in B"),
    )):  # fmt: skip
        text = printed([plain], [run(f"changed{number}", changes)])
        assert said in text and text.count("may come from that") == 1


@pytest.mark.parametrize(
    "agents", [{}, {"first": "agent", "second": "small"}, {"first": "agent", "second": "base"}], ids=len
)
def test_a_checkpoint_differs_from_its_base_in_nothing_but_its_training(tmp_path: Path, agents: dict[str, str]):
    """That base models speak for the agents was said to be part of the difference."""
    config = default_config()
    config.update_from_flattened_dict({"model.path": "models/large", "name": "run", "env.name": SOKOBAN})
    config.reward.components = {"success": 1.0}
    config.bases, config.agents = {"small": {"model": {"path": "models/small"}}} if agents else {}, agents
    save_run(config, evaluation(tmp_path / "run", {"x": [True], "y": [False]}))
    base = read_requests([str(tmp_path / "run"), "--base"])[0].evaluations[0].run
    save_run(base.config, evaluation(tmp_path / "base", {"x": [False], "y": [False]}, "base"))
    assert set(base.config.agents.values()) <= {"base", "small"}, "no policy speaks"
    for sides in ([tmp_path / "run"], [tmp_path / "base"]), ([tmp_path / "base"], [tmp_path / "run"]):
        assert "may come from that" not in printed(*sides)


def test_a_run_does_not_differ_from_itself(tmp_path: Path):
    first = evaluation(tmp_path / "a", played(0.8, np.random.default_rng(0)))
    text = printed([first], [first])
    assert "A - B  +0.000" in text and "A and B have the same success on every task." in text
    again = evaluation(tmp_path / "b", played(0.8, np.random.default_rng(1)))
    assert "No difference in success could be shown between these two policies; one of 0.1" in printed([first], [again])


def test_several_seeds_speak_of_the_method(tmp_path: Path):
    rng = np.random.default_rng(1)
    sides = [[evaluation(tmp_path / f"{side}{seed}", played(share, rng)) for seed in range(3)]
             for side, share in (("a", 0.9), ("b", 0.5))]  # fmt: skip
    text = printed(*sides)
    assert "over 3 and 3 seeds" in text and "several seeds of each" not in text
    assert f"A is {tmp_path / 'a0' / 'held_out' / 'agent@40.jsonl'}, " in text.replace("\n", "")


def test_too_few_tasks_are_said_to_be_too_few(tmp_path: Path):
    right, wrong = ({name: [won] for name in "xy"} for won in (True, False))
    text = printed([evaluation(tmp_path / "a", right)], [evaluation(tmp_path / "b", wrong)])
    assert "p = 0.5" in text and "2 tasks that all agree are too few" in text


def test_tasks_that_one_side_lacks_are_left_out_and_counted(tmp_path: Path):
    rng = np.random.default_rng(2)
    first, second = played(0.9, rng, 60), played(0.4, rng, 50)
    text = printed([evaluation(tmp_path / "a", first)], [evaluation(tmp_path / "b", second)])
    assert "50 shared tasks" in text and "10 tasks are left out" in text
    later = {f"{index:04d}": [True] for index in range(50, 90)}
    text = printed([evaluation(tmp_path / "a", first)], [evaluation(tmp_path / "b", later)])
    assert "10 shared tasks" in text and "80 tasks are left out" in text


def test_two_seeds_far_apart_are_said_to_be_too_few(tmp_path: Path):
    rng = np.random.default_rng(3)
    sides = [[evaluation(tmp_path / f"{side}{share}", played(share, rng)) for share in (0.2, 0.9)] for side in "ab"]
    assert "nor could any: 200 tasks, played by 2 and 2 seeds, are too few" in printed(*sides)


def test_a_seed_that_is_named_twice_is_no_second_seed(tmp_path: Path):
    one, other = (evaluation(tmp_path / name, {"x": [True], "y": [False]}) for name in "ab")
    file = one / "held_out" / "agent@40.jsonl"
    assert evaluations_named(f"{one},{other}") == [file, other / "held_out" / "agent@40.jsonl"]
    for again in (one, file, tmp_path / "b" / ".." / "a"):
        with pytest.raises(ConfigError, match=r"agent@40\.jsonl is named twice on one side: give each seed"):
            evaluations_named(f"{one},{again}")


def test_a_first_variant_whose_seeds_share_no_tasks_is_left_out(tmp_path: Path):
    seeds = {
        name: evaluation(tmp_path / name, {task: [True] for task in tasks})
        for name, tasks in {"a0": "ab", "a1": "xy", "b0": "pq", "b1": "pq"}.items()
    }
    variants = {name: {seed: seeds[f"{name}{seed}"] for seed in (0, 1)} for name in "ab"}
    rows, said = compare_variants(variants, "success")
    assert [row.name for row in rows] == ["b"]
    assert said[0] == "Left out, for they share no two held-out tasks with the others: a."
    with pytest.raises(ConfigError, match="no variant has two held-out tasks that all of its seeds have played"):
        compare_variants({"a": variants["a"]}, "success")


def test_two_checkpoints_of_a_run_and_a_copy_of_it_are_no_second_seed(tmp_path: Path):
    run = evaluation(tmp_path / "a", {"x": [True], "y": [False]})
    write_held_out(run, "agent@20", read_held_out(run))
    with pytest.raises(ConfigError, match=r"agent@20.jsonl is of the same run as .*agent@40.jsonl on one side"):
        evaluations_named(f"{run},{run}/held_out/agent@20.jsonl")
    make_run_id(run)
    shutil.copytree(run, tmp_path / "b")
    with pytest.raises(ConfigError, match=r"b/.* is of the same run as .*a/held_out.* on one side"):
        evaluations_named(f"{run},{tmp_path / 'b'}")


def test_files_of_several_policies_have_commas_in_their_names(tmp_path: Path):
    folders = [evaluation(tmp_path / name, {"x": [True], "y": [False]}, "a@40,b@9,c@40") for name in ("m", "n@1")]
    files = [folder / "held_out" / "a@40,b@9,c@40.jsonl" for folder in folders]
    assert evaluations_named(f"{files[0]},{files[1]}") == files
    assert evaluations_named(f"{folders[0]},{folders[1]}") == files


def test_folders_of_evaluations_of_several_policies_are_named_with_seeds_beside_them(tmp_path: Path):
    names = [f"run{seed}/evaluations/{name}" for seed in range(2) for name in ("a@40,b@40", "a@40,b@40-2", "40")]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        evaluation(tmp_path / name, {"x": [True]}, "a@40,b@40")
    folders = [str(tmp_path / name) for name in names]
    for side in ([folders[0]], [f"{folders[0]}/"], [folders[1]], folders[2:4], folders[1:], folders):
        expected = [Path(folder) / "held_out" / "a@40,b@40.jsonl" for folder in side]
        assert evaluations_named(",".join(side)) == expected
    with pytest.raises(ConfigError, match="is named twice"):  # a side that is longer than any path
        evaluations_named(",".join(folders * 99))


def test_samples_of_a_task_are_averaged_and_any_outcome_is_a_metric(tmp_path: Path):
    path = evaluation(tmp_path / "a", {"x": [True, False, True, True], "y": [False, False]})
    assert read_scores(path, "success") == {"x": 0.75, "y": 0.0}
    assert read_scores(path, "reward") == {"x": 1.5, "y": 0.0}
    assert read_scores(path, "score") == {"x": 0.5, "y": 0.5}
    assert read_scores(path, "turns") == {"x": 3.0, "y": 3.0}


def test_of_several_evaluations_the_newest_is_taken_and_one_may_be_named(tmp_path: Path):
    old = evaluation(tmp_path, {"x": [False], "y": [False]}, "agent@0") / "held_out" / "agent@0.jsonl"
    new = old.with_name("agent@40.jsonl")
    new.write_text(old.read_text().replace('"success": 0.0', '"success": 1.0'))
    os.utime(old, (1, 1))
    assert read_scores(tmp_path, "success")["x"] == 1.0
    assert read_scores(old, "success")["x"] == 0.0


def test_the_newest_evaluation_of_a_run_is_that_of_its_newest_version(tmp_path: Path):
    """A copy of a run may have its files in any order of their times."""
    for name, won in (("a@100,b@60", True), ("a@90,b@60", False), ("a@0,b@0", False)):
        evaluation(tmp_path / "run", {"x": [won], "y": [won]}, name)
        os.utime(tmp_path / "run" / "held_out" / f"{name}.jsonl", (2e9 - len(name), 2e9 - len(name)))
    assert read_scores(tmp_path / "run", "success") == {"x": 1.0, "y": 1.0}


def test_mistakes_name_the_file_and_the_remedy(tmp_path: Path):
    one = evaluation(tmp_path / "a", {"x": [True], "y": [True]})
    other = evaluation(tmp_path / "b", {"z": [True], "w": [True]})
    with pytest.raises(ConfigError, match="share no two held-out tasks"):
        compare([one], [other], "success", Console())
    with pytest.raises(
        ConfigError, match="metric 'speed' is not known: use one of prompt_tokens, reward, sampled_tokens"
    ):
        read_scores(one, "speed")
    with pytest.raises(ConfigError, match="has no evaluation in held_out/"):
        read_scores(tmp_path / "nowhere", "success")
    with pytest.raises(ConfigError, match="give one on each side, or two or more on each"):
        compare([one, one], [one], "success", Console())
    (one / "held_out" / "agent@40.jsonl").write_text('{"task": 3}\n')
    with pytest.raises(ConfigError, match="line 1 is no episode"):
        read_scores(one, "success")
    row = json.loads((other / "held_out" / "agent@40.jsonl").read_text().splitlines()[0])
    (one / "held_out" / "agent@40.jsonl").write_text(json.dumps({**row, "success": math.nan}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1 is no episode of an evaluation \(not finite: success\)"):
        read_scores(one, "success")
    (packed := tmp_path / "agent@40.turns.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ConfigError, match=r"turns\.gz is no text .*: give a file of held_out/"):
        read_scores(packed, "success")


def test_the_command_compares_and_refuses(tmp_path: Path):
    one = evaluation(tmp_path / "a", {"x": [True], "y": [False], "z": [True]})

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flowjax.compare", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    done = run(str(one), str(one))
    assert done.returncode == 0 and "success on 3 shared tasks" in done.stdout, done.stderr
    helped = run("--help")
    assert helped.returncode == 0 and "Compare two evaluations" in helped.stdout
    refused = run(str(one))
    assert refused.returncode == 2 and refused.stderr.startswith("compare: give two sides"), refused.stderr
