"""Declarations of values: default, documentation, bounds and choices in one place, and the checks that these imply.

`Entry` declares one value of the config, `Section` a group of them, `Free` a section whose names are declared
elsewhere. `type_problem` and `option_problems` check options, which a function or dataclass declares by its
annotations.
"""

import difflib
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from dataclasses import field as dataclass_field
from typing import Annotated, Any, Literal

from ml_collections import ConfigDict

_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    tuple: "a tuple such as ('a', 'b')",
    dict: "a dict",
}
_PLAIN: dict[type, type] = {bool: bool, int: float, float: float, str: str}  # type of a default -> that of its option
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MOST = 10**9  # upper bound of a whole number whose declaration names none
_LONGEST_CHARACTERS = 4096  # of a text: the longest path of Linux
_SHOWN_CHARACTERS = 160  # of a refused value, in a message


@dataclass(frozen=True)
class Pattern:
    """Regular expression that a whole text must match; `remedy` tells a user in words what to give."""

    expression: str
    remedy: str

    def fits(self, text: str) -> bool:
        return re.fullmatch(self.expression, text, re.DOTALL) is not None


_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
_HOST = r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])"
# A policy's or base's name becomes a folder, a part of log files' names and of the names that engines serve it under.
NAME = Pattern(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", "give a name of letters, digits, '_', '-' and '.', at most 64")
# A run's name is a folder and nothing else.
FOLDER_NAME = Pattern(
    r"(?!\.{1,2}$)[^/\\\x00-\x1f\x7f]{0,200}",
    "give a name of at most 200 characters without slashes, and the folder as config.runs",
)
URL = Pattern(rf"https?://{_HOST}(:{_PORT})?(/\S*)?", "give addresses such as http://host:8000")
_NATS = rf"(nats|tls|wss?)://{_HOST}(:{_PORT})?"
OPTIONAL_NATS = Pattern(
    rf"|{_NATS}(,{_NATS})*",
    "give addresses such as nats://host:4222 with commas between; keys are read from NATS_CREDS, or NATS_USER and "
    "NATS_PASSWORD",
)
DATAFLOW_URL = Pattern(
    rf"|{URL.expression}|{_NATS}(,{_NATS})*/[0-9a-f]+",
    "give an address such as http://host:8000, or nats://host:4222/<id of the run>",
)
HOST = Pattern(rf"{_HOST}|[0-9A-Fa-f:]{{2,45}}", "give a host's name or address, as in 127.0.0.1")
HOST_AND_PORT = Pattern(rf"|{_HOST}:{_PORT}", "give host:port, the port from 1 to 65535")
NO_TILDE = Pattern(r"(?!~).*", "write the home folder out: '~' is not read as one")
NOT_EMPTY = Pattern(r".+", "give texts that are not empty")
# How a config names any code of a user: a world, workflow, operator, estimator, reward, data algorithm or backend.
NAMED = Pattern(r"|\w+(\.\w+)*:\w+", "give package.module:name, such as flowjax.workflows.single:play")


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Bounds of a number; `also` are values outside them with a special meaning, such as -1."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()

    def hold(self, value: float) -> bool:
        return value in self.also or (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    @property
    def range(self) -> str:
        """The bounds in words."""
        ends = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        said = " and ".join(f"{words} {end:,}" for words, end in ends.items() if end is not None)
        return said.replace("above 0", "positive") + "".join(f", or {value}" for value in self.also)


# Annotations for options of functions and dataclasses.
Share = Annotated[float, Interval(at_least=0, at_most=1)]
NotNegative = Annotated[float, Interval(at_least=0)]
Positive = Annotated[float, Interval(above=0)]


@dataclass(frozen=True)
class Entry(Interval):
    """One field of the config. Its type is that of the default.

    Bounds, choices and form apply to the value, or to each item of a tuple. `of`: type of the items of a tuple that is
    empty by default. `length`: number of items that a tuple must have. `resume`: a resumed run may have another value.
    Bounds that are not given follow from the unit.
    """

    default: Any
    doc: str
    _: KW_ONLY
    choices: tuple[Any, ...] = ()
    form: Pattern | None = None
    of: type = str
    length: int | None = None
    unit: str = ""
    resume: bool = False

    @property
    def kind(self) -> type:
        """Type of the value, or of a tuple's items."""
        if not isinstance(self.default, tuple):
            return type(self.default)
        return type(self.default[0]) if self.default else self.of

    def problems(self, path: str, value: Any) -> Iterator[str]:
        """Reasons why `value` is impossible for the field at `path`."""
        if not isinstance(self.default, tuple):
            if problem := self._problem(value):
                yield f"{path} is {shown(value)}: {problem}"
        elif not isinstance(value, tuple | list):
            yield f"{path} is {shown(value)}: give {_KINDS[tuple]}"
        elif self.length is not None and len(value) != self.length:
            yield f"{path} is {shown(value)}: give {self.length} of them"
        else:
            for item in value:
                if problem := self._problem(item):
                    yield f"{path} has {shown(item)}: {problem}"

    def _problem(self, value: Any) -> str | None:
        if problem := type_problem(self.kind, value):
            return problem
        if self.choices:
            listed = ", ".join(str(choice) or "''" for choice in self.choices)
            return None if value in self.choices else f"use one of {listed}{nearest(value, self.choices)}"
        if self.kind in (int, float):
            return None if self.hold(value) else f"it must be {self.range}"
        if self.kind is str:
            return None if self.form is None or self.form.fits(value) else self.form.remedy
        return None

    def with_unit(self, name: str) -> "Entry":
        """The field with the unit in which its name ends, and with the bounds of that unit where it has none."""
        unit = self.unit or (name.rpartition("_")[2] if name.rpartition("_")[2] in _UNITS else "")
        if self.kind not in (int, float) or self.choices:
            return self
        least, most = _UNITS.get(unit, (None, _MOST if self.kind is int else None))
        low = {} if self.at_least is not None or self.above is not None else {least[0]: least[1]} if least else {}
        high = {} if self.at_most is not None or self.below is not None or most is None else {"at_most": most}
        bounded = replace(self, unit=unit, **low, **high)
        assert bounded.at_least is not None or bounded.above is not None, f"{name} declares no lower bound"
        assert bounded.at_most is not None or bounded.below is not None, f"{name} declares no upper bound"
        return bounded


# Unit -> lower bound and largest value: event loops overflow for times that are much longer than a year.
_UNITS: dict[str, tuple[tuple[str, float], float]] = {
    "s": (("above", 0), 366 * 24 * 3600),
    "tokens": (("at_least", 1), 2**24),
    "bytes": (("at_least", 0), 2**50),
}


class Section:
    """Fields that belong together, by name, in the order in which they are declared."""

    def __init__(self, doc: str, /, *, resume: bool = False, **fields: "Entry | Free | Section"):
        self.doc = doc
        self.fields = {name: _completed(name, declared, resume) for name, declared in fields.items()}

    def defaults(self) -> ConfigDict:
        """An unlocked config with the default of every field."""
        config = ConfigDict()
        for name, declared in self.fields.items():
            config[name] = declared.defaults() if isinstance(declared, Section | Free) else declared.default
        return config

    def problems(self, path: str, values: Any, *, complete: bool = True) -> Iterator[str]:
        """Messages on everything in `values` that the declarations do not allow, unknown names included; if `complete`,
        also on missing fields."""
        if not isinstance(values, ConfigDict | Mapping):
            yield f"{path} is {shown(values)}: it is a section, set its fields"
            return
        for name, value in values.items():
            if name in self.fields:
                yield from self.fields[name].problems(f"{path}.{name}", value)
            else:
                yield f"{path}.{name} is not a field{nearest(name, self.fields)}: {path} has {', '.join(self.fields)}"
        if complete:
            yield from self._missing(path, values)

    def lacking(self, path: str, values: ConfigDict) -> Iterator[str]:
        """Messages on missing fields, also of sections inside this one."""
        yield from self._missing(path, values)
        for name, declared in self.fields.items():
            if isinstance(declared, Section) and isinstance(inner := values.get(name), ConfigDict):
                yield from declared.lacking(f"{path}.{name}", inner)

    def _missing(self, path: str, values: ConfigDict | Mapping[str, Any]) -> Iterator[str]:
        if missing := [name for name in self.fields if name not in values]:
            yield f"{path} lacks {', '.join(missing)}: start from default_config() and set fields one by one"

    def find(self, path: str) -> "Entry | Free | Section | None":
        """The declaration at a dotted path; None where there is none, as inside an open section."""
        name, _, rest = path.partition(".")
        declared = self.fields.get(name)
        if not rest:
            return declared
        return declared.find(rest) if isinstance(declared, Section) else None


@dataclass(frozen=True)
class Free:
    """An open section, whose names depend on what it configures: options, policies, sources of tasks.

    `form`: pattern of the names. `known` declares the only names allowed; `each` declares the fields of every entry,
    which is itself a section; without either any finite value is allowed. Where `default` is None, the section may be.
    """

    doc: str
    _: KW_ONLY
    default: Mapping[str, Any] | None = dataclass_field(default_factory=dict)
    form: Pattern | None = None
    known: Section | None = None
    each: Section | None = None
    resume: bool = False

    def defaults(self) -> ConfigDict | None:
        return None if self.default is None else ConfigDict(dict(self.default))

    def problems(self, path: str, values: Any) -> Iterator[str]:
        """As `Section.problems`."""
        if values is None and self.default is None:
            return
        if not isinstance(values, ConfigDict | Mapping):
            yield f"{path} is {shown(values)}: give {_KINDS[dict]}"
            return
        if self.known:
            yield from self.known.problems(path, values, complete=False)
            return
        for name, value in values.items():
            if problem := _text_problem(name) or (self.form.remedy if self.form and not self.form.fits(name) else None):
                yield f"{path} has {shown(name)}: {problem}"
            elif self.each:
                yield from self.each.problems(f"{path}.{name}", value, complete=False)
            else:
                yield from _free_problems(f"{path}.{name}", value)


def _completed(name: str, declared: "Entry | Free | Section", resume: bool) -> "Entry | Free | Section":
    if isinstance(declared, Entry):
        declared = declared.with_unit(name)
    return replace(declared, resume=True) if resume and not isinstance(declared, Section) else declared


def _free_problems(path: str, value: Any) -> Iterator[str]:
    """Messages on numbers that are not finite, and on values that JSON cannot hold, at any depth."""
    if isinstance(value, ConfigDict | Mapping):
        for name, inner in value.items():
            yield from _free_problems(f"{path}.{name}", inner)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _free_problems(path, item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path} is {value}: give a finite number"
    elif not isinstance(value, int | float | str | None):
        yield f"{path} is {shown(value)}: give a number, text, True or False, or tuples and dicts of these"


def type_problem(kind: Any, value: Any) -> str | None:
    """Remedy for a `value` that is not of the annotated type `kind`, or out of its bounds; None for a valid one."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or isinstance(kind, typing.TypeVar):
        return None
    if origin is Annotated:
        if problem := type_problem(arguments[0], value):
            return problem
        broken = (each for each in arguments[1:] if isinstance(each, Interval) and not each.hold(value))
        return next((f"it must be {bounds.range}" for bounds in broken), None)
    if origin in (typing.Union, types.UnionType):
        # Valid if any type of the union takes it. Of several remedies "give a finite number" fits a nan best.
        found = [text for each in arguments if (text := type_problem(each, value))]
        return None if len(found) < len(arguments) else next((text for text in found if "finite" in text), found[0])
    if origin is Literal:
        listed = ", ".join(str(choice) or "''" for choice in arguments)
        return None if value in arguments else f"use one of {listed}{nearest(value, arguments)}"
    if kind in (type(None), None):
        return None if value is None else "give None"
    if kind in (int, float) and isinstance(value, float) and not math.isfinite(value):
        return "give a finite number"
    # In Python bool is a subclass of int: without this check True would be taken for the number 1.
    if kind is float:
        return None if isinstance(value, int | float) and not isinstance(value, bool) else f"give {_KINDS[float]}"
    if kind is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else f"give {_KINDS[int]}"
    if kind is str:
        return _text_problem(value)
    holder = origin or kind
    if holder in (tuple, list, Sequence, Iterable):
        if isinstance(value, str) or not isinstance(value, tuple | list):
            return f"give {_KINDS[tuple]}"
        return next((text for item in value for kind in arguments[:1] if (text := type_problem(kind, item))), None)
    if holder in (dict, Mapping):
        if not isinstance(value, ConfigDict | Mapping):
            return f"give {_KINDS[dict]}"
        return next((text for item in value.values() if (text := type_problem(arguments[1], item))), None)
    if isinstance(kind, type):
        return None if isinstance(value, kind) else f"give {_KINDS.get(kind, kind.__name__)}"
    return None


def with_tuples(kind: Any, value: Any) -> Any:
    """A value of the annotated type `kind` whose lists are tuples where `kind` has those: messages have only lists."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if not isinstance(value, list):
        return value
    if origin in (Annotated, typing.Union, types.UnionType):
        return next((made for each in arguments if isinstance(made := with_tuples(each, value), tuple)), value)
    if (origin or kind) is not tuple:
        return value
    return tuple(with_tuples(arguments[0] if arguments else Any, item) for item in value)


def option_problems(path: str, options: Mapping[str, Any], declared: Mapping[str, Any], owner: str) -> Iterator[str]:
    """Messages on options at `path`, by what `owner` declares: names with annotated types, "**" for any name."""
    for name, value in options.items():
        if "**" in declared and name not in declared:
            continue
        if name not in declared:
            listed = ", ".join(declared) or "none"
            yield f"{path}.{name} is no option of {owner}{nearest(name, declared)}; it has {listed}"
        elif problem := type_problem(declared[name], value):
            yield f"{path}.{name} is {shown(value)}: {problem}"


def declared_types(owner: Any) -> dict[str, Any]:
    """Annotated type of every parameter of a function or field of a dataclass. Without an annotation it is the type of
    the default, if that is a number, bool or text, else Any. "**" is in it if any name is taken."""
    try:
        hints = typing.get_type_hints(inspect.unwrap(owner), include_extras=True)
    except (NameError, TypeError):  # an annotation that only a type checker can resolve
        hints = {}
    parameters = inspect.signature(owner).parameters
    plain = {name: _PLAIN.get(type(p.default), Any) for name, p in parameters.items() if p.annotation is p.empty}
    named = {name: (plain | hints).get(name, Any) for name, each in parameters.items() if each.kind not in _SEVERAL}
    return named | ({"**": Any} if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) else {})


def _text_problem(text: Any) -> str | None:
    """Remedy for what is no text, or a text that cannot be a file name, address or name; None for any other."""
    if not isinstance(text, str):
        return f"give {_KINDS[str]}"
    if len(text) > _LONGEST_CHARACTERS:
        return f"give at most {_LONGEST_CHARACTERS} characters"
    unheld = any(character == "\x00" or "\ud800" <= character <= "\udfff" for character in text)
    return "leave out characters that no file can hold" if unheld else None


def load_named(field: str, path: object, refusal: type[Exception], remedy: str = "give package.module:name") -> Any:
    """The function or class at `package.module:name`, which is imported.

    Raises:
        refusal: it does not exist, or its module fails; the message has the field, the path and the remedy.
    """
    module = load_module(field, path, refusal, remedy)
    try:
        found = getattr(module, str(path).partition(":")[2])
    except AttributeError as error:
        raise refusal(f"{field} is {path!r}, which cannot be imported ({error}): {remedy}") from error
    if not callable(found):
        raise refusal(f"{field} is {path!r}, which is no function or class: {remedy}")
    return found


def load_module(field: str, path: object, refusal: type[Exception], remedy: str) -> types.ModuleType:
    """The module of `package.module:name`, as `load_named`, for callers with their own message on a missing name."""
    try:
        return importlib.import_module(str(path).partition(":")[0])
    except Exception as error:  # a module of the user's own may fail in any way
        reason = str(error) if isinstance(error, ImportError | ValueError) else f"{type(error).__name__}: {error}"
        raise refusal(f"{field} is {path!r}, which cannot be imported ({reason}): {remedy}") from error


def nearest(name: Any, known: Iterable[Any]) -> str:
    """`" (did you mean 'x'?)"`, or "" where no known name is similar."""
    close = difflib.get_close_matches(str(name), [str(each) for each in known], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(value: Any) -> str:
    """A refused value as text for a message, shortened."""
    value = value.to_dict() if isinstance(value, ConfigDict) else value
    text = repr(tuple(value) if isinstance(value, list) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def table_rows(section: Section, path: str = "config") -> Iterator[str]:
    """Markdown of a section and of those inside it: a heading, its line, and a row for each field."""
    yield f"\n## `{path}`\n\n{section.doc}\n"
    yield "| field | default | values | |\n|---|---|---|---|"
    inner = {name: declared for name, declared in section.fields.items() if isinstance(declared, Section)}
    for name, declared in section.fields.items():
        if not isinstance(declared, Section):
            shown_name = f"`{name}`{' ↻' if declared.resume else ''}"
            yield f"| {shown_name} | {_default(declared)} | {_values(declared)} | {_cell(declared.doc)} |"
    for name, declared in inner.items():
        yield from table_rows(declared, f"{path}.{name}")


def _default(declared: Entry | Free) -> str:
    default = declared.default
    if isinstance(default, Mapping):
        default = dict(default)
    elif isinstance(default, int | float) and not isinstance(default, bool) and abs(default) >= 10_000:
        return f"`{default:_}`"
    return f"`{default!r}`"


def _values(declared: Entry | Free) -> str:
    if isinstance(declared, Free):
        names = (declared.known or declared.each or Section("")).fields
        return f"a dict{' of dicts' if declared.each else ''}" + (f": {', '.join(names)}" if names else "")
    words = {str: "text", bool: "", int: "", float: ""}
    said = declared.range if declared.kind in (int, float) else words.get(declared.kind, "")
    if declared.choices:
        said = ", ".join(f"`{choice!r}`" for choice in declared.choices)
    unit = f" {declared.unit}" if declared.unit and said else ""
    return _cell(f"{'each ' if isinstance(declared.default, tuple) and said else ''}{said}{unit}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
