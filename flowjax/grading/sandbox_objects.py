"""Remote objects between two boxes: the protocol by which tests and a tested program in two processes use each other's
objects.

A value is sent as data where it is data of Python's own types. Everything else stays where it is, and the other side
gets a mirror (a proxy): an object of a class of the same name that passes on attributes, calls and operators. Both
sides do the same, so callbacks, generators and mocks of the tests work in the program, and classes of the program in
the tests.

- Lists, dicts and other containers that were sent are shared: a change is sent with the next message, either way.
- Exceptions arrive as their own classes, or as mirrors that derive from their built-in bases.
- The working folder, `sys.stdout` and its kin, `os.environ`, the state of `random` and patches of `unittest.mock` are
  kept the same on both sides.

The program can send anything; so whatever decides a test is computed on the tests' side. Its own operators do not
decide how its results compare with data of the tests, unless the tests name its class (`Peer.may_operate`). And of the
tests' objects it may use only what is public (`Peer._allowed`): no frames, code or globals.

This source runs inside the boxes, and so do the three that it imports (`sandbox_runner` loads them): values and
mirrors that cross, objects of libraries as data, and their surroundings (files, patches).
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# (a value here may be of any type)

import builtins
import os
import sys
import types

from flowjax.grading.sandbox_libraries import LIBRARIES, check_data, from_parts, is_part, parts_of
from flowjax.grading.sandbox_surroundings import WorkingFolder, comes_of_mirror
from flowjax.grading.sandbox_values import (
    COMPUTING_MODULES,
    CONTAINERS,
    CONTENT,
    DERIVABLE,
    DUNDERS,
    FUNCTION_TYPES,
    INTERPRETER_TYPES,
    OPERATORS,
    PLAIN_READERS,
    PUBLIC_DUNDERS,
    READERS,
    SCALARS,
    WRITERS,
    Gone,
    Mirror,
    MirrorType,
    ask_for,
    attribute,
    base_of,
    empty_container,
    fill,
    forward,
    forward_unless,
    importable,
    is_data_class,
    is_mirror,
    is_mirror_class,
    is_standard_library,
    items_of,
    load_writers,
    mirror_of,
    only_computes,
    set_for,
    snapshot,
    text_of,
    unchanged,
)

_MOST_REMEMBERED = 100  # exceptions: older ones are hardly still being raised
_STREAMS = ("stdin", "stdout", "stderr")
_HIDDEN = ("gi_", "cr_", "ag_", "co_", "f_", "tb_", "func_", "im_")
_NOT_FOR_PROGRAMS = ("antigravity", "flowjax", "idlelib", "lib2to3", "solution", "test", "this", "unittest")
_FOR_PROGRAMS = {"get", "set", "del", "call", "operate", "copy", "dir", "await", "step"}  # actions they may ask for


_FORMATS = ("format", "format_map")
# Attributes that configure a mock, or change or read its record of calls: tests decide by these.
_OF_MOCKS = (
    *("attach_mock", "configure_mock", "mock_add_spec", "reset_mock"),
    *("call_args", "call_args_list", "call_count", "called", "method_calls", "mock_calls"),
)


def _is_mock(value):
    kind = value if isinstance(value, type) else type(value)
    return any(base.__module__ == "unittest.mock" for base in kind.__mro__)


class Peer:
    """One side of the conversation. `decides`: tests run on this side, so the other side must not be trusted."""

    def __init__(self, send, receive, *, decides, files):
        self._send, self._receive, self.decides = send, receive, decides
        self._next = 0 if decides else 1
        self._kept = {}  # number -> object of this side that the other has a mirror of
        self._numbers = {}  # id of an object -> number
        self._mirrors = {}  # number -> mirror of an object of the other side
        self._shared = {}  # number -> (container, what it held when last sent or received)
        self.trusted = set()  # classes of the program that the present test has asked for by name
        self.late = ""  # reason for which the other side no longer answers in the present test
        self._ended = False
        self._raised = []  # exceptions of the present test that the other side raised, or that refused it something
        self._patched = {}
        self._environment = dict(os.environ)
        self._streams = {name: getattr(sys, name) for name in _STREAMS}
        self._real_streams = dict(self._streams)
        self._random = None
        self._files = WorkingFolder() if files else None
        self._depth = 0

    # Talk

    def ask(self, action, *arguments):
        """Have the other side do something, and serve what it asks for meanwhile (a callback, say).

        Raises:
            Gone: it has ended or has taken too long. Otherwise the exception that it raised.
        """
        if self.late:
            raise Gone(self.late)
        self._send(["do", action, self._encode(list(arguments)), self._state()])
        while True:
            message = self._receive()
            if message is None or message[0] in ("gone", "late"):
                self._ended = message is None or message[0] == "gone"
                self.late = "the program ended before it answered" if self._ended else "took too long"
                raise Gone(self.late)
            if message[0] == "do":
                self.serve(message)
                continue
            value, failed = self._read_answer(message)
            if failed:
                self._remember(value)
                raise value
            return value

    def begin_test(self):
        """Forget the former test's exceptions and lateness; a program that has ended fails all following tests."""
        self._raised.clear()
        if not self._ended:
            self.late = ""

    def serve(self, message):
        """Do what the other side asks for, and send the answer."""
        self._send(self.answer(message))

    def answer(self, message):
        """Do what the other side asks for. Returns the answer: ["return" or "raise", value, state, forgotten numbers],
        or ["late", ...]."""
        self._depth += 1
        answer = None
        try:
            try:
                self._apply(message[3])
                if self.decides and message[1] not in _FOR_PROGRAMS:
                    raise PermissionError(f"{message[1]} is not for programs")
                arguments = self._decode(message[2])
                value = getattr(self, "_do_" + message[1])(*arguments)
                answer = ["return", self._encode(value)]
            except Gone:
                raise
            except BaseException as error:
                if type(error).__name__ == "_Late":
                    answer = ["late"]
                else:
                    answer = ["raise", self._encode_exception(error)]
                    error.__traceback__ = None
                del error
        finally:
            self._depth -= 1
        arguments = value = None  # drop these references: `_forget` counts what is still held
        return [*answer, self._state(), [] if self.decides else self._forget()]

    def _read_answer(self, message):
        self._apply(message[2])
        value = self._decode(message[1])
        for number in message[3]:
            entry = self._shared.pop(number, None)
            if entry is not None:
                self._numbers.pop(id(entry[0]), None)
        if message[0] == "raise" and not isinstance(value, BaseException):
            raise Gone("the program answered nonsense")
        return value, message[0] == "raise"

    # Actions that the other side may ask for

    def _local(self, number, *, name=""):
        value = self._kept[number]
        if name and not self._allowed(value, name):
            raise AttributeError(f"{name!r} of an object of the tests is not for programs")
        return value

    def _allowed(self, value, name):
        """True for attributes of an object of this side that the other side may use: public ones."""
        if not self.decides:
            return True
        if isinstance(value, types.ModuleType) or name.startswith(_HIDDEN) or name == "skipTest":
            return False
        if (name in _OF_MOCKS or name.startswith("assert_")) and _is_mock(value):
            return False
        # `str.format` reads any attribute of its arguments by name ("{0.__class__}"), also private ones.
        if name in _FORMATS and issubclass(value if isinstance(value, type) else type(value), str):
            return False
        return not name.startswith("_") or name in PUBLIC_DUNDERS

    def _may_change(self, value, name):
        """True for an attribute that the other side may set or delete: none that decides how an object compares, and
        none of a library's class, which the tests use, too."""
        return not self.decides or not (name.startswith("_") or (isinstance(value, type) and importable(value)))

    def _do_get(self, number, name):
        value = self._local(number, name=name)
        if self.decides and name.startswith("__") and _is_mock(value):  # a mock's `__eq__` has a return value to set
            raise AttributeError(f"{name!r} of a mock is not for programs")
        return getattr(value, name)

    def _do_set(self, number, name, value):
        setattr(self._to_change(number, name), name, value)

    def _do_del(self, number, name):
        delattr(self._to_change(number, name), name)

    def _to_change(self, number, name):
        value = self._local(number, name=name)
        if not self._may_change(value, name):
            raise AttributeError(f"{name!r} of an object of the tests is not for programs to change")
        return value

    def _do_call(self, number, arguments, keywords=None):
        return self._local(number, name="__call__")(*arguments, **(keywords or {}))

    def _do_operate(self, number, name, arguments, keywords=None):
        if name not in DUNDERS:
            raise AttributeError(f"{name!r} is no operator")
        value = self._local(number, name=name)
        if name == "__next__":
            return next(value)
        return getattr(type(value), name)(value, *arguments, **(keywords or {}))

    def _do_copy(self, number, deep=True):
        import copy

        return (copy.deepcopy if deep else copy.copy)(self._local(number))

    def _do_dir(self, number):
        value = self._local(number)
        return [name for name in dir(value) if self._allowed(value, name)]

    def _do_await(self, number):
        import asyncio

        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)  # `run` refuses to start inside a running loop; that one waits for this call
        try:
            return asyncio.run(self._local(number))
        finally:
            asyncio._set_running_loop(outer)

    def _do_step(self, number, how, value):
        generator = self._local(number)
        return generator.throw(value) if how == "throw" else generator.send(value)

    def _do_name(self, name):
        """A global of the program."""
        return getattr(sys.modules["solution"], name)

    def _do_patch(self, module, owner, attribute, value):
        """Patch here what `unittest.mock` patched in a library there."""
        target = __import__(module, fromlist=["x"])
        for part in owner:
            target = getattr(target, part)
        key = (module, *owner, attribute)
        self._patched.setdefault(key, []).append((attribute in vars(target), getattr(target, attribute, None)))
        setattr(target, attribute, value)

    def _do_unpatch(self, module, owner, attribute):
        target = __import__(module, fromlist=["x"])
        for part in owner:
            target = getattr(target, part)
        was_there, before = self._patched[(module, *owner, attribute)].pop()
        if was_there:
            setattr(target, attribute, before)
        else:
            delattr(target, attribute)

    def _do_import(self, name):
        __import__(name)

    # Operators

    def may_operate(self, mirror, others):
        """True if an object of the other side may decide how it compares or combines with others.

        On the tests' side: always with other objects of the program; with the tests' data only if they name its class.
        Else a result whose `__eq__` returns True for everything would pass every test.
        """
        return all(is_mirror(other) for other in others) or self.may_decide(mirror)

    def may_decide(self, mirror):
        """True if methods of an object of the other side may answer where tests ask something of data."""
        return not self.decides or not self.trusted.isdisjoint(type(mirror).__mro__)

    def may_forgive(self, kind, error=None):
        """True for an exception that a context manager of the other side may swallow: one of the tests' own, which is
        no failure of a test, and which neither the other side nor its objects have caused."""
        if not self.decides:
            return True
        chain = [error] if error is not None else []
        for each in chain:
            if any(each is raised for raised in self._raised) or comes_of_mirror(each):
                return False
            chain += [e for e in (each.__cause__, each.__context__) if e is not None and all(e is not c for c in chain)]
        return not issubclass(kind, AssertionError)

    def refusal(self, text):
        """The exception for something that objects of the other side may not do."""
        error = TypeError(text)
        self._remember(error)
        return error

    def _remember(self, error):
        if self.decides:
            self._raised = [*self._raised[-_MOST_REMEMBERED:], error]

    def named_by_tests(self, name):
        """A global of the program that tests ask for by name; a class is then trusted with its own operators."""
        value = self.ask("name", name)
        if is_mirror_class(value) and name[:1].isupper():
            self.trusted.add(value)
        return value

    # State that goes with each message

    def _state(self):
        state = {}
        changes = [self._content(number, box) for number, box in self._changed()]
        if changes:
            state["shared"] = changes
        if self._files is not None and (files := self._files.changes()):
            state["files"] = files
        if self._files is not None and self.decides and (place := self._files.moved()):
            state["place"] = place
        if "random" in sys.modules and (now := sys.modules["random"].getstate()) != self._random:
            # At first each side has a state of its own: both then take that of the tests.
            if self._random is not None or self.decides:
                state["random"] = self._encode(now)
            self._random = now
        if self.decides:
            now = dict(os.environ)
            if now != self._environment:
                self._environment = now
                state["environment"] = now
            for name in _STREAMS:
                stream = getattr(sys, name)
                if stream is not self._streams[name]:
                    self._streams[name] = stream
                    is_real = stream is self._real_streams[name]
                    state.setdefault("streams", {})[name] = None if is_real else self._encode(stream)
        return state

    def _apply(self, state):
        for kind, number, *parts in state.get("shared", ()):
            if number in self._shared:
                container = self._shared[number][0]
                fill(container, kind, self._parts(kind, parts))
                self._shared[number] = (container, snapshot(container))
        if self._files is not None and "files" in state:
            self._files.apply(state["files"])
        if "random" in state:
            import random

            random.setstate(self._decode(state["random"]))
            self._random = random.getstate()
        if not self.decides:
            if self._files is not None and "place" in state:
                self._files.follow(state["place"])
            if "environment" in state:
                os.environ.clear()
                os.environ.update(state["environment"])
            for name, stream in state.get("streams", {}).items():
                setattr(sys, name, self._real_streams[name] if stream is None else self._decode(stream))

    def _changed(self):
        for number, (container, before) in list(self._shared.items()):
            if not unchanged(container, before):
                self._shared[number] = (container, snapshot(container))
                yield number, container

    def _forget(self):
        """Drop shared containers that nothing else on this side refers to. Returns their numbers, for the other side.

        A container is kept if it has references from outside the shared ones, or is reachable from one that is kept.
        """
        if self._depth:
            return []
        inner = {}
        for container, before in self._shared.values():
            for held in (container, before):
                for part in held.values() if isinstance(held, dict) else held if isinstance(held, (list, set)) else ():
                    inner[id(part)] = inner.get(id(part), 0) + 1
        kept, stack = set(), []
        for number, entry in self._shared.items():
            # Two references are always there: the entry's, and the argument of `getrefcount`.
            if sys.getrefcount(entry[0]) - 2 > inner.get(id(entry[0]), 0):
                stack.append(number)
        while stack:
            number = stack.pop()
            if number in kept:
                continue
            kept.add(number)
            container = self._shared[number][0]
            for part in container.values() if isinstance(container, dict) else container:
                if id(part) in self._numbers and self._numbers[id(part)] in self._shared:
                    stack.append(self._numbers[id(part)])
        gone = [number for number in self._shared if number not in kept]
        for number in gone:
            self._numbers.pop(id(self._shared.pop(number)[0]), None)
        return gone

    # Values

    def _number(self, value):
        number = self._numbers.get(id(value))
        if number is None:
            self._next += 2  # even on the tests' side, odd on the program's: no number is given twice
            number = self._numbers[id(value)] = self._next
            self._kept[number] = value
        return number

    def _encode(self, value, depth=0):
        if depth > 200:
            raise RecursionError("a value is nested too deeply to leave its box")
        # Exact types first, by `type` and not `isinstance`: a derived class could override how its data reads. Derived
        # classes come last, and their content is read by the methods of their built-in base.
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else ["int", hex(value)]
        if kind is float:
            return ["float", value.hex()]
        if kind in (tuple, frozenset):
            return [kind.__name__, *(self._encode(part, depth + 1) for part in value)]
        if kind.__module__ == "collections" and len(CONTAINERS) == 4:
            load_writers("collections")
        if kind in CONTAINERS:
            return self._encode_container(value, depth)
        if is_mirror(value):
            return ["yours", mirror_of(value)[1]]
        if kind in WRITERS:
            return WRITERS[kind](self, value)
        if isinstance(value, type):
            return self._encode_class(value)
        if isinstance(value, types.ModuleType):
            tested = getattr(value, "__tested__", False)
            return ["object", self._number(value), self._encode_class(kind)] if tested else ["module", value.__name__]
        if isinstance(value, types.BuiltinFunctionType) and only_computes(value):
            return ["pure", value.__module__, value.__name__]
        if (
            self.decides
            and isinstance(value, FUNCTION_TYPES)
            and importable(value)
            and is_standard_library(value.__module__)
        ):
            return ["function", value.__module__, value.__qualname__]
        if isinstance(value, types.CoroutineType):
            return ["coroutine", self._number(value)]
        if isinstance(value, types.GeneratorType):
            return ["generator", self._number(value)]
        if isinstance(value, BaseException):
            return self._encode_exception(value)
        if (named := parts_of(value)) is not None:
            return ["library", named[0], *(self._encode(part, depth + 1) for part in named[1])]
        for base, plain in PLAIN_READERS.items():
            if isinstance(value, base):
                parts = self._encode_class(kind), self._encode(plain(value), depth + 1)
                return ["valued", self._number(value), *parts]
        for base in (list, dict, set):
            if isinstance(value, base):
                return self._encode_derived(value, base, depth)
        return ["object", self._number(value), self._encode_class(kind)]

    def _encode_container(self, value, depth):
        number = self._numbers.get(id(value))
        if number is not None and number in self._shared:
            return ["shared", number]
        number = self._number(value)
        del self._kept[number]
        self._shared[number] = (value, snapshot(value))
        return self._content(number, value, depth)

    def _encode_derived(self, value, base, depth):
        """An object of a class derived from list, dict or set: its content is shared, its methods stay where it is."""
        number = self._numbers.get(id(value))
        if number is not None and number in self._shared:
            return ["shared", number]
        number = self._number(value)
        self._shared[number] = (value, snapshot(value))
        return ["derived", number, self._encode_class(type(value)), self._content(number, value, depth)]

    def _content(self, number, value, depth=0):
        kind = type(value).__name__ if type(value) in CONTAINERS else base_of(value).__name__
        if kind == "bytearray":
            return [kind, number, bytes(value).hex()]
        parts = list(items_of(value))
        if isinstance(value, dict):
            parts = [part for item in parts for part in item]
        extra = []
        if kind == "defaultdict":
            extra = [self._encode(value.default_factory, depth + 1)]
        if kind == "deque":
            extra = [value.maxlen]
        return [kind, number, *extra, *(self._encode(part, depth + 1) for part in parts)]

    def _encode_class(self, kind):
        if is_mirror_class(kind):
            return ["yours", type.__getattribute__(kind, "_mirror")[1]]
        if kind.__module__ == "builtins" and getattr(builtins, kind.__name__, None) is kind:
            return ["type", kind.__name__]
        number = self._numbers.get(id(kind))
        if number is not None:
            return ["class", number]
        # Library classes are sent by their names; to the tests only those of data and exceptions.
        if importable(kind) and is_standard_library(kind.__module__) and (self.decides or is_data_class(kind)):
            known = next((base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"), "")
            return ["named", kind.__module__, kind.__qualname__, known]
        number = self._number(kind)
        bases = [self._encode_class(base) for base in kind.__bases__]
        members = {n for base in kind.__mro__ if base.__module__ != "builtins" for n in vars(base)}
        members = sorted(n for n in members if not n.startswith("__") or n in DUNDERS)
        dunders = [name for name in DUNDERS if getattr(kind, name, None) is not getattr(object, name, None)]
        claimed = [kind.__module__, kind.__qualname__] if importable(kind) else INTERPRETER_TYPES.get(kind)
        return [
            "class",
            number,
            kind.__name__,
            bases,
            dunders,
            members,
            claimed,
            kind.__doc__ if type(kind.__doc__) is str else "",
        ]

    def _encode_exception(self, error):
        if is_mirror(error):
            return ["yours", mirror_of(error)[1]]
        try:
            text = str(error)
        except BaseException:
            text = ""
        attributes = {name: value for name, value in vars(error).items() if not name.startswith("__")}
        kind = self._encode_class(type(error))
        arguments = error.__reduce__()[1] if type(error).__module__ == "builtins" else error.args  # with a file's name
        # With a number, so that an exception of this side that comes back is the same object again.
        sent = self._encode_all(arguments), self._encode_all(attributes)
        encoded = ["exception", self._number(error), kind, *sent, text]
        cause = error.__cause__
        return [*encoded, self._encode_exception(cause)] if cause is not None and not is_mirror(cause) else encoded

    def _encode_all(self, values):
        if isinstance(values, dict):
            return {name: self._encode(value) for name, value in values.items() if isinstance(name, str)}
        return [self._encode(value) for value in values]

    def _decode(self, value):
        if not isinstance(value, list):
            if isinstance(value, (dict, float)):
                raise ValueError("not an encoded value")
            return value
        tag, *parts = value
        if tag in ("list", "set", "dict", "bytearray", "deque", "OrderedDict", "defaultdict", "Counter"):
            container = empty_container(tag, parts)
            return self._receive_shared(container, tag, parts)
        if tag == "tuple":
            return tuple([self._decode(part) for part in parts])
        if tag == "shared":
            return self._shared[parts[0]][0]
        if tag == "yours":
            return self._kept[parts[0]] if parts[0] in self._kept else self._shared[parts[0]][0]
        return getattr(self, "_decode_" + tag)(*parts)

    def _receive_shared(self, container, tag, parts):
        number, *parts = parts
        self._shared[number] = (container, None)
        self._numbers[id(container)] = number
        fill(container, tag, self._parts(tag, parts))
        self._shared[number] = (container, snapshot(container))
        return container

    def _parts(self, tag, parts):
        return parts if tag == "bytearray" else [self._decode(part) for part in parts]

    def _decode_int(self, text):
        return int(text, 16)

    def _decode_float(self, text):
        return float.fromhex(text)

    def _decode_complex(self, real, imaginary):
        return complex(float.fromhex(real), float.fromhex(imaginary))

    def _decode_bytes(self, text):
        return bytes.fromhex(text)

    def _decode_frozenset(self, *parts):
        return frozenset([self._decode(part) for part in parts])

    def _decode_range(self, *parts):
        return range(*parts)

    def _decode_slice(self, *parts):
        return slice(*[self._decode(part) for part in parts])

    def _decode_constant(self, name):
        return {"Ellipsis": ..., "NotImplemented": NotImplemented}[name]

    def _decode_data(self, name, *parts):
        """A value of a class that is data, by its constructor."""
        decoded = [self._decode(part) for part in parts]
        if not all(map(is_part, decoded)):
            raise ValueError(f"a part of {name} is no data")
        return READERS[name](*decoded)

    def _decode_view(self, name, items):
        items = self._decode(items)
        if name not in ("keys", "values", "items") or type(items) is not dict:
            raise ValueError(f"{name} is no view of a dict")
        return getattr(items, name)()

    def _decode_library(self, name, *parts):
        value = from_parts(name, [self._decode(part) for part in parts])
        if self.decides and name == "numpy.objects":  # numpy calls methods of the objects in it, so all must be data
            check_data(value)
        return value

    def _decode_type(self, name):
        kind = getattr(builtins, name)
        if not isinstance(kind, type):
            raise ValueError(f"{name} is no type")
        return kind

    def _decode_pure(self, module, name):
        function = getattr(__import__(module, fromlist=["x"]) if module in COMPUTING_MODULES else builtins, name)
        if not only_computes(function):
            raise ValueError(f"{name} is not allowed here")
        return function

    def _decode_module(self, name):
        if self.decides and not self._may_import(name):
            raise ImportError(f"no module named {name!r} in the box of the tests")
        return __import__(name, fromlist=["x"])

    def _may_import(self, name):
        """True for a module that a program may have the tests import: not their own, none by which a test is skipped,
        and none that does something on import, such as running the tests that it finds."""
        parts = name.split(".")
        if parts[0] in _NOT_FOR_PROGRAMS or any(part.startswith("__") for part in parts):
            return False
        return name in sys.modules or is_standard_library(name)

    def _decode_named(self, module, name, known):
        """A library's class. `known` is the built-in class that it derives from: an exception is of that class for
        tests that may not import its own."""
        if self.decides and not (self._may_import(module) and is_standard_library(module)):
            known = getattr(builtins, known, None)
            if isinstance(known, type) and issubclass(known, BaseException):
                return known
            raise ImportError(f"{module} is not for tests")
        found = __import__(module, fromlist=["x"])
        for part in name.split("."):
            found = getattr(found, part)
        if self.decides and not (
            isinstance(found, type) and is_data_class(found) and not found.__module__.startswith("unittest")
        ):
            raise ValueError(f"{name} is no data")
        return found

    def _decode_function(self, module, name):
        """The program's own copy of a library's function that the tests gave it."""
        if self.decides:
            raise ValueError("functions of programs stay there")
        found = __import__(module, fromlist=["x"])
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def _decode_coroutine(self, number):
        async def finish():
            return self.ask("await", number)

        return finish()

    def _decode_generator(self, number):
        def steps():
            how, value = "send", None
            while True:
                try:
                    item = self.ask("step", number, how, value)
                except StopIteration as end:
                    return end.value
                try:
                    how, value = "send", (yield item)
                except GeneratorExit:
                    raise
                except BaseException as error:
                    how, value = "throw", error

        return steps()

    def _decode_class(self, number, name="", bases=(), dunders=(), members=(), claimed=None, doc=""):
        known = self._mirrors.get(number)
        if known is not None:
            return known
        decoded = [self._decode(base) for base in bases]
        data = [base for base in decoded if not is_mirror_class(base) and issubclass(base, DERIVABLE)]
        mirrors = [base for base in decoded if is_mirror_class(base)]
        dunders = [each for each in dunders if each in DUNDERS]
        bases = (*mirrors, *data)
        real = (kind for each in bases for kind in each.__mro__ if not is_mirror_class(kind))
        base = next((kind for kind in real if issubclass(kind, DERIVABLE)), None)
        body = {"__doc__": doc, "__module__": "solution", "_mirror": (self, number), "_claimed": claimed}
        body["_base"] = base
        if base:
            body["__getattr__"] = ask_for
            exception = issubclass(base, BaseException)
            for each in members if not exception else ():
                if not each.startswith("__"):
                    body.setdefault(each, attribute(each, base))
            body["__setattr__"] = object.__setattr__ if exception else set_for
            if exception:
                body["__str__"] = text_of
            # Operators stay those of the built-in base, so that the class cannot decide comparisons.
            names = [n for n in members if n in DUNDERS and n not in OPERATORS and n != "__hash__" and not exception]
        else:
            bases = (*bases, *([] if mirrors else [Mirror]))
            names = [n for n in dunders if n != "__hash__" or "__eq__" in dunders]
        for each in names:
            body[each] = forward_unless(each, base) if base and each in CONTENT else forward(each)
        if "__eq__" in body and "__hash__" not in body:
            body["__hash__"] = forward("__hash__") if "__hash__" in dunders else None
        try:
            mirror = MirrorType(name, bases, body)
        except TypeError:  # bases that do not go together
            mirror = MirrorType(name, (Mirror,), {**body, "_base": None})
        self._mirrors[number] = mirror
        return mirror

    def _decode_object(self, number, kind):
        known = self._mirrors.get(number)
        if known is not None:
            return known
        kind = self._mirror_class(kind, number)
        mirror = object.__new__(kind)
        object.__setattr__(mirror, "mirror_of", (self, number))
        object.__setattr__(mirror, "_mirror_class", self._claimed(kind))
        self._mirrors[number] = mirror
        return mirror

    def _mirror_class(self, encoded, number):
        """The class of a mirror. For an object of a library's class that is known here, a class that passes everything
        on to the object."""
        kind = self._decode(encoded)
        if is_mirror_class(kind):
            return kind
        dunders = [n for n in DUNDERS if getattr(kind, n, None) is not getattr(object, n, None)]
        key = ("plain", kind)
        if key not in self._mirrors:
            body = {n: forward(n) for n in dunders if n != "__hash__"}
            body |= {"_mirror": (self, -1), "_base": None, "_claimed": [kind.__module__, kind.__qualname__]}
            body["__hash__"] = object.__hash__
            self._mirrors[key] = MirrorType(kind.__name__, (Mirror,), body)
        return self._mirrors[key]

    def _claimed(self, kind):
        """The class that `isinstance` sees: a library's, if it is loaded here and holds no data."""
        claim = type.__getattribute__(kind, "_claimed")
        # These libraries test `isinstance` to see whether an object is an array, and then believe all that it says.
        if not claim or claim[0].partition(".")[0] in LIBRARIES:
            return kind
        found = sys.modules.get(claim[0])
        for part in claim[1].split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type) or issubclass(found, DERIVABLE):
            return kind
        direct = [found.__module__, found.__qualname__] == claim or claim in INTERPRETER_TYPES.values()
        return found if direct else kind  # another name for a class may lead to one of those above

    def _decode_valued(self, number, kind, plain):
        known = self._mirrors.get(number)
        if known is not None:
            return known
        kind, plain = self._decode(kind), self._decode(plain)
        base = type(plain)
        if not is_mirror_class(kind) or not issubclass(kind, base) or base not in (int, str, float, tuple, bytes):
            return plain
        mirror = base.__new__(kind, plain)
        object.__getattribute__(mirror, "__dict__")["mirror_of"] = (self, number)
        self._mirrors[number] = mirror
        return mirror

    def _decode_derived(self, number, kind, content):
        known = self._mirrors.get(number)
        if known is not None:
            return known
        kind = self._decode(kind)
        base = {"list": list, "dict": dict, "set": set}[content[0]]
        if not is_mirror_class(kind) or not issubclass(kind, base):
            return self._decode(content)
        mirror = base.__new__(kind)
        object.__getattribute__(mirror, "__dict__")["mirror_of"] = (self, number)
        self._mirrors[number] = mirror
        return self._receive_shared(mirror, content[0], content[1:])

    def _decode_exception(self, number, kind, arguments, attributes, text, cause=None):
        known = self._mirrors.get(number)
        if known is not None:
            return known
        kind = self._decode(kind)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError("an exception of no exception's class")
        arguments = [self._decode(part) for part in arguments]
        error = kind.__new__(kind, *arguments)
        try:
            error.args = tuple(arguments)
            if not is_mirror_class(kind):
                error.__init__(*arguments)
        except Exception:
            error.args = tuple(arguments)
        if is_mirror_class(kind):
            error.__dict__["mirror_of"] = (self, number)
            error.__dict__["_text"] = text
        for name, part in attributes.items():
            try:
                error.__dict__[name] = self._decode(part)
            except Exception:  # an attribute that cannot be sent is left out
                continue
        if cause is not None:
            error.__cause__ = self._decode(cause)
        self._mirrors[number] = error
        return error
