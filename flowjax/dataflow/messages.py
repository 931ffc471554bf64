"""Requests of the dataflow, read field by field: what is not as it should be is refused before anything changes."""

from collections.abc import Collection, Mapping
from typing import Any

from flowjax.dataflow.leases import KINDS, Capabilities
from flowjax.records import Bounds, Episode, WireError, check_episode, check_outcomes

MOST_SLOTS = 100_000  # episodes asked for, or leases named, in one message
_LONGEST_NAME = 500  # characters


def fields(message: Any, **kinds: type) -> list[Any]:
    """The named fields of a message.

    Raises:
        WireError: the message is no map, or a field is missing or of another kind.
    """
    if not isinstance(message, dict):
        raise WireError(f"the body is a {type(message).__name__}: send a map")
    for name, kind in kinds.items():
        if name not in message:
            raise WireError(f"field {name} is missing")
        if not isinstance(message[name], kind) or (kind is int and isinstance(message[name], bool)):
            raise WireError(f"field {name} is {type(message[name]).__name__}: send {kind.__name__}")
    return [message[name] for name in kinds]


def worker_of(message: Any) -> str:
    (worker,) = fields(message, worker=str)
    if not 0 < len(worker) <= _LONGEST_NAME:
        raise WireError(f"field worker has {len(worker)} characters: send 1 to {_LONGEST_NAME}")
    return worker


def sender_of(message: Any) -> str:
    """Sender of a message, "" where it does not say."""
    sender = message.get("worker")
    return sender[:_LONGEST_NAME] if isinstance(sender, str) else ""


def slots_of(message: Any) -> int:
    (slots,) = fields(message, slots=int)
    if not 0 < slots <= MOST_SLOTS:
        raise WireError(f"field slots is {slots}: send 1 to {MOST_SLOTS}")
    return slots


def capabilities_of(message: Any) -> Capabilities:
    """Capabilities of a worker: `can`, a map of lists with the names of worlds, policies and kinds, and `kind`."""
    said, kind = message.get("can") or {}, message.get("kind")
    if not isinstance(said, dict) or set(said) - {"worlds", "policies", "kinds"}:
        raise WireError("field can is not understood: send a map with lists of worlds, policies and kinds, or some")
    for name, values in said.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise WireError(f"field can.{name} is no list of strings: send one")
    kinds = frozenset(said.get("kinds", KINDS))
    if kinds - KINDS:
        raise WireError(f"field can.kinds names others than {' and '.join(sorted(KINDS))}: leave them out")
    if kind not in (None, *KINDS):
        raise WireError(f"field kind is {str(kind)[:_LONGEST_NAME]!r}: it is train, eval or absent")
    worlds, policies = (frozenset(said[name]) if name in said else None for name in ("worlds", "policies"))
    return Capabilities(worlds, policies, kinds & {kind} if kind else kinds)


def steps_of(message: Any) -> dict[str, Any]:
    """The policies that a trainer asks for and the step of each: `policies`, or `policy` and `step` of one."""
    fields(message)
    if "policies" not in message:
        policy, step = fields(message, policy=str, step=int)
        return {policy: step}
    (steps,) = fields(message, policies=dict)
    if not steps:
        raise WireError("field policies is empty: send policy -> step")
    return steps


def claim_of(message: Any) -> tuple[str, dict[str, Any], int]:
    """Trainer that claims, versions of the policies that it goes on from, and the epoch that it comes after."""
    trainer, versions, after = fields(message, trainer=str, policies=dict, after=int)
    if not 0 < len(trainer) <= _LONGEST_NAME:
        raise WireError(f"field trainer has {len(trainer)} characters: send 1 to {_LONGEST_NAME}")
    if not versions:
        raise WireError("field policies is empty: send policy -> version")
    return trainer, versions, after


def epoch_of(message: Any) -> int:
    """The epoch of the trainer that sends it."""
    given = message.get("epoch", "missing") if isinstance(message, dict) else 0
    if given == "missing" or given == 0:
        raise WireError(
            f"field epoch is {given}: a trainer claims its policies first, and sends the epoch it was given"
        )
    return fields(message, epoch=int)[0]


def refused_of(message: Any) -> tuple[int, dict[str, str]]:
    """The step of the batch that a trainer refuses, and the trajectories of it that it cannot train on, with why."""
    step, reasons = fields(message, step=int, trajectories=dict)
    for trajectory_id, reason in reasons.items():
        if not isinstance(trajectory_id, str) or not isinstance(reason, str):
            raise WireError("field trajectories is no map of texts: send trajectory_id -> why it cannot be trained on")
    if not reasons:
        raise WireError("field trajectories is empty: name those that cannot be trained on")
    return step, {name: reason[:_LONGEST_NAME] for name, reason in reasons.items()}


def lease_ids_of(message: Any) -> list[str]:
    (lease_ids,) = fields(message, lease_ids=list)
    if len(lease_ids) > MOST_SLOTS:
        raise WireError(f"field lease_ids has {len(lease_ids)} items: send {MOST_SLOTS} at most")
    for index, lease_id in enumerate(lease_ids):
        if not isinstance(lease_id, str):
            raise WireError(f"field lease_ids[{index}] is {type(lease_id).__name__}: send str")
    return lease_ids


def policy_of(message: Any, policies: Collection[str]) -> str:
    """The policy that a message is about, one of the run's."""
    (policy,) = fields(message, policy=str)
    if policy not in policies:
        raise WireError(f"field policy is {policy[:_LONGEST_NAME]!r}: this run has {', '.join(policies)}")
    return policy


def version_of(message: Any, name: str, *, oldest: int, newest: int) -> int:
    """A version between those that can be meant."""
    (version,) = fields(message, **{name: int})
    if not oldest <= version <= newest:
        raise WireError(f"field {name} is {version}: this run has made versions {oldest} to {newest} of that policy")
    return version


def episodes_of(
    message: Any, newest: Mapping[str, int], needed: Mapping[str, Collection[str]], bounds: Bounds
) -> list[tuple[str, Episode]]:
    """Leases and what was played under them; one bad item refuses the whole message. `newest` versions and `needed`
    outcomes are by policy."""
    (items,) = fields(message, items=list)
    played = []
    for index, item in enumerate(items):
        lease_id, episode = fields(item, lease_id=str, episode=Episode)
        check_episode(episode, newest=newest, bounds=bounds, where=f"items[{index}].episode")
        check_outcomes(episode, needed, where=f"items[{index}].episode")
        played.append((lease_id, episode))
    return played
