"""Settings of all tests; types and shapes in the signatures of five rooms are checked wherever a test goes through."""

from pathlib import Path

import pytest
from beartype import BeartypeConf, beartype
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

CHECKED = ("credit", "losses", "models", "rewards", "trainer")
# Files of the second tier that take minutes, begun first: one that begins last is waited for by all other workers.
LONGEST = (
    "launch/test_launch_chaos.py",
    "cluster/test_far_nodes.py",
    "integration/test_full_weights_far_away.py",
    "launch/test_join.py",
    "trainer/test_processes.py",
    "integration/test_chaos.py",
)

# Hypothesis fails an example that takes over 0.2 s, and a test whose examples are slow to make: both are a matter of
# what else the machine does. Every change meets the same examples, so that none fails by what an earlier one has left;
# the second tier draws others (`--hypothesis-profile=explore`).
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same examples", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same examples")

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as type checkers have it

# Before anything of these rooms is imported, and never taken away: some modules are imported only inside a test.
install_import_hook([f"flowjax.{room}" for room in CHECKED], "tests.conftest.checked")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; all others keep their order."""
    here = Path(__file__).parent
    place = {(here / name).resolve(strict=True): number for number, name in enumerate(LONGEST)}  # renamed: an error
    items.sort(key=lambda item: place.get(item.path, len(place)))
