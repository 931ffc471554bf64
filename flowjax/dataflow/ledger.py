"""The ledger: every task, episode and batch of a run, in one SQLite file that survives any process dying.

A group is one task, played `members` times. Its life for one policy that learns from it (`policy_groups.state`):

    add_group      accept (its last episode)    filter             assign          close_batches
        |                   |                     |                  |                  |
        v                   v                     v                  v                  v
      open  ----------> complete  ----------->  ready  ---------->  used  ---------->  closed  -> deleted
        |                   |                     | ^                |
        |                   |                     | +--- claim ------+     a new trainer starts from a checkpoint
        v                   v                     v                        from before that batch
     dropped             dropped               dropped            quarantined: no trainer can train on it
     (failed, silent,    (not_kept)            (too_old, lost_version, overflow)       lost_ledger: any of these three
      lost_version)

Each policy uses the same group at its own pace, and has its own row for it. `filter` writes down what the data
algorithms decided. A group of an evaluation has one row, of the policy "", that goes open -> ready -> closed.

The life of an episode (`episodes.state`):

      waiting  -- lease -->  leased  -- accept -->  done
         ^                     |
         +-- give_back, expire, accept (failed) --> quarantined, after too many attempts

An episode is `cancelled` when its whole group is given up.

The groups of a batch are written down before the batch is served, so that a batch asked for twice is the same batch:
the step number in a trainer's checkpoint is the whole record of what the trainer has consumed. A trainer that starts
from a checkpoint makes a `claim`, which gives it an epoch. Messages of an older epoch are refused, so that no late one
can undo what a newer trainer does. Groups that nobody can ask for any more are deleted, so that the file holds only
what a run may go back to, however long the run is.

Every transition is one SQLite transaction: a process that dies within it leaves the state from before. The comment at
each says what happens when a process dies right before or right after it. A power failure may lose the newest
transitions, but none up to the last durable one: `claim`, `assign` and `commit` are on the disk before they are
answered, so that every group that a checkpoint has consumed is known to be used. Anything else that is lost is done
again: tasks are opened, episodes played, data algorithms asked.

Times are those of the machine's monotonic clock, which does not move when the date is set. It runs on while the process
restarts, and begins anew when the machine restarts (`boot`). Each time the ledger is opened, leases get a full term.
"""

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zstandard

from flowjax.files import boot_id, replace_file
from flowjax.records import (
    COUNTED_STATUSES,
    Episode,
    Group,
    Lease,
    Leased,
    Task,
    Trajectory,
    pack,
    unpack,
)

Kind = Literal["train", "eval"]
Failed = Literal["retry", "short", "drop"]  # what to do with a training episode that its world or workflow broke
Selection = tuple[list[str] | None, Mapping[str, Sequence[str]]]  # groups of a batch or None; groups to drop, by cause
# A changed row of a data algorithm's state: algorithm, table ("": all that is in no table), key, value (None: deleted).
StateRow = tuple[str, str, bytes, bytes | None]
_EVALUATION = ""  # the policy of an evaluation's group
_BROKEN = ("env_error", "timeout")  # statuses of failures in the episode itself; other causes lie with its worker
_OUTAGES = ("executor_error",)  # statuses of an outage: the same episode may go well later
_KEEP_DECAY = 1 - 1 / 256  # exponential moving average of the share of kept groups, over about the newest 256
_KEEP_PRIOR = 4.0  # kept groups counted before the first, so that a few early refusals do not open a flood of groups
_EPISODE_STATES = ("waiting", "leased", "done", "quarantined", "cancelled")

# --------------------------------------------------------------------------------------------------------------- schema
_VERSION = 9  # of the tables
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
CREATE TABLE IF NOT EXISTS policy_groups (  -- a policy's part of a group
    policy TEXT NOT NULL,          -- "" for evaluation
    group_id TEXT NOT NULL REFERENCES groups,
    position INTEGER NOT NULL,
    state TEXT NOT NULL,           -- open | complete | ready | used | closed | dropped | quarantined
    arrival INTEGER,               -- place in the order in which they became complete
    oldest_version INTEGER,        -- that sampled any of its tokens; until it is complete, served when it was opened
    newest_version INTEGER,        -- that sampled any of its tokens, once it is complete
    PRIMARY KEY (policy, group_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS policy_groups_by_state ON policy_groups (policy, state, position);
CREATE INDEX IF NOT EXISTS policy_groups_by_group ON policy_groups (group_id);
CREATE INDEX IF NOT EXISTS policy_groups_by_arrival ON policy_groups (arrival);
CREATE INDEX IF NOT EXISTS policy_groups_complete ON policy_groups (arrival) WHERE state = 'complete';
CREATE TABLE IF NOT EXISTS policy_group_counts (  -- kept by the triggers, so that nobody has to count
    policy TEXT NOT NULL,
    state TEXT NOT NULL,
    n INTEGER NOT NULL,
    PRIMARY KEY (policy, state)
) WITHOUT ROWID;
INSERT OR REPLACE INTO policy_group_counts SELECT policy, state, COUNT(*) FROM policy_groups GROUP BY policy, state;
CREATE TRIGGER IF NOT EXISTS policy_group_added AFTER INSERT ON policy_groups BEGIN
    INSERT INTO policy_group_counts VALUES (new.policy, new.state, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER IF NOT EXISTS policy_group_moved AFTER UPDATE OF state ON policy_groups WHEN old.state != new.state BEGIN
    UPDATE policy_group_counts SET n = n - 1 WHERE policy = old.policy AND state = old.state;
    INSERT INTO policy_group_counts VALUES (new.policy, new.state, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER IF NOT EXISTS policy_group_removed AFTER DELETE ON policy_groups BEGIN
    UPDATE policy_group_counts SET n = n - 1 WHERE policy = old.policy AND state = old.state;
END;
CREATE TABLE IF NOT EXISTS episodes (
    episode_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL,           -- waiting | leased | done | quarantined | cancelled
    attempts INTEGER NOT NULL DEFAULT 0,
    lease_id TEXT,
    worker TEXT,                   -- who holds it, or failed at it last
    deadline_s REAL,               -- of the lease, by the clock of the boot in `keys`; of a waiting one, until when
                                   -- `worker` should not have it again
    episode BLOB,                  -- packed, and compressed by zstd
    played_versions TEXT,          -- policy -> [oldest, newest] that sampled what counts of it, as JSON
    error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS episodes_by_group ON episodes (group_id);
CREATE INDEX IF NOT EXISTS episodes_by_state ON episodes (state, deadline_s);
CREATE INDEX IF NOT EXISTS episodes_by_lease ON episodes (lease_id);
CREATE INDEX IF NOT EXISTS episodes_by_worker ON episodes (worker, state);
CREATE TABLE IF NOT EXISTS batches (  -- place for place, which groups a step is trained on
    policy TEXT NOT NULL,
    step INTEGER NOT NULL,         -- -1 - step once it is closed, of groups that a later batch has, too
    place INTEGER NOT NULL,
    group_id TEXT NOT NULL,
    PRIMARY KEY (policy, step, place)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS batches_by_group ON batches (policy, group_id);
CREATE TABLE IF NOT EXISTS trainers (  -- who trains each policy, and how far it is
    policy TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,        -- of the trainer that claimed it last; 0: nobody has
    trainer TEXT NOT NULL,         -- its name
    made INTEGER NOT NULL,         -- batches that led to where it is: the next one is of this step
    committed INTEGER NOT NULL,    -- newest version on disk, -1 before the first
    most INTEGER NOT NULL          -- newest version that there was when it was claimed: the trainer may have gone back
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quarantine (  -- groups that a trainer refused: kept, and never trained on
    policy TEXT NOT NULL,
    group_id TEXT NOT NULL,
    step INTEGER NOT NULL,         -- of the batch that they were in
    trajectory_id TEXT NOT NULL,   -- the first one that it cannot train on
    worker TEXT NOT NULL,          -- who sent it
    reason TEXT NOT NULL,
    PRIMARY KEY (policy, group_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keep_shares (  -- of the groups that are in, those that a trainer may have
    policy TEXT PRIMARY KEY,
    kept REAL NOT NULL,            -- the newest ones, each weighing less by _KEEP_DECAY than the one after it
    seen REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (name TEXT PRIMARY KEY, key BLOB NOT NULL);  -- "lease": leases are signed with it;
                                                                             -- "boot": deadlines are by its clock
CREATE TABLE IF NOT EXISTS states (name TEXT PRIMARY KEY, state BLOB NOT NULL);  -- of the data algorithms
CREATE TABLE IF NOT EXISTS state_rows (  -- what is in the tables of their states
    name TEXT NOT NULL,
    attribute TEXT NOT NULL,
    key BLOB NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (name, attribute, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counts (  -- of what came to nothing, since the start of the run
    name TEXT NOT NULL,            -- failed/<cause> | quarantined | cancelled | short_groups | dropped/<cause>
                                   -- | passed_over | forced (tasks, by the data algorithms)
    policy TEXT NOT NULL,          -- "" where it is about whole episodes
    n INTEGER NOT NULL,
    last TEXT NOT NULL,            -- the newest one, in words
    PRIMARY KEY (name, policy)
) WITHOUT ROWID;
"""
_OPENED_FILE = "tasks"  # beside a policy's checkpoints: how many groups had been opened when its newest batch was made
_TABLES = "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table'"


class StepError(ValueError):
    """A batch that the trainer of a policy cannot ask for; the message says why."""


class LedgerError(ValueError):
    """A ledger file that cannot be used; the message says why."""


def open_tables(path: Path | str) -> sqlite3.Connection:
    """The database at `path`, made when it is missing.

    Raises:
        LedgerError: it is damaged, belongs to another user, or has tables of another version of flowjax.
    """
    try:
        db = _opened(path)
        # Damage is found before a run starts on it. `integrity_check` would compare the indexes, too, but takes longer.
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            raise damaged(path, str(error)) from error
        raise
    if found != "ok":
        db.close()
        raise damaged(path, found.replace("\n", " "))
    return db


def is_damage(error: BaseException) -> bool:
    """True if SQLite says with this error that the file is damaged, or is no database."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    # An extended code, such as SQLITE_CORRUPT_INDEX, has the primary code in its low byte.
    return isinstance(error, sqlite3.Error) and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def damaged(path: Path | str, found: str) -> LedgerError:
    """The error that names a damaged ledger and its remedy."""
    return LedgerError(
        f"{path} is damaged ({found}): python -m flowjax.launch --resume={Path(path).parent} --fresh_ledger sets it "
        "aside and goes on from the newest checkpoint with a new one; other tasks are played for what was ready"
    )


def note_opened(checkpoints: Path, groups: int) -> None:
    """Note beside a policy's checkpoints how many groups have been opened.

    To be called before a batch is served: all groups that a checkpoint has consumed are then among that many, and this
    is still known when the ledger and the log are lost.
    """
    if checkpoints.is_dir():
        replace_file(checkpoints / _OPENED_FILE, str(groups))


def most_opened(run_dir: Path) -> int:
    """The largest number of groups noted beside the checkpoints of a run's policies (`note_opened`); 0: no note."""
    noted = 0
    for file in run_dir.glob(f"checkpoints/*/{_OPENED_FILE}"):
        with contextlib.suppress(OSError, ValueError):
            noted = max(noted, int(file.read_text()))
    return noted


def start_anew(path: Path, *, least_position: int) -> int:
    """Set a ledger aside as `<name>.aside-<n>` and make a new one, whose tasks begin after those of the old one.

    Args:
        path: of the ledger, in the run's folder; it may be damaged.
        least_position: lowest position of the first task, as far as the caller knows how far the run had come. The
            notes beside the checkpoints, and the old ledger where it can be read, may raise it.

    Returns:
        The position of the first task: no group that may have been trained on comes again.
    """
    position = max(least_position, most_opened(path.parent))
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as old:
        position = max(position, old.execute("SELECT COALESCE(MAX(position) + 1, 0) FROM groups").fetchone()[0])
    aside = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}.aside-{n}").exists())
    for part in ("", "-wal", "-shm"):  # SQLite's log and its index go along: they would be read as the new file's
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + part).rename(path.with_name(f"{path.name}.aside-{aside}{part}"))
    ledger = Ledger(path, lease_s=1.0, max_attempts=1)
    if position:  # one group at the position before it: the next task's position is the highest one plus 1
        ledger.pass_over(f"train-{position - 1:08d}", Task("", "", 0), position=position - 1)
    ledger.close()
    return position


def _opened(path: Path | str) -> sqlite3.Connection:
    if str(path) != ":memory:":
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:  # it holds the key that signs leases: for its owner's eyes only, also where the file is an older one
                os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)
        except PermissionError as error:
            mine = Path(path).exists() and Path(path).stat().st_uid == os.geteuid()
            reason = "may not be written: chmod u+rw it" if mine else "belongs to another user: chown it to this one"
            raise LedgerError(f"{path} {reason}, or copy the run folder") from error
    db = sqlite3.connect(path, isolation_level=None)  # autocommit: `Transaction` says BEGIN and COMMIT itself
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode=WAL")  # readers on another connection (`EpisodeReader`) do not block the writer
    db.execute("PRAGMA synchronous=NORMAL")  # a commit survives the death of the process, not yet a power failure
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
    """Key that signs the run's leases; made at the first call and kept in the ledger."""
    db.execute("INSERT OR IGNORE INTO keys VALUES ('lease', ?)", (secrets.token_bytes(32),))
    return db.execute("SELECT key FROM keys WHERE name = 'lease'").fetchone()[0]


class Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK when the body raises; inside another transaction, a part of that one.

    A `durable` transaction flushes SQLite's log: after it, it and all earlier ones are on the disk. The others wait in
    the log for the next durable one. A durable one takes about 4 ms, any other 0.03 ms.
    """

    def __init__(self, db: sqlite3.Connection, *, durable: bool = False):
        self._db, self._durable, self._outermost = db, durable, False

    def __enter__(self) -> None:
        self._outermost = not self._db.in_transaction
        if self._outermost:
            # Before BEGIN: SQLite does not change this setting inside a transaction.
            self._db.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
        elif self._durable:
            raise RuntimeError("a durable transaction cannot be a part of another: it would not be flushed")

    def __exit__(self, kind: type | None, *_: object) -> None:
        if not self._outermost:
            return
        try:
            if kind is None:
                self._db.execute("COMMIT")
        finally:
            # Also when the commit itself fails, as on a full disk: the next transactions would else become parts of
            # this one, and never be committed. SQLite may have rolled back already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


@dataclass(frozen=True, slots=True)
class PolicyGroup:
    """A policy's part of a group: its place in the order of completion (`arrival`), the oldest and the newest version
    that sampled its tokens, and the number of batches that have had it."""

    group_id: str
    arrival: int
    oldest_version: int
    newest_version: int
    batches: int


class Ledger:
    """The tables and their transitions. Not thread-safe: one event loop owns it.

    Args:
        path: SQLite file, created when missing; ":memory:" for tests.
        lease_s: term of a lease in seconds: an episode whose lease is not renewed for so long is leased again.
        max_attempts: leases of one episode before it is quarantined.
        failed: what a broken training episode leads to: it is played again by another worker ("retry"), quarantined
            at once so that its group goes on short ("short"), or its whole group is dropped ("drop").
        min_group_size: episodes that a training group must have in, else it is dropped.
        clock: monotonic seconds, which do not depend on the date and run on while the process restarts.
        boot: id of the machine's start, from which `clock` counts; times of another id cannot be compared.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        lease_s: float,
        max_attempts: int,
        failed: Failed = "retry",
        min_group_size: int = 1,
        clock: Callable[[], float] = time.monotonic,
        boot: str | None = None,
    ):
        self.path = path
        self._db = open_tables(path)
        self._lease_s, self._max_attempts, self._clock = lease_s, max_attempts, clock
        self._failed, self._min_group_size = failed, min_group_size
        self._lease_key = lease_key(self._db)
        self._set_clock(boot_id() if boot is None else boot)
        # When each worker last asked for episodes of a kind, the latest last. In memory alone: after a restart the
        # first worker that asks counts as alone, and may get back what it failed at.
        self._asked_s: dict[Kind, dict[str, float]] = {"train": {}, "eval": {}}

    def close(self) -> None:
        self._db.close()

    def transaction(self) -> Transaction:
        """Context in which all changes are made together, or none."""
        return Transaction(self._db)

    def _set_clock(self, boot: str) -> None:
        """Give every lease a full term from now.

        For how long nobody took renewals is not known here; a worker that still plays gets time to renew, and one that
        has died is noticed a term later. The deadline of a waiting episode is set anew, too, if it was made by another
        clock, or lies further ahead than a term, for whatever reason.
        """
        with Transaction(self._db):
            before = self._db.execute("SELECT key FROM keys WHERE name = 'boot'").fetchone()
            term = {"until": self._clock() + self._lease_s, "anew": not before or before["key"] != boot.encode()}
            self._db.execute(
                "UPDATE episodes SET deadline_s = :until"
                " WHERE state = 'leased' OR deadline_s > :until OR (deadline_s IS NOT NULL AND :anew)",
                term,
            )
            self._db.execute("INSERT OR REPLACE INTO keys VALUES ('boot', ?)", (boot.encode(),))

    # ------------------------------------------------------------------------------------------------- nothing -> open

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
        serving: Mapping[str, int] | None = None,
        forced: bool = False,
        changes: Sequence[StateRow] = (),
    ) -> None:
        """Open a group with one waiting episode per seed, and a part of it for each of `policies`.

        A group that exists already is left as it is.

        Args:
            seeds: one for each member.
            position: place of the task in the run's order.
            versions: versions that the episodes are pinned to, by policy (evaluations).
            serving: version of each policy that the group is opened for, which the asking worker plays with (training);
                0 for policies that it does not name.
            forced: no data algorithm chose the task; such groups are counted.
            changes: changed rows of the algorithms' state, written in the same transaction.
        """
        with Transaction(self._db):
            # A process that dies before this opens the same task again, under the same id, since the next position is
            # one more than the highest; one that dies after it goes on with the next task. What the algorithms learned
            # from the choice is kept or lost together with the group.
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
                    "INSERT INTO policy_groups (policy, group_id, position, state, oldest_version)"
                    " VALUES (?, ?, ?, 'open', ?)",
                    [(policy, group_id, position, (serving or {}).get(policy, 0)) for policy in policies],
                )
            self._count("forced", n=forced)
            self._write_state(changes)

    def pass_over(self, group_id: str, task: Task, *, position: int) -> None:
        """Note that a task is not played: it keeps its place in the order, without episodes, and is counted."""
        with Transaction(self._db):
            # One task at a time: a process that dies among several goes on after the last one written down. The
            # algorithms answer about the rest as they would have: `Algorithm.choose` changes no state.
            self.add_group(group_id, task, (), kind="train", position=position, policies=())
            self._count("passed_over")

    # --------------------------------------------------------------------------------------- episode: waiting -> leased

    def lease(
        self,
        worker: str,
        slots: int,
        kind: Kind,
        worlds: Collection[str] | None = None,
        serving: Mapping[str, int] | None = None,
        without: Sequence[str] = (),
        tried_by_others: bool = False,
    ) -> list[Lease]:
        """Lease up to `slots` waiting episodes of a kind to a worker, in the order of tasks.

        An episode that this worker failed at is left for `lease_s` seconds to others, if any ask for that kind.

        Args:
            worlds: the worlds that the worker plays; None: any.
            serving: version of each policy that it plays with; groups that were opened for a newer one are left out.
            without: names of evaluations that are left out.
            tried_by_others: lease only episodes that another worker had and did not finish.
        """
        now_s = self._clock()
        deadline_s, leases = now_s + self._lease_s, []
        alone = self._alone(worker, kind, now_s)
        with Transaction(self._db):
            # `worker` of a waiting episode is the one that failed at it last, NULL if none did. `IS NOT` is true of a
            # NULL beside a name, where `!=` would be NULL, and the row left out.
            rows = self._db.execute(
                "SELECT episode_id, group_id, seed, versions, temperature, task"
                " FROM episodes JOIN groups USING (group_id)"
                " WHERE episodes.state = 'waiting' AND kind = :kind"
                " AND (:alone OR worker IS NOT :worker OR deadline_s < :now_s)"
                " AND (:worlds IS NULL OR world IN (SELECT value FROM json_each(:worlds)))"
                " AND (:serving IS NULL OR NOT EXISTS (SELECT 1 FROM policy_groups JOIN json_each(:serving) AS served"
                " ON served.key = policy WHERE group_id = groups.group_id AND policy_groups.state = 'open'"
                " AND oldest_version > served.value))"
                " AND evaluation NOT IN (SELECT value FROM json_each(:without))"
                " AND (NOT :tried OR worker IS NOT NULL AND worker != :worker)"
                " ORDER BY position, episode_id LIMIT :slots",
                {
                    "kind": kind,
                    "alone": alone,
                    "worker": worker,
                    "now_s": now_s,
                    "worlds": None if worlds is None else json.dumps(sorted(worlds)),
                    "without": json.dumps(without),
                    "tried": tried_by_others,
                    "serving": None if serving is None else json.dumps(dict(serving)),
                    "slots": slots,
                },
            ).fetchall()
            for row in rows:
                lease = Lease(
                    # 16 hex digits of nonce, then the signature: `_granted` cuts it there.
                    lease_id=self._sign(secrets.token_hex(8), row["episode_id"]),
                    task=unpack(row["task"]),
                    group_id=row["group_id"],
                    episode_id=row["episode_id"],
                    seed=row["seed"],
                    kind=kind,
                    temperature=row["temperature"],
                    versions=unpack(row["versions"]),
                )
                # Written down before the answer is sent: if the answer is lost, or the worker dies, the deadline brings
                # the episode back. If a power failure loses this row, the episode is waiting again, and the first to
                # hand it in counts: a lease is checked by its signature, not by this row.
                self._db.execute(
                    "UPDATE episodes SET state = 'leased', attempts = attempts + 1, lease_id = ?, worker = ?,"
                    " deadline_s = ? WHERE episode_id = ?",
                    (lease.lease_id, worker, deadline_s, lease.episode_id),
                )
                leases.append(lease)
        return leases

    def _alone(self, worker: str, kind: Kind, now_s: float) -> bool:
        """True if no other worker has asked for episodes of that kind for a lease's term: this one then gets back even
        what it failed at."""
        asked_s = self._asked_s[kind]
        asked_s.pop(worker, None)  # inserted again at the end, so that the dict stays in the order of asking
        asked_s[worker] = now_s
        while asked_s[first := next(iter(asked_s))] < now_s - self._lease_s:
            del asked_s[first]
        return len(asked_s) == 1

    def renew(self, lease_ids: Iterable[str]) -> list[str]:
        """Give these leases a full term from now; returns those that are no longer held."""
        deadline_s, lost = self._clock() + self._lease_s, []
        with Transaction(self._db):
            # If this is lost, the earlier deadlines hold: workers renew three times a term. Even when a lease runs out,
            # what was played under it is still accepted (see `accept`).
            for lease_id in lease_ids:
                held = self._db.execute(
                    "UPDATE episodes SET deadline_s = ? WHERE lease_id = ? AND state = 'leased'", (deadline_s, lease_id)
                )
                if not held.rowcount:
                    lost.append(lease_id)
        return lost

    def put_off(self, seconds: float) -> None:
        """Move the deadlines of all leases `seconds` later."""
        with Transaction(self._db):
            # A process that dies before this gives all leases a full term when it starts again (`_set_clock`).
            self._db.execute("UPDATE episodes SET deadline_s = deadline_s + ? WHERE state = 'leased'", (seconds,))

    # ------------------------------------------------------- episode: leased -> waiting again, quarantined or cancelled

    def give_back(self, lease_ids: Iterable[str], error: str, *, count_attempt: bool) -> list[str]:
        """Take back episodes that a worker returns unplayed. Returns the groups that this completes.

        `count_attempt`: the lease was an attempt that failed, which may be the last one allowed.
        """
        with Transaction(self._db):
            # Only what is still leased under this very id: a late copy of the message cannot take the episode from
            # the worker that has it by now. If the process dies before this, the deadline brings the episode back.
            rows = [
                self._db.execute(
                    "SELECT episode_id, group_id FROM episodes WHERE lease_id = ? AND state = 'leased'", (lease_id,)
                ).fetchone()
                for lease_id in lease_ids
            ]
            return self._release([row for row in rows if row], "given_back" if count_attempt else None, error)

    def expire(self) -> list[str]:
        """Take back the leases whose deadline has passed. Returns the groups that this completes."""
        # Looked up without a transaction: most calls find nothing, and then take no lock and write nothing.
        overdue = "SELECT episode_id, group_id FROM episodes WHERE state = 'leased' AND deadline_s < ?"
        rows = self._db.execute(overdue, (self._clock(),)).fetchall()
        if not rows:
            return []
        with Transaction(self._db):
            # A process that dies before this finds them overdue a term after its restart, unless they are renewed.
            return self._release(rows, "lease_ran_out", "lease ran out")

    def _release(self, rows: Sequence[sqlite3.Row], cause: str | None, error: str) -> list[str]:
        """Take leased episodes back. Without a cause, or after an outage, they are as if they had never been leased;
        any other cause uses up an attempt. Returns the groups that this completes."""
        group_ids = {row["group_id"] for row in rows}
        cancelled: set[str] = set()  # together with an earlier one of `rows`, of the same group
        for row in rows:
            if row["episode_id"] in cancelled:
                continue
            if cause in _OUTAGES:
                self._count(f"failed/{cause}", last=error)
            if cause is None or cause in _OUTAGES:  # an outage uses up no attempt: it may last for hundreds of them
                self._db.execute(
                    "UPDATE episodes SET state = 'waiting', lease_id = NULL, worker = NULL, deadline_s = NULL,"
                    " attempts = attempts - 1 WHERE episode_id = ?",
                    (row["episode_id"],),
                )
                continue
            self._count(f"failed/{cause}", last=error)
            kind = self._db.execute("SELECT kind FROM groups WHERE group_id = ?", (row["group_id"],)).fetchone()[0]
            # Config's `failed_episodes` applies to training, and to failures of the world: an evaluation wants every
            # episode, and a worker that died says nothing about the task.
            retried = self._failed == "retry" or kind == "eval" or cause not in _BROKEN
            # The lease's id is removed, but its signature stays valid: a worker that was only slow may still hand in
            # what it played after its lease ran out, as long as nobody else has (see `accept`).
            state = self._db.execute(
                "UPDATE episodes SET lease_id = NULL, error = ?, deadline_s = ?,"
                " state = CASE WHEN ? AND attempts < ? THEN 'waiting' ELSE 'quarantined' END WHERE episode_id = ?"
                " RETURNING state",
                (error, self._clock() + self._lease_s, retried, self._max_attempts, row["episode_id"]),
            ).fetchone()[0]
            self._count("quarantined", n=state == "quarantined")
            if state == "quarantined" and self._failed == "drop" and kind == "train":
                siblings = self._db.execute(
                    "UPDATE episodes SET state = 'cancelled', lease_id = NULL"
                    " WHERE group_id = ? AND state IN ('waiting', 'leased') RETURNING episode_id",
                    (row["group_id"],),
                ).fetchall()
                cancelled |= {sibling["episode_id"] for sibling in siblings}
                self._count("cancelled", n=len(siblings))
        return self._complete(group_ids)

    # ----------------------------------------------------------------- episode: leased -> done; group: open -> complete

    def accept(self, lease_id: str, episode: Episode, worker: str = "") -> tuple[bool, list[str]]:
        """Take in a played episode that `worker` sends.

        An episode counts once, from any worker, and under any lease that was ever given for it. One that failed for a
        cause outside the policies (`env_error`, `timeout`, `cancelled`) does not count: see `failed` of the
        constructor. One that met an outage (`executor_error`) waits again, as if it had never been leased.

        Returns:
            True and the groups that this completes; False and no groups if the episode changes nothing: it is a
            duplicate, is no longer wanted, its lease is not valid, or it failed under a lease that is over.
        """
        with Transaction(self._db):
            row = self._db.execute(
                "SELECT episode_id, group_id, state, lease_id FROM episodes WHERE episode_id = ?", (episode.episode_id,)
            ).fetchone()
            if row is None or row["state"] in ("done", "quarantined", "cancelled"):
                return False, []
            if not self._granted(lease_id, episode.episode_id):
                return False, []
            if episode.status not in COUNTED_STATUSES:
                if row["lease_id"] != lease_id:  # a failure ends only its own lease: another worker may be playing
                    return False, []
                return True, self._release([row], episode.status, f"{episode.episode_id}: {episode.error}")
            # State and content in one row: at no moment is the episode done and not kept. A worker that gets no answer
            # because this process died sends it again: that copy is then the first, or a duplicate that changes
            # nothing. A waiting episode is accepted, too: its lease ran out, but nobody else has finished it.
            # A sender without a name leaves the worker that the episode was leased to.
            self._db.execute(
                "UPDATE episodes SET state = 'done', episode = ?, played_versions = ?, lease_id = NULL,"
                " worker = COALESCE(NULLIF(?, ''), worker) WHERE episode_id = ?",
                (_compressed(episode), json.dumps(_played_versions(episode)), worker, episode.episode_id),
            )
            return True, self._complete([row["group_id"]])

    def _complete(self, group_ids: Iterable[str]) -> list[str]:
        """Complete those open groups whose episodes have all ended, and return them.

        A policy's part of a group is dropped if the policy has no turn in it. A training group is dropped for all if
        fewer than `min_group_size` of its episodes are in, or with `failed` "drop" if one is quarantined. The group of
        an evaluation becomes ready, or is dropped if no episode is in.
        """
        complete = []
        for group_id in group_ids:
            states = self._db.execute(
                "SELECT state, COUNT(*) AS n FROM episodes WHERE group_id = ? GROUP BY state", (group_id,)
            ).fetchall()
            ended = {row["state"]: row["n"] for row in states}
            # A policy's part may have been dropped already (`_lose`): only those still open go on.
            still_open = self._db.execute(
                "SELECT policy FROM policy_groups WHERE group_id = ? AND state = 'open'", (group_id,)
            ).fetchall()
            if ended.keys() & {"waiting", "leased"} or not still_open:
                continue
            done, lost = ended.get("done", 0), ended.get("quarantined", 0)
            training = still_open[0]["policy"] != _EVALUATION
            if lost and training and (self._failed == "drop" or done < self._min_group_size):
                for (policy,) in still_open:
                    self._drop(policy, [group_id], "failed")
            else:
                self._count("short_groups", n=lost > 0 and training)
                self._complete_for(group_id, [policy for (policy,) in still_open])
            complete.append(group_id)
        return complete

    def _complete_for(self, group_id: str, policies: Sequence[str]) -> None:
        played = self._ranges_played(group_id)
        for policy in policies:
            evaluation = policy == _EVALUATION
            ranges = [pair for each in played for name, pair in each.items() if evaluation or name == policy]
            if not (played if evaluation else ranges):
                self._drop(policy, [group_id], "silent")
                self._weigh(policy, kept=False)
                continue
            versions = list(itertools.chain(*ranges)) or [0]  # an evaluation without a single turn
            # In the transaction of the last episode: a process that dies before it asks the data algorithms finds the
            # group complete after its restart, and asks them then. They are asked in the order of `arrival`, which is
            # therefore counted over all policies.
            self._db.execute(
                "UPDATE policy_groups SET state = ?, oldest_version = ?, newest_version = ?,"
                " arrival = (SELECT COALESCE(MAX(arrival), 0) + 1 FROM policy_groups)"
                " WHERE policy = ? AND group_id = ?",
                ("ready" if policy == _EVALUATION else "complete", min(versions), max(versions), policy, group_id),
            )

    # ------------------------------------------------------------------------------------ complete -> ready, or dropped

    def filter(self, policy: str, group_id: str, *, keep: bool, changes: Sequence[StateRow] = ()) -> None:
        """Make a policy's complete group ready, or drop it, together with what the data algorithms learned from it."""
        with Transaction(self._db):
            # Decision and learned state in one transaction: between two, a death would have the algorithms asked about
            # the group again, and they would count it twice.
            self._db.execute(
                "UPDATE policy_groups SET state = ? WHERE policy = ? AND group_id = ? AND state = 'complete'",
                ("ready" if keep else "dropped", policy, group_id),
            )
            self._count("dropped/not_kept", policy, not keep)
            self._weigh(policy, kept=keep)
            self._write_state(changes)

    def _weigh(self, policy: str, *, kept: bool) -> None:
        """Count one more group in the moving average of the share that is kept: kept / seen, see `keep_share`."""
        self._db.execute(
            "INSERT INTO keep_shares VALUES (:policy, :kept, 1)"
            " ON CONFLICT DO UPDATE SET kept = kept * :decay + :kept, seen = seen * :decay + 1",
            {"policy": policy, "kept": int(kept), "decay": _KEEP_DECAY},
        )

    def drop(self, policy: str, group_ids: Sequence[str], cause: str) -> None:
        """Drop a policy's part of these groups."""
        with Transaction(self._db):
            # After a death before this they are still ready, and are dropped when the next group is complete.
            self._drop(policy, group_ids, cause)

    def _drop(self, policy: str, group_ids: Sequence[str], cause: str) -> None:
        self._db.executemany(
            "UPDATE policy_groups SET state = 'dropped' WHERE policy = ? AND group_id = ?",
            [(policy, g) for g in group_ids],
        )
        self._count(f"dropped/{cause}", policy, len(group_ids))

    # ---------------------------------------------------------------------------------------------------- ready -> used

    def assign(
        self, policy: str, step: int, select: Callable[[list[PolicyGroup], list[PolicyGroup]], Selection]
    ) -> list[str] | None:
        """The groups of the policy's batch `step`: those written down for it, or else those that `select` chooses from
        the ready groups and from those used before; None when it chooses none.

        Raises:
            StepError: `step` is neither the next batch nor one that is still written down.
        """
        # Durable: the version trained on this batch may be on the disk when the power fails, and must find the batch.
        with Transaction(self._db, durable=True):
            if written := self.batch(policy, step):
                return written
            if step != (made := self.batches_made(policy)):
                kept = "is over and forgotten" if step < made else "comes later"
                raise StepError(
                    f"batch {step} of {policy} {kept}: the next one is {made}; a trainer that goes back claims"
                )
            chosen, dropped = select(self.groups(policy, "ready"), self.groups(policy, "used"))
            for cause, group_ids in dropped.items():
                self._drop(policy, group_ids, cause)
            if chosen is None:
                return None
            # Written down before it is served: if the trainer dies, or the answer is lost, the same step gets the same
            # groups again, and no other step gets any of them.
            self._db.executemany(
                "UPDATE policy_groups SET state = 'used' WHERE policy = ? AND group_id = ?",
                [(policy, g) for g in chosen],
            )
            self._db.executemany(
                "INSERT INTO batches VALUES (?, ?, ?, ?)", [(policy, step, i, g) for i, g in enumerate(chosen)]
            )
            self._set_trainer(policy, made=step + 1)
            return chosen

    # -------------------------------------------------------------------------- a trainer refuses: used -> quarantined

    def quarantine(self, policy: str, step: int, reasons: Mapping[str, str]) -> list[str]:
        """Put aside the groups of the policy's batch `step` that hold these trajectories, with the reason and the
        worker that sent them.

        They are kept and never served again. The other groups of the batch become ready again, so that the batch is
        made anew with others in place of these. Returns the groups put aside; none if the batch holds none of the
        trajectories.

        Args:
            reasons: why each trajectory cannot be trained on, by its id.

        Raises:
            StepError: the batch holds some of them, but a later batch has been served since.
        """
        with Transaction(self._db):
            # One entry per group. In reverse, because a dict keeps the last value of a key: that is then the group's
            # first trajectory that was refused.
            refused = {
                group_id: (trajectory.trajectory_id, reasons[trajectory.trajectory_id])
                for group_id in self.batch(policy, step)
                for trajectory in reversed(self.group(group_id, policy).trajectories)
                if trajectory.trajectory_id in reasons
            }
            # Making it anew would undo later batches, which a checkpoint may have consumed by now.
            if refused and step != (made := self.batches_made(policy)) - 1:
                raise StepError(f"batch {step} of {policy} cannot be refused any more: the newest is {made - 1}")
            workers = self.workers_of(trajectory_id for trajectory_id, _ in refused.values())
            for group_id, (trajectory_id, reason) in refused.items():
                self._db.execute(
                    "INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?, ?, ?, ?)",
                    (policy, group_id, step, trajectory_id, workers.get(trajectory_id, ""), reason),
                )
                self._db.execute(
                    "UPDATE policy_groups SET state = 'quarantined' WHERE policy = ? AND group_id = ?",
                    (policy, group_id),
                )
            # Put aside and taken out of the batch in one transaction. After a death before it the trainer is served the
            # same batch, and refuses it again; after one that follows it, it is served another batch, and a late copy
            # of the refusal finds none of these groups.
            if refused:
                self._undo_after(policy, step - 1)
                self._set_trainer(policy, made=step)
            return list(refused)

    # ------------------------------------------------------------------------------- a trainer starts: used -> ready

    def claim(self, trainer: str, versions: Mapping[str, int], after: int, *, position: int = 0) -> tuple[bool, int]:
        """Make `trainer` the trainer of these policies, which goes on from these versions.

        Batches beyond these versions are undone: the checkpoints that consumed them are lost. Batch `version`, if it
        is written down, stays: the trainer asks for it next. A version beyond the batches that the ledger has made
        shows that the ledger is an older copy, put back: every group that might be in those batches is dropped.

        Args:
            trainer: a name that no other start of a trainer has.
            versions: version of each policy that the trainer's checkpoint has.
            after: the newest epoch that the trainer knows of.
            position: lowest position of the next task, if the ledger turns out to be an older copy.

        Returns:
            Whether the claim is good, and the newest epoch of these policies: the trainer's own if it is. A claim
            whose `after` is not the newest epoch is refused: another trainer has started since, or this is a late copy.
        """
        # Durable: a trainer that has an epoch must find it valid after the power has failed.
        with Transaction(self._db, durable=True):
            owners = {policy: self._trainer(policy) for policy in versions}
            newest = max(owner["epoch"] for owner in owners.values())
            # A copy of a claim that was good changes nothing: the trainer may be some batches further by now.
            if all(owner["trainer"] == trainer for owner in owners.values()):
                return True, newest
            if after != newest:
                return False, newest
            # Epoch, trainer and undone batches in one transaction: a death before it leaves the old trainer in place,
            # and the new one, which got no answer, sends its claim again. After it, that copy finds the claim made.
            epoch = self._db.execute("SELECT COALESCE(MAX(epoch), 0) + 1 FROM trainers").fetchone()[0]
            for policy, version in versions.items():
                if version > owners[policy]["made"]:
                    self._lose(policy, position)
                self._undo_after(policy, version)
                made = version + bool(self.batch(policy, version))
                self._drop_lost(policy, made)
                # Groups that were opened for a lost version may be played with this one: `lease` would else hold them
                # back until that number is served again.
                self._db.execute(
                    "UPDATE policy_groups SET oldest_version = :version"
                    " WHERE policy = :policy AND state = 'open' AND oldest_version > :version",
                    {"policy": policy, "version": version},
                )
                self._forget_evaluations(policy, version)
                # It only goes down here. It goes up in `commit`, after the checkpoint is known to be on the disk.
                committed = min(owners[policy]["committed"], version)
                most = max(owners[policy]["most"], owners[policy]["made"])
                self._set_trainer(policy, epoch=epoch, trainer=trainer, made=made, committed=committed, most=most)
            return True, epoch

    def _trainer(self, policy: str) -> Mapping[str, Any]:
        row = self._db.execute("SELECT * FROM trainers WHERE policy = ?", (policy,)).fetchone()
        nobody = {"policy": policy, "epoch": 0, "trainer": "", "made": 0, "committed": -1, "most": 0}
        return dict(row) if row else nobody

    def _set_trainer(self, policy: str, **changes: int | str) -> None:
        row = {**self._trainer(policy), **changes}
        columns = ":policy, :epoch, :trainer, :made, :committed, :most"
        self._db.execute(f"INSERT OR REPLACE INTO trainers VALUES ({columns})", row)

    def _lose(self, policy: str, position: int) -> None:
        """Drop every group of a policy that may have been in a batch that the ledger has lost, and skip the tasks
        before `position`, which may have been opened for such a batch. So no group is trained on twice, at the price of
        playing others in their place."""
        rows = self._db.execute(
            "SELECT group_id FROM policy_groups WHERE policy = ? AND state IN ('open', 'complete', 'ready')", (policy,)
        ).fetchall()
        self._drop(policy, [row["group_id"] for row in rows], "lost_ledger")
        self._cancel_unwanted()
        if position > self.count_groups():
            left_out = Task("", "", 0)
            self.add_group(f"train-{position - 1:08d}", left_out, (), kind="train", position=position - 1, policies=())

    def _drop_lost(self, policy: str, newest: int) -> None:
        """Drop the open groups in which a policy has played with a version beyond `newest`: once they are complete,
        other weights may have that number. The next batch drops those that are complete already (`select`).

        `newest` is the version that the trainer goes on from; or the one after it, if the batch that leads there is
        still written down: the trainer makes that one again from the same groups.
        """
        rows = self._db.execute(
            "SELECT DISTINCT group_id FROM policy_groups JOIN episodes USING (group_id)"
            " WHERE policy = ? AND policy_groups.state = 'open' AND episodes.state = 'done'",
            (policy,),
        ).fetchall()
        lost = [
            group_id
            for (group_id,) in rows
            if any(max(episode.get(policy, [0])) > newest for episode in self._ranges_played(group_id))
        ]
        self._drop(policy, lost, "lost_version")
        self._cancel_unwanted()

    def _forget_evaluations(self, policy: str, newest: int) -> None:
        """Forget what was evaluated with a version beyond `newest`: other weights will have its number."""
        for name, versions in self.evaluations().items():
            if versions.get(policy, 0) > newest:
                for table in ("episodes", "policy_groups", "groups"):
                    self._db.execute(
                        f"DELETE FROM {table} WHERE group_id IN (SELECT group_id FROM groups WHERE evaluation = ?)",
                        (name,),
                    )

    def _cancel_unwanted(self) -> None:
        """Cancel the episodes of groups that have been dropped for every policy."""
        self._db.execute(
            "UPDATE episodes SET state = 'cancelled', lease_id = NULL WHERE state IN ('waiting', 'leased')"
            " AND NOT EXISTS (SELECT 1 FROM policy_groups WHERE group_id = episodes.group_id AND state = 'open')"
        )

    def _undo_after(self, policy: str, step: int) -> None:
        """Forget the batches after `step`: no trainer saw them, or what was learned from them is lost. Their groups go
        from used back to ready, except those that a batch up to `step` has, too (replay)."""
        # Closed batches are kept under -1 - step (`close_batches`). Of these `step` itself is forgotten, too: it is the
        # next one asked for, and is made anew.
        self._db.execute("DELETE FROM batches WHERE policy = ? AND (step > ? OR step <= -1 - ?)", (policy, step, step))
        self._db.execute(
            "UPDATE policy_groups SET state = 'ready' WHERE policy = ? AND state = 'used' AND NOT EXISTS"
            " (SELECT 1 FROM batches WHERE policy = policy_groups.policy AND group_id = policy_groups.group_id)",
            (policy,),
        )

    # ---------------------------------------------------------------------------------------- used -> closed -> deleted

    def commit(self, policy: str, version: int, *, changes: Sequence[StateRow] = ()) -> None:
        """Note that the policy's trainer has committed `version`, and what the data algorithms learned from that."""
        # Durable, and before any batch is closed for it: if a power failure lost this, the trainer would go on from an
        # earlier version and ask for batches that are deleted.
        with Transaction(self._db, durable=True):
            self._set_trainer(policy, committed=version)
            self._write_state(changes)

    def close_batches(self, policy: str, before_step: int) -> None:
        """Forget the policy's batches below `before_step`: no checkpoint that is kept needs them again."""
        with Transaction(self._db):
            # In a transaction after that of `commit`, never before it: a death in between leaves some batches too many,
            # which the next commit closes. A replayed group is in several batches, and the newest of them decides.
            # Until then its rows in the older ones stay, because `groups` counts them, but at steps below 0: the rest
            # of such a batch must not be served as that batch. A trainer that goes back to it gets one made anew.
            self._db.execute(
                "UPDATE policy_groups SET state = 'closed' WHERE policy = ? AND state = 'used' AND ? >"
                " (SELECT MAX(step) FROM batches"
                " WHERE policy = policy_groups.policy AND group_id = policy_groups.group_id)",
                (policy, before_step),
            )
            self._db.execute(
                "DELETE FROM batches WHERE policy = ? AND step < ? AND NOT EXISTS (SELECT 1 FROM policy_groups"
                " WHERE policy = batches.policy AND group_id = batches.group_id AND state = 'used')",
                (policy, before_step),
            )
            self._db.execute(
                "UPDATE batches SET step = -1 - step WHERE policy = ? AND step BETWEEN 0 AND ? - 1",
                (policy, before_step),
            )
            self._forget()

    def close_evaluation(self, name: str) -> None:
        """Forget the episodes of a finished evaluation, after its line is in the log: a process that dies in between
        writes the line again."""
        with Transaction(self._db):
            self._db.execute(
                "UPDATE policy_groups SET state = 'closed' WHERE policy = ''"
                " AND group_id IN (SELECT group_id FROM groups WHERE evaluation = ?)",
                (name,),
            )
            self._forget()

    def _forget(self) -> None:
        """Delete episodes that no policy will ask for again, with their groups and the policies' parts of these.

        The newest training group stays: its position says how many there were. So does the first group of each
        evaluation: its name says that these versions have been evaluated.
        """
        over = "state IN ('closed', 'dropped')"
        # In this order, because each statement asks whether rows of the one before it are left.
        self._db.execute(
            "DELETE FROM episodes WHERE state IN ('done', 'quarantined', 'cancelled') AND NOT EXISTS"
            f" (SELECT 1 FROM policy_groups WHERE group_id = episodes.group_id AND NOT {over})"
        )
        self._db.execute(
            f"DELETE FROM policy_groups WHERE {over} AND (policy != '' OR position > 0)"
            " AND NOT EXISTS (SELECT 1 FROM episodes WHERE group_id = policy_groups.group_id)"
        )
        self._db.execute(
            "DELETE FROM groups WHERE NOT EXISTS (SELECT 1 FROM policy_groups WHERE group_id = groups.group_id)"
            " AND (kind = 'eval' OR position < (SELECT MAX(position) FROM groups WHERE kind = 'train'))"
        )

    # ------------------------------------------------------------------------------- written down with every transition

    def _count(self, name: str, policy: str = "", n: int = 1, last: str = "") -> None:
        if n:
            self._db.execute(
                "INSERT INTO counts VALUES (?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET n = n + excluded.n, last = excluded.last",
                (name, policy, int(n), last[:500]),
            )

    def _write_state(self, changes: Sequence[StateRow]) -> None:
        for name, attribute, key, value in changes:
            if not attribute:  # all that is in no table is one row, written as a whole each time
                self._db.execute("INSERT OR REPLACE INTO states VALUES (?, ?)", (name, value))
            elif value is None:
                self._db.execute(
                    "DELETE FROM state_rows WHERE name = ? AND attribute = ? AND key = ?", (name, attribute, key)
                )
            else:
                self._db.execute("INSERT OR REPLACE INTO state_rows VALUES (?, ?, ?, ?)", (name, attribute, key, value))

    def _sign(self, nonce: str, episode_id: str) -> str:
        """Id of a lease: a nonce and a keyed hash (MAC) of it and the episode. Nobody else can make a valid one, and it
        is recognised without being stored."""
        signature = hashlib.blake2b(f"{nonce} {episode_id}".encode(), key=self._lease_key, digest_size=8)
        return nonce + signature.hexdigest()

    def _granted(self, lease_id: str, episode_id: str) -> bool:
        # In constant time: how long a wrong id takes to be refused must not say how much of it is right.
        return hmac.compare_digest(lease_id.encode(), self._sign(lease_id[:16], episode_id).encode())

    # --------------------------------------------------------------------------------- questions, which change nothing

    def leased(self, lease_id: str, episode_id: str) -> Leased | None:
        """Terms of that lease; None when it was never given for this episode, or the episode is deleted by now."""
        row = self._db.execute(
            "SELECT group_id, seed, versions, task FROM episodes JOIN groups USING (group_id) WHERE episode_id = ?",
            (episode_id,),
        ).fetchone()
        if row is None or not self._granted(lease_id, episode_id):
            return None
        return Leased(row["group_id"], unpack(row["task"]).task_id, row["seed"], unpack(row["versions"]))

    def workers_of(self, trajectory_ids: Iterable[str]) -> dict[str, str]:
        """The worker that played the episode of each trajectory; those of which none is known are left out."""
        # A trajectory has its episode's id, <group>/<number>, or that with / and more after it.
        episodes = {name: "/".join(name.split("/")[:2]) for name in trajectory_ids}
        rows = self._db.execute(
            "SELECT episode_id, worker FROM episodes WHERE episode_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(episodes.values())),),
        )
        workers = {row["episode_id"]: row["worker"] for row in rows}
        return {name: worker for name, episode in episodes.items() if (worker := workers.get(episode))}

    def held(self, worker: str) -> dict[str, int]:
        """Episodes that a worker has leased, by kind."""
        rows = self._db.execute(
            "SELECT kind, COUNT(*) AS n FROM episodes JOIN groups USING (group_id)"
            " WHERE episodes.state = 'leased' AND worker = ? GROUP BY kind",
            (worker,),
        )
        return {row["kind"]: row["n"] for row in rows}

    def playing(self) -> dict[str, int]:
        """Episodes that each worker has leased."""
        rows = self._db.execute("SELECT worker, COUNT(*) AS n FROM episodes WHERE state = 'leased' GROUP BY worker")
        return {row["worker"]: row["n"] for row in rows}

    def leases_of(self, worker: str) -> list[str]:
        """Leases that a worker holds."""
        rows = self._db.execute("SELECT lease_id FROM episodes WHERE state = 'leased' AND worker = ?", (worker,))
        return [row["lease_id"] for row in rows]

    def episodes(self, group_id: str) -> list[Episode]:
        """The episodes of a group that are in, members in order."""
        rows = self._db.execute(
            "SELECT episode FROM episodes WHERE group_id = ? AND state = 'done' ORDER BY episode_id", (group_id,)
        )
        return [_decompressed(row["episode"]) for row in rows]

    def _ranges_played(self, group_id: str) -> list[dict[str, list[int]]]:
        """Oldest and newest version of each policy, for each episode of a group that is in. A policy without a turn in
        an episode is not in that episode's map."""
        rows = self._db.execute(
            "SELECT played_versions FROM episodes WHERE group_id = ? AND state = 'done'", (group_id,)
        )
        return [json.loads(row["played_versions"]) for row in rows]

    def group(self, group_id: str, policy: str) -> Group:
        """Trajectories of `policy` in the episodes of a group that are in."""
        row = self._db.execute("SELECT task FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        return Group(group_id, unpack(row["task"]), tuple(trajectories_of(self.episodes(group_id), policy)))

    def kind_of(self, episode_id: str) -> Kind | None:
        """Kind of an episode; None if the run has no such episode."""
        row = self._db.execute(
            "SELECT kind FROM episodes JOIN groups USING (group_id) WHERE episode_id = ?", (episode_id,)
        ).fetchone()
        return row and row["kind"]

    def task(self, group_id: str) -> Task:
        return unpack(self._db.execute("SELECT task FROM groups WHERE group_id = ?", (group_id,)).fetchone()[0])

    def complete_groups(self) -> list[tuple[str, str]]:
        """Policy and group of each part that the data algorithms have not decided on yet, in the order of arrival."""
        rows = self._db.execute("SELECT policy, group_id FROM policy_groups WHERE state = 'complete' ORDER BY arrival")
        return [(row["policy"], row["group_id"]) for row in rows]

    def states(self) -> list[StateRow]:
        """Everything that the data algorithms had learned when it was last written down."""
        rows = self._db.execute(
            "SELECT name, '', x'', state FROM states UNION ALL SELECT name, attribute, key, value FROM state_rows"
        )
        return [tuple(row) for row in rows]

    def groups(self, policy: str, state: Literal["ready", "used"]) -> list[PolicyGroup]:
        """The policy's groups of that state, in the order of tasks."""
        rows = self._db.execute(
            "SELECT group_id, arrival, oldest_version, newest_version, (SELECT COUNT(*) FROM batches"
            " WHERE policy = policy_groups.policy AND group_id = policy_groups.group_id) AS batches"
            " FROM policy_groups WHERE policy = ? AND state = ? ORDER BY position",
            (policy, state),
        )
        return [PolicyGroup(*row) for row in rows]

    def gone_back(self) -> dict[str, int]:
        """For each policy whose trainer went back and has not come as far again: the newest version there ever was."""
        rows = self._db.execute("SELECT policy, most FROM trainers WHERE most > made")
        return {row["policy"]: row["most"] for row in rows}

    def committed_versions(self) -> dict[str, int]:
        """Newest committed version of each policy that has a trainer, -1 where there is none."""
        return {row["policy"]: row["committed"] for row in self._db.execute("SELECT policy, committed FROM trainers")}

    def epoch(self, policy: str) -> int:
        """The epoch of the trainer that claimed the policy last; 0: nobody has."""
        return self._trainer(policy)["epoch"]

    def count_groups(self) -> int:
        """Training groups ever opened."""
        latest = "SELECT COALESCE(MAX(position) + 1, 0) FROM groups WHERE kind = 'train'"  # positions have no gaps
        return self._db.execute(latest).fetchone()[0]

    def batches_made(self, policy: str) -> int:
        """Number of the policy's batches, without those that a claim or a refusal has undone: the next batch's step."""
        return self._trainer(policy)["made"]

    def batch(self, policy: str, step: int) -> list[str]:
        """The groups that are written down for the policy's batch `step`."""
        rows = self._db.execute(
            "SELECT group_id FROM batches WHERE policy = ? AND step = ? ORDER BY place", (policy, step)
        )
        return [row["group_id"] for row in rows]

    def count_by_state(self, policy: str) -> dict[str, int]:
        """The policy's groups by state, as far as they are still kept."""
        rows = self._db.execute("SELECT state, n FROM policy_group_counts WHERE policy = ? AND n > 0", (policy,))
        return {row["state"]: row["n"] for row in rows}

    def unused(self, policy: str, oldest_version: int) -> tuple[int, int]:
        """Numbers of the policy's groups that are ready, and of those that may become ready, counting only groups
        without tokens older than that version; an open group counts by the version that it was opened for."""
        rows = self._db.execute(
            "SELECT state = 'ready' AS ready, COUNT(*) AS n FROM policy_groups WHERE policy = ?"
            " AND state IN ('open', 'complete', 'ready') AND oldest_version >= ? GROUP BY 1",
            (policy, oldest_version),
        )
        counts = {row["ready"]: row["n"] for row in rows}
        return counts.get(1, 0), counts.get(0, 0)

    def count_open(self, policy: str, oldest_version: int) -> int:
        """Number of the policy's open groups that were opened for that version."""
        open_groups = "SELECT COUNT(*) FROM policy_groups WHERE policy = ? AND state = 'open' AND oldest_version = ?"
        return self._db.execute(open_groups, (policy, oldest_version)).fetchone()[0]

    def keep_share(self, policy: str) -> tuple[float, float]:
        """Share of a policy's newest groups that were kept for its trainer, and the number of groups behind that share.
        The share is 1 until a group is refused by a data algorithm, or has no turn of the policy."""
        row = self._db.execute("SELECT kept, seen FROM keep_shares WHERE policy = ?", (policy,)).fetchone()
        kept, seen = (row["kept"], row["seen"]) if row else (0.0, 0.0)  # of the newest 256 or so, see `_weigh`
        return (kept + _KEEP_PRIOR) / (seen + _KEEP_PRIOR), seen + _KEEP_PRIOR

    def count_dropped(self, policy: str) -> int:
        """The policy's groups that were ever dropped."""
        dropped = "SELECT COALESCE(SUM(n), 0) FROM counts WHERE policy = ? AND name LIKE 'dropped/%'"
        return self._db.execute(dropped, (policy,)).fetchone()[0]

    def count_episodes(self) -> dict[str, int]:
        """Episodes by state, as far as they are still kept."""
        rows = self._db.execute("SELECT state, COUNT(*) AS n FROM episodes GROUP BY state")
        return dict.fromkeys(_EPISODE_STATES, 0) | {row["state"]: row["n"] for row in rows}

    def counts(self, policy: str = "") -> dict[str, int]:
        """Totals of failed, dropped and skipped work by name, as in the table `counts`: of whole episodes and tasks
        (policy ""), or of a policy's groups."""
        rows = self._db.execute("SELECT name, n FROM counts WHERE policy = ?", (policy,))
        return {row["name"]: row["n"] for row in rows}

    def count_causes(self, kind: Literal["failed", "dropped"], policy: str = "") -> dict[str, int]:
        """Episodes that failed, or a policy's groups that were dropped, by cause."""
        totals = self.counts(policy)
        return {name.removeprefix(f"{kind}/"): n for name, n in totals.items() if name.startswith(f"{kind}/")}

    def last_failures(self) -> dict[str, str]:
        """The newest failed episode of each cause, in words."""
        rows = self._db.execute("SELECT name, last FROM counts WHERE name LIKE 'failed/%'")
        return {row["name"].removeprefix("failed/"): row["last"] for row in rows}

    def put_aside(self) -> list[dict[str, Any]]:
        """The newest groups that trainers refused: policy, group, step, trajectory, who sent it and why."""
        newest = "SELECT * FROM quarantine ORDER BY step DESC, group_id LIMIT 20"
        return [dict(row) for row in self._db.execute(newest)]

    def evaluations(self, state: str | None = None) -> dict[str, dict[str, int]]:
        """Versions of the policies in every evaluation, by its name; with `state`, of those with a group in it."""
        wanted = "policy = ''" + (" AND state = :state" if state else "")
        # CROSS JOIN fixes the order for SQLite's planner: the few rows of that state first, then the group of each.
        rows = self._db.execute(
            f"SELECT evaluation, versions FROM policy_groups CROSS JOIN groups USING (group_id) WHERE {wanted}"
            " GROUP BY evaluation ORDER BY MIN(groups.rowid)",
            {"state": state},
        )
        return {row["evaluation"]: unpack(row["versions"]) for row in rows}

    def is_under_way(self, evaluation: str) -> bool:
        """True while groups of it are open. Asked with every message, so it stops at the first open one (EXISTS)."""
        query = (
            "SELECT EXISTS (SELECT 1 FROM policy_groups CROSS JOIN groups USING (group_id)"
            " WHERE policy = '' AND state = 'open' AND evaluation = ?)"
        )
        return bool(self._db.execute(query, (evaluation,)).fetchone()[0])


class EpisodeReader:
    """Reader of a ledger's evaluated episodes, over a connection of its own, for use in the thread that makes it: the
    event loop goes on changing other rows of the ledger meanwhile."""

    def __init__(self, path: Path | str):
        self._db = sqlite3.connect(path, isolation_level=None)

    def close(self) -> None:
        self._db.close()

    def evaluated(self, name: str) -> list[tuple[str, str]]:
        """Group and name of the episodes of an evaluation that are in, in the order of tasks."""
        return self._db.execute(
            "SELECT group_id, episode_id FROM groups JOIN policy_groups USING (group_id) JOIN episodes USING (group_id)"
            " WHERE evaluation = ? AND policy_groups.state = 'ready' AND episodes.state = 'done'"
            " ORDER BY groups.position, episode_id",
            (name,),
        ).fetchall()

    def task(self, group_id: str) -> Task:
        return unpack(self._db.execute("SELECT task FROM groups WHERE group_id = ?", (group_id,)).fetchone()[0])

    def episode(self, episode_id: str) -> Episode:
        row = self._db.execute("SELECT episode FROM episodes WHERE episode_id = ?", (episode_id,)).fetchone()
        return _decompressed(row[0])


def trajectories_of(episodes: Iterable[Episode], policy: str) -> list[Trajectory]:
    """Trajectories of a policy in these episodes, without those that have no turn or failed for a cause outside the
    policies."""
    parts = (part for episode in episodes for part in episode.trajectories)
    return [part for part in parts if part.policy == policy and part.turns and part.status in COUNTED_STATUSES]


def _played_versions(episode: Episode) -> dict[str, tuple[int, int]]:
    """Oldest and newest version that sampled tokens of each policy's trajectories (`trajectories_of`) in an episode."""
    found = {}
    for policy in {part.policy for part in episode.trajectories}:
        parts = trajectories_of([episode], policy)
        if versions := [version for part in parts for turn in part.turns for version in turn.versions]:
            found[policy] = min(versions), max(versions)
    return found


def _compressed(episode: Episode) -> bytes:
    """Episode as its row holds it. It compresses well: turns of an episode repeat the prompts before them."""
    return zstandard.ZstdCompressor(level=1).compress(pack(episode))


def _decompressed(row: bytes) -> Episode:
    return unpack(zstandard.ZstdDecompressor().decompress(row))
