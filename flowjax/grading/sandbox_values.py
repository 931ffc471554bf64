"""Objects that cross from box to box: data by value, containers that both share, and mirrors of everything else.

A mirror stands for an object that stays in the other box (a proxy): it passes attributes, calls and operators on to it.
This source runs inside the boxes, where `flowjax.grading.sandbox_runner` loads it under its module name.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# (a value here may be of any type)

import builtins
import operator
import sys
import types

_UNARY = """
len iter next reversed bool int float complex index abs neg pos invert round trunc floor ceil str repr bytes format
fspath length_hint call enter exit hash getitem setitem delitem missing sizeof contains array
""".split()  # noqa: SIM905 (36 lines otherwise)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod".split()  # noqa: SIM905
OPERATORS = {f"__{kind}{name}__" for name in _BINARY for kind in ("", "r", "i")} | {f"__{n}__" for n in _COMPARISONS}
DUNDERS = [f"__{name}__" for name in _UNARY] + sorted(OPERATORS)
OPERATORS.add("__contains__")
_NUMBERS = ("float", "int", "complex", "index", "abs", "neg", "pos", "invert", "round", "trunc", "floor", "ceil")
CONVERSIONS = {f"__{name}__" for name in _NUMBERS}  # into numbers, with which tests would go on
# Methods by which an object of a class derived from a built-in one tells its content.
CONTENT = {*CONVERSIONS, "__getitem__", "__iter__", "__len__", "__reversed__", "__bool__"}
# Methods that compare, as operators do.
COMPARING = {"equals", "identical", "isclose", "allclose", "issubset", "issuperset", "isdisjoint"}
COMPARING |= {"count", "index", "startswith", "endswith"}
PUBLIC_DUNDERS = {*DUNDERS, "__name__", "__doc__", "__qualname__", "__module__"}


class Gone(BaseException):
    """The other side has ended, or has used up its time: no test may catch this and pass."""


def importable(value):
    """True if a class or function is found by its name in its module, which is not the tested program."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", "")
    if module is None or not name or not isinstance(name, str) or getattr(module, "__tested__", False):
        return False
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def is_standard_library(name):
    """True for a module of Python's standard library."""
    return bool(name) and name.split(".")[0] in sys.stdlib_module_names and name != "__main__"


class MirrorType(type):
    """The metaclass of mirrored classes: attributes and operators that are not known here are asked for."""

    def __getattr__(cls, name):
        peer, number = type.__getattribute__(cls, "_mirror")
        # numpy leaves a comparison to a class that has `__array_ufunc__` and the like.
        if name in ("__abstractmethods__", "__set_name__", "__get__") or name.startswith("__array_"):
            raise AttributeError(name)
        return peer.ask("get", number, name)

    def __setattr__(cls, name, value):
        peer, number = type.__getattribute__(cls, "_mirror")
        peer.ask("set", number, name, value)

    def __delattr__(cls, name):
        peer, number = type.__getattribute__(cls, "_mirror")
        peer.ask("del", number, name)

    def __call__(cls, *arguments, **keywords):
        peer, number = type.__getattribute__(cls, "_mirror")
        return peer.ask("call", number, arguments, keywords)

    def __iter__(cls):
        return iter(cls._ask("__iter__"))

    def __len__(cls):
        return cls._ask("__len__")

    def __getitem__(cls, key):
        return cls._ask("__getitem__", key)

    def __contains__(cls, key):
        return cls._ask("__contains__", key)

    def _ask(cls, name, *arguments):
        peer, number = type.__getattribute__(cls, "_mirror")
        return peer.ask("operate", number, name, arguments)


def forward(name):
    """A method of a mirror, carried out by the object that it stands for."""

    def method(self, *arguments, **keywords):
        peer, number = object.__getattribute__(self, "mirror_of")
        if name in OPERATORS and not peer.may_operate(self, arguments):
            if name == "__contains__":  # `in` would take NotImplemented, which is true, for a yes
                raise peer.refusal("an object of the program does not say what it contains")
            return NotImplemented
        if name in CONVERSIONS and not peer.may_decide(self):
            raise peer.refusal("an object of the program is no number")
        answer = peer.ask("operate", number, name, arguments, keywords)
        failed = name == "__exit__" and arguments and arguments[0] is not None
        return answer if not failed or peer.may_forgive(*arguments[:2]) else False

    method.__name__ = name
    return method


def forward_unless(name, base):
    """As `forward`, for a class that derives from `base`: the method is that of `base` unless tests trust the class."""
    ask = forward(name)
    built_in = getattr(base, name, None) or (base.__len__ if name == "__bool__" else ask)

    def method(self, *arguments, **keywords):
        trusted = object.__getattribute__(self, "mirror_of")[0].may_decide(self)
        answer = (ask if trusted else built_in)(self, *arguments, **keywords)
        return answer if name != "__bool__" else bool(answer)

    method.__name__ = name
    return method


def attribute(name, base):
    """A property of a mirror that stands for the object's attribute. The mirror's class derives from `base`."""

    def get(self):
        return attribute_of(self, name, base)

    def put(self, value):
        peer, number = object.__getattribute__(self, "mirror_of")
        peer.ask("set", number, name, value)

    return property(get, put)


def attribute_of(mirror, name, base=None):
    """Attribute of an object of the other side; that of `base`, the built-in class that its class derives from, where
    the object's own might decide a test that does not trust its class.

    Raises:
        TypeError: it is a method that compares, of an object that is not trusted.
    """
    peer, number = object.__getattribute__(mirror, "mirror_of")
    if peer.may_decide(mirror):
        return peer.ask("get", number, name)
    owner = next((each for each in base.__mro__ if name in vars(each)), None) if base else None
    built_in = vars(owner)[name].__get__(mirror, type(mirror)) if owner else None
    if owner and not callable(built_in):
        return built_in
    value = peer.ask("get", number, name)  # a field of a named tuple may have the name of a tuple's method (`count`)
    if callable(value) and owner:
        return built_in
    if callable(value) and name in COMPARING:
        raise peer.refusal(f"{name!r} of an object of the program does not compare for tests")
    return value


class Mirror:
    """Base of all mirrors of plain objects. A mirror has no state here."""

    def __getattribute__(self, name):
        if name in ("mirror_of", "_mirror_class"):
            return object.__getattribute__(self, name)
        if name == "__class__":
            return object.__getattribute__(self, "_mirror_class")
        if name.startswith(("__torch_", "__array_")) and name != "__array__":  # libraries leave comparisons to these
            raise AttributeError(name)
        return attribute_of(self, name, type.__getattribute__(type(self), "_base"))

    def __setattr__(self, name, value):
        peer, number = object.__getattribute__(self, "mirror_of")
        peer.ask("set", number, name, value)

    def __delattr__(self, name):
        peer, number = object.__getattribute__(self, "mirror_of")
        peer.ask("del", number, name)

    def __deepcopy__(self, memo):
        peer, number = object.__getattribute__(self, "mirror_of")
        return peer.ask("copy", number)

    def __copy__(self):
        peer, number = object.__getattribute__(self, "mirror_of")
        return peer.ask("copy", number, False)

    def __dir__(self):
        peer, number = object.__getattribute__(self, "mirror_of")
        return peer.ask("dir", number)

    __hash__ = object.__hash__


def ask_for(self, name):
    """`__getattr__` of mirrors that are also data, of a class that derives from a built-in one."""
    try:
        object.__getattribute__(self, "mirror_of")
    except AttributeError:
        raise AttributeError(name) from None
    if name.startswith("__") and name not in ("__dict__", "__wrapped__"):
        raise AttributeError(name)
    return attribute_of(self, name)


def set_for(self, name, value):
    """`__setattr__` of mirrors that are also data."""
    peer, number = object.__getattribute__(self, "mirror_of")
    peer.ask("set", number, name, value)


def text_of(self):
    """`__str__` of a mirrored exception."""
    return self.__dict__.get("_text", "")


def is_mirror(value):
    """True for an object or class of the other side."""
    kind = type(value)
    if isinstance(value, type):
        return is_mirror_class(value)
    if not is_mirror_class(kind):
        return False
    try:
        object.__getattribute__(value, "mirror_of")
    except AttributeError:
        return False
    return True


def is_mirror_class(kind):
    """True for a class of the other side."""
    return type(kind) is MirrorType


def mirror_of(value):
    """The peer of a mirror, and the number by which the peer knows the object."""
    if isinstance(value, type):
        return type.__getattribute__(value, "_mirror")
    return object.__getattribute__(value, "mirror_of")


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

PLAIN_READERS = {  # read the value of a derived class by its base's methods, which that class cannot override
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
    """An empty container of the kind that `tag` names."""
    if hasattr(builtins, tag):
        return getattr(builtins, tag)()
    import collections

    load_writers("collections")
    return collections.deque(maxlen=parts[1]) if tag == "deque" else getattr(collections, tag)()


def _dict_of(value):
    """The built-in class whose methods read the content of a dict, past methods that a derived class overrides."""
    ordered = sys.modules["collections"].OrderedDict if "collections" in sys.modules else dict
    return ordered if isinstance(value, ordered) else dict


def items_of(value):
    """An iterator over the content, past methods that a derived class overrides."""
    if isinstance(value, dict):
        return _dict_of(value).items(value)
    for base in (list, set):
        if isinstance(value, base):
            return getattr(base, "__iter__")(value)  # noqa: B009 (the base's own, not one that a subclass brings)
    return iter(value)


def fill(container, tag, parts):
    """Replace the content of a container by decoded parts."""
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
    """Writers by class: functions of the peer and a value that return the value encoded. For built-in classes."""
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
    """Writers of small values, by class. Those of a module of data are added when a value of it first comes up, so that
    no box imports modules it does not need."""

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
