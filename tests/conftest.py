"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# Hypothesis fails an example that takes over 0.2 s, and a test whose examples are slow to make: both are a matter of
# what else the machine does.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
