"""Counts over HTTP, as Prometheus asks for them."""

import urllib.error
import urllib.request

import pytest

from flowjax.monitor.prometheus import MetricsEndpoint


def test_counts_are_those_of_the_moment():
    counts = {"step": 1}
    with MetricsEndpoint(lambda: counts, role="trainer") as endpoint:
        for step in (1, 2):
            counts["step"] = step
            with urllib.request.urlopen(endpoint.url, timeout=60) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain")
                assert f"flowjax_trainer_step {step}\n" in answer.read().decode()
        assert endpoint.url.startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(endpoint.url, timeout=60)


def test_there_is_nothing_else():
    with MetricsEndpoint(dict, role="trainer") as endpoint, pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(endpoint.url.replace("/metrics", "/token"), timeout=60)
