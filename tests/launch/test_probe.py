"""What is refused of the modules that a config names, for each policy."""

import importlib
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs import canvas, code, search, sokoban
from configs.math_pair import get_config
from flowjax import rewards
from flowjax.envs import WorldError
from flowjax.envs.sokoban import Sokoban
from flowjax.grading import sandbox
from flowjax.launch import preflight, probe
from flowjax.launch.devices import Devices, moments_of
from flowjax.launch.probe import inspect_run, notes_on_tasks
from flowjax.models.config import hf_config, known_shape
from flowjax.models.decoder import Decoder
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.nano import build_tokenizer, nano_config
from flowjax.models.shape import Experts
from flowjax.run import resolve
from flowjax.trainer.optimizer import make_optimizer
from flowjax.workflows import declared, episode_outcomes, outcomes_of, single


def problems(**changes) -> list[str]:
    config = get_config("nano")
    config.model.path = ""
    config.update_from_flattened_dict(changes)
    return inspect_run(resolve(config), 1, None)["problems"]


def answered(answered):
    """A component of one's own that reads an outcome of the world."""
    return answered


def test_a_reward_may_read_what_the_workflow_adds_to_the_worlds_outcomes():
    assert not any("reward" in problem for problem in problems())


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        (
            "reward",
            {"components": {"verdikt": 1.0}},
            "config.policies.verifier.reward.components.verdikt does not exist",
        ),
        (
            "reward",
            {"components": {"overlong": {"limit_tokens": 4.0}}},
            "config.policies.verifier.reward.components.overlong.buffer_tokens is missing",
        ),
        ("credit", {"name": "grpoo"}, "grpoo"),
        ("loss", {"kind": "ppoo"}, "ppoo"),
        ("loss", {"kind": "mine:my_loss"}, "a path is not taken here"),
    ],
)
def test_what_one_policy_has_of_its_own_is_checked_under_its_name(section, value, message):
    config = get_config("nano")
    config.model.path = ""
    config.policies.verifier[section] = value
    (found,) = inspect_run(resolve(config), 1, None)["problems"]
    assert message in found
    assert f"config.policies.verifier.{section}" in found


@pytest.mark.parametrize(
    ("shared", "own", "named"),
    [
        ({}, {"terms": 99}, "config.env.sources.long.options.terms is 99"),
        ({}, {"path": "gone", "calculator": 1}, "config.env.sources.long.options path='gone' does not exist"),
        ({}, {"termz": 3}, "config.env.sources.long.options.termz is no option of Math"),
        ({"termz": 3}, {"terms": 3}, "config.env.options.termz is no option of Math"),
    ],
)
def test_options_of_a_source_are_refused_under_its_name(shared, own, named, tmp_path):
    config = sokoban.get_config("nano")
    config.model.path, config.env.name = str(tmp_path / "base"), "flowjax.envs.math:Math"
    config.env.options = shared
    config.env.sources = {"short": {}, "long": {"options": own}}
    found = inspect_run(resolve(config), 1, None)
    said = [text for text in found["problems"] + found["here"] if text.startswith("config.env.")]
    assert said and all(text.startswith(named) for text in said), found


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        ({"greso": {"windw": 3}}, r"config.dataflow.algorithms.greso.windw is no option .*did you mean 'window'\?"),
        ({"greso": {"window": 3.5}}, "config.dataflow.algorithms.greso.window is 3.5: give a whole number"),
        ({"gresso": {}}, "config.dataflow.algorithms.gresso is no data algorithm"),
        (
            {"mine": {"path": "no.such:Thing"}},
            "config.dataflow.algorithms.mine.path is 'no.such:Thing', which cannot be imported",
        ),
        (
            {"mine": {"path": "json:JSONDecoder"}},
            "config.dataflow.algorithms.mine.path is json:JSONDecoder, .*Algorithm",
        ),
        ({"mine": {"path": "tests.dataflow.own_algorithm:Forgets"}}, r"config.dataflow.algorithms.mine.state .*set"),
        ({"mine": {"path": "tests.dataflow.own_algorithm:Unmeasured"}}, r"mine.metrics .*it answers None: give a map"),
        ({"mine": {"path": "tests.dataflow.own_algorithm:Unfinished"}}, r"mine.metrics .*it answers nan for 'share'"),
    ],
)
def test_data_algorithms_that_cannot_be_made_are_refused(algorithms, message):
    (found,) = problems(**{"dataflow.algorithms": algorithms})
    assert re.search(message, found)


def test_a_mistyped_module_of_a_workflow_is_named_once_and_the_mesh_is_still_shown():
    config = get_config("nano")
    config.workflow = "flowjax.workflows.sngle:play"
    config.reward.components = {"sucess": 1.0}  # of a workflow that is not there nobody knows what its agents report
    found = inspect_run(resolve(config), 1, None)
    (message,) = [text for text in found["problems"] if "sngle" in text or "sucess" in text]
    assert message.startswith("config.workflow is 'flowjax.workflows.sngle:play', which cannot be imported (No module")
    assert found["plan"]["mesh"]


@pytest.mark.parametrize(
    ("policy", "component", "lacks"),
    [("solver", "verdict", "answer_right"), ("verifier", "answered", "answered"), ("solver", "answered", "")],
)
def test_a_reward_may_not_read_what_the_agents_of_its_policy_do_not_report(policy, component, lacks, monkeypatch):
    """Every episode was refused by the dataflow, or its group could not be credited."""
    monkeypatch.setitem(rewards.COMPONENTS, "answered", f"{__name__}:answered")
    found = problems(**{f"policies.{policy}.reward": {"components": {component: 1.0}}})
    assert len(found) == bool(lacks)
    for text in found:
        assert text.startswith(f"config.policies.{policy}.reward.components.{component} needs the outcome {lacks!r}")
        assert f"which the {policy} of flowjax.workflows.solver_verifier:play does not report" in text


def test_a_reward_that_nobody_is_paid_needs_no_outcome():
    """The base model of this recipe could not be evaluated: its verifier's reward reads what only that one reports."""
    assert problems(agents={"solver": "base", "verifier": "base"}, **{"eval.versions": (0,)}) == []
    assert problems(agents={"solver": "solver", "verifier": "base"}, **{"eval.versions": (1,)}) == []


def test_outcomes_of_a_workflow_are_by_agent(tmp_path, monkeypatch):
    (tmp_path / "flat.py").write_text('OUTCOMES = ("helpful",)\n\nasync def play(*_, **__): ...\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert any("flat has OUTCOMES ('helpful',): give a map" in text for text in problems(workflow="flat:play"))
    (tmp_path / "letters.py").write_text('OUTCOMES = {"first": "finished"}\n')
    with pytest.raises(WorldError, match=r"letters has OUTCOMES\['first'\] 'finished': give a tuple of names, such as"):
        outcomes_of("letters:play", "first", Sokoban)
    (tmp_path / "text.py").write_text('EPISODE_OUTCOMES = "finished"\n\nasync def play(*_, **__): ...\n')
    with pytest.raises(WorldError, match="text has EPISODE_OUTCOMES 'finished': give a tuple of names, such as"):
        episode_outcomes("text:play", Sokoban)
    (tmp_path / "number.py").write_text('OUTCOMES = {"first": ("finished", 3)}\nAGENTS = "solo"\n')
    with pytest.raises(WorldError, match=r"number has OUTCOMES\['first'\] \('finished', 3\): give a tuple of names"):
        outcomes_of("number:play", "first", Sokoban)
    assert any("number has AGENTS 'solo': give a tuple" in text for text in problems(workflow="number:play"))


@pytest.mark.parametrize(
    ("attention", "dtype", "platform", "message"),
    [
        ("flash", "bfloat16", "cpu", "config.model.attention is 'flash', but this is a cpu and no NVIDIA GPU"),
        ("cudnn", "float32", "gpu", "config.model.attention is 'cudnn', but the model is in float32"),
        ("splash", "bfloat16", "gpu", "config.model.attention is 'splash', but this is a gpu and no TPU"),
        ("flash", "bfloat16", "gpu", ""),
        ("splash", "bfloat16", "tpu", ""),
    ],
)
def test_attention_that_the_trainer_cannot_compute_is_refused(attention: str, dtype: str, platform: str, message: str):
    config = get_config("nano")
    config.model.update({"attention": attention, "dtype": dtype, "path": "absent"})
    config.trainer.row_tokens = 1024
    found = inspect_run(resolve(config), 1, None, platform)["problems"]
    assert any(text.startswith(message) for text in found) if message else not found
    config.eval.versions = (1,)  # an evaluation has no trainer
    assert not inspect_run(resolve(config), 1, None, platform)["problems"]


def test_an_evaluation_need_not_fit_the_trainers_mesh():
    config = get_config("nano")
    config.model.path, config.mesh.data = "absent", 4
    assert any("does not fit 1 devices" in text for text in inspect_run(resolve(config), 1, None)["problems"])
    config.eval.versions = (0,)
    assert not inspect_run(resolve(config), 1, None)["problems"]


def test_outcomes_of_another_workflow_are_not_there():
    agents = {"agent": "solver"}
    (found,) = problems(workflow="flowjax.workflows.single:play", agents=agents)
    assert "needs the outcome 'answer_right'" in found


@pytest.mark.parametrize(
    ("agents", "named"),
    [
        ({"solver": "solver"}, "solver"),
        ({"solver": "solver", "verifier": "verifier", "judge": "verifier"}, "judge, solver, verifier"),
        ({"agent": "solver"}, "agent"),
    ],
)
def test_each_agent_of_the_workflow_has_somebody_who_speaks_for_it_and_there_are_no_others(agents, named):
    (found,) = (text for text in problems(agents=agents) if "the agents of" in text)
    assert found.startswith(
        f"config.agents has {named}, and the agents of flowjax.workflows.solver_verifier:play are solver, verifier: "
    )


def test_agents_that_are_not_written_out_are_not_checked(tmp_path, monkeypatch):
    (tmp_path / "computed.py").write_text("AGENTS = tuple('ab')\n\nasync def play(*_, **__): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not any("agents" in text for text in problems(workflow="computed:play"))


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("async def play(task, *, seed, env, agents, options): ...", False),
        ("async def play(given, seed, env, agents, options, more=1): ...", False),
        ("async def play(*given, **rest): ...", False),
        ("from flowjax.workflows.single import play", False),
        ("from flowjax.workflows.single import *", False),
        ("try:\n    from flowjax.workflows.single import play\nexcept ImportError:\n    play = None", False),
        ("play: object = print", False),
        ("def play(task, *, seed, env, agents, options): ...", True),
        ("async def play(task, *, seed, env, agents): ...", True),
        ("async def play(*, task, seed, env, agents, options): ...", True),
        ("async def play(seed, env, agents, options): ...", True),
    ],
)
def test_a_workflow_that_cannot_be_called_as_one_is_refused(text, refused, tmp_path, monkeypatch):
    (tmp_path / "own_workflow.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_workflow", raising=False)  # that of the case before
    found = [problem for problem in problems(workflow="own_workflow:play") if "config.workflow" in problem]
    said = "config.workflow is 'own_workflow:play', but that is no workflow: write it as `async def play(task, *, "
    assert found == ([f"{said}seed, env, agents, options)`"] if refused else [])


def test_what_a_workflow_lists_may_have_a_type_and_stand_in_a_block(tmp_path, monkeypatch):
    """It was read as if there were none, and a reward that reads its outcomes was refused."""
    (tmp_path / "typed_lists.py").write_text(
        "AGENTS: tuple[str, ...] = ('a', 'b')\ntry:\n    OUTCOMES: dict = {'a': ('won',)}\nexcept OSError:\n    pass\n"
        "class Other:\n    LATER = 1\nUNSET: int\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert declared("typed_lists", "AGENTS") == ("a", "b") and declared("typed_lists", "OUTCOMES") == {"a": ("won",)}
    assert declared("typed_lists", "LATER") == declared("typed_lists", "UNSET") == ()


def test_every_workflow_of_ours_lists_its_agents():
    for path in Path(single.__file__).parent.glob("*.py"):
        module = importlib.import_module(f"flowjax.workflows.{path.stem}")
        if hasattr(module, "play"):
            assert declared(module.__name__, "AGENTS") == module.AGENTS != ()


def test_a_context_beyond_the_models_positions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Which its engine would say in a log, after the model was fetched and loaded."""
    shape = known_shape("Qwen2.5-7B")
    assert shape is not None
    described = {**hf_config(shape, "bfloat16"), "max_position_embeddings": 4096}

    def found(**more) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({**described, **more}))
        return problems(**{"model.path": str(tmp_path), "model.nano": None, "engine.max_model_tokens": 16384})

    assert [text.partition(" positions")[0] for text in found()] == [
        f"config.engine.max_model_tokens is 16384, but the model {tmp_path} has 4096"
    ]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 1e6}
    assert found(rope_parameters=yarn) == found(max_position_embeddings=16384) == []
    assert len(found(rope_parameters={**yarn, "factor": 2.0})) == 1
    assert found(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}) == []
    assert "config.model.nano.max_positions" in problems(**{"model.path": "", "engine.max_model_tokens": 4096})[0]
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert found() == []


def test_a_tokenizer_that_no_prompt_can_be_made_with_is_refused(tmp_path: Path):
    """Also where no option of its template is set: each engine's roles would end of it after the model was loaded."""
    build_tokenizer(("one",), tmp_path)
    named = {"model.path": str(tmp_path), "model.nano": None}
    assert not any(str(tmp_path) in text for text in problems(**named))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    assert f"the tokenizer in config.model.path {tmp_path} has no chat_template: use a chat model's tokenizer" in (
        problems(**named)
    )


_STILL = (("embedding|q_proj", {}), (".*", {"frozen": True}))


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("way", ["lora", "full"])
@pytest.mark.parametrize("rules", [(), (("norm", {"weight_decay": 0.0}), (".*", {})), _STILL])
def test_what_an_optimiser_keeps_is_planned_as_it_keeps_it(name: str, way: str, rules: tuple):
    """Two moments were planned for each value, also with SGD or of frozen arrays; launches were refused for it."""
    config = sokoban.get_config("nano")
    config.policy.train, config.optimizer.name, config.optimizer.rules = way, name, rules
    run = resolve(config)
    (policy,), model = run.policies.values(), nano_config(64, **config.model.nano)
    lora = Lora(**policy.lora.to_dict()) if way == "lora" else None
    decoder = nnx.eval_shape(lambda: Decoder(model, lora=lora, dtype=jnp.float32, key=jax.random.key(0)))
    _, trained, _ = nnx.split(decoder, LoraParam if lora else nnx.Param, ...)
    kept = jax.eval_shape(make_optimizer(policy.optimizer, 1000, trained).init, trained)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim) for tree in (kept, trained)]
    assert moments_of(policy, model, lora) == pytest.approx(sizes[0] / sizes[1])


def test_every_policy_of_a_trainer_is_planned_and_checked():
    """The second one had no memory in the plan, and its rows were refused by the mesh once the model was loaded."""
    config = get_config("qwen3_8b")
    both = inspect_run(resolve(config), 4, None)["plan"]["bases"]["base"]["memory"]
    config.policies.verifier.policy = {"lora": {"rank": 128}}
    larger = inspect_run(resolve(config), 4, None)["plan"]["bases"]["base"]["memory"]
    assert larger["adapter"] == 1.5 * both["adapter"] and larger["moments"] == 1.5 * both["moments"]
    assert larger["gradients"] == 2 * both["gradients"] and larger["base"] == both["base"]
    config.policies.verifier.trainer = {"micro_batch_rows": 6}
    (found,) = inspect_run(resolve(config), 4, None)["problems"]
    assert found.startswith("config.policies.verifier.trainer.micro_batch_rows is 6, but rows are split over 4 devices")


def test_a_nodes_gpus_need_not_fit_the_trainers_mesh():
    """A machine with another number of them was refused, and could not say otherwise."""
    config = get_config("qwen3_8b")
    config.mesh.data, config.mesh.fsdp = 4, 1
    assert "mesh" in inspect_run(resolve(config), 3, None)["problems"][0]
    config.elsewhere = ("dataflow", "trainer")
    found = inspect_run(resolve(config), 3, None)
    assert (
        found["problems"] == [] and found["plan"]["bases"]["base"]["model"]["policies"]["solver"]["adapter_bytes"] > 0
    )


def test_a_base_that_its_trainer_could_not_load_is_refused(tmp_path: Path):
    """A dry run passed, the engine started, and the trainer ended and was started again."""
    config = sokoban.get_config("nano")
    config.model.path = str(tmp_path)
    build_tokenizer(("up", "down"), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(nano_config(64, **config.model.nano), "float32")))
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    assert any("model.safetensors cannot be read" in text for text in inspect_run(resolve(config), 1, None)["problems"])
    config.elsewhere = ("trainer",)
    assert "safetensors" not in str(inspect_run(resolve(config), 1, None)["problems"])


@pytest.mark.parametrize("fields", [{"model_type": "phi3"}, {"quantization_config": {"quant_method": "awq"}}])
def test_a_base_that_is_not_trained_may_be_of_any_kind(fields: dict, tmp_path: Path):
    """Its engine knows more families than the decoder here, and reads quantised weights."""
    config = sokoban.get_config("nano")
    known = hf_config(nano_config(64, **config.model.nano), "float32")
    (tmp_path / "config.json").write_text(json.dumps(known | fields))
    config.bases = {"judge": {"model": {"path": str(tmp_path), "nano": None}}}
    assert "judge" not in str(inspect_run(resolve(config), 1, None)["problems"])
    config.policies = {"agent": {"policy": {"base": "judge"}}}
    assert "config.json" in str(inspect_run(resolve(config), 1, None)["problems"])


def test_servers_that_the_worlds_ask_are_for_those_who_play():
    config = search.get_config("nano")
    config.env.options = {"retriever": "http://127.0.0.1:9"}  # a port that nobody serves
    assert "http://127.0.0.1:9 gives no passages" in inspect_run(resolve(config), 1, None)["here"][0]
    config.elsewhere = ("rollout",)
    assert inspect_run(resolve(config), 1, None)["here"] == []


@pytest.mark.parametrize("recipe", [code, canvas])
def test_a_sandbox_is_for_those_who_play(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch):
    bare = replace(sandbox.isolation(), name=sandbox.RLIMITS_ONLY, why="it is not there")
    monkeypatch.setattr(sandbox, "isolation", lambda: bare)
    config = recipe.get_config("nano")
    assert "install bubblewrap" in inspect_run(resolve(config), 1, None)["here"][0]
    config.elsewhere = ("rollout",)
    assert inspect_run(resolve(config), 1, None)["here"] == []


def test_windows_that_engines_would_not_serve_are_refused(tmp_path: Path):
    shape = nano_config(64, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_size=32)
    options = {"model.path": str(tmp_path), "model.nano": None}
    for full, some in (((), False), ((0,), True)):
        windows = replace(shape, sliding_window_tokens=8, full_attention_layers=full)
        (tmp_path / "config.json").write_text(json.dumps(hf_config(windows, "bfloat16")))
        assert any("a sliding window on 1 of 2 layers" in text for text in problems(**options)) == some


def test_adapters_of_experts_that_engines_would_not_serve_are_refused(tmp_path: Path):
    shape = nano_config(64, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_size=32)
    shape = replace(shape, architecture="qwen3_moe", experts=Experts(4, 2, ffn_size=16))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, "bfloat16")))

    def found(*targets: str) -> list[str]:
        options = {"model.path": str(tmp_path), "model.nano": None, "policy.lora.targets": targets}
        return [text for text in problems(**options) if "targets" in text]

    assert found("q_proj", "router") == found("gate_proj", "up_proj", "down_proj") == []
    assert "or of none: name all three" in found("q_proj", "down_proj")[0]
    assert "leave the router's out" in found("gate_proj", "up_proj", "down_proj", "router")[0]
    options = {"model.path": str(tmp_path), "model.nano": None, "engine.quantize": "int8"}
    assert any("has experts: use 'fp8'" in text for text in problems(**options))


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (sokoban, {"min_moves": 1, "max_moves": 2}, ""),
        (sokoban, {"max_moves": 0, "min_moves": 1}, ""),
        (sokoban, {"min_moves": 3, "max_moves": 2}, "config.warm_start.env_options is .* beside config.env.options: "),
        (sokoban, {"colour": 1}, "config.warm_start.env_options is .*colour"),
        (code, {"kinds": ("int", "text")}, "have words that those of config.env.options lack"),
    ],
)
def test_a_base_is_taught_in_a_world_of_the_same_words(recipe, options: dict, message: str, tmp_path: Path):
    config = recipe.get_config("nano")
    config.model.path = str(tmp_path / "absent")
    if recipe is code:
        config.env.options.kinds = ("int",)
    for section in ("env_options", "noisy_env_options"):
        config.warm_start.update({"env_options": {}, "noisy_env_options": {}, section: options})
        found = [text for text in inspect_run(resolve(config), 1, None)["problems"] if f"_start.{section}" in text]
        expected = message.replace("start.env_options", f"start.{section}")
        assert len(found) == bool(message) and all(re.search(expected, text) for text in found), found


def test_an_executor_is_taught_with_pieces_that_it_has(tmp_path: Path):
    config = canvas.get_config("nano_llm")
    config.model.path, config.bases.executor.model.path = str(tmp_path / "policy"), str(tmp_path / "executor")
    config.env.options.kinds = ("arithmetic",)
    config.bases.executor.warm_start.env_options = {"kinds": ("program",)}
    (found,) = (text for text in inspect_run(resolve(config), 1, None)["problems"] if "env_options" in text)
    assert found.startswith("config.bases.executor.warm_start.env_options is") and "that those of config.env" in found


def test_bad_options_of_the_world_are_not_blamed_on_the_lessons(tmp_path: Path):
    config = sokoban.get_config("nano")
    config.model.path, config.env.options.rows = str(tmp_path / "absent"), 3
    found = inspect_run(resolve(config), 1, None)["problems"]
    assert any("env.options" in text for text in found) and not any("env_options" in text for text in found), found


def test_a_probe_that_does_not_answer_in_time_is_no_fault_of_the_config(monkeypatch):
    """A busy machine was said to have a config that cannot run, and a mesh that does not fit."""
    monkeypatch.setattr(preflight, "_PROBE_TIMEOUT_S", 0.0)
    pipes: dict = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    waits = subprocess.Popen([sys.executable, "-c", "input()"], text=True, **pipes)
    problems, here, plan = preflight._finish_probe(waits)
    assert problems == [] and plan == {} and waits.poll() is not None
    assert re.search("not examined within 0 s: the machine is busy, or .*: try again", here[0])
    run = resolve(get_config("nano"))
    found = preflight.Findings(problems, here, plan)
    assert "mesh not examined" in preflight.device_lines(run, Devices(), found)[0][1]


def test_a_mesh_that_does_not_fit_is_said_to_be_that():
    config = get_config("nano")
    config.model.path, config.mesh.fsdp = "", 3
    found = inspect_run(resolve(config), 2, None)
    shown = preflight.Findings(found["problems"], found["here"], found["plan"])
    assert "mesh does not fit" in preflight.device_lines(resolve(config), Devices(), shown)[0][1]


def test_a_plan_says_what_keeps_memory_on_cpus(monkeypatch):
    run = resolve(get_config("nano"))
    for library, said in (
        (None, "apt-get install libtcmalloc-minimal4"),
        ("libtcmalloc.so.4", "kept by libtcmalloc.so.4"),
    ):
        monkeypatch.setattr(preflight, "tcmalloc", lambda library=library: library)
        rows = dict(preflight.device_lines(run, Devices(), preflight.Findings()))
        assert said in rows["memory on the CPU"]
        rows = dict(preflight.device_lines(run, Devices(trainer=("0",), engine=("1",)), preflight.Findings()))
        assert "memory on the CPU" not in rows


def test_a_nano_base_that_lacks_words_of_the_world_is_refused(tmp_path):
    """A world whose words had changed was played by a base that read and wrote them as <unk>."""
    world = Sokoban(rows=6, columns=6, boxes=1)
    words = world.vocabulary()
    config = sokoban.get_config("nano")
    config.model.path = str(tmp_path / "base")
    found = {}
    for name, known in (("all", words), ("more", (*words, "further")), ("fewer", words[1:])):
        build_tokenizer(known, tmp_path / "base")
        texts = inspect_run(resolve(config), 1, None)["problems"]
        found[name] = [text for text in texts if "of the tasks' words" in text]
    assert found["all"] == found["more"] == []
    texts = inspect_run(resolve(config), 1, tmp_path / "checkpoints")["problems"]
    assert not any("words" in text for text in texts), "a run goes on with its base"
    assert re.search(f"config.model.path is .*base', .* lacks 1 of .* as {words[0]!r}: remove", found["fewer"][0])


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_run_that_goes_on_with_such_a_base_has_a_note(tmp_path, monkeypatch, goes_on):
    config = sokoban.get_config("nano")
    config.model.path = str(tmp_path / "base")
    build_tokenizer(Sokoban().vocabulary()[1:], tmp_path / "base")
    folder = str(tmp_path / "checkpoints") if goes_on else None
    request = {"config": config.to_dict(), "devices": 1, "checkpoints": folder, "platform": "cpu"}
    monkeypatch.setattr(probe, "inspect_run", lambda *_: {"problems": [], "here": []})  # there is a tokenizer alone
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(sys, "stdout", answer := io.StringIO())
    probe.main()
    notes = json.loads(answer.getvalue())["notes"]
    assert sum("lacks 1 of the tasks' words" in text for text in notes) == goes_on


class Named(Sokoban):
    """Has a word for its number of rows."""

    def vocabulary(self):
        return (*super().vocabulary(), f"rows{self.options.rows}")


def test_sources_may_add_no_words_to_a_base_that_is_still_to_be_made(tmp_path):
    """It would be made with the words of config.env.options, and be refused at the next launch."""
    config = sokoban.get_config("nano")
    config.env.name, config.model.path = f"{__name__}:Named", str(tmp_path / "base")
    found = {}
    for rows in (config.env.options.rows, 7):
        config.env.sources = {"one": {}, "other": {"options": {"rows": rows}}}
        texts = inspect_run(resolve(config), 1, None)["problems"]
        found[rows] = [text for text in texts if "of the tasks' words" in text]
    assert found.pop(7)[0].endswith("such as 'rows7': give config.env.sources options that add no words")
    assert list(found.values()) == [[]]


@pytest.mark.parametrize(("most", "said"), [(10_000, True), (9_000, False), (11_000, False)])
def test_training_tasks_that_are_never_played_are_noted(tmp_path, most, said):
    """The default cut a file of one's own, and nothing said so."""
    rows = ({"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(12_000))
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = get_config("nano")
    config.env.name, config.env.options = "flowjax.envs.math:Math", {"path": str(tmp_path / "all.jsonl")}
    config.env.train_tasks, config.eval.tasks = most, 0
    notes = list(notes_on_tasks(config))
    assert len(notes) == said
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / "test.jsonl").write_text(json.dumps({"question": "What is 1 + 1?", "answer": "2"}))
    config.env.options, config.eval.versions = {"path": str(tmp_path / "held_out")}, (3,)
    assert not list(notes_on_tasks(config)), "data of an evaluation need no training tasks"
    assert all(re.search(r"train_tasks is 10,000, of 10,\d\d\d training tasks: the others are", text) for text in notes)
