"""One run under supervision: start the roles in order, follow them on the screen, stop them, report a failure."""

import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from flowjax.launch.screen import Screen
from flowjax.launch.supervisor import Role, RoleFailed, Supervisor, on_signals
from flowjax.monitor.metrics import MetricsWriter, NewStatus, Progress, printable, write_status
from flowjax.monitor.prometheus import write_targets
from flowjax.monitor.trouble import explain, probe

OK, ROLE_FAILED = 0, 1
_REFRESH_S = 0.4
_PROBE_EVERY_S = 2.0
_UNUSED_GROUPS = 32  # in a row, before it is said: an algorithm that keeps one in ten refuses 32 in a row now and then
# Groups that no trainer gets, by their name in the dataflow's status. Those that were too old would have been of use.
_UNUSED = {
    "failed": "with failed episodes",
    "silent": "without a turn of it",
    "not_kept": "refused by config.dataflow.algorithms",
    "put_aside": "put aside",
}
_PLAIN_WIDTH = 140  # columns where there is no terminal to ask
_SHOWN = (
    "down",
    "moved",
    "paused",
    "restart",
    "failed",
    "kill",
)  # events worth a line that stays; the screen shows the others


class RunConsole(Console):
    """Console of a run that goes on after its output has been closed, as in `... | head`."""

    def __init__(self):
        super().__init__(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):  # rich sends all further output to /dev/null, then exits
            super().on_broken_pipe()


class UnusedGroups:
    """Finds policies whose groups all come to nothing, in the dataflow's status: their trainers wait, and nothing else
    is wrong."""

    def __init__(self, run_dir: Path):
        self._status = NewStatus(run_dir, "dataflow")
        self._before: dict[str, tuple[int, Counter[str]]] = {}  # newest version and unused groups at the last good one
        self._said: set[str] = set()

    def warnings(self) -> Iterator[str]:
        """A sentence about each policy with `_UNUSED_GROUPS` such groups in a row, once for each row."""
        status = self._status.read()
        for policy, counts in status.get("policies", {}).items():
            now = Counter({**counts["dropped"], "put_aside": counts["quarantined_groups"]})
            version, before = self._before.get(policy, (None, now))
            if counts["ready_groups"] or counts["committed"] != version:
                self._before[policy] = counts["committed"], now
                self._said.discard(policy)
                continue
            causes = Counter({cause: now[cause] - before[cause] for cause in _UNUSED})
            if causes.total() < _UNUSED_GROUPS or policy in self._said:
                continue
            self._said.add(policy)
            shares = ", ".join(f"{n} {_UNUSED[cause]}" for cause, n in causes.most_common() if n)
            yield f"none of the last {causes.total()} groups of {policy} can be trained on ({shares}){_reason(status)}"


def _reason(status: Mapping[str, Any]) -> str:
    """The newest failure of the kind that most episodes failed by, or the newest reason for putting a group aside."""
    if failed := status["failed"]:
        most = max(failed, key=lambda cause: failed[cause])
        return f"; most failed episodes: {most}, the last by {printable(status['last_failures'].get(most, '?'))[:300]}"
    return f"; {printable(status['put_aside'][0]['reason'])[:300]}" if status["put_aside"] else ""


class RunSession:
    """Runs roles of one run folder until `done`. Signals: the first stops in order, the second at once.

    Args:
        steps: last step of each policy.
        warm_steps: steps of the warm start of each base that is made first.
        apart: each policy has a trainer of its own, and these work side by side.
        stop_order: waves of roles that stop one after the other; all others follow.
        look: called after each refresh of the screen with the run's progress.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        steps: Mapping[str, int],
        apart: bool = False,
        warm_steps: Mapping[str, int] | None = None,
        stop_order: Sequence[Sequence[str]] = (),
        console: Console | None = None,
        look: Callable[[Progress], None] | None = None,
    ):
        self._run_dir, self._steps, self._warm_steps, self._stop_order = run_dir, steps, warm_steps, stop_order
        self._apart = apart
        self._console = console or RunConsole()
        self._look = look
        self._metrics, self._unused = MetricsWriter(run_dir), UnusedGroups(run_dir)
        self._interrupted: signal.Signals | None = None
        self.failure: RoleFailed | None = None  # that ended the run
        self.started_s = time.time()

    async def run(
        self,
        roles: Callable[[], Sequence[Role]],
        done: Callable[[Supervisor, Progress], Awaitable[None]],
        *,
        first: Sequence[Role] = (),
    ) -> int:
        """Run each of `first` to its end, then start `roles` and keep them up until `done` returns.

        Returns 0, 1 when a role failed for good, or 128 + n after signal n.
        """
        supervisor = Supervisor(self._run_dir / "logs", on_event=self._on_event)
        self.screen = Screen(
            Progress(self._run_dir, apart=self._apart),
            steps=self._steps,
            warm_steps=self._warm_steps,
            states=supervisor.states,
            console=self._console,
        )
        work = asyncio.create_task(supervisor.until(self._work(supervisor, roles, done, first)))
        beside = [asyncio.create_task(self._refresh()), asyncio.create_task(self._watch_folder())]
        self._listen(supervisor, work)
        try:
            await work
        except RoleFailed as error:
            self.failure = error
        except asyncio.CancelledError:  # by the first signal: see `_listen`
            self.say("stopping; press Ctrl-C again to stop at once")
        finally:
            await supervisor.stop(*self._stop_order)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            self._write_status()
            with contextlib.suppress(OSError):
                self.screen.close()
        if self.failure is not None:
            self._console.print(self.failure.report(), markup=False, highlight=False, soft_wrap=True)
            return ROLE_FAILED
        return 128 + self._interrupted if self._interrupted else OK

    async def _work(
        self,
        supervisor: Supervisor,
        roles: Callable[[], Sequence[Role]],
        done: Callable[[Supervisor, Progress], Awaitable[None]],
        first: Sequence[Role],
    ) -> None:
        for role in first:
            supervisor.start(role)
            await supervisor.ended(role.name)
        for role in roles():
            supervisor.start(role)
        await done(supervisor, self.screen.progress)

    async def _refresh(self) -> None:
        """Redraw the screen until cancelled. An error is printed once, not at each of the redraws that repeat it."""
        said = ""
        while True:
            try:
                self.screen.refresh()
                for found in self._unused.warnings():
                    self.say(f"warning: {found}")
                if self._look is not None:
                    self._look(self.screen.progress)
            except Exception as error:
                if (problem := explain(error) or f"{type(error).__name__}: {error}") != said:
                    self.say(f"the screen could not be brought up to date: {problem}")
                said = problem
            self._write_status()
            with contextlib.suppress(OSError):
                write_targets(self._run_dir)
            await asyncio.sleep(_REFRESH_S)

    async def _watch_folder(self) -> None:
        """Say when the run's folder cannot be written, for which all roles wait, and when it can again."""
        said = ""
        while True:
            if (problem := probe(self._run_dir)) and not said:
                self.say(f"paused: {problem}; the run goes on by itself then")
            elif said and not problem:
                self.say(f"goes on: {self._run_dir} can be written again")
            said = problem
            await asyncio.sleep(_PROBE_EVERY_S)

    def say(self, text: str) -> None:
        """Print a line that stays, from any thread."""
        with contextlib.suppress(OSError):  # the output may be a file on the full disk
            self.screen.say(text)

    def _write_status(self) -> None:
        """Write `status-launch.json`, from which `--status` knows the roles, those that are down included."""
        with contextlib.suppress(OSError):
            roles = {name: asdict(state) for name, state in self.screen.states.items()}
            write_status(self._run_dir, "launch", {"roles": roles})

    def _listen(self, supervisor: Supervisor, work: asyncio.Task[None]) -> None:
        # The first signal cancels the work, whose `finally` stops the roles in order; a second one kills them.
        def stop(number: signal.Signals) -> None:
            if self._interrupted or work.done():
                supervisor.kill()
                return
            self._interrupted = number
            work.cancel()

        on_signals(stop)

    def _on_event(self, role: str, event: str, text: str) -> None:
        shown = self._console.is_terminal  # elsewhere the screen prints events itself, from the metrics file
        try:
            self._metrics.write("run", role=role, event=event, text=text)
        except OSError:  # a full disk must not end the supervision, nor silence it
            shown = True
        if event in _SHOWN and shown:
            self.say(f"{role}: {event} {text}".rstrip())
