"""Episodes as async functions over named agents.

An agent takes messages and gives one reply of one policy, with the exact tokens that were sampled. The module of a
workflow declares, as literals, which are read without an import:

    AGENTS             the agents that it asks
    OUTCOMES           by agent: outcomes that each of its parts reports beside the world's, or in place of the world's
                       where `success` is among them
    EPISODE_OUTCOMES   the same for the whole episode, as evaluations report it
    COUNTS             those of EPISODE_OUTCOMES that are no shares of 1, such as a number of calls

A launch checks `config.agents` and the parameters of rewards against the first two; the metric of a sweep is checked
against the third. `COUNTS` is read where an evaluation's intervals are computed.
"""

import ast
import contextlib
import importlib.util
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from flowjax.envs import Message, Observation, Step, World, WorldError, view_values
from flowjax.fields import NAMED
from flowjax.records import LONGEST_SHOWN, Status, Turn

_LONGEST_TEXT = 4000  # characters of one text that is kept for people
_PLAYED = ("seed", "env", "agents", "options")  # keyword arguments of a workflow (`rollout.episode.Play`)
UNVERSIONED = -1  # version of replies from a model that is not a published policy


class Sampled(Protocol):
    """A completion from an engine.

    `spans` has each model name that the engine served (`<policy>@<version>` for a published policy) with the number of
    tokens sampled under it, in their order: several where weights were replaced in the middle of the reply.
    """

    @property
    def sampled_ids(self) -> Sequence[int] | np.ndarray: ...

    @property
    def logprobs(self) -> Sequence[float] | np.ndarray: ...

    @property
    def finish_reason(self) -> str: ...

    @property
    def spans(self) -> Sequence[tuple[str, int]]: ...


class Generate(Protocol):
    """Sample one completion of a prompt."""

    async def __call__(self, prompt_ids: list[int]) -> Sampled: ...


class Tokens(Protocol):
    """The part of a codec that agents need."""

    def encode(self, messages: Sequence[Message]) -> list[int]: ...

    def encode_after(self, reply: Sequence[int], messages: Sequence[Message]) -> list[int]: ...

    def within_limit(self, prompt_ids: list[int]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One completion, as text and as tokens. `generate_s` is the wait for the engine, queues included; `version` and
    `spans` as in a `Turn`."""

    text: str
    prompt_ids: Int[np.ndarray, "prompt"]
    sampled_ids: Int[np.ndarray, "sampled"]
    logprobs: Float[np.ndarray, "sampled"]
    finish_reason: str
    policy: str
    version: int
    generate_s: float
    spans: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class AgentTurns:
    """Turns of one agent in an episode, rewarded by their own outcome. An agent may have several such parts."""

    agent: str
    turns: Sequence[Turn]
    outcome: Mapping[str, float]
    shown: str = ""  # see `Trajectory.shown`


@dataclass(frozen=True, slots=True)
class Played:
    """One played episode. `outcome` is that of the whole episode as far as it was played, whatever the status; `answer`
    as in `Episode`."""

    parts: Sequence[AgentTurns]
    outcome: Mapping[str, float]
    status: Status
    error: str = ""
    answer: str = ""

    @property
    def turns(self) -> list[Turn]:
        """Turns of all parts, one part after the other."""
        return [turn for part in self.parts for turn in part.turns]


def served_version(model: str) -> tuple[str, int]:
    """Policy and version of an engine's model name; the whole name and UNVERSIONED if it is not a published policy."""
    policy, separator, number = model.rpartition("@")
    version, remade, commit = number.partition(".")  # a version that was made anew is served as `agent@2.<commit>`
    named = separator and version.isdecimal() and (commit.isdecimal() or not remade)
    return (policy, int(version)) if named else (model, UNVERSIONED)


class Agent:
    """Replies to messages with whatever policy `generate` samples from."""

    def __init__(self, codec: Tokens, generate: Generate):
        self._codec, self._generate = codec, generate

    async def act(self, messages: Sequence[Message], *, after: Reply | None = None) -> Reply:
        """One reply to `messages`; with `after`, the next one of the conversation that led to that reply, token by
        token. The codec's `PromptTooLong` passes through.
        """
        if after is None:
            prompt_ids = self._codec.encode(messages)
        else:
            # The sampled ids as they are: encoding the reply's text again may give other ids than those that were
            # sampled and are trained on.
            sampled_ids = after.sampled_ids.tolist()
            follow_up = self._codec.encode_after(sampled_ids, messages)
            prompt_ids = self._codec.within_limit([*after.prompt_ids.tolist(), *sampled_ids, *follow_up])
        started_s = time.perf_counter()
        sampled = await self._generate(prompt_ids)
        generate_s = time.perf_counter() - started_s
        sampled_ids = np.asarray(sampled.sampled_ids, np.int32)
        policy, version, spans = _versions(sampled.spans)
        return Reply(
            text=self._codec.decode(sampled_ids.tolist()),
            prompt_ids=np.asarray(prompt_ids, np.int32),
            sampled_ids=sampled_ids,
            logprobs=np.asarray(sampled.logprobs, np.float32),
            finish_reason=sampled.finish_reason,
            policy=policy,
            version=version,
            generate_s=generate_s,
            spans=spans,
        )


def _versions(served: Sequence[tuple[str, int]]) -> tuple[str, int, Sequence[tuple[int, int]]]:
    """Policy, version and spans of a turn, by the names that the engine served."""
    named = [(*served_version(model), tokens) for model, tokens in served]
    if len({policy for policy, _, _ in named}) != 1:
        raise ValueError(f"the engine names {', '.join(model for model, _ in served)} in one reply: that is no policy")
    spans = [(version, tokens) for _, version, tokens in named]
    # The oldest version stands for the turn: staleness is bounded by the oldest weights in it.
    return named[0][0], min(version for version, _ in spans), spans if len(spans) > 1 else ()


def record_turn(reply: Reply, before: Observation, step: Step, *, env_s: float, action: str = "") -> Turn:
    """A turn: the reply to the observation `before`, the `action` that it named, and the world's answer to that."""
    return Turn(
        policy=reply.policy,
        version=reply.version,
        prompt_ids=reply.prompt_ids,
        sampled_ids=reply.sampled_ids,
        logprobs=reply.logprobs,
        finish_reason=reply.finish_reason,
        state_key=before.state_key,
        next_state_key=step.observation.state_key,
        env_reward=step.reward,
        valid=step.valid,
        terminal=step.terminal,
        generate_s=reply.generate_s,
        env_s=env_s,
        spans=reply.spans,
        shown=shown_as(action=action, view=before.view, trace=step.trace),
    )


def _cut(value: Any) -> Any:
    """Plain data with its long texts cut. The turn's tokens still hold the whole prompt and reply."""
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]} …"
    if isinstance(value, Mapping):
        return {name: _cut(item) for name, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list | tuple) else value


def shown_as(**parts: Any) -> str:
    """JSON of the parts that are kept for people to read. A part is left out where JSON cannot hold it, or where it
    does not fit in `LONGEST_SHOWN` with those before it: no episode fails because of it."""
    kept: dict[str, str] = {}
    for name, part in parts.items():
        try:
            values = view_values(part)
            text = json.dumps(values)
            if len(text) > _LONGEST_TEXT:
                text = json.dumps(_cut(values))
        except (TypeError, ValueError):
            continue
        if text not in ("null", '""') and sum(map(len, kept.values())) + len(text) + 100 < LONGEST_SHOWN:
            # 100 characters are for the names and punctuation around the parts.
            kept[name] = text
    return "{" + ", ".join(f'"{name}": {text}' for name, text in kept.items()) + "}" if kept else ""


def declared(module: str, name: str) -> Any:
    """The value of a module's constant, () where it has none, or none that is a literal."""
    for node in _statements(_file(module)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and name in _assigned_names(node):
            with contextlib.suppress(ValueError):
                return ast.literal_eval(node.value)
    return ()


def outcomes_of(workflow: str, agent: str, world: type[World]) -> tuple[str, ...]:
    """Outcomes that every part of an agent reports in episodes of the world: see `flowjax.workflows`.

    Raises:
        WorldError: the workflow does not list its own by agent, or not as names.
    """
    module = workflow.partition(":")[0]
    by_agent = declared(module, "OUTCOMES") or {}
    if not isinstance(by_agent, dict):
        raise WorldError(f"{module} has OUTCOMES {by_agent!r}: give a map of agents to the outcomes that each reports")
    named = _names(f"{module} has OUTCOMES[{agent!r}]", by_agent.get(agent, ()))
    return named if "success" in named else (*world.OUTCOMES, *named)


def episode_outcomes(workflow: str, world: type[World]) -> tuple[str, ...]:
    """Outcomes of every whole episode of the world, () where the workflow does not list its own: see
    `flowjax.workflows`.

    Raises:
        WorldError: it does not list them as names.
    """
    module = workflow.partition(":")[0]
    named = _names(f"{module} has EPISODE_OUTCOMES", declared(module, "EPISODE_OUTCOMES"))
    return named if not named or "success" in named else (*world.OUTCOMES, *named)


def agents_of(workflow: str) -> tuple[str, ...]:
    """Agents of a workflow, () where it does not list them: see `flowjax.workflows`.

    Raises:
        WorldError: it does not list them as names.
    """
    module = workflow.partition(":")[0]
    return _names(f"{module} has AGENTS", declared(module, "AGENTS"))


def _names(where: str, listed: Any) -> tuple[str, ...]:
    # A text would be read letter by letter.
    if not isinstance(listed, tuple | list | set) or not all(isinstance(name, str) for name in listed):
        raise WorldError(f"{where} {listed!r}: give a tuple of names, such as ('finished',)")
    return tuple(listed)


def demonstrates(module: str) -> bool:
    """True where a workflow's module has demonstrations of its own."""
    return "demonstrations" in _defined_names(_statements(_file(module)))


def workflow_problem(module: str, name: str) -> str:
    """Reason why a name of a module is no workflow, for a message; "" for none, or where it is defined elsewhere."""
    origin = _file(module)
    if not origin:
        return f"which cannot be imported (No module named {module!r}): {NAMED.remedy}"
    statements = _statements(origin)
    if origin.endswith(".py") and not _defined_names(statements) & {name, "*"}:
        return f"but {module} has no {name!r}: {NAMED.remedy}"
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name and not node.decorator_list:
            given = node.args
            keywords = {each.arg for each in (*given.args, *given.kwonlyargs)}
            takes_task = given.vararg or [each for each in (*given.posonlyargs, *given.args) if each.arg not in _PLAYED]
            takes_rest = given.kwarg or keywords.issuperset(_PLAYED)
            if isinstance(node, ast.FunctionDef) or not takes_task or not takes_rest:
                return f"but that is no workflow: write it as `async def {name}(task, *, {', '.join(_PLAYED)})`"
    return ""


def _file(module: str) -> str:
    """The file of a module, "" for none. Finding it imports the packages around the module, not the module itself."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    return spec.origin or "" if spec else ""


def _statements(origin: str) -> list[ast.AST]:
    """Statements of a Python file outside its functions and classes; none for a file of another kind.

    The file is parsed and not imported: an import runs it, and may take seconds.

    Raises:
        WorldError: it cannot be read as Python.
    """
    try:
        # As bytes: a file may say in its first lines that it is not UTF-8.
        return list(_outermost(ast.parse(Path(origin).read_bytes()))) if origin.endswith(".py") else []
    except SyntaxError as error:
        place = f"{origin}, line {error.lineno}" if error.lineno else origin  # none where a byte is zero
        raise WorldError(f"{place}: {error.msg}: mend it") from error
    except ValueError as error:  # of a zero byte, before Python 3.11.4
        raise WorldError(f"{origin}: {error}: mend it") from error


def _outermost(block: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(block):
        if isinstance(node, ast.stmt | ast.excepthandler):
            yield node
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _outermost(node)


def _defined_names(statements: Iterable[ast.AST]) -> set[str]:
    """Names that a module binds outside its functions and classes, "*" where it has a star import."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= _assigned_names(node)
    return names


def _assigned_names(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if node.value else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
