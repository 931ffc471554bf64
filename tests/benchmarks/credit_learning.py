"""Success by estimator, a small network in place of the language model: python -m tests.benchmarks.credit_learning

    --world=sokoban   6 x 6 levels, one box, 15 moves: many ways, dead ends, moves that change nothing
    --world=guess     a number below 32 in three guesses, "higher" or "lower" after each: what wins cannot be seen, and
                      an unreadable reply costs a turn

No engine and two hidden layers, so that a run takes seconds and many seeds are affordable. The network first imitates,
then learns by PPO on groups of eight episodes, as the real trainer does. Prints for each estimator the success on
held-out tasks and the share of turns that changed nothing (unreadable replies, moves into a wall), over seeds: mean,
95 % interval (Student's t), each seed. Options are chosen with `--tune`: other networks and other held-out tasks than
those that results are reported on.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jaxtyping import Array, Float
from scipy import stats

from flowjax.credit.estimators import ESTIMATORS, estimate, grpo, turn_rewards
from flowjax.credit.table import TurnTable, normalise, segment_statistics, table_from_columns, table_rows
from flowjax.envs.sokoban.levels import Shape, best_direction, generate
from flowjax.envs.sokoban.rooms import Position, Room, move, solved
from flowjax.losses.policy import policy_loss

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ESTIMATORS},
    "gigpo, mean_std": ("gigpo", {"norm": "mean_std"}),
    "gigpo, mean_std, gamma 0.8": ("gigpo", {"norm": "mean_std", "gamma": 0.8}),
    "rewardflow, gamma 0.8": ("rewardflow", {"gamma": 0.8}),
    "rewardflow, gamma 0.95": ("rewardflow", {"gamma": 0.95}),
    "rewardflow, weight 2": ("rewardflow", {"step_weight": 2.0}),
    "rewardflow, gamma 0.8, weight 2": ("rewardflow", {"gamma": 0.8, "step_weight": 2.0}),
    "rewardflow, not normalised": ("rewardflow", {"step_norm": "none"}),
    "gae, trace 0": ("gae", {"trace": 0.0}),
    "gae, trace 1": ("gae", {"trace": 1.0}),
    "published.rewardflow, no penalty": ("published.rewardflow", {"invalid_penalty": 0.0}),
    "values of the best sibling": (f"{__name__}:best_sibling", {}),
    "published.rewardflow, both directions": ("published.rewardflow", {"edge_direction": "bidirectional"}),
}
GROUP, GROUPS = 8, 16


class Moved(NamedTuple):
    state: Hashable
    won: bool
    valid: bool


class World(Protocol):
    """A world small enough for a network: states are hashable, actions are numbers."""

    inputs: int
    actions: int
    max_turns: int
    learning_rate: float

    def tasks(self, rng: np.random.Generator, count: int, split: str) -> list[Any]: ...
    def start(self, task: Any) -> Hashable: ...
    def step(self, task: Any, state: Any, action: int) -> Moved: ...
    def view(self, task: Any, state: Any) -> np.ndarray: ...
    def lessons(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]: ...


class Sokoban:
    """Levels of one box; a move into a wall changes nothing."""

    inputs, actions, max_turns, learning_rate = 144, 4, 15, 5e-4
    cells = np.arange(36)

    def tasks(self, rng: np.random.Generator, count: int, split: Any) -> list[tuple[Room, Position]]:
        return [generate(rng, Shape(6, 6, 1), split) for _ in range(count)]

    def start(self, task: tuple[Room, Position]) -> Position:
        return task[1]

    def step(self, task: tuple[Room, Position], state: Position, action: int) -> Moved:
        after = move(task[0], state, action)
        return Moved(after, solved(task[0], after), True)

    def view(self, task: tuple[Room, Position], state: Position) -> np.ndarray:
        planes = (task[0].floor, task[0].targets, state.boxes, 1 << state.player)
        return np.concatenate([(bits >> self.cells) & 1 for bits in planes]).astype(np.float32)

    def lessons(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The expert with three labels in ten replaced, on paths with random moves."""
        seen, labels = [], []
        for task in self.tasks(rng, 1000, "train") * 2:
            room, position = task
            for _ in range(12):
                label = int(rng.integers(4)) if rng.random() < 0.3 else best_direction(room, position)
                seen.append(self.view(task, position))
                labels.append(label)
                position = move(room, position, int(rng.integers(4)) if rng.random() < 0.2 else label)
                if solved(room, position):
                    break
        return np.stack(seen), np.array(labels)


class Guess:
    """A number to be found from "higher" and "lower"; the last action is a reply that cannot be read."""

    numbers = 32
    inputs, actions, max_turns, learning_rate = 2 * numbers + 1, numbers + 1, 3, 2e-3

    def tasks(self, rng: np.random.Generator, count: int, split: str) -> list[int]:
        if split == "held_out":  # every number: there are no others, and the state never shows which it is
            return np.resize(np.arange(self.numbers), count).tolist()
        return rng.integers(self.numbers, size=count).tolist()

    def start(self, task: int) -> tuple[int, int]:
        return 0, self.numbers - 1

    def step(self, task: int, state: tuple[int, int], action: int) -> Moved:
        low, high = state
        if action == task:
            return Moved(("found", task), True, True)
        if action == self.numbers:
            return Moved(state, False, False)
        return Moved((max(low, action + 1), high) if action < task else (low, min(high, action - 1)), False, True)

    def view(self, task: int, state: tuple[int, int]) -> np.ndarray:
        low, high = state
        seen = np.zeros(self.inputs, np.float32)
        seen[[low, self.numbers + high]] = 1.0
        seen[-1] = (high - low) / self.numbers
        return seen

    def lessons(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Any number still possible, one label in seven any number at all, one in eight unreadable."""
        ends = np.sort(rng.integers(self.numbers, size=(40_000, 2)), axis=1)
        labels = rng.integers(ends[:, 0], ends[:, 1] + 1)
        labels = np.where(rng.random(len(labels)) < 0.15, rng.integers(self.numbers, size=len(labels)), labels)
        labels = np.where(rng.random(len(labels)) < 0.13, self.numbers, labels)
        return np.stack([self.view(0, (int(low), int(high))) for low, high in ends]), labels


class Played(NamedTuple):
    """Rows of turns, and what the network saw and chose in each."""

    columns: dict[str, np.ndarray]
    seen: np.ndarray
    actions: np.ndarray
    logprobs: np.ndarray
    won: np.ndarray

    @property
    def idle_share(self) -> float:
        """Share of turns that changed nothing."""
        return float((self.columns["state"] == self.columns["next_state"]).mean())


def new_network(world: World, key: jax.Array) -> list:
    sizes = (world.inputs, 256, 256, world.actions)
    keys = jax.random.split(key, 3)
    scales = (1.0, 1.0, 0.1)
    return [
        (scale * jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b))
        for k, scale, a, b in zip(keys, scales, sizes[:-1], sizes[1:], strict=True)
    ]


@jax.jit
def action_logprobs(network: list, seen: jax.Array) -> jax.Array:
    *hidden, (weight, bias) = network
    for inner, shift in hidden:
        seen = jax.nn.relu(seen @ inner + shift)
    return jax.nn.log_softmax(seen @ weight + bias)


def play(world: World, network: list, tasks: Sequence[Any], rng: np.random.Generator) -> Played:
    """One episode of each task, all at once; neighbours of `GROUP` make a group."""
    states = [world.start(task) for task in tasks]
    won = np.zeros(len(tasks), bool)
    rows, seen, actions, logprobs = [], [], [], []
    ids: dict[Hashable, int] = {}
    for step in range(world.max_turns):
        views = np.stack([world.view(*pair) if not won[i] else np.zeros(world.inputs, np.float32)
                          for i, pair in enumerate(zip(tasks, states, strict=True))])  # fmt: skip
        scores = np.asarray(action_logprobs(network, views))
        chosen = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
        for episode in np.flatnonzero(~won).tolist():
            group, before = episode // GROUP, states[episode]
            moved = world.step(tasks[episode], before, int(chosen[episode]))
            states[episode], won[episode] = moved.state, moved.won
            state, following = (ids.setdefault((group, key), len(ids)) for key in (before, moved.state))
            rows.append((group, episode, step, state, following, float(moved.won), moved.valid, moved.won))
            seen.append(views[episode])
            actions.append(chosen[episode])
            logprobs.append(scores[episode, chosen[episode]])
    names = ("group", "trajectory", "step", "state", "next_state", "reward", "valid", "terminal")
    columns = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    columns["score"] = won[columns["trajectory"]].astype(float)
    return Played(columns, np.stack(seen), np.array(actions), np.array(logprobs), won)


def imitate(world: World, network: list, rng: np.random.Generator, batches: int = 120) -> list:
    inputs, targets = world.lessons(rng)
    optimizer = optax.adam(1e-3)
    state = optimizer.init(network)

    @jax.jit
    def update(network, state, inputs, targets):
        def loss(network):
            return -jnp.take_along_axis(action_logprobs(network, inputs), targets[:, None], 1).mean()

        changes, state = optimizer.update(jax.grad(loss)(network), state)
        return optax.apply_updates(network, changes), state

    for _ in range(batches):
        some = rng.integers(len(targets), size=256)
        network, state = update(network, state, inputs[some], targets[some])
    return network


def train(
    world: World,
    network: list,
    levels: list[Any],
    name: str,
    options: dict[str, Any],
    rng: np.random.Generator,
    *,
    steps: int,
    learning_rate: float,
) -> list:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
    state = optimizer.init(network)
    rows = table_rows(GROUP * GROUPS * world.max_turns)

    @jax.jit
    def update(network, state, seen, actions, logprobs, advantages, mask):
        def loss(network):
            now = jnp.take_along_axis(action_logprobs(network, seen), actions[:, None], 1)[:, 0]
            total, denominator, _ = policy_loss(now, logprobs, advantages, mask)  # clip 0.2, 0.28
            return total / denominator

        changes, state = optimizer.update(jax.grad(loss)(network), state, network)
        return optax.apply_updates(network, changes), state

    for _ in range(steps):
        chosen = [levels[index] for index in rng.integers(len(levels), size=GROUPS) for _ in range(GROUP)]
        played = play(world, network, chosen, rng)
        table = table_from_columns(played.columns, pad_to=rows)
        advantages = np.asarray(estimate(table, name, **options))[: len(played.actions)]
        arrays = (played.seen, played.actions, played.logprobs, advantages)
        for part in np.array_split(rng.permutation(len(played.actions)), 2):
            padded = [np.zeros((rows // 2, *array.shape[1:]), array.dtype) for array in arrays]
            for whole, array in zip(padded, arrays, strict=True):
                whole[: len(part)] = array[part]
            network, state = update(network, state, *padded, np.arange(rows // 2) < len(part))
    return network


def best_sibling(table: TurnTable, *, gamma: float = 0.9) -> Float[Array, "turns"]:
    """The losing design: V is the best that any sibling went on to reach, also for an episode that the turn limit cut
    in that state, and a turn without companion is compared with the whole group. Honest tries that led nowhere lose all
    of V, doing nothing loses (1 - gamma) V, even in the last turn."""
    earned, nodes = turn_rewards(table, "score"), 2 * table.mask.shape[0]
    values = jnp.zeros(nodes)
    for _ in range(Guess.max_turns):
        after = jnp.where(table.terminal, 0.0, values[table.next_state])
        ahead = jnp.where(table.mask, earned + gamma * after, 0.0)
        values = jnp.zeros(nodes).at[table.state].max(jnp.where(table.state == table.next_state, 0.0, ahead))
    after = jnp.where(table.terminal, 0.0, values[table.next_state])
    credit = jnp.where(table.mask, earned + gamma * after - values[table.state], 0.0)
    visits, state_mean, _ = segment_statistics(credit, table.state, table.mask, nodes)
    _, group_mean, deviation = segment_statistics(credit, table.group, table.mask)
    step_part = normalise(credit, jnp.where(visits > 1, state_mean, group_mean), deviation, "mean_std")
    return jnp.where(table.mask, grpo(table) + step_part, 0.0)


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval over seeds."""
    mean, half = float(np.mean(values)), 0.0
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"


def main(argv: list[str]) -> None:
    del argv
    given = flags.FLAGS
    world: World = {"sokoban": Sokoban(), "guess": Guess()}[given.world]
    tuning = 1000 if given.tune else 0
    rng = np.random.default_rng(1 + tuning)
    levels, held_out = world.tasks(rng, 2000, "train"), world.tasks(rng, 400, "held_out") * 2
    seeds = range(tuning, tuning + given.seeds)
    base = {
        seed: imitate(world, new_network(world, jax.random.key(seed)), np.random.default_rng(seed)) for seed in seeds
    }

    def report(label: str, networks: Sequence[list]) -> None:
        played = [play(world, network, held_out, np.random.default_rng(tuning)) for network in networks]
        won, idle = [float(each.won.mean()) for each in played], [each.idle_share for each in played]
        each = " ".join(f"{x:.3f}" for x in won)
        print(f"| {label} | {interval(won)} | {interval(idle)} | {each} |", flush=True)

    print("| estimator | success | turns that changed nothing | each seed |\n|---|---|---|---|")
    report("(before)", list(base.values()))
    for label in given.variants or VARIANTS:
        name, options = VARIANTS[label]
        rate = given.learning_rate or world.learning_rate
        rngs = {seed: np.random.default_rng(100 + seed) for seed in seeds}
        report(
            label,
            [
                train(world, base[seed], levels, name, options, rng, steps=given.steps, learning_rate=rate)
                for seed, rng in rngs.items()
            ],
        )


if __name__ == "__main__":
    flags.DEFINE_enum("world", "sokoban", ["sokoban", "guess"], "What is played.")
    flags.DEFINE_list("variants", [], "Names of the variants to run; all by default.")
    flags.DEFINE_integer("seeds", 5, "Seeds for each.")
    flags.DEFINE_integer("steps", 60, "Batches of reinforcement learning.")
    flags.DEFINE_float("learning_rate", 0.0, "Of reinforcement learning; 0 is 5e-4 for sokoban, 2e-3 for guess.")
    flags.DEFINE_bool("tune", False, "Other networks and held-out tasks, to choose options on.")
    app.run(main)
