"""Demonstrations of the expert, with noise."""

import itertools

import numpy as np
import pytest

from flowjax.envs import WorldError
from flowjax.envs.demonstrations import demonstrations
from flowjax.envs.sokoban import Sokoban
from flowjax.envs.sokoban.levels import moves_to_go
from flowjax.envs.sokoban.rooms import DIRECTIONS, move, parse

WORLD = Sokoban()
TASKS = Sokoban().tasks("train", 0)[:200]


def pairs(count: int, **changes):
    settings = {"path_noise": 0.0, "label_noise": 0.0, "max_turns": 15, "style": "compact"} | changes
    walk = demonstrations(WORLD, TASKS, rng=np.random.default_rng(0), **settings)
    return [exchange for (exchange,) in itertools.islice(walk, count)]


def is_best(content: str, label: str) -> bool:
    inside = content.split()
    rows = ["#" + "".join(inside[start : start + 4]) + "#" for start in range(0, 16, 4)]
    room, position = parse("\n".join(["######", *rows, "######"]))
    now = moves_to_go(room, position)
    if now is None:
        return move(room, position, DIRECTIONS.index(label)) != position
    return moves_to_go(room, move(room, position, DIRECTIONS.index(label))) == now - 1


def test_without_noise_every_label_is_a_best_move():
    assert all(is_best(messages[0]["content"], label) for messages, label in pairs(1500))


def test_path_noise_shows_more_states_and_keeps_the_labels_clean():
    noisy = pairs(3000, path_noise=0.3)
    assert all(is_best(messages[0]["content"], label) for messages, label in noisy)
    assert len({m[0]["content"] for m, _ in noisy}) > 1.3 * len({m[0]["content"] for m, _ in pairs(3000)})


def test_label_noise_replaces_its_share():
    noisy = pairs(4000, label_noise=0.4)
    wrong = np.mean([not is_best(messages[0]["content"], label) for messages, label in noisy])
    assert 0.18 < wrong < 0.32  # two of four moves are best at most, mostly one


def test_instruct_replies_are_tagged():
    [(messages, reply)] = pairs(1, style="instruct")
    assert Sokoban().parse_action(reply, DIRECTIONS) in DIRECTIONS
    assert reply.startswith("<action>") and "Sokoban" in messages[0]["content"]


def test_the_tasks_come_again_and_none_at_all_are_refused():
    walk = demonstrations(
        WORLD, TASKS[:1], path_noise=0.0, label_noise=0.0, max_turns=15, style="compact",
        rng=np.random.default_rng(0),
    )  # fmt: skip
    first = TASKS[0]
    assert first is not None
    length = moves_to_go(*parse(first.payload["level"])) or 0
    states = [messages[0]["content"] for [(messages, _)] in itertools.islice(walk, 2 * length)]
    assert states[:length] == states[length:]
    with pytest.raises(WorldError, match="train_tasks"):
        next(demonstrations(WORLD, [], path_noise=0, label_noise=0, max_turns=1, style="compact",
                            rng=np.random.default_rng(0)))  # fmt: skip


def test_in_append_mode_an_episode_is_one_conversation_that_takes_the_replies_it_shows():
    walk = demonstrations(
        WORLD, TASKS, path_noise=0.5, label_noise=0.3, max_turns=6, style="compact",
        rng=np.random.default_rng(0), context="append",
    )  # fmt: skip
    lengths = set()
    for conversation, index in zip(walk, range(100), strict=False):
        env = Sokoban().env()
        task = TASKS[index]
        assert task is not None
        observation = env.reset(task, task.seed)
        lengths.add(len(conversation))
        for messages, reply in conversation:
            assert messages == Sokoban().follow_up(observation, "compact")
            observation = env.step(reply).observation
    assert 1 <= min(lengths) < max(lengths) == 6
