"""Layouts that `--plan` proposes: they fit, are valid, and by its own estimate none is slower than the recipe's."""

from pathlib import Path

import pytest

from flowjax.config import ConfigError
from flowjax.launch.__main__ import main
from flowjax.launch.checks import check_config
from flowjax.launch.command_line import parse
from flowjax.launch.devices import MEMORY_FRACTION, memory_plan, memory_together
from flowjax.launch.planner import GIB, GPUS, Planner, read_machine, render
from flowjax.launch.preflight import batch_lines
from flowjax.models.lora import Lora
from flowjax.run import Run, resolve

ROOT = Path(__file__).parents[2]
RECIPES = [
    f"{path.stem}.py:{size}"
    for path in sorted((ROOT / "configs").glob("*.py"))
    for size in ("qwen3_8b", "qwen3_0_6b")
    if path.stem != "math_router"  # it has two base models, for which there are no plans
]
APPEND = "--config.env.context=append"
MACHINES = ("8xH100", "8xA100", "4xA100-40", "2xH200", "1xH200", "8xL4")


def run_of(recipe: str, *flags: str) -> Run:
    return resolve(parse([f"--config={ROOT / 'configs' / recipe}", *flags])[0])


def planner_of(recipe: str, machine: str, *flags: str) -> Planner:
    return Planner(run_of(recipe, *flags), *read_machine(machine))


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if not recipe.startswith("canvas.py")])
def test_the_first_layout_fits_is_valid_and_is_not_slower_than_the_recipes(recipe):
    fitting = []
    for machine in MACHINES:
        planner = planner_of(recipe, machine)
        count, kind = read_machine(machine)
        own = planner.estimate(planner.configured())
        if not (found := planner.estimates()):
            assert own is None
            continue
        fitting.append(machine)
        best = found[0]
        assert own is None or best.step_s <= own.step_s
        run = run_of(recipe, *(f"--config.{field}={value}" for field, value in best.layout.flags().items()))
        assert check_config(run.config) == []
        again = Planner(run, count, kind)
        assert again.configured() == best.layout and again.estimate(best.layout) == best, "as its flags make it"
        policy, sizes = again.policy, run.config.mesh.to_dict()
        assert policy.trainer.micro_batch_rows % (sizes["data"] * sizes["fsdp"]) == 0
        assert again.model.heads % policy.base.engine.tensor_parallel == 0
        plans = [
            memory_plan(
                each,
                again.model,
                Lora(**each.lora.to_dict()),
                sizes,
                rows=each.trainer.micro_batch_rows,
                versions=run.config.dataflow.max_staleness + 1,
            )
            for each in run.policies.values()
        ]
        alone = count > 1
        most = MEMORY_FRACTION if alone else MEMORY_FRACTION - policy.base.engine.gpu_memory_fraction
        assert sum(memory_together(plans).values()) == best.trainer_bytes <= most * GPUS[kind].memory_gib * GIB
        gpus = best.layout.trainer_gpus + best.layout.engine_gpus
        assert gpus == count if alone else best.layout.trainer_gpus == best.layout.engine_gpus == 1
    assert len(fitting) >= 4 and "1xH200" in fitting, "engine and trainer share the only one"


def test_more_and_faster_gpus_are_not_slower():
    steps_s = [
        planner_of("math.py:qwen3_8b", machine).estimates()[0].step_s for machine in ("4xA100", "8xA100", "8xH100")
    ]
    assert steps_s == sorted(steps_s, reverse=True)


def test_a_trainer_beside_engines_elsewhere_has_all_gpus():
    planner = planner_of("math.py:qwen3_8b", "8xH100", "--config.engine.urls=('http://far:8000',)")
    assert {each.layout.trainer_gpus for each in planner.estimates()} == {8}
    assert all(each.play_s == 0.0 for each in planner.estimates())


def test_a_base_is_split_where_it_does_not_fit_whole():
    found = planner_of("math.py:qwen3_8b", "8xL4").estimates()
    assert found and all(each.layout.fsdp > 1 and each.layout.tensor_parallel > 1 for each in found)


def test_the_command_prints_layouts_and_flags(capsys):
    assert main([f"--config={ROOT / 'configs/math.py'}:qwen3_8b", "--plan=8xh100"]) == 0
    said = capsys.readouterr().out
    assert "recipe" in said and "to take 1: --config.mesh." in said and "Never measured" in said


@pytest.mark.parametrize(("gib", "layouts"), [(3, 1), (0, 3)])
def test_layouts_whose_cache_is_held_alike_are_one(gib: int, layouts: int, capsys, monkeypatch):
    """Three were proposed that differed in a share of the memory which nothing then read."""
    monkeypatch.setenv("COLUMNS", "200")
    flags = [f"--config.engine.kv_cache_bytes={gib * GIB}", "--plan=1xRTX4090"]
    assert main([f"--config={ROOT / 'configs/math.py'}:qwen3_0_6b", *flags]) == 0
    said = capsys.readouterr().out
    assert sum(line[:1].isdigit() and "of its memory" in line for line in said.splitlines()) == layouts
    assert ("held to 3 GiB by config.engine.kv_cache_bytes" in said) == bool(gib)


@pytest.mark.parametrize("machine", ["1xL4", "1xH200"])
def test_a_cache_that_the_config_holds_to_few_sequences_still_fits(machine: str, capsys, monkeypatch):
    """Nothing fitted, it was said, and that larger GPUs were needed: the recipe's cache holds three sequences."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main([f"--config={ROOT / 'configs/canvas.py'}:qwen3_0_6b", f"--plan={machine}"]) == 0
    assert "held to 3 GiB by config.engine.kv_cache_bytes: raise it for more" in capsys.readouterr().out
    flags = [f"--config.engine.kv_cache_bytes={GIB // 4}", f"--plan={machine}"]
    assert main([f"--config={ROOT / 'configs/canvas.py'}:qwen3_0_6b", *flags]) == 2
    assert "or more config.engine.kv_cache_bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "machine", "flags", "said"),
    [
        ("math.py:qwen3_8b", "8xB100", (), "--plan=8xB100: give number and kind"),
        ("math.py:qwen3_8b", "H100", (), "--plan=H100: give number and kind"),
        ("math.py:qwen3_8b", "0xH100", (), "give number and kind"),
        ("math.py:qwen3_8b", "1xL4", (), "nothing fits 1 x L4"),
        ("math.py:qwen3_8b", "8xH100", ("--config.mesh.tensor=2",), "config.mesh.tensor is 2"),
        ("math.py:qwen3_8b", "8xH100", ("--config.model.path=somewhere/else",), "needs the shape of config.model.path"),
        ("math.py:nano", "8xH100", (), "config.model.nano is set: leave it out"),
        ("math.py:qwen3_8b", "8xH100", ("--config.trainer.processes=2",), "one trainer of one process"),
    ],
)
def test_what_cannot_be_planned_is_said(recipe, machine, flags, said):
    with pytest.raises(ConfigError) as error:
        render(run_of(recipe, *flags), machine)
    assert said in str(error.value)


def test_an_appended_episode_has_all_its_replies_in_one_sequence():
    window, append = (planner_of("sokoban.py:qwen3_8b", "8xH100", *flags) for flags in ((), (APPEND,)))
    turns = append.run.config.env.max_turns
    assert append._trained_tokens * turns == window._trained_tokens
    assert append._sampled_tokens == min(window._sampled_tokens, append._trained_tokens)
    (words,) = (words for name, words in batch_lines(append.run) if name == "tokens per step")
    assert words == "at most 256 x 3,072 = 786,432 (an episode is one sequence)"
    slots = append.run.config.trainer.micro_batch_rows * append.run.config.trainer.row_tokens
    passes = dict(batch_lines(append.run))["passes per step"]
    assert passes == f"at most {-(-786_432 // slots)} with full rows"


def test_every_agent_has_turns_that_are_played_and_those_of_policies_are_trained_on():
    alone, pair = (planner_of(recipe, "8xH100") for recipe in ("math.py:qwen3_8b", "math_pair.py:qwen3_8b"))
    assert pair._trained_tokens == pair._played_tokens == 2 * alone._trained_tokens == 2 * alone._played_tokens
    frozen = planner_of("math_pair.py:qwen3_8b", "8xH100", "--config.agents.verifier=base")
    assert frozen._trained_tokens == alone._trained_tokens and frozen._played_tokens == pair._played_tokens


@pytest.mark.parametrize("flags", [(), (APPEND,)])
def test_at_most_as_many_turns_as_the_dataflow_takes(flags):
    lines = dict(batch_lines(run_of("math_pair.py:nano", *flags)))
    assert lines["turns per step"] == "at most 128 x 8 = 1,024 (turns of all agents)"
    assert lines["tokens per step"] == "at most 1,024 x 18 = 18,432 (each turn its own sequence)"
