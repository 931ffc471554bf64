"""Every task, episode and batch of a run, in one SQLite file that survives any process dying.

A group (one task, played `members` times) moves open -> ready -> assigned -> closed, or ends dropped. An episode moves
waiting -> leased -> done, back to waiting when its lease runs out, or ends quarantined after too many attempts. Which
batch a group belongs to is written down before the batch is served, so that a batch asked for twice is the same batch:
the step number in the trainer's checkpoint is therefore the whole record of what it has consumed.
"""

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowjax.records import COUNTED_STATUSES, Group, Task, Trajectory, pack, unpack

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,            -- train | eval
    position INTEGER NOT NULL,     -- place in the order of tasks
    version INTEGER,               -- eval: the pinned policy version
    task BLOB NOT NULL,
    state TEXT NOT NULL,           -- open | ready | assigned | closed | dropped
    step INTEGER                   -- train: the batch that it is assigned to
);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (kind, state, position);
CREATE TABLE IF NOT EXISTS episodes (
    trajectory_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL,           -- waiting | leased | done | quarantined
    attempts INTEGER NOT NULL DEFAULT 0,
    lease_id TEXT,
    worker TEXT,
    deadline_s REAL,
    trajectory BLOB,
    error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS episodes_by_group ON episodes (group_id);
CREATE INDEX IF NOT EXISTS episodes_by_state ON episodes (state, deadline_s);
"""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to play one episode until `deadline_s` (seconds since the epoch)."""

    lease_id: str
    task: Task
    group_id: str
    trajectory_id: str
    seed: int
    kind: str
    version: int | None
    deadline_s: float


class Ledger:
    """The tables and their transitions. Not thread-safe: one event loop owns it.

    Args:
        path: SQLite file, created when missing; ":memory:" for tests.
        lease_s: how long an episode may take before it is leased again.
        max_attempts: leases of one episode before it is quarantined.
        clock: seconds since the epoch; tests give their own.
    """

    def __init__(self, path: Path | str, *, lease_s: float, max_attempts: int, clock: Callable[[], float] = time.time):
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._lease_s, self._max_attempts, self._clock = lease_s, max_attempts, clock

    def close(self) -> None:
        self._db.close()

    def add_group(
        self, group_id: str, task: Task, seeds: Sequence[int], *, kind: str, position: int, version: int | None = None
    ) -> None:
        """Open a group with one waiting episode per seed; a group that exists already is left as it is."""
        with self._transaction():
            added = self._db.execute(
                "INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, ?, 'open', NULL)",
                (group_id, kind, position, version, pack(task)),
            )
            if added.rowcount:
                self._db.executemany(
                    "INSERT INTO episodes (trajectory_id, group_id, seed, state) VALUES (?, ?, ?, 'waiting')",
                    [(f"{group_id}/{member:03d}", group_id, seed) for member, seed in enumerate(seeds)],
                )

    def lease(self, worker: str, slots: int, kind: str | None = None) -> list[Lease]:
        """Up to `slots` waiting episodes, evaluation before training, then in the order of tasks."""
        deadline_s = self._clock() + self._lease_s
        leases = []
        with self._transaction():
            rows = self._db.execute(
                "SELECT trajectory_id, group_id, seed, kind, version, task FROM episodes JOIN groups USING (group_id)"
                " WHERE episodes.state = 'waiting' AND (? IS NULL OR kind = ?)"
                " ORDER BY kind = 'train', position, trajectory_id LIMIT ?",
                (kind, kind, slots),
            ).fetchall()
            for row in rows:
                lease = Lease(
                    lease_id=uuid.uuid4().hex,
                    task=unpack(row["task"]),
                    group_id=row["group_id"],
                    trajectory_id=row["trajectory_id"],
                    seed=row["seed"],
                    kind=row["kind"],
                    version=row["version"],
                    deadline_s=deadline_s,
                )
                self._db.execute(
                    "UPDATE episodes SET state = 'leased', attempts = attempts + 1, lease_id = ?, worker = ?,"
                    " deadline_s = ? WHERE trajectory_id = ?",
                    (lease.lease_id, worker, deadline_s, lease.trajectory_id),
                )
                leases.append(lease)
        return leases

    def renew(self, lease_ids: Iterable[str]) -> list[str]:
        """Put the deadlines off; returns the leases that are no longer held."""
        deadline_s, lost = self._clock() + self._lease_s, []
        with self._transaction():
            for lease_id in lease_ids:
                held = self._db.execute(
                    "UPDATE episodes SET deadline_s = ? WHERE lease_id = ? AND state = 'leased'", (deadline_s, lease_id)
                )
                if not held.rowcount:
                    lost.append(lease_id)
        return lost

    def give_back(self, lease_ids: Iterable[str], error: str, *, count_attempt: bool) -> list[str]:
        """Return episodes unplayed. Returns the groups that are settled by it (see `settle`)."""
        with self._transaction():
            rows = [
                self._db.execute(
                    "SELECT trajectory_id, group_id FROM episodes WHERE lease_id = ? AND state = 'leased'", (lease_id,)
                ).fetchone()
                for lease_id in lease_ids
            ]
            return self._release([row for row in rows if row], error, count_attempt=count_attempt)

    def expire(self) -> list[str]:
        """Take back the leases whose deadline has passed. Returns the groups that are settled by it."""
        with self._transaction():
            rows = self._db.execute(
                "SELECT trajectory_id, group_id FROM episodes WHERE state = 'leased' AND deadline_s < ?",
                (self._clock(),),
            ).fetchall()
            return self._release(rows, "lease ran out", count_attempt=True)

    def accept(self, lease_id: str, trajectory: Trajectory) -> tuple[bool, list[str]]:
        """Take in a played episode: True and the groups settled by it, or (False, []) for one that does not count.

        A trajectory counts once, whoever sends it and under whichever lease. One whose episode failed for a cause
        outside the policy (`env_error`, `timeout`, `cancelled`) is played again, until `max_attempts`.
        """
        with self._transaction():
            row = self._db.execute(
                "SELECT trajectory_id, group_id, state, lease_id FROM episodes WHERE trajectory_id = ?",
                (trajectory.trajectory_id,),
            ).fetchone()
            if row is None or row["state"] in ("done", "quarantined"):
                return False, []
            if trajectory.status not in COUNTED_STATUSES:
                if row["lease_id"] != lease_id:
                    return False, []
                return True, self._release([row], trajectory.error or trajectory.status, count_attempt=True)
            self._db.execute(
                "UPDATE episodes SET state = 'done', trajectory = ?, lease_id = NULL WHERE trajectory_id = ?",
                (pack(trajectory), trajectory.trajectory_id),
            )
            return True, self._settle([row["group_id"]])

    def group(self, group_id: str) -> Group:
        """A group with the trajectories that it has, members in order."""
        row = self._db.execute("SELECT task FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        done = self._db.execute(
            "SELECT trajectory FROM episodes WHERE group_id = ? AND state = 'done' ORDER BY trajectory_id", (group_id,)
        )
        return Group(group_id, unpack(row["task"]), tuple(unpack(episode["trajectory"]) for episode in done))

    def assign(self, step: int, groups: int, *, usable: Callable[[str], bool]) -> list[str] | None:
        """The groups of batch `step`: those written down for it, else the first ready ones; None when they are too few.

        Groups for which `usable` is False are dropped and counted. Groups of later steps go back to ready: the trainer
        has lost the checkpoints that consumed them.
        """
        with self._transaction():
            self._db.execute(
                "UPDATE groups SET state = 'ready', step = NULL"
                " WHERE kind = 'train' AND state = 'assigned' AND step > ?",
                (step,),
            )
            assigned = [
                row["group_id"]
                for row in self._db.execute(
                    "SELECT group_id FROM groups WHERE kind = 'train' AND step = ? ORDER BY position", (step,)
                )
            ]
            if assigned:
                return assigned
            chosen: list[str] = []
            for group_id in self.ready("train"):
                if usable(group_id):
                    chosen.append(group_id)
                else:
                    self._db.execute("UPDATE groups SET state = 'dropped' WHERE group_id = ?", (group_id,))
                if len(chosen) == groups:
                    break
            if len(chosen) < groups:
                return None
            self._db.executemany(
                "UPDATE groups SET state = 'assigned', step = ? WHERE group_id = ?", [(step, g) for g in chosen]
            )
            return chosen

    def close_batches(self, before_step: int) -> None:
        """Forget the trajectories of batches below `before_step`: no checkpoint that is kept needs them again."""
        self._close("kind = 'train' AND state = 'assigned' AND step < ?", before_step)

    def close_eval(self, version: int) -> None:
        """Forget the trajectories of a finished evaluation."""
        self._close("kind = 'eval' AND state IN ('ready', 'dropped') AND version = ?", version)

    def ready(self, kind: str, version: int | None = None) -> list[str]:
        """Settled groups that nothing has used yet, in the order of tasks; for evaluation, of one pinned version."""
        rows = self._db.execute(
            "SELECT group_id FROM groups WHERE kind = ? AND version IS ? AND state = 'ready' ORDER BY position",
            (kind, version),
        )
        return [row["group_id"] for row in rows]

    def count_groups(self, kind: str, version: int | None = None) -> dict[str, int]:
        """Groups by state; for evaluation, of one pinned version."""
        rows = self._db.execute(
            "SELECT state, COUNT(*) AS n FROM groups WHERE kind = ? AND version IS ? GROUP BY state", (kind, version)
        )
        return {row["state"]: row["n"] for row in rows}

    def count_episodes(self) -> dict[str, int]:
        """Episodes by state."""
        rows = self._db.execute("SELECT state, COUNT(*) AS n FROM episodes GROUP BY state")
        return {row["state"]: row["n"] for row in rows}

    def eval_versions(self, state: str | None = None) -> list[int]:
        """Versions that an evaluation was opened for; with `state`, those with groups in it."""
        rows = self._db.execute(
            "SELECT DISTINCT version FROM groups WHERE kind = 'eval' AND (? IS NULL OR state = ?) ORDER BY version",
            (state, state),
        )
        return [row["version"] for row in rows]

    def _close(self, condition: str, value: int) -> None:
        with self._transaction():
            self._db.execute(
                f"DELETE FROM episodes WHERE group_id IN (SELECT group_id FROM groups WHERE {condition})", (value,)
            )
            self._db.execute(f"UPDATE groups SET state = 'closed' WHERE {condition}", (value,))

    def _release(self, rows: Sequence[sqlite3.Row], error: str, *, count_attempt: bool) -> list[str]:
        for row in rows:
            self._db.execute(
                "UPDATE episodes SET lease_id = NULL, error = ?, attempts = attempts - ?,"
                " state = CASE WHEN ? AND attempts >= ? THEN 'quarantined' ELSE 'waiting' END WHERE trajectory_id = ?",
                (error, 0 if count_attempt else 1, count_attempt, self._max_attempts, row["trajectory_id"]),
            )
        return self._settle({row["group_id"] for row in rows})

    def _settle(self, group_ids: Iterable[str]) -> list[str]:
        """Close open groups whose episodes have all ended: ready with what they have, dropped when that is nothing."""
        settled = []
        for group_id in group_ids:
            left, done = self._db.execute(
                "SELECT SUM(state IN ('waiting', 'leased')), SUM(state = 'done') FROM episodes WHERE group_id = ?",
                (group_id,),
            ).fetchone()
            if left:
                continue
            closed = self._db.execute(
                "UPDATE groups SET state = ? WHERE group_id = ? AND state = 'open'",
                ("ready" if done else "dropped", group_id),
            )
            if closed.rowcount:
                settled.append(group_id)
        return settled

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._db)


class _Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK when the body raises."""

    def __init__(self, db: sqlite3.Connection):
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._db.execute("ROLLBACK" if kind else "COMMIT")
