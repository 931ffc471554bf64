"""Options of the objectives: declared once, and checked before training starts."""

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from flowjax.fields import Interval, NotNegative, Positive, Share, declared_types, nearest, option_problems

Kind = Literal[
    "ppo", "gspo", "sapo", "cispo", "m2po", "dppo", "ipo", "rollout_is", "importance", "reinforce", "cross_entropy"
]
Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "trajectory_mean_token_mean", "constant"
]
Correction = Literal[
    "none",
    "token_truncate",
    "token_clamp",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "sequence_geometric_mask",
    "sequence_outlier_mask",
]


@dataclass(frozen=True)
class LossOptions:
    """Options of `policy_loss` (config.loss.options); objectives that do not clip pay the clip bounds no heed.

    clip_low, clip_high: how far the ratio may fall below and rise above 1; of dppo and ipo, the probability.
    aggregation: how tokens are averaged; None is per token, or per sequence where the objective is a sequence's (gspo).
    sequence_tokens: constant: the fixed length that each sequence's sum is divided by (Dr. GRPO).
    correction: weight for the mismatch between proximal policy and sampler, see `correction_weights`.
    correction_low, correction_high: edges of its band; the upper one is also what weights are cut at.
    dual_clip: ppo: bound on the loss of tokens with negative advantage, in units of |A|; 3 is usual, None is off.
    tau_positive, tau_negative: sapo: steepness for positive advantages and for the others.
    pull: dppo, ipo: weight of the squared log-ratio.
    m2_threshold: m2po: largest second moment of the log-ratio.
    """

    clip_low: Share = 0.2  # ratios go down to 1 - clip_low, and no ratio is negative
    clip_high: NotNegative = 0.28
    aggregation: Aggregation | None = None
    sequence_tokens: Positive | None = None
    correction: Correction = "none"
    correction_low: NotNegative = 0.5
    correction_high: NotNegative = 2.0
    dual_clip: Annotated[float, Interval(above=1)] | None = None
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05
    pull: NotNegative = 1e-3
    m2_threshold: Positive = 0.01

    @property
    def needs_proximal(self) -> bool:
        """True where the trainer's own log-probs from the start of the step are wanted: weights, but not masks."""
        return self.correction != "none" and not self.correction.endswith("mask")

    def aggregation_of(self, kind: Kind) -> Aggregation:
        """The way in which an objective averages its tokens."""
        return self.aggregation or ("sequence_mean_token_mean" if kind == "gspo" else "token_mean")


DEFAULTS = LossOptions()

# Options that one objective has and others have not.
_ONLY_OF: dict[str, tuple[Kind, ...]] = {
    "dual_clip": ("ppo",),
    "tau_positive": ("sapo",),
    "tau_negative": ("sapo",),
    "pull": ("dppo", "ipo"),
    "m2_threshold": ("m2po",),
}


class LossError(ValueError):
    """An objective or option that does not exist or does not fit; the message names field, value and remedy."""


def check_loss_options(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown objective, an option that it does not take, or a value out of range.

    Raises:
        LossError: with the field, its value and what to write instead.
    """
    field, kinds = "config.loss.options", typing.get_args(Kind)
    if kind not in kinds:
        raise LossError(f"config.loss.kind is {kind!r}{nearest(kind, kinds)}; it is one of {', '.join(kinds)}")
    for option in options:
        if option in _ONLY_OF and kind not in _ONLY_OF[option]:
            raise LossError(
                f"{field}.{option} is no option of {kind!r}: it belongs to {' and '.join(_ONLY_OF[option])}"
            )
    declared = {name: of for name, of in declared_types(LossOptions).items() if kind in _ONLY_OF.get(name, kinds)}
    for problem in option_problems(field, options, declared, repr(kind)):
        raise LossError(problem)
    chosen = LossOptions(**options)
    if chosen.aggregation == "constant" and chosen.sequence_tokens is None:
        raise LossError(
            f"{field}.aggregation is 'constant', which divides by a fixed length: set {field}.sequence_tokens to the "
            "longest reply allowed"
        )
    if chosen.correction_low >= chosen.correction_high:
        raise LossError(
            f"{field}.correction_low is {chosen.correction_low}, it must be below correction_high, "
            f"{chosen.correction_high}"
        )
