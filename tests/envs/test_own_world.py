"""The world of docs/worlds/own.md is played as the page says, and what is wrong with a world is said in one line."""

import asyncio
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from flowjax.config import default_config
from flowjax.envs import EnvDied, Past, World, WorldError, find_world
from flowjax.envs.demonstrations import demonstrations
from flowjax.envs.pool import EnvPool
from flowjax.launch.__main__ import read_request
from flowjax.launch.probe import inspect_run
from flowjax.launch.trial import check_episode
from flowjax.models.nano import build_tokenizer
from flowjax.records import Task
from flowjax.run import resolve

ROOT = Path(__file__).parent.parent.parent


BROKEN = """
import json
import os
import random
import threading
from dataclasses import dataclass, replace
from flowjax.envs import World
from flowjax.workflows import Played
from flowjax.workflows.single import play as play_alone
from countdown import Countdown, CountdownEnv

async def play(task, *, seed, env, agents, options):
    return await env.reset(task, seed)

async def idle(task, *, seed, env, agents, options):
    return Played([], {"success": 0.0}, "ok")

async def aborted(task, *, seed, env, agents, options):
    return Played([], {}, "cancelled")

async def graded(task, *, seed, env, agents, options):
    played = await play_alone(task, seed=seed, env=env, agents=agents, options=options)
    return replace(played, outcome={**played.outcome, "success": -1.0})

async def turnless(task, *, seed, env, agents, options):
    played = await play_alone(task, seed=seed, env=env, agents=agents, options=options)
    return replace(played, parts=[])

async def successes(task, *, seed, env, agents, options):
    played = await play_alone(task, seed=seed, env=env, agents=agents, options=options)
    return played if played.outcome["success"] else replace(played, parts=[])

class Easy(Countdown):
    def env(self): return EasyEnv()

class EasyEnv(CountdownEnv):
    def step(self, action):
        step = super().step(action)
        return replace(step, outcome={**step.outcome, "success": 1.0}) if step.valid else step

class Hard(Countdown):
    def env(self): return HardEnv()

class HardEnv(CountdownEnv):
    def step(self, action):
        step = super().step(action)
        return replace(step, outcome={**step.outcome, "success": 0.0}) if step.valid else step

class NoTasks(World):
    def env(self): ...

class Fails(World):
    def env(self): return 1 / 0
    def tasks(self, split): ...

class Mute(World):
    def env(self): return CountdownEnv()
    def tasks(self, split, data_seed): ...

class Stuck(Countdown):
    def env(self): return StuckEnv()

class StuckEnv(CountdownEnv):
    def step(self, action): return super().step(action.split()[1])

class Forgetful(Countdown):
    OUTCOMES = ("success", "reached")

class Negative(Countdown):
    def env(self): return NegativeEnv()

class NegativeEnv(CountdownEnv):
    def step(self, action):
        step = super().step(action)
        return replace(step, observation=replace(step.observation, state_key=-5)) if step.valid else step

class Endless(Countdown):
    def env(self): return EndlessEnv()

class EndlessEnv(CountdownEnv):
    def step(self, action):
        step = super().step(action)
        return replace(step, reward=float("nan")) if step.valid else step

class Worded(Countdown):
    def env(self): return WordedEnv()

class WordedEnv(CountdownEnv):
    def step(self, action):
        step = super().step(action)
        return replace(step, outcome={**step.outcome, "success": "yes"}) if step.valid else step

class Graded(Countdown):
    def env(self): return GradedEnv()

class GradedEnv(CountdownEnv):
    def step(self, action):
        step = super().step(action)
        return replace(step, outcome={**step.outcome, "success": 0.75}) if step.valid else step

class Spelt(Countdown):
    def env(self): return SpeltEnv()

class SpeltEnv(CountdownEnv):
    legal = "updown"
    def reset(self, task, seed): return replace(super().reset(task, seed), legal_actions=self.legal)

class Numbered(Countdown):
    def env(self): return NumberedEnv()

class NumberedEnv(SpeltEnv):
    legal = (1, 2)

class Growing(Countdown):
    def env(self): return GrowingEnv()

class GrowingEnv(CountdownEnv):
    taken = 0
    def step(self, action):
        self.taken += 1
        step = super().step(action)
        return replace(step, observation=replace(step.observation, state_key=self.taken))

class Addressed(Countdown):
    def env(self): return AddressedEnv()

class AddressedEnv(CountdownEnv):
    def reset(self, task, seed): return replace(super().reset(task, seed), state_key=os.getpid())

class Lucky(Countdown):
    def env(self): return LuckyEnv()

class LuckyEnv(CountdownEnv):
    def __init__(self): self.luck = random.getrandbits(60)
    def reset(self, task, seed): return replace(super().reset(task, seed), state_key=self.luck)

class Hashed(Countdown):
    def env(self): return HashedEnv()

class HashedEnv(CountdownEnv):
    def reset(self, task, seed): return replace(super().reset(task, seed), state_key=hash("a state") % 2**63)

class Fragile(Countdown):
    def env(self): return FragileEnv()

class FragileEnv(CountdownEnv):
    def step(self, action): return super().step(action[:len(action) and 1 / 0])

class Hanging(Countdown):
    def env(self): return HangingEnv()

class HangingEnv(CountdownEnv):
    def step(self, action): threading.Event().wait()

class Picky(Countdown):
    @dataclass(frozen=True)
    class Options:
        numbers: int = 3
        def __post_init__(self):
            if self.numbers > 2: raise ValueError("too many")

class Unread(Countdown):
    def tasks(self, split, data_seed): return json.loads("")

class Away(Countdown):
    def tasks(self, split, data_seed): return open("no such file")

class Empty(Countdown):
    def tasks(self, split, data_seed): return super().tasks(split, data_seed)[:0]

class Renamed(Countdown):
    def tasks(self, split, data_seed):
        return super().tasks(split, data_seed).map_with_index(lambda index, task: replace(task, **self.other(index)))

class Shared(Countdown):
    def tasks(self, split, data_seed): return super().tasks("train", data_seed)

class Anonymous(Renamed):
    def other(self, index): return {"task_id": "countdown"}

class Drawn(Renamed):
    def other(self, index): return {"payload": {"target": random.random(), "numbers": [1, 2]}}

class Mixed(Renamed):
    def other(self, index): return {"world": f"countdown{index % 2}"}

class Odd(Countdown):
    def tasks(self, split, data_seed):
        return super().tasks(split, data_seed).map_with_index(lambda index, task: {} if index == 3 else task)

class Untaught(Countdown):
    expert, vocabulary = World.expert, World.vocabulary
"""


@pytest.fixture
def countdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[World]:
    page = (ROOT / "docs" / "worlds" / "own.md").read_text()
    world, recipe = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "countdown.py").write_text(world)
    (tmp_path / "countdown_recipe.py").write_text(recipe)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "unfinished.py").write_text("class Half(")
    monkeypatch.syspath_prepend(tmp_path)
    return find_world("countdown:Countdown")


def test_the_page_s_world_is_played(countdown: type[World]):
    world = countdown(numbers=2)
    rng = np.random.default_rng(0)

    async def episodes() -> list[float]:
        source, rewards = world.tasks("train", 0), []
        async with EnvPool() as pool, pool.session("countdown:Countdown", {"numbers": 2}) as env:
            for index in range(20):
                task = source[index]
                assert task is not None
                observation = await env.reset(task, 0)
                [message] = world.prompt(observation, [Past(1, observation.view, "")], "instruct")
                assert f"Target: {task.payload['target']}." in message["content"]
                assert not (await env.step("1 / 0")).valid
                reply = f"<think>a guess</think><action>{world.random_action(observation, rng)}</action>"
                step = await env.step(world.parse_action(reply, observation.legal_actions) or "")
                assert step.valid and step.terminal
                assert (
                    step.reward
                    == step.outcome["success"]
                    == (step.observation.view.numbers == (observation.view.target,))
                )
                rewards.append(step.reward)
        return rewards

    assert 0 < sum(asyncio.run(episodes())) < 20


def test_the_page_s_expert_is_right_and_speaks_in_words_of_the_vocabulary(countdown: type[World]):
    world, rng = countdown(), np.random.default_rng(0)
    walk = demonstrations(
        world, world.tasks("train", 0)[:50], path_noise=0.3, label_noise=0.3, max_turns=2, style="compact", rng=rng
    )
    words = set(world.vocabulary())
    for [([message], reply)] in itertools.islice(walk, 200):
        assert words >= {*message["content"].split(), *reply.split()} and len(reply.split()) == 3
    env, tasks = world.env(), world.tasks("held_out", 0)
    for index in range(50):
        task = tasks[index]
        assert task is not None
        env.reset(task, 0)
        assert [env.step(world.expert(env)).reward for _ in range(2)] == [0.0, 1.0]


def test_a_dry_run_takes_the_page_s_nano_command(countdown: type[World], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "worlds" / "own.md").read_text().replace("\\\n", "")
    [command] = re.findall(r"flowjax.launch (--config=\S+:nano .*)", page)
    found = inspect_run(read_request([*command.split(), "--dry_run"]).run, 1, None)
    assert found["problems"] == found["here"] == []


def test_a_dry_run_takes_the_page_s_recipe(countdown: type[World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "worlds" / "own.md").read_text()
    commands = re.findall(r"flowjax.launch (--config=countdown_recipe.py\S*)(?: --dry_run --devices=(\d))?", page)
    for command, devices in commands:
        assert inspect_run(read_request([command, "--dry_run"]).run, int(devices or 1), None)["problems"] == []
    assert len(commands) == 2


def test_what_is_held_out_is_not_trained_on_under_any_seed(countdown: type[World]):
    def contents(split) -> set:
        sources = [countdown().tasks(split, seed) for seed in range(3)]
        found = [source[index] for source in sources for index in range(100)]
        return {(task.payload["target"], *sorted(task.payload["numbers"])) for task in found if task}

    assert not contents("train") & contents("held_out")


def test_a_wrong_option_is_named(countdown: type[World]):
    with pytest.raises(
        WorldError, match=r"env\.options\.number is no option of Countdown \(did you mean 'numbers'\?\)"
    ):
        countdown(number=2)
    with pytest.raises(WorldError, match=r"env\.options\.numbers is 'two': give a whole number"):
        countdown(numbers="two")


def problems(**changes) -> list[str]:
    """The dry run's, of a config whose world and reward are these."""
    config = default_config()
    config.env.name, config.reward.components = "countdown:Countdown", {"success": 1.0}
    for path, value in changes.items():
        section, name = path.split("__")
        config[section][name] = value
    return [
        text
        for text in inspect_run(resolve(config), 1, None)["problems"]
        if any(word in text for word in ("env", "nano", "structured"))
    ]


def test_a_dry_run_names_what_is_wrong_in_one_line(countdown: type[World]):
    assert problems() == []
    [wrong] = problems(env__options={"largest": 0.5})
    assert wrong == "config.env.options.largest is 0.5: give a whole number"
    [wrong] = problems(env__name="countdown")
    assert wrong.startswith("config.env.name is 'countdown', but countdown has no world '' (it has Countdown): give")
    [wrong] = problems(env__name="countdown:CountdownEnv")
    assert "has no world 'CountdownEnv' (it has Countdown)" in wrong
    expert, words = problems(env__name="broken:Untaught", model__nano={}, model__path="nowhere")
    assert "broken:Untaught has no expert() to imitate: write one" in expert
    assert "Untaught has no vocabulary() of compact prompts: write one" in words
    [wrong] = problems(rollout__structured_outputs=True)
    assert "countdown:Countdown has no structured_outputs()" in wrong


def test_a_dry_run_names_what_a_broken_world_lacks(countdown: type[World]):
    [wrong] = problems(env__name="unfinished:Half")
    assert "'unfinished:Half', which cannot be imported (SyntaxError: '(' was never closed" in wrong
    [wrong] = problems(env__name="broken:NoTasks")
    assert wrong == "config.env.name is 'broken:NoTasks', but NoTasks lacks tasks: write it"
    env, *tasks = problems(env__name="broken:Fails")
    assert re.fullmatch(
        r"config.env.options is {}, with which broken:Fails fails \(ZeroDivisionError: division by zero, "
        r"at broken.py line \d+\): mend it",
        env,
    )
    assert len(tasks) == 2 and all("broken:Fails', whose tasks('" in text and "TypeError" in text for text in tasks)


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ("Picky", "config.env.options is {}, which Picky does not take (ValueError: too many): change it"),
        (
            "Unread",
            "whose tasks('train', ...) fails (JSONDecodeError: Expecting value: line 1 column 1 (char 0), at broken.py",
        ),
        ("Empty", "config.env.name is 'broken:Empty', whose tasks('held_out', ...) has no task: make it of"),
        ("Shared", "tasks('held_out', ...)[0] is 'countdown-train-0-0', with the payload of the training task"),
        ("Anonymous", "tasks('train', ...)[1] has the task_id 'countdown' of a task with another payload: give it its"),
        ("Drawn", "whose tasks('train', ...)[0] is another task when it is read again: make it from data_seed and"),
        ("Mixed", "whose tasks have the Task.world 'countdown0' and 'countdown1': give all of them the same"),
        ("Odd", "whose tasks('train', ...)[3] is a dict: make it of flowjax.records.Task"),
    ],
)
def test_a_dry_run_names_the_field_of_what_a_world_raises(countdown: type[World], world: str, message: str):
    assert any(message in text for text in problems(env__name=f"broken:{world}"))


def test_a_file_that_is_not_there_is_a_fault_of_this_machine(countdown: type[World]):
    config = default_config()
    config.env.name, config.reward.components = "broken:Away", {"success": 1.0}
    found = inspect_run(resolve(config), 1, None)
    assert any("broken:Away', whose tasks('train', ...) fails (FileNotFoundError: " in text for text in found["here"])
    assert not any("broken:Away" in text for text in found["problems"])


@pytest.mark.parametrize(
    ("world", "workflow", "error"),
    [
        ("countdown:Countdown", "flowjax.workflows.single:play", ""),
        ("broken:Stuck", "flowjax.workflows.single:play", "IndexError: list index out of range"),
        ("broken:Forgetful", "flowjax.workflows.single:play", "turn 1 has success, but not reached: name all of Forge"),
        ("broken:Negative", "flowjax.workflows.single:play", "the state_key of turn 1 is -5: make it with flowjax.rec"),
        ("broken:Endless", "flowjax.workflows.single:play", "the reward of turn 1 is nan: give a finite number"),
        ("broken:Worded", "flowjax.workflows.single:play", "outcome success of turn 1 is 'yes': give a finite number"),
        (
            "broken:Growing",
            "flowjax.workflows.single:play",
            "on turn 1 and, on one env object again, ",
        ),
        (
            "broken:Addressed",
            "flowjax.workflows.single:play",
            "and, on a new env object of another process, ",
        ),
        ("broken:Lucky", "flowjax.workflows.single:play", "and, on a new env object of another process, "),
        ("broken:Fragile", "flowjax.workflows.single:play", "at random: ZeroDivisionError: division by zero, at b"),
        ("broken:Graded", "flowjax.workflows.single:play", "turn 1 has success 0.75: make it 1 or 0, and give a grade"),
        (
            "countdown:Countdown",
            "broken:graded",
            "every reply is empty fails (env_error: ValueError: it ended with success -1.0: make it 1 or 0, and",
        ),
        ("broken:Spelt", "flowjax.workflows.single:play", "has the legal_actions 'updown': give a tuple of texts, or"),
        ("broken:Numbered", "flowjax.workflows.single:play", "has the legal_actions (1, 2): give a tuple of texts, or"),
        ("broken:Hanging", "flowjax.workflows.single:play", "fails (timeout: the environment took too long): mend it"),
        ("countdown:Countdown", "broken:play", "TypeError: config.workflow returned Observation"),
        ("countdown:Countdown", "broken:idle", "of which no episode asks an agent, so that nobody could learn: call"),
        ("broken:Easy", "broken:turnless", "an episode that succeeded by valid actions alone has no turn: return a"),
        ("countdown:Countdown", "broken:aborted", "fails (status 'cancelled', no error): mend it"),
    ],
)
def test_an_episode_of_ones_own_is_played_before_engines_start(
    countdown: type[World], world: str, workflow: str, error: str
):
    config = default_config()
    config.env.name, config.workflow, config.reward.components = world, workflow, {"success": 1.0}
    if world == "broken:Hanging":
        config.env.step_timeout_s = 1.0
    found = list(check_episode(resolve(config), [], limit_s=3600.0))
    assert len(found) == bool(error) and all(world in text and workflow in text and error in text for text in found)


@pytest.mark.parametrize("workflow", ["turnless", "successes"])
def test_a_workflow_may_leave_out_episodes_that_fail(countdown: type[World], workflow: str):
    """One random episode that failed was taken for all."""
    config = default_config()
    config.env.name, config.workflow, config.reward.components = "broken:Hard", f"broken:{workflow}", {"success": 1.0}
    notes: list[str] = []
    assert not list(check_episode(resolve(config), notes, limit_s=3600.0))
    (note,) = notes
    assert "of which no episode of the trial has a turn" in note and "If no episode ever has one, nobody learns" in note


@pytest.mark.parametrize(("limit", "refused"), [(8, True), (1024, False)])
def test_first_prompts_over_the_limit_are_refused(countdown: type[World], tmp_path: Path, limit: int, refused: bool):
    build_tokenizer(countdown().vocabulary(), tmp_path / "base")
    config = default_config()
    config.env.name, config.reward.components = "countdown:Countdown", {"success": 1.0}
    config.model.path, config.rollout.max_prompt_tokens = str(tmp_path / "base"), limit
    found = list(check_episode(resolve(config), [], limit_s=3600.0))
    assert len(found) == refused
    assert all(
        re.search("first prompts have [0-9]+ tokens or more, but .*max_prompt_tokens is 8", text) for text in found
    )


def test_worlds_that_key_states_by_hash_have_the_same_keys_in_every_worker(countdown: type[World]):
    async def key() -> int:
        async with EnvPool() as pool, pool.session("broken:Hashed", {}) as env:
            return (await env.reset(Task("t", "countdown", 0, {"target": 1, "numbers": [1, 2]}), 0)).state_key

    assert asyncio.run(key()) == asyncio.run(key())


def test_a_view_of_another_type_costs_the_episode_and_says_so(countdown: type[World]):
    async def episode() -> str:
        async with EnvPool() as pool, pool.session("broken:Mute", {}) as env:
            with pytest.raises(EnvDied) as died:
                await env.reset(Task("t", "countdown", 0, {"target": 1, "numbers": [1, 2]}), 0)
            return str(died.value)

    assert asyncio.run(episode()) == "TypeError: an observation has a view of View, but the world's View is str"
