"""ALFWorld: the engine beside the stock one, state keys, the expert, tasks, data."""

import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

import grain
import numpy as np
import pytest
from fast_downward import interface
from stock_alfworld import StockGame
from textworld.logic import Proposition
from two_processes import printed_in_two_processes

from data.alfworld.build import build
from flowjax.envs import Observation, Split, WorldError
from flowjax.envs.alfworld import Alfworld, generate
from flowjax.envs.alfworld.engine import NOTHING_HAPPENS, Atom, Game, Playthrough
from flowjax.envs.alfworld.env import AlfworldEnv, Games
from flowjax.envs.alfworld.generate import TASK_TYPES, Spec, package
from flowjax.envs.alfworld.planner import loaded_bytes
from flowjax.envs.alfworld.world import GENERATED, AlfworldOptions, GeneratedTasks
from flowjax.envs.pool import EnvPool
from flowjax.records import Task

LIGHT = Spec(301, "look_at_obj_in_light", "CD", "DeskLamp", 3, 0.3)
COOL = Spec(12, "pick_cool_then_place_in_recep", "Apple", "CounterTop", 5, 0.1)
CLEAN = Spec(416, "pick_clean_then_place_in_recep", "Cloth", "Toilet", 1, 0.5)


@pytest.fixture(autouse=True)
def no_data_of_the_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)


def task_for(spec: Spec) -> Task:
    return Task(spec.folder, "alfworld", 0, spec.payload())


def begun(spec: Spec) -> tuple[AlfworldEnv, Observation]:
    env = Alfworld(path=GENERATED).env()
    return env, env.reset(task_for(spec), 0)


def take(source: grain.MapDataset[Task], index: int) -> Task:
    task = source[index]
    assert task is not None
    return task


def transcripts_agree(spec: Spec, steps: int, seed: int) -> None:
    """Playthrough one game on both engines: some moves the expert's, some at random, some that are no commands."""
    data = generate.game_file(spec)
    stock, play, rng = StockGame(data), Playthrough(), np.random.default_rng(seed)
    env, _ = begun(spec)
    play.load(Game(data, play.library))
    assert play.load(Game(data, play.library)) == stock.said
    for _ in range(steps):
        assert sorted(play.commands) == stock.commands
        assert play.won == stock.won
        if play.won:
            return
        if rng.random() < 0.1:
            assert stock.step("fly to the moon") == NOTHING_HAPPENS == env.step("").observation.view.seen
            assert sorted(play.commands) == stock.commands
        best = env.best_action()
        command = best if rng.random() < 0.6 else stock.commands[rng.integers(len(stock.commands))]
        assert play.obey(command) == stock.step(command)
        env.step(command)


@pytest.mark.parametrize("spec", [LIGHT, COOL, CLEAN])
def test_transcripts_are_those_of_the_stock_engine(spec: Spec):
    transcripts_agree(spec, 14, 0)


@pytest.mark.slow
def test_transcripts_are_those_of_the_stock_engine_in_many_games():
    tasks = GeneratedTasks("train", 5, AlfworldOptions())
    for index in range(24):
        transcripts_agree(Spec.read(tasks(index).payload), 40, index)


def engine_state(play: Playthrough) -> set[tuple[str, ...]]:
    """The changing facts as the planner's library holds them, read anew."""
    atoms = (Atom * play.library.get_state_size())()
    play.library.get_state(atoms)
    return play.game.changing(map(play.game.fact, atoms))


@pytest.mark.parametrize("spec", [LIGHT, COOL])
def test_keys_are_equal_exactly_where_the_engine_is_in_the_same_state(spec: Spec):
    rng = np.random.default_rng(1)
    env, _ = begun(spec)
    by_key: dict[int, frozenset] = {}
    for _ in range(12):
        observation = env.reset(task_for(spec), 0)
        for _ in range(25):
            state = frozenset(engine_state(env._play))
            assert state == frozenset(env._play.state)
            assert by_key.setdefault(observation.state_key, state) == state
            stray = Alfworld().random_action(observation, rng)
            observation = env.step(stray if rng.random() < 0.9 else env.best_action()).observation
    assert len(set(by_key.values())) == len(by_key) > 40


def key_after(env: AlfworldEnv, *actions: str) -> int:
    steps = [env.step(action) for action in actions]
    assert all(step.valid for step in steps)
    return steps[-1].observation.state_key


def opening(seed: int) -> tuple[AlfworldEnv, Task]:
    spec = Spec(12, "pick_cool_then_place_in_recep", "Apple", "CounterTop", seed, 0.1)
    return Alfworld(path=GENERATED).env(), task_for(spec)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_actions_leaves_no_trace_in_the_key(seed: int):
    env, task = opening(seed)
    doors = [f"drawer {1 + seed}", "fridge 1", "cabinet 2"]
    env.reset(task, 0)
    forwards = key_after(env, *[do for door in doors for do in (f"go to {door}", f"open {door}")], "go to microwave 1")
    env.reset(task, 0)
    backwards = [do for door in doors[::-1] for do in (f"go to {door}", "look", f"open {door}")]
    assert key_after(env, *backwards, "inventory", "go to microwave 1", "examine microwave 1") == forwards
    assert key_after(env, "open microwave 1") != forwards
    assert key_after(env, "close microwave 1") == forwards


def test_inventory_temperature_and_cleanness_are_in_the_key():
    env, task = opening(5)
    observation = env.reset(task, 0)
    while not any(action.startswith("take apple") for action in observation.legal_actions):
        observation = env.step(env.best_action()).observation
    pick = next(action for action in observation.legal_actions if action.startswith("take apple"))
    apple = pick.split(" from ")[0].removeprefix("take ")
    seen = [observation.state_key, key_after(env, pick)]
    seen += [key_after(env, f"go to {place}", f"{do} {apple} with {place}") for do, place in (
        ("heat", "microwave 1"), ("clean", "sinkbasin 1"), ("cool", "fridge 1"), ("heat", "microwave 1"))]  # fmt: skip
    at_one_place = [key_after(env, "go to fridge 1")]
    at_one_place += [key_after(env, f"cool {apple} with fridge 1")]
    assert len(set(seen)) == len(seen)  # hot and clean at the end, hot alone at first
    assert len(set(at_one_place)) == 2


def test_a_lamp_once_used_is_in_the_key():
    env, observation = begun(LIGHT)
    while "use desklamp 1" not in observation.legal_actions:
        go = [action for action in observation.legal_actions if action.startswith("go to")]
        desk = next(place for thing, place in ((f[1], f[2]) for f in env._play.state if f[0] == "inreceptacle")
                    if thing.startswith("desklamp"))  # fmt: skip
        names = env.loaded.game.entities
        observation = env.step(f"go to {names[desk].name}").observation
        assert go
    before = observation.state_key
    used = env.step("use desklamp 1")
    assert used.valid and used.observation.state_key != before
    assert used.outcome == {"success": 0.0, "conditions_met": 0.5}


def play_out(env: AlfworldEnv, task: Task, limit: int = 40) -> int:
    """Steps that the expert takes; fails where it does not win."""
    env.reset(task, 0)
    for number in range(1, limit + 1):
        step = env.step(Alfworld().expert(env))
        assert step.valid, step
        assert (step.reward, step.terminal) == (10.0 * step.outcome["success"], bool(step.outcome["success"]))
        assert (step.outcome["conditions_met"] == 1.0) == step.terminal
        if step.terminal:
            return number
    raise AssertionError(f"the expert loses {task}")


def test_the_expert_wins_four_games_of_each_kind():
    env = Alfworld(path=GENERATED).env()
    kinds = Counter()
    splits: tuple[Split, ...] = ("train", "held_out")
    tasks = {split: GeneratedTasks(split, 1, AlfworldOptions(clutter=0.2)) for split in splits}
    for index in range(24):
        task = tasks["held_out" if index % 12 < 6 else "train"](index)
        play_out(env, task)
        kinds[task.payload["task_type"]] += 1
    assert kinds == dict.fromkeys(TASK_TYPES, 4)


@pytest.mark.slow
def test_the_expert_wins_many_games_even_from_states_it_would_not_come_to():
    rng = np.random.default_rng(0)
    env = Alfworld(path=GENERATED).env()
    tasks = GeneratedTasks("held_out", 2, AlfworldOptions(held_out="seen"))
    for index in range(120):
        observation = env.reset(tasks(index), 0)
        for turn in range(120):
            stray = turn < 25 and rng.random() < 0.7
            step = env.step(Alfworld().random_action(observation, rng) if stray else Alfworld().expert(env))
            observation = step.observation
            if step.terminal:
                assert step.outcome["success"] == 1.0
                break
        else:
            pytest.fail("the game is not won within 120 turns")


def test_after_the_end_nothing_changes():
    env, _ = begun(CLEAN)
    play_out(env, task_for(CLEAN))
    before = frozenset(env._play.state)
    after = env.step("look")
    assert (after.reward, after.terminal, after.valid, after.outcome["success"]) == (0.0, True, False, 1.0)
    assert frozenset(env._play.state) == before


def test_help_is_not_offered_and_not_obeyed():
    env, observation = begun(CLEAN)
    assert "help" in env._play.commands
    assert "help" not in observation.legal_actions
    assert not env.step("help").valid


def test_environments_of_one_process_do_not_disturb_each_other():
    specs = [LIGHT, COOL, LIGHT, CLEAN, COOL]
    alone = []
    env = Alfworld(path=GENERATED).env()
    for seed, spec in enumerate(specs):
        rng = np.random.default_rng(seed)
        observation = env.reset(task_for(spec), 0)
        seen = [observation]
        for _ in range(15):
            seen.append(env.step(Alfworld().random_action(seen[-1], rng)).observation)
        alone.append(seen)
    envs = [begun(spec) for spec in specs]
    rngs = [np.random.default_rng(seed) for seed in range(len(specs))]
    together = [[observation] for _, observation in envs]
    for _ in range(15):
        for (env, _), rng, seen in zip(envs, rngs, together, strict=True):
            seen.append(env.step(Alfworld().random_action(seen[-1], rng)).observation)
    assert together == alone


def test_a_worker_process_plays_it():
    async def play() -> float:
        async with (
            EnvPool(workers=1) as pool,
            pool.session("flowjax.envs.alfworld:Alfworld", {"path": GENERATED}) as env,
        ):
            env_here, _ = begun(CLEAN)
            await env.reset(task_for(CLEAN), 0)
            for _ in range(20):
                action = env_here.best_action()
                step, here = await env.step(action), env_here.step(action)
                assert step == here
                if step.terminal:
                    return step.reward
        return 0.0

    assert asyncio.run(play()) == 10.0


def test_episodes_are_the_same_in_every_process():
    program = (
        "from flowjax.envs.alfworld import Alfworld\n"
        "from flowjax.envs.alfworld.world import GeneratedTasks, AlfworldOptions\n"
        "import numpy as np\n"
        "env = Alfworld(path='generated').env()\n"
        "tasks = GeneratedTasks('held_out', 7, AlfworldOptions(held_out='seen', clutter=0.3))\n"
        "for index in (1, 2):\n"
        "    task = tasks(index)\n"
        "    seen, rng = env.reset(task, 0), np.random.default_rng(0)\n"
        "    print(task, seen)\n"
        "    for turn in range(30):\n"
        "        print(env.step(Alfworld().expert(env) if turn % 3 == 0 else Alfworld().random_action(seen, rng)))\n"
        "print([tasks(index) for index in range(50)])\n"
    )
    printed = printed_in_two_processes(program)
    assert printed.count("Observation") > 60


def asked(task: Task) -> tuple:
    return tuple(task.payload[name] for name in ("scene", "task_type", "object", "target"))


@pytest.mark.parametrize("held_out", ["seen", "unseen"])
def test_what_is_held_out_is_never_asked_for_in_training(held_out: Literal["seen", "unseen"]):
    content: dict[Split, set] = {"train": set(), "held_out": set()}
    for split, known in content.items():
        for data_seed in range(10):
            source = GeneratedTasks(split, data_seed, AlfworldOptions(held_out=held_out))
            known.update(asked(source(index)) for index in range(300))
    assert not content["train"] & content["held_out"]
    assert min(map(len, content.values())) > 1000
    rooms = [{scene for scene, *_ in content[split]} for split in content]
    assert (not rooms[0] & rooms[1]) == (held_out == "unseen")


def test_generated_tasks_come_from_any_index_in_any_order():
    source = Alfworld().tasks("train", 0)
    forwards = [take(source, index) for index in range(12)]
    assert [take(source, index) for index in reversed(range(12))] == forwards[::-1]
    assert [task.payload["task_type"] for task in forwards[:6]] == list(TASK_TYPES)
    assert [task.kind for task in forwards[:6]] == list(TASK_TYPES)
    assert take(Alfworld().tasks("train", 1), 0) != forwards[0]
    assert len(source[:500]) == 500
    assert take(source, 1_999_999_999).task_id != forwards[0].task_id


def test_games_start_unwon_with_the_goal_within_reach():
    for index in range(300):
        spec = Spec.read(GeneratedTasks("train", 3, AlfworldOptions())(index).payload)
        things = generate.furnish(spec)
        wanted = [thing for thing in things if thing.kind == spec.object]
        assert len(wanted) >= (2 if spec.task_type == "pick_two_obj_and_place" else 1)
        assert all(thing.place.kind != spec.target for thing in wanted)
        assert len({thing.identity for thing in things}) == len(things)
        kinds = generate.floor_plan(spec.scene).kinds()
        lamps = {thing.kind for thing in things}
        assert spec.target in (lamps if spec.task_type == "look_at_obj_in_light" else kinds)


def test_all_120_floor_plans_are_used():
    used = {scene for split in ("train", "held_out") for scene in generate.scenes(split)}
    assert len(used) == 120
    assert all(any(generate.choices(scene, kind) for kind in TASK_TYPES) for scene in used)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alfworld")
    assert build(out, seed=3, counts={"train": 3, "valid_seen": 2, "valid_unseen": 2}) == {
        "train": 3,
        "valid_seen": 2,
        "valid_unseen": 2,
    }
    return out


def test_alfworld_itself_takes_the_data(data: Path):
    stock = StockGame.collect(data / "json_2.1.1" / "train")
    assert sorted(stock) == sorted(map(str, data.glob("json_2.1.1/train/*/*/game.tw-pddl")))
    assert len(stock) == 3


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_data_is_played_from_its_folder(data: Path, split: Split, monkeypatch: pytest.MonkeyPatch):
    source = Alfworld(path=str(data)).tasks(split, 0)
    names = {take(source, index).payload["game"].split("/")[0] for index in range(len(source))}
    assert names == ({"train"} if split == "train" else {"valid_unseen"})
    play_out(Alfworld(path=str(data)).env(), take(source, 0))
    monkeypatch.setenv("ALFWORLD_DATA", str(data / "json_2.1.1"))
    assert [take(Alfworld().tasks(split, 0), index) for index in range(len(source))] == list(source)
    play_out(Alfworld().env(), take(source, 0))


def test_a_trial_that_is_held_out_is_no_training_game(data: Path, tmp_path: Path):
    shutil.copytree(data, tmp_path / "data")
    trials = sorted((tmp_path / "data").glob("json_2.1.1/train/*/*/game.tw-pddl"))
    other = tmp_path / "data/json_2.1.1/valid_unseen" / trials[0].parent.relative_to(tmp_path / "data/json_2.1.1/train")
    shutil.copytree(trials[0].parent, other)
    game = json.loads(trials[1].read_text())
    trials[1].write_text(json.dumps({**game, "solvable": "false"}))
    assert len(Alfworld(path=str(tmp_path / "data")).tasks("train", 0)) == 1


@pytest.mark.parametrize("damage", [{"grammar": None}, {"pddl_problem": "(define"}])
def test_a_damaged_game_is_named(data: Path, tmp_path: Path, damage: dict):
    shutil.copytree(data, tmp_path / "data")
    world = Alfworld(path=str(tmp_path / "data"))
    task = take(world.tasks("train", 0), 0)
    file = tmp_path / "data/json_2.1.1" / task.payload["game"] / "game.tw-pddl"
    kept = {name: value for name, value in {**json.loads(file.read_text()), **damage}.items() if value is not None}
    file.write_text(json.dumps(kept))
    with pytest.raises(WorldError, match=rf"the game in .*{task.payload['game']} cannot be loaded .*: remove it"):
        world.env().reset(task, 0)


def test_missing_data_is_named_with_the_remedy(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(WorldError, match=r"env.options path is .*holds no json_2.1.1.*alfworld-download"):
        Alfworld(path=str(tmp_path)).tasks("train", 0)
    (tmp_path / "json_2.1.1" / "train" / "a" / "b").mkdir(parents=True)
    (tmp_path / "json_2.1.1" / "train" / "a" / "b" / "traj_data.json").write_text(
        json.dumps({"task_type": TASK_TYPES[0]})
    )
    with pytest.raises(WorldError, match=r"1 of them without game\.tw-pddl"):
        Alfworld(path=str(tmp_path)).tasks("train", 0)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(WorldError, match=r"ALFWORLD_DATA is .*nowhere"):
        Alfworld().env()
    game = take(Alfworld(path=str(data)).tasks("train", 0), 0)
    with pytest.raises(WorldError, match=r"neither env\.options path nor ALFWORLD_DATA"):
        Alfworld(path=GENERATED).env().reset(game, 0)


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("traj_data.json", '{"task_type": "pick', "JSONDecodeError"),
        ("traj_data.json", "{}", "KeyError: 'task_type'"),
        ("game.tw-pddl", "[]", "AttributeError"),
    ],
)
def test_a_game_that_cannot_be_read_is_named(file: str, text: str, problem: str, tmp_path: Path):
    game = tmp_path / "json_2.1.1" / "train" / "a" / "b"
    game.mkdir(parents=True)
    (game / "traj_data.json").write_text(json.dumps({"task_type": TASK_TYPES[0]}))
    (game / file).write_text(text)
    with pytest.raises(WorldError, match=rf"a/b/{file} cannot be read .{problem}.* remove its folder"):
        Alfworld(path=str(tmp_path)).tasks("train", 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": 6}, "size"),
        ({"held_out": "both"}, "held_out is 'both'"),
        ({"task_types": ["fly"]}, "fly"),
        ({"task_types": []}, "task_types"),
        ({"clutter": 2.0}, "clutter is 2.0"),
        ({"games_kept": 0}, "games_kept is 0"),
        ({"scenes": [999]}, "999"),
        ({"scenes": [401], "task_types": ["pick_heat_then_place_in_recep"]}, "pick_heat_then_place_in_recep"),
    ],
)
def test_wrong_options_are_named(options: dict, named: str):
    with pytest.raises(WorldError, match=named):
        Alfworld(path=GENERATED, **options).tasks("train", 0)


def test_nothing_of_the_extra_is_imported_before_it_is_needed_and_its_lack_is_named():
    program = (
        "import os, sys\n"
        "from flowjax.envs.alfworld import Alfworld\n"
        "assert not {'alfworld', 'textworld', 'fast_downward'} & set(sys.modules)\n"
        "sys.modules['textworld'] = None\n"
        "try:\n"
        "    Alfworld().env()\n"
        "except ValueError as error:\n"
        "    print(type(error).__name__, error)\n"
        "words = Alfworld().vocabulary()\n"
        "print('ALFWORLD_DATA' in os.environ)\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("NotReady ALFWorld needs packages that are not installed")
    assert 'pip install -e ".[alfworld]"' in printed
    assert printed.endswith("False\n")


def test_translations_that_processes_leave_each_other_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    for cache in (None, tmp_path / "new", tmp_path / "new", tmp_path / "new"):
        monkeypatch.setattr("flowjax.envs.alfworld.env.GAMES", Games())
        env = Alfworld(path=GENERATED, cache=cache and str(cache)).env()
        seen.append([env.reset(task_for(CLEAN), 0), env.step("go to toilet 1"), frozenset(env._play.state)])
        for path in (tmp_path / "new").glob("*.json") if len(seen) == 3 else ():
            path.write_text(path.read_text()[:1000])
    assert seen == seen[:1] * 4
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_texts_need_nothing_that_newer_pythons_took_from_textworld(monkeypatch: pytest.MonkeyPatch):
    """textworld evaluates expressions among `locals()` that it wrote to, which Python 3.13 no longer allows."""

    def fails(*_: object) -> None:
        raise NameError("name 'r' is not defined")

    textgen = package("textworld.envs.pddl.textgen")
    monkeypatch.setattr(textgen.EvalSymbol, "derive", fails)
    monkeypatch.setattr(textgen.ContextSensitiveGrammar, "derive", fails)
    assert play_out(Alfworld(path=GENERATED).env(), task_for(LIGHT)) > 1


def bathroom_games(first: int, count: int) -> list[Task]:
    """Different games in small rooms, which load fast."""
    kinds = ("pick_and_place_simple",)
    options = AlfworldOptions(path=GENERATED, scenes=tuple(range(407, 431)), clutter=0.1, task_types=kinds)
    tasks = GeneratedTasks("train", 0, options)
    return [tasks(index) for index in range(first, first + count)]


def propositions() -> int:
    gc.collect()
    return sum(isinstance(thing, Proposition) for thing in gc.get_objects())


def test_games_that_are_no_longer_kept_leave_nothing_behind():
    env = Alfworld(path=GENERATED, games_kept=2).env()
    counts = []
    for first in (0, 6, 12):
        for task in bathroom_games(first, 6):
            env.reset(task, 0)
            env.step(env.best_action())
        counts.append(propositions())
    assert counts[2] < 1.5 * counts[0]  # 2.7 times as many where nothing is forgotten


@pytest.mark.slow
def test_a_process_that_plays_game_after_game_does_not_grow():
    """A line fitted to the memory of the second 150 of 300 games rises by under 0.03 MB a game (it was 0.085)."""
    env = Alfworld(path=GENERATED, games_kept=4).env()
    page_mb = os.sysconf("SC_PAGE_SIZE") / 1e6
    resident_mb = []
    for task in bathroom_games(0, 300):
        env.reset(task, 0)
        env.step(env.best_action())
        resident_mb.append(int(Path("/proc/self/statm").read_text().split()[1]) * page_mb)
    slope = np.polyfit(np.arange(150), resident_mb[150:], 1)[0]
    assert slope < 0.03


def test_an_environment_takes_little_memory():
    image = Path(interface.DOWNWARD_LIB_PATH).read_bytes()
    assert 500_000 < loaded_bytes(image) < 2_000_000 < len(image)
    assert loaded_bytes(b"no library") == 10
    envs = [begun(CLEAN)[0]]
    pages = Path("/proc/self/statm")
    before = int(pages.read_text().split()[1])
    envs += [begun(CLEAN)[0] for _ in range(20)]
    assert (int(pages.read_text().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE") / 20 < 6e6
    assert str(interface.DOWNWARD_LIB_PATH).endswith("libdownward.so")


def test_the_program_keeps_its_arguments_and_textworld_its_functions():
    before = (sys.argv, package("textworld.envs.pddl.textgen")._parse_and_convert)
    begun(Spec(417, "pick_and_place_simple", "SoapBottle", "Toilet", 9, 0.2))
    assert (sys.argv, package("textworld.envs.pddl.textgen")._parse_and_convert) == before
