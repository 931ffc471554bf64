"""One failure, one message: keeps Orbax and TensorStore from reporting what `CheckpointError` says already."""

import functools
import logging
import sys


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname or record.levelno == logging.CRITICAL


@functools.cache
def quiet_orbax() -> None:
    """Silence, in this process, the tracebacks that a failed save or restore leaves behind.

    Orbax logs an error once per array before it raises it. After the first failed array it closes its event loop while
    TensorStore still answers for the others, and each of those answers prints "Event loop is closed". Both say nothing
    that the raised error does not.
    """
    logging.getLogger("absl").addFilter(_not_from_orbax)
    shown = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        late_answer = isinstance(unraisable.exc_value, RuntimeError) and unraisable.object is None
        if not (late_answer and str(unraisable.exc_value) == "Event loop is closed"):
            shown(unraisable)

    sys.unraisablehook = hook
