"""What a compiled program says of itself, read from its HLO text: collectives, how often they run, large buffers."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

ITEM_BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "bf16": 2, "f16": 2, "u16": 2, "s16": 2}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_START = re.compile(rf"^\s+%?([\w.\-]+) = .* (?:{'|'.join(COLLECTIVES)})-start\(")
_DONE = re.compile(rf" (?:{'|'.join(COLLECTIVES)})-done\(%?([\w.\-]+)\)")
_PRODUCT = re.compile(r" (?:dot|convolution|custom-call)\(|kind=kCustom")
_NAMED = re.compile(r"(body|calls|to_apply|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")


@dataclass
class Program:
    """One compiled program.

    times: how often each computation runs; 1 for a loop whose number of rounds is not in the text.
    lines: the instructions of each computation.
    fused: computations that are one kernel: what is in them is no buffer.
    """

    times: dict[str, int] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    fused: set[str] = field(default_factory=set)


def read_program(text: str) -> Program:
    program, entry, name = Program(), "", ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[2]
            program.lines[name] = []
            entry = name if found[1] else entry
        elif name and line.startswith(" "):
            program.lines[name].append(line)
    _count(program, entry, 1)
    return program


def _count(program: Program, name: str, times: int) -> None:
    program.times[name] = program.times.get(name, 0) + times
    for line in program.lines.get(name, ()):
        instruction = _INSTRUCTION.match(line)
        for kind, names in _NAMED.findall(line):
            rounds = int(found[1]) if kind == "body" and (found := _TRIPS.search(line)) else 1
            for called in names.replace("%", "").split(", "):
                if instruction and instruction[2] == "fusion":
                    program.fused.add(called)
                if called in program.lines and kind != "to_apply":
                    _count(program, called, times * rounds)


def collectives(program: Program) -> dict[str, tuple[int, int]]:
    """Kind -> (times that one runs, bytes of their results on a device), in the whole program."""
    counts, sizes = Counter(), Counter()
    for name, line in _instructions(program):
        found = _INSTRUCTION.match(line)
        kind = found[2].removesuffix("-start") if found else ""
        if found and kind in COLLECTIVES:
            counts[kind] += program.times[name]
            # An asynchronous one gives its argument as well: the result is the largest of the two.
            sizes[kind] += program.times[name] * max((size for _, size in _shapes(found[1])), default=0)
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def overlapped(program: Program) -> tuple[int, int]:
    """Asynchronous collectives with a product (or a kernel) between their start and their end, and all of them."""
    busy, every = 0, 0
    for name in program.times:
        begun: dict[str, int] = {}
        products = [0]
        for line in program.lines.get(name, ()):
            products.append(products[-1] + (_PRODUCT.search(line) is not None))
            if found := _START.match(line):
                begun[found[1]] = len(products)
            elif (found := _DONE.search(line)) and found[1] in begun:
                every += 1
                busy += products[-2] > products[begun[found[1]] - 1]
    return busy, every


def largest_buffers(program: Program, count: int) -> list[str]:
    """Shapes of the largest arrays that kernels read or write, largest first."""
    sizes = dict(_buffers(program))
    return sorted(sizes, key=lambda shape: -sizes[shape])[:count]


def square_buffers(program: Program, tokens: int) -> list[str]:
    """Shapes with two dimensions of `tokens`: scores of all queries with all keys, if nothing else is of that size."""
    return sorted({shape for shape, _ in _buffers(program) if _dimensions(shape).count(tokens) > 1})


def _instructions(program: Program) -> Iterator[tuple[str, str]]:
    return ((name, line) for name in program.times for line in program.lines.get(name, ()))


def _buffers(program: Program) -> Iterator[tuple[str, int]]:
    for name, line in _instructions(program):
        found = _INSTRUCTION.match(line)
        if name not in program.fused and found and found[2] not in ("get-tuple-element", "tuple", "while", "parameter"):
            yield from _shapes(found[1])


def _shapes(text: str) -> Iterator[tuple[str, int]]:
    """(shape, bytes) of every array in a type."""
    for kind, sizes in _SHAPE.findall(text):
        shape = f"{kind}[{sizes}]"
        yield shape, ITEM_BYTES.get(kind, 1) * math.prod(_dimensions(shape))


def _dimensions(shape: str) -> list[int]:
    return [int(size) for size in shape[shape.index("[") + 1 : -1].split(",") if size]
