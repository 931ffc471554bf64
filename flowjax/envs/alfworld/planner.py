"""The planner under textworld's engine: its translation of a game's PDDL, and copies of its library."""

import functools
import json
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fast_downward
from fast_downward import interface
from fast_downward.translate.pddl.conditions import Truth

from flowjax.files import replace_file

ELF64 = b"\x7fELF\x02\x01"  # little-endian
PROGRAM_HEADERS, HEADER_SIZE_AND_COUNT = 32, 54  # where an ELF file says where its program headers are, and how many


@dataclass(frozen=True, slots=True)
class Translation:
    """The part of the planner's task that is needed, as plain data that can be kept on disk for other processes.

    `types` are names with their supertypes, `kinds` the type of each thing, `parameters` the names and types of each
    action's parameters, `declared` the facts in the problem's text, `changing` the predicates that actions change,
    `branching` the actions with conditional effects. `sas` is the planner's own input format.
    """

    sas: str
    types: list[tuple[str, list[str]]]
    kinds: dict[str, str]
    parameters: dict[str, list[tuple[str, str]]]
    declared: list[list[str]]
    changing: list[str]
    branching: list[str]


def translate(domain: str, problem: str) -> Translation:
    """Translate a game's PDDL. The planner's translator overwrites `sys.argv`, which is restored here."""
    arguments = sys.argv
    try:
        pddl2sas: Any = fast_downward.pddl2sas  # Any: annotated wrongly, as one string
        task, sas = pddl2sas(domain, problem)
    finally:
        sys.argv = arguments
    effects = [(action.name, effect) for action in task.actions for effect in action.effects]
    return Translation(
        sas=sas,
        types=[(kind.name, list(kind.supertype_names)) for kind in task.types],
        kinds={thing.name: thing.type_name for thing in task.objects},
        parameters={
            action.name: [(known.name.strip("?"), known.type_name) for known in action.parameters]
            for action in task.actions
        },
        declared=list(_declared(task.init)),
        changing=sorted({effect.literal.predicate for _, effect in effects}),
        branching=sorted({name for name, effect in effects if not isinstance(effect.condition, Truth)}),
    )


def _declared(initial: Iterable[Any]) -> Iterable[list[str]]:
    """The facts in the problem's text, as textworld reads them; without distances and costs, which are numbers."""
    for atom in initial:
        if hasattr(atom, "predicate") and atom.predicate != "=":
            yield [atom.predicate, *atom.args]
        elif hasattr(atom, "fluent") and atom.fluent.symbol != "total-cost":
            value = str(atom.expression.value)
            if not value.isdigit():
                yield [value, *atom.fluent.args]


def translated(domain: str, problem: str, name: str, cache: Path | None) -> Translation:
    """The translation of the game called `name`, from the folder `cache` if it is there, else written to it."""
    if cache is None:
        return translate(domain, problem)
    path = cache / f"{name}.json"
    try:
        return Translation(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # missing, or damaged
        made = translate(domain, problem)
    cache.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(made)), durable=False)  # a damaged file is made anew
    return made


def loaded_bytes(image: bytes) -> int:
    """Length of the part of a shared library's file that is ever loaded; the rest is for debuggers."""
    if not image.startswith(ELF64):
        return len(image)
    (start,) = struct.unpack_from("<Q", image, PROGRAM_HEADERS)
    size, count = struct.unpack_from("<HH", image, HEADER_SIZE_AND_COUNT)
    headers = [struct.unpack_from("<IIQQQQ", image, start + index * size) for index in range(count)]
    return max(offset + length for _, _, offset, _, _, length in headers)


@functools.cache
def _source() -> str:
    """Path of the library without its debug information: every environment holds a copy, of 1 MB instead of 34."""
    path = str(interface.DOWNWARD_LIB_PATH)
    if not hasattr(os, "memfd_create"):
        return path
    image = Path(path).read_bytes()
    file = os.memfd_create("libdownward")  # in memory; never closed, since the path below names the descriptor
    os.write(file, image[: loaded_bytes(image)])
    return f"/proc/self/fd/{file}"


def load_library() -> Any:
    """A copy of the planner's library. fast_downward takes it from a path in its module, replaced here for the call."""
    whole = interface.DOWNWARD_LIB_PATH
    interface.DOWNWARD_LIB_PATH = _source()
    try:
        return fast_downward.load_lib()
    finally:
        interface.DOWNWARD_LIB_PATH = whole
