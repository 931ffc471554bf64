"""A router chooses which of two models answers: the small one, or the large one where the small one would fail.

For worlds whose episode is one action. Both models answer every problem, also in evaluation: only so is the result of
the other choice known. The choice is rewarded with 1 for the cheapest model that is right, 0 for another model, 1/2
where no model is right, and -1/2 for a reply that names no model. AstraFlow's router (reference workflow `router`), in
any such world.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flowjax.envs import EnvDied, Message, Observation, RemoteEnv, Step, Style, World, kept_answer, with_more
from flowjax.envs.demonstrations import Exchange, Tasks
from flowjax.grading.answers import without_thoughts
from flowjax.records import Status, Task, state_key
from flowjax.workflows import Agent, AgentTurns, Played, Reply, record_turn
from flowjax.workflows.codec import PromptTooLong
from flowjax.workflows.single import EpisodeOptions, take_turn, turn_counts
from flowjax.workflows.solver_verifier import answered, near_miss, parse_choice, question

AGENTS = ("router", "small", "large")
ROUTER, MODELS = AGENTS[0], AGENTS[1:]  # the cheapest model first
OUTCOMES = {"router": ("score", "small_success", "large_success", "either_success", "large_chosen")}
EPISODE_OUTCOMES = ("small_success", "large_success", "either_success", "large_chosen")
ROUTE = "route"  # compact: after a problem that is to be routed

CHOOSE = """One of two models is to solve this problem:

{problem}

The small one is cheap and makes mistakes, the large one is expensive and better. Choose the small one if it will solve
the problem, and the large one if only that will. Do not solve it. End with exactly <model>small</model> or
<model>large</model>."""


async def play(
    task: Task, *, seed: int, env: RemoteEnv, agents: Mapping[str, Agent], options: EpisodeOptions
) -> Played:
    """A choice, and the answers of both models; without a choice the small model's answer counts.

    The episode's success and answer are those of the chosen model. Its other outcomes: `small_success` and
    `large_success`, which each model reaches alone; `either_success`, which a perfect router would reach; and
    `large_chosen`, the price. The choice's part reports all of them, and its reward as `score`.
    """
    outcome = dict.fromkeys((*options.world.OUTCOMES, *EPISODE_OUTCOMES), 0.0)
    parts: list[AgentTurns] = []
    status: Status = "ok"
    error = answer = ""
    try:
        problem = await env.reset(task, seed)
        reply = await agents[ROUTER].act(to_route(options.world, problem, options.prompt))
        choice = parse_choice(without_thoughts(reply.text), "model", MODELS, options.prompt)
        answers: dict[str, str] = {}
        reached: dict[str, Mapping[str, float]] = {}
        for model in MODELS:
            asked = await env.reset(task, seed)  # one action ends an episode of these worlds: each model starts anew
            messages = options.world.prompt(asked, [], options.prompt)
            move = await take_turn(agents[model], messages, asked, options=options, env=env)
            answers[model], reached[model] = options.world.answer(move.action, move.step.observation), move.step.outcome
            parts.append(AgentTurns(model, [move.turn], {**move.step.outcome, **turn_counts([move.turn])}))
        chosen = choice or MODELS[0]
        right = {model: reached[model].get("success", 0.0) for model in MODELS}
        answer = answers[chosen]
        outcome |= {f"{model}_success": right[model] for model in MODELS}
        outcome |= {**reached[chosen], "either_success": max(right.values()), "large_chosen": float(chosen == "large")}
        parts.append(_choice_part(reply, problem, choice, score_choice(choice, right), outcome))
    except PromptTooLong as too_long:
        status, error = "truncated", str(too_long)
    except EnvDied as died:
        status, error = died.status, str(died)
    return Played(parts, outcome, status, error, kept_answer(answer))


def score_choice(choice: str, right: Mapping[str, float]) -> float:
    """Reward of a choice ("" for none). `right` is 1 for each model whose answer is right, the cheapest model first."""
    if not choice:
        return -0.5
    solving = [model for model, success in right.items() if success >= 1.0]
    return float(choice == solving[0]) if solving else 0.5


def to_route(world: World, problem: Observation, style: Style) -> list[Message]:
    """The router's messages."""
    if style == "compact":
        return with_more(world.prompt(problem, [], style), f" {ROUTE}")
    return [{"role": "user", "content": CHOOSE.format(problem=question(world, problem))}]


def _choice_part(
    reply: Reply, problem: Observation, choice: str, score: float, outcome: Mapping[str, float]
) -> AgentTurns:
    before = Observation(problem.view, MODELS, state_key(problem.state_key, ROUTE))
    after = Observation("", (), state_key(problem.state_key, ROUTE, choice))
    turn = record_turn(reply, before, Step(after, score, True, bool(choice)), env_s=0.0, action=choice)
    return AgentTurns(ROUTER, [turn], {**outcome, "score": score, **turn_counts([turn])})


def vocabulary() -> tuple[str, ...]:
    """The words that compact prompts and replies of this workflow add to the world's."""
    return (ROUTE, *MODELS)


# Called in place of `envs.demonstrations.demonstrations`, most of whose parameters mean nothing here.
def demonstrations(
    world: World, tasks: Tasks, *, label_noise: float, style: Style, rng: np.random.Generator, **_: Any
) -> Iterator[list[Exchange]]:
    """Answers of an expert, and choices, in turn, without end.

    A share `label_noise` of the answers is wrong. The expert chooses without knowing the models: a problem longer than
    the one before it goes to the large model, a shorter one to the small model, and one as long to either at random.
    """
    last = 0
    for problem, right, wrong in answered(world, tasks, style, rng):
        slip = near_miss(right, rng) if style == "compact" else wrong
        yield [(world.prompt(problem, [], style), slip if rng.random() < label_noise else right)]
        length = len(question(world, problem))
        choice = MODELS[rng.integers(len(MODELS))] if length == last else MODELS[int(length > last)]
        last = length
        yield [(to_route(world, problem, style), choice if style == "compact" else f"<model>{choice}</model>")]
