"""Mirrors: objects of one box as another sees them. Each passes attributes, calls and operators on to its peer.

This source runs inside the boxes, where `flowjax.grading.sandbox_runner` loads it under its name.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# (a value here may be of any type)

import sys

_UNARY = """
len iter next reversed bool int float complex index abs neg pos invert round trunc floor ceil str repr bytes format
fspath length_hint call enter exit hash getitem setitem delitem missing sizeof contains array
""".split()  # noqa: SIM905 (36 lines otherwise)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod".split()  # noqa: SIM905
OPERATORS = {f"__{kind}{name}__" for name in _BINARY for kind in ("", "r", "i")} | {f"__{n}__" for n in _COMPARISONS}
DUNDERS = [f"__{name}__" for name in _UNARY] + sorted(OPERATORS)
OPERATORS.add("__contains__")
PUBLIC_DUNDERS = {*DUNDERS, "__name__", "__doc__", "__qualname__", "__module__"}


class Gone(BaseException):
    """The other side has ended, or has used up its time: no test may catch this and pass."""


def importable(value):
    """True if a class or function is found in its module by its name."""
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
    """The class of mirrored classes: what is not known here is asked for."""

    def __getattr__(cls, name):
        peer, number = type.__getattribute__(cls, "_mirror")
        if name in ("__abstractmethods__", "__set_name__", "__get__"):
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
    """A method of a mirror that is carried out by the object."""

    def method(self, *arguments, **keywords):
        peer, number = object.__getattribute__(self, "mirror_of")
        if name in OPERATORS and not peer.may_operate(self, arguments):
            return NotImplemented
        return peer.ask("operate", number, name, arguments, keywords)

    method.__name__ = name
    return method


def attribute(name):
    """A property of a mirror that is the object's attribute."""

    def get(self):
        peer, number = object.__getattribute__(self, "mirror_of")
        return peer.ask("get", number, name)

    def put(self, value):
        peer, number = object.__getattribute__(self, "mirror_of")
        peer.ask("set", number, name, value)

    return property(get, put)


class Mirror:
    """Base of all mirrors of plain objects, which have no state here."""

    def __getattribute__(self, name):
        if name in ("mirror_of", "_mirror_class"):
            return object.__getattribute__(self, name)
        if name == "__class__":
            return object.__getattribute__(self, "_mirror_class")
        peer, number = object.__getattribute__(self, "mirror_of")
        return peer.ask("get", number, name)

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
    """`__getattr__` of mirrors that are data too."""
    try:
        peer, number = object.__getattribute__(self, "mirror_of")
    except AttributeError:
        raise AttributeError(name) from None
    if name.startswith("__") and name not in ("__dict__", "__wrapped__"):
        raise AttributeError(name)
    return peer.ask("get", number, name)


def set_for(self, name, value):
    """`__setattr__` of mirrors that are data too."""
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
    """The peer of a mirror, and the number that it knows the object by."""
    if isinstance(value, type):
        return type.__getattribute__(value, "_mirror")
    return object.__getattribute__(value, "mirror_of")
