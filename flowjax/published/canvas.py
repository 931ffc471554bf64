"""Reward of a built workflow as FlowSteer publishes it, faults included: `reward.components.published_canvas`."""

import jax.numpy as jnp

from flowjax.rewards.components import Outcome


def canvas(
    correctness: Outcome,
    canvas_checker: Outcome,
    canvas_format: Outcome,
    canvas_operator: Outcome,
    canvas_control: Outcome,
) -> Outcome:
    """R = -1 + S + [S >= 1] C, S = 0.2 checker + 0.2 format + 0.2 operator + 0.4 control.

    The parts are 0 or 1 and read off the workflow's text: operators count where they are mentioned, whether they ran or
    not, six mentions of one kind are enough, and a loop is never seen.
    """
    structure = 0.2 * canvas_checker + 0.2 * canvas_format + 0.2 * canvas_operator + 0.4 * canvas_control
    structure = jnp.minimum(1.0, structure)
    # 0.2 + 0.2 + 0.2 + 0.4 may round to just below 1.
    return structure - 1.0 + jnp.where(structure >= 1.0 - 1e-6, correctness, 0.0)
