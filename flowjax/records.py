"""The records that rooms hand to each other, their wire format, and checks of what came over the wire.

A `Task` is played several times, each time under a `Lease`, which makes an `Episode`: one `Trajectory` for each agent's
part in it, a sequence of `Turn` records. What one policy did in all episodes of a task is a `Group`. Credit turns
groups into `TokenRow` records, which is all the trainer ever sees. On the wire every record is a msgpack map under a
schema version; token and log-probability arrays travel as raw little-endian bytes. A record that came over the wire may
hold anything: an episode is checked against its type, field by field.
"""

import dataclasses
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import msgpack
import numpy as np
from jaxtyping import Bool, Float, Int

from flowjax.run import Run

SCHEMA_VERSION = 1

Status = Literal["ok", "env_error", "executor_error", "timeout", "truncated", "cancelled"]
COUNTED_STATUSES = frozenset({"ok", "truncated"})  # the others failed for causes outside the policy


_LONGEST_LIST = _LARGEST_MAP = 100_000  # elements, in messages from other processes
_LONGEST_REASON = 300  # characters


class WireError(ValueError):
    """A message that cannot be read: another schema version, a missing field, a truncated body."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of a world. `seed` fixes everything about it that `payload` does not name.

    `source` names the one of `config.env.sources` that it came from, with whose options it is played. `kind` is set by
    worlds that have several kinds of tasks: results are also given by kind.
    """

    task_id: str
    world: str
    seed: int
    payload: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    kind: str = ""


# Records with arrays have eq=False: the generated `__eq__` would take the truth of an array, which numpy refuses.
@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One call of one policy, and what the world answered.

    `version` is the published step that the engine served, as the engine itself named it. If its weights were replaced
    under the reply, it is the oldest of several, and `spans` has all of them: `(version, tokens)` in the order of the
    tokens. `logprobs` are at the sampling temperature. State keys are 64-bit and come from the world's canonical state,
    never from the text shown. `shown` is only for people who read the episode: `{"action", "view", "trace"}` as JSON,
    made by `flowjax.workflows.record_turn`.
    """

    policy: str
    version: int
    prompt_ids: Int[np.ndarray, "prompt"]
    sampled_ids: Int[np.ndarray, "sampled"]
    logprobs: Float[np.ndarray, "sampled"]
    finish_reason: str
    state_key: int
    next_state_key: int
    env_reward: float
    valid: bool
    terminal: bool
    generate_s: float = 0.0
    env_s: float = 0.0
    shown: str = ""
    spans: Sequence[tuple[int, int]] = ()

    @property
    def versions(self) -> list[int]:
        """The versions that sampled it, one or several."""
        return [version for version, _ in self.spans] or [self.version]

    @property
    def token_versions(self) -> Int[np.ndarray, "sampled"]:
        """The version that sampled each of its tokens."""
        spans = self.spans or [(self.version, len(self.sampled_ids))]
        versions, tokens = np.array(spans, np.int32).T
        return np.repeat(versions, tokens)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to play one episode. `versions` has the policies whose version is fixed; others play their newest."""

    lease_id: str
    task: Task
    group_id: str
    episode_id: str
    seed: int
    kind: Literal["train", "eval"]
    temperature: float
    versions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The turns of one agent in one episode, or in one part of it where a workflow gives an agent several (attempts,
    helpers). `outcome` holds the named numbers that rewards read, `success` among them.

    `policy` is the one that spoke for the agent. `shown` is as a turn's, with the view that the last turn led to.
    """

    trajectory_id: str
    group_id: str
    task_id: str
    seed: int
    turns: Sequence[Turn]
    outcome: Mapping[str, float]
    status: Status = "ok"
    error: str = ""
    policy: str = "agent"
    shown: str = ""

    @property
    def episode_id(self) -> str:
        """Id of its episode, <group>/<number>; the trajectory's id is the same, or has / and more after it."""
        group, number = f"{self.group_id}/", self.trajectory_id.removeprefix(f"{self.group_id}/")
        return group + number.partition("/")[0] if self.trajectory_id.startswith(group) else self.trajectory_id


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One play of a task, by one agent or several. `outcome` is that of the whole, which evaluation counts.

    `answer` is the answer given, in the form in which its world compares answers; "" where it compares none.
    `commits` has the commit of each version that it was played with, by policy and version: the number alone does not
    identify the weights, since a trainer that goes back makes numbers anew.
    """

    episode_id: str
    group_id: str
    task_id: str
    seed: int
    trajectories: Sequence[Trajectory]
    outcome: Mapping[str, float]
    status: Status = "ok"
    error: str = ""
    answer: str = ""
    commits: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def turns(self) -> list[Turn]:
        """The turns of all agents."""
        return [turn for trajectory in self.trajectories for turn in trajectory.turns]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One policy's trajectories of one task, compared with each other for credit."""

    group_id: str
    task: Task
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """One sequence to train on: exact tokens, and for each sampled token its advantage and behaviour log-probability.

    `sampled` is False on prompt and environment tokens; `advantages` and `logprobs` are zero there. `versions` is the
    policy version that sampled each token, -1 where none did. `trajectory_tokens` counts the sampled tokens of all rows
    of the same trajectory; 0 means that this row is all of it. A trainer names the `trajectory_id` when it cannot train
    on the row.
    """

    policy: str
    tokens: Int[np.ndarray, "tokens"]
    sampled: Bool[np.ndarray, "tokens"]
    logprobs: Float[np.ndarray, "tokens"]
    advantages: Float[np.ndarray, "tokens"]
    versions: Int[np.ndarray, "tokens"]
    trajectory_tokens: int = 0
    trajectory_id: str = ""


def state_key(*parts: str | bytes | int) -> int:
    """64-bit key of a canonical state; equal on every machine and in every process."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        # Each part with its length before it: otherwise ("ab", "c") and ("a", "bc") would have the same key.
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little")


_RECORDS: dict[str, type] = {cls.__name__: cls for cls in (Task, Turn, Lease, Trajectory, Episode, Group, TokenRow)}
_ARRAY_KINDS = {"i": "<i4", "f": "<f4", "b": "|b1"}


def _pack_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"__record__": type(value).__name__, **fields}
    if isinstance(value, np.ndarray):
        # Numbers travel in 32 bits: wider integers only if their values fit.
        kind, wide = _ARRAY_KINDS.get(value.dtype.kind), value.dtype.kind == "i" and value.dtype.itemsize > 4
        if kind is None or (wide and not np.array_equal(value.astype(kind), value)):
            reach = f" from {value.min()} to {value.max()}" if wide else ""
            fault = f"an array of {value.dtype}{reach} cannot go on the wire"
            raise TypeError(f"{fault}: make it one of 32 bits, of whole numbers or floats, or of flags, or a list")
        return {"__array__": kind, "shape": list(value.shape), "data": value.astype(kind, copy=False).tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot go on the wire")


def _unpack_value(value: dict[str, Any]) -> Any:
    if "__array__" in value:
        if value["__array__"] not in _ARRAY_KINDS.values():
            raise WireError(f"array type {value['__array__']!r} is not one of {sorted(_ARRAY_KINDS.values())}")
        try:
            # A view of the message's bytes: nothing is copied, and the array is read-only as these are.
            return np.frombuffer(value["data"], dtype=value["__array__"]).reshape(value["shape"])
        except (KeyError, TypeError, ValueError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"an array of {value['__array__']} {reason}; send its bytes as data, and shape") from error
    if "__record__" in value:
        name = value.pop("__record__")
        if not isinstance(name, str) or name not in _RECORDS:
            raise WireError(f"record {repr(name)[:_LONGEST_REASON]} is not one of {sorted(_RECORDS)}")
        try:
            return _RECORDS[name](**value)
        except TypeError as error:
            raise TypeError(f"record {name}: {_misfit(_RECORDS[name], value) or error}") from error
    return value


def _misfit(kind: type, given: Mapping[str, Any]) -> str:
    """Message on fields of a record that are missing, or not among its own; "" for none."""
    known = {each.name: each for each in dataclasses.fields(kind)}
    needed = {name for name, each in known.items() if each.default is each.default_factory is dataclasses.MISSING}
    if lacking := sorted(needed - given.keys()):
        return f"it lacks {', '.join(lacking)}: send all of {', '.join(sorted(needed))}"
    if unknown := sorted(map(str, given.keys() - known.keys())):
        return f"it has no field {', '.join(unknown)[:_LONGEST_REASON]}: leave that out"
    return ""


def pack(message: Any) -> bytes:
    """One message as bytes: any nesting of records, arrays, lists, maps and scalars."""
    envelope = {"schema": SCHEMA_VERSION, "body": message}
    return cast(bytes, msgpack.packb(envelope, default=_pack_value, use_bin_type=True))


_PLAIN = {str, bytes, int, float, bool, type(None)}  # types of keys that are read as they were written


def unreadable_key(message: Any) -> Any:
    """A key that could be written and not read: a tuple comes back as a list, which no map takes. None: there is none.

    Checked by types, since reading the bytes again takes longer: 6 ms for a map of 20,000 numbers, this 1.
    """
    if isinstance(message, list | tuple):
        values = message
    elif isinstance(message, Mapping):
        if not _PLAIN.issuperset(map(type, message)):
            for key in message:
                if not isinstance(key, (*_PLAIN, np.generic)):  # members of a StrEnum are texts, too
                    return key
        values = message.values()
    else:
        return None
    if _PLAIN.issuperset(map(type, values)):
        return None
    return next((key for value in values if (key := unreadable_key(value)) is not None), None)


def unpack(data: bytes, *, most_elements: int | None = None) -> Any:
    """The message in `data`.

    Args:
        most_elements: bound on the elements of all lists and maps of a message together, for one from outside: empty
            lists in lists take one byte each on the wire and 64 in memory.

    Raises:
        WireError: the bytes are no such message, one of another schema version, or one of more elements.
    """
    options: dict[str, Any] = {"object_hook": _unpack_value}
    if most_elements is not None:
        options = _counting(most_elements)
    try:
        # Not strict: the keys of some maps are whole numbers (versions), which msgpack refuses by default.
        envelope = msgpack.unpackb(data, strict_map_key=False, **options)
        schema, body = envelope["schema"], envelope["body"]
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"not a flowjax message ({type(error).__name__}: {error})"[:_LONGEST_REASON]) from error
    if type(schema) is not int or schema != SCHEMA_VERSION:  # an array would compare element by element
        shown = repr(schema)[:40] if isinstance(schema, int | str) else type(schema).__name__
        raise WireError(f"message has schema version {shown}, this process speaks {SCHEMA_VERSION}: upgrade the older")
    return body


def _counting(most_elements: int) -> dict[str, Any]:
    """Options of a msgpack decoder that refuses more elements than that. `max_array_len` and `max_map_len` bound a
    single list or map before memory is taken for it; the hooks bound all of them together."""
    seen = 0

    def count(value: Any) -> Any:
        nonlocal seen
        seen += 1 + len(value)
        if seen > most_elements:
            raise WireError(f"message has more than {most_elements:,} elements: send less at once")
        return value

    return {
        "object_hook": lambda value: _unpack_value(count(value)),
        "list_hook": count,
        "max_array_len": min(most_elements, _LONGEST_LIST),
        "max_map_len": min(most_elements, _LARGEST_MAP),
    }


# --------------------------------------------------------------------------------------------------------------- checks

_LONGEST_NAME = 500  # characters
LONGEST_SHOWN = 24 * 1024  # characters of a turn's `shown`, which is ASCII
_LONGEST = {"error": 10_000, "shown": LONGEST_SHOWN}
_MOST_OUTCOMES = 1000  # names in one outcome
_MOST_COMMITS = 1000  # versions of a policy in one episode; each is looked up on the disk
LARGEST_NUMBER = 1e9  # of rewards and outcomes: their squares and sums stay finite in float32
_LOGPROB_SLACK = 1e-3  # above 0, for a sampler's rounding
_LEAST_LOGPROB = -1000.0  # below any that is sampled in practice; its square and differences stay finite in float32

_TEXT, _INTEGER, _NUMBER, _FLAG = str, (int, np.integer), (int, float, np.number), (bool, np.bool_)
_TURN_FIELDS = {
    "policy": _TEXT,
    "version": _INTEGER,
    "finish_reason": _TEXT,
    "state_key": _INTEGER,
    "next_state_key": _INTEGER,
    "env_reward": _NUMBER,
    "valid": _FLAG,
    "terminal": _FLAG,
    "generate_s": _NUMBER,
    "env_s": _NUMBER,
    "shown": _TEXT,
}
_NAMES = {"group_id": _TEXT, "task_id": _TEXT, "seed": _INTEGER, "status": _TEXT, "error": _TEXT}
_SIZE = f"at most {LARGEST_NUMBER:g} from 0"
_KINDS = {
    _TEXT: "a string",
    _INTEGER: "a whole number",
    _NUMBER: f"a finite number, {_SIZE}",
    _FLAG: "true or false",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that an episode of a run may hold: tokens of a prompt and of a reply, turns of all agents together.

    `vocabulary` is the number of tokens of each policy's model (and of each model that is not trained), where it is
    known. A row of training is no longer than one prompt and one reply, so these bound what a trainer has to fit.
    """

    prompt_tokens: int
    new_tokens: int
    turns: int
    vocabulary: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_run(cls, run: Run, vocabulary: Mapping[str, int] | None = None) -> "Bounds":
        rollout = run.config.rollout
        turns = rollout.max_episode_turns or 4 * run.config.env.max_turns * len(run.agents)
        return cls(rollout.max_prompt_tokens, rollout.max_new_tokens, turns, vocabulary or {})


def most_turns(run: Run) -> int:
    """Largest number of turns in an episode: `config.env.max_turns` of one agent; of several, as many as the dataflow
    accepts, since a workflow may let each act more than once for every turn of the world."""
    return Bounds.of_run(run).turns if len(run.agents) > 1 else run.config.env.max_turns


@dataclass(frozen=True, slots=True)
class Leased:
    """Terms of an episode's lease. `versions` has the policies whose version is fixed."""

    group_id: str
    task_id: str
    seed: int
    versions: Mapping[str, int]


def check_episode(episode: Episode, *, newest: Mapping[str, int], bounds: Bounds, where: str = "episode") -> None:
    """Check every field of an episode.

    Args:
        newest: the newest version that exists of each policy of the run; -1 for a model that is not trained.
        where: name of the episode in messages.

    Raises:
        WireError: a field has another type or an impossible number, is beyond `bounds`, or names a policy or version
            that the run does not have.
    """
    _check_fields(episode, {"episode_id": _TEXT, "answer": _TEXT, **_NAMES}, where)
    _check_status(episode.status, where)
    _check_outcome(episode.outcome, where)
    _check_commits(episode.commits, where)
    trajectories = _sequence(episode.trajectories, Trajectory, f"{where}.trajectories")
    _check_turns(trajectories, bounds, where)
    known_ids: set[str] = set()
    for index, trajectory in enumerate(trajectories):
        place = f"{where}.trajectories[{index}]"
        _check_fields(trajectory, {"trajectory_id": _TEXT, "policy": _TEXT, "shown": _TEXT, **_NAMES}, place)
        _check_status(trajectory.status, place)
        _check_outcome(trajectory.outcome, place)
        _check_policy(trajectory.policy, newest, place)
        _check_trajectory_id(trajectory.trajectory_id, episode.episode_id, known_ids, place)
        for name in ("group_id", "task_id", "seed"):
            if getattr(trajectory, name) != getattr(episode, name):
                raise WireError(f"field {place}.{name} differs from the episode's")
        for number, turn in enumerate(trajectory.turns):
            _check_turn(turn, newest, f"{place}.turns[{number}]")
            _check_tokens(turn, bounds, f"{place}.turns[{number}]")
            if turn.policy != trajectory.policy:
                raise WireError(f"field {place}.turns[{number}].policy differs from the trajectory's")


def check_outcomes(episode: Episode, needed: Mapping[str, Collection[str]], *, where: str = "episode") -> None:
    """Check that an episode that counts has `success`, and the outcomes that the rewards of its policies are made of
    (`needed`, by policy).

    Raises:
        WireError: one is missing. An evaluation would take the episode for a failure, or no reward could be given for
            it: its group could never be trained on.
    """
    if episode.status in COUNTED_STATUSES and "success" not in episode.outcome:
        raise WireError(f"field {where}.outcome lacks 'success', which evaluations count: say 1 or 0 there")
    for index, part in enumerate(episode.trajectories):
        lacking = set(needed.get(part.policy, ())) - part.outcome.keys()
        if lacking and part.turns and {part.status, episode.status} <= COUNTED_STATUSES:
            reason = f"lacks {min(lacking)!r}, which the reward of {part.policy} (config.reward.components) is made of"
            raise WireError(f"field {where}.trajectories[{index}].outcome {reason}")


def check_lease(episode: Episode, leased: Leased, *, where: str = "episode") -> None:
    """Check an episode, whose fields were checked already, against its lease.

    Raises:
        WireError: it is of another group, task or seed, or was played with another version than the lease names.
    """
    for name in ("group_id", "task_id", "seed"):
        found, wanted = getattr(episode, name), getattr(leased, name)
        if found != wanted:
            fault = f"field {where}.{name} is {_short(found)}, but its lease says {_short(wanted)}"
            raise WireError(f"{fault}: send what was leased")
    for index, trajectory in enumerate(episode.trajectories):
        for number, turn in enumerate(trajectory.turns):
            wanted = leased.versions.get(turn.policy)
            if wanted is not None and set(turn.versions) != {wanted}:
                place, found = f"{where}.trajectories[{index}].turns[{number}].version", turn.versions
                shown = ", ".join(map(str, dict.fromkeys(found)))
                raise WireError(f"field {place} is {shown}, but its lease says {wanted}: play that version")


def _check_turns(trajectories: Sequence[Trajectory], bounds: Bounds, where: str) -> None:
    """Bound the turns of all parts together. A part without a turn counts as one, so that parts are bounded, too."""
    turns = 0
    for index, trajectory in enumerate(trajectories):
        turns += max(len(_sequence(trajectory.turns, Turn, f"{where}.trajectories[{index}].turns")), 1)
    if turns > bounds.turns:
        remedy = "send fewer, or raise config.rollout.max_episode_turns"
        raise WireError(f"field {where}.trajectories holds {turns} turns, the run allows {bounds.turns}: {remedy}")


def _check_trajectory_id(trajectory_id: str, episode_id: str, known: set[str], where: str) -> None:
    if trajectory_id != episode_id and not trajectory_id.startswith(f"{episode_id}/"):
        wanted = "it is the episode's id, or that with '/' and more behind it"
        raise WireError(f"field {where}.trajectory_id is {_short(trajectory_id)}: {wanted}")
    if trajectory_id in known:
        raise WireError(f"field {where}.trajectory_id is {_short(trajectory_id)}, as an earlier one's: number them")
    known.add(trajectory_id)


def _check_tokens(turn: Turn, bounds: Bounds, where: str) -> None:
    """A reply needs a token before it: the first of a row is predicted from nothing."""
    if not len(turn.prompt_ids):
        raise WireError(f"field {where}.prompt_ids is empty: send the whole prompt, one token at least")
    limits = {"prompt_ids": ("max_prompt_tokens", bounds.prompt_tokens)}
    limits["sampled_ids"] = ("max_new_tokens", bounds.new_tokens)
    vocabulary = bounds.vocabulary.get(turn.policy)
    for name, (field_name, most) in limits.items():
        ids = getattr(turn, name)
        if len(ids) > most:
            remedy = f"config.rollout.{field_name} is {most}: cut it, or raise that"
            raise WireError(f"field {where}.{name} has {len(ids)} tokens, but {remedy}")
        if vocabulary is not None and len(ids) and ids.max() >= vocabulary:
            fault = f"field {where}.{name} has token {ids.max()}, but the model of {turn.policy} has {vocabulary}"
            raise WireError(f"{fault}: send its own tokenizer's ids")


def _check_turn(turn: Turn, newest: Mapping[str, int], where: str) -> None:
    _check_fields(turn, _TURN_FIELDS, where)
    _check_policy(turn.policy, newest, where)
    last = newest[turn.policy]
    if not min(last, 0) <= turn.version <= max(last, 0):
        raise WireError(f"field {where}.version is {turn.version}: {turn.policy} has 0 to {newest[turn.policy]}")
    for name in ("state_key", "next_state_key"):
        if not 0 <= getattr(turn, name) < 2**64:
            raise WireError(f"field {where}.{name} does not fit 64 bits without a sign")
    for name in ("prompt_ids", "sampled_ids"):
        ids = _array(getattr(turn, name), "i", f"{where}.{name}")
        if ids.size and ids.min() < 0:
            raise WireError(f"field {where}.{name} has a negative token")
    logprobs = _array(turn.logprobs, "f", f"{where}.logprobs")
    if len(logprobs) != len(turn.sampled_ids):
        raise WireError(f"field {where}.logprobs has {len(logprobs)} values for {len(turn.sampled_ids)} sampled tokens")
    if not np.isfinite(logprobs).all():
        raise WireError(f"field {where}.logprobs has values that are not finite")
    if len(logprobs) and not (logprobs.max() <= _LOGPROB_SLACK and logprobs.min() >= _LEAST_LOGPROB):
        reached = f"field {where}.logprobs reaches from {logprobs.min():g} to {logprobs.max():g}"
        raise WireError(f"{reached}: send natural logarithms of probabilities, from {_LEAST_LOGPROB:g} to 0")
    _check_spans(turn, max(last, 0), f"{where}.spans")


def _check_spans(turn: Turn, newest: int, where: str) -> None:
    """The oldest version is the turn's, and the tokens of all of them are those that were sampled."""
    spans: Any = turn.spans
    if not isinstance(spans, Sequence) or isinstance(spans, str | bytes):
        raise WireError(f"field {where} is {_short(spans)}: it is a list of pairs of a version and its tokens")
    for index, span in enumerate(spans):
        pair = isinstance(span, list | tuple) and len(span) == 2 and all(type(number) is int for number in span)
        if not pair or not turn.version <= span[0] <= newest or span[1] < 1:
            found = ", ".join(map(_short, span)) if isinstance(span, list | tuple) else _short(span)
            wanted = f"a version from {turn.version}, the turn's, to {newest}, and how many tokens it sampled"
            raise WireError(f"field {where}[{index}] is {found}: it is {wanted}")
    if not spans:
        return
    if min(version for version, _ in spans) != turn.version:
        raise WireError(f"field {where} has no token of version {turn.version}, the turn's: that is the oldest of them")
    tokens = sum(tokens for _, tokens in spans)
    if tokens != len(turn.sampled_ids):
        raise WireError(f"field {where} has {tokens} tokens, but {len(turn.sampled_ids)} were sampled")


def _check_fields(record: Any, kinds: Mapping[str, Any], where: str) -> None:
    for name, kind in kinds.items():
        value = getattr(record, name)
        fits = isinstance(value, kind) and isinstance(value, _FLAG) == (kind is _FLAG)  # Python's True is an int, too
        if not fits or (kind is _NUMBER and not _usable(value)):
            raise WireError(f"field {where}.{name} is {_short(value)}: it is {_KINDS[kind]}")
        if kind is _TEXT and len(value) > _LONGEST.get(name, _LONGEST_NAME):
            raise WireError(f"field {where}.{name} has {len(value)} characters: cut it")
        if kind is _TEXT and not _can_be_sent(value):
            raise WireError(f"field {where}.{name} is {_short(value)}, which has half a surrogate pair: leave that out")


def _can_be_sent(text: str) -> bool:
    """True unless it holds half a surrogate pair, which JSON can spell and UTF-8 has no form for."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _usable(value: Any) -> bool:
    return math.isfinite(value) and abs(value) <= LARGEST_NUMBER


def _check_status(status: str, where: str) -> None:
    if status not in get_args(Status):
        raise WireError(f"field {where}.status is {_short(status)}: it is one of {', '.join(get_args(Status))}")


def _check_policy(policy: str, newest: Mapping[str, int], where: str) -> None:
    if policy not in newest:
        raise WireError(f"field {where}.policy is {_short(policy)}: this run has {', '.join(newest)}")


def _check_outcome(outcome: Any, where: str) -> None:
    if not isinstance(outcome, Mapping):
        raise WireError(f"field {where}.outcome is {_short(outcome)}: it is a map of finite numbers, {_SIZE}")
    if len(outcome) > _MOST_OUTCOMES:
        raise WireError(f"field {where}.outcome has {len(outcome)} names: send {_MOST_OUTCOMES} at most")
    for name, value in outcome.items():
        named = isinstance(name, str) and len(name) <= _LONGEST_NAME and _can_be_sent(name)
        if not named or not isinstance(value, (*_NUMBER, *_FLAG)) or not _usable(value):
            shown = f"{_short(name)} = {_short(value)}"
            raise WireError(f"field {where}.outcome has {shown}: it is a map of finite numbers, {_SIZE}")


def _check_commits(commits: Any, where: str) -> None:
    shown = f"field {where}.commits is {_short(commits)}: it is a map of policies to maps of versions to texts"
    by_policy = list(commits.items()) if isinstance(commits, Mapping) else [None]
    for policy, of in (item if isinstance(item, tuple) else (None, None) for item in by_policy):
        if not isinstance(policy, str) or not isinstance(of, Mapping):
            raise WireError(shown)
        if len(of) > _MOST_COMMITS:
            raise WireError(
                f"field {where}.commits has {len(of)} versions of {_short(policy)}: send {_MOST_COMMITS} at most"
            )
        for version, commit in of.items():
            known = type(version) is int and version >= 0 and isinstance(commit, str)
            if not known or len(commit) > _LONGEST_NAME:
                raise WireError(shown)


def _sequence(values: Any, kind: type, where: str) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise WireError(f"field {where} is {_short(values)}: it is a list of {kind.__name__} records")
    for index, value in enumerate(values):
        if not isinstance(value, kind):
            raise WireError(f"field {where}[{index}] is {_short(value)}: it is a {kind.__name__} record")
    return values


def _array(value: Any, kind: str, where: str) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype.kind != kind or value.ndim != 1:
        found = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else _short(value)
        wanted = "whole numbers" if kind == "i" else "floats"
        raise WireError(f"field {where} is {found}: it is an array of {wanted} with one axis")
    return value


def _short(value: Any) -> str:
    """A short form of any value, for a message."""
    if isinstance(value, str | int | float | bool | None):
        shown = repr(value)
        return shown if len(shown) <= 40 else f"{shown[:40]}..."
    return type(value).__name__
