"""State of a run, read from its folder while it goes on: `python -m flowjax.launch --status=<run folder>`."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from flowjax.launch.machine import check_unused
from flowjax.monitor.metrics import number, read_metrics, read_status
from flowjax.monitor.screen import clock, fixed, interval, percent
from flowjax.run import read_run

_SILENT_S = 10.0  # a role that writes its status every second and has not for so long is away
_ENDED = ("done", "stopped", "failed")  # phases that outlive the launcher


def render_status(run_dir: Path, now_s: float | None = None) -> Group:
    """Tables of the run's roles, of its policies, and of who plays for it.

    Raises:
        ConfigError: the folder holds no run.
    """
    run = read_run(run_dir)
    now_s = time.time() if now_s is None else now_s
    entries = read_metrics(run_dir)
    dataflow, rollout = read_status(run_dir, "dataflow"), read_status(run_dir, "rollout")
    train = [entry for entry in entries if entry.get("kind") == "train"]
    roles = Table(title=str(run_dir), title_justify="left")
    for column in ("role", "state", "seen", "doing"):
        roles.add_column(column)
    states = read_status(run_dir, "launch").get("roles", {})
    launched = bool(check_unused(run_dir))
    for name in states or ("rollout", "dataflow", "trainer"):
        if name == "rollout":
            seen, doing = _seen(rollout, now_s), ", ".join(_playing(rollout))
        elif name == "dataflow":
            seen, doing = _seen(dataflow, now_s), ", ".join(_keeping(dataflow))
        elif name.startswith("trainer"):
            policy = name.removeprefix("trainer").removeprefix("-")
            lines_of_it = [entry for entry in train if policy in ("", entry.get("policy"))]
            newest = lines_of_it[-1] if lines_of_it else {}
            seen, doing = _seen(newest, now_s, silent_s=run.config.trainer.step_timeout_s), _training(newest)
        else:
            seen = doing = ""
        roles.add_row(name, _state(states.get(name, {}), launched), seen, doing)
    policies = Table()
    for column in (
        "policy", "step", "committed", "served", "lag", "ready groups", "open", "dropped", "ages", "oldest",
        "success", "invalid",
    ):  # fmt: skip
        policies.add_column(column)
    for name, policy in run.policies.items():
        counts = dataflow.get("policies", {}).get(name, {})
        lines_of_it = [entry for entry in train if entry.get("policy", name) == name]
        last = lines_of_it[-1] if lines_of_it else {}
        served = rollout.get("serving_versions", {}).get(name)
        step, committed = last.get("step", 0), counts.get("committed")
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
    workers = Table()
    for column in ("worker", "heard of", "serving", "episodes"):
        workers.add_column(column)
    for name, worker in dataflow.get("workers", {}).items():
        serving = ", ".join(f"{policy}@{version}" for policy, version in worker["serving"].items())
        workers.add_row(name, f"{clock(worker['heard_s_ago'])} ago", serving, str(worker["episodes"]))
    evaluations = Table(show_header=False)
    for entry in entries:
        if entry.get("kind") == "eval":
            versions = entry.get("versions", {})
            named = ", ".join(f"{policy}@{version}" for policy, version in versions.items())
            evaluations.add_row("evaluation", named or f"version {entry.get('version')}", interval(entry))
    return Group(roles, policies, *(table for table in (workers, evaluations) if table.row_count))


def _state(role: Mapping[str, Any], launched: bool) -> str:
    """State of a role in the launcher's words. With the launcher go all roles that it has started."""
    if not role:
        return ""
    phase, restarts, why = role["phase"], role["restarts"], role["detail"]
    if not launched and phase not in _ENDED:
        phase, why = "gone", "nothing supervises this run: go on with --resume"
    parts = [phase] + ([f"{restarts} restart{'s' * (restarts != 1)}"] if restarts else [])
    return ", ".join(parts) + (f" ({why})" if why and phase not in ("up", "done", "stopped") else "")


def _seen(status: Mapping[str, Any], now_s: float, silent_s: float = _SILENT_S) -> str:
    written_s = number(status, "time_s")
    if written_s is None:
        return "never"
    ago = f"{clock(now_s - written_s)} ago"
    return ago if now_s - written_s < silent_s else f"{ago} (away)"


def _playing(status: Mapping[str, Any]) -> Iterator[str]:
    if not status:
        return
    yield f"{status.get('in_flight', 0)} episodes in flight"
    yield f"{fixed(number(status, 'episodes_per_s'), 1)} episodes/s"
    yield f"{status.get('failed_episodes', 0)} failed"
    bases = status.get("bases", {})
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


def _keeping(status: Mapping[str, Any]) -> Iterator[str]:
    if not status:
        return
    for state in ("waiting", "leased", "quarantined"):
        yield f"{status.get(state, 0)} {state}"
    for cause, n in status.get("failed", {}).items():
        yield f"{n} failed ({cause.replace('_', ' ')})"
    if status.get("short_groups"):
        yield f"{status['short_groups']} short groups"
    if aside := status.get("put_aside"):
        last = aside[0]
        sender = f"sent by {last['worker']}" if last["worker"] else "sender unknown"
        yield f"{_put_aside(status)} groups put aside, {last['group_id']} {sender}: {last['reason']}"
    if refused := status.get("refused"):
        yield f"{sum(refused.values())} messages refused ({', '.join(f'{n} {name}' for name, n in refused.items())})"
    if status.get("passed_over_tasks"):
        yield f"{status['passed_over_tasks']} tasks passed over"
    for name, counts in status.get("algorithms", {}).items():
        for key, value in counts.items():
            yield f"{name}.{key} {value:.3g}"


def _put_aside(status: Mapping[str, Any]) -> int:
    """Groups that trainers refused, of all policies."""
    return sum(counts.get("quarantined_groups", 0) for counts in status.get("policies", {}).values())


def _dropped(counts: Mapping[str, Any]) -> str:
    """Number of dropped groups, and the causes."""
    causes = ", ".join(f"{n} {cause.replace('_', ' ')}" for cause, n in counts.get("dropped", {}).items())
    return f"{_shown(counts.get('dropped_groups'))}{f' ({causes})' if causes else ''}"


def _ages(tokens: Mapping[str, int]) -> str:
    """Shares of the tokens of the newest batch by their age in versions."""
    whole = sum(tokens.values())
    return ", ".join(f"{age}: {100 * n / whole:.0f} %" for age, n in tokens.items()) if whole else ""


def _training(line: Mapping[str, Any]) -> str:
    if not line:
        return ""
    parts = [f"step {line.get('step')}", f"{fixed(number(line, 'tokens_per_s'), 0)} tokens/s"]
    parts += [f"{name[:-2]} {fixed(number(line, name), 1)} s" for name in ("wait_s", "step_s") if name in line]
    return ", ".join(parts)


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
