"""The environment: one game at a time on its own engine, and the cache of the games that this process has loaded."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mementos import core as mementos

from flowjax.envs import Observation, Step, WorldError
from flowjax.envs.alfworld.engine import NOTHING_HAPPENS, Game, Playthrough
from flowjax.envs.alfworld.generate import Spec, game_file, trajectory_file
from flowjax.envs.alfworld.player import GameGoal, ScriptedPlayer, TrueState, conditions_met
from flowjax.envs.alfworld.world import GAME, GET_DATA, TASK, TRAJECTORY, AlfworldOptions, AlfworldView
from flowjax.records import Task

WON_REWARD = 10.0
NOT_OFFERED = "help"  # a command that only lists the others


@dataclass(frozen=True, slots=True)
class Loaded:
    """A game with its goal."""

    game: Game
    goal: GameGoal


class Games:
    """Cache of this process's games: only the first episode of a group waits for a game's translation."""

    def __init__(self):
        self._loaded: OrderedDict[tuple[Any, ...], Loaded] = OrderedDict()

    def get(self, task: Task, root: Path | None, library: Any, options: AlfworldOptions) -> Loaded:
        """The game of a task, loaded with `library` if it is not cached. The least recently used games are dropped."""
        key = (str(root), *sorted(task.payload.items()))
        known = self._loaded.get(key)
        if known is None:
            game, trajectory = _contents(task, root)
            cache = None if options.cache is None else Path(options.cache)
            try:
                known = self._loaded[key] = Loaded(Game(game, library, cache), GameGoal.read(trajectory))
            except Exception as error:  # parsers of domains and grammars have errors of their own kinds
                if "game" not in task.payload:
                    raise  # generated: a fault of ours
                place = (root or Path()) / task.payload["game"]
                said = f"{type(error).__name__}: {error}"[:200]
                raise WorldError(
                    f"the game in {place} cannot be loaded ({said}): remove it, or get it again"
                ) from error
        self._loaded.move_to_end(key)
        if len(self._loaded) > options.games_kept:
            while len(self._loaded) > options.games_kept:
                self._loaded.popitem(last=False)
            _forget_propositions()
        return known


def _forget_propositions() -> None:
    """Empty the table in which textworld keeps every proposition that it ever made, 0.1 to 0.7 MB a game: a leak.

    Propositions are equal by value, so those of cached games lose only a shortcut of their comparison.
    """
    mementos._memento_cache.clear()


GAMES = Games()


def _contents(task: Task, root: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The game file and the trajectory file of a task.

    Raises:
        WorldError: the task is a file of a folder that is not named, or is gone.
    """
    if "game" not in task.payload:
        spec = Spec.read(task.payload)
        return game_file(spec), trajectory_file(spec, task.task_id)
    if root is None:
        raise WorldError(f"task {task.task_id} is a game file, but neither env.options path nor ALFWORLD_DATA is set")
    folder = root / task.payload["game"]
    try:
        return json.loads((folder / GAME).read_text()), json.loads((folder / TRAJECTORY).read_text())
    except OSError as error:
        raise WorldError(f"the game of task {task.task_id} cannot be read ({error}): {GET_DATA}") from error


class AlfworldEnv:
    """An environment. Texts are the game's own."""

    def __init__(self, options: AlfworldOptions):
        self._options, self._root = options, options.root()
        self._play = Playthrough()
        self._loaded: Loaded | None = None
        self._task = ""
        self._won = False
        self._legal: tuple[str, ...] = ()

    @property
    def loaded(self) -> Loaded:
        if self._loaded is None:
            raise RuntimeError("the environment has not been reset")
        return self._loaded

    def reset(self, task: Task, seed: int) -> Observation:
        """Begin the task's game; `seed` changes nothing, since games are deterministic."""
        del seed
        self._loaded = GAMES.get(task, self._root, self._play.library, self._options)
        said = self._play.load(self._loaded.game)
        self._task = said.partition(TASK)[2].strip().removesuffix(".")
        self._won = self._play.won
        self._list_actions()
        return self._observe(said)

    def step(self, action: str) -> Step:
        """Obey a legal action. An illegal one changes nothing: `help`, and any command once the game is won, which the
        engine would obey, are illegal here."""
        goal = self.loaded.goal
        valid = not self._won and action != NOT_OFFERED and action in self._play.commands
        said, reward = NOTHING_HAPPENS, 0.0
        if valid:
            said = self._play.obey(action)
            self._won = self._play.won
            reward = WON_REWARD * self._won
            self._list_actions()
        state = TrueState(self.loaded.game.room, self._play.state)
        outcome = {"success": float(self._won), "conditions_met": conditions_met(state, goal)}
        return Step(self._observe(said), reward, self._won, valid, outcome)

    def best_action(self) -> str:
        """Next action of the scripted player, which sees the true state."""
        game, goal = self.loaded.game, self.loaded.goal
        return ScriptedPlayer(game.room, self._play.state, self._play.commands, goal).choose()

    def _observe(self, said: str) -> Observation:
        # The first text ends with the task, which the view has apart; other texts are shown whole.
        return Observation(AlfworldView(said.partition(TASK)[0].strip(), self._task), self._legal, self._play.key())

    def _list_actions(self) -> None:
        self._legal = tuple(sorted(set(self._play.commands) - {NOT_OFFERED}))
