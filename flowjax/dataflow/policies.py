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
    newest_served: int = -1  # newest version that they ever served; a trainer that went back may be below it
    committed: int = -1  # newest version that its trainer has committed; lower again once the trainer went back
    is_waiting: bool = False  # there was no batch when its trainer last asked
    went_back: bool = False  # its trainer went on from a version below `newest_served`
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
        """The newest version that can exist after so many batches, as the ledger counts them: each makes one.

        If the ledger is new, or older than the checkpoints that this process found when it started, the newest
        checkpoint counts.
        """
        made = max(batches, self.committed, 0)
        return max(made, self._found if made else self.newest_checkpoint())

    def serves(self, version: int, batches: int) -> None:
        """Note that some engine serves that version. If the trainer went back, a version beyond the `batches` made is
        from before that, and other weights will have its number."""
        if self.went_back:
            version = min(version, batches)
        self.serving = max(self.serving, version)
        self.newest_served = max(self.newest_served, version)

    def goes_back(self, version: int) -> None:
        """Note that its trainer goes on from that version."""
        self.went_back |= version < self.newest_served
        self.serving = min(self.serving, version)

    def lost(self, commits: Mapping[int, str]) -> bool:
        """True if weights of these commits, by version, are lost because the trainer went back.

        Lost is a version beyond the newest checkpoint, and one whose number has another commit now. An older version
        without a checkpoint does not count: it may have been thinned out.
        """
        known = {version: commit_of(self.checkpoints, version) for version in commits}
        absent = [version for version, commit in known.items() if commit is None]
        newest = next(newest_first(self.checkpoints), math.inf) if absent else math.inf
        return max(absent, default=-1) > newest or any(
            known[version] not in (None, commit) for version, commit in commits.items()
        )

    def flush_checkpoint(self, version: int) -> None:
        """Flush a version's checkpoint to the disk, so that it survives a power failure.

        Checkpoints up to it of which no commit was reported yet are flushed, too: the newest one to resume from may be
        among them. Changes no state here, so that it may run in a thread. Missing files are left out: a trainer of
        one's own may keep its versions in another place.
        """
        unsaid = [step for step in committed_steps(self.checkpoints) if self.committed < step <= version]
        folders = [self.checkpoints / str(step) for step in {*unsaid, version}]
        for path in [path for folder in folders for path in (*folder.rglob("*"), folder)] + [self.checkpoints]:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)  # of folders, too: a file's name is kept by its folder, not by the file
                finally:
                    os.close(descriptor)


# ------------------------------------------------------------------------------------------------------ rollout workers

_COMMITS_JUDGED = 50  # newest commits of a policy that a mismatch is the mean over
_AROUND = 4  # commits before and after one that count as near it
_TOKENS_JUDGED, _TRAJECTORIES_JUDGED = 500, 8  # the least of a node in these commits, before it is sent away
_MOST_KNOWN = 10_000  # names; a worker that comes back has a new one
_MOST_SHOWN = 1000
_MUCH_SLOWER = 2.0  # times another worker's time for an episode
_EPISODES_WEIGHED = 16  # episodes in the moving average of a worker's time for one; it is not slow before so many
_SLOW_FOR = 64  # times its time for an episode: a worker that has played nothing for longer is not slow any more
_AWAY_S = 600.0  # since a worker last asked for evaluations; it is not expected to play any after that
_MOST_PLAYED = 4096  # leases of a worker that are timed
_CATCHING_UP_S = 3.0  # since a worker got a new version; others are expected to get it at any moment
_ASKING_S = 3.0  # since a worker asked, or was noted as waiting (each second); it is taken to wait for so long


@dataclass(slots=True)
class _Seen:
    """State of one worker."""

    heard_s: float  # when it last said something
    free_slots: int = 0  # for which there was nothing to play
    began_s: dict[str, float] = field(default_factory=dict)  # when it got each episode, by lease, oldest first
    yielded: bool = False  # it left training to a faster worker when it last asked for it
    asked_eval_s: float = -math.inf  # when it last asked for evaluations, or was first heard of
    serving: dict[str, int] = field(default_factory=dict)  # version by policy
    serving_since_s: float = -math.inf  # when the newest of these changed
    held: dict[str, frozenset[int]] = field(default_factory=dict)  # versions that it can serve, where it says so
    episodes: int = 0  # that counted
    episode_s: float = 0.0  # time that it takes for an episode: moving average
    weighed: int = 0  # episodes in that average
    weighed_s: float = 0.0  # when the last of these ended
    asked_s: float = -math.inf  # when it last asked for training
    prompted: bool = False  # asked for its versions


class Mismatches:
    """Mismatch KL between the log-probs of workers' trajectories and the trainer's, as its newest commits found it.

    A node (workers named `<node>:<worker>`) is judged by the commits that compared something of it, against what others
    have in these and in a few around them (a whole batch may be of one worker). So it is not blamed for a time in which
    the trainer itself was off, or for a newer policy with a larger mismatch.
    """

    def __init__(self) -> None:
        # By policy, for each commit: by worker, [sum of k3, number of tokens, number of trajectories].
        self._commits: dict[str, deque[dict[str, np.ndarray]]] = {}

    def add(self, policy: str, found: Iterable[tuple[str, float, int]]) -> None:
        """Note what one commit found of a policy's trajectories: for each, its worker, the sum of k3 over its tokens,
        and their number."""
        sums: dict[str, np.ndarray] = {}
        for worker, k3, tokens in found:
            sums[worker] = sums.get(worker, np.zeros(3)) + np.array([k3, tokens, 1])
        self._commits.setdefault(policy, deque(maxlen=_COMMITS_JUDGED)).append(sums)

    def forget(self, name: str) -> None:
        """Drop what was found of a worker, or of all workers of a node: one that is invited again begins anew."""
        for commit in (commit for commits in self._commits.values() for commit in commits):
            for worker in [worker for worker in commit if name in (worker, worker.partition(":")[0])]:
                del commit[worker]

    def means(self) -> dict[str, float]:
        """Mean k3 per token of each worker, over all policies."""
        sums = _added(commit for commits in self._commits.values() for commit in commits)
        return {worker: float(k3 / tokens) for worker, (k3, tokens, _) in sums.items()}

    def above(self, policy: str, most: float) -> dict[str, float]:
        """Mean k3 of each node that is above `most`, and above three times that of another party which is not: if all
        are above `most`, the cause is not a node."""
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
    """Name of the worker's node, with its colon; a worker without a node is a party by itself."""
    return worker[: worker.find(":") + 1] or worker


def _added(parts: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    sums: dict[str, np.ndarray] = {}
    for part in parts:
        for name, found in part.items():
            sums[name] = sums.get(name, 0) + found
    return sums


class RolloutWorkers:
    """All workers that have sent something to this process. Kept in memory alone: after a restart they report again.

    Args:
        max_staleness: versions that a worker may be behind the newest served one, and still be given training.
        clock: monotonic seconds.
    """

    def __init__(self, *, max_staleness: int, clock: Callable[[], float]):
        self._max_staleness, self._clock = max_staleness, clock
        self._seen: dict[str, _Seen] = {}  # in the order in which they were last heard of
        self._evicted: dict[str, str] = {}  # the reason, by worker
        self.mismatches = Mismatches()

    def report(self, worker: str, policy: str, version: int, held: Collection[int] | None = None) -> bool:
        """Note the version that a worker serves, which may be older than before, as after a restart of its engine; and
        the versions that it can serve, if it says so. Returns whether any of that is news."""
        seen = self._of(worker)
        before = seen.serving.get(policy), seen.held.get(policy)
        if before[0] != version:
            seen.serving[policy], seen.serving_since_s = version, self._clock()
        if held is not None:
            seen.held[policy] = frozenset(held)
        return before != (version, seen.held.get(policy))

    def unreported(self, worker: str, policies: Collection[str]) -> list[str]:
        """Those of the policies whose version the worker has not reported, as after a restart of this process."""
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
        """True if the worker says that it cannot serve one of these versions, and another worker that asks for
        evaluations may be able to. If none is, as after the versions were lost, this one is to try all the same: the
        evaluation then comes to its end by failed attempts."""
        since_s = self._clock() - _AWAY_S
        others = (name for name, seen in self._seen.items() if name != worker and seen.asked_eval_s > since_s)
        return self._cannot(worker, versions) and not all(self._cannot(other, versions) for other in others)

    def standing(self, worker: str) -> Hashable:
        """Versions of a worker, as a key: if there is no episode for one worker, there is none for another of the same
        standing."""
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
        """Note that the worker has ended an episode. Only episodes that count are timed, since one that breaks at once
        must not make a worker look fast; and they are timed here, not by the worker."""
        seen, now_s = self._of(worker), self._clock()
        seen.episodes += counts
        began_s = seen.began_s.pop(lease_id, None)
        if began_s is None or not counts:
            return
        # The plain mean of the first `_EPISODES_WEIGHED` episodes, from then on an exponential moving average.
        seen.weighed = min(seen.weighed + 1, _EPISODES_WEIGHED)
        seen.weighed_s = now_s
        seen.episode_s += (now_s - began_s - seen.episode_s) / seen.weighed

    def yields(self, worker: str, newest: Mapping[str, int]) -> bool:
        """Note that a worker asks for training. True if it leaves that to a much faster worker with free slots: what a
        slow one plays often comes in after the batch that needs it.

        Nothing is left to a worker with older versions, which may not play groups that were opened for newer ones,
        except for a moment (`_CATCHING_UP_S`) after this worker got its versions.
        """
        seen = self._of(worker)
        seen.asked_s = self._clock()
        # Without episodes it could not show that it is faster by now: it may try again.
        if seen.asked_s - seen.weighed_s > _SLOW_FOR * seen.episode_s:
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
        """Note that the worker, which asked for episodes, still waits for the answer."""
        seen, now_s = self._seen.get(worker), self._clock()
        if seen is not None and now_s - seen.asked_s < _ASKING_S:  # only if it asked for training
            seen.asked_s = now_s

    def left_free(self, worker: str, slots: int) -> None:
        """Note for how many of the slots that it asked for there was no episode."""
        self._of(worker).free_slots = slots

    def evict(self, name: str, reason: str = "--evict") -> list[str]:
        """Send away a worker, or all workers of a node (`<node>:<worker>`), for as long as this process lives. Returns
        those that were known; `reason` is shown to the node and to people."""
        known = [worker for worker in self._seen if name in (worker, worker.partition(":")[0])]
        for worker in known:
            del self._seen[worker]
        self.mismatches.forget(name)
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
        # Inserted again below as the newest: the dict stays in the order of last contact.
        seen = self._seen.pop(worker, None) or _Seen(0.0, asked_eval_s=self._clock())
        seen.heard_s = self._clock()
        self._seen[worker] = seen
        if len(self._seen) > _MOST_KNOWN:  # senders choose names: a bound, and the one silent for longest is forgotten
            del self._seen[next(iter(self._seen))]
        return seen
