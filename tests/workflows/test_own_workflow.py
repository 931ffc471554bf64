"""The workflow of docs/workflows.md is played as the page says, and a launch finds nothing wrong with it."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from flowjax.launch.__main__ import read_request
from flowjax.launch.probe import inspect_run
from flowjax.models.nano import build_tokenizer
from flowjax.workflows import Played, single
from flowjax.workflows.codec import Codec
from tests.workflows.scripted import play_scripted
from tests.workflows.test_single import CORRIDOR, WORLD

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "workflows.md").read_text()


@pytest.fixture
def in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    whole, judge = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "in_turn.py").write_text(f"{whole}\n\n{judge}")
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("in_turn")


@pytest.mark.parametrize(
    ("replies", "most", "turns", "finished"),
    [
        ("right right right", 12, {"first": 2, "second": 1}, {"first": 1.0, "second": 0.0}),
        ("right up right right", 12, {"first": 2, "second": 2}, {"first": 0.0, "second": 1.0}),
        ("right", 1, {"first": 1}, {"first": 0.0}),
    ],
)
def test_the_page_s_workflow_is_played(in_turn: ModuleType, tmp_path: Path, replies, most, turns, finished):
    build_tokenizer(WORLD.vocabulary(), tmp_path)
    played, _ = play_scripted(
        in_turn.play,
        CORRIDOR,
        world=WORLD,
        codec=Codec(tmp_path),
        agents=in_turn.AGENTS,
        replies=replies.split(),
        max_turns=most,
    )
    assert {part.agent: len(part.turns) for part in played.parts} == turns
    assert {part.agent: part.outcome["finished"] for part in played.parts} == finished
    assert played.status == "ok" and played.outcome["success"] == sum(finished.values())
    assert all(turn.policy == part.agent for part in played.parts for turn in part.turns)


def test_a_prompt_that_is_too_long_ends_it_with_what_was_played(in_turn: ModuleType, tmp_path: Path):
    build_tokenizer(WORLD.vocabulary(), tmp_path)
    codec = Codec(tmp_path, max_prompt_tokens=1)
    played, _ = play_scripted(in_turn.play, CORRIDOR, world=WORLD, codec=codec, agents=in_turn.AGENTS, replies=[])
    assert played.status == "truncated" and not played.parts and played.outcome["success"] == 0.0


@pytest.mark.parametrize(("said", "score", "valid"), [("right", 0.0, False), ("yes", 1.0, True), ("no", 0.0, True)])
def test_the_page_s_judge_has_a_turn(in_turn: ModuleType, tmp_path: Path, said: str, score: float, valid: bool):
    build_tokenizer((*WORLD.vocabulary(), "yes", "no"), tmp_path)

    async def play(task, *, seed, env, agents, options):
        observation = await env.reset(task, seed)
        return Played([await in_turn.judge(agents["judge"], observation, True, options)], {"success": 1.0}, "ok")

    codec = Codec(tmp_path)
    played, _ = play_scripted(play, CORRIDOR, world=WORLD, codec=codec, agents=("judge",), replies=[said])
    [part] = played.parts
    [turn] = part.turns
    assert part.outcome["success"] == turn.env_reward == score and turn.valid == valid and turn.terminal


def test_a_launch_takes_the_page_s_command(in_turn: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    [command] = re.findall(
        r"flowjax.launch (--config=\S+ --config.workflow=in_turn.*) --name", PAGE.replace("\\\n", "")
    )
    arguments = [text.replace('"', "") for text in re.findall(r'(?:"[^"]*"|[^\s"])+', command)]
    rewarded = "--config.reward.components.finished={'path': 'tests.test_rewards:doubled', 'weight': 0.1}"
    found = inspect_run(read_request([*arguments, "--dry_run"]).run, 1, None)
    assert found["problems"] == found["here"] == []
    assert inspect_run(read_request([*arguments, rewarded, "--dry_run"]).run, 1, None)["problems"] == []


def test_a_dry_run_names_the_line_that_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "half_written.py").write_text("AGENTS = ('agent',)\nasync def play(task\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    arguments = ["--config=configs/sokoban.py:nano", "--config.workflow=half_written:play", "--dry_run"]
    problems = inspect_run(read_request(arguments).run, 1, None)["problems"]
    assert any(text.endswith("half_written.py, line 2: '(' was never closed: mend it") for text in problems)


def test_all_workflows_are_listed_with_their_agents():
    listed = dict(re.findall(r"^\| `(flowjax\.workflows\.\w+):play`.*? \| (.*?) \|", PAGE, re.MULTILINE))
    folder = Path(single.__file__).parent
    modules = [importlib.import_module(f"flowjax.workflows.{path.stem}") for path in folder.glob("[!_]*.py")]
    assert {
        module.__name__: ", ".join(f"`{agent}`" for agent in module.AGENTS)
        for module in modules
        if hasattr(module, "play")
    } == listed


PLAIN = "AGENTS = ('agent',)\nasync def play(task, *, seed, env, agents, options):\n    'caf\xe9'\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin", PLAIN.encode("latin-1"), "latin.py, line 3: (unicode error) 'utf-8' codec can't decode byte"),
        (
            "with_a_zero",
            PLAIN.encode() + b"\0",
            "with_a_zero.py: source code string cannot contain null bytes",
        ),
        ("told", b"# -*- coding: latin-1 -*-\n" + PLAIN.encode("latin-1"), ""),
    ],
)
def test_a_file_that_is_not_utf_8_is_named_unless_it_says_what_it_is(
    name: str, content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / f"{name}.py").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    arguments = ["--config=configs/sokoban.py:nano", f"--config.workflow={name}:play", "--dry_run"]
    problems = inspect_run(read_request(arguments).run, 1, None)["problems"]
    assert any(message in text for text in problems) if message else problems == []
