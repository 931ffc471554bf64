"""The trainer role: `python -m flowjax.trainer --run=<run folder> [--policy=<the only one to train>] [--scheduled]`."""

import sys
from pathlib import Path

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
_USER_MISTAKE = 2  # exit status; starting again does not mend it


def main(argv: list[str]) -> None:
    del argv
    try:
        train.main(Path(_RUN.value), _POLICY.value, scheduled=_SCHEDULED.value)
    except ConfigError as error:
        print(f"trainer: {error}", file=sys.stderr, flush=True)
        sys.exit(_USER_MISTAKE)
    except (BatchError, CheckpointError, DataflowError, ModelError, SourceError) as error:
        sys.exit(f"trainer: {error}")


if __name__ == "__main__" and not asks_help(sys.argv, __doc__):
    app.run(main)
