"""Values that travel from box to box as data, and containers that both boxes share.

This source runs inside the boxes, where `flowjax.grading.sandbox_runner` loads it under its name.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# (a value here may be of any type)

import builtins
import operator
import sys
import types

DATA_MODULES = ("decimal", "fractions", "datetime", "uuid", "pathlib", "collections", "dataclasses")
SCALARS = (type(None), bool, str)


def is_data_class(kind):
    """True if objects of a class are data: exceptions, and those of modules of data."""
    return issubclass(kind, BaseException) or kind.__module__.split(".")[0] in DATA_MODULES


FUNCTION_TYPES = (types.FunctionType, types.BuiltinFunctionType)
INTERPRETER_TYPES = {  # types of the interpreter, which no module has by their own names
    kind: ["types", name]
    for name, kind in vars(types).items()
    if isinstance(kind, type) and name.endswith("Type") and not hasattr(builtins, kind.__name__)
}

PLAIN_READERS = {  # how a value of a derived class is read past what that class brings
    int: lambda value: int.__add__(value, 0),
    str: str.__str__,
    float: lambda value: float.__add__(value, 0.0),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    bytes: lambda value: bytes(bytes.__iter__(value)),
}

# Containers

CONTAINERS = {list, dict, set, bytearray}
DERIVABLE = (int, str, float, tuple, bytes, list, dict, set, BaseException)


def base_of(value):
    """The built-in container that a container derives from."""
    return next(base for base in (list, dict, set) if isinstance(value, base))


def empty_container(tag, parts):
    """A container of a kind without content."""
    if hasattr(builtins, tag):
        return getattr(builtins, tag)()
    import collections

    load_writers("collections")
    return collections.deque(maxlen=parts[1]) if tag == "deque" else getattr(collections, tag)()


def _dict_of(value):
    """The class whose methods reach the content of a dict, past those that a derived class brings."""
    ordered = sys.modules["collections"].OrderedDict if "collections" in sys.modules else dict
    return ordered if isinstance(value, ordered) else dict


def items_of(value):
    """The content, past methods that a derived class brings."""
    if isinstance(value, dict):
        return _dict_of(value).items(value)
    for base in (list, set):
        if isinstance(value, base):
            return getattr(base, "__iter__")(value)  # noqa: B009 (the base's own, not one that a subclass brings)
    return iter(value)


def fill(container, tag, parts):
    """Replace the content."""
    if tag == "bytearray":
        container[:] = bytes.fromhex(parts[0])
        return
    if tag in ("defaultdict", "deque"):
        first, *parts = parts
        if tag == "defaultdict":
            container.default_factory = first
    if isinstance(container, list):
        list.__setitem__(container, slice(None), parts)
    elif isinstance(container, dict):
        base = _dict_of(container)
        base.clear(container)
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            base.__setitem__(container, key, value)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, parts)
    else:
        container.clear()
        container.extend(parts)


def snapshot(value):
    """A copy of the content, to compare with later."""
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict):
        return dict(dict.items(value))
    return set(set.__iter__(value)) if isinstance(value, set) else list(items_of(value))


def unchanged(value, before):
    """True if a container holds the same objects as when the snapshot was made."""
    if isinstance(value, bytearray):
        return value == before
    if isinstance(value, dict):
        if len(value) != len(before) or not all(map(operator.is_, dict.values(value), before.values())):
            return False
        return all(map(operator.is_, dict.keys(value), before.keys()))
    if isinstance(value, set):
        return len(value) == len(before) and {id(part) for part in value} == {id(part) for part in before}
    return len(value) == len(before) and all(map(operator.is_, items_of(value), before))


# Data

COMPUTING_MODULES = ("math", "_operator", "builtins")
_COMPUTING = """
abs all any ascii bin callable chr divmod format hex isinstance issubclass iter len max min next oct ord pow repr round
sorted sum
""".split()  # noqa: SIM905


def only_computes(function):
    """True for a function of a library that only computes."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if module not in COMPUTING_MODULES or (module == "builtins" and name not in _COMPUTING):
        return False
    return getattr(sys.modules.get(module), name, None) is function


def _plain(name, *parts):
    return ["data", name, *parts]


def _small_values():
    """How values of small classes are written: those of the modules that are loaded."""
    return {
        complex: lambda peer, v: ["complex", v.real.hex(), v.imag.hex()],
        bytes: lambda peer, v: ["bytes", v.hex()],
        range: lambda peer, v: ["range", v.start, v.stop, v.step],
        slice: lambda peer, v: ["slice", *(peer._encode(part) for part in (v.start, v.stop, v.step))],
        type(...): lambda peer, v: ["constant", "Ellipsis"],
        type(NotImplemented): lambda peer, v: ["constant", "NotImplemented"],
        type({}.keys()): lambda peer, v: ["view", "keys", peer._encode(dict.fromkeys(v))],
        type({}.values()): lambda peer, v: ["view", "values", peer._encode(dict(enumerate(v)))],
        type({}.items()): lambda peer, v: ["view", "items", peer._encode(dict(v))],
    }


class _Small(dict):
    """Writers of small values, by class; those of further modules are added once these are loaded."""

    def __contains__(self, kind):
        if not dict.__contains__(self, kind) and kind.__module__ in DATA_MODULES:
            load_writers(kind.__module__)
        return dict.__contains__(self, kind)


WRITERS = _Small(_small_values())


def load_writers(module):
    """Writers and readers of the values of a module."""
    if module == "decimal":
        from decimal import Decimal

        WRITERS[Decimal] = lambda peer, v: _plain("Decimal", str(v))
    elif module == "fractions":
        from fractions import Fraction

        WRITERS[Fraction] = lambda peer, v: _plain("Fraction", peer._encode(v.numerator), peer._encode(v.denominator))
    elif module == "uuid":
        from uuid import UUID

        WRITERS[UUID] = lambda peer, v: _plain("UUID", v.hex)
    elif module == "datetime":
        import datetime as d

        WRITERS[d.date] = lambda peer, v: _plain("date", v.year, v.month, v.day)
        WRITERS[d.timedelta] = lambda peer, v: _plain("timedelta", v.days, v.seconds, v.microseconds)
        WRITERS[d.timezone] = lambda peer, v: _plain("timezone", peer._encode(v.utcoffset(None)))
        WRITERS[d.time] = lambda peer, v: _plain(
            "time", v.hour, v.minute, v.second, v.microsecond, peer._encode(v.tzinfo)
        )
        WRITERS[d.datetime] = lambda peer, v: _plain(
            "datetime", v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, peer._encode(v.tzinfo)
        )
    elif module == "dataclasses":
        from dataclasses import Field

        WRITERS[Field] = lambda peer, v: _plain("Field", v.name, v._field_type.name, v.init, v.repr, bool(v.compare))
    elif module == "pathlib":
        import pathlib

        for kind in (pathlib.PosixPath, pathlib.PurePosixPath):
            WRITERS[kind] = lambda peer, v: _plain(type(v).__name__, str(v))
    elif module == "collections":
        import collections

        CONTAINERS.update((collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter))


def _field(name, kind, init, shown, compared):
    """A field of a dataclass, without its default."""
    import dataclasses

    field = dataclasses.field(init=init, repr=shown, compare=compared)
    field.name, field.type = name, object
    field._field_type = getattr(dataclasses, kind if kind in ("_FIELD_CLASSVAR", "_FIELD_INITVAR") else "_FIELD")
    return field


class _Readers(dict):
    def __missing__(self, name):
        if name == "Field":
            return _field
        module = {
            "Decimal": "decimal",
            "Fraction": "fractions",
            "UUID": "uuid",
            "PosixPath": "pathlib",
            "PurePosixPath": "pathlib",
            **dict.fromkeys(("date", "time", "datetime", "timedelta", "timezone"), "datetime"),
        }[name]
        self[name] = getattr(__import__(module), name)
        return self[name]


READERS = _Readers()


def encode_numpy(value):
    """An array or a number of numpy as data; None where it holds objects."""
    numpy = sys.modules["numpy"]
    if type(value) is numpy.ndarray and not value.dtype.hasobject:
        return ["numpy", value.dtype.str if value.dtype.names is None else "", list(value.shape), value.tobytes().hex()]
    if isinstance(value, numpy.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return ["scalar", value.dtype.str, value.tobytes().hex()]
    return None
