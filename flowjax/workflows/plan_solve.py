"""A planner writes a plan, and a solver answers with that plan in its prompt.

For worlds whose episode is one action. The plan and the answer are one part each, and both are rewarded if the answer
is right: a plan is worth what the solver makes of it. AstraFlow's plan-and-solve (reference workflow `plan_and_solve`),
in any such world. In compact prompts a plan is a list of partial results, in words of the world.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flowjax.envs import EnvDied, Message, Observation, RemoteEnv, Step, Style, World, kept_answer, with_more
from flowjax.envs.demonstrations import Exchange, Tasks
from flowjax.grading.answers import without_thoughts
from flowjax.records import Status, Task, Turn, state_key
from flowjax.workflows import Agent, AgentTurns, Played, record_turn
from flowjax.workflows.codec import PromptTooLong
from flowjax.workflows.single import EpisodeOptions, take_turn, turn_counts
from flowjax.workflows.solver_verifier import SOLVER, answered, question
from flowjax.workflows.spawn import AND, split_sum

OUTCOMES = {"planner": ("planned",), "solver": ("planned",)}
EPISODE_OUTCOMES = ("planned",)
AGENTS = ("planner", "solver")
PLANNER = AGENTS[0]
PLAN = "plan"  # compact: after a problem, and before its plan where there is one

MAKE_PLAN = """Another agent is to solve this problem:

{problem}

Write a plan for it: the steps that lead to the answer, in their order, and what to beware of. Do not solve it."""
WITH_PLAN = """

A plan for it:

{plan}"""


async def play(
    task: Task, *, seed: int, env: RemoteEnv, agents: Mapping[str, Agent], options: EpisodeOptions
) -> Played:
    """A plan, and an answer with it; without one the solver sees the problem alone.

    Outcome besides the world's: `planned`, 1 where there was a plan.
    """
    turns: list[tuple[str, Turn]] = []
    outcome = dict.fromkeys((*options.world.OUTCOMES, *EPISODE_OUTCOMES), 0.0)
    status: Status = "ok"
    error = answer = ""
    try:
        problem = await env.reset(task, seed)
        reply = await agents[PLANNER].act(to_plan(options.world, problem, options.prompt))
        plan = without_thoughts(reply.text)
        outcome["planned"] = float(bool(plan))
        # The plan is part of the solver's state key: credit then never compares answers to different plans as if they
        # were given in the same state.
        planned = Observation(problem.view, problem.legal_actions, state_key(problem.state_key, PLAN, plan))
        before = Observation(problem.view, (), state_key(problem.state_key, PLAN))
        turn = record_turn(reply, before, Step(planned, 0.0, True, bool(plan)), env_s=0.0, action=plan)
        turns.append((PLANNER, turn))
        messages = to_solve(options.world, problem, options.prompt, plan)
        move = await take_turn(agents[SOLVER], messages, planned, options=options, env=env)
        turns.append((SOLVER, move.turn))
        answer = options.world.answer(move.action, move.step.observation)
        outcome |= move.step.outcome
    except PromptTooLong as too_long:
        status, error = "truncated", str(too_long)
    except EnvDied as died:
        status, error = died.status, str(died)
    parts = [AgentTurns(name, [turn], {**outcome, **turn_counts([turn])}) for name, turn in turns]
    return Played(parts, outcome, status, error, kept_answer(answer))


def to_plan(world: World, problem: Observation, style: Style) -> list[Message]:
    """The planner's messages."""
    if style == "compact":
        return with_more(world.prompt(problem, [], style), f" {PLAN}")
    return [{"role": "user", "content": MAKE_PLAN.format(problem=question(world, problem))}]


def to_solve(world: World, problem: Observation, style: Style, plan: str) -> list[Message]:
    """The solver's messages, with the plan where there is one."""
    more = f" {PLAN} {plan}" if style == "compact" else WITH_PLAN.format(plan=plan)
    return with_more(world.prompt(problem, [], style), more if plan else "")


def vocabulary() -> tuple[str, ...]:
    """The words that compact prompts and replies of this workflow add to the world's."""
    return (PLAN, AND)


# Called in place of `envs.demonstrations.demonstrations`, most of whose parameters mean nothing here.
def demonstrations(
    world: World, tasks: Tasks, *, label_noise: float, style: Style, rng: np.random.Generator, **_: Any
) -> Iterator[list[Exchange]]:
    """Plans and answers of an expert, in turn, without end, for generated sums: a plan is the values of the two halves.

    A share `label_noise` of the problems has an empty plan: the habit of a planner that leaves the work to the solver.
    """

    for problem, right, _wrong in answered(world, tasks, style, rng):
        halves = [world.reply(value, style) for _, value in split_sum(problem.view.question)]
        plan = "" if rng.random() < label_noise else f" {AND} ".join(halves)
        yield [(to_plan(world, problem, style), plan)]
        yield [(to_solve(world, problem, style, plan), right)]
