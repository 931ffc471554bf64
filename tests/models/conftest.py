import numpy as np
import pytest


@pytest.fixture
def tokens() -> np.ndarray:
    """Three rows of ordinary tokens."""
    return np.random.default_rng(1).integers(3, 64, (3, 17))
