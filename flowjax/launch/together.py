"""Runs one command as several processes that live and die together, as those of one trainer do.

    python together.py <environments> <command...>

`environments` is a JSON list with the variables of each process. Each also gets its number (FLOWJAX_PROCESS) and
where the first one listens (FLOWJAX_COORDINATOR): on loopback, at a port that is free at this start. The exit status is
0 when all have ended well, else that of the first that failed; the others, which would wait for it, are killed then.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence


def run_together(environments: Sequence[Mapping[str, str]], command: Sequence[str]) -> int:
    """Run the command once for each environment, until all have ended or one has failed. Returns the exit status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    # pid -> number and process. The object is kept because garbage collection of a `Popen` may reap its child.
    running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}

    def kill_all(*_: object) -> None:
        """SIGKILL for all, also for those that catch SIGTERM: with a sibling gone none can end in order."""
        for pid in list(running):
            # Not `Popen.kill`, which reaps a child that is dead already: `os.wait` below would then find none.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_all)
    for index, environment in enumerate(environments):
        variables = {"FLOWJAX_PROCESS": str(index), "FLOWJAX_COORDINATOR": address, **environment}
        process = subprocess.Popen(command, env={**os.environ, **variables})
        running[process.pid] = index, process
    first = 0
    while running:
        pid, raw = os.wait()  # the handler of SIGTERM runs inside this call, which then goes on (PEP 475)
        index, _ = running.pop(pid)
        status = 128 + os.WTERMSIG(raw) if os.WIFSIGNALED(raw) else os.WEXITSTATUS(raw)
        if status and not first:
            first = status
            text = f"process {index} of {len(environments)} has ended with status {status}: its siblings end with it"
            print(text, file=sys.stderr, flush=True)
            kill_all()
    return first


if __name__ == "__main__":
    sys.exit(print(__doc__) if sys.argv[1:] == ["--help"] else run_together(json.loads(sys.argv[1]), sys.argv[2:]))
