"""Every task, episode and batch of a run, in one SQLite file that survives any process dying.

An episode moves waiting -> leased -> done, back to waiting when its lease runs out, or ends quarantined after too many
attempts, or cancelled with its group. A group (one task, played `members` times) has a stream for each policy that
learns from it, which moves open -> settled (its episodes are in) -> ready (the data algorithms keep it) -> used ->
closed, or ends dropped: policies use up the same group at their own rates. Which groups a batch is made of is written
down before it is served, so that a batch asked for twice is the same batch: the step number in the trainer's checkpoint
is therefore the whole record of what it has consumed. An evaluation is a set of groups that share a name, each with the
one stream "". What nobody can ask for any more is deleted, so that the file holds what a run may go back to, however
long it is.
"""

import hashlib
import hmac
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from flowjax.dataflow.algorithms.state import Learnt
from flowjax.dataflow.ledger_queries import Kind, trajectories_of
from flowjax.dataflow.ledger_streams import NOTHING, LedgerStreams
from flowjax.dataflow.tables import Transaction, lease_key, open_tables
from flowjax.records import COUNTED_STATUSES, Episode, Lease, Task, pack, unpack

_EVALUATION = ""  # the stream of an evaluation's group
Failed = Literal["retry", "short", "drop"]  # what becomes of a training episode that its world or workflow broke
_BROKEN = ("env_error", "timeout")  # statuses that are the episode's own; other causes are its worker's


class Ledger(LedgerStreams):
    """The tables and their transitions. Not thread-safe: one event loop owns it.

    Args:
        path: SQLite file, created when missing; ":memory:" for tests.
        lease_s: how long an episode may take before it is leased again.
        max_attempts: leases of one episode before it is quarantined.
        failed: what a broken training episode leads to: it is played again by another worker ("retry"), quarantined
            at once so that its group goes on short ("short"), or its whole group is dropped ("drop").
        min_group_size: episodes that a training group must have in, else it is dropped.
        clock: seconds since the epoch; tests give their own.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        lease_s: float,
        max_attempts: int,
        failed: Failed = "retry",
        min_group_size: int = 1,
        clock: Callable[[], float] = time.time,
    ):
        self._db = open_tables(path)
        self._lease_s, self._max_attempts, self._clock = lease_s, max_attempts, clock
        self._failed, self._min_group_size = failed, min_group_size
        self._lease_key = lease_key(self._db)
        self._asked_s: dict[str, float] = {}  # when each worker last asked for episodes, the latest last

    def close(self) -> None:
        self._db.close()

    def add_group(
        self,
        group_id: str,
        task: Task,
        seeds: Sequence[int],
        *,
        kind: Kind,
        position: int,
        temperature: float = 1.0,
        policies: Sequence[str] = (_EVALUATION,),
        evaluation: str = "",
        versions: Mapping[str, int] | None = None,
        forced: bool = False,
        learnt: Learnt = NOTHING,
    ) -> None:
        """Open a group with one waiting episode per seed and one stream for each of `policies`.

        A group that exists already is left as it is. One that is `forced`, chosen by no data algorithm, is
        counted. What these have `learnt` is kept with it.
        """
        with Transaction(self._db):
            added = self._db.execute(
                "INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (group_id, kind, position, evaluation, pack(dict(versions or {})), temperature, task.world, pack(task)),
            )
            if added.rowcount:
                self._db.executemany(
                    "INSERT INTO episodes (episode_id, group_id, seed, state) VALUES (?, ?, ?, 'waiting')",
                    [(f"{group_id}/{member:03d}", group_id, seed) for member, seed in enumerate(seeds)],
                )
                self._db.executemany(
                    "INSERT INTO streams (policy, group_id, position, state) VALUES (?, ?, ?, 'open')",
                    [(policy, group_id, position) for policy in policies],
                )
            self._count("forced", n=forced)
            self._keep(learnt)

    def pass_over(self, group_id: str, task: Task, *, position: int) -> None:
        """Note that a task is not played: it has its place in the order of tasks, and is counted."""
        with Transaction(self._db):
            self.add_group(group_id, task, (), kind="train", position=position, policies=())
            self._count("passed_over")

    def lease(
        self, worker: str, slots: int, kind: Kind | None = None, worlds: Collection[str] | None = None
    ) -> list[Lease]:
        """Up to `slots` waiting episodes, of these worlds alone where given: evaluation before training, then in the
        order of tasks. One that this worker failed at is left to others for `lease_s`, if there are any."""
        now_s = self._clock()
        deadline_s, leases = now_s + self._lease_s, []
        alone = self._alone(worker, now_s)
        with Transaction(self._db):
            rows = self._db.execute(
                "SELECT episode_id, group_id, seed, kind, versions, temperature, task"
                " FROM episodes JOIN groups USING (group_id)"
                " WHERE episodes.state = 'waiting' AND (:kind IS NULL OR kind = :kind)"
                " AND (:alone OR worker IS NOT :worker OR deadline_s < :now_s)"
                " AND (:worlds IS NULL OR world IN (SELECT value FROM json_each(:worlds)))"
                " ORDER BY kind = 'train', position, episode_id LIMIT :slots",
                {
                    "kind": kind,
                    "alone": alone,
                    "worker": worker,
                    "now_s": now_s,
                    "worlds": None if worlds is None else json.dumps(sorted(worlds)),
                    "slots": slots,
                },
            ).fetchall()
            for row in rows:
                lease = Lease(
                    lease_id=self._sign(secrets.token_hex(8), row["episode_id"]),
                    task=unpack(row["task"]),
                    group_id=row["group_id"],
                    episode_id=row["episode_id"],
                    seed=row["seed"],
                    kind=row["kind"],
                    temperature=row["temperature"],
                    versions=unpack(row["versions"]),
                )
                self._db.execute(
                    "UPDATE episodes SET state = 'leased', attempts = attempts + 1, lease_id = ?, worker = ?,"
                    " deadline_s = ? WHERE episode_id = ?",
                    (lease.lease_id, worker, deadline_s, lease.episode_id),
                )
                leases.append(lease)
        return leases

    def _alone(self, worker: str, now_s: float) -> bool:
        """Whether no other worker has asked for episodes lately."""
        self._asked_s.pop(worker, None)
        self._asked_s[worker] = now_s
        while self._asked_s[first := next(iter(self._asked_s))] < now_s - self._lease_s:
            del self._asked_s[first]
        return len(self._asked_s) == 1

    def held(self, worker: str) -> dict[str, int]:
        """Episodes that a worker has leased, by kind."""
        rows = self._db.execute(
            "SELECT kind, COUNT(*) AS n FROM episodes JOIN groups USING (group_id)"
            " WHERE episodes.state = 'leased' AND worker = ? GROUP BY kind",
            (worker,),
        )
        return {row["kind"]: row["n"] for row in rows}

    def renew(self, lease_ids: Iterable[str]) -> list[str]:
        """Put the deadlines off; returns the leases that are no longer held."""
        deadline_s, lost = self._clock() + self._lease_s, []
        with Transaction(self._db):
            for lease_id in lease_ids:
                held = self._db.execute(
                    "UPDATE episodes SET deadline_s = ? WHERE lease_id = ? AND state = 'leased'", (deadline_s, lease_id)
                )
                if not held.rowcount:
                    lost.append(lease_id)
        return lost

    def give_back(self, lease_ids: Iterable[str], error: str, *, count_attempt: bool) -> list[str]:
        """Return episodes unplayed. Returns the groups that are settled by it."""
        with Transaction(self._db):
            rows = [
                self._db.execute(
                    "SELECT episode_id, group_id FROM episodes WHERE lease_id = ? AND state = 'leased'", (lease_id,)
                ).fetchone()
                for lease_id in lease_ids
            ]
            return self._release([row for row in rows if row], "given_back" if count_attempt else None, error)

    def expire(self) -> list[str]:
        """Take back the leases whose deadline has passed. Returns the groups that are settled by it."""
        overdue = "SELECT episode_id, group_id FROM episodes WHERE state = 'leased' AND deadline_s < ?"
        rows = self._db.execute(overdue, (self._clock(),)).fetchall()
        if not rows:
            return []
        with Transaction(self._db):
            return self._release(rows, "lease_ran_out", "lease ran out")

    def accept(self, lease_id: str, episode: Episode) -> tuple[bool, list[str]]:
        """Take in a played episode: True and the groups settled by it, or (False, []) for one that does not count.

        An episode counts once, whoever sends it, under whichever lease was ever given for it. One that failed for a
        cause outside the policies (`env_error`, `timeout`, `cancelled`) does not: see `failed` of the constructor.
        """
        with Transaction(self._db):
            row = self._db.execute(
                "SELECT episode_id, group_id, state, lease_id FROM episodes WHERE episode_id = ?", (episode.episode_id,)
            ).fetchone()
            if row is None or row["state"] in ("done", "quarantined", "cancelled"):
                return False, []
            if not self._granted(lease_id, episode):
                return False, []
            if episode.status not in COUNTED_STATUSES:
                if row["lease_id"] != lease_id:
                    return False, []
                return True, self._release([row], episode.status, f"{episode.episode_id}: {episode.error}")
            self._db.execute(
                "UPDATE episodes SET state = 'done', episode = ?, lease_id = NULL WHERE episode_id = ?",
                (pack(episode), episode.episode_id),
            )
            return True, self._settle([row["group_id"]])

    def _release(self, rows: Sequence[sqlite3.Row], cause: str | None, error: str) -> list[str]:
        """Take leased episodes back: without a cause as if they had never been leased."""
        group_ids = {row["group_id"] for row in rows}
        for row in rows:
            if cause is None:
                self._db.execute(
                    "UPDATE episodes SET state = 'waiting', lease_id = NULL, worker = NULL, deadline_s = NULL,"
                    " attempts = attempts - 1 WHERE episode_id = ?",
                    (row["episode_id"],),
                )
                continue
            self._count(f"failed/{cause}", last=error)
            kind = self._db.execute("SELECT kind FROM groups WHERE group_id = ?", (row["group_id"],)).fetchone()[0]
            retried = self._failed == "retry" or kind == "eval" or cause not in _BROKEN
            state = self._db.execute(
                "UPDATE episodes SET lease_id = NULL, error = ?, deadline_s = ?,"
                " state = CASE WHEN ? AND attempts < ? THEN 'waiting' ELSE 'quarantined' END WHERE episode_id = ?"
                " RETURNING state",
                (error, self._clock() + self._lease_s, retried, self._max_attempts, row["episode_id"]),
            ).fetchone()[0]
            self._count("quarantined", n=state == "quarantined")
            if state == "quarantined" and self._failed == "drop" and kind == "train":
                cancelled = self._db.execute(
                    "UPDATE episodes SET state = 'cancelled', lease_id = NULL"
                    " WHERE group_id = ? AND state IN ('waiting', 'leased')",
                    (row["group_id"],),
                )
                self._count("cancelled", n=cancelled.rowcount)
        return self._settle(group_ids)

    def _settle(self, group_ids: Iterable[str]) -> list[str]:
        """Close open groups whose episodes have all ended: each stream is settled with what its policy did in them, or
        dropped when that is nothing or the group is not to be used. An evaluation's stream is ready, or dropped when no
        episode is in."""
        settled = []
        for group_id in group_ids:
            states = self._db.execute(
                "SELECT state, COUNT(*) AS n FROM episodes WHERE group_id = ? GROUP BY state", (group_id,)
            ).fetchall()
            ended = {row["state"]: row["n"] for row in states}
            open_streams = self._db.execute(
                "SELECT policy FROM streams WHERE group_id = ? AND state = 'open'", (group_id,)
            ).fetchall()
            if ended.keys() & {"waiting", "leased"} or not open_streams:
                continue
            done, lost = ended.get("done", 0), ended.get("quarantined", 0)
            training = open_streams[0]["policy"] != _EVALUATION
            if lost and training and (self._failed == "drop" or done < self._min_group_size):
                for (policy,) in open_streams:
                    self._drop(policy, [group_id], "failed")
            else:
                self._count("short_groups", n=lost > 0 and training)
                self._settle_streams(group_id, [policy for (policy,) in open_streams])
            settled.append(group_id)
        return settled

    def _settle_streams(self, group_id: str, policies: Sequence[str]) -> None:
        episodes = self.episodes(group_id)
        for policy in policies:
            parts = episodes if policy == _EVALUATION else trajectories_of(episodes, policy)
            if not parts:
                self._drop(policy, [group_id], "silent")
                continue
            versions = [turn.version for part in parts for turn in part.turns] or [0]
            self._db.execute(
                "UPDATE streams SET state = ?, oldest_version = ?, newest_version = ?,"
                " arrival = (SELECT COALESCE(MAX(arrival), 0) + 1 FROM streams) WHERE policy = ? AND group_id = ?",
                ("ready" if policy == _EVALUATION else "settled", min(versions), max(versions), policy, group_id),
            )

    def _sign(self, nonce: str, episode_id: str) -> str:
        """A lease's id: nobody can make up one for an episode, and it is known again without being stored."""
        signature = hashlib.blake2b(f"{nonce} {episode_id}".encode(), key=self._lease_key, digest_size=8)
        return nonce + signature.hexdigest()

    def _granted(self, lease_id: str, episode: Episode) -> bool:
        return hmac.compare_digest(lease_id.encode(), self._sign(lease_id[:16], episode.episode_id).encode())
