"""What the ledger's tables say; nothing here changes them."""

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from flowjax.dataflow.algorithms.state import Table
from flowjax.records import Episode, Group, Task, Trajectory, unpack

Kind = Literal["train", "eval"]
_EPISODE_STATES = ("waiting", "leased", "done", "quarantined", "cancelled")


@dataclass(frozen=True, slots=True)
class Stream:
    """A policy's part of a group: the how-manieth to be settled, the versions of its oldest and newest token, and in
    how many batches it has been."""

    group_id: str
    arrival: int
    oldest_version: int
    newest_version: int
    batches: int


class LedgerQueries:
    """Questions to the tables of a run."""

    _db: sqlite3.Connection

    def episodes(self, group_id: str) -> list[Episode]:
        """The episodes of a group that are in, members in order."""
        rows = self._db.execute(
            "SELECT episode FROM episodes WHERE group_id = ? AND state = 'done' ORDER BY episode_id", (group_id,)
        )
        return [unpack(row["episode"]) for row in rows]

    def group(self, group_id: str, policy: str) -> Group:
        """What `policy` did in the episodes of a group that are in."""
        row = self._db.execute("SELECT task FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        return Group(group_id, unpack(row["task"]), tuple(trajectories_of(self.episodes(group_id), policy)))

    def kind_of(self, episode_id: str) -> Kind | None:
        """Kind of an episode; None of one that the run has not."""
        row = self._db.execute(
            "SELECT kind FROM episodes JOIN groups USING (group_id) WHERE episode_id = ?", (episode_id,)
        ).fetchone()
        return row and row["kind"]

    def task(self, group_id: str) -> Task:
        return unpack(self._db.execute("SELECT task FROM groups WHERE group_id = ?", (group_id,)).fetchone()[0])

    def settled(self) -> list[tuple[str, str]]:
        """Policy and group of the streams that the data algorithms have not judged yet, in the order of arrival."""
        rows = self._db.execute("SELECT policy, group_id FROM streams WHERE state = 'settled' ORDER BY arrival")
        return [(row["policy"], row["group_id"]) for row in rows]

    def states(self) -> dict[str, Any]:
        """What the data algorithms had learnt when it was last written down, by name."""
        states = {row["name"]: unpack(row["state"]) for row in self._db.execute("SELECT name, state FROM states")}
        tables: dict[tuple[str, str], dict[Any, Any]] = {}
        for row in self._db.execute("SELECT name, attribute, key, value FROM state_rows"):
            tables.setdefault((row["name"], row["attribute"]), {})[unpack(row["key"])] = unpack(row["value"])
        for (name, attribute), rows in tables.items():
            states[name][attribute] = Table(rows)
        return states

    def streams(self, policy: str, state: Literal["ready", "used"]) -> list[Stream]:
        """The policy's streams of that state, in the order of tasks."""
        rows = self._db.execute(
            "SELECT group_id, arrival, oldest_version, newest_version, (SELECT COUNT(*) FROM batches"
            " WHERE policy = streams.policy AND group_id = streams.group_id) AS batches"
            " FROM streams WHERE policy = ? AND state = ? ORDER BY position",
            (policy, state),
        )
        return [Stream(*row) for row in rows]

    def commits(self) -> dict[str, int]:
        """Newest committed version of each policy that has one."""
        return {row["policy"]: row["version"] for row in self._db.execute("SELECT policy, version FROM commits")}

    def count_groups(self) -> int:
        """Training groups ever opened."""
        latest = "SELECT COALESCE(MAX(position) + 1, 0) FROM groups WHERE kind = 'train'"  # positions have no gaps
        return self._db.execute(latest).fetchone()[0]

    def batches(self, policy: str) -> int:
        """Batches that the policy's trainer has been given, those that it has lost again left out."""
        return self._db.execute(
            "SELECT COALESCE(MAX(step) + 1, 0) FROM batches WHERE policy = ?", (policy,)
        ).fetchone()[0]

    def batch(self, policy: str, step: int) -> list[str]:
        """The groups that are written down for the policy's batch `step`."""
        rows = self._db.execute(
            "SELECT group_id FROM batches WHERE policy = ? AND step = ? ORDER BY place", (policy, step)
        )
        return [row["group_id"] for row in rows]

    def count_streams(self, policy: str) -> dict[str, int]:
        """The policy's streams by state, as far as they are still kept."""
        rows = self._db.execute("SELECT state, n FROM stream_counts WHERE policy = ? AND n > 0", (policy,))
        return {row["state"]: row["n"] for row in rows}

    def count_dropped(self, policy: str) -> int:
        """The policy's streams that were ever dropped."""
        dropped = "SELECT COALESCE(SUM(n), 0) FROM counts WHERE policy = ? AND name LIKE 'dropped/%'"
        return self._db.execute(dropped, (policy,)).fetchone()[0]

    def count_episodes(self) -> dict[str, int]:
        """Episodes by state, as far as they are still kept."""
        rows = self._db.execute("SELECT state, COUNT(*) AS n FROM episodes GROUP BY state")
        return dict.fromkeys(_EPISODE_STATES, 0) | {row["state"]: row["n"] for row in rows}

    def counts(self) -> dict[str, dict[str, int]]:
        """Totals of what came to nothing by policy ("" for whole episodes) and name (see `flowjax.dataflow.tables`)."""
        totals: dict[str, dict[str, int]] = {}
        for row in self._db.execute("SELECT policy, name, n FROM counts"):
            totals.setdefault(row["policy"], {})[row["name"]] = row["n"]
        return totals

    def last_failures(self) -> dict[str, str]:
        """The newest failed episode of each cause, in words."""
        rows = self._db.execute("SELECT name, last FROM counts WHERE name LIKE 'failed/%'")
        return {row["name"].removeprefix("failed/"): row["last"] for row in rows}

    def evaluations(self, state: str | None = None) -> dict[str, dict[str, int]]:
        """Versions of the policies in every evaluation, by its name; with `state`, of those with groups in it."""
        wanted = "policy = ''" + (" AND state = :state" if state else "")
        rows = self._db.execute(
            f"SELECT evaluation, versions FROM streams CROSS JOIN groups USING (group_id) WHERE {wanted}"
            " GROUP BY evaluation ORDER BY MIN(groups.rowid)",
            {"state": state},
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


def trajectories_of(episodes: Iterable[Episode], policy: str) -> list[Trajectory]:
    """What a policy did in them; parts without a turn say nothing."""
    return [part for episode in episodes for part in episode.trajectories if part.policy == policy and part.turns]
