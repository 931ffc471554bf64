"""Credit beside the policy's exact advantages: python -m tests.benchmarks.credit_oracle [--steps=0] [--turns=15]

Sokoban with one box has few positions, so the advantage of a move, the change that it makes to the policy's chance to
solve the level within the turns that are left, is computed exactly by dynamic programming. The policy is the small
network of `tests.benchmarks.credit_learning`, after imitation and `--steps` batches of training with `--trained_by`.

Prints for each estimator, over `--batches` batches of 16 groups of 8 episodes:

    turns       correlation of its advantages with the exact ones, over all turns
    batch       cosine of the gradient of one batch with the true one, mean over batches and 95 % interval: what a
                step of training is worth. The row "exact" has the exact advantages of a batch of that size
    mean        the same of the mean of all batches: what is left is bias
    largest     the largest advantage in size

The true gradient is that of the exact advantages over other batches, as many.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jaxtyping import Float, Int
from scipy import stats

from flowjax.credit.estimators import estimate
from flowjax.credit.table import table_from_columns, table_rows
from flowjax.envs.sokoban.levels import Shape
from flowjax.envs.sokoban.rooms import Position, Room, move, solved
from tests.benchmarks import credit_learning
from tests.benchmarks.credit_learning import GROUP, GROUPS, VARIANTS, Played, Sokoban, action_logprobs, play

EXACT = "exact"
Level = tuple[Room, Position]


class Chances(NamedTuple):
    """What a policy can expect in a level. Positions are numbered from 0, the start's; the last number is solved."""

    after: Int[np.ndarray, "positions actions"]
    policy: Float[np.ndarray, "positions actions"]
    value: Float[np.ndarray, "left positions"]  # chance to solve it within that many turns, from 0 on

    def advantage(self, left: int, position: int, action: int) -> float:
        """What an action changes with so many turns left, its own included."""
        return float(self.value[left - 1, self.after[position, action]] - self.value[left, position])


def chances(world: Sokoban, network: list, level: Level) -> Chances:
    """The exact chances of a network in a level, within `world.max_turns`."""
    room, start = level
    numbers, order = {start: 0}, [start]
    after: list[list[int]] = []
    for position in order:  # grows on the way
        row = []
        for action in range(world.actions):
            following = move(room, position, action)
            if solved(room, following):
                row.append(-1)
                continue
            if following not in numbers:
                numbers[following] = len(order)
                order.append(following)
            row.append(numbers[following])
        after.append(row)
    seen = np.stack([world.view(level, position) for position in order])
    rows = table_rows(len(seen))  # few shapes, few programs
    padded = np.zeros((rows, world.inputs), np.float32)
    padded[: len(seen)] = seen
    policy = np.exp(np.asarray(action_logprobs(network, padded), np.float64))[: len(seen)]
    following = np.array(after)
    value = np.zeros((world.max_turns + 1, len(order) + 1))
    value[:, -1] = 1.0
    for left in range(1, world.max_turns + 1):
        value[left, :-1] = (policy * value[left - 1][following]).sum(axis=1)
    return Chances(following, policy, value)


def exact_advantages(world: Sokoban, known: Sequence[Chances], played: Played) -> Float[np.ndarray, "turns"]:
    """The exact advantage of every turn; `known` has the chances of each episode's level."""
    at = np.zeros(len(known), int)
    found = np.zeros(len(played.actions))
    for row, (episode, step) in enumerate(zip(played.columns["trajectory"], played.columns["step"], strict=True)):
        action = int(played.actions[row])
        found[row] = known[episode].advantage(world.max_turns - int(step), at[episode], action)
        at[episode] = known[episode].after[at[episode], action]
    return found


@jax.jit
def gradient(network: list, seen: jax.Array, actions: jax.Array, advantages: jax.Array) -> jax.Array:
    """Of the mean of advantage times log-prob, as one vector. Padding has no advantage."""

    def gained(network: list) -> jax.Array:
        now = jnp.take_along_axis(action_logprobs(network, seen), actions[:, None], 1)[:, 0]
        return jnp.sum(now * advantages) / (GROUP * GROUPS)

    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(jax.grad(gained)(network))])


def cosine(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> float:
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else 0.0


def of_batch(
    world: Sokoban, network: list, played: Played, advantages: Float[np.ndarray, "turns"]
) -> Float[np.ndarray, "parameters"]:
    rows = table_rows(GROUP * GROUPS * world.max_turns)
    columns = [np.zeros((rows, *values.shape[1:]), values.dtype) for values in (played.seen, played.actions)]
    for whole, values in zip(columns, (played.seen, played.actions), strict=True):
        whole[: len(values)] = values
    padded = np.zeros(rows, np.float32)
    padded[: len(advantages)] = advantages
    return np.asarray(gradient(network, *columns, padded), np.float64)


def measure(
    world: Sokoban,
    network: list,
    levels: Sequence[Level],
    variants: Mapping[str, tuple[str, Mapping[str, Any]]],
    batches: int,
    rng: np.random.Generator,
) -> list[tuple[str, float, Float[np.ndarray, "batches"], float, float]]:
    """For each variant, the exact advantages first: correlation over turns, cosine of each batch, that of the mean of
    all, and the largest advantage in size."""
    known: dict[int, Chances] = {}

    def batch() -> tuple[Played, np.ndarray]:
        chosen = [int(index) for index in rng.integers(len(levels), size=GROUPS) for _ in range(GROUP)]
        for index in chosen:
            if index not in known:
                known[index] = chances(world, network, levels[index])
        played = play(world, network, [levels[index] for index in chosen], rng)
        return played, exact_advantages(world, [known[index] for index in chosen], played)

    gradient_of = partial(of_batch, world, network)
    truth = np.mean([gradient_of(*batch()) for _ in range(batches)], axis=0)
    drawn = [batch() for _ in range(batches)]
    exact = np.concatenate([advantages for _, advantages in drawn])
    rows = table_rows(GROUP * GROUPS * world.max_turns)
    found = []
    for label, (name, options) in {EXACT: (EXACT, {}), **variants}.items():
        parts = []
        for played, advantages in drawn:
            if name != EXACT:
                table = table_from_columns(played.columns, pad_to=rows)
                advantages = np.asarray(estimate(table, name, **options))[: len(played.actions)]
            parts.append(advantages)
        gradients = [gradient_of(played, part) for (played, _), part in zip(drawn, parts, strict=True)]
        whole = np.concatenate(parts)
        cosines = np.array([cosine(each, truth) for each in gradients])
        correlation = float(np.corrcoef(whole, exact)[0, 1])
        found.append((label, correlation, cosines, cosine(np.mean(gradients, axis=0), truth), np.abs(whole).max()))
    return found


def main(argv: list[str]) -> None:
    del argv
    given = flags.FLAGS
    world = Sokoban()
    world.max_turns = given.turns
    rng = np.random.default_rng(7)
    shape = Shape(6, 6, 1, min_moves=given.min_moves, max_moves=given.turns)
    levels = [credit_learning.generate(rng, shape, "train") for _ in range(given.levels)]
    network = credit_learning.imitate(world, credit_learning.new_network(world, jax.random.key(0)), rng)
    if given.steps:
        name, options = VARIANTS[given.trained_by]
        network = credit_learning.train(
            world, network, levels, name, options, rng, steps=given.steps, learning_rate=world.learning_rate
        )
    won = float(play(world, network, [level for level in levels for _ in range(4)], rng).won.mean())
    print(f"success of the policy: {won:.3f}\n")
    print("| estimator | turns | batch | mean | largest |\n|---|---|---|---|---|")
    chosen = {label: VARIANTS[label] for label in given.variants or VARIANTS}
    for label, correlation, cosines, bias, largest in measure(world, network, levels, chosen, given.batches, rng):
        half = float(stats.t.ppf(0.975, len(cosines) - 1) * stats.sem(cosines))
        mean = float(cosines.mean())
        cells = f"{correlation:.3f} | {mean:.3f} [{mean - half:.3f}, {mean + half:.3f}] | {bias:.3f} | {largest:.1f}"
        print(f"| {label} | {cells} |", flush=True)


if __name__ == "__main__":
    flags.DEFINE_list("variants", [], "Names of the variants of credit_learning; all by default.")
    flags.DEFINE_integer("steps", 0, "Batches of training before.", lower_bound=0)
    flags.DEFINE_string("trained_by", "rewardflow", "Variant that trains them.")
    flags.DEFINE_integer("batches", 48, "Batches for the estimators, and as many for the true gradient.", lower_bound=2)
    flags.DEFINE_integer("levels", 200, "Training levels.", lower_bound=1)
    flags.DEFINE_integer("turns", 15, "Turns of an episode.", lower_bound=1)
    flags.DEFINE_integer("min_moves", 1, "Of the shortest solution.", lower_bound=1)
    app.run(main)
