"""Other machines of a run: nodes that play for it, and hosts that train it.

    python -m flowjax.launch --join=http://host:port [--name=NAME] [--config.engine.<field>=value ...]

A node may join and leave at any time. Its config comes from the run's dataflow; only settings of its hardware may
differ. It needs no part of the run's folder, and accepts no connections. Episodes that it was playing when it dies are
played by others.

    python -m flowjax.launch --role=trainer --run=<run folder>

A host has one process of the run's trainer, which a cluster's scheduler starts, and restarts. All processes read and
write the run's folder, and the first of them speaks with its dataflow. When one dies, all do: the next start goes on
from the newest checkpoint.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import aiohttp
from ml_collections import ConfigDict
from rich.console import Console

from flowjax.config import ConfigError, default_config, load_run
from flowjax.fields import DATAFLOW_URL
from flowjax.launch.checks import differences, in_base
from flowjax.launch.devices import Devices, visible_accelerators
from flowjax.launch.roles import HUGE_PAGES, OFFLINE, preloaded
from flowjax.launch.supervisor import RoleFailed
from flowjax.monitor.metrics import read_status
from flowjax.monitor.token import (
    VARIABLE,
    bearer,
    invite,
    is_loopback,
    keep_run_id,
    known_run_id,
    known_token,
    of_run,
    token_of_environment,
    wants_token,
)
from flowjax.records import WireError, unpack
from flowjax.relay import reached
from flowjax.run import Run, is_nats, read_endpoints, read_run
from flowjax.weights.mirror import OtherModelError, fetch_bases
from flowjax.weights.source import OriginError, RunSource, source

_OF_HARDWARE = re.compile(
    r"(bases\.[^.]+\.)?(engine\..+|model\.path)|env\.workers|rollout\.(max|min)_concurrent_episodes|max_restarts|name|runs"
)
_LOOK_EVERY_S = 1.0
_ANSWER_WITHIN_S = 10.0
_SAY_EVERY_S = 30.0
_SAY_WAITING_EVERY_S = 60.0
_OVER_AFTER_S = 600.0  # without an answer for a run that is over by its files: a launch may be about to extend it
_REASONS = {
    401: f"it wants another key: set {VARIABLE}",
    403: "it has sent this node away",
    410: "another run plays there now",
}
# In the dataflow's words: the first stands before the reason in brackets.
_SENT_AWAY, _OTHER_RUN = "sent away from the run ", "another run plays here now"


def invitation(run_dir: Path, node: str) -> str:
    """Variable with the key of a node of that name; followed by the node's command if the run is reached by a relay.

    Raises:
        ConfigError: nodes cannot reach the run, or `node` is not usable as a name.
        OSError: the run's folder cannot be written.
    """
    dataflow = load_run(run_dir).dataflow
    if not wants_token(dataflow):
        raise ConfigError(
            f"config.dataflow.host of {run_dir} is {dataflow.host}, which only this machine reaches and where no key "
            "is asked for: start the run with --config.dataflow.host=0.0.0.0 or --config.dataflow.relay=nats://host:4222"
        )
    shown = f"{VARIABLE}={invite(run_dir, node)}"
    return (
        f"{shown} python -m flowjax.launch --join={dataflow.relay}/{known_run_id(run_dir)}" if dataflow.relay else shown
    )


def config_of_run(url: str) -> ConfigDict:
    """The config of the run whose dataflow is at `url`, adapted to a node of it.

    Raises:
        ConfigError: nobody answers there, or no run that this version can join; the token is missing.
    """

    async def ask() -> dict:
        async with reached(url) as here, source(here, token_of_environment()) as origin:
            return await _described(origin, "name", "config")

    if not DATAFLOW_URL.fits(url):
        raise ConfigError(f"--join is {url!r}: {DATAFLOW_URL.remedy}")
    try:
        described = asyncio.run(ask())
        config = default_config()
        config.update(json.loads(described["config"]))
    except (aiohttp.ClientError, OSError) as error:
        remedy = (
            "give what --invite printed at the run, while that is under way"
            if is_nats(url)
            else "give host and port of the run's config.dataflow, whose host has to be one that this machine reaches"
        )
        raise ConfigError(f"--join={url}: no dataflow answers there ({error}): {remedy}") from error
    except ConfigError as error:
        raise ConfigError(f"--join={url}: {error}") from error
    except OriginError as error:
        raise ConfigError(f"--join={url}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--join={url}: the run's config is not understood here ({error}): install its version of flowjax"
        ) from error
    config.name = f"{described['name']}-{re.sub('[^A-Za-z0-9_-]', '-', socket.gethostname())}"[:200]
    config.update({"elsewhere": ("dataflow", "trainer"), "runs": default_config().runs})
    # Without a slash at its end: paths are appended to it.
    config.dataflow.update({"url": url.rstrip("/"), "host": "127.0.0.1", "port": 0, "relay": ""})
    config.monitor.sinks = ()  # a node writes none of the lines that they are sent, and may lack their packages
    for section in (config, *config.bases.values()):  # ports and addresses of engines on the run's machine
        if "engine" in section:
            section.engine.update({"port": 0, "urls": ()})
    return config


async def _described(origin: RunSource, *names: str) -> dict[str, str]:
    """The run's answer to `/run`, which has texts under `names`.

    Raises:
        OriginError: it lacks one of them: another version of flowjax, or no flowjax, answers.
        aiohttp.ClientError, OSError: nobody answers.
    """
    described = await origin.ask("/run")
    lacking = [name for name in names if not isinstance(described, dict) or not isinstance(described.get(name), str)]
    if lacking:
        raise OriginError(f"its answer to /run has no {', '.join(lacking)}: install the run's version of flowjax here")
    return described


def check_difference(joined: ConfigDict, config: ConfigDict) -> None:
    """Refuse a node's config that differs from the run's in more than the settings of its hardware.

    Raises:
        ConfigError: `config` plays another run than `joined` does.
    """
    for field, before, now in differences(joined, config):
        if not _OF_HARDWARE.fullmatch(field):
            raise ConfigError(
                f"config.{field} is {now!r}, but the run has {before!r}: a node may differ in engine, env.workers, "
                "rollout.max_concurrent_episodes, rollout.min_concurrent_episodes, max_restarts, model.path, name and "
                "runs only; have the world's data at the run's path here"
            )


def fetch(run: Run) -> None:
    """Fetch the run's base models to this machine, and write the run's id into the node's folder.

    Raises:
        ConfigError: a model cannot be fetched, or another one is at its path; the folder belongs to another run.
    """

    async def copy() -> None:
        url, token = run.config.dataflow.url, known_token(run.folder)
        async with reached(url) as here, source(here, token) as origin:
            run_id = (await _described(origin, "id"))["id"]
            if known_run_id(run.folder) not in ("", run_id):
                raise ConfigError(
                    f"{run.folder} is a node's of another run than {url}: give another --name, or delete the folder"
                )
            keep_run_id(run.folder, run_id)
            await fetch_bases(run, origin)

    try:
        asyncio.run(copy())
    except OtherModelError as error:
        raise ConfigError(str(error)) from error
    except (OriginError, aiohttp.ClientError, OSError) as error:
        raise ConfigError(
            f"the base models of {run.config.dataflow.url} cannot be fetched ({error}): start again to go on with "
            "what has come, or put them at config.model.path"
        ) from error


class NodeRefused(RoleFailed):
    """The run lets this node play no longer, which no waiting changes."""

    def report(self, lines: int = 20) -> str:
        return self.reason  # no role has failed: their logs say no more


async def until_done(run: Run, console: Console) -> None:
    """Return when the run has ended.

    Asks the dataflow again and again, which holds each request (long polling) for `run.presence_s`.

    Raises:
        NodeRefused: the dataflow lets this node play no longer.
        RoleFailed: it has not answered for twice `config.dataflow.lease_s`.
    """
    url, patience_s = run.config.dataflow.url, 2 * run.config.dataflow.lease_s
    said_s, silent_s = time.monotonic(), 0.0
    timeout = aiohttp.ClientTimeout(total=_ANSWER_WITHIN_S + run.presence_s)
    headers = {**bearer(known_token(run.folder)), **of_run(known_run_id(run.folder))}
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        while True:
            problem, finished, asked_s = "", False, time.monotonic()
            try:
                asked, here = {"hold_s": str(run.presence_s)}, read_endpoints(run.folder)["dataflow"]
                async with session.get(f"{here}/finished", params=asked) as answer:
                    if answer.status in _REASONS:
                        reason = _refusal(run, answer.status, await answer.read())
                        raise NodeRefused("mirror", 1, run.folder / "logs" / "mirror.log", reason)
                    answer.raise_for_status()
                    finished = (await answer.json())["finished"]
                silent_s = 0.0
            except aiohttp.ClientResponseError as error:
                problem = f"HTTP {error.status}"
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if finished:
                with contextlib.suppress(OSError):  # a closed output must not fail the run
                    console.print(f"played here: {_playing(run)}", highlight=False, soft_wrap=True)
                return
            if problem:
                # This process may have been stopped meanwhile (Ctrl-Z, a suspended machine), which is no silence of the
                # run. So one request counts for no longer than its timeout, nor for more than half of the patience.
                took_s = time.monotonic() - asked_s
                silent_s += min(took_s, _ANSWER_WITHIN_S + run.presence_s, patience_s / 2) + _LOOK_EVERY_S
            if silent_s > patience_s:
                reason = f"the run at {url} has not answered for {patience_s:.0f} s ({problem})"
                raise RoleFailed("mirror", 1, run.folder / "logs" / "mirror.log", reason)
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s = time.monotonic()
                with contextlib.suppress(OSError):
                    console.print(_playing(run), highlight=False, soft_wrap=True)
            await asyncio.sleep(_LOOK_EVERY_S)


def _refusal(run: Run, status: int, body: bytes) -> str:
    """Message on an answer of the dataflow that refuses this node."""
    with contextlib.suppress(WireError, KeyError, TypeError):  # a proxy on the way may have answered
        if why := str(unpack(body)["error"]).partition(_SENT_AWAY)[2]:
            return _sent_away(why)
    return _refused(run, status)


def _refused(run: Run, status: int) -> str:
    return f"{run.config.dataflow.url} refuses this node: {_REASONS[status]}"


def _sent_away(why: str) -> str:
    return f"the run has sent this node away {why}: others play what it did"


def last_line(run: Run, stopped: str) -> str:
    """The last message of a node that ends before its run: that it is refused, if the rollout heard of that first, or
    how it goes on."""
    said = ""
    with contextlib.suppress(OSError):
        log = (run.folder / "logs" / "rollout.log").read_text(errors="replace")
        said = "".join(log.rstrip().splitlines()[-1:])
    if why := said.partition(_SENT_AWAY)[2]:
        return _sent_away(why)
    if _OTHER_RUN in said:
        return _refused(run, 410)
    again = f"--join={run.config.dataflow.url} --name={run.config.name}, and this node's own --config flags"
    return f"{stopped}; go on with: python -m flowjax.launch {again}"


def _playing(run: Run) -> str:
    status = read_status(run.folder, "rollout")
    serving = ", ".join(f"{policy}@{version}" for policy, version in status.get("serving_versions", {}).items())
    rate = status.get("episodes_per_s", 0.0)
    return f"{status.get('episodes', 0)} episodes, {rate:.1f}/s, serving {serving or 'nothing yet'}"


# --------------------------------------------------------------------------------------------------------------- hosts


def train(run_dir: Path, console: Console) -> None:
    """Wait until the run is under way, then become its trainer, or this host's process of it.

    Replaces this process by the trainer's (exec). Returns only where the run has ended.

    Raises:
        ConfigError: `run_dir` is a file, the run's own launch has the trainer, or this host lacks a base model.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run is {str(run_dir)!r}, which is no folder: give the run's folder")
    run = asyncio.run(_under_way(run_dir, console))
    if run is None:
        console.print(f"the run in {run_dir} has ended", highlight=False, markup=False, soft_wrap=True)
    else:
        _check_host(run)
        _become_trainer(run_dir)


def _become_trainer(run_dir: Path) -> NoReturn:
    seen = visible_accelerators()
    # Any number of hosts above 1 has `trainer_env` set the flags that overlap collectives with products.
    sees = Devices(seen, hosts=2, on_host=len(seen))
    environment = {**os.environ, **OFFLINE, **HUGE_PAGES, **preloaded(sees.trainer), **sees.trainer_env()}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "flowjax.trainer", f"--run={run_dir}", "--scheduled"], environment)


def _is_over(run_dir: Path) -> bool:
    """True if the files of a run say that it has ended: its dataflow has, and all steps of its config are committed."""
    status = read_status(run_dir, "dataflow")
    try:
        steps = {policy.name: policy.trainer.steps for policy in read_run(run_dir).policies.values()}
        return bool(status["finished"]) and all(status["policies"][name]["committed"] >= steps[name] for name in steps)
    except (ConfigError, KeyError, TypeError):
        return False


async def _under_way(run_dir: Path, console: Console) -> Run | None:
    """The run of a folder, once its dataflow answers (config and base models are there by then); None after its end.

    A copy of a run's folder names the dataflow of the original, whose batches are not for the copy. Paths and inodes
    may differ from host to host, so they cannot tell the two apart; but a dataflow writes its status only into its own
    folder.
    """
    said_s, only_there, began_s = -_SAY_WAITING_EVERY_S, False, time.monotonic()
    written_s = read_status(run_dir, "dataflow").get("time_s")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_WITHIN_S)) as session:
        while True:
            try:  # reads all files anew each time: the launch may still have to write or replace them
                url = read_endpoints(run_dir)["dataflow"]
                only_there = is_loopback(urlsplit(url).hostname or "")
                headers = {**bearer(known_token(run_dir)), **of_run(known_run_id(run_dir))}
                async with session.get(f"{url}/finished", headers=headers, raise_for_status=True) as answer:
                    finished = (await answer.json())["finished"]
                if finished or read_status(run_dir, "dataflow").get("time_s") not in (None, written_s):
                    break
                problem = (
                    f"{url} answers, but has not written status-dataflow.json here, as it does every second: if it "
                    "never does, this is a copy of its folder that is not launched yet, or the disk is full"
                )
            except aiohttp.ClientResponseError as error:
                problem = f"{error.request_info.real_url}: {_REASONS.get(error.status, f'HTTP {error.status}')}"
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() - began_s > _OVER_AFTER_S and _is_over(run_dir):
                return None
            if time.monotonic() - said_s > _SAY_WAITING_EVERY_S:
                said_s = time.monotonic()
                alone = ", an address of its launch's machine alone: see config.dataflow.host" if only_there else ""
                say = f"waiting for the run in {run_dir} ({problem}{alone})"
                console.print(say, highlight=False, markup=False, soft_wrap=True)
            await asyncio.sleep(_LOOK_EVERY_S)
    return None if finished else read_run(run_dir)


def _check_host(run: Run) -> None:
    """Refuse a run that its own launch trains, too, or that this host cannot train.

    Raises:
        ConfigError: with the setting that is in the way.
    """
    if run.trains and "FLOWJAX_PROCESS" not in os.environ:
        raise ConfigError(
            f"config.elsewhere of {run.folder} is {tuple(run.config.elsewhere)}, so that its launch has the trainer: "
            "launch it with --config.elsewhere=\"('trainer',)\""
        )
    if run.config.separate_trainers:
        raise ConfigError("config.separate_trainers is True, but --role=trainer trains all policies: set it to False")
    for base in {policy.base.name: policy.base for policy in run.policies.values()}.values():
        if not (Path(base.model.path) / "config.json").exists():
            path = f"config.model.path is {base.model.path!r}, which is no folder of a model on {socket.gethostname()}"
            raise ConfigError(in_base(base.name, f"{path}: put it where all hosts have it (HF_HOME if it has an id)"))
