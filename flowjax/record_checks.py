"""Whether an episode is what its type says, field by field: anything may stand in a record that came over the wire."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from flowjax.records import Episode, Status, Trajectory, Turn, WireError

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
}
_NAMES = {"group_id": _TEXT, "task_id": _TEXT, "seed": _INTEGER, "status": _TEXT, "error": _TEXT}
_KINDS = {_TEXT: "a string", _INTEGER: "a whole number", _NUMBER: "a finite number", _FLAG: "true or false"}


def check_episode(episode: Episode, *, newest: Mapping[str, int], where: str = "episode") -> None:
    """Check every field of an episode.

    Args:
        newest: the newest version that there is of each policy of the run; -1 of a model that is not trained.
        where: name of the episode in messages.

    Raises:
        WireError: a field is of another kind, no finite number, or names a policy or version that the run has not.
    """
    _check_fields(episode, {"episode_id": _TEXT, **_NAMES}, where)
    _check_status(episode.status, where)
    _check_outcome(episode.outcome, where)
    for index, trajectory in enumerate(_sequence(episode.trajectories, Trajectory, f"{where}.trajectories")):
        place = f"{where}.trajectories[{index}]"
        _check_fields(trajectory, {"trajectory_id": _TEXT, "policy": _TEXT, **_NAMES}, place)
        _check_status(trajectory.status, place)
        _check_outcome(trajectory.outcome, place)
        _check_policy(trajectory.policy, newest, place)
        for name in ("group_id", "task_id", "seed"):
            if getattr(trajectory, name) != getattr(episode, name):
                raise WireError(f"field {place}.{name} differs from the episode's")
        for number, turn in enumerate(_sequence(trajectory.turns, Turn, f"{place}.turns")):
            _check_turn(turn, newest, f"{place}.turns[{number}]")
            if turn.policy != trajectory.policy:
                raise WireError(f"field {place}.turns[{number}].policy differs from the trajectory's")


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


def _check_fields(record: Any, kinds: Mapping[str, Any], where: str) -> None:
    for name, kind in kinds.items():
        value = getattr(record, name)
        fits = isinstance(value, kind) and isinstance(value, _FLAG) == (kind is _FLAG)
        if not fits or (kind is _NUMBER and not math.isfinite(value)):
            raise WireError(f"field {where}.{name} is {_short(value)}: it is {_KINDS[kind]}")


def _check_status(status: str, where: str) -> None:
    if status not in get_args(Status):
        raise WireError(f"field {where}.status is {_short(status)}: it is one of {', '.join(get_args(Status))}")


def _check_policy(policy: str, newest: Mapping[str, int], where: str) -> None:
    if policy not in newest:
        raise WireError(f"field {where}.policy is {_short(policy)}: this run has {', '.join(newest)}")


def _check_outcome(outcome: Any, where: str) -> None:
    if not isinstance(outcome, Mapping):
        raise WireError(f"field {where}.outcome is {_short(outcome)}: it is a map of finite numbers")
    for name, value in outcome.items():
        if not isinstance(name, str) or not isinstance(value, (*_NUMBER, *_FLAG)) or not math.isfinite(value):
            shown = f"{_short(name)} = {_short(value)}"
            raise WireError(f"field {where}.outcome has {shown}: it is a map of finite numbers")


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
    """The value as a message may show it, whatever it is."""
    if isinstance(value, str | int | float | bool | None):
        shown = repr(value)
        return shown if len(shown) <= 40 else f"{shown[:40]}..."
    return type(value).__name__
