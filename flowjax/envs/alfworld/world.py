"""The world of ALFWorld: household tasks in text, on alfworld's own engine.

State: where everything is, and what was done to it. Games are generated on demand, or read from a folder. The packages
of the `alfworld` extra are imported only when an environment or a task is asked for.
"""

import functools
import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from flowjax.envs import (
    History,
    Message,
    NotReady,
    Observation,
    Split,
    Style,
    World,
    WorldError,
    check_split,
    user_says,
)
from flowjax.envs.alfworld.generate import (
    DATA_VARIABLE,
    TASK_TYPES,
    Spec,
    choices,
    constants,
    floor_plan,
    package,
    scenes,
)
from flowjax.fields import Interval, Share
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

    from flowjax.envs.alfworld.env import AlfworldEnv

WORLD = "alfworld"
TASKS = 1 << 31  # length of the source of generated tasks; slice it
HELD_OUT_ONE_IN = 8  # tasks in the training rooms, by content
GAME, TRAJECTORY = "game.tw-pddl", "traj_data.json"
UNUSABLE = ("movable", "Sliced")  # parts of folder names: tasks that alfworld's text world leaves out
GENERATED = "generated"
FOLDER = "json_2.1.1"
GET_DATA = (
    "fetch the real games with `alfworld-download`, or make some with "
    "`python -m data.alfworld.build --out=<folder>`, and name the folder that holds json_2.1.1"
)
TASK = "Your task is to: "
RULES = """You are a household robot in a text world. You go to places, look into what can be opened, take one thing at
a time, and clean, heat, cool or switch on what the task asks for."""
INSTRUCTION = """First reason step by step about the state and your plan inside <think> </think>. Then choose one of the
actions above, word for word, and give it inside <action> </action>."""
WORD = re.compile(r"[a-z]+|\d+")
NUMBERS = 40  # copies of one class that a compact prompt can name
MARKS = ("task", ";", ">", "none")  # before the task, a turn's text and its action; an unreadable reply
SAID = """
    go open close take move use heat clean cool slice examine look inventory put find
    to from with in on under it them two some hot cold you a at
    nothing closed carrying arrive pick turn off happens normal special facing
"""
UNSAID = {"a", "you"}
HeldOut = Literal["unseen", "seen"]


@dataclass(frozen=True, slots=True)
class AlfworldOptions:
    """Games, and how a process keeps them.

    path         folder with json_2.1.1 in it; "generated" for games of our own; None: what ALFWORLD_DATA names, if
                 it is set, else generated ones
    held_out     "unseen": held-out games play in rooms that no training game has; "seen": in the same rooms
    task_types   kinds of tasks, drawn in turn (generated) or kept (data)
    scenes       floor plans to generate on; None: all
    clutter      share of a room's classes of objects, besides the task's, that generated games have
    games_kept   loaded games that a process keeps, some 2 to 5 MB each
    cache        folder where processes leave each other the planner's translations, some 1 MB a game; None: nowhere
    """

    path: str | None = None
    held_out: HeldOut = "unseen"
    task_types: tuple[str, ...] = TASK_TYPES
    scenes: tuple[int, ...] | None = None
    clutter: Share = 0.5
    games_kept: Annotated[int, Interval(at_least=1)] = 64
    cache: str | None = None

    def __post_init__(self):
        strange = [name for name in self.task_types if name not in TASK_TYPES]
        if strange or not self.task_types:
            raise WorldError(f"env.options task_types={strange or ()}: give some of {', '.join(TASK_TYPES)}")

    def root(self) -> Path | None:
        """The folder whose train, valid_seen and valid_unseen hold the games; None where they are generated.

        Raises:
            NotReady: it is named but does not hold them.
        """
        named = os.environ.get(DATA_VARIABLE) if self.path is None else self.path
        if not named or named == GENERATED:
            return None
        source = f"{DATA_VARIABLE}" if self.path is None else "env.options path"
        folder = Path(named).expanduser()
        for root in (folder / FOLDER, folder):
            if any((root / split).is_dir() for split in ("train", "valid_seen", "valid_unseen")):
                return root
        raise NotReady(
            f"{source} is {named}, which holds no {FOLDER} with train, valid_seen and valid_unseen: {GET_DATA}"
        )

    def folder_of(self, split: Split) -> str:
        """The folder of a split in the real layout."""
        return "train" if split == "train" else f"valid_{self.held_out}"


@dataclass(frozen=True, slots=True)
class AlfworldView:
    """The game's latest text, and the task, which prompts show once."""

    seen: str
    task: str


class Alfworld(World):
    """Household tasks in text. State: where everything is, and what was done to it."""

    OUTCOMES = ("success", "conditions_met")
    Options = AlfworldOptions
    View = AlfworldView

    def env(self) -> "AlfworldEnv":
        """Raises:
        NotReady: the `alfworld` extra is not installed, or the games are not where they should be.
        """
        return package("flowjax.envs.alfworld.env").AlfworldEnv(self.options)

    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        """Generated games without end, or those of a folder; see `AlfworldOptions.path`.

        Raises:
            WorldError: there are none, or no such split.
        """
        import grain  # imports jax, which processes that only hold environments do without

        check_split(split)
        root = self.options.root()
        if root is not None:
            return grain.MapDataset.source(data_tasks(root, split, data_seed, self.options))
        generated = GeneratedTasks(split, data_seed, self.options)
        generated.check()
        return grain.MapDataset.range(TASKS).map(generated)

    def instruct(self, observation: Observation, history: History) -> str:
        """The task, the earlier turns in the window, the latest text, the legal actions."""
        view: AlfworldView = observation.view
        parts = [RULES, f"{TASK}{view.task}."]
        if history:
            past = "\n".join(
                f"[Observation {one.turn}: '{one.view.seen}', Action {one.turn}: '{one.action or 'none'}']"
                for one in history
            )
            parts.append(f"You have taken {history[-1].turn} actions so far. The latest:\n{past}")
        return "\n\n".join([*parts, f"You see now:\n{view.seen}", _choices(observation)])

    def compact(self, observation: Observation, history: History) -> str:
        """`task <task> ; <seen> > <action> ; <seen> >`, without the list of actions; conversations read the same."""
        view: AlfworldView = observation.view
        past = [f"; {compact_words(one.view.seen)} > {one.action or 'none'}" for one in history]
        return " ".join(["task", compact_words(view.task), *past, ";", compact_words(view.seen), ">"])

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        seen = observation.view.seen
        return user_says(f"; {compact_words(seen)} >" if style == "compact" else f"{seen}\n\n{_choices(observation)}")

    def reply(self, action: str, style: Style, legal: tuple[str, ...] = ()) -> str:
        return action if style == "compact" else f"<think>I know what to do.</think><action>{action}</action>"

    def vocabulary(self) -> tuple[str, ...]:
        return _words()

    def expert(self, env: "AlfworldEnv") -> str:
        """The next action of the scripted player, which sees the true state."""
        return env.best_action()


class GeneratedTasks:
    """The index-th task of a split: kinds take turns; the room, the object and target, and the places are random.

    Training and held-out tasks never have the same goal in the same room, wherever things lie: the unseen rooms are
    ALFRED's, and in seen rooms a hash puts each (room, kind of task, object, target) into one split for good.
    """

    def __init__(self, split: Split, data_seed: int, options: AlfworldOptions):
        self._split: Split = split
        self._data_seed, self._options = data_seed, options

    def __call__(self, index: int) -> Task:
        kinds = self._options.task_types
        kind = kinds[index % len(kinds)]
        rng = np.random.default_rng([self._data_seed, self._split == "held_out", index])
        rooms = _rooms(self._split, self._options.held_out, self._options.scenes, kind)
        scene, pairs = rooms[rng.integers(len(rooms))]
        asked, target = pairs[rng.integers(len(pairs))]
        spec = Spec(scene, kind, asked, target, int(rng.integers(1 << 31)), self._options.clutter)
        name = f"{self._options.held_out}-{self._split}-{self._data_seed}-{index}"
        return Task(f"{WORLD}-{name}-{spec.folder}", WORLD, index, spec.payload(), kind=kind)

    def check(self) -> None:
        """Refuse options that leave a kind of task without a room."""
        for scene in self._options.scenes or ():
            floor_plan(scene)
        for kind in self._options.task_types:
            if not _rooms(self._split, self._options.held_out, self._options.scenes, kind):
                rooms = "any room" if self._options.scenes is None else f"scenes {self._options.scenes}"
                or_seen = "" if self._options.held_out == "seen" else "take held_out='seen', "
                raise WorldError(
                    f"env.options: {rooms} with held_out={self._options.held_out!r} allows no {self._split} task of "
                    f"task_types {kind}: add scenes (unseen ones are 1-6, 201-206, 301-306, 401-406), {or_seen}or "
                    "leave that kind out"
                )


@functools.cache
def _rooms(
    split: Split, held_out: str, only: tuple[int, ...] | None, kind: str
) -> tuple[tuple[int, tuple[tuple[str, str], ...]], ...]:
    """Each scene of a split with the (object, target) pairs that tasks of this kind may have there."""
    unseen = split == "held_out" and held_out == "unseen"
    rooms = []
    for scene in scenes("held_out" if unseen else "train"):
        if only is not None and scene not in only:
            continue
        pairs = choices(scene, kind)
        if not unseen:
            pairs = tuple(pair for pair in pairs if _is_held_out(scene, kind, *pair) == (split == "held_out"))
        if pairs:
            rooms.append((scene, pairs))
    return tuple(rooms)


def _is_held_out(scene: int, kind: str, asked: str, target: str) -> bool:
    return state_key(WORLD, scene, kind, asked, target) % HELD_OUT_ONE_IN == 0


def data_tasks(root: Path, split: Split, data_seed: int, options: AlfworldOptions) -> list[Task]:
    """The games of a folder that are marked solvable, in an order that the data seed fixes. A trial that the held-out
    folder has, too, is no training game.

    Raises:
        WorldError: there are none; the message says what was found.
    """
    folder = root / options.folder_of(split)
    found = sorted(path.parent for path in folder.rglob(TRAJECTORY))
    games: list[tuple[str, str]] = []  # with their kinds of task
    without_game, unsolvable = 0, 0
    for game in found:
        name = game.relative_to(root).as_posix()
        held_out = root / options.folder_of("held_out") / game.relative_to(folder)
        if any(word in name for word in UNUSABLE) or (split == "train" and (held_out / TRAJECTORY).is_file()):
            continue
        kind = _read(game / TRAJECTORY, "task_type")
        if kind not in options.task_types:
            continue
        if not (game / GAME).is_file():
            without_game += 1
        elif _read(game / GAME, "solvable", False) is not True:
            unsolvable += 1
        else:
            games.append((name, kind))
    if not games:
        raise WorldError(
            f"{folder} holds no game to play: {len(found)} folders with traj_data.json, {without_game} of them without "
            f"game.tw-pddl, {unsolvable} not marked solvable, the others of no kind in task_types: {GET_DATA}"
        )
    order = np.random.default_rng(data_seed).permutation(len(games)).tolist()
    ordered = [games[index] for index in order]
    return [
        Task(f"{WORLD}-{name}", WORLD, place, {"game": name}, kind=kind) for place, (name, kind) in enumerate(ordered)
    ]


def _read(file: Path, name: str, default: Any = None) -> Any:
    """A field of a game's JSON file; without a default the field must be there.

    Raises:
        WorldError: it is not, or the file cannot be read.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        return fields[name] if default is None else fields.get(name, default)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise WorldError(f"{file} cannot be read ({problem}): fetch it again, or remove its folder") from error


def _choices(observation: Observation) -> str:
    actions = "\n".join(f"'{action}'" for action in observation.legal_actions)
    return f"Your possible actions are:\n{actions}\n\n{INSTRUCTION}"


def compact_words(text: str) -> str:
    """A text of the game in words of the vocabulary, each thing once.

    Of a room's list of receptacles only the highest number of each class is kept.
    """
    text = text.lower().rpartition("=-")[2]
    room = "looking quickly around you" in text
    if room:
        text = text.partition("you see")[2]
    known = _known()
    said = [word for word in WORD.findall(text) if word in known]
    return " ".join(_highest(said) if room else _once(said)) or "nothing"


@functools.cache
def _words() -> tuple[str, ...]:
    classes = sorted(name.lower() for name in constants().OBJECTS_WSLICED)
    return tuple(dict.fromkeys([*MARKS, *SAID.split(), *classes, *map(str, range(1, NUMBERS + 1))]))


@functools.cache
def _known() -> frozenset[str]:
    return frozenset(_words()) - UNSAID


def _highest(said: list[str]) -> list[str]:
    highest: dict[str, int] = {}
    for word, number in itertools.pairwise(said):
        if number.isdecimal() and not word.isdecimal():
            highest[word] = max(highest.get(word, 0), int(number))
    return [part for word, number in highest.items() for part in (word, str(number))]


def _once(said: list[str]) -> list[str]:
    kept: list[str] = []
    named: set[tuple[str, str]] = set()
    pairs = iter(itertools.pairwise([*said, ""]))
    for word, following in pairs:
        if not following.isdecimal():
            kept.append(word)
            continue
        next(pairs)
        if (word, following) not in named:
            named.add((word, following))
            kept += word, following
    return kept
