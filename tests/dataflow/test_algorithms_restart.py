"""A dataflow that is killed between any two calls decides as one that is not, with any data algorithms."""

import tempfile
from pathlib import Path
from typing import Any

import grain
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowjax.config import default_config
from flowjax.dataflow.flow import Flow
from flowjax.records import Episode, Lease, Task, Trajectory, Turn
from flowjax.run import resolve
from tests.dataflow import flows

POLICIES, MEMBERS, GROUPS, TASKS = ("solver", "verifier"), 2, 2, 7
ALGORITHMS = {
    "dynamic_sampling": {"accept_share": 0.5},
    "overlong_filter": {"limit_tokens": 3, "share": 0.5},
    "deduplicate": {},
    "skip_solved": {"decay": 0.3, "threshold": 0.8},
    "difficulty": {"floor": 0.3},
    "greso": {"window": 3, "step": 0.2},
    "first_in_first_out": {},
    "earliest_deadline": {},
    "last_in_first_out": {},
    "replay": {"ratio": 0.5, "times": 2, "max_age_versions": 4},
    "mine": {"path": "tests.dataflow.own_algorithm:EveryOther"},
}


class Run:
    """Two policies over one flow, whose episodes go as their seeds say."""

    def __init__(self, folder: Path, algorithms: list[str]):
        config = default_config()
        config.rollout.group_size = MEMBERS
        config.trainer.update({"steps": 50, "groups_per_step": GROUPS})
        config.policies = {policy: {} for policy in POLICIES}
        config.eval.tasks = 0
        config.reward.components = {"success": 1.0}
        config.dataflow.max_staleness = 2
        config.dataflow.algorithms = {name: ALGORITHMS[name] for name in algorithms}
        self._config, self._folder = config, folder
        self._most_versions = 4 if "replay" in algorithms else 2  # that a trained token may lag
        self._versions = dict.fromkeys(POLICIES, 0)
        self._held: list[Lease] = []
        self._flow: Flow | None = None
        self.restart()

    def restart(self) -> None:
        if self._flow is not None:
            self._flow.close()
        tasks = grain.MapDataset.range(TASKS).map(lambda i: Task(f"task-{i}", "toy", i, {"text": i // 2})).repeat()
        # No time passes: how long a batch waits for old groups is forgotten with the process.
        run = resolve(self._config, self._folder)
        self._flow = Flow(run, train_tasks=tasks, held_out_tasks=tasks, clock=lambda: 0.0)
        for policy, version in self._versions.items():
            self._flow.report_serving(policy, version)

    def do(self, call: str, number: int) -> Any:
        """One call, and what it led to."""
        assert self._flow is not None
        if call == "lease":
            leases = flows.lease(self._flow, "w", 1 + number % 6)
            self._held += leases
            return [(lease.episode_id, lease.task.task_id, lease.seed) for lease in leases]
        if call == "accept":
            lease = self._held.pop(number % len(self._held)) if self._held else None
            return lease and flows.accept(self._flow, lease.lease_id, self._played(lease))
        policy = POLICIES[number % 2]
        served = flows.credited(self._flow, policy, self._versions[policy])
        if served is None:
            return None
        oldest = min(int(row.versions[row.sampled].min()) for row in served[0].rows)
        assert 0 <= self._versions[policy] - oldest <= self._most_versions
        self._versions[policy] += 1
        self._flow.batches.commit(policy, self._versions[policy])
        self._flow.report_serving(policy, self._versions[policy])
        return [(row.tokens.tolist(), row.advantages.tolist(), row.versions.tolist()) for row in served[0].rows]

    def _played(self, lease: Lease) -> Episode:
        rng = np.random.default_rng(lease.seed)
        names = lease.episode_id, lease.group_id, lease.task.task_id, lease.seed
        parts = []
        for policy in POLICIES:
            ids = np.full(rng.integers(1, 5), lease.seed % 1000, np.int32)
            turn = Turn(policy, self._versions[policy], ids, ids, np.zeros(len(ids)), "stop", 1, 2, 0.0, True, True)
            outcome = {"success": float(rng.random() < 0.5)}
            parts.append(Trajectory(f"{names[0]}/{policy}", *names[1:], [turn], outcome, policy=policy))
        return Episode(*names, parts, {})

    def close(self) -> list[Any]:
        """The end of the run: what is known of it."""
        assert self._flow is not None
        status = self._flow.status()
        self._flow.close()
        return [status["policies"], status["algorithms"]]


CALLS = st.tuples(st.sampled_from(["lease", "accept", "accept", "accept", "batch"]), st.integers(0, 5), st.booleans())


@settings(max_examples=5, deadline=None)
@given(
    algorithms=st.lists(st.sampled_from(sorted(ALGORITHMS)), unique=True, min_size=2, max_size=6),
    calls=st.lists(CALLS, min_size=40, max_size=60),
)
def test_restarts_change_nothing(algorithms, calls):
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as restarted:
        runs = Run(Path(whole), algorithms), Run(Path(restarted), algorithms)
        for call, number, killed in calls:
            if killed:
                runs[1].restart()
            assert runs[0].do(call, number) == runs[1].do(call, number)
        (ledger, learnt), (ledger_again, learnt_again) = (run.close() for run in runs)
        assert learnt == learnt_again
        for policy in POLICIES:
            assert ledger[policy] == ledger_again[policy]


def test_what_an_algorithm_makes_of_a_new_version_is_kept_at_once(tmp_path):
    run = Run(tmp_path, ["mine"])
    run.do("lease", 5)
    while run.do("batch", 0) is None:
        assert run.do("accept", 0) is not None or run.do("lease", 5)
    assert run._flow is not None
    learnt = run._flow.algorithms.by_name["mine"].state()
    run.restart()
    assert run._flow.algorithms.by_name["mine"].state() == learnt
    run.close()
