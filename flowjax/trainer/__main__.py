"""The trainer role: `python -m flowjax.trainer --run=<run folder> [--policy=<the only one to train>] [--scheduled]`."""

import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import jax
from absl import app, flags

from flowjax.broker import DataflowError
from flowjax.config import ConfigError, asks_help
from flowjax.models.shape import ModelError
from flowjax.trainer import train
from flowjax.trainer.batch import BatchError
from flowjax.trainer.sources import SourceError
from flowjax.weights.publish import CheckpointError

_RUN = flags.DEFINE_string("run", None, "Run folder.", required=True)
_POLICY = flags.DEFINE_string("policy", "", "The only policy to train; all of the run's if empty.")
_SCHEDULED = flags.DEFINE_bool("scheduled", False, "The scheduler that started this process has started its siblings.")
_USER_MISTAKE = 2  # exit status at which the launcher does not restart the trainer: the same config would fail again


def main(argv: list[str]) -> None:
    del argv
    try:
        train.main(Path(_RUN.value), _POLICY.value, scheduled=_SCHEDULED.value)
    except ConfigError as error:
        _end(f"trainer: {error}", _USER_MISTAKE)
    except (BatchError, CheckpointError, DataflowError, ModelError, SourceError) as error:
        _end(f"trainer: {error}", 1)
    except (Exception, KeyboardInterrupt):
        if not jax.distributed.is_initialized():
            raise
        _end(traceback.format_exc(), 1)


def _end(problem: str, status: int) -> NoReturn:
    """Print the problem and exit. One of several processes exits by `os._exit`: in a normal exit JAX waits five minutes
    for the other processes, while they wait for this one in a step."""
    print(problem, file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__" and not asks_help(sys.argv, __doc__):
    app.run(main)
