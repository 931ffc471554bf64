"""A few faults of the machine in a run of real processes; many more by `python -m tests.launch.faults`."""

import errno
from collections import Counter

import pytest
from faults import ERRORS, ROLES, Fault, draw, meet


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_after_each_fault_or_ends_with_its_cause():
    for verdict in meet(6, seed=5, patience_s=240.0, most_s=60.0):
        assert verdict.outcome in ("went_on", "ended"), verdict
        assert verdict.outcome == "went_on" or verdict.line


def test_the_faults_cover_every_call_of_every_role():
    kinds = {(role, call, error) for role, calls in ROLES.items() for call in calls for error in ERRORS[call]}
    faults = [fault for fault, _ in zip(draw(0), range(2 * len(kinds)), strict=False)]
    assert Counter((fault.role, fault.call, fault.error) for fault in faults) == dict.fromkeys(kinds, 2)
    assert {fault.lasting for fault in faults} == {True, False}
    fault = Fault(0, "trainer", "open", "ENOSPC", 1, False)
    assert fault.named_in(f"trainer: paused: {OSError(errno.ENOSPC, 'No space left on device')}")
    assert not fault.named_in("trainer: down exit status 1")
