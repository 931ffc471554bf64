"""The tables of the ledger's SQLite file."""

import secrets
import sqlite3
from pathlib import Path

_VERSION = 2  # of the tables
_SCHEMA = f"""
PRAGMA user_version = {_VERSION};
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,            -- train | eval
    position INTEGER NOT NULL,     -- place in the order of tasks
    evaluation TEXT NOT NULL,      -- name of the evaluation, "" for training
    versions BLOB NOT NULL,        -- policy -> version, where they are fixed
    temperature REAL NOT NULL,
    world TEXT NOT NULL,           -- of the task
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
    oldest_version INTEGER,        -- that sampled any of its tokens, once it is settled
    newest_version INTEGER,        -- likewise
    PRIMARY KEY (policy, group_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS streams_by_state ON streams (policy, state, position);
CREATE INDEX IF NOT EXISTS streams_by_group ON streams (group_id);
CREATE INDEX IF NOT EXISTS streams_by_arrival ON streams (arrival);
CREATE INDEX IF NOT EXISTS streams_settled ON streams (arrival) WHERE state = 'settled';
CREATE TABLE IF NOT EXISTS stream_counts (  -- kept by the triggers: nothing has to be counted when it is asked for
    policy TEXT NOT NULL,
    state TEXT NOT NULL,
    n INTEGER NOT NULL,
    PRIMARY KEY (policy, state)
) WITHOUT ROWID;
INSERT OR REPLACE INTO stream_counts SELECT policy, state, COUNT(*) FROM streams GROUP BY policy, state;
CREATE TRIGGER IF NOT EXISTS stream_added AFTER INSERT ON streams BEGIN
    INSERT INTO stream_counts VALUES (new.policy, new.state, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER IF NOT EXISTS stream_moved AFTER UPDATE OF state ON streams WHEN old.state != new.state BEGIN
    UPDATE stream_counts SET n = n - 1 WHERE policy = old.policy AND state = old.state;
    INSERT INTO stream_counts VALUES (new.policy, new.state, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER IF NOT EXISTS stream_removed AFTER DELETE ON streams BEGIN
    UPDATE stream_counts SET n = n - 1 WHERE policy = old.policy AND state = old.state;
END;
CREATE TABLE IF NOT EXISTS batches (
    policy TEXT NOT NULL,
    step INTEGER NOT NULL,
    place INTEGER NOT NULL,
    group_id TEXT NOT NULL,
    PRIMARY KEY (policy, step, place)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS batches_by_group ON batches (policy, group_id);
CREATE TABLE IF NOT EXISTS commits (policy TEXT PRIMARY KEY, version INTEGER NOT NULL);  -- newest of each
CREATE TABLE IF NOT EXISTS keys (name TEXT PRIMARY KEY, key BLOB NOT NULL);  -- that leases are signed with
CREATE TABLE IF NOT EXISTS states (name TEXT PRIMARY KEY, state BLOB NOT NULL);  -- of the data algorithms
CREATE TABLE IF NOT EXISTS state_rows (  -- what is in the tables of their states
    name TEXT NOT NULL,
    attribute TEXT NOT NULL,
    key BLOB NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (name, attribute, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS episodes (
    episode_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL,           -- waiting | leased | done | quarantined | cancelled
    attempts INTEGER NOT NULL DEFAULT 0,
    lease_id TEXT,
    worker TEXT,                   -- who holds it, or failed at it last
    deadline_s REAL,               -- of the lease; of a waiting one, until when `worker` should not have it again
    episode BLOB,
    error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS episodes_by_group ON episodes (group_id);
CREATE INDEX IF NOT EXISTS episodes_by_state ON episodes (state, deadline_s);
CREATE INDEX IF NOT EXISTS episodes_by_lease ON episodes (lease_id);
CREATE INDEX IF NOT EXISTS episodes_by_worker ON episodes (worker, state);
CREATE TABLE IF NOT EXISTS counts (  -- of what came to nothing, since the start of the run
    name TEXT NOT NULL,            -- failed/<cause> | quarantined | cancelled | short_groups | dropped/<cause>
                                   -- | passed_over | forced (tasks, by the data algorithms)
    policy TEXT NOT NULL,          -- "" where it is about whole episodes
    n INTEGER NOT NULL,
    last TEXT NOT NULL,            -- the newest one, in words
    PRIMARY KEY (name, policy)
) WITHOUT ROWID;
"""
_TABLES = "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table'"


class LedgerError(ValueError):
    """A file that cannot be gone on with; the message says why."""


def open_tables(path: Path | str) -> sqlite3.Connection:
    """The database at `path`, made when it is missing.

    Raises:
        LedgerError: its tables are those of another version of flowjax.
    """
    db = sqlite3.connect(path, isolation_level=None)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    (version,), (tables,) = db.execute("PRAGMA user_version").fetchone(), db.execute(_TABLES).fetchone()
    if tables and version != _VERSION:
        db.close()
        raise LedgerError(
            f"{path} has tables of version {version}, this flowjax writes version {_VERSION}: resume the run with the "
            "flowjax that began it, or start a new one"
        )
    db.executescript(_SCHEMA)
    return db


def lease_key(db: sqlite3.Connection) -> bytes:
    """What the run's leases are signed with; made with the tables."""
    db.execute("INSERT OR IGNORE INTO keys VALUES ('lease', ?)", (secrets.token_bytes(32),))
    return db.execute("SELECT key FROM keys WHERE name = 'lease'").fetchone()[0]


class Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK when the body raises; a part of the one around it where there is one."""

    def __init__(self, db: sqlite3.Connection):
        self._db, self._outermost = db, False

    def __enter__(self) -> None:
        self._outermost = not self._db.in_transaction
        if self._outermost:
            self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._outermost:
            self._db.execute("ROLLBACK" if kind else "COMMIT")
