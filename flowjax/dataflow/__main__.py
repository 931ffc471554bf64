"""The dataflow role: `python -m flowjax.dataflow --run=<run folder>`."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

from absl import app, flags, logging

from flowjax.config import ConfigError, asks_help
from flowjax.dataflow.algorithms import AlgorithmError
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.ledger import LedgerError
from flowjax.dataflow.server import serve
from flowjax.dataflow.tasks import held_out_tasks, train_tasks
from flowjax.monitor.trouble import allow_many_files, return_freed_memory
from flowjax.run import read_endpoints, read_run

_RUN = flags.DEFINE_string("run", None, "Run folder.", required=True)
_USER_MISTAKE = 2  # exit status; starting again does not mend it


async def _main(run_dir: Path) -> None:
    run = read_run(run_dir)
    flow = Flow(run, train_tasks=train_tasks(run.config), held_out_tasks=held_out_tasks(run.config))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    port = urlsplit(read_endpoints(run_dir)["dataflow"]).port
    logging.info("serving on %s:%s", run.config.dataflow.host, port)
    await serve(flow, run_dir, dataflow=run.config.dataflow, port=port or 0, stop=stop)


def main(argv: list[str]) -> None:
    del argv
    return_freed_memory()
    allow_many_files()  # a thousand workers, each with some connections
    try:
        asyncio.run(_main(Path(_RUN.value)))
    except (AlgorithmError, ConfigError, LedgerError) as error:
        print(f"dataflow: {error}", file=sys.stderr, flush=True)
        sys.exit(_USER_MISTAKE)


if __name__ == "__main__" and not asks_help(sys.argv, __doc__):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # credit is small: it must not take memory from the trainer's devices
    app.run(main)
