"""Where a listener can be reached from its own machine, and who needs a token."""

import pytest

from flowjax.monitor.token import VARIABLE, is_loopback, known_token, reachable


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


def test_a_key_has_no_newline_at_its_end(tmp_path, monkeypatch):
    """No HTTP header may have one: every request with it failed."""
    monkeypatch.setenv(VARIABLE, "berlin:key\n")
    assert known_token(tmp_path) == "berlin:key"
