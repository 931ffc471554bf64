"""The dataflow of a run: leases, groups, batches and evaluations over one ledger."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import grain

from flowjax.dataflow.algorithms import Chain, build_algorithms
from flowjax.dataflow.batches import Batches
from flowjax.dataflow.evaluations import Evaluations
from flowjax.dataflow.leases import Groups, Leases
from flowjax.dataflow.ledger import Ledger
from flowjax.dataflow.policies import PolicyStatus, RolloutWorkers
from flowjax.models.config import vocabulary_sizes
from flowjax.monitor.metrics import MetricsWriter
from flowjax.monitor.token import nodes_sent_away
from flowjax.records import Bounds, Episode, Task
from flowjax.rewards import required_outcomes
from flowjax.run import Run


class Flow:
    """Dataflow of a run, from which the service answers. Four objects have a job each, and do not know each other:

        leases        tasks out: episodes for workers, groups opened for them
        groups        episodes in: groups that are complete, kept or dropped
        batches       groups out: batches for the trainers, and how far these are
        evaluations   held-out tasks of the versions that are served

    They meet in the ledger, which each of them changes by whole transitions, and in `policies`.
    """

    def __init__(
        self,
        run: Run,
        *,
        train_tasks: grain.MapDataset[Task],
        held_out_tasks: grain.MapDataset[Task],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run, config = run, run.config
        self.ledger = Ledger(
            run.folder / "dataflow.sqlite",
            lease_s=config.dataflow.lease_s,
            max_attempts=config.dataflow.max_attempts,
            failed=config.dataflow.failed_episodes,
            min_group_size=min(config.dataflow.min_group_size, config.rollout.group_size),
            clock=clock,
        )
        committed, gone_back = self.ledger.committed_versions(), self.ledger.gone_back()
        self.policies = {
            name: PolicyStatus(
                run,
                policy,
                newest_served=gone_back.get(name, -1),  # a worker that was cut off may still serve it
                committed=committed.get(name, -1),
                went_back=name in gone_back,
            )
            for name, policy in run.policies.items()
        }
        # Base models that speak for an agent and are not trained: their trajectories are part of no group.
        self.frozen = set(config.agents.values()) - set(run.policies)
        self.bounds = Bounds.of_run(run, vocabulary_sizes(run))
        self.needed_outcomes = {  # by policy, for its reward
            name: required_outcomes(policy.reward.components.to_dict()) for name, policy in run.policies.items()
        }
        self.algorithms = Chain(build_algorithms(config), self.ledger.states())
        metrics = MetricsWriter(run.folder)
        self.workers = RolloutWorkers(max_staleness=config.dataflow.max_staleness, clock=clock)
        self.groups = Groups(self.ledger, self.algorithms, self.policies, clock)
        self.batches = Batches(self.ledger, self.algorithms, self.policies, metrics, run.folder, clock)
        self.evaluations = Evaluations(run, self.ledger, metrics, held_out_tasks, self.policies, clock)
        self.leases = Leases(
            run, self.ledger, self.algorithms, train_tasks, self.policies, self.workers, self.evaluations.unwritten
        )
        self._lease_s = config.dataflow.lease_s
        self._compared: dict[str, Mapping[str, tuple[float, int]]] = {}  # the newest mismatches, by policy

    def close(self) -> None:
        self.evaluations.give_up_writing()
        self.ledger.close()

    def newest_version(self, policy: str) -> int:
        """The newest version of a policy that can exist by now."""
        return self.policies[policy].newest_version(self.ledger.batches_made(policy))

    def report_serving(self, policy: str, version: int) -> int:
        """Note what the engines serve. Returns the policy's oldest version that must stay loaded."""
        self.policies[policy].serves(version, self.ledger.batches_made(policy))
        self.evaluations.open()
        return self.oldest_needed(policy)

    def oldest_needed(self, policy: str) -> int:
        """The policy's oldest version that a worker may still be asked to play."""
        state = self.policies[policy]
        # After a restart no worker has reported yet what is served: with -1 a node would fetch every version there is.
        newest = state.serving if state.serving >= 0 else state.committed
        newest_stale = newest - self.run.config.dataflow.max_staleness
        return min([max(newest_stale, 0), *self.evaluations.pinned(policy)])

    def has_lost(self, episode: Episode) -> bool:
        """True if an episode was played with weights that are lost because their trainer went back, judged by the
        commits that its worker reports (`Episode.commits`)."""
        return any(
            policy in self.policies and self.policies[policy].lost(commits)
            for policy, commits in episode.commits.items()
        )

    def compare(self, policy: str, mismatches: Mapping[str, tuple[float, int]]) -> dict[str, str]:
        """Note the mismatch KL between the trainer's and the engines' log-probs of a policy's trajectories: by
        trajectory id, the sum of k3 over its tokens and their number. Returns the nodes that are to be sent away for
        it, with the reason."""
        found, most = self.workers.mismatches, self.run.config.dataflow.max_mismatch_kl
        if not mismatches:
            return {}
        if self._compared.get(policy) != mismatches:  # a second copy of the message changes nothing
            workers = self.ledger.workers_of(mismatches).items()
            # What an evicted worker had played says nothing about a node that is invited again.
            kept = [(worker, *mismatches[name]) for name, worker in workers if not self.workers.why_evicted(worker)]
            found.add(policy, kept)
            self._compared[policy] = mismatches
        bound = f"config.dataflow.max_mismatch_kl is {most:g}, and others are below it"
        return {
            node: f"its engines sample from another policy than {policy}, by {k3:.2g} a token (k3); {bound}"
            for node, k3 in (found.above(policy, most) if most else {}).items()
        }

    @property
    def finished(self) -> bool:
        """True when all training is committed and every evaluation is in."""
        return not any(policy.learns for policy in self.policies.values()) and self.evaluations.finished

    def status(self) -> dict[str, Any]:
        """Counts for the live screen; the first policy's where there are several, and all of them by policy."""
        counts = self.ledger.counts()
        by_policy = {name: self._policy_status(policy) for name, policy in self.policies.items()}
        return {
            **next(iter(by_policy.values())),
            "policies": by_policy,
            **self.ledger.count_episodes(),
            "quarantined": counts.get("quarantined", 0),
            "short_groups": counts.get("short_groups", 0),
            "failed": self.ledger.count_causes("failed"),
            "last_failures": self.ledger.last_failures(),
            "put_aside": self.ledger.put_aside(),
            "opened_groups": self.ledger.count_groups(),
            "passed_over_tasks": counts.get("passed_over", 0),
            "forced_tasks": counts.get("forced", 0),
            "algorithms": self.algorithms.metrics(),
            "finished": self.finished,
            "workers": self._workers_status(),
            "sent_away": nodes_sent_away(self.run.folder),
        }

    def _workers_status(self) -> dict[str, dict[str, Any]]:
        playing = self.ledger.playing()
        known = self.workers.status(within_s=self._lease_s)
        return {name: {**worker, "playing": playing.get(name, 0)} for name, worker in known.items()}

    def _policy_status(self, policy: PolicyStatus) -> dict[str, Any]:
        name, step = policy.name, self.ledger.batches_made(policy.name)
        by_state = self.ledger.count_by_state(name)
        ages = Counter(max(step - group.oldest_version, 0) for group in self.ledger.groups(name, "ready"))
        return {
            "version": policy.serving,
            "committed": policy.committed,
            "lag": max(policy.committed - policy.serving, 0),
            **{f"{state}_groups": by_state.get(state, 0) for state in ("ready", "open", "quarantined")},
            "dropped_groups": self.ledger.count_dropped(name),
            "dropped": self.ledger.count_causes("dropped", name),
            "ages": {str(age): groups for age, groups in sorted(ages.items())},
            "trained_ages": self.batches.trained_ages[name],
        }
