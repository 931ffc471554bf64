"""Shapes in the signatures of the rooms named in conftest.py are checked, so that a wrong one cannot pass a test."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from flowjax.credit.table import TurnTable, normalise
from flowjax.losses.policy import policy_loss
from flowjax.models.lora import lora_branch
from flowjax.rewards import zero_sum
from flowjax.trainer.batch import MicroBatch

TWO, THREE = jnp.zeros(2), jnp.zeros(3)
ON_HOST: dict[str, Any] = dict.fromkeys(TurnTable.__dataclass_fields__, np.zeros(3, np.int32))
FLAT: dict[str, Any] = dict.fromkeys(MicroBatch.__dataclass_fields__, np.zeros(3, np.int32))


@pytest.mark.parametrize(
    "call",
    [
        lambda: normalise(THREE, TWO, THREE, "mean"),
        lambda: policy_loss(THREE, THREE, TWO, jnp.ones(3, bool)),
        lambda: zero_sum(THREE, TWO),
        lambda: lora_branch(TWO, jnp.zeros((3, 1)), jnp.zeros((1, 2)), 1.0),
        lambda: MicroBatch(**FLAT),
        lambda: TurnTable(**ON_HOST),
    ],
    ids=["credit", "losses", "rewards", "models", "trainer", "a table on the host"],
)
def test_a_wrong_shape_or_array_is_refused(call):
    with pytest.raises(TypeCheckError):
        call()
