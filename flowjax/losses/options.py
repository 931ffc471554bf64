"""Which options each objective takes, checked before training starts."""

import difflib
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from flowjax.losses.mismatch import Correction
from flowjax.losses.policy import Aggregation, Kind, policy_loss

# These stand in every config; objectives that do not clip pay them no heed.
_ALWAYS = {"clip_low", "clip_high", "aggregation", "sequence_tokens", "correction", "correction_low", "correction_high"}
_BY_KIND: dict[str, set[str]] = {
    "ppo": {"dual_clip"},
    "sapo": {"tau_positive", "tau_negative"},
    "dppo": {"pull"},
    "ipo": {"pull"},
    "m2po": {"m2_threshold"},
}
_CHOICES = {"aggregation": typing.get_args(Aggregation), "correction": typing.get_args(Correction)}
_NEED_PROXIMAL = tuple(c for c in _CHOICES["correction"] if c != "none" and not c.endswith("mask"))


class LossError(ValueError):
    """An objective or option that does not exist or does not fit; the message names field, value and remedy."""


def needs_bounds(kind: str) -> bool:
    """Whether the objective wants a first pass over the whole optimiser batch (`m2po_bounds`)."""
    return kind == "m2po"


def needs_proximal(options: Mapping[str, Any]) -> bool:
    """Whether the options want the trainer's own log-probabilities from the start of the step."""
    return options.get("correction", "none") in _NEED_PROXIMAL


def check_loss_options(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown objective, an option that it does not take, or a value out of range.

    Raises:
        LossError: with the field, its value and what to write instead.
    """
    kinds = typing.get_args(Kind)
    if kind not in kinds:
        raise LossError(f"config.loss.kind is {kind!r}{_nearest(kind, kinds)}; it is one of {', '.join(kinds)}")
    allowed = sorted(_ALWAYS | _BY_KIND.get(kind, set()))
    known = inspect.signature(policy_loss).parameters
    for option, value in options.items():
        field = f"config.loss.options.{option}"
        if option not in allowed:
            owner = next((k for k, own in _BY_KIND.items() if option in own), None)
            reason = f" (it belongs to {owner})" if owner else _nearest(option, allowed)
            raise LossError(f"{field} is no option of {kind!r}{reason}; it has {', '.join(allowed)}")
        if option in _CHOICES:
            if value is not None and value not in _CHOICES[option]:
                hint = _nearest(str(value), _CHOICES[option])
                raise LossError(f"{field} is {value!r}{hint}; it is one of {', '.join(_CHOICES[option])}")
        elif value is not None or known[option].default is not None:
            _check_number(field, option, value)
    if options.get("aggregation") == "constant" and options.get("sequence_tokens") is None:
        raise LossError(
            "config.loss.options.aggregation is 'constant', which divides by a fixed length: set "
            "config.loss.options.sequence_tokens to the longest reply allowed"
        )
    low, high = options.get("correction_low", 0.5), options.get("correction_high", 2.0)
    if low >= high:
        raise LossError(f"config.loss.options.correction_low is {low}, it must be below correction_high, {high}")


def _check_number(field: str, option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LossError(f"{field} is {value!r}, it takes a number")
    if option == "dual_clip" and value <= 1:
        raise LossError(f"{field} is {value}, it must be above 1: 3 is usual, None turns it off")
    if option == "clip_low" and not 0 <= value <= 1:
        raise LossError(f"{field} is {value}, it must lie in [0, 1]: ratios go down to 1 - clip_low")
    if value < 0 or (value == 0 and option in ("tau_positive", "tau_negative", "m2_threshold", "sequence_tokens")):
        raise LossError(f"{field} is {value}, it must be positive")


def _nearest(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
