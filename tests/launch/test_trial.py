"""Own worlds and workflows in a launch's trial: right ones of any kind pass, and what would harm a run is named."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowjax.config import default_config
from flowjax.launch import preflight
from flowjax.launch.command_line import load_recipe
from flowjax.launch.trial import check_episode, check_tasks
from flowjax.models.nano import build_tokenizer
from flowjax.run import resolve

ROOT = Path(__file__).parents[2]
COUNTER = '''
import fcntl
import functools
from dataclasses import dataclass, replace
from flowjax.envs import Observation, Step, World
from flowjax.records import Task, state_key

class Counter(World):
    """State: the task's number and the actions so far."""

    def env(self): return CounterEnv()

    def tasks(self, split, data_seed):
        import grain
        return grain.MapDataset.range(1000).map(functools.partial(self.task, split))

    def task(self, split, index):
        number = 2 * int(index) + (split == "held_out")
        return Task(f"{split}-{number}", "counter", index, {"number": number})

class CounterEnv:
    def reset(self, task, seed):
        self.number, self.taken = task.payload["number"], 0
        return self.observe()

    def step(self, action):
        valid = action in ("up", "down")
        self.taken += valid
        won = float(self.taken == 2 and action == "up")
        return Step(self.observe(), won, self.taken >= 2, valid, {"success": won})

    def observe(self):
        return Observation(f"{self.number} {self.taken}", ("up", "down"), state_key(self.number, self.taken))

class Unlike(Counter):
    """Views that do not equal themselves, and hold NaN."""

    @dataclass(frozen=True, eq=False)
    class View:
        number: int
        reading: float

    def env(self): return UnlikeEnv()

class UnlikeEnv(CounterEnv):
    def observe(self):
        return replace(super().observe(), view=Unlike.View(self.number, float("nan")))

class Keyless(Counter):
    def env(self): return KeylessEnv()

class KeylessEnv(CounterEnv):
    def observe(self):
        return replace(super().observe(), state_key=7)

class Drifting(Counter):
    """Each step of a process differs from the one before it in `valid`, `success` and a count of steps."""

    @dataclass(frozen=True)
    class Options:
        part: str = ""

    OUTCOMES, COUNTS = ("success", "steps"), ("steps",)
    def env(self): return DriftingEnv(self.options.part)

class DriftingEnv(CounterEnv):
    def __init__(self, part): self.part, self.steps = part, 0

    def step(self, action):
        step, odd = super().step(action), self.steps % 3 == 1
        self.steps += 1
        valid = odd if self.part == "valid" else step.valid
        success = float(odd if self.part == "success" else step.outcome["success"])
        return replace(step, valid=valid, outcome={"success": success, "steps": self.steps})

class Shut(Counter):
    def env(self): return ShutEnv()

class ShutEnv(CounterEnv):
    def reset(self, task, seed): return 1 / 0

class Stale(Counter):
    """An environment object keeps the first task that it had."""
    def env(self): return StaleEnv()

class StaleEnv(CounterEnv):
    first = None

    def reset(self, task, seed):
        self.first = self.first or task
        return super().reset(self.first, seed)

class Locked(Counter):
    """A simulator of which one process alone can have one, as at a fixed port."""

    def env(self): return LockedEnv()

class LockedEnv(CounterEnv):
    lock = None

    def reset(self, task, seed):
        if LockedEnv.lock is None:
            LockedEnv.lock = open(__file__)
            fcntl.flock(LockedEnv.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return super().reset(task, seed)
'''

TASKS = '''
from dataclasses import replace
from own_counter import Counter
from flowjax.records import Task

class Changed(Counter):
    def task(self, split, index):
        return replace(super().task(split, index), **self.other(split, int(index)))

class Again(Changed):
    """Ids begin again in each split."""
    def other(self, split, index): return {"task_id": f"task-{index}"}

class Game(Changed):
    def other(self, split, index): return {"task_id": "game", "seed": 0, "payload": {"number": 3}}

class Worded(Changed):
    def other(self, split, index):
        return {"payload": {"number": 2 * index + (split == "held_out"), "content": "words"}}

class Late(Counter):
    """All tasks are trained on, and the last ones are held out, too."""
    def tasks(self, split, data_seed):
        tasks = super().tasks("train", data_seed)
        return tasks if split == "train" else tasks[900:]

class LaterSame(Changed):
    """From the ninth task on what is held out is trained on, too."""
    def other(self, split, index): return {"payload": {"number": 2 * index + (split == "held_out" and index < 8)}}

class Nameless(Changed):
    def other(self, split, index): return {"task_id": f"task-{index}", "payload": {}}
'''

WORKFLOWS = '''
from dataclasses import replace
from flowjax.workflows import Agent, AgentTurns, Played
from flowjax.workflows.codec import PromptTooLong
from flowjax.workflows.single import play, take_turn

class Twice(Agent):
    """Shows the prompt twice where there is room."""

    def __init__(self, agent): self.agent = agent

    async def act(self, messages, *, after=None):
        try:
            return await self.agent.act([*messages, *messages])
        except PromptTooLong:
            return await self.agent.act(messages)

async def acted(task, *, seed, env, agents, options):
    """Turns without an action are left out, and so are parts without a turn."""
    played = await play(task, seed=seed, env=env, agents=agents, options=options)
    parts = [replace(part, turns=[turn for turn in part.turns if turn.valid]) for part in played.parts]
    return replace(played, parts=[part for part in parts if part.turns])

async def broken(task, *, seed, env, agents, options):
    played = await acted(task, seed=seed, env=env, agents=agents, options=options)
    return played if not played.parts else 1 / 0

async def fragile(task, *, seed, env, agents, options):
    """Fails where the episode was won."""
    played = await play(task, seed=seed, env=env, agents=agents, options=options)
    return replace(played, outcome={**played.outcome, "bonus": 1 / (1 - played.outcome["success"])})

async def shortened(task, *, seed, env, agents, options):
    agents = {name: Twice(agent) for name, agent in agents.items()}
    return await play(task, seed=seed, env=env, agents=agents, options=options)

async def judged(task, *, seed, env, agents, options):
    """The second agent is asked, and never recorded."""
    played = await play(task, seed=seed, env=env, agents={"agent": agents["first"]}, options=options)
    await agents["second"].act([{"role": "user", "content": "up"}])
    return replace(played, parts=[replace(part, agent="first") for part in played.parts])

async def sure(task, *, seed, env, agents, options):
    """Reports how sure the agent was of the first token of each reply."""
    turns, outcome, sure = [], {}, []
    observation = await env.reset(task, seed)
    for _ in range(options.max_turns):
        messages = options.world.prompt(observation, [], options.prompt)
        move = await take_turn(agents["agent"], messages, observation, options=options, env=env)
        sure.append(float(move.reply.logprobs[0]))
        turns.append(move.turn)
        outcome |= move.step.outcome
        observation = move.step.observation
        if move.step.terminal:
            break
    outcome["sure"] = sum(sure) / len(sure)
    return Played([AgentTurns("agent", turns, outcome)], outcome, "ok")
'''


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_counter.py").write_text(COUNTER)
    (tmp_path / "own_play.py").write_text(WORKFLOWS)
    (tmp_path / "own_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)


def found(
    world: str = "Counter",
    workflow: str = "flowjax.workflows.single:play",
    *,
    base: Path | None = None,
    limit: int = 1024,
    others: Mapping[str, Any] | None = None,
    notes: list[str] | None = None,
    agents: Mapping[str, str] | Sequence[str] = (),
    limit_s: float = 3600.0,
    **env,
) -> list[str]:
    """Faults that the trial's episodes show. `base` is a folder for the tokenizer that the prompts' limit is for.
    `agents` says who speaks for each; of names alone, a policy of each name."""
    config = default_config()
    config.workflow = workflow
    config.env.name, config.reward.components = f"own_counter:{world}", {"success": 1.0}
    config.env.update(env)
    if base is not None:
        build_tokenizer(("up", "down", *map(str, range(2000))), base)
        config.model.path, config.rollout.max_prompt_tokens = str(base), limit
    config.bases = others or {}
    if agents:
        config.agents = agents if isinstance(agents, Mapping) else {name: name for name in agents}
        config.policies = {name: {} for name in config.agents.values() if name != "base"}
    return list(check_episode(resolve(config), [] if notes is None else notes, limit_s))


@pytest.mark.parametrize(("workers", "refused"), [(1, False), (2, True)])
def test_a_world_may_be_open_in_as_many_processes_as_the_run_will_have(workers: int, refused: bool):
    faults = found("Locked", workers=workers)
    assert len(faults) == refused and all(re.search("BlockingIOError.*: mend it", text) for text in faults)


def test_a_workflow_may_read_the_log_probs_of_a_reply():
    assert found(workflow="own_play:sure") == []


@pytest.mark.parametrize(("limit", "refused"), [(1, True), (3, False), (20, False)])
def test_a_workflow_may_shorten_a_prompt_that_is_too_long(limit: int, refused: bool, tmp_path: Path):
    faults = found(workflow="own_play:shortened", base=tmp_path / "base", limit=limit, prompt="compact")
    message = f"the first prompts have [0-9]+ tokens or more, but config.rollout.max_prompt_tokens is {limit}"
    assert len(faults) == refused and all(re.search(message, text) for text in faults)


def test_prompts_are_measured_by_the_base_that_reads_them(tmp_path: Path):
    others = {"judge": {"model": {"path": str(tmp_path / "elsewhere")}}}
    [fault] = found(base=tmp_path / "base", limit=1, others=others, prompt="compact")
    assert "the first prompts have 2 tokens or more" in fault


@pytest.mark.parametrize(("limit", "refused"), [(7, True), (96, False)])
def test_first_prompts_of_problems_in_a_file_are_measured_before_there_is_a_base(
    limit: int, refused: bool, tmp_path: Path
):
    problems = [{"question": f"What is {number} and {number}?", "answer": f"#### {2 * number}"} for number in range(99)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    config = load_recipe(f"{ROOT}/configs/math.py:nano_direct")
    config.env.options.path, config.model.path = str(tmp_path / "own.jsonl"), str(tmp_path / "base")
    config.rollout.max_prompt_tokens = limit
    faults = list(check_episode(resolve(config), []))
    message = f"the first prompts have [0-9]+ tokens or more, but config.rollout.max_prompt_tokens is {limit}"
    assert len(faults) == refused and all(re.search(message, text) for text in faults)


def test_a_workflow_may_leave_out_turns_without_an_action():
    assert found(workflow="own_play:acted") == []
    [fault] = found(workflow="own_play:broken")
    assert "an episode where every reply names a legal action fails (env_error: ZeroDivisionError" in fault


@pytest.mark.parametrize(("world", "turns"), [("Counter", 2), ("flowjax.envs.sokoban:Sokoban", 12)])
def test_a_workflow_is_seen_at_a_success(world: str, turns: int):
    """It was accepted, and each success was played again until there was none. Random moves solve hardly any room."""
    name = world if ":" in world else f"own_counter:{world}"
    (fault,) = found(workflow="own_play:fragile", name=name, max_turns=turns)
    assert "where every reply names a legal action fails (env_error: ZeroDivisionError" in fault


def test_an_agent_that_is_asked_and_never_recorded_is_a_note():
    notes: list[str] = []
    assert found(workflow="own_play:judged", agents=("first", "second"), notes=notes, limit_s=3600.0) == []
    [note] = notes
    assert "of which no episode of the trial has a turn of second, which was asked: " in note
    notes.clear()  # a base that is asked learns nothing
    speaks = {"first": "first", "second": "base"}
    assert found(workflow="own_play:judged", agents=speaks, notes=notes, limit_s=3600.0) == notes == []


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ("Again", ""),
        ("Game", ""),
        ("Worded", "tasks('held_out', ...)[0] is 'held_out-1', with the payload['content'] of the training task"),
        ("Late", "tasks('held_out', ...)[0] is 'train-1800', with the payload of the training task 'train-1800'"),
        ("Nameless", "tasks('held_out', ...)[0] is 'task-0', with the task_id of the training task 'task-0'"),
    ],
)
def test_a_task_is_held_out_by_its_payload(world: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flowjax.dataflow.tasks._READING_S", 3600.0)
    config = default_config()
    config.env.name = f"own_tasks:{world}"
    faults = list(check_tasks(config))
    assert len(faults) == bool(message) and all(message in text for text in faults)


def test_held_out_tasks_that_are_not_played_need_not_be_held_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flowjax.dataflow.tasks._READING_S", 3600.0)
    config = default_config()
    config.env.name = "own_tasks:LaterSame"
    config.eval.tasks = 8
    assert list(check_tasks(config)) == []
    config.eval.tasks = 9
    [fault] = check_tasks(config)
    assert "tasks('held_out', ...)[8] is 'held_out-17', with the payload of the training task 'train-16'" in fault


def test_one_key_for_all_states_is_a_note():
    """Credit by states compared unlike ones, and nothing said so."""
    notes: list[str] = []
    assert found("Keyless", notes=notes) == [] and "all states of an episode have one state_key" in notes[0]
    assert found("Counter", notes=notes) == [] and len(notes) == 1


def test_a_view_need_not_equal_itself():
    assert found("Unlike") == []


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("", ""),
        ("valid", "the same actions gave valid (True|False) on turn [12] and, on one env object again, (True|False)"),
        ("success", "the same actions gave outcome success [01].0 on turn [12] and, on one env object again, [01].0"),
    ],
)
def test_a_step_is_as_valid_and_as_successful_when_it_is_taken_again(part: str, message: str):
    faults = found("Drifting", options={"part": part})
    assert len(faults) == bool(message) and all(re.search(message, text) for text in faults)


def test_an_environment_object_plays_each_task_that_it_is_given():
    [fault] = found("Stale")
    assert "on turn 0 and, on a new env object of another process, " in fault


def test_a_trial_that_does_not_end_in_time_is_a_note_and_its_first_reset_has_other_time():
    notes: list[str] = []
    assert found("Stale", notes=notes, limit_s=0.0) == []
    [note] = notes
    assert "own_counter:Stale'" in note and "did not end within 0 s, so the rest of it is not checked" in note
    [fault] = found("Shut", notes=notes, limit_s=0.0)
    assert "where the first reset fails (ZeroDivisionError: division by zero, at " in fault and len(notes) == 1


def test_a_launch_prints_the_notes_of_its_probe(capsys: pytest.CaptureFixture[str]):
    answer = json.dumps({"problems": [], "here": [], "plan": {}, "notes": ["a trial did not end"]})
    probe = subprocess.Popen(
        ["echo", answer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert preflight._finish_probe(probe) == ([], [], {})
    assert capsys.readouterr().err == "a trial did not end\n"
