"""A run in the terminal: one live screen, plain lines where there is none, the table at the end; and its state, read
from its folder at any time: `python -m flowjax.launch --status=<run folder>`."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowjax.launch.machine import check_unused
from flowjax.launch.pool import pool_lines
from flowjax.monitor.metrics import (
    NOT_FINITE,
    Progress,
    RoleState,
    clock,
    count,
    fixed,
    interval,
    measured,
    number,
    percent,
    printable,
    read_metrics,
    read_status,
    scientific,
    sparkline,
)
from flowjax.run import BASE_NAME, read_run

_COLOURS = {
    "up": "green",
    "done": "green",
    "starting": "yellow",
    "waiting": "yellow",
    "paused": "bold yellow",
    "failed": "bold red",
}
_WIDE = 150  # columns of a terminal that has room for two figures side by side


class Screen:
    """Follows a run folder. Call `refresh` two to four times a second, `close` at the end.

    On a terminal it is one screen that redraws itself; elsewhere every step, evaluation and event is a line.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        steps: Mapping[str, int],
        warm_steps: Mapping[str, int] | None = None,
        states: Mapping[str, RoleState],
        console: Console,
    ):
        self._run_dir, self._steps, self._warm_steps = progress.run_dir, steps, warm_steps or {}
        self.progress, self._warm = progress, Progress(self._run_dir / "warm_start")
        self.states, self._console = states, console
        self._started_s = time.time()
        self._live: Live | None = None
        self.progress.update()  # lines from before a resume count, but are not shown again
        self._warm.update()
        self._warm_shown = self._warm_tenths()
        self._warned: set[tuple[str, str]] = set()  # policies, and the rules that they broke
        if console.is_terminal and not console.is_dumb_terminal:  # rich draws nothing on one that cannot go back
            self._live = Live(self.render(), console=console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)

    def refresh(self) -> None:
        for entry in self.progress.update():
            shown = self._live is None or entry.get("kind") == "eval"
            if shown and (line := plain_line(entry, self.progress, self._steps)):
                self.say(line)
        self._warm.update()
        for finding in self.progress.symptoms:
            if (named := (finding.policy, finding.rule)) not in self._warned:
                self._warned.add(named)
                self.say(f"warning: {finding}")
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
        elif (tenths := self._warm_tenths()) > self._warm_shown:
            self._warm_shown = tenths
            loss = fixed(self._warm.recent("loss"))
            of = sum(self._warm_steps.values())
            self.say(f"warm start {self._warm.step}/{of}  loss {loss}  {self._warm_left()} left")

    def say(self, text: str) -> None:
        """A line that stays, above the screen."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.refresh()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        warnings = [Text(f"warning: {warning}", "bold yellow") for warning in self.progress.symptoms]
        # Warnings last: a small terminal cuts off the end, and each warning was also printed above the screen.
        parts = [self._bar(), self._numbers(), self._roles(), *warnings]
        return Panel(Group(*parts), title=Text(f"flowjax · {self._run_dir}"), subtitle="Ctrl-C stops", padding=(0, 1))

    def _warm_tenths(self) -> int:
        return 10 * self._warm.step // max(sum(self._warm_steps.values()), 1)

    def _warm_left(self) -> str:
        return clock(self._warm.remaining_s(self._warm_steps))

    def _bar(self) -> RenderableType:
        if any(name.startswith("warm_start") and state.phase != "done" for name, state in self.states.items()):
            name, done, of, left = "warm start", self._warm.step, sum(self._warm_steps.values()), self._warm_left()
        else:
            name, done, of = "step", self.progress.step, sum(self._steps.values())
            left = clock(self.progress.remaining_s(self._steps))
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        times = f"{clock(time.time() - self._started_s)} gone, {left} left"
        row.add_row(Text(f"{name} {done}/{of}", "bold"), ProgressBar(total=max(of, 1), completed=done), times)
        return row

    def _numbers(self) -> RenderableType:
        pairs = figures(self.progress, read_status(self._run_dir, "rollout"), read_status(self._run_dir, "dataflow"))
        columns = 2 if self._console.width >= _WIDE else 1
        table = Table.grid(padding=(0, 2), expand=True)
        for _ in range(columns):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(ratio=1)
        for start in range(0, len(pairs), columns):
            table.add_row(*(text for pair in pairs[start : start + columns] for text in pair))
        return table

    def _roles(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, state in self.states.items():
            runs = state.started_s and state.phase in ("up", "starting")
            since = clock(time.time() - state.started_s) if runs else ""
            restarts = f"{state.restarts} restart{'s' * (state.restarts != 1)}" if state.restarts else ""
            phase = Text(f"● {state.phase}", _COLOURS.get(state.phase, "dim"))
            table.add_row(name, phase, since, Text(restarts, "yellow"), Text(state.detail, "dim"))
        return table


def figures(progress: Progress, rollout: Mapping[str, Any], dataflow: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the figures on the screen; "-" for a value that is not known yet."""
    curve = "" if progress.several else _curve(progress.train, 24)  # lines of several policies alternate: a zigzag
    newest, version = max(progress.evals, default=0), count({**dataflow, **rollout}, "serving_version", "version")
    sampled, read = number(rollout, "sampled_tokens_per_s"), progress.rate("tokens_per_s")
    lag, lag_most = progress.recent("staleness_mean"), progress.last("staleness_max")
    k3, most = progress.recent("mismatch_kl"), progress.last("mismatch_max")
    no_signal = progress.recent("no_signal_share")
    return [
        ("success", f"{percent(progress.success())}  {curve}".rstrip()),
        ("reward", f"{fixed(progress.recent('reward_mean'))}, no signal in {percent(no_signal)} of groups"),
        ("replies", _replies(progress)),
        ("held out, before", interval(progress.evals.get(0))),
        ("held out, latest", interval(progress.evals.get(newest) if newest else None)),
        ("episodes/s", f"{fixed(number(rollout, 'episodes_per_s'), 1)}, {count(rollout, 'in_flight')} in flight"),
        ("tokens/s", f"{fixed(sampled, 0)} sampled, {fixed(read, 0)} read by the trainer"),
        ("staleness", f"{fixed(lag, 2)}, at most {fixed(lag_most, 0)}"),
        ("mismatch k3", f"{scientific(k3)}, log-prob off by {scientific(most)} at most"),
        ("seconds a step", phases(progress)),
        ("ready to train", f"{count(dataflow, 'ready_groups')} groups, engine at version {version}"),
        *(_policy(name, lines, dataflow) for name, lines in progress.by_policy.items() if progress.several),
    ]


def _curve(lines: Sequence[Mapping[str, Any]], width: int) -> str:
    return sparkline([value for line in lines if (value := number(line, "success_rate")) is not None], width)


def _replies(progress: Progress) -> str:
    """Shares of invalid replies and of those cut at the token limit, length in tokens, entropy."""
    tokens, entropy = fixed(progress.recent("reply_tokens_mean"), 1), fixed(progress.recent("entropy"), 2)
    invalid, cut = percent(progress.share("invalid_share")), percent(progress.share("cut_share"))
    return f"{invalid} invalid, {cut} cut, {tokens} tokens, entropy {entropy}"


def _policy(name: str, lines: Sequence[Mapping[str, Any]], dataflow: Mapping[str, Any]) -> tuple[str, str]:
    """Name and figures of one of several policies."""
    counts, entry = dataflow.get("policies", {}).get(name, {}), lines[-1]
    success, served = percent(number(entry, "success_rate")), f"serves {count(counts, 'version')}"
    lag, ready = f"lag {count(counts, 'lag')}", f"{count(counts, 'ready_groups')} ready"
    return name, f"step {entry.get('step')}, {success}, {served}, {lag}, {ready}  {_curve(lines, 12)}".rstrip()


def plain_line(entry: Mapping[str, Any], progress: Progress, steps: Mapping[str, int]) -> str:
    """One metrics entry in words; empty for kinds that are not shown."""
    kind = entry.get("kind")
    if kind == "train":
        step = entry.get("step")
        done = f"{entry.get('policy')}: step {step}" if progress.several else f"step {step}/{sum(steps.values())}"
        return (
            f"{done}  success {percent(number(entry, 'success_rate'))}"
            f"  reward {fixed(measured(entry, 'reward_mean'))}  invalid {percent(number(entry, 'invalid_share'))}"
            f"  no signal {percent(number(entry, 'no_signal_share'))}"
            f"  staleness {fixed(number(entry, 'staleness_mean'), 2)}  k3 {scientific(measured(entry, 'mismatch_kl'))}"
            f"  {fixed(number(entry, 'total_s'), 1)} s"
            f" (wait {fixed(number(entry, 'wait_s'), 1)}, step {fixed(number(entry, 'step_s'), 1)},"
            f" save {fixed(number(entry, 'save_s'), 2)})  {clock(progress.remaining_s(steps))} left"
        )
    if kind == "eval":
        return f"held out, version {entry.get('version', entry.get('step'))}: success {interval(entry, reasons=True)}"
    if kind == "run":
        return f"{entry.get('role', 'run')}: {entry.get('event', '')} {entry.get('text', '')}".rstrip()
    return ""


def summary(progress: Progress, *, wall_s: float, states: Mapping[str, RoleState] | None = None) -> RenderableType:
    """Table of a finished run."""
    table = Table(title=Text(f"{progress.run_dir}", "bold"), title_justify="left", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    last = max(progress.evals, default=0)
    before, after = progress.evals.get(0), progress.evals.get(last) if last else None
    totals, spent_s, per_step = progress.totals, progress.spent_s, max(len(progress.train), 1)
    table.add_row("held-out success before", interval(before))
    table.add_row("held-out success after", interval(after))
    first, last = (number(entry or {}, "success_rate") for entry in (before, after))
    if first is not None and last is not None:
        table.add_row("difference", f"{100 * (last - first):+.1f} points")
    trajectories, turns = count(totals, "episodes"), count(totals, "turns")
    table.add_row("steps", f"{progress.step}, {trajectories} trajectories, {turns} turns")
    table.add_row("trajectories/s", fixed(totals["episodes"] / spent_s if spent_s else None, 1))
    read, sampled = (totals[name] / spent_s if spent_s else None for name in ("row_tokens", "trained_tokens"))
    table.add_row("tokens/s", f"{fixed(read, 0)} read by the trainer, {fixed(sampled, 0)} of them sampled")
    names = {"wait_s": "wait for episodes", "step_s": "compute", "save_s": "save"}
    each = ", ".join(f"{label} {totals[name] / per_step:.2f}" for name, label in names.items())
    table.add_row("seconds per step", f"{totals['total_s'] / per_step:.2f} ({each})")
    for step, entry in sorted(progress.evals.items()):
        table.add_row(f"evaluation of version {step}", f"{fixed(number(entry, 'seconds'), 1)} s")
    shares = [value for entry in progress.train if (value := number(entry, "no_signal_share")) is not None]
    table.add_row("groups without signal", percent(sum(shares) / len(shares) if shares else None))
    first, newest = progress.share("invalid_share", first=True), progress.share("invalid_share")
    table.add_row("invalid replies", f"{percent(first)} in the first steps, {percent(newest)} in the last")
    for warning in progress.symptoms:
        table.add_row("warning", str(warning))
    k3 = [value for entry in progress.train if (value := number(entry, "mismatch_kl")) is not None]
    lost = sum(entry.get("mismatch_kl") in NOT_FINITE for entry in progress.train)
    worst = f"{scientific(max(k3, default=None))} worst step{f', not finite in {lost} steps' if lost else ''}"
    table.add_row("sampler-trainer mismatch, k3", f"{scientific(sum(k3) / len(k3) if k3 else None)} mean, {worst}")
    if restarted := [f"{name} {state.restarts}" for name, state in (states or {}).items() if state.restarts]:
        table.add_row("restarts", ", ".join(restarted))
    table.add_row("wall time of this launch", clock(wall_s))
    return table


def phases(progress: Progress) -> str:
    """Seconds of a step by phase."""
    names = {"wait_s": "wait", "step_s": "step", "save_s": "save"}
    parts = [f"{label} {fixed(progress.recent(name), 1)}" for name, label in names.items()]
    return f"{fixed(progress.recent('total_s'), 1)} = {' + '.join(parts)}"


# ------------------------------------------------------------------------------------------------------ status of a run

_SILENT_S = 10.0  # a role writes its status every second: one that has not for this long is shown as away
_ENDED = ("done", "stopped", "failed")  # phases that outlive the launcher


def render_status(run_dir: Path, now_s: float | None = None) -> Group:
    """Tables of the run's roles, of its policies, and of the workers that play for it.

    Raises:
        ConfigError: the folder holds no run.
    """
    run = read_run(run_dir)
    now_s = time.time() if now_s is None else now_s
    entries = read_metrics(run_dir)
    dataflow, rollout = read_status(run_dir, "dataflow"), read_status(run_dir, "rollout")
    train = [entry for entry in entries if entry.get("kind") == "train"]
    roles = Table("role", "state", "seen", "doing")
    states, warm = read_status(run_dir, "launch").get("roles", {}), Progress(run_dir / "warm_start")
    warm.update()
    launched = bool(check_unused(run_dir))
    over = {name for name, state in states.items() if state["phase"] in _ENDED or not launched}
    for name in states or ("rollout", "dataflow", "trainer"):
        ended, newest, doing, silent_s = name in over, None, (), run.config.trainer.step_timeout_s
        if name == "rollout":
            newest, doing, silent_s = rollout, _playing(rollout, ended), _SILENT_S
        elif name == "dataflow":
            newest, doing, silent_s = dataflow, _keeping(dataflow, ended), _SILENT_S
        elif name.startswith("warm_start"):
            base = name.removeprefix("warm_start").removeprefix("-") or BASE_NAME
            if newest := warm.newest.get(base):
                steps = run.bases[base].warm_start.steps
                left = "" if ended else f", {clock(warm.remaining_s({base: steps}))} left"
                doing = (f"step {newest['step']}/{steps}{left}",)
        elif name.startswith("trainer"):
            policy = name.removeprefix("trainer").removeprefix("-")
            newest = next((entry for entry in reversed(train) if policy in ("", entry.get("policy"))), {})
            doing = _training(newest, ended)
        seen = "" if newest is None else _seen(newest, now_s, float("inf") if ended else silent_s)
        roles.add_row(name, _state(states.get(name, {}), launched), seen, Text(printable(", ".join(doing))))
    policies = _Turning(
        "policy", "step", "committed", "served", "lag", "ready groups", "open", "dropped", "ages", "oldest", "success",
        "invalid",
    )  # fmt: skip
    for name, policy in run.policies.items():
        counts = dataflow.get("policies", {}).get(name, {})
        lines_of_it = [entry for entry in train if entry.get("policy", name) == name]
        last = lines_of_it[-1] if lines_of_it else {}
        step, committed, lag = last.get("step", 0), counts.get("committed"), counts.get("lag")
        by_others = None if lag is None or lag > committed else committed - lag  # where all rollouts are elsewhere
        served = rollout.get("serving_versions", {}).get(name, by_others)
        policies.add_row(
            name,
            f"{step}/{policy.trainer.steps}",
            _shown(committed),
            _shown(served),
            _shown(None if served is None else max((step if committed is None else committed) - served, 0)),
            *(_shown(counts.get(f"{state}_groups")) for state in ("ready", "open")),
            _dropped(counts),
            _ages(counts.get("trained_ages", {})) or fixed(number(last, "staleness_mean"), 2),
            _shown(last.get("staleness_max")),
            percent(number(last, "success_rate")),
            percent(number(last, "invalid_share")),
        )
    workers = Table("worker", "heard of", "serving", "playing", "episodes", "mismatch k3")
    silence_s = max(now_s - (number(dataflow, "time_s") or now_s), 0.0)
    for name, worker in dataflow.get("workers", {}).items():
        serving = ", ".join(f"{policy}@{version}" for policy, version in worker["serving"].items())
        playing = "" if "dataflow" in over else f"{worker['playing']} of {worker['playing'] + worker['free_slots']}"
        heard, k3 = f"{clock(silence_s + worker['heard_s_ago'])} ago", scientific(number(worker, "mismatch_kl"))
        workers.add_row(Text(printable(name)), heard, serving, playing, str(worker["episodes"]), k3)
    evaluations = Table(show_header=False)
    played = (entry for entry in entries if entry.get("kind") == "eval")
    for entry in sorted(played, key=lambda entry: entry.get("step", 0)):  # written as they end
        named = ", ".join(f"{policy}@{version}" for policy, version in entry.get("versions", {}).items())
        evaluations.add_row("evaluation", named or f"version {entry.get('version')}", interval(entry))
    tables, pool = (table for table in (workers, evaluations) if table.row_count), pool_lines(run_dir) * launched
    away = [Text(printable(f"{name} is sent away: {why}")) for name, why in dataflow.get("sent_away", {}).items()]
    return Group(Text(str(run_dir), "table.title"), roles, policies, *tables, *away, *pool)


class _Turning:
    """A table that is transposed, each row to a column, where the terminal is too narrow for it."""

    def __init__(self, *names: str):
        self._rows: list[tuple[str, ...]] = [names]

    def add_row(self, *cells: str) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = _table(self._rows)
        wanted = console.measure(table, options=options.update_width(sys.maxsize)).maximum
        yield table if wanted <= options.max_width else _table(list(zip(*self._rows, strict=True)))


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _state(role: Mapping[str, Any], launched: bool) -> Text:
    """State of a role in the launcher's words; "gone" without a launcher, as the roles it started end with it."""
    if not role:
        return Text()
    phase, restarts, why = role["phase"], role["restarts"], role["detail"]
    if not launched and phase not in _ENDED:
        phase, why = "gone", "nothing supervises this run: go on with --resume"
    parts = [phase] + ([f"{restarts} restart{'s' * (restarts != 1)}"] if restarts else [])
    return Text(printable(", ".join(parts) + (f" ({why})" if why and phase not in ("up", "done", "stopped") else "")))


def _seen(status: Mapping[str, Any], now_s: float, silent_s: float) -> str:
    written_s = number(status, "time_s")
    if written_s is None:
        return "never"
    return f"{clock(now_s - written_s)} ago{'' if now_s - written_s < silent_s else ' (away)'}"


def _playing(status: Mapping[str, Any], ended: bool) -> Iterator[str]:
    if not status:
        return
    if not ended:
        yield f"{status.get('in_flight', 0)} episodes in flight"
        yield f"{fixed(number(status, 'episodes_per_s'), 1)} episodes/s"
    yield f"{status.get('failed_episodes', 0)} failed"
    bases = {} if ended else status.get("bases", {})
    if any("load" in base for base in bases.values()):
        yield f"{status['slots']} slots"
    for name, base in bases.items():
        engines = base.get("engines", [])
        text = (
            f"{sum(engine['up'] for engine in engines)} of {len(engines)} engines up"
            if len(engines) > 1
            else f"engine {'up' if base['up'] else 'away'}"
        )
        if load := base.get("load"):
            text += f", {load['waiting']} requests queued, {load['preemptions']} preempted"
        yield f"{name}: {text}" if len(bases) > 1 else text


def _keeping(status: Mapping[str, Any], ended: bool) -> Iterator[str]:
    if not status:
        return
    yield from (f"{status.get(s, 0)} {s}" for s in ("waiting", "leased", "quarantined") if s != "leased" or not ended)
    for cause, n in status.get("failed", {}).items():
        yield f"{n} failed ({cause.replace('_', ' ')})"
    if status.get("short_groups"):
        yield f"{status['short_groups']} short groups"
    if aside := status.get("put_aside"):
        last = aside[0]
        sender = f"sent by {last['worker']}" if last["worker"] else "sender unknown"
        groups = sum(counts.get("quarantined_groups", 0) for counts in status.get("policies", {}).values())
        yield f"{groups} groups put aside, {last['group_id']} {sender}: {last['reason']}"
    if refused := status.get("refused"):
        yield f"{sum(refused.values())} messages refused ({', '.join(f'{n} {name}' for name, n in refused.items())})"
    if status.get("passed_over_tasks"):
        yield f"{status['passed_over_tasks']} tasks passed over"
    for name, counts in status.get("algorithms", {}).items():
        for key, value in counts.items():
            yield f"{name}.{key} {value:.3g}"


def _dropped(counts: Mapping[str, Any]) -> str:
    """Number of dropped groups, and the causes."""
    causes = ", ".join(f"{n} {cause.replace('_', ' ')}" for cause, n in counts.get("dropped", {}).items())
    return f"{_shown(counts.get('dropped_groups'))}{f' ({causes})' if causes else ''}"


def _ages(tokens: Mapping[str, int]) -> str:
    """Shares of the tokens of the newest batch by their age in versions."""
    whole = sum(tokens.values())
    return ", ".join(f"{age}: {100 * n / whole:.0f} %" for age, n in tokens.items()) if whole else ""


def _training(line: Mapping[str, Any], ended: bool) -> Iterator[str]:
    if line:
        yield f"step {line.get('step')}"
    if line and not ended:
        yield f"{fixed(number(line, 'tokens_per_s'), 0)} tokens/s"
        yield from (f"{name[:-2]} {fixed(number(line, name), 1)} s" for name in ("wait_s", "step_s") if name in line)


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
