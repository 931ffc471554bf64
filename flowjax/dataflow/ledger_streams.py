"""What becomes of streams once they are settled: kept or dropped, put into batches, used up and forgotten."""

from collections.abc import Callable, Mapping, Sequence

from flowjax.dataflow.algorithms.state import Learnt
from flowjax.dataflow.ledger_queries import LedgerQueries, Stream
from flowjax.dataflow.tables import Transaction

Selection = tuple[list[str] | None, Mapping[str, Sequence[str]]]  # groups of a batch or None, and to drop, by cause

NOTHING = Learnt()


class LedgerStreams(LedgerQueries):
    """The trainers' side of the ledger."""

    def transaction(self) -> Transaction:
        """Everything or nothing of what is done inside."""
        return Transaction(self._db)

    def judge(self, policy: str, group_id: str, *, keep: bool, learnt: Learnt = NOTHING) -> None:
        """Make a settled stream ready, or drop it, together with what the data algorithms have learnt from it."""
        with Transaction(self._db):
            self._db.execute(
                "UPDATE streams SET state = ? WHERE policy = ? AND group_id = ? AND state = 'settled'",
                ("ready" if keep else "dropped", policy, group_id),
            )
            self._count("dropped/not_kept", policy, not keep)
            self._keep(learnt)

    def assign(
        self, policy: str, step: int, select: Callable[[list[Stream], list[Stream]], Selection]
    ) -> list[str] | None:
        """The groups of the policy's batch `step`: those written down for it, or else what `select` makes of the ready
        streams and of those used before; None when it chooses nothing.

        Batches of later steps are undone: the trainer has lost the checkpoints that consumed them.
        """
        with Transaction(self._db):
            self._undo_after(policy, step)
            if written := self.batch(policy, step):
                return written
            chosen, dropped = select(self.streams(policy, "ready"), self.streams(policy, "used"))
            for cause, group_ids in dropped.items():
                self._drop(policy, group_ids, cause)
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
        if self.batches(policy) <= step + 1:
            return
        self._db.execute("DELETE FROM batches WHERE policy = ? AND step > ?", (policy, step))
        self._db.execute(
            "UPDATE streams SET state = 'ready' WHERE policy = ? AND state = 'used' AND NOT EXISTS"
            " (SELECT 1 FROM batches WHERE policy = streams.policy AND group_id = streams.group_id)",
            (policy,),
        )

    def drop(self, policy: str, group_ids: Sequence[str], cause: str) -> None:
        """Drop a policy's part of these groups."""
        with self.transaction():
            self._drop(policy, group_ids, cause)

    def commit(self, policy: str, version: int, *, learnt: Learnt = NOTHING) -> None:
        """Note that the policy's trainer has committed `version`, and what the data algorithms make of it."""
        with Transaction(self._db):
            self._db.execute("INSERT OR REPLACE INTO commits VALUES (?, ?)", (policy, version))
            self._keep(learnt)

    def close_batches(self, policy: str, before_step: int) -> None:
        """Forget the policy's batches below `before_step`: no checkpoint that is kept needs them again."""
        with Transaction(self._db):
            self._db.execute(
                "UPDATE streams SET state = 'closed' WHERE policy = ? AND state = 'used' AND ? >"
                " (SELECT MAX(step) FROM batches WHERE policy = streams.policy AND group_id = streams.group_id)",
                (policy, before_step),
            )
            self._db.execute(
                "DELETE FROM batches WHERE policy = ? AND step < ? AND NOT EXISTS (SELECT 1 FROM streams"
                " WHERE policy = batches.policy AND group_id = batches.group_id AND state = 'used')",
                (policy, before_step),
            )
            self._forget()

    def close_evaluation(self, name: str) -> None:
        """Forget the episodes of a finished evaluation."""
        with Transaction(self._db):
            self._db.execute(
                "UPDATE streams SET state = 'closed' WHERE policy = ''"
                " AND group_id IN (SELECT group_id FROM groups WHERE evaluation = ?)",
                (name,),
            )
            self._forget()

    def _forget(self) -> None:
        """Delete what is over: episodes that no stream will ask for again, their streams and groups. The newest
        training group stays, which says how many there were, and the first one of each evaluation."""
        over = "state IN ('closed', 'dropped')"
        self._db.execute(
            "DELETE FROM episodes WHERE state IN ('done', 'quarantined', 'cancelled') AND NOT EXISTS"
            f" (SELECT 1 FROM streams WHERE group_id = episodes.group_id AND NOT {over})"
        )
        self._db.execute(
            f"DELETE FROM streams WHERE {over} AND (policy != '' OR position > 0)"
            " AND NOT EXISTS (SELECT 1 FROM episodes WHERE group_id = streams.group_id)"
        )
        self._db.execute(
            "DELETE FROM groups WHERE NOT EXISTS (SELECT 1 FROM streams WHERE group_id = groups.group_id)"
            " AND (kind = 'eval' OR position < (SELECT MAX(position) FROM groups WHERE kind = 'train'))"
        )

    def _drop(self, policy: str, group_ids: Sequence[str], cause: str) -> None:
        self._db.executemany(
            "UPDATE streams SET state = 'dropped' WHERE policy = ? AND group_id = ?", [(policy, g) for g in group_ids]
        )
        self._count(f"dropped/{cause}", policy, len(group_ids))

    def _count(self, name: str, policy: str = "", n: int = 1, last: str = "") -> None:
        if n:
            self._db.execute(
                "INSERT INTO counts VALUES (?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET n = n + excluded.n, last = excluded.last",
                (name, policy, int(n), last[:500]),
            )

    def _keep(self, learnt: Learnt) -> None:
        self._db.executemany("INSERT OR REPLACE INTO states VALUES (?, ?)", list(learnt.whole.items()))
        self._db.executemany(
            "INSERT OR REPLACE INTO state_rows VALUES (?, ?, ?, ?)", [row for row in learnt.rows if row[3] is not None]
        )
        self._db.executemany(
            "DELETE FROM state_rows WHERE name = ? AND attribute = ? AND key = ?",
            [row[:3] for row in learnt.rows if row[3] is None],
        )
