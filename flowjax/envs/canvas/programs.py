"""Programs that the simulated executor writes for exercises: the right one, and wrong ones of several kinds."""

import re

from flowjax.envs.canvas.exercises import ENTRY_POINT, Reading, Specification

_KEEP = {
    "even": "x % 2 == 0",
    "odd": "x % 2 == 1",
    "greater than {k}": "x > {k}",
    "divisible by {k}": "x % {k} == 0",
}
_MAP = {
    "the numbers": "x",
    "the squares of the numbers": "x * x",
    "the doubles of the numbers": "2 * x",
}
_REDUCE = {"the sum": "sum({})", "the largest": "max({}, default=0)", "the smallest": "min({}, default=0)"}
FAULTS = 4  # kinds of wrong programs


def program(text: str, reading: Reading, fault: int = -1) -> str:
    """A program for an exercise: right where `fault` is negative, otherwise wrong in one of `FAULTS` ways."""
    if reading.program is not None:
        return function(reading.program, fault)
    if reading.source == "arithmetic":
        right = f"print({text.removeprefix('Compute ').rstrip('.')})"
    elif reading.source == "words":
        right = _story(text)
    else:
        right = _ranking(text)
    if fault == FAULTS - 1:
        return right.replace("print(", "print(result, ", 1)  # a name that there is not: it fails when run
    return right if fault < 0 else _with_one_number_changed(right, fault)


def function(wanted: Specification, fault: int = -1) -> str:
    """The function that is asked for; faults: the filter turned round, no map, another reduction, a name misspelled."""
    keep, mapped, reduction = _KEEP[wanted.keep].format(k=wanted.k), _MAP[wanted.mapping], _REDUCE[wanted.reduction]
    if fault == 0:
        keep = f"not {keep}"
    elif fault == 1:
        mapped = "x + 1" if mapped == "x" else "x"
    elif fault == 2:
        reduction = "len({})" if wanted.reduction == "the sum" else "sum({})"
    elif fault == 3:
        keep = keep.replace("x", "y")
    kept = reduction.format(f"[{mapped} for x in numbers if {keep}]")
    return f"def {ENTRY_POINT}(numbers):\n    return {kept}"


def _story(text: str) -> str:
    """A word problem as a count that is kept."""
    first, *rest = text.split(". ")[:-1]
    lines = [f"count = {re.findall(r'[0-9]+', first)[0]}"]
    for sentence in rest:
        numbers = " * ".join(re.findall(r"\d+", sentence))
        sign = "-" if "gives" in sentence else "*" if "times" in sentence else "+"
        lines.append(f"count = count {sign} {numbers}")
    return "\n".join([*lines, "print(count)"])


def _ranking(text: str) -> str:
    facts = ", ".join(f"({count}, {name!r})" for name, count in re.findall(r"(\w+) owns (\d+) ", text))
    place = int("second" in text)
    return f"order = sorted([{facts}], reverse={'most' in text})\nprint(order[{place}][1])"


def _with_one_number_changed(right: str, fault: int) -> str:
    numbers = list(re.finditer(r"\d+", right))
    found = numbers[-1 - fault % len(numbers)]
    changed = int(found[0]) + 1 if found[0] != "1" else 0
    return f"{right[: found.start()]}{changed}{right[found.end() :]}"
