"""A policy as the dataflow sees it: its settings, and the versions of it that are served and committed."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from flowjax.run import Policy, Run


@dataclass(eq=False, slots=True)
class PolicyStatus:
    """State of a policy that leases, groups, batches and evaluations share."""

    run: Run
    settings: Policy
    serving: int = -1  # newest version that the engines serve; -1 before version 0
    committed: int = -1  # newest version that its trainer has made
    is_waiting: bool = False  # its trainer last asked in vain
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
        return max(self.committed - self.settings.trainer.keep_checkpoints, 0)

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

        Where the ledger is new, or older than the checkpoints that this process found when it started, those tell.
        """
        made = max(batches, self.committed, *self.run.config.eval.versions, 0)
        return max(made, self._found if made else self.newest_checkpoint())

    def flush_checkpoint(self, version: int) -> None:
        """Have a checkpoint on the disk, not only in memory that a power cut loses. Changes nothing here: it may run in
        a thread. Files that are not there are left out: a version of one's own may be kept elsewhere."""
        folder = self.checkpoints / str(version)
        for path in [*folder.rglob("*"), folder, self.checkpoints]:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
