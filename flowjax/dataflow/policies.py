"""Policies and rollout workers as the dataflow sees them: settings, and the versions that are served and committed."""

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.run import Policy, Run
from flowjax.weights.publish import commit_of, committed_steps, newest_first


@dataclass(eq=False, slots=True)
class PolicyStatus:
    """State of a policy that leases, groups, batches and evaluations share."""

    run: Run
    settings: Policy
    serving: int = -1  # newest version that the engines serve; -1 before version 0
    newest_served: int = -1  # that they ever did: its trainer may have gone back behind it
    committed: int = -1  # newest version that its trainer has made
    is_waiting: bool = False  # its trainer last asked in vain
    went_back: bool = False  # its trainer has, behind versions that were served
    _found: int = field(init=False)  # newest checkpoint when this process started

    def __post_init__(self):
        self._found = self.newest_checkpoint()

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def checkpoints(self) -> Path:
        """Folder of its versions."""
        return self.run.folder / "checkpoints" / self.name

    @property
    def learns(self) -> bool:
        """True until it has made its last version."""
        return self.committed < self.settings.trainer.steps

    @property
    def oldest_kept(self) -> int:
        """The oldest version whose checkpoint its trainer may still go back to."""
        return max(self.committed - self.kept_versions, 0)

    @property
    def kept_versions(self) -> int:
        """Versions from the newest to the oldest checkpoint that its trainer may go back to, at most."""
        return self.settings.trainer.keep_checkpoints * self.settings.trainer.checkpoint_every

    @property
    def most_ready(self) -> int:
        """Groups that may wait for its trainer."""
        dataflow, groups = self.run.config.dataflow, self.settings.trainer.groups_per_step
        return max(dataflow.max_ready_groups or 2 * (dataflow.max_staleness + 1) * groups, groups)

    def newest_checkpoint(self) -> int:
        """The newest version in the run's folder, 0 where there is none."""
        steps = (step.name for step in self.checkpoints.glob("[0-9]*") if step.name.isdecimal())
        return max(map(int, steps), default=0)

    def newest_version(self, batches: int) -> int:
        """The newest version that there can be after so many batches, as the ledger counts them: each takes one.

        Where the ledger is new, or older than the checkpoints that this process found when it started, the newest
        checkpoint counts.
        """
        made = max(batches, self.committed, 0)
        return max(made, self._found if made else self.newest_checkpoint())

    def serves(self, version: int, batches: int) -> None:
        """Note that some engine serves that version. One beyond the `batches` that are made is of before its trainer
        went back: the version that will have its number is another."""
        if self.went_back:
            version = min(version, batches)
        self.serving = max(self.serving, version)
        self.newest_served = max(self.newest_served, version)

    def goes_back(self, version: int) -> None:
        """Note that its trainer goes on from that version."""
        self.went_back |= version < self.newest_served
        self.serving = min(self.serving, version)

    def lost(self, commits: Mapping[int, str]) -> bool:
        """True where its trainer has gone back behind weights of these commits, by version: one is gone, or that of
        this number is another by now. False where nobody knows, as of one that was thinned out."""
        known = {version: commit_of(self.checkpoints, version) for version in commits}
        absent = [version for version, commit in known.items() if commit is None]
        newest = next(newest_first(self.checkpoints), math.inf) if absent else math.inf
        return max(absent, default=-1) > newest or any(
            known[version] not in (None, commit) for version, commit in commits.items()
        )

    def flush_checkpoint(self, version: int) -> None:
        """Have a version on the disk, not only in memory that a power cut loses, and those of which nobody has said
        that they are committed: the newest checkpoint may be among them. Changes nothing here: it may run in a thread.
        Files that are not there are left out: a version of one's own may be kept elsewhere."""
        unsaid = [step for step in committed_steps(self.checkpoints) if self.committed < step <= version]
        folders = [self.checkpoints / str(step) for step in {*unsaid, version}]
        for path in [path for folder in folders for path in (*folder.rglob("*"), folder)] + [self.checkpoints]:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)


# ------------------------------------------------------------------------------------------------------ rollout workers

_COMMITS_JUDGED = 50  # newest ones of a policy, that a mismatch is the mean over
_AROUND = 4  # commits before and after one
_TOKENS_JUDGED, _TRAJECTORIES_JUDGED = 500, 8  # of a node, in these, before it is sent away
_MOST_KNOWN = 10_000  # names; a worker that comes back has a new one
_MOST_SHOWN = 1000
_MUCH_SLOWER = 2.0  # times as long for an episode as another worker
_EPISODES_WEIGHED = 16  # newest ones of a worker, that its time for one is the mean of, or nearly; none is slow before
_SLOW_FOR = 64  # times as long as an episode: so long one that plays nothing is taken to be slow
_AWAY_S = 600.0  # since it last asked for them, after which a worker is not expected to play evaluations any more
_MOST_PLAYED = 4096  # leases of a worker whose time is taken
_CATCHING_UP_S = 3.0  # since a worker got a version, for which others are taken to get it at any moment
_ASKING_S = 3.0  # since it asked or was known to wait, for which a worker is taken to: that is noted each second


@dataclass(slots=True)
class _Seen:
    """State of one worker."""

    heard_s: float  # when it last said something
    free_slots: int = 0  # for which there was nothing to play
    began_s: dict[str, float] = field(default_factory=dict)  # when it was given what it plays, by lease, oldest first
    yielded: bool = False  # left training to others when it last asked for it
    asked_eval_s: float = -math.inf  # when it last asked for evaluations, or was first heard of
    serving: dict[str, int] = field(default_factory=dict)  # version by policy
    serving_since_s: float = -math.inf  # when the newest of these changed
    held: dict[str, frozenset[int]] = field(default_factory=dict)  # versions that it can serve, where it says so
    episodes: int = 0  # that counted
    episode_s: float = 0.0  # that one takes it: the mean of the newest
    weighed: int = 0  # episodes, of which that is the mean
    weighed_s: float = 0.0  # when the last of them was
    asked_s: float = -math.inf  # when it last asked for training
    prompted: bool = False  # asked for its versions


class Mismatches:
    """Differences between the log-probs of workers' trajectories and the trainer's, as its newest commits found them.

    A node (`<node>:<worker>`) is judged by the commits in which something of it was compared, and beside what others
    have in these and a few around them (one batch may be all of one worker): so a trainer that was off for a while, or
    a newer policy, is nobody's fault.
    """

    def __init__(self) -> None:
        # By policy, of each commit: k3, tokens that this is summed over, and trajectories, by worker.
        self._commits: dict[str, deque[dict[str, np.ndarray]]] = {}

    def add(self, policy: str, found: Iterable[tuple[str, float, int]]) -> None:
        """Note what one commit found of a policy's trajectories: who played each, sum of k3 over tokens of it, and
        their number."""
        sums: dict[str, np.ndarray] = {}
        for worker, k3, tokens in found:
            sums[worker] = sums.get(worker, np.zeros(3)) + np.array([k3, tokens, 1])
        self._commits.setdefault(policy, deque(maxlen=_COMMITS_JUDGED)).append(sums)

    def means(self) -> dict[str, float]:
        """The k3 a token of each worker, over all policies."""
        sums = _added(commit for commits in self._commits.values() for commit in commits)
        return {worker: float(k3 / tokens) for worker, (k3, tokens, _) in sums.items()}

    def above(self, policy: str, most: float) -> dict[str, float]:
        """Nodes with a mean over `most`, and over three times that of another who is not: where all are above it, it is
        not the nodes."""
        commits = [_added({_party(worker): found} for worker, found in each.items()) for each in self._commits[policy]]
        whole = {party: k3 / tokens for party, (k3, tokens, _) in _added(commits).items()}
        above = {}
        if min(whole.values(), default=math.inf) > most:
            return above
        for node in (party for party, mean in whole.items() if party.endswith(":") and mean > most):
            has = [place for place, commit in enumerate(commits) if node in commit]
            around = {place + near for place in has for near in range(-_AROUND, _AROUND + 1)}
            sums = _added(commit for place, commit in enumerate(commits) if place in around)
            means = {party: k3 / tokens for party, (k3, tokens, _) in sums.items() if tokens >= _TOKENS_JUDGED}
            least = min((mean for party, mean in means.items() if party != node), default=math.inf)
            if least <= most and sums[node][2] >= _TRAJECTORIES_JUDGED and means.get(node, 0) > max(most, 3 * least):
                above[node[:-1]] = float(means[node])
        return above


def _party(worker: str) -> str:
    """The worker's node, with its colon; a worker of none is one by itself."""
    return worker[: worker.find(":") + 1] or worker


def _added(parts: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    sums: dict[str, np.ndarray] = {}
    for part in parts:
        for name, found in part.items():
            sums[name] = sums.get(name, 0) + found
    return sums


class RolloutWorkers:
    """All workers that have said something to this process. Nothing of it is kept: who is alive says it again.

    Args:
        max_staleness: versions that a worker may be behind the newest that any serves, and still be given training.
        clock: seconds that only grow.
    """

    def __init__(self, *, max_staleness: int, clock: Callable[[], float]):
        self._max_staleness, self._clock = max_staleness, clock
        self._seen: dict[str, _Seen] = {}  # in the order in which they were last heard of
        self._evicted: dict[str, str] = {}  # with why
        self.mismatches = Mismatches()

    def report(self, worker: str, policy: str, version: int, held: Collection[int] | None = None) -> bool:
        """Note what a worker serves: also an older version than before, as after a restart of its engine; and which
        versions it can serve, where it says so. Returns whether any of that is news."""
        seen = self._of(worker)
        before = seen.serving.get(policy), seen.held.get(policy)
        if before[0] != version:
            seen.serving[policy], seen.serving_since_s = version, self._clock()
        if held is not None:
            seen.held[policy] = frozenset(held)
        return before != (version, seen.held.get(policy))

    def unreported(self, worker: str, policies: Collection[str]) -> list[str]:
        """Those of the policies that the worker has not said its version of, as after a restart of this process."""
        seen = self._seen.get(worker)
        return [policy for policy in policies if seen is None or policy not in seen.serving]

    def prompts(self, worker: str) -> bool:
        """Note that a worker is asked for its versions. True if it is for the first time."""
        seen = self._of(worker)
        first, seen.prompted = not seen.prompted, True
        return first

    def asks_evaluation(self, worker: str) -> None:
        """Note that a worker asks for evaluations."""
        self._of(worker).asked_eval_s = self._clock()

    def lacks(self, worker: str, versions: Mapping[str, int]) -> bool:
        """True if the worker says that it cannot serve one of these versions, and another may who asks for evaluations.
        Where nobody can, as after their loss, it tries all the same: an evaluation comes to its end by attempts that
        failed."""
        since_s = self._clock() - _AWAY_S
        others = (name for name, seen in self._seen.items() if name != worker and seen.asked_eval_s > since_s)
        return self._cannot(worker, versions) and not all(self._cannot(other, versions) for other in others)

    def standing(self, worker: str) -> Hashable:
        """Versions of a worker: where there is nothing for one, there is nothing for another of the same standing."""
        seen = self._seen.get(worker)
        return seen and (tuple(sorted(seen.serving.items())), tuple(sorted(seen.held.items())))

    def _cannot(self, worker: str, versions: Mapping[str, int]) -> bool:
        seen = self._seen.get(worker)
        return seen is not None and any(
            seen.serving.get(policy) != version and version not in seen.held.get(policy, (version,))
            for policy, version in versions.items()
        )

    def began(self, worker: str, lease_ids: Collection[str]) -> None:
        """Note that the worker was given these episodes now."""
        began_s = self._of(worker).began_s
        began_s.update(dict.fromkeys(lease_ids, self._clock()))
        while len(began_s) > _MOST_PLAYED:  # leases that ran out
            del began_s[next(iter(began_s))]

    def ended(self, worker: str, lease_id: str, *, counts: bool) -> None:
        """Note that the worker has ended an episode. What counts shows how long it takes for one: what breaks at once
        does not make it fast, nor what a worker says of itself."""
        seen, now_s = self._of(worker), self._clock()
        seen.episodes += counts
        began_s = seen.began_s.pop(lease_id, None)
        if began_s is None or not counts:
            return
        seen.weighed = min(seen.weighed + 1, _EPISODES_WEIGHED)
        seen.weighed_s = now_s
        seen.episode_s += (now_s - began_s - seen.episode_s) / seen.weighed

    def yields(self, worker: str, newest: Mapping[str, int]) -> bool:
        """Note that a worker asks for training. True if it leaves that to a much faster one with free slots: what it
        played itself would often be in when the batch that needs it has gone by. Not for long to one whose versions are
        older, which may not play what was opened for newer ones."""
        seen = self._of(worker)
        seen.asked_s = self._clock()
        if seen.asked_s - seen.weighed_s > _SLOW_FOR * seen.episode_s:  # by now it may be faster, and could not show it
            seen.weighed, seen.episode_s = 0, 0.0
        serving = self.serving(worker, newest)
        if seen.asked_s - seen.serving_since_s < _CATCHING_UP_S:
            serving = {policy: version - self._max_staleness for policy, version in newest.items()}
        seen.yielded = seen.weighed == _EPISODES_WEIGHED and any(
            0 < _MUCH_SLOWER * other.episode_s < seen.episode_s
            and other.free_slots > 0
            and other.asked_s > seen.asked_s - _ASKING_S
            and all(version >= serving[policy] for policy, version in self.serving(name, newest).items())
            for name, other in self._seen.items()
        )
        return seen.yielded

    def yielded(self, worker: str) -> bool:
        """True if the worker, when it last asked for training, left that to a faster one."""
        return (seen := self._seen.get(worker)) is not None and seen.yielded

    def still_waits(self, worker: str) -> None:
        """Note that the worker, who asked for episodes, has got no answer yet."""
        seen, now_s = self._seen.get(worker), self._clock()
        if seen is not None and now_s - seen.asked_s < _ASKING_S:  # for training, that is
            seen.asked_s = now_s

    def left_free(self, worker: str, slots: int) -> None:
        """Note how many of the slots that it asked for have got nothing."""
        self._of(worker).free_slots = slots

    def evict(self, name: str, reason: str = "--evict") -> list[str]:
        """Send a worker, or all of a node (`<node>:<worker>`), away for as long as this process lives. Returns those
        that are known; `reason` is for its node, and for people."""
        known = [worker for worker in self._seen if name in (worker, worker.partition(":")[0])]
        for worker in known:
            del self._seen[worker]
        self._evicted.update(dict.fromkeys(known, reason))
        return known

    def why_evicted(self, worker: str) -> str:
        """The reason for which the worker was sent away; empty if it was not."""
        return self._evicted.get(worker, "")

    def serving(self, worker: str, newest: Mapping[str, int]) -> dict[str, int]:
        """Version of each policy that the worker plays with; the newest where it has not said."""
        seen = self._seen.get(worker)
        said = seen.serving if seen else {}
        return {policy: min(said.get(policy, version), version) for policy, version in newest.items()}

    def may_train(self, serving: Mapping[str, int], newest: Mapping[str, int]) -> bool:
        """True unless a worker that serves these versions is too far behind the newest."""
        return all(version - serving[policy] <= self._max_staleness for policy, version in newest.items())

    def status(self, *, within_s: float) -> dict[str, dict[str, Any]]:
        """Workers that were heard of within so many seconds, by name; the newest of very many."""
        now_s, found = self._clock(), self.mismatches.means()
        return {
            name: {
                "heard_s_ago": now_s - seen.heard_s,
                "serving": dict(seen.serving),
                "episodes": seen.episodes,
                "free_slots": seen.free_slots,
                **({"mismatch_kl": found[name]} if name in found else {}),
            }
            for name, seen in list(self._seen.items())[-_MOST_SHOWN:]
            if now_s - seen.heard_s <= within_s
        }

    def _of(self, worker: str) -> _Seen:
        # Put back below as the newest: the dict is in that order.
        seen = self._seen.pop(worker, None) or _Seen(0.0, asked_eval_s=self._clock())
        seen.heard_s = self._clock()
        self._seen[worker] = seen
        if len(self._seen) > _MOST_KNOWN:  # names are strangers' to choose: the longest silent one is forgotten
            del self._seen[next(iter(self._seen))]
        return seen
