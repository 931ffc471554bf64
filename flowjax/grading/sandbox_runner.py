"""Runner inside the sandbox, beside a tested program. Its source is sent there; it imports nothing of this package.

Standard input begins with a job: its length in eight bytes, then `marshal`, which is safe in this direction only, since
it must not read hostile data. Answers are lines of JSON on what standard output was at the start; what the program
prints goes to standard error. The program shares this process and can write any answer in its name, so nothing secret
is here: neither expected results nor tests, only inputs. `serve` and `check` are two boxes: tests run in the second one
and reach the program in the first one only by sending data.
"""

import _signal as signal  # the C part alone: other imports would be a third of the time that a box takes to start
import atexit
import builtins
import marshal
import os
import sys
import time
from _json import encode_basestring_ascii

Module = type(sys)

_MAX_DEPTH = 200  # as between tests and program; Python's own limit is a thousand nested calls
_MAX_DIGITS = 5000  # of a decimal or a part of a fraction: longer ones take long to read


def encode(value, depth=0):
    """A value as JSON that keeps Python's types.

    Subclasses become their built-in base; numpy's scalars and a dictionary's key and item views become the plain data
    that they equal in Python. A value that is no data becomes ["other", type].
    """
    if value is None or value is True or value is False:  # by identity: 1 == True, and a class may claim to equal all
        return value
    if depth > _MAX_DEPTH:
        return ["other", "nested too deeply"]
    if isinstance(value, int):
        number = int(value)
        return number if -(1 << 63) <= number < 1 << 63 else ["int", hex(number)]
    if isinstance(value, float):
        return ["float", float.hex(float(value))]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items = getattr(kind, "__iter__")(value)  # noqa: B009 (the kind's own, not one that a subclass brings)
            return [kind.__name__, *(encode(item, depth + 1) for item in items)]
    if isinstance(value, dict):
        return ["dict", *(encode(part, depth + 1) for item in dict.items(value) for part in item)]
    if isinstance(value, range):
        return ["range", *(encode(part) for part in (value.start, value.stop, value.step))]
    if isinstance(value, (type({}.keys()), type({}.items()))):
        return ["set", *(encode(item, depth + 1) for item in value)]
    kind, loaded = type(value), sys.modules.get
    if kind is getattr(loaded("decimal"), "Decimal", None):
        return ["decimal", str(value)]
    if kind is getattr(loaded("fractions"), "Fraction", None):
        return ["fraction", hex(value.numerator), hex(value.denominator)]
    if (numpy := loaded("numpy")) and isinstance(value, (numpy.number, numpy.bool_)):
        return encode(value.item(), depth + 1)
    return ["other", kind.__name__]


def decode(value):
    """The value that `encode` encoded.

    Raises:
        ValueError: `encode` makes no such thing, or a part of it is no data.
    """
    if not isinstance(value, list):
        if isinstance(value, (dict, float)):
            raise ValueError("not an encoded value")
        return value
    kind, *parts = value
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)([decode(part) for part in parts])
    if kind == "dict":
        items = [decode(part) for part in parts]
        return dict(zip(items[::2], items[1::2], strict=True))
    if kind == "int":
        return int(parts[0], 16)
    if kind == "float":
        return float.fromhex(parts[0])
    if kind == "complex":
        return complex(float.fromhex(parts[0]), float.fromhex(parts[1]))
    if kind == "bytes":
        return bytes.fromhex(parts[0])
    if kind == "range":
        return range(*parts)
    if kind in ("decimal", "fraction") and max(map(len, parts)) <= _MAX_DIGITS:
        from decimal import Decimal  # here: the sandbox itself would take as long to load them as to start
        from fractions import Fraction

        return Decimal(*parts) if kind == "decimal" else Fraction(*(int(part, 16) for part in parts))
    raise ValueError(f"a value of type {parts[0] if parts else kind} cannot leave the sandbox")


class _Late(BaseException):
    """The time of one case is over. Not derived from Exception, which programs catch."""


def _json(value):
    """JSON of None, booleans, integers, strings and lists."""
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, list):
        return "[" + ",".join([_json(part) for part in value]) + "]"
    return {None: "null", True: "true", False: "false"}[value] if value is None or type(value) is bool else repr(value)


_read, _write, _open, _close = os.read, os.write, os.open, os.close  # taken before a test may patch them
_now_s, _process_s = time.monotonic, time.process_time


def _waited_s(pid="self"):
    """Seconds that a process's first thread has waited for a processor; 0 where the kernel does not count them."""
    try:
        fd = _open(f"/proc/{pid}/schedstat", os.O_RDONLY)
        try:
            return int(_read(fd, 100).split()[1]) / 1e9
        finally:
            _close(fd)
    except (OSError, IndexError, ValueError):
        return 0.0


def _cpu_s(pid):
    """Seconds that a process has been on processors."""
    try:
        fd = _open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            fields = _read(fd, 2000).rpartition(b")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        finally:
            _close(fd)
    except (OSError, IndexError, ValueError):
        return 0.0


class _Clock:
    """Raises `_Late` when a case has used up its processor time, or as much time asleep; and again, if it was caught.

    Time in which this process waits for a processor counts as neither, nor does the time between `pause` and `go_on`,
    in which it waits for the other box. `child` is the process whose time is measured, None for this one.

    Two timers: ITIMER_PROF rings once this process has used its processor time up; ITIMER_REAL looks every 0.1 s at the
    time asleep, and of a child at its processor time, too.
    """

    def __init__(self, seconds, child=None):
        self._seconds, self._child = seconds, child
        self._paused_s, self._paused_since_s = 0.0, None

    def __enter__(self):
        self._since_s, self._waited_s = _now_s(), 0.0 if self._child else _waited_s()
        self._cpu_s = 0.0 if self._child else _process_s()
        signal.signal(signal.SIGPROF, self._ring)
        signal.signal(signal.SIGALRM, self._look)
        if self._child is None:
            signal.setitimer(signal.ITIMER_PROF, self._seconds, 0.2)
        signal.setitimer(signal.ITIMER_REAL, min(0.1, self._seconds / 2), 0.1)
        return self

    def __exit__(self, *exc):
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def pause(self):
        self._paused_since_s = _now_s()

    def go_on(self):
        self._paused_s += _now_s() - (self._paused_since_s or 0.0)
        self._paused_since_s = None

    def _ring(self, number, frame):
        raise _Late

    def _look(self, number, frame):
        if self._paused_since_s is not None:
            return
        used_s = _cpu_s(self._child) if self._child else _process_s() - self._cpu_s
        waited_s = _waited_s(self._child or "self") - self._waited_s
        # Asleep is the rest of the time since the start: not on a processor, nor waiting for one or for the other box.
        asleep_s = _now_s() - self._since_s - used_s - waited_s - self._paused_s
        if (self._child and used_s > self._seconds) or asleep_s > self._seconds:
            raise _Late


class _Lines:
    """Messages of this box: a job, then lines or sized values, come in; lines of JSON go out."""

    def __init__(self, into, out):
        self._into, self._out, self._unread = into, out, bytearray()

    def read_job(self):
        while len(self._unread) < 8 or len(self._unread) < 8 + int.from_bytes(self._unread[:8], "little"):
            self._fill()
        end = 8 + int.from_bytes(self._unread[:8], "little")
        job = marshal.loads(bytes(self._unread[8:end]))
        del self._unread[:end]
        return job

    def read_line(self):
        """The next line, None where there is none."""
        while b"\n" not in self._unread:
            if not self._fill():
                return None
        line, _, self._unread = self._unread.partition(b"\n")
        return bytes(line)

    def read_value(self):
        """The next value: a line with a number of bytes, then so many bytes of `marshal`; None at the end."""
        line = self.read_line()
        if line is None:
            return None
        size = int(line)
        while len(self._unread) < size:
            if not self._fill():
                return None
        data = bytes(self._unread[:size])
        del self._unread[:size]
        return marshal.loads(data)

    def _fill(self):
        data = _read(self._into, 1 << 16)
        self._unread += data
        return len(data)

    def write(self, *message):
        data = memoryview(_json(list(message)).encode() + b"\n")
        while data:
            data = data[_write(self._out, data) :]


def _reason(error, file):
    """One line about an exception, with the line of `file` that it came from."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, _Late):
        return "took too long"
    try:
        said = str(error.msg if isinstance(error, SyntaxError) else error)[:300]
    except BaseException:
        said = ""
    return type(error).__name__ + (": " + said if said else "") + (f" (line {line})" if line else "")


def _load(source, name):
    """A fresh module that has run `source`."""
    module = Module(name)
    module.__file__ = name + ".py"
    sys.modules[name] = module
    exec(compile(source, name + ".py", "exec"), module.__dict__)
    return module


def _compiled(job):
    """Code of the problem's preamble and of the program, compiled apart: line numbers and `from __future__` are then
    the program's own."""
    return [
        compile(job[part], file, "exec") for part, file in (("preamble", "preamble.py"), ("program", "solution.py"))
    ]


def _run(codes, module, entry=""):
    """Run preamble and program in a module.

    A name in the preamble that is the tested function's is moved into the module's builtins: the program can use it,
    but it is not taken for the program's own.
    """
    preamble, program = codes
    names = module.__dict__
    exec(preamble, names)
    if entry in names:
        names["__builtins__"] = {**vars(builtins), entry: names.pop(entry)}
    exec(program, names)


def _load_program(job):
    module = Module("solution")
    module.__file__ = "solution.py"
    module.__tested__ = True
    sys.modules["solution"] = module
    _run(_compiled(job), module, job["entry"])
    return module


def _function(module, entry):
    """The function under test; a method of `Solution` (as LeetCode has it) where there is no such function."""
    if hasattr(module, entry):
        return getattr(module, entry)
    if hasattr(module, "Solution"):
        return getattr(module.Solution(), entry)
    raise NameError(f"name {entry!r} is not defined")


def _solution(job, lines):
    """The tested function; None, after a "load" message, where the program does not load."""
    try:
        with _Clock(job["case_cpu_s"]):
            return _function(_load_program(job), job["entry"])
    except BaseException as error:
        lines.write("load", _reason(error, "solution.py"))
        return None


def _answer(function, arguments: list, seconds):
    try:
        with _Clock(seconds):
            result = function(*decode(arguments))  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues]
            return ["ok", encode(result)]
    except BaseException as error:
        return ["error", _reason(error, "solution.py")]


def calls(job, lines):
    """Call the function once for each of the arguments that come. Later ones are sent only after an answer."""
    function = _solution(job, lines)
    number = 0
    while function is not None and (arguments := lines.read_value()) is not None:
        lines.write(number, *_answer(function, arguments, job["case_cpu_s"]))
        number += 1


def _peer(job, lines, decides):
    """This side's end of the conversation with the other box, and the list of clocks to pause while it waits."""
    *_, surroundings, objects = [_load(source, name) for name, source in job["objects"]]
    import json

    dumps, loads = json.dumps, json.loads
    clocks = []

    def send(message):
        data = memoryview(b"peer " + dumps(message).encode() + b"\n")
        while data:
            data = data[_write(lines._out, data) :]

    def receive():
        for clock in clocks:
            clock.pause()
        line = lines.read_line()
        for clock in clocks:
            clock.go_on()
        return None if line is None else loads(line)

    return surroundings, objects.Peer(send, receive, decides=decides, files=job["files"]), clocks


def serve(job, lines):
    """Run the program's side of the conversation with its tests."""
    try:
        with _Clock(job["case_cpu_s"]):
            module = _load_program(job)
    except BaseException as error:
        lines.write("load", _reason(error, "solution.py"))
        return
    _, peer, clocks = _peer(job, lines, decides=False)
    solution = getattr(module, "Solution", None)
    if not hasattr(module, job["entry"]) and hasattr(solution, job["entry"]):
        setattr(module, job["entry"], getattr(solution(), job["entry"]))  # pyright: ignore[reportOptionalCall]
    lines.write("names", *[name for name in vars(module) if not name.startswith("__")])
    while (message := peer._receive()) is not None:
        clock = _Clock(job["case_cpu_s"])
        clocks.append(clock)
        try:
            with clock:
                answer = peer.answer(message)
        except _Late:
            answer = ["late"]
        clocks.clear()
        peer._send(answer)  # no clock runs, which could cut it: half an answer would be read as part of the next one


def check(job, lines):
    """Run tests against a program that is in another box. Only this box knows the token."""
    surroundings, peer, clocks = _peer(job, lines, decides=True)
    write, reason, compiled = lines.write, _reason, []
    token, job["token"] = job["token"], ""
    for source in (job["setup"], *job["sources"]):
        try:
            compiled.append(compile(source, "tests.py", "exec"))
        except (SyntaxError, ValueError) as error:
            compiled.append(error)
    module = Module("solution")
    module.__getattr__ = peer.named_by_tests
    sys.modules["solution"] = module
    used = set()
    for code in compiled:
        used |= surroundings.names_of(code) if not isinstance(code, BaseException) else set()
    if "mock" in used or "patch" in used or "MagicMock" in used:
        surroundings.follow_patches(peer)
    for number, code in enumerate(compiled[1:]):
        peer.begin_test()
        clock = _Clock(job["case_cpu_s"])
        clocks.append(clock)
        try:
            with clock:
                if isinstance(code, BaseException):
                    raise code
                if isinstance(compiled[0], BaseException):
                    raise compiled[0]
                tests = Module("tests")
                sys.modules["tests"] = tests
                names = tests.__dict__
                exec(compiled[0], names)
                peer.trusted.clear()
                wanted = surroundings.looked_up(code) - {*names, *vars(builtins)}
                for name in job["names"]:
                    if name == job["entry"] or name in wanted:
                        try:
                            value = peer.named_by_tests(name)
                        except ImportError:  # a library that is not loaded here: tests that need it import it
                            continue
                        # Only the library itself may have a library's name, no object of the program.
                        if name not in surroundings.LIBRARY_NAMES or isinstance(value, Module):
                            names[name] = value
                if job["entry"] in names:
                    names["candidate"] = names[job["entry"]]
                exec(code, names)
            said = peer.late
        except BaseException as error:
            said = peer.late or reason(error, "tests.py") or "failed"
        clocks.clear()
        write("verdict", token, number, not said, said)


def scripts(job, lines):
    """Run the program once for each of the inputs that come, each time in a process of its own (fork)."""
    codes, number = None, 0
    try:
        codes = _compiled(job)
    except BaseException as error:
        lines.write("load", _reason(error, "solution.py"))
    while codes is not None and (text := lines.read_value()) is not None:
        data = text.encode("utf-8", "surrogatepass")
        lines.write(number, *_script(codes, data, job["case_cpu_s"], job["output_bytes"]))
        number += 1


def _unnamed_file(data=b""):
    """A file without a name in the working folder: `memfd_create` is not among the allowed system calls."""
    path = f"box-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)  # noqa: PTH108 (pathlib takes as long to import as Python to start)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _script(codes, text, seconds, output_bytes):
    files = [_unnamed_file(text), _unnamed_file(), _unnamed_file()]
    child = os.fork()
    if child == 0:
        _become(codes, files, seconds)
    status = None
    try:
        with _Clock(seconds, child):
            status = os.waitpid(child, 0)[1]
    except _Late:
        pass
    try:  # noqa: SIM105 (contextlib takes a while to import)
        os.killpg(child, signal.SIGKILL)
    except OSError:
        pass
    if status is None:
        os.waitpid(child, 0)
    out, err = (os.pread(fd, output_bytes + 1, 0).decode("utf-8", "replace") for fd in files[1:])
    for fd in files:
        os.close(fd)
    if status is None or status & 127 == signal.SIGPROF:
        return ["error", "took too long", out]
    if len(out) > output_bytes:
        return ["error", "printed too much", ""]
    if status != 0:
        last = err.strip().splitlines()[-1:] or [f"ended with status {status}"]
        return ["error", last[0][:300], out]
    return ["ok", out]


def _become(codes, files, seconds):
    """In the child: become the program (streams, timer, module `__main__`), run it, and end. Never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal, by default, ends the process
        for number, fd in enumerate(files):
            os.dup2(fd, number)
        os.closerange(3, 64)
        module = Module("__main__")
        sys.modules["__main__"] = module
        sys.argv = ["solution.py"]
        try:
            _run(codes, module)
            status = 0
        except SystemExit as exit:
            status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        except BaseException as error:
            sys.stderr.write("\n" + _reason(error, "solution.py") + "\n")
        if "threading" in sys.modules:  # as Python does at its end: wait for threads, then call `atexit` functions
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        for file in (sys.stdout, sys.__stdout__, sys.stderr):  # a program may have replaced `sys.stdout`
            if file is not None:
                file.flush()
    except BaseException:
        status = 1
    os._exit(status & 255)


def main():
    # Messages keep the pipes that standard input and output were. The program reads nothing there, as from an empty
    # file, and what it prints goes to standard error.
    lines = _Lines(os.dup(0), os.dup(1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    lines.write("ready")  # before any of the program runs: a box that ends without it never began
    builtins.exit = builtins.quit = sys.exit  # defined by the module `site`, which is not loaded here (-S)
    job = lines.read_job()
    {"calls": calls, "serve": serve, "check": check, "scripts": scripts}[job["mode"]](job, lines)
    os._exit(0)


if __name__ == "__main__":
    main()
