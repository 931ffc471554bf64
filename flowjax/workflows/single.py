"""One agent plays one environment: each turn has its own prompt with a few past turns, or all are one conversation."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowjax.envs import Context, EnvDied, Message, Observation, Past, RemoteEnv, Step, Style, World, kept_answer
from flowjax.records import Status, Task, Turn
from flowjax.workflows import Agent, AgentTurns, Played, Reply, record_turn, shown_as
from flowjax.workflows.codec import PromptTooLong

OUTCOMES = {"agent": ("turns", "invalid_actions", "env_return")}  # `play` adds them to the world's
EPISODE_OUTCOMES = ("turns", "invalid_actions", "env_return")
DEFAULT_HISTORY: Mapping[Style, int] = {"instruct": 2, "compact": 0}
AGENTS = ("agent",)  # `config.agents` names the policy or base model of each
AGENT = AGENTS[0]


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """Settings of an episode. `history` is the number of past turns that a window shows, -1 the style's default."""

    world: World
    max_turns: int = 15
    prompt: Style = "instruct"
    context: Context = "window"
    history: int = -1


@dataclass(frozen=True, slots=True)
class Move:
    """One turn that was played: the reply, the action that it names ("" for none), and the world's answer to it."""

    reply: Reply
    action: str
    step: Step
    turn: Turn


async def take_turn(
    agent: Agent,
    messages: Sequence[Message],
    observation: Observation,
    *,
    options: EpisodeOptions,
    env: RemoteEnv,
    after: Reply | None = None,
) -> Move:
    """Ask `agent` with `messages`, the wording of `observation`, and do what it says. `after` as for `Agent.act`."""
    return await do(await agent.act(messages, after=after), observation, options=options, env=env)


async def do(reply: Reply, observation: Observation, *, options: EpisodeOptions, env: RemoteEnv) -> Move:
    """Carry out the action that a reply to `observation` names."""
    action, well_formed = options.world.read(reply.text, observation.legal_actions, options.prompt)
    started_s = time.perf_counter()
    step = await env.step(action)
    # An action can be read out of a reply that breaks the format: it is played, and the turn is invalid all the same.
    step = replace(step, valid=step.valid and well_formed)
    turn = record_turn(reply, observation, step, env_s=time.perf_counter() - started_s, action=action)
    return Move(reply, action, step, turn)


def turn_counts(turns: Sequence[Turn]) -> dict[str, float]:
    """Outcomes of one part's turns that a workflow adds to the world's."""
    return {
        "turns": float(len(turns)),
        "invalid_actions": float(sum(not turn.valid for turn in turns)),
        "env_return": float(sum(turn.env_reward for turn in turns)),
    }


async def play(
    task: Task, *, seed: int, env: RemoteEnv, agents: Mapping[str, Agent], options: EpisodeOptions
) -> Played:
    """Play `task` until it ends or `options.max_turns` actions are taken.

    A reply that names no legal action is a turn like any other: the world answers "" with `valid=False`. When the
    prompt grows too long or the environment dies, the turns so far are returned with that status. Errors of the engine
    pass through.
    """
    world = options.world
    window = DEFAULT_HISTORY[options.prompt] if options.history < 0 else options.history
    past: list[Past] = []
    turns: list[Turn] = []
    move: Move | None = None
    observation: Observation | None = None
    outcome: dict[str, float] = {}
    status: Status = "ok"
    error = answer = ""
    try:
        observation = await env.reset(task, seed)
        for number in range(1, options.max_turns + 1):
            if options.context == "append" and move is not None:
                messages, after = world.follow_up(observation, options.prompt), move.reply
            else:
                # `past[-0:]` would be all of the past.
                messages, after = world.prompt(observation, past[-window:] if window > 0 else [], options.prompt), None
            move = await take_turn(agents[AGENT], messages, observation, options=options, env=env, after=after)
            turns.append(move.turn)
            past.append(Past(number, observation.view, move.action))
            answer = world.answer(move.action, move.step.observation) or answer
            observation = move.step.observation
            outcome.update(move.step.outcome)
            if move.step.terminal:
                break
    except PromptTooLong as too_long:
        status, error = "truncated", str(too_long)
    except EnvDied as died:
        status, error = died.status, str(died)
    if not turns:  # after a turn the world has reported them; one that it leaves out must not count as 0, a failure
        outcome = dict.fromkeys(world.OUTCOMES, 0.0)
    outcome |= turn_counts(turns)
    last = shown_as(view=observation.view) if observation is not None else ""
    return Played([AgentTurns(AGENT, turns, outcome, last)], outcome, status, error, kept_answer(answer))
