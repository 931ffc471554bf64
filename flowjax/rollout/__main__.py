"""The rollout role: `python -m flowjax.rollout --run=<run folder>`."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from absl import app, flags, logging

from flowjax.broker import DataflowClient, DataflowError, Evicted, connect_to_run
from flowjax.config import ConfigError, asks_help
from flowjax.envs import ENGINES_VARIABLE, RUN_VARIABLE, WorldError
from flowjax.envs.pool import EnvPool
from flowjax.files import FileHeldError, held
from flowjax.models.shape import ModelError
from flowjax.monitor.prometheus import MetricsEndpoint
from flowjax.monitor.token import known_token, node_name
from flowjax.rollout.client import EngineError
from flowjax.rollout.engines import bases_of_run
from flowjax.rollout.episode import EpisodePlayer
from flowjax.rollout.service import RolloutError, RolloutService
from flowjax.run import Run, read_endpoints, read_run
from flowjax.weights.follow import WeightsError
from flowjax.workflows.codec import CodecError

_RUN = flags.DEFINE_string("run", None, "Run folder.", required=True)
_LOOK_EVERY_S = 1.0
_HANDOVER_S = 10.0  # longest that a service that is stopping may take
_FAILED, _USER_MISTAKE = 1, 2  # exit statuses; starting again mends only the first


def _engine_urls(run: Run) -> dict[str, list[str]]:
    """Addresses of the engines, by base model."""
    try:
        endpoints = read_endpoints(run.folder)
        assert endpoints["dataflow"]
        return {
            name: [endpoints[engine.name] for engine in base.engines]
            for name, base in run.bases.items()
            if base.engines
        }
    except (OSError, ValueError, KeyError) as error:
        path = run.folder / "endpoints.json"
        raise ConfigError(f"{path} does not name engine and dataflow ({error}): start the run's roles first") from error


def tell_environments(run_dir: Path, urls: Mapping[str, Sequence[str]]) -> None:
    """Name the run and its engines, in variables, to environments: these are other processes and may ask an engine."""
    os.environ[RUN_VARIABLE] = str(run_dir)
    os.environ[ENGINES_VARIABLE] = json.dumps(dict(urls))


async def _until_moved(run: Run, urls: Mapping[str, Sequence[str]], stop: asyncio.Event) -> None:
    """Stop the service when an engine has another address, as after another process took its port."""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        with contextlib.suppress(ConfigError):  # it cannot be read at this moment
            if _engine_urls(run) != urls:
                stop.set()
                return


@contextlib.contextmanager
def only_service(run_dir: Path) -> Iterator[None]:
    """Be the run's only rollout service: a second one would give back the leases of the first, as if left by a service
    that died, and remove the adapters that it serves.

    Raises:
        ConfigError: another one plays, and has not ended within `_HANDOVER_S`.
    """
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(held(run_dir / "rollout.lock", wait_s=_HANDOVER_S))
        except FileHeldError as error:
            problem = f"another rollout service ({error}) plays the run {run_dir}"
            raise ConfigError(f"{problem}: stop that one, or play from a folder of its own with --join") from error
        yield


async def _serve(run: Run) -> None:
    config = run.config
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    urls = _engine_urls(run)
    tell_environments(run.folder, urls)
    # Machines made from one image may have one name, and processes in containers one number.
    worker = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    if node := node_name(known_token(run.folder)):
        worker = f"{node}:{worker}"  # the node's key is valid for such names alone
    async with (
        bases_of_run(run, urls) as bases,
        connect_to_run(run.folder) as broker,
        EnvPool(workers=config.env.workers, step_timeout_s=config.env.step_timeout_s) as pool,
    ):
        # On a node the launcher gives up first, after two leases (`launch/join.py`): a restart repairs no network.
        away_s = config.dataflow.lease_s * (3 if run.is_node else 1)
        dataflow = DataflowClient(broker, worker=worker, away_s=away_s)
        player = EpisodePlayer.of_run(run, bases=bases, pool=pool)
        service = RolloutService(run, bases=bases, dataflow=dataflow, player=player)
        logging.info("playing as %s on %s", worker, ", ".join(url for members in urls.values() for url in members))
        with MetricsEndpoint(lambda: service.last_status, role="rollout") as metrics:
            service.metrics_url = metrics.url
            watching = asyncio.create_task(_until_moved(run, urls, stop))
            try:
                await service.run(stop)
            finally:
                watching.cancel()
            if watching.done() and not watching.cancelled():
                raise RolloutError("engines have moved, as endpoints.json says: it is to be started anew")
    logging.info("stopped after %d episodes", service.totals.episodes)


def play(run_dir: Path) -> int:
    """Play until SIGTERM. Returns the exit status; what went wrong is the last line on stderr."""
    try:
        run = read_run(run_dir)
        with only_service(run_dir):
            asyncio.run(_serve(run))
    except (CodecError, ConfigError, Evicted, ModelError, WorldError) as error:
        problem, status = error, _USER_MISTAKE
    except (EngineError, DataflowError, RolloutError, WeightsError) as error:
        problem, status = error, _FAILED
    else:
        return 0
    print(f"rollout: {problem}", file=sys.stderr, flush=True)
    return status


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.INFO)
    jax.config.update("jax_platforms", "cpu")  # adapters are restored to host memory: no accelerator is touched
    sys.exit(play(Path(_RUN.value).absolute()))


if __name__ == "__main__" and not asks_help(sys.argv, __doc__):
    app.run(main)
