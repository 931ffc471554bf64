"""An agent answers a problem at once, or first has helpers answer parts of it; helpers may have helpers, too.

For worlds whose episode is one action. Each agent is a part of its own, and every part is rewarded for the first
agent's final answer. AstraFlow's spawning workflow (reference workflow `spawn_rlvr`), with helpers of helpers and a
budget of `config.env.max_turns` replies. A spawn takes its replies from the budget at once: one for each helper, and
one for the answer after theirs. Agents that can reply at the same time do, in a fixed order, so that evaluations can be
repeated.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowjax.envs import EnvDied, Message, Observation, RemoteEnv, Step, Style, World, kept_answer, user_says, with_more
from flowjax.envs.demonstrations import Exchange, Tasks
from flowjax.grading.answers import without_thoughts
from flowjax.records import Status, Task, Turn, state_key
from flowjax.workflows import Agent, AgentTurns, Played, Reply, record_turn
from flowjax.workflows.codec import PromptTooLong
from flowjax.workflows.single import AGENT, EpisodeOptions, do, turn_counts
from flowjax.workflows.solver_verifier import answered

OUTCOMES = {"agent": ("helpers",), "helper": ("helpers",)}
EPISODE_OUTCOMES = ("helpers",)
AGENTS = ("agent", "helper")
HELPER = AGENTS[1]
MOST_TASKS = 4  # of a spawn
DEPTH = 2  # levels of helpers
SPAWN, AND, GOT = "spawn", "and", "got"  # compact: before the tasks, between them, and before the answers

OFFER = f"""

You may have parts of this answered first. Then reply with nothing but
<spawn>{{"tasks": ["...", "..."]}}</spawn> and one to {MOST_TASKS} tasks. Whoever answers a task sees its text alone."""
ANSWERED = """

These parts have been answered:

{answers}

Now give your own answer."""


@dataclass(eq=False)
class _Respondent:
    """An agent with a problem to answer, the tasks that it gave to helpers, and their answers so far."""

    problem: Observation
    parent: "_Respondent | None" = None
    place: int = 0  # index of its task among the parent's
    tasks: Sequence[str] = ()
    answers: dict[int, str] = field(default_factory=dict[int, str])
    turns: list[Turn] = field(default_factory=list[Turn])

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def seen(self) -> Observation:
        """Its problem; once its helpers have answered, with their answers in the state key."""
        said = [self.answers[place] for place in range(len(self.tasks))]
        return replace(self.problem, state_key=state_key(self.problem.state_key, *said)) if said else self.problem

    def may_spawn(self, tasks: Sequence[str], left: int) -> bool:
        """True where these helpers, and the agent's own answer after theirs, are within the limits; each agent may
        spawn once."""
        return not self.tasks and self.depth < DEPTH and 0 < len(tasks) <= MOST_TASKS and len(tasks) + 1 <= left

    def spawn(self, tasks: Sequence[str], reply: Reply) -> list["_Respondent"]:
        """Record the spawn; returns the helpers, which reply next."""
        self._record(reply, Step(self._after(*tasks), 0.0, terminal=False, valid=True), json.dumps(tasks))
        self.tasks = tasks
        return [_Respondent(Observation(text, (), state_key(text)), self, place) for place, text in enumerate(tasks)]

    def answer(self, reply: Reply) -> list["_Respondent"]:
        """Give the answer to the parent. Returns the parent, as next to reply, if it waits for no other answer."""
        assert self.parent is not None
        said = without_thoughts(reply.text)
        self._record(reply, Step(self._after(said), 0.0, terminal=True, valid=bool(said)), said)
        self.parent.answers[self.place] = said
        return [self.parent] if len(self.parent.answers) == len(self.parent.tasks) else []

    def _after(self, *said: str) -> Observation:
        return Observation("", (), state_key(self.seen.state_key, *said))

    def _record(self, reply: Reply, step: Step, action: str) -> None:
        self.turns.append(record_turn(reply, self.seen, step, env_s=0.0, action=action))


async def play(
    task: Task, *, seed: int, env: RemoteEnv, agents: Mapping[str, Agent], options: EpisodeOptions
) -> Played:
    """The agent's answer, after its helpers' answers if it asked for any.

    A spawn is refused if the agent has had helpers or is at the last level, if it has no readable tasks or more than
    `MOST_TASKS`, or if too few replies are left: the turn is then invalid, and the answer empty. Outcome besides the
    world's: `helpers`, their number.
    """
    asked: list[_Respondent] = []
    outcome = dict.fromkeys(options.world.OUTCOMES, 0.0)
    status: Status = "ok"
    error = answer = ""
    try:
        asked.append(_Respondent(await env.reset(task, seed)))
        ready, left = list(asked), options.max_turns - 1  # one is the first agent's
        while ready:
            turned = zip(ready, await _replies(ready, agents, options), strict=True)
            ready = []
            for one, reply in turned:
                tasks = parse_spawn(reply.text, options.prompt)
                if tasks is not None and one.may_spawn(tasks, left):
                    left -= len(tasks) + 1
                    helpers = one.spawn(tasks, reply)
                    asked += helpers
                    ready += helpers
                    continue
                reply = reply if tasks is None else replace(reply, text="")  # a refused spawn is no answer
                if one.parent is not None:
                    ready += one.answer(reply)
                    continue
                move = await do(reply, one.seen, options=options, env=env)
                one.turns.append(move.turn)
                outcome |= move.step.outcome
                answer = options.world.answer(move.action, move.step.observation)
    except PromptTooLong as too_long:
        status, error = "truncated", str(too_long)
    except EnvDied as died:
        status, error = died.status, str(died)
    outcome["helpers"] = float(len(asked[1:]))
    parts = [
        AgentTurns(HELPER if one.parent else AGENT, one.turns, {**outcome, **turn_counts(one.turns)})
        for one in asked
        if one.turns
    ]
    return Played(parts, outcome, status, error, kept_answer(answer))


async def _replies(ready: Sequence[_Respondent], agents: Mapping[str, Agent], options: EpisodeOptions) -> list[Reply]:
    """Replies of the agents, in their order, sampled at the same time."""
    said = [agents[HELPER if one.parent else AGENT].act(_messages(one, options.world, options.prompt)) for one in ready]
    # When one fails, the others are still waited for: none runs on in an episode that is over.
    found = await asyncio.gather(*said, return_exceptions=True)
    # A prompt that is too long truncates the episode, as the policy's fault: any other error is raised first.
    errors = [each for each in found if isinstance(each, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, PromptTooLong)):
        raise error
    return [each for each in found if not isinstance(each, BaseException)]


def _messages(one: _Respondent, world: World, style: Style) -> list[Message]:
    messages = world.prompt(one.problem, [], style) if one.parent is None else user_says(one.problem.text)
    return worded(messages, one.tasks, [one.answers[place] for place in range(len(one.tasks))], style, one.depth)


def worded(
    messages: list[Message], tasks: Sequence[str], answers: Sequence[str], style: Style, depth: int = 0
) -> list[Message]:
    """Messages with the helpers' answers where there are any. Without answers, instruct prompts offer helpers, except
    on the last level; compact prompts do not."""
    if style == "compact":
        more = f" {GOT} {f' {AND} '.join(answers)}" if answers else ""
    elif answers:
        pairs = zip(tasks, answers, strict=True)
        more = ANSWERED.format(answers="\n\n".join(f"{task}\nAnswer: {answer}" for task, answer in pairs))
    else:
        more = OFFER if depth < DEPTH else ""
    return with_more(messages, more)


def parse_spawn(reply: str, style: Style = "instruct") -> list[str] | None:
    """The tasks of a reply that asks for helpers, [] where they cannot be read; None for a reply that asks for none."""
    text = without_thoughts(reply)
    if style == "compact":
        first, _, rest = text.strip().partition(" ")
        return [part.strip() for part in f" {rest} ".split(f" {AND} ") if part.strip()] if first == SPAWN else None
    _, tag, rest = text.rpartition("<spawn>")
    if not tag:
        return None
    try:
        tasks = json.loads(rest.partition("</spawn>")[0])["tasks"]
        "".join(tasks).encode()  # raises for a lone surrogate, which UTF-8 cannot encode
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    sound = isinstance(tasks, list) and all(isinstance(each, str) and each.strip() for each in tasks)
    return [each.strip() for each in tasks] if sound else []


def vocabulary() -> tuple[str, ...]:
    """The words that compact prompts and replies of this workflow add to the world's."""
    return (SPAWN, AND, GOT)


# Called in place of `envs.demonstrations.demonstrations`, most of whose parameters mean nothing here.
def demonstrations(
    world: World, tasks: Tasks, *, label_noise: float, style: Style, rng: np.random.Generator, **_: Any
) -> Iterator[list[Exchange]]:
    """Spawns, helpers' answers and answers after them of an expert, without end, for generated sums.

    A share `label_noise` of the problems is answered at once, although they could be split.
    """

    for problem, right, _wrong in answered(world, tasks, style, rng):
        messages = world.prompt(problem, [], style)
        halves = split_sum(problem.view.question)
        if not halves or rng.random() < label_noise:
            yield [(worded(messages, (), (), style), right)]
            continue
        texts = [" ".join(text) if style == "compact" else text for text, _ in halves]
        values = [world.reply(value, style) for _, value in halves]
        yield [(worded(messages, (), (), style), spawn_reply(texts, style))]
        for text, value in zip(texts, values, strict=True):
            yield [(worded(user_says(text), (), (), style, depth=1), value)]
        yield [(worded(messages, texts, values, style), right)]


def spawn_reply(tasks: Sequence[str], style: Style) -> str:
    """The reply that asks for these; `parse_spawn` reads them back."""
    if style == "compact":
        return f"{SPAWN} {f' {AND} '.join(tasks)}"
    return f"<spawn>{json.dumps({'tasks': list(tasks)})}</spawn>"


def split_sum(question: str) -> list[tuple[str, str]]:
    """The two halves of a generated sum of four or more terms, each with its value; [] for any other problem."""
    terms = question.removesuffix("=?").split("+")
    if len(terms) < 4 or not all(term.isdecimal() for term in terms):
        return []
    middle = len(terms) // 2
    return [(f"{'+'.join(half)}=?", str(sum(map(int, half)))) for half in (terms[:middle], terms[middle:])]
