"""A solver answers twice, and a selector chooses one of the answers.

For worlds whose episode is one action. Each attempt is a part of its own, rewarded for being right, and so is the
choice: 1 for the only right answer, 0 for the only wrong one or a reply without a choice, and 1/2 where both are right
or both wrong, so that no choice is better. AstraFlow's solve-and-select (reference workflow `code_solve_and_select`),
in any such world. The selector reasons before its choice; in compact prompts its reasoning is its own answer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flowjax.envs import EnvDied, Message, Observation, RemoteEnv, Step, Style, World, kept_answer, with_more
from flowjax.envs.demonstrations import Exchange, Tasks
from flowjax.grading.answers import without_thoughts
from flowjax.records import Status, Task, state_key
from flowjax.workflows import Agent, AgentTurns, Played, record_turn
from flowjax.workflows.codec import PromptTooLong
from flowjax.workflows.single import EpisodeOptions, turn_counts
from flowjax.workflows.solver_verifier import SOLVER, answered, attempt, near_miss, parse_choice, question

OUTCOMES = {"selector": ("success", "score")}  # of every choice; also `decided_right` where only one attempt is right
EPISODE_OUTCOMES = ("success", "first_success", "either_success")
AGENTS = ("solver", "selector")
SELECTOR = AGENTS[1]
CHOICES = ("a", "b")
PICK, OR = "pick", "or"  # compact: before the two answers, and between them

SELECT = """Two agents have answered this problem:

{problem}

Answer A:

{first}

Answer B:

{second}

One of them may be wrong. Work out which one is right; then end with exactly <final>A</final> or <final>B</final>."""


async def play(
    task: Task, *, seed: int, env: RemoteEnv, agents: Mapping[str, Agent], options: EpisodeOptions
) -> Played:
    """Two attempts and a choice; without a choice the first attempt counts.

    The episode's success and answer are those of the chosen attempt. Its other outcomes: `first_success`, and
    `either_success`, which a perfect selector would reach. The choice's outcomes: `success`, the episode's; `score`,
    its reward; and `decided_right` where only one attempt is right: 1 if the reply chose that one, 0 without a choice.
    """
    parts: list[AgentTurns] = []
    outcome = {"success": 0.0, "first_success": 0.0, "either_success": 0.0}
    status: Status = "ok"
    error = answer = ""
    try:
        attempts = [await attempt(task, seed, env, agents[SOLVER], options, "", parts) for _ in CHOICES]
        said, answers, rights = zip(*attempts, strict=True)
        answer = answers[0]
        outcome |= {"success": rights[0], "first_success": rights[0], "either_success": max(rights)}
        chosen = await _choose(task, seed, env, agents[SELECTOR], options, said, rights, parts)
        answer = answers[chosen]
        outcome["success"] = rights[chosen]
    except PromptTooLong as too_long:
        status, error = "truncated", str(too_long)
    except EnvDied as died:
        status, error = died.status, str(died)
    return Played(parts, outcome, status, error, kept_answer(answer))


async def _choose(
    task: Task,
    seed: int,
    env: RemoteEnv,
    selector: Agent,
    options: EpisodeOptions,
    said: tuple[str, ...],
    rights: tuple[float, ...],
    parts: list[AgentTurns],
) -> int:
    """Index of the chosen attempt; appends the choice to `parts`."""
    problem = await env.reset(task, seed)
    reply = await selector.act(_to_select(options.world, problem, options.prompt, *said))
    choice = parse_choice(without_thoughts(reply.text), "final", CHOICES, options.prompt)
    chosen = CHOICES.index(choice) if choice else 0
    differ = (rights[0] >= 1.0) != (rights[1] >= 1.0)
    score = float(rights[chosen] >= 1.0) if differ else 0.5
    score = score if choice else 0.0
    before = Observation("", CHOICES, state_key(problem.state_key, *said))
    after = Observation("", (), state_key(problem.state_key, *said, choice))
    turn = record_turn(reply, before, Step(after, score, True, bool(choice)), env_s=0.0, action=choice)
    outcome = {"success": rights[chosen], "score": score, **({"decided_right": score} if differ else {})}
    parts.append(AgentTurns(SELECTOR, [turn], {**outcome, **turn_counts([turn])}))
    return chosen


def _to_select(world: World, problem: Observation, style: Style, first: str, second: str) -> list[Message]:
    if style == "compact":
        return with_more(world.prompt(problem, [], style), f" {PICK} {first} {OR} {second}")
    shown = SELECT.format(problem=question(world, problem), first=first, second=second)
    return [{"role": "user", "content": shown}]


def vocabulary() -> tuple[str, ...]:
    """The words that compact prompts and replies of this workflow add to the world's."""
    return (PICK, OR, *CHOICES)


# Called in place of `envs.demonstrations.demonstrations`, some of whose parameters mean nothing here.
def demonstrations(
    world: World,
    tasks: Tasks,
    *,
    style: Style,
    path_noise: float,
    label_noise: float,
    rng: np.random.Generator,
    **_: Any,
) -> Iterator[list[Exchange]]:
    """Attempts and choices of an expert, in turn, without end.

    A share `path_noise` of the answers shown to the selector is not the expert's: in compact prompts half of them are
    near misses. A share `label_noise` of all replies is a wrong answer, or the choice of a selector that believes one.
    """
    for problem, right, wrong in answered(world, tasks, style, rng):
        slip = near_miss(right, rng) if style == "compact" else wrong
        attempted, held = (slip if rng.random() < label_noise else right for _ in range(2))
        yield [(world.prompt(problem, [], style), attempted)]
        shown = [_shown(right, wrong, style, path_noise, rng) for _ in CHOICES]
        yield [(_to_select(world, problem, style, *shown), _choice_reply(held, shown, style, rng))]


def _shown(right: str, wrong: str, style: Style, path_noise: float, rng: np.random.Generator) -> str:
    if rng.random() >= path_noise:
        return right
    return near_miss(right, rng) if style == "compact" and rng.random() < 0.5 else wrong


def _choice_reply(held: str, shown: list[str], style: Style, rng: np.random.Generator) -> str:
    """The choice of a selector that believes the answer `held`; random where both or neither of those shown is it."""
    agreeing = [choice for choice, answer in zip(CHOICES, shown, strict=True) if answer == held]
    choice = agreeing[0] if len(agreeing) == 1 else CHOICES[rng.integers(len(CHOICES))]
    return f"{held} {choice}" if style == "compact" else f"<final>{choice.upper()}</final>"
