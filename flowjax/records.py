"""The records that rooms hand to each other, and their wire format.

A `Task` is played several times, each time under a `Lease`, which makes an `Episode`: one `Trajectory` for each agent's
part in it, a sequence of `Turn` records. What one policy did in all episodes of a task is a `Group`. Credit turns
groups into `TokenRow` records, which is all the trainer ever sees. On the wire every record is a msgpack map under a
schema version; token and log-probability arrays travel as raw little-endian bytes.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import msgpack
import numpy as np
from jaxtyping import Bool, Float, Int

SCHEMA_VERSION = 1

Status = Literal["ok", "env_error", "executor_error", "timeout", "truncated", "cancelled"]
COUNTED_STATUSES = frozenset({"ok", "truncated"})  # the others failed for causes outside the policy


_LONGEST_LIST, _LARGEST_MAP = 100_000, 4096  # in messages of strangers
_LONGEST_REASON = 300  # characters


class WireError(ValueError):
    """A message that cannot be read: another schema version, a missing field, a truncated body."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of a world. `seed` fixes everything about it that `payload` does not name.

    `source` is that of `config.env.sources` which it came from; it is played with that one's options. `kind` is that of
    its world, where a world has several kinds of tasks: results are given for each.
    """

    task_id: str
    world: str
    seed: int
    payload: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One call of one policy, and what the world answered.

    `version` is the published step that the engine served, as the engine itself named it. `logprobs` are at the
    sampling temperature. State keys are 64-bit and come from the world's canonical state, never from the text shown.
    `shown` is for people who read the episode, and for nothing else: `{"action", "view", "trace"}` as JSON, made by
    `flowjax.workflows.record_turn`.
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


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to play one episode. `versions` holds the policies whose version is fixed; others play their newest."""

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
    """The turns of one agent in one episode. `outcome` holds the named numbers that rewards read, `success` among them.

    `policy` is the one that spoke for the agent. `shown` is as that of a turn, with the view that the last one led to.
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


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One play of a task, by one agent or several. `outcome` is that of the whole, which evaluation counts.

    `answer` is what the episode answered, in the form in which its world compares answers; "" where it does not.
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

    @property
    def turns(self) -> list[Turn]:
        """Those of all agents."""
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
    policy version that sampled each token, -1 where none did. `trajectory_tokens` are the sampled tokens of all rows of
    the same trajectory, 0 where the row is all of it; `trajectory_id` is its name, which a trainer names when it cannot
    train on the row.
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
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little")


_RECORDS: dict[str, type] = {cls.__name__: cls for cls in (Task, Turn, Lease, Trajectory, Episode, Group, TokenRow)}
_ARRAY_KINDS = {"i": "<i4", "f": "<f4", "b": "|b1"}


def _pack_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"__record__": type(value).__name__, **fields}
    if isinstance(value, np.ndarray):
        kind = _ARRAY_KINDS[value.dtype.kind]
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
        return np.frombuffer(value["data"], dtype=value["__array__"]).reshape(value["shape"])
    if "__record__" in value:
        name = value.pop("__record__")
        if name not in _RECORDS:
            raise WireError(f"record {name!r} is not one of {sorted(_RECORDS)}")
        return _RECORDS[name](**value)
    return value


def pack(message: Any) -> bytes:
    """One message as bytes: any nesting of records, arrays, lists, maps and scalars."""
    envelope = {"schema": SCHEMA_VERSION, "body": message}
    return cast(bytes, msgpack.packb(envelope, default=_pack_value, use_bin_type=True))


def unpack(data: bytes, *, most_elements: int | None = None) -> Any:
    """The message in `data`.

    Args:
        most_elements: of all lists and maps of the message together, of one that strangers sent. Its decoder stops
            there: empty lists in lists cost one byte each on the wire and 64 in memory.

    Raises:
        WireError: the bytes are not such a message, or one of another schema version.
    """
    options: dict[str, Any] = {"object_hook": _unpack_value}
    if most_elements is not None:
        options = _counting(most_elements)
    try:
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
    """Options of a decoder that refuses more elements than that. The limits hold one list or map to it before memory is
    taken for it, the hooks all of them together."""
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
