"""A sweep: what its file may say, which runs are examined and how, and what is compared in the end."""

import contextlib
import os
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from flowjax.compare import compare_variants, variants_figure, variants_table
from flowjax.config import ConfigError, save_run
from flowjax.launch.devices import Devices
from flowjax.launch.machine import hold
from flowjax.launch.preflight import Findings
from flowjax.monitor.held_out import HeldOutEpisode, write_held_out
from flowjax.run import Run
from flowjax.sweep import Sweep, main, read_sweep

RECIPE = """
from flowjax.config import default_config

def get_config(arg="grpo"):
    config = default_config()
    config.model.path = "base"
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    config.reward.components = {"success": 1.0}
    config.trainer.steps, config.optimizer.warmup_steps = 4, 0
    return config
"""
GOOD = """
RECIPE = "recipe.py"
SEEDS = (0, 1)
VARIANTS = {
    "grpo": {"credit.name": "grpo"},
    "slow": {"config.optimizer.learning_rate": 1e-6, "policy.lora.targets": ("q_proj",), "trainer.steps": 3},
    "gigpo": "recipe.py:grpo,gigpo",
}
helper = "mine"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    return tmp_path


def sweep_of(text: str) -> Sweep:
    Path("sweep.py").write_text(text)
    return read_sweep(Path("sweep.py"))


def test_a_file_is_read_as_it_is_also_where_its_compiled_copy_looks_like_it(monkeypatch):
    """Of the same size and time: written within a second of the other."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    for steps, text in ((3, GOOD), (2, GOOD.replace('"trainer.steps": 3', '"trainer.steps": 2'))):
        Path("sweep.py").write_text(text)
        Path("recipe.py").write_text(RECIPE.replace("steps = 4", f"steps = {steps + 2}"))
        for name in ("sweep.py", "recipe.py"):
            os.utime(name, (1e9, 1e9))
        runs = read_sweep(Path("sweep.py")).runs
        assert [run.config.trainer.steps for run in runs[::2]] == [steps + 2, steps, steps + 2]


def test_variants_times_seeds_are_runs_with_configs_of_their_own():
    sweep = sweep_of(GOOD)
    assert [run.folder for run in sweep.runs] == [
        Path("runs/sweep") / f"{name}-{seed}" for name in ("grpo", "slow", "gigpo") for seed in (0, 1)
    ]
    grpo, slow, gigpo = sweep.runs[1], sweep.runs[2], sweep.runs[5]
    assert (grpo.config.seed, grpo.config.credit.name, grpo.result.name) == (1, "grpo", "agent@4.jsonl")
    assert (slow.config.optimizer.learning_rate, slow.config.policy.lora.targets) == (1e-6, ("q_proj",))
    assert slow.result.name == "agent@3.jsonl"
    assert (gigpo.config.credit.name, gigpo.config.seed) == ("gigpo", 1)
    assert (sweep.at_once, sweep.metric) == (1, "success")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('RECIPE = "recipe.py"', "", "RECIPE is missing: give a recipe such as"),
        (
            '"recipe.py"',
            '"recipes.py"',
            r"VARIANTS\['grpo'\]: --config: there is no file recipes.py: did you mean recipe.py",
        ),
        ("SEEDS = (0, 1)", "SEEDS = (0, 0)", r"SEEDS is \(0, 0\): give a tuple of different whole numbers"),
        ("SEEDS = (0, 1)", "SEEDS = 3", "SEEDS is 3: give a tuple"),
        ("SEEDS = (0, 1)", "SEEDS = (True,)", r"SEEDS is \(True,\): give a tuple"),
        ("SEEDS = (0, 1)", "SEEDS = ()", r"SEEDS is \(\): give a tuple"),
        ("SEEDS", "SEED", r"SEED is nothing that a sweep has \(did you mean 'SEEDS'\?\)"),
        ("helper", "AT_ONCE = 0\nhelper", "AT_ONCE is 0: give a whole number from 1 on"),
        ("helper", "NAME = '../up'\nhelper", "NAME is '../up': give the name of a folder"),
        (
            "credit.name",
            "credit.nam",
            r"VARIANTS\['grpo'\]: config.credit.nam is not a field .* did you mean config.credit.name",
        ),
        ("1e-6", "'fast'", r"VARIANTS\['slow'\]: config.optimizer.learning_rate takes a number, not 'fast'"),
        ("1e-6", "-1.0", r"VARIANTS\['slow'\]: config.optimizer.learning_rate is -1.0"),
        ('"grpo": {', '"a/b": {', "VARIANTS has 'a/b': give"),
        ('"grpo": {', '"": {', "VARIANTS has '': give"),
        ("RECIPE =", "recipe =", "recipe is nothing that a sweep has: write RECIPE, or call it otherwise"),
        ("SEEDS =", "seeds =", "seeds is nothing that a sweep has: write SEEDS"),
        ("SEEDS =", "Seeds =", "Seeds is nothing that a sweep has: write SEEDS"),
        ("SEEDS =", "seed =", "seed is nothing that a sweep has: write SEEDS"),
        ('"credit.name": "grpo"', '"env.options": {3: 1}', r"VARIANTS\['grpo'\]: config.env.options has 3: give text"),
        ('{"credit.name": "grpo"}', "{3: 'x'}", r"VARIANTS\['grpo'\] has the field 3: give fields by their names"),
        (
            '{"credit.name": "grpo"}',
            '{"config.credit.name": "grpo", "credit.name": "gigpo"}',
            r"VARIANTS\['grpo'\]: credit.name and config.credit.name are one field, which is given twice: leave",
        ),
        ('{"credit.name": "grpo"}', "3", r"VARIANTS\['grpo'\] is 3: give a dict of fields, or a recipe"),
        ('"credit.name": "grpo"', '"seed": 3', "config.seed is the sweep's to set: use SEEDS, NAME and RUNS"),
        ('"credit.name": "grpo"', '"eval.tasks": 0', "config.eval.tasks is 0: a sweep compares held-out evaluations"),
        (
            '"credit.name": "grpo"',
            '"eval.temperature": 0.5',
            r"VARIANTS\['slow'\]: config.eval.temperature is 1.0, not 0.5 as in VARIANTS\['grpo'\], and greedy",
        ),
        ("grpo,gigpo", "grpo,gigppo", "there is no estimator 'gigppo'"),
        (
            "helper",
            "METRIC = 'sucess'\nhelper",
            r"METRIC is 'sucess', which episodes of VARIANTS\['grpo'\] do not have \(did you mean 'success'\?\): use",
        ),
        (
            '"credit.name": "grpo"},',
            '"credit.name": "grpo"},\n    "turns": {"workflow": "flowjax.workflows.solve_select:play"},\n}\n'
            'METRIC = "boxes_on_target"\nothers = {',
            r"METRIC is 'boxes_on_target', which episodes of VARIANTS\['turns'\] do not have: use one of either_succ",
        ),
        (
            '"credit.name": "grpo"},',
            '"credit.name": "grpo"},\n    "pair": {"workflow": "flowjax.workflows.solver_verifier:play", "agents": '
            '{"solver": "a", "verifier": "b"}, "policies": {"a": {}, "b": {}}},\n}\n'
            'METRIC = "reward"\nothers = {',
            r"VARIANTS\['pair'\]: its policies are a, b, not agent as in VARIANTS\['grpo'\], and METRIC is",
        ),
        (
            '"credit.name": "grpo"},',
            '"credit.name": "grpo"},\n    "ten": {"reward.components": {"success": 10.0}},\n}\n'
            'METRIC = "reward"\nothers = {',
            r"VARIANTS\['ten'\]: config.reward.components is .*10.0.*, not .*1.0.* as in VARIANTS\['grpo'\], and MET",
        ),
        ("helper = ", "helper = 1 / 0 + ", "sweep.py line 9: ZeroDivisionError"),
        ("helper = ", "helper = = ", "sweep.py line 9: SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_with_field_value_and_remedy(old, new, message):
    with pytest.raises(ConfigError, match=message):
        sweep_of(GOOD.replace(old, new, 1))


@pytest.mark.parametrize("metric", ["reward", "prompt_tokens", "boxes_on_target", "invalid_actions"])
def test_a_metric_is_a_number_of_every_episode_or_an_outcome_of_the_world_or_the_workflow(metric):
    assert sweep_of(f"{GOOD}METRIC = {metric!r}").metric == metric


def test_a_workflow_that_lists_no_outcomes_of_its_episodes_may_have_any(folder, monkeypatch):
    (folder / "unlisted.py").write_text("AGENTS = ('agent',)\nasync def play(task, **played): ...\n")
    monkeypatch.syspath_prepend(folder)
    text = 'RECIPE = "recipe.py"\nVARIANTS = {"a": {"workflow": "unlisted:play"}}\nMETRIC = "helped"\n'
    assert sweep_of(text).metric == "helped"
    with pytest.raises(ConfigError, match="METRIC is 'helped', which episodes"):
        sweep_of(text.replace("unlisted", "flowjax.workflows.single"))


def test_a_grid_may_be_of_numpy():
    sweep = sweep_of(
        "import numpy as np\n"
        'RECIPE, SEEDS = "recipe.py", np.arange(2)\n'
        "rates = np.logspace(-5, -3, 2)\n"
        'VARIANTS = {f"lr{i}": {"optimizer.learning_rate": rate} for i, rate in enumerate(rates)}\n'
        'VARIANTS["rank"] = {"policy.lora.rank": np.int64(4), "reward.components": {"success": np.float32(0.5)}}\n'
    )
    rates = [run.config.optimizer.learning_rate for run in sweep.runs]
    assert rates[::2][:2] == pytest.approx([1e-5, 1e-3]) and type(rates[0]) is float
    assert [run.seed for run in sweep.runs] == [0, 1] * 3 and type(sweep.runs[1].config.seed) is int
    assert (sweep.runs[-1].config.policy.lora.rank, sweep.runs[-1].config.reward.components.success) == (4, 0.5)


def test_a_page_is_no_sweep_file():
    Path("README.md").write_text("# A page")
    with pytest.raises(ConfigError, match=r"there is no sweep file README.md: give a Python file with RECIPE"):
        read_sweep(Path("README.md"))


def test_a_run_that_was_begun_otherwise_is_not_gone_on_with():
    run = sweep_of(GOOD).runs[0]
    save_run(run.config, run.folder)
    sweep_of(GOOD)
    with pytest.raises(
        ConfigError, match=r"grpo-0 was begun otherwise \(config.loss.kl_coefficient is 0.5, but .* 0.0"
    ):
        sweep_of(GOOD.replace('"credit.name": "grpo"', '"loss.kl_coefficient": 0.5'))


@pytest.mark.parametrize(("field", "value"), [("engine.quantize", "int8"), ("eval.seed", 5), ("warm_start.steps", 7)])
def test_a_finished_run_is_not_taken_for_a_variant_that_may_be_resumed_otherwise(field, value):
    run = sweep_of(GOOD).runs[0]
    save_run(run.config, run.folder)
    changed = GOOD.replace('"credit.name": "grpo"', f'"credit.name": "grpo", "{field}": {value!r}')
    sweep_of(changed)  # it goes on with that
    finish(run, 0.5)
    sweep_of(GOOD.replace('"credit.name": "grpo"', '"credit.name": "grpo", "engine.threads": 2'))
    with pytest.raises(ConfigError, match=rf"config.{field} is {value!r}, but .*grpo-0 is finished and was made with"):
        sweep_of(changed)


def test_a_sweep_of_fewer_steps_than_were_trained_does_not_take_evaluations_from_the_middle():
    text = GOOD.replace('"credit.name": "grpo"', '"credit.name": "grpo", "trainer.steps": 60')
    run = sweep_of(text).runs[0]
    finish(run, 0.5)
    save_run(run.config, run.folder)
    sweep_of(text)
    sweep_of(text.replace("60", "80"))
    with pytest.raises(
        ConfigError, match=r"config.trainer.steps is 40, but .* has been trained for 60: raise it again"
    ):
        sweep_of(text.replace("60", "40"))


def finish(run, share: float, tasks: int = 60, kind: str = "t") -> None:
    rng = np.random.default_rng(run.seed)
    run.folder.mkdir(parents=True, exist_ok=True)
    episodes = [
        HeldOutEpisode(task, task, "", 0, "ok", float(rng.random() < share), 2, 4, {}, {"agent": 1.0})
        for task in (f"{kind}{index}" for index in range(tasks))
    ]
    write_held_out(run.folder, run.result.stem, episodes)


def test_variants_are_compared_with_the_first_and_drawn(capsys):
    sweep = sweep_of(GOOD)
    for run in sweep.runs[:-1]:
        finish(run, {"grpo": 0.2, "slow": 0.9, "gigpo": 0.3}[run.variant])
    rows, said = compare_variants(sweep.evaluations(), sweep.metric)
    assert [row.name for row in rows] == ["grpo", "slow", "gigpo"] and not rows[0].more
    assert float(rows[1].improvement) > 0.7 and len(rows[1].seeds) == 2 and len(rows[2].seeds) == 1
    assert said[0].startswith("slow (A) and grpo (B): A's success is higher than B's by 0.")
    assert "several seeds of each" in said[1]
    assert said[2:] == ["All numbers are of the 60 tasks that every run in the table has played."]
    page = variants_table("sweep", sweep.metric, rows, said)
    assert page.count("\n| ") == 4 and "| less grpo [95 %] |" in page
    drawn = ElementTree.fromstring(variants_figure(sweep.metric, rows))
    assert "slow" in "".join(drawn.itertext())
    circles = [each for each in drawn.iter() if each.tag.endswith("circle")]
    assert len(circles) == 3 + 5  # means and seeds


def test_all_numbers_are_of_the_tasks_that_every_run_has_played():
    sweep = sweep_of(GOOD)
    for run in sweep.runs:
        finish(run, {"grpo": 0.2, "slow": 0.9, "gigpo": 0.3}[run.variant], tasks=50 if run.variant == "slow" else 60)
    rows, said = compare_variants(sweep.evaluations(), sweep.metric)
    assert said[-1] == "All numbers are of the 50 tasks that every run in the table has played; 10 others are left out."
    assert said[-1] in variants_table("sweep", sweep.metric, rows, said)
    for row in rows:
        assert row.mean == pytest.approx(np.mean(row.seeds)) and np.allclose(50 * row.seeds, np.round(50 * row.seeds))
    assert rows[1].more.startswith(f"{rows[1].mean - rows[0].mean:+.3f} ")


def test_a_variant_that_has_played_other_tasks_is_left_out_of_the_table():
    sweep = sweep_of(GOOD)
    for run in sweep.runs:
        finish(run, 0.5, kind="other" if run.variant == "slow" else "t")
    rows, said = compare_variants(sweep.evaluations(), sweep.metric)
    assert [row.name for row in rows] == ["grpo", "gigpo"]
    assert said[1:] == [
        "Left out, for they share no two held-out tasks with the others: slow.",
        "All numbers are of the 60 tasks that every run in the table has played.",
    ]


def check_slow_variant(fields: dict, said: str, both: str):
    """Check what a sweep says of a variant with these fields, "" for nothing, where `both` stands in its recipe."""
    Path("recipe.py").write_text(RECIPE.replace("return config", f"{both}\n    return config"))
    text = GOOD.replace('"trainer.steps": 3', f"**{fields!r}")
    refused = pytest.raises(ConfigError, match=rf"^sweep.py: VARIANTS\['slow'\]: {said}")
    with refused if said else contextlib.nullcontext():
        sweep_of(text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"env.data_seed": 5}, r"config.env.data_seed is 5, not 0 as in VARIANTS\['grpo'\], and no two held-out"),
        ({"env.options.boxes": 2}, r"config.env.options.boxes is 2, not 1 as in VARIANTS\['grpo'\], and no two"),
        ({"env.options.tile_pixels": 8}, ""),  # which changes no room
        ({"env.data_seed": 5, "env.options.columns": 3}, ""),  # of a world that makes none the launcher speaks
    ],
)
def test_a_variant_of_other_tasks_is_refused_before_the_first_run(fields, said):
    check_slow_variant(fields, said, "config.env.options, config.eval.tasks = {'rows': 9, 'columns': 9, 'boxes': 1}, 8")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"warm_start.steps": 9},
            r"config.warm_start.steps is 9, not 3 as in VARIANTS\['grpo'\], but config.model.path",
        ),
        ({"model.nano.layers": 1}, r"config.model.nano.layers is 1, not 2 as in VARIANTS\['grpo'\], but config.model"),
        ({"warm_start.steps": 9, "model.path": "another"}, ""),
    ],
)
def test_a_base_that_variants_would_make_differently_is_refused_before_the_first_run(fields, said):
    check_slow_variant(fields, said, "config.model.nano, config.warm_start.steps = {'layers': 2}, 3")


def test_a_single_seed_is_compared_with_the_same_seed_of_the_other():
    sweep = sweep_of(GOOD)
    shares = {"grpo-0": 0.1, "grpo-1": 0.9, "gigpo-1": 0.9}
    for run in sweep.runs:
        if share := shares.get(run.folder.name):
            finish(run, share)
    rows, said = compare_variants(sweep.evaluations(), sweep.metric)
    assert rows[1].more.startswith("+0.000 ") and rows[1].more.endswith(", seed 1 of each")
    assert said[0].startswith("gigpo (A) and grpo (B), seed 1 of each: ")
    (sweep.runs[1].folder / "held_out").rename(sweep.runs[1].folder / "gone")
    rows, said = compare_variants(sweep.evaluations(), sweep.metric)
    assert not rows[1].more and said[0] == "gigpo and grpo have no seed in common yet."


def test_a_dry_run_says_what_would_run(capsys):
    sweep = sweep_of(GOOD)
    finish(sweep.runs[0], 0.5)
    save_run(sweep.runs[1].config, sweep.runs[1].folder)
    for run in sweep.runs[-2:]:
        save_run(run.config, run.folder)
    with hold(sweep.runs[2].folder):
        pass
    assert main(["sweep.py", "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, name in zip(lines[6:], ("run grpo-1", "variant slow", "run gigpo-0", "run gigpo-1"), strict=True):
        assert line.startswith(f"{name}: not ready on this machine: config.model.path is 'base', which does not")
    assert [line.split()[1:] for line in lines[:3]] == [["finished"], ["to", "resume"], ["to", "begin"]]
    assert not Path("runs/sweep/sweep.md").exists()
    sweep_of(GOOD.replace('"trainer.steps": 3', '"env.options.rows": 3'))
    assert main(["sweep.py", "--dry_run"]) == 2
    assert "variant slow: config.env.options rows=3, columns=3: a room" in capsys.readouterr().err
    for argv in ([], ["a.py", "b.py"], ["sweep.py", "--dry"]):
        assert main(argv) == 2 and "give one sweep file" in capsys.readouterr().err


def test_runs_to_be_resumed_are_examined_with_what_the_file_has_by_now(monkeypatch, capsys):
    asked = []

    def examine(run: Run, devices: Devices, *, resume: bool = False) -> Findings:
        asked.append((run.folder.name, run.config.trainer.steps, resume))
        return Findings(["the run is at step 3"] if resume and run.config.trainer.steps < 3 else [])

    monkeypatch.setattr("flowjax.sweep.examine", examine)
    sweep = sweep_of(GOOD)
    finish(sweep.runs[1], 0.5)
    for run in (sweep.runs[0], *sweep.runs[2:4]):
        save_run(run.config, run.folder)
    sweep_of(GOOD.replace('"trainer.steps": 3', '"trainer.steps": 2'))
    for dry_run in (["--dry_run"], []):
        assert main(["sweep.py", *dry_run]) == 2
        said = "sweep: run slow-0: the run is at step 3\nrun slow-1: the run is at step 3\n"
        assert capsys.readouterr().err == said and not Path("runs/sweep/launch.lock").exists()
    assert asked[:4] == [("grpo-0", 4, True), ("slow-0", 2, True), ("slow-1", 2, True), ("gigpo-0", 4, False)]
