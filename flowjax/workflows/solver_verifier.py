"""A solver answers, a verifier approves or rejects, and after a rejection the solver tries once more.

For worlds whose episode is one action. Each attempt and each verdict is a part of its own, rewarded by its own outcome:
an attempt by being right, a verdict by agreeing with the truth. AstraFlow's solver-verifier recipe (reference workflow
`actor_and_verify`), with the world's own verdict in place of its scorer. The verifier reasons before its verdict; in
compact prompts its reasoning is its own answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from flowjax.envs import Context, EnvDied, Message, Observation, RemoteEnv, Step, Style, World, kept_answer, with_more
from flowjax.envs.demonstrations import Exchange, Tasks
from flowjax.grading.answers import between_tags, without_thoughts
from flowjax.records import Status, Task, state_key
from flowjax.workflows import Agent, AgentTurns, Played, record_turn
from flowjax.workflows.codec import PromptTooLong
from flowjax.workflows.single import EpisodeOptions, take_turn, turn_counts

OUTCOMES = {"verifier": ("success", "answer_right")}  # of every verdict; also one of `approved_right`, `rejected_wrong`
EPISODE_OUTCOMES = ("success", "attempts", "approved", "verdict_right")
AGENTS = ("solver", "verifier")
SOLVER, VERIFIER = AGENTS
APPROVE, REJECT = "approve", "reject"
CHECK, WRONG = "check", "not"  # compact: before an answer to be judged, and before one that was rejected

VERIFY = """Another agent has answered this problem:

{problem}

Its answer:

{answer}

Judge whether the answer is right. Reason first; then end with exactly <verdict>approve</verdict> or
<verdict>reject</verdict>."""
RETRY = """

An earlier answer was rejected by a reviewer.

The answer:

{answer}

The review:

{review}

Answer anew."""


async def play(
    task: Task, *, seed: int, env: RemoteEnv, agents: Mapping[str, Agent], options: EpisodeOptions
) -> Played:
    """One attempt, one verdict, and another attempt if the verdict is a rejection.

    The episode's success and answer are those of the last attempt. Its other outcomes: `attempts`, `approved`,
    `verdict_right`. A verdict's outcomes: `success` where it agrees with the truth; `answer_right`, the truth; and the
    same success as `approved_right` where the answer is right, as `rejected_wrong` where it is wrong.
    """
    parts: list[AgentTurns] = []
    outcome = {"success": 0.0, "attempts": 0.0, "approved": 0.0, "verdict_right": 0.0}
    status: Status = "ok"
    error = answer = ""
    try:
        said, answer, right = await attempt(task, seed, env, agents[SOLVER], options, "", parts)
        outcome |= {"success": right, "attempts": 1.0}
        verdict, review, agrees = await _judge(task, env, seed, agents[VERIFIER], options, said, right, parts)
        outcome |= {"approved": float(verdict == APPROVE), "verdict_right": agrees}
        if verdict == REJECT:
            _, answer, right = await attempt(task, seed, env, agents[SOLVER], options, said, parts, review)
            outcome |= {"success": right, "attempts": 2.0}
    except PromptTooLong as too_long:
        status, error = "truncated", str(too_long)
    except EnvDied as died:
        status, error = died.status, str(died)
    return Played(parts, outcome, status, error, kept_answer(answer))


async def attempt(
    task: Task,
    seed: int,
    env: RemoteEnv,
    solver: Agent,
    options: EpisodeOptions,
    rejected: str,
    parts: list[AgentTurns],
    review: str = "",
) -> tuple[str, str, float]:
    """Play one attempt and append it to `parts`; an action ends these worlds' episodes, so the environment is reset.

    Returns the solver's reply without thoughts, its answer in the form that the world compares, and its success.
    """
    observation = await env.reset(task, seed)
    asked = _asked(options.world, observation, options.prompt, rejected, review)
    if rejected or review:  # a solver that has read a review is in another state than one that has not
        observation = replace(observation, state_key=state_key(observation.state_key, rejected, review))
    move = await take_turn(solver, asked, observation, options=options, env=env)
    step = move.step
    parts.append(AgentTurns(SOLVER, [move.turn], {**step.outcome, **turn_counts([move.turn])}))
    answer = options.world.answer(move.action, step.observation)
    return without_thoughts(move.reply.text), answer, step.outcome.get("success", 0.0)


async def _judge(
    task: Task,
    env: RemoteEnv,
    seed: int,
    verifier: Agent,
    options: EpisodeOptions,
    answer: str,
    right: float,
    parts: list[AgentTurns],
) -> tuple[str, str, float]:
    """Ask the verifier and append its verdict to `parts`.

    Returns the verdict ("" for none), the reply without thoughts, and 1 if the verdict agrees with the truth.
    """
    problem = await env.reset(task, seed)
    reply = await verifier.act(_to_judge(options.world, problem, options.prompt, answer))
    review = without_thoughts(reply.text)
    verdict = parse_verdict(review, options.prompt)
    agrees = float(bool(verdict) and (verdict == APPROVE) == (right >= 1.0))
    before = Observation("", (APPROVE, REJECT), state_key(problem.state_key, answer))
    after = Observation("", (), state_key(problem.state_key, answer, verdict))
    step = Step(after, agrees, True, bool(verdict))
    turn = record_turn(reply, before, step, env_s=0.0, action=verdict)
    called_for = "approved_right" if right >= 1.0 else "rejected_wrong"
    outcome = {"success": agrees, "answer_right": float(right >= 1.0), called_for: agrees}
    parts.append(AgentTurns(VERIFIER, [turn], {**outcome, **turn_counts([turn])}))
    return verdict, review, agrees


def parse_verdict(reply: str, style: Style = "instruct") -> str:
    """The verdict of a reply, "" for none."""
    return parse_choice(reply, "verdict", (APPROVE, REJECT), style)


def parse_choice(reply: str, tag: str, choices: Sequence[str], style: Style) -> str:
    """The choice inside the last `<tag>`. Without tags: the last word in compact style, else the whole reply.

    `choices` are in lower case. "" where the reply names none of them.
    """
    text = reply.lower().strip()
    inside = between_tags(text, tag)
    if inside == text and style == "compact":
        inside = text.rpartition(" ")[2]
    text = (inside or "").strip().strip(" .*`'\"")  # punctuation and Markdown around it
    return text if text in choices else ""


def _asked(world: World, observation: Observation, style: Style, rejected: str, review: str) -> list[Message]:
    messages = world.prompt(observation, [], style)
    if not rejected and not review:
        return messages
    more = f" {WRONG} {rejected}" if style == "compact" else RETRY.format(answer=rejected, review=review)
    return with_more(messages, more)


def _to_judge(world: World, problem: Observation, style: Style, answer: str) -> list[Message]:
    if style == "compact":
        return with_more(world.prompt(problem, [], style), f" {CHECK} {answer}")
    return [{"role": "user", "content": VERIFY.format(problem=question(world, problem), answer=answer)}]


def question(world: World, problem: Observation) -> str:
    """The problem in words: the view's `question` where it has one, else the solver's prompt with its answer format."""
    return getattr(problem.view, "question", None) or world.prompt(problem, [], "instruct")[-1]["content"]


def vocabulary() -> tuple[str, ...]:
    """The words that compact prompts and replies of this workflow add to the world's."""
    return (APPROVE, REJECT, CHECK, WRONG)


# Called in place of `envs.demonstrations.demonstrations`, whose parameters it therefore has.
def demonstrations(
    world: World,
    tasks: Tasks,
    *,
    path_noise: float,
    label_noise: float,
    max_turns: int,
    style: Style,
    rng: np.random.Generator,
    context: Context = "window",
    history: int = 0,
) -> Iterator[list[Exchange]]:
    """Attempts, verdicts and second attempts of an expert, in turn, without end.

    A share `path_noise` of the answers shown to the verifier is not the expert's: in compact prompts half of them are
    near misses. A share `label_noise` of all replies is a wrong answer, or the verdict of a verifier that believes one.
    """
    del max_turns, context, history
    for problem, right, wrong in answered(world, tasks, style, rng):
        wrong = near_miss(right, rng) if style == "compact" and rng.random() < 0.5 else wrong
        shown = wrong if rng.random() < path_noise else right
        slip = near_miss(right, rng) if style == "compact" else wrong
        attempted, held, again = (slip if rng.random() < label_noise else right for _ in range(3))
        yield [(world.prompt(problem, [], style), attempted)]
        yield [(_to_judge(world, problem, style, shown), _verdict_reply(held, shown, style))]
        if shown != right:
            yield [(_asked(world, problem, style, shown, _verdict_reply(right, shown, style)), again)]


def answered(
    world: World, tasks: Tasks, style: Style, rng: np.random.Generator
) -> Iterator[tuple[Observation, str, str]]:
    """Problems of the tasks, each with an expert's reply and a random one, without end."""
    env = world.env()
    while True:
        for index in range(len(tasks)):
            task: Task = tasks[index]
            problem = env.reset(task, task.seed)
            yield problem, world.reply(world.expert(env), style), world.reply(world.random_action(problem, rng), style)


def near_miss(reply: str, rng: np.random.Generator) -> str:
    """The reply with one word that is a single digit changed to another digit; the same reply if it has none."""
    words: Sequence[str] = reply.split()
    digits = [i for i, word in enumerate(words) if word.isdigit() and len(word) == 1]
    if not digits:
        return reply
    place = digits[rng.integers(len(digits))]
    changed = str((int(words[place]) + 1 + rng.integers(9)) % 10)
    return " ".join([*words[:place], changed, *words[place + 1 :]])


def _verdict_reply(held: str, shown: str, style: Style) -> str:
    """The verdict on the answer `shown`, by a verifier that believes the answer `held`."""
    verdict = APPROVE if shown == held else REJECT
    return f"{held} {verdict}" if style == "compact" else f"<verdict>{verdict}</verdict>"
