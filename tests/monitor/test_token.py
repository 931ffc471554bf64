"""Where a listener can be reached from its own machine, and who needs a token."""

import pytest

from flowjax.monitor.token import is_loopback, reachable


@pytest.mark.parametrize(
    ("host", "address", "loopback"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "localhost", True),
        ("0.0.0.0", "127.0.0.1", False),
        ("::", "[::1]", False),
        ("::1", "[::1]", True),
        ("10.0.0.5", "10.0.0.5", False),
        ("node-3", "node-3", False),
    ],
)
def test_addresses(host, address, loopback):
    assert (reachable(host), is_loopback(host)) == (address, loopback)
