"""Every task, episode and batch of a run, in one SQLite file that survives any process dying.

An episode moves waiting -> leased -> done, back to waiting when its lease runs out, or ends quarantined after too many
attempts. A group (one task, played `members` times) has a stream for each policy that learns from it, which moves
open -> settled (its episodes are in) -> ready (the data algorithms keep it) -> used -> closed, or ends dropped:
policies use up the same group at their own rates. Which groups a batch is made of is written down before it is served,
so that a batch asked for twice is the same batch: the step number in the trainer's checkpoint is therefore the whole
record of what it has consumed. An evaluation is a set of groups that share a name, each with the one stream "".
"""

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowjax.records import COUNTED_STATUSES, Episode, Group, Lease, Task, Trajectory, pack, unpack

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,            -- train | eval
    position INTEGER NOT NULL,     -- place in the order of tasks
    evaluation TEXT NOT NULL,      -- name of the evaluation, "" for training
    versions BLOB NOT NULL,        -- policy -> version, where they are fixed
    temperature REAL NOT NULL,
    task BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS groups_by_position ON groups (kind, position);
CREATE INDEX IF NOT EXISTS groups_by_evaluation ON groups (evaluation);
CREATE TABLE IF NOT EXISTS streams (
    policy TEXT NOT NULL,          -- "" for evaluation
    group_id TEXT NOT NULL REFERENCES groups,
    position INTEGER NOT NULL,
    state TEXT NOT NULL,           -- open | settled | ready | used | closed | dropped
    arrival INTEGER,               -- place in the order in which streams were settled
    PRIMARY KEY (policy, group_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS streams_by_state ON streams (policy, state, position);
CREATE INDEX IF NOT EXISTS streams_by_group ON streams (group_id);
CREATE INDEX IF NOT EXISTS streams_by_arrival ON streams (arrival);
CREATE TABLE IF NOT EXISTS batches (
    policy TEXT NOT NULL,
    step INTEGER NOT NULL,
    place INTEGER NOT NULL,
    group_id TEXT NOT NULL,
    PRIMARY KEY (policy, step, place)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS batches_by_group ON batches (policy, group_id);
CREATE TABLE IF NOT EXISTS states (name TEXT PRIMARY KEY, state BLOB NOT NULL);  -- of the data algorithms
CREATE TABLE IF NOT EXISTS episodes (
    episode_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL,           -- waiting | leased | done | quarantined
    attempts INTEGER NOT NULL DEFAULT 0,
    lease_id TEXT,
    worker TEXT,
    deadline_s REAL,
    episode BLOB,
    error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS episodes_by_group ON episodes (group_id);
CREATE INDEX IF NOT EXISTS episodes_by_state ON episodes (state, deadline_s);
CREATE INDEX IF NOT EXISTS episodes_by_lease ON episodes (lease_id);
"""
_EVALUATION = ""  # the stream of an evaluation's group
Kind = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Stream:
    """A policy's part of a group, the how-manieth to be settled, and in how many batches it has been."""

    group_id: str
    arrival: int
    batches: int


Selection = tuple[list[str] | None, list[str]]  # groups of a batch, or None for none yet, and groups to drop


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
        states: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a group with one waiting episode per seed and one stream for each of `policies`.

        A group that exists already is left as it is. `states` of the data algorithms are kept with it.
        """
        with self._transaction():
            added = self._db.execute(
                "INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)",
                (group_id, kind, position, evaluation, pack(dict(versions or {})), temperature, pack(task)),
            )
            if added.rowcount:
                self._db.executemany(
                    "INSERT INTO episodes (episode_id, group_id, seed, state) VALUES (?, ?, ?, 'waiting')",
                    [(f"{group_id}/{member:03d}", group_id, seed) for member, seed in enumerate(seeds)],
                )
                self._db.executemany(
                    "INSERT INTO streams VALUES (?, ?, ?, 'open', NULL)",
                    [(policy, group_id, position) for policy in policies],
                )
            self._keep_states(states or {})

    def lease(self, worker: str, slots: int, kind: Kind | None = None) -> list[Lease]:
        """Up to `slots` waiting episodes, evaluation before training, then in the order of tasks."""
        deadline_s = self._clock() + self._lease_s
        leases = []
        with self._transaction():
            rows = self._db.execute(
                "SELECT episode_id, group_id, seed, kind, versions, temperature, task"
                " FROM episodes JOIN groups USING (group_id)"
                " WHERE episodes.state = 'waiting' AND (? IS NULL OR kind = ?)"
                " ORDER BY kind = 'train', position, episode_id LIMIT ?",
                (kind, kind, slots),
            ).fetchall()
            for row in rows:
                lease = Lease(
                    lease_id=uuid.uuid4().hex,
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
                    "SELECT episode_id, group_id FROM episodes WHERE lease_id = ? AND state = 'leased'", (lease_id,)
                ).fetchone()
                for lease_id in lease_ids
            ]
            return self._release([row for row in rows if row], error, count_attempt=count_attempt)

    def expire(self) -> list[str]:
        """Take back the leases whose deadline has passed. Returns the groups that are settled by it."""
        with self._transaction():
            rows = self._db.execute(
                "SELECT episode_id, group_id FROM episodes WHERE state = 'leased' AND deadline_s < ?",
                (self._clock(),),
            ).fetchall()
            return self._release(rows, "lease ran out", count_attempt=True)

    def accept(self, lease_id: str, episode: Episode) -> tuple[bool, list[str]]:
        """Take in a played episode: True and the groups settled by it, or (False, []) for one that does not count.

        An episode counts once, whoever sends it and under whichever lease. One that failed for a cause outside the
        policies (`env_error`, `timeout`, `cancelled`) is played again, until `max_attempts`.
        """
        with self._transaction():
            row = self._db.execute(
                "SELECT episode_id, group_id, state, lease_id FROM episodes WHERE episode_id = ?", (episode.episode_id,)
            ).fetchone()
            if row is None or row["state"] in ("done", "quarantined"):
                return False, []
            if episode.status not in COUNTED_STATUSES:
                if row["lease_id"] != lease_id:
                    return False, []
                return True, self._release([row], episode.error or episode.status, count_attempt=True)
            self._db.execute(
                "UPDATE episodes SET state = 'done', episode = ?, lease_id = NULL WHERE episode_id = ?",
                (pack(episode), episode.episode_id),
            )
            return True, self._settle([row["group_id"]])

    def episodes(self, group_id: str) -> list[Episode]:
        """The episodes of a group that are in, members in order."""
        rows = self._db.execute(
            "SELECT episode FROM episodes WHERE group_id = ? AND state = 'done' ORDER BY episode_id", (group_id,)
        )
        return [unpack(row["episode"]) for row in rows]

    def group(self, group_id: str, policy: str) -> Group:
        """What `policy` did in the episodes of a group that are in."""
        row = self._db.execute("SELECT task FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        return Group(group_id, unpack(row["task"]), tuple(_trajectories(self.episodes(group_id), policy)))

    def settled(self) -> list[tuple[str, str]]:
        """Policy and group of the streams that the data algorithms have not judged yet, in the order of arrival."""
        rows = self._db.execute("SELECT policy, group_id FROM streams WHERE state = 'settled' ORDER BY arrival")
        return [(row["policy"], row["group_id"]) for row in rows]

    def judge(self, policy: str, group_id: str, *, keep: bool, states: Mapping[str, Any]) -> None:
        """Make a settled stream ready, or drop it, together with what the data algorithms have learnt from it."""
        with self._transaction():
            self._db.execute(
                "UPDATE streams SET state = ? WHERE policy = ? AND group_id = ? AND state = 'settled'",
                ("ready" if keep else "dropped", policy, group_id),
            )
            self._keep_states(states)

    def states(self) -> dict[str, Any]:
        """What the data algorithms had learnt when it was last written down, by name."""
        return {row["name"]: unpack(row["state"]) for row in self._db.execute("SELECT name, state FROM states")}

    def assign(
        self, policy: str, step: int, select: Callable[[list[Stream], list[Stream]], Selection]
    ) -> list[str] | None:
        """The groups of the policy's batch `step`: those written down for it, or else what `select` makes of the ready
        streams and of those used before; None when it chooses nothing.

        Batches of later steps are undone: the trainer has lost the checkpoints that consumed them.
        """
        with self._transaction():
            self._undo_after(policy, step)
            rows = self._db.execute(
                "SELECT group_id FROM batches WHERE policy = ? AND step = ? ORDER BY place", (policy, step)
            ).fetchall()
            if rows:
                return [row["group_id"] for row in rows]
            chosen, dropped = select(self._streams(policy, "ready"), self._streams(policy, "used"))
            self._db.executemany(
                "UPDATE streams SET state = 'dropped' WHERE policy = ? AND group_id = ?", [(policy, g) for g in dropped]
            )
            if chosen is None:
                return None
            self._db.executemany(
                "UPDATE streams SET state = 'used' WHERE policy = ? AND group_id = ?", [(policy, g) for g in chosen]
            )
            self._db.executemany(
                "INSERT INTO batches VALUES (?, ?, ?, ?)", [(policy, step, i, g) for i, g in enumerate(chosen)]
            )
            return chosen

    def _undo_after(self, policy: str, step: int) -> None:
        self._db.execute("DELETE FROM batches WHERE policy = ? AND step > ?", (policy, step))
        self._db.execute(
            "UPDATE streams SET state = 'ready' WHERE policy = ? AND state = 'used'"
            " AND group_id NOT IN (SELECT group_id FROM batches WHERE policy = ?)",
            (policy, policy),
        )

    def _streams(self, policy: str, state: str) -> list[Stream]:
        """The policy's streams of that state, in the order of tasks."""
        rows = self._db.execute(
            "SELECT group_id, arrival, COUNT(batches.step) AS batches FROM streams"
            " LEFT JOIN batches USING (policy, group_id) WHERE policy = ? AND state = ?"
            " GROUP BY group_id ORDER BY position",
            (policy, state),
        )
        return [Stream(row["group_id"], row["arrival"], row["batches"]) for row in rows]

    def close_batches(self, policy: str, before_step: int) -> None:
        """Forget the policy's batches below `before_step`: no checkpoint that is kept needs them again."""
        with self._transaction():
            self._db.execute(
                "UPDATE streams SET state = 'closed' WHERE policy = ? AND state = 'used' AND ? >"
                " (SELECT MAX(step) FROM batches WHERE policy = streams.policy AND group_id = streams.group_id)",
                (policy, before_step),
            )
            self._forget()

    def close_evaluation(self, name: str) -> None:
        """Forget the episodes of a finished evaluation."""
        with self._transaction():
            self._db.execute(
                "UPDATE streams SET state = 'closed' WHERE policy = '' AND state = 'ready'"
                " AND group_id IN (SELECT group_id FROM groups WHERE evaluation = ?)",
                (name,),
            )
            self._forget()

    def count_groups(self) -> int:
        """Training groups ever opened."""
        return self._db.execute("SELECT COUNT(*) FROM groups WHERE kind = 'train'").fetchone()[0]

    def batches(self, policy: str) -> int:
        """Batches that the policy's trainer has been given, those that it has lost again left out."""
        return self._db.execute(
            "SELECT COALESCE(MAX(step) + 1, 0) FROM batches WHERE policy = ?", (policy,)
        ).fetchone()[0]

    def count_streams(self, policy: str) -> dict[str, int]:
        """The policy's streams by state."""
        rows = self._db.execute("SELECT state, COUNT(*) AS n FROM streams WHERE policy = ? GROUP BY state", (policy,))
        return {row["state"]: row["n"] for row in rows}

    def count_episodes(self) -> dict[str, int]:
        """Episodes by state."""
        rows = self._db.execute("SELECT state, COUNT(*) AS n FROM episodes GROUP BY state")
        return {row["state"]: row["n"] for row in rows}

    def evaluations(self, state: str | None = None) -> dict[str, dict[str, int]]:
        """Versions of the policies in every evaluation, by its name; with `state`, of those with groups in it."""
        rows = self._db.execute(
            "SELECT evaluation, versions FROM groups JOIN streams USING (group_id)"
            " WHERE kind = 'eval' AND (? IS NULL OR state = ?) GROUP BY evaluation ORDER BY MIN(groups.rowid)",
            (state, state),
        )
        return {row["evaluation"]: unpack(row["versions"]) for row in rows}

    def evaluated(self, name: str) -> list[str]:
        """Groups of an evaluation that are in."""
        rows = self._db.execute(
            "SELECT group_id FROM groups JOIN streams USING (group_id)"
            " WHERE evaluation = ? AND state = 'ready' ORDER BY groups.position",
            (name,),
        )
        return [row["group_id"] for row in rows]

    def _forget(self) -> None:
        """Delete episodes that no stream will ask for again."""
        self._db.execute(
            "DELETE FROM episodes WHERE state IN ('done', 'quarantined') AND group_id IN"
            " (SELECT group_id FROM streams GROUP BY group_id HAVING SUM(state NOT IN ('closed', 'dropped')) = 0)"
        )

    def _release(self, rows: Sequence[sqlite3.Row], error: str, *, count_attempt: bool) -> list[str]:
        for row in rows:
            self._db.execute(
                "UPDATE episodes SET lease_id = NULL, error = ?, attempts = attempts - ?,"
                " state = CASE WHEN ? AND attempts >= ? THEN 'quarantined' ELSE 'waiting' END WHERE episode_id = ?",
                (error, 0 if count_attempt else 1, count_attempt, self._max_attempts, row["episode_id"]),
            )
        return self._settle({row["group_id"] for row in rows})

    def _settle(self, group_ids: Iterable[str]) -> list[str]:
        """Close open groups whose episodes have all ended: each stream is settled with what its policy did in them, or
        dropped when that is nothing. An evaluation's stream is ready, or dropped when no episode is in."""
        settled = []
        for group_id in group_ids:
            left = self._db.execute(
                "SELECT COUNT(*) FROM episodes WHERE group_id = ? AND state IN ('waiting', 'leased')", (group_id,)
            ).fetchone()[0]
            open_streams = self._db.execute(
                "SELECT policy FROM streams WHERE group_id = ? AND state = 'open'", (group_id,)
            ).fetchall()
            if left or not open_streams:
                continue
            episodes = self.episodes(group_id)
            for (policy,) in open_streams:
                done = episodes if policy == _EVALUATION else _trajectories(episodes, policy)
                whole = "ready" if policy == _EVALUATION else "settled"
                self._db.execute(
                    "UPDATE streams SET state = ?, arrival = (SELECT COALESCE(MAX(arrival), 0) + 1 FROM streams)"
                    " WHERE policy = ? AND group_id = ?",
                    (whole if done else "dropped", policy, group_id),
                )
            settled.append(group_id)
        return settled

    def _keep_states(self, states: Mapping[str, Any]) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO states VALUES (?, ?)", [(name, pack(state)) for name, state in states.items()]
        )

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._db)


def _trajectories(episodes: Iterable[Episode], policy: str) -> list[Trajectory]:
    """What a policy did in them; parts without a turn say nothing."""
    return [part for episode in episodes for part in episode.trajectories if part.policy == policy and part.turns]


class _Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK when the body raises."""

    def __init__(self, db: sqlite3.Connection):
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._db.execute("ROLLBACK" if kind else "COMMIT")
