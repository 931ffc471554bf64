"""What episodes say about themselves, as arrays: the outcomes that worlds report and those that every episode has."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from flowjax.records import COUNTED_STATUSES, Group, Trajectory


class RewardError(ValueError):
    """A reward that cannot be given; the message names the component, the outcome and the remedy."""


def _turns(trajectory: Trajectory) -> float:
    return len(trajectory.turns)


def _invalid_actions(trajectory: Trajectory) -> float:
    return sum(not turn.valid for turn in trajectory.turns)


def _env_return(trajectory: Trajectory) -> float:
    return sum(turn.env_reward for turn in trajectory.turns)


def _sampled_tokens(trajectory: Trajectory) -> float:
    return sum(len(turn.sampled_ids) for turn in trajectory.turns)


def _longest_reply_tokens(trajectory: Trajectory) -> float:
    return max((len(turn.sampled_ids) for turn in trajectory.turns), default=0)


# Read off the turns when a world does not report them itself.
DERIVED = {
    "turns": _turns,
    "invalid_actions": _invalid_actions,
    "env_return": _env_return,
    "sampled_tokens": _sampled_tokens,
    "longest_reply_tokens": _longest_reply_tokens,
}


def gather_outcomes(groups: Sequence[Group], names: Iterable[str]) -> dict[str, Float[np.ndarray, "trajectories"]]:
    """One array per outcome over all trajectories, in order.

    Episodes that failed for reasons outside the policy have zeros where they report nothing.

    Raises:
        RewardError: an episode that counts does not report an outcome, or reports one that is not finite.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return {name: np.array([_outcome(trajectory, name) for trajectory in trajectories], np.float32) for name in names}


def _outcome(trajectory: Trajectory, name: str) -> float:
    if name in trajectory.outcome:
        value = float(trajectory.outcome[name])
        if not np.isfinite(value):
            raise RewardError(f"trajectory {trajectory.trajectory_id!r} reports {name} = {value}, not a number")
        return value
    if name in DERIVED:
        return float(DERIVED[name](trajectory))
    if trajectory.status not in COUNTED_STATUSES:
        return 0.0
    raise RewardError(
        f"trajectory {trajectory.trajectory_id!r} reports no outcome {name!r}, only {sorted(trajectory.outcome)}: "
        "let the world report it, or take the component that needs it out of config.reward.components"
    )
