"""Has calls of this process fail, as the harness asks for. Python imports this before anything else of a process.

`current` in the folder FLOWJAX_FAULTS is the fault that is wanted now (see `tests.launch.faults.Fault`). It is read
anew with every call that might fail. Calls of Python itself are met by an audit hook, which may raise: opened files,
forks and connections. A write has no event: `os.write`, `Path.write_text` and SQLite's statements are wrapped.
"""

import errno
import json
import os
import sys

_SQLITE = {"ENOSPC": (13, "database or disk is full"), "EROFS": (8, "attempt to write a readonly database"),
           "EIO": (10, "disk I/O error")}  # fmt: skip


def _role() -> str:
    """The role that this process is, by its command line; "" for others."""
    with open("/proc/self/cmdline", "rb") as file:  # noqa: PTH123
        words = file.read().decode().split("\0")
    if any("guard.py" in word for word in words[:5]):
        return ""
    named = {"light_launch.py": "launch", "chaos_trainer.py": "trainer"}
    for word in words:
        if (name := word.rpartition("/")[2]) in named:
            return named[name]
        if word in ("flowjax.dataflow", "flowjax.rollout"):
            return word.removeprefix("flowjax.")
    return ""


class _Injector:
    """Counts the calls of a kind that touch the run, and raises at the one that is to fail."""

    def __init__(self, folder: str, role: str):
        self.folder, self.role = folder, role
        self.fault: dict = {}
        self.count, self.busy, self.seen_ns = 0, False, 0

    def strike(self, call: str, path: str = "", writes: bool = True) -> None:
        if self.busy:
            return
        self.busy = True
        try:
            if not self._fails(call, path, writes):
                return
        finally:
            self.busy = False
        number = getattr(errno, self.fault["error"])
        raise OSError(number, os.strerror(number), path or call)

    def _fails(self, call: str, path: str, writes: bool) -> bool:
        try:
            posted_ns = os.stat(f"{self.folder}/current").st_mtime_ns  # noqa: PTH116
        except OSError:
            return False
        if posted_ns != self.seen_ns:
            with open(f"{self.folder}/current") as file:  # noqa: PTH123
                self.fault = json.load(file)
            self.seen_ns, self.count = posted_ns, 0
        fault = self.fault
        if (fault["role"], fault["call"]) != (self.role, call) or not path.startswith(fault["runs"] if path else ""):
            return False
        if fault["error"] in ("ENOSPC", "EROFS") and not writes:  # a full or read-only disk can still be read
            return False
        self.count += 1
        if self.count < fault["nth"]:
            return False
        struck, over = (f"{self.folder}/{name}-{fault['number']}" for name in ("struck", "over"))
        if os.path.exists(struck):  # noqa: PTH110
            return fault["lasting"] and not os.path.exists(over)  # noqa: PTH110
        os.close(os.open(struck, os.O_CREAT | os.O_WRONLY))
        return True


def _install(injector: _Injector) -> None:
    import pathlib
    import sqlite3

    events = {
        "os.fork": "fork", "subprocess.Popen": "fork", "os.posix_spawn": "fork", "socket.connect": "connect",
    }  # fmt: skip

    def hook(event, args):
        if event == "open" and isinstance(args[0], (str, bytes)):
            writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            injector.strike("open", os.fsdecode(args[0]), bool(writes))
        elif event in events:
            injector.strike(events[event])

    write, write_text = os.write, pathlib.Path.write_text

    def failing_write(descriptor, data):
        if descriptor > 2:
            try:
                path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
            except OSError:
                path = "-"
            injector.strike("write", path)
        return write(descriptor, data)

    def failing_write_text(self, *args, **kwargs):
        injector.strike("write", str(self))
        return write_text(self, *args, **kwargs)

    class Connection(sqlite3.Connection):
        def execute(self, statement, *args):
            if statement.split()[0] not in ("SELECT", "PRAGMA", "ROLLBACK"):
                try:
                    injector.strike("sqlite")
                except OSError:
                    code, text = _SQLITE[injector.fault["error"]]
                    error = sqlite3.OperationalError(text)
                    error.sqlite_errorcode = code
                    raise error from None
            return super().execute(statement, *args)

    connect = sqlite3.connect
    sys.addaudithook(hook)
    os.write, pathlib.Path.write_text = failing_write, failing_write_text
    sqlite3.connect = lambda *args, **kwargs: connect(*args, **{"factory": Connection, **kwargs})


if "FLOWJAX_FAULTS" in os.environ and (_found := _role()):
    _install(_Injector(os.environ["FLOWJAX_FAULTS"], _found))
