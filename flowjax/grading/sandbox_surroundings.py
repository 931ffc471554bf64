"""Surroundings that tests and a program share: files of the working folder, patches of libraries.

This source runs inside the boxes, where `flowjax.grading.sandbox_runner` loads it under its module name.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# (a value here may be of any type)

import os
import sys
import types

from flowjax.grading.sandbox_values import Gone, importable, is_mirror

_OS = types.SimpleNamespace(**{name: getattr(os, name) for name in dir(os)})  # copied before tests may patch it
_PATH = types.SimpleNamespace(**{name: getattr(os.path, name) for name in dir(os.path)})
_MAX_FILES = 2000


class WorkingFolder:
    """The files of the working folder, of which each box has a copy that follows the other's changes."""

    def __init__(self):
        self._root = _OS.getcwd()
        self._device = _OS.stat(self._root).st_dev
        self._known = self._scan()
        self._place = "."

    def moved(self):
        """The folder that this side changed to since the last call, relative to the working folder; None if none."""
        try:
            place = _PATH.relpath(_OS.getcwd(), self._root)
        except OSError:  # it has been removed
            return None
        if place == self._place or place.split("/")[0] == "..":
            return None
        self._place = place
        return place

    def follow(self, place):
        """Go to the folder that the other side has gone to."""
        try:  # noqa: SIM105 (contextlib takes a while to import)
            _OS.chdir(_PATH.join(self._root, place))
        except OSError:
            pass

    def _scan(self):
        """Path -> (time, size, inode) of files, None of folders; relative paths, at most `_MAX_FILES` or so."""
        found, stack = {}, [""]
        while stack and len(found) < _MAX_FILES:
            folder = stack.pop()
            try:
                entries = list(_OS.scandir(_PATH.join(self._root, folder)))
            except OSError:
                continue
            for entry in entries:
                name = _PATH.join(folder, entry.name)
                try:
                    facts = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        if facts.st_dev == self._device:  # else something is mounted there, which is not the program's
                            found[name] = None
                            stack.append(name)
                    elif entry.is_file(follow_symlinks=False):
                        found[name] = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
                except OSError:
                    continue
        return found

    def changes(self):
        """Changes since the last call: [path, False] of removed ones, [path, None] of new folders, and [path, contents
        in hexadecimal, time in ns] of new and changed files."""
        now, before = self._scan(), self._known
        self._known = now
        # Removals in reverse order: a folder after its contents. New ones in order: a folder before its contents.
        changed = [[name, False] for name in sorted(before, reverse=True) if name not in now]
        for name in sorted(now):
            if name in before and before[name] == now[name]:
                continue
            if now[name] is None:
                changed.append([name, None])
                continue
            try:
                changed.append([name, self._read(name), now[name][0]])
            except OSError:
                continue
        return changed

    def _read(self, name):
        fd = _OS.open(_PATH.join(self._root, name), _OS.O_RDONLY | _OS.O_NOFOLLOW)
        try:
            parts = []
            while part := _OS.read(fd, 1 << 20):
                parts.append(part)
            return b"".join(parts).hex()
        finally:
            _OS.close(fd)

    def apply(self, changes):
        """Make the other side's changes here, except outside the working folder."""
        for name, content, *when in changes:
            if name.startswith("/") or ".." in name.split("/"):
                continue
            path = _PATH.join(self._root, name)
            try:
                if content is False:
                    _OS.rmdir(path) if _PATH.isdir(path) else _OS.unlink(path)
                elif content is None:
                    _OS.mkdir(path)
                else:
                    fd = _OS.open(path, _OS.O_WRONLY | _OS.O_CREAT | _OS.O_TRUNC | _OS.O_NOFOLLOW, 0o666)
                    view = memoryview(bytes.fromhex(content))
                    while view:
                        view = view[_OS.write(fd, view) :]
                    _OS.close(fd)
                    _OS.utime(path, ns=(when[0], when[0]))
            except OSError:
                continue
        self._known = self._scan()  # or the next `changes` would send them back


def follow_patches(peer):
    """Apply in the program's box, too, what tests patch in libraries with `unittest.mock`."""
    from unittest import mock

    enter, leave = mock._patch.__enter__, mock._patch.__exit__

    def entered(self):
        result = enter(self)
        try:
            place = _place(self.target)
            if place is not None:
                peer.ask("patch", *place, self.attribute, getattr(self.target, self.attribute))
                self._followed = place
        except Gone:
            raise
        except Exception:  # the program's box lacks the target: nothing to patch there
            pass
        return result

    def left(self, *error):
        place = self.__dict__.pop("_followed", None)
        if place is not None and not peer.late:
            peer.ask("unpatch", *place, self.attribute)
        return leave(self, *error)

    mock._patch.__enter__, mock._patch.__exit__ = entered, left


def _place(target):
    if is_mirror(target):
        return None  # setting the mirror's attribute has patched the object itself
    if isinstance(target, types.ModuleType):
        return None if target.__name__ in ("tests", "sys", "__main__") else (target.__name__, [])
    if isinstance(target, type) and importable(target):
        return target.__module__, target.__qualname__.split(".")
    return None


# Names that mean libraries in tests. Tests may rely on the program's imports of these.
LIBRARY_NAMES = {
    *sys.stdlib_module_names,
    "np",
    "numpy",
    "pd",
    "pandas",
    "plt",
    "scipy",
    "sklearn",
    "sp",
    "stats",
    "torch",
}
_BINDS = ("STORE_NAME", "STORE_GLOBAL", "DELETE_NAME")
_LOOKS_UP = ("LOAD_NAME", "LOAD_GLOBAL")


def looked_up(code):
    """Names that tests look up and do not bind themselves: the program's, where they are not builtins."""
    import dis

    bound = {step.argval for step in dis.get_instructions(code) if step.opname in _BINDS}
    found, codes = set(), [code]
    for each in codes:
        found |= {step.argval for step in dis.get_instructions(each) if step.opname in _LOOKS_UP}
        codes += [constant for constant in each.co_consts if isinstance(constant, types.CodeType)]
    return found - bound


def comes_of_mirror(error):
    """True for an exception that Python itself raised, at a line that names an object of the other side: most likely
    for something that the object cannot do."""
    import dis

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    frame, code = trace.tb_frame, trace.tb_frame.f_code
    spans = [(start, end) for start, end, line in code.co_lines() if line == trace.tb_lineno]
    for step in dis.get_instructions(code):
        if step.offset == trace.tb_lasti and step.opname == "RAISE_VARARGS":
            return False
    for step in dis.get_instructions(code):
        if step.opname.startswith("LOAD_") and any(start <= step.offset < end for start, end in spans):
            for name in step.argval if isinstance(step.argval, tuple) else (step.argval,):
                if isinstance(name, str) and is_mirror(frame.f_locals.get(name, frame.f_globals.get(name))):
                    return True
    return False


def names_of(code):
    """All names that a code object and those in it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return names
