"""Which credit teaches best? A small network plays Sokoban: python -m tests.benchmarks.credit_learning

No language model and no engine: 144 inputs, two hidden layers, four moves, so that a run takes seconds and many seeds
are affordable. The network first imitates a noisy expert, then learns by PPO on groups of eight episodes, as the real
trainer does. Prints success on held-out levels before and after, for each estimator and seed.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from flowjax.credit.estimators import estimate
from flowjax.credit.rewardflow import reference_compatible
from flowjax.credit.table import table_from_columns
from flowjax.envs.sokoban.levels import Shape, generate
from flowjax.envs.sokoban.rooms import Position, Room, move, solved
from flowjax.envs.sokoban.solver import best_direction
from flowjax.losses.policy import policy_loss

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "gigpo": ("gigpo", {"norm": "mean_std"}),
    "rewardflow": ("rewardflow", {}),
    "rewardflow, gamma 0.8": ("rewardflow", {"gamma": 0.8}),
    "rewardflow, gamma 0.95": ("rewardflow", {"gamma": 0.95}),
    "rewardflow, V' - V": ("rewardflow", {"step_shaping": "difference"}),
    "rewardflow, singletons get nothing": ("rewardflow", {"singleton_baseline": "self"}),
    "rewardflow, group baseline": ("rewardflow", {"step_baseline": "group"}),
    "rewardflow, not normalised": ("rewardflow", {"step_norm": "mean", "episode_norm": "mean"}),
    "rewardflow, costs on edges": ("rewardflow", {"node_reward": "edge", "source_reward": "reward", "sources": "any"}),
    "rewardflow, both directions": ("rewardflow", {"edge_direction": "bidirectional"}),
    "rewardflow, as published": ("rewardflow", reference_compatible()),
}
MAX_TURNS, GROUP, GROUPS, ROWS, CELLS = 15, 8, 16, 2048, np.arange(36)
_VARIANTS = flags.DEFINE_list("variants", [], "Names of the variants to run; all by default.")
_SEEDS = flags.DEFINE_integer("seeds", 4, "Seeds for each.")
_STEPS = flags.DEFINE_integer("steps", 60, "Batches of reinforcement learning.")
_RATE = flags.DEFINE_float("learning_rate", 5e-4, "Of reinforcement learning.")

Level = tuple[Room, Position]


class Played(NamedTuple):
    """Rows of turns: episode, step, positions before and after, whether it ended in success; and what was seen."""

    rows: list[tuple[int, int, Position, Position, bool]]
    seen: np.ndarray
    moves: np.ndarray
    logprobs: np.ndarray
    won: np.ndarray


def view(room: Room, position: Position) -> np.ndarray:
    planes = (room.floor, room.targets, position.boxes, 1 << position.player)
    return np.concatenate([(bits >> CELLS) & 1 for bits in planes]).astype(np.float32)


def new_network(key: jax.Array) -> list:
    sizes = (144, 256, 256, 4)
    keys = jax.random.split(key, 3)
    scales = (1.0, 1.0, 0.1)
    return [
        (scale * jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b))
        for k, scale, a, b in zip(keys, scales, sizes[:-1], sizes[1:], strict=True)
    ]


@jax.jit
def move_logprobs(network: list, seen: jax.Array) -> jax.Array:
    *hidden, (weight, bias) = network
    for inner, shift in hidden:
        seen = jax.nn.relu(seen @ inner + shift)
    return jax.nn.log_softmax(seen @ weight + bias)


def play(network: list, levels: list[Level], rng: np.random.Generator) -> Played:
    """One episode of each level, all at once."""
    positions = [start for _, start in levels]
    won = np.zeros(len(levels), bool)
    rows, seen, moves, logprobs = [], [], [], []
    for step in range(MAX_TURNS):
        views = np.stack([view(room, at) for (room, _), at in zip(levels, positions, strict=True)])
        scores = np.asarray(move_logprobs(network, views))
        chosen = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
        for episode in np.flatnonzero(~won).tolist():
            room, before = levels[episode][0], positions[episode]
            after = positions[episode] = move(room, before, int(chosen[episode]))
            won[episode] = solved(room, after)
            rows.append((episode, step, before, after, bool(won[episode])))
            seen.append(views[episode])
            moves.append(chosen[episode])
            logprobs.append(scores[episode, chosen[episode]])
    return Played(rows, np.stack(seen), np.array(moves), np.array(logprobs), won)


def credit(played: Played, name: str, options: dict[str, Any]) -> np.ndarray:
    episode, step, before, after, ends = (list(column) for column in zip(*played.rows, strict=True))
    group = np.array(episode) // GROUP
    ids: dict[tuple[int, Position], int] = {}
    state, following = (
        np.array([ids.setdefault(key, len(ids)) for key in zip(group.tolist(), side, strict=True)])
        for side in (before, after)
    )
    columns = {
        "group": group,
        "trajectory": np.array(episode),
        "step": np.array(step),
        "state": state,
        "next_state": following,
        "reward": np.where(ends, 10.9, -0.1),
        "score": played.won[episode].astype(float),
        "valid": np.ones(len(group), bool),
        "terminal": np.array(ends),
    }
    return np.asarray(estimate(table_from_columns(columns, pad_to=ROWS), name, **options))[: len(group)]


def imitate(network: list, levels: list[Level], rng: np.random.Generator, batches: int = 120) -> list:
    """Imitation of the expert with three labels in ten replaced, on paths with random moves."""
    seen, labels = [], []
    for room, start in levels[:1000] * 2:
        position = start
        for _ in range(12):
            label = int(rng.integers(4)) if rng.random() < 0.3 else best_direction(room, position)
            seen.append(view(room, position))
            labels.append(label)
            position = move(room, position, int(rng.integers(4)) if rng.random() < 0.2 else label)
            if solved(room, position):
                break
    inputs, targets = np.stack(seen), np.array(labels)
    optimizer = optax.adam(1e-3)
    state = optimizer.init(network)

    @jax.jit
    def update(network, state, inputs, targets):
        def loss(network):
            return -jnp.take_along_axis(move_logprobs(network, inputs), targets[:, None], 1).mean()

        changes, state = optimizer.update(jax.grad(loss)(network), state)
        return optax.apply_updates(network, changes), state

    for _ in range(batches):
        some = rng.integers(len(targets), size=256)
        network, state = update(network, state, inputs[some], targets[some])
    return network


def train(network: list, levels: list[Level], name: str, options: dict[str, Any], rng: np.random.Generator) -> list:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(_RATE.value))
    state = optimizer.init(network)

    @jax.jit
    def update(network, state, seen, moves, logprobs, advantages, mask):
        def loss(network):
            now = jnp.take_along_axis(move_logprobs(network, seen), moves[:, None], 1)[:, 0]
            total, denominator, _ = policy_loss(now, logprobs, advantages, mask, clip_high=0.28)
            return total / denominator

        changes, state = optimizer.update(jax.grad(loss)(network), state, network)
        return optax.apply_updates(network, changes), state

    for _ in range(_STEPS.value):
        chosen = [levels[index] for index in rng.integers(len(levels), size=GROUPS) for _ in range(GROUP)]
        played = play(network, chosen, rng)
        arrays = (played.seen, played.moves, played.logprobs, credit(played, name, options))
        for part in np.array_split(rng.permutation(len(played.rows)), 2):
            rows = [np.zeros((ROWS // 2, *array.shape[1:]), array.dtype) for array in arrays]
            for padded, array in zip(rows, arrays, strict=True):
                padded[: len(part)] = array[part]
            network, state = update(network, state, *rows, np.arange(ROWS // 2) < len(part))
    return network


def main(argv: list[str]) -> None:
    shape = Shape(6, 6, 1)
    rng = np.random.default_rng(1)
    levels = [generate(rng, shape, "train") for _ in range(2000)]
    held_out = [generate(rng, shape, "held_out") for _ in range(400)]
    networks = {}
    for seed in range(_SEEDS.value):
        networks[seed] = imitate(new_network(jax.random.key(seed)), levels, np.random.default_rng(seed))

    def success(network: list) -> float:
        return float(play(network, held_out * 2, np.random.default_rng(0)).won.mean())

    print("| estimator | mean | each seed |\n|---|---|---|")
    before = [success(network) for network in networks.values()]
    print(f"| (before) | {statistics.fmean(before):.3f} | {' '.join(f'{x:.3f}' for x in before)} |", flush=True)
    for label in _VARIANTS.value or VARIANTS:
        after = [
            success(train(network, levels, *VARIANTS[label], np.random.default_rng(100 + seed)))
            for seed, network in networks.items()
        ]
        print(f"| {label} | {statistics.fmean(after):.3f} | {' '.join(f'{x:.3f}' for x in after)} |", flush=True)


if __name__ == "__main__":
    app.run(main)
