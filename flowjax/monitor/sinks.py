"""Sinks: other places to which the lines of `metrics.jsonl` are sent during a run, named by `config.monitor.sinks`.

    tensorboard    <run>/tensorboard, by tensorboardX
    wandb          project "flowjax" of Weights & Biases, or that of WANDB_PROJECT
    trackio        project "flowjax" of trackio, as <run>-<id of the run>

The launcher follows the file, so that a slow sink delays no role, and the lines of all roles are sent. Each sink has a
thread and remembers what it has sent: one that hangs or fails holds nobody up, and a resumed run sends what was missed.
Only packages of named sinks are imported.
"""

import configparser
import contextlib
import importlib.util
import json
import netrc
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ml_collections import ConfigDict

from flowjax.files import replace_file
from flowjax.monitor.metrics import Progress
from flowjax.monitor.token import known_run_id

PROJECT = "flowjax"
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
_LOOK_EVERY_S = 1.0
_LAST_S = 30.0  # for a sink to take what is left when the run has ended
_SENT = ("train", "eval")  # kinds of lines
_NOT_FINITE = ("nan", "inf", "-inf")  # as MetricsWriter writes them: all sinks take the numbers


class Sink(Protocol):
    """A place for numbers over steps.

    hides: True if a sink that is opened with a `first_step` stops showing what it was sent before for that step and
    later ones.
    """

    hides: bool

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    hides = True  # `purge_step` hides the points from that step on, in all series

    def __init__(self, run_dir: Path, config: ConfigDict, first_step: int | None):
        from tensorboardX import SummaryWriter

        folder = run_dir / "tensorboard"
        suffix = f".{sum(1 for _ in folder.glob('events.*'))}"  # two files of one second would have the same name
        self._board = SummaryWriter(str(folder), purge_step=first_step, filename_suffix=suffix)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self) -> None:
        self._board.close()


class _Wandb:
    hides = False

    def __init__(self, run_dir: Path, config: ConfigDict, first_step: int | None):
        if problem := _login_problem():  # it would ask a question under the live screen, and wait for the answer
            raise PermissionError(problem)
        import wandb  # pyright: ignore[reportMissingImports]

        options = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "name": run_dir.name, "id": _known_as(run_dir)}
        self._run = wandb.init(**options, resume="allow", dir=str(run_dir), config=config.to_dict())
        # Our step is a metric, for the x-axis. wandb ignores points whose own step goes back, and ours does: from one
        # policy to another, and after a resume.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    hides = False

    def __init__(self, run_dir: Path, config: ConfigDict, first_step: int | None):
        import trackio  # pyright: ignore[reportMissingImports]

        trackio.init(project=PROJECT, name=_known_as(run_dir), resume="allow", config=config.to_dict())
        self._trackio = trackio

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


def _known_as(run_dir: Path) -> str:
    """A name that no other run has at a service: the folder's and the run's id. A folder of the same name may exist on
    another machine, or belong to a run that was deleted here, and `resume` would go on with that run's series."""
    return "-".join(filter(None, (run_dir.name, known_run_id(run_dir))))


_SINKS: dict[str, Callable[[Path, ConfigDict, int | None], Sink]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}


def check_sinks(config: ConfigDict) -> list[str]:
    """Messages on sinks whose packages are not installed, or that nobody is logged in to."""
    problems = []
    for name in config.monitor.sinks:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            text = f"{_PACKAGES[name]} is not installed here: pip install {_PACKAGES[name]}, or leave it out"
            problems.append(f"config.monitor.sinks has {name!r}, but {text}")
        elif name == "wandb" and (problem := _login_problem()):
            problems.append(f"config.monitor.sinks has 'wandb', but {problem}")
    return problems


def _login_problem() -> str:
    """Reason why wandb could not log in by itself, with the remedy; "" for none. Looks where wandb does."""
    given, settings = os.environ, configparser.ConfigParser(default_section="default", interpolation=None)
    folders = (
        Path(given.get("WANDB_CONFIG_DIR") or "~/.config/wandb"),
        Path(".wandb" if Path(".wandb").exists() else "wandb"),
    )
    for folder in folders:  # `wandb offline` writes the second
        with contextlib.suppress(configparser.Error, UnicodeDecodeError, RuntimeError):  # the last: there is no home
            settings.read(folder.expanduser() / "settings")
    kept = settings.defaults()
    if (given.get("WANDB_MODE") or kept.get("mode")) in ("offline", "dryrun", "disabled"):
        return ""
    if given.get("WANDB_API_KEY") or given.get("WANDB_IDENTITY_TOKEN_FILE") or kept.get("api_key"):
        return ""
    host = urlsplit(given.get("WANDB_BASE_URL") or kept.get("base_url") or "https://api.wandb.ai").netloc
    for file in [given["NETRC"]] if given.get("NETRC") else ["~/.netrc", "~/_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError, RuntimeError):
            if netrc.netrc(Path(file).expanduser()).authenticators(host):
                return ""
    return f"nobody is logged in to {host} here: run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline"


@contextlib.contextmanager
def forwarding(run_dir: Path, config: ConfigDict, say: Callable[[str], None]) -> Iterator[None]:
    """Send the run's lines to its sinks, as they come, until the block has ended.

    A sink that fails is reported by `say`, and gets no more lines.
    """
    stop = threading.Event()
    threads = [
        threading.Thread(target=_forward, args=(name, run_dir, config, stop, say), name=f"sink {name}", daemon=True)
        for name in config.monitor.sinks
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(_LAST_S)


def _forward(name: str, run_dir: Path, config: ConfigDict, stop: threading.Event, say: Callable[[str], None]) -> None:
    progress, noted, sink = Progress(run_dir), run_dir / f"sink-{name}.json", None
    # What an earlier start of this run has sent.
    sent_s, newest = _sent(noted)
    first_look, resumed = True, sent_s > 0
    steps: dict[tuple[Any, ...], int] = {}  # the last step that was sent of each series
    try:
        while True:
            last = stop.is_set()  # read before the lines: those that were written until the stop are still sent
            lines = _to_send(progress)
            if first_look:
                lines, first_look = _behind(newest, lines, sent_s), False
            # Steps at or below the last of their series: a trainer went back to a checkpoint and makes them again.
            again = [line["step"] for line in lines if line["step"] <= steps.get(_series(line), -1)]
            if lines and (sink is None or (again and sink.hides)):
                first = min(again or [line["step"] for line in lines]) if again or resumed else None
                if sink is not None:  # a trainer went back: opened anew, it hides the points from `first` on
                    sink.close()
                    steps.clear()
                sink = _SINKS[name](run_dir, config, first)
                if first is not None and sink.hides:  # it hides valid points, too (other policies, evaluations)
                    progress = Progress(run_dir)  # these are sent again
                    lines = [line for line in _to_send(progress) if line["step"] >= first]
            for line in lines:
                assert sink is not None
                sink.log(_numbers(line, several=len(config.policies) > 1), line["step"])
                sent_s, steps[_series(line)] = max(sent_s, line.get("time_s", 0.0)), line["step"]
            if lines:
                replace_file(noted, json.dumps({"sent_s": sent_s, "newest": _named(lines[-1])}), durable=False)
            if last:
                return
            stop.wait(_LOOK_EVERY_S)
    except Exception as error:  # an outside service may fail in any way, and training goes on
        say(f"{name} gets no more metrics: {type(error).__name__}: {error}")
    finally:
        if sink is not None:
            with contextlib.suppress(Exception):
                sink.close()


def _to_send(progress: Progress) -> list[dict[str, Any]]:
    """New lines of the kinds that sinks get."""
    return [line for line in progress.update() if line.get("kind") in _SENT and "step" in line]


def _series(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Key of lines whose steps rise until a trainer goes back. Evaluations may be written late, after those of later
    steps: each is a series of its own."""
    return (line.get("policy"),) if line["kind"] == "train" else (line.get("policy"), line["step"])


def _sent(noted: Path) -> tuple[float, list[Any]]:
    """The latest time of a line that was sent, and the names by which the last sent line is found again."""
    try:
        sent = json.loads(noted.read_text())
        return float(sent["sent_s"]), sent.get("newest", [])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, []


def _named(line: Mapping[str, Any]) -> list[Any]:
    return [line.get(name) for name in ("time_s", "kind", "step", "policy")]


def _behind(newest: list[Any], lines: Sequence[dict[str, Any]], sent_s: float) -> list[dict[str, Any]]:
    """The lines after the last one that was sent.

    Found by place, since times are not in order: several processes write, on machines whose clocks differ. Only where
    that line was dropped (a trainer went back), the lines with a later time are taken.
    """
    places = [place for place, line in enumerate(lines) if _named(line) == newest]
    return list(lines[places[-1] + 1 :]) if places else [line for line in lines if line.get("time_s", 0.0) > sent_s]


def _numbers(line: Mapping[str, Any], *, several: bool) -> dict[str, float]:
    """Numbers of a line as `<kind>/<name>`, with several policies as `<kind>/<policy>/<name>`.

    Numbers in a mapping have its name before theirs (`<mapping>/<name>`), except an evaluation's results by policy:
    `eval/<policy>/<name>`.
    """
    left_out = ("time_s", "kind", "step", "policy", "policies", "versions")
    values = {name: value for name, value in line.items() if name not in left_out} | line.get("policies", {})
    policy = f"/{line['policy']}" if several and "policy" in line else ""
    return dict(_flat(values, f"{line['kind']}{policy}"))


def _flat(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}/{name}")
        elif isinstance(value, int | float) or value in _NOT_FINITE:
            yield f"{path}/{name}", float(value)
