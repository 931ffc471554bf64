"""How the house is cut: sizes of files, floors of imports inside a folder, and lines that stand in two places."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from pathlib import Path
from statistics import median, quantiles

from tests.house.sources import Complaint, Source

SMALL_LINES = 40  # below that a file with one importer belongs into the importer
MOST_FLOORS = 6
EQUAL_LINES = 6
COLLECTIONS = {"flowjax", "flowjax/envs"}  # folders of rooms, whose order the import contracts hold


@dataclass(frozen=True)
class Sizes:
    """Figures of the whole house."""

    files: int
    median_lines: float
    p90_lines: float
    lines: int
    code_lines: int  # without blank lines, comments and docstrings
    comments_per_1000: float  # lines that hold a comment, in 1,000 lines

    def __str__(self) -> str:
        return (
            f"{self.files} files, {self.median_lines:.0f} lines in the median, {self.p90_lines:.0f} at the 90th "
            f"percentile; {self.lines:,} lines, {self.code_lines:,} of them code; "
            f"{self.comments_per_1000:.1f} comments per 1,000 lines"
        )


def sizes(sources: Sequence[Source]) -> Sizes:
    lengths = [len(source.lines) for source in sources]
    comments = sum(len(comments_of(source)) for source in sources)
    return Sizes(
        len(sources),
        median(lengths),
        quantiles(lengths, n=10, method="inclusive")[-1] if len(lengths) > 1 else lengths[0],
        sum(lengths),
        sum(len(code_lines(source)) for source in sources),
        1000 * comments / sum(lengths),
    )


def comments_of(source: Source) -> dict[int, str]:
    """Text of the comment on each line that holds one, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def code_lines(source: Source) -> list[tuple[int, str]]:
    """Number and text, without spaces, of each line that is neither blank, comment, docstring nor import."""
    left_out: set[int] = set()
    for node in ast.walk(source.tree):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if isinstance(node, ast.stmt) and (is_text or isinstance(node, ast.Import | ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    squeezed = ((number, re.sub(r"\s+", "", line)) for number, line in enumerate(source.lines, 1))
    return [(number, line) for number, line in squeezed if line and line[0] != "#" and number not in left_out]


def importers(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Modules that import each module, anywhere in them or by its dotted name in a string."""
    known = {source.module for source in sources}
    found: dict[str, set[str]] = {name: set() for name in known}
    for source in sources:
        for name in _imported(source.tree, known, at_top=False):
            if name != source.module:
                found[name].add(source.module)
    return found


def _imported(tree: ast.Module, known: set[str], *, at_top: bool) -> Iterator[str]:
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:  # a module of the package, or a name in it
                inner = f"{node.module}.{alias.name}"
                yield from [inner] if inner in known else {node.module} & known
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from {node.value.partition(":")[0]} & known


def too_small(sources: Sequence[Source]) -> Iterator[Complaint]:
    """Files of few lines that one file imports: a door more for the reader, without a thing behind it of its own.

    What is found by its path, as `package.module:name`, may be small: the next of its kind lies beside it. A package
    has an `__init__` anyway.
    """
    found = importers(sources)
    by_path = {path for source in sources for path in _paths(source.tree)}
    for source in sources:
        of = found[source.module]
        if source.module in by_path or source.path.name in ("__init__.py", "__main__.py"):
            continue
        if len(source.lines) < SMALL_LINES and len(of) == 1:
            text = f"{len(source.lines)} lines with one importer: belongs into {min(of)}"
            yield Complaint(((str(source.path), 0),), text)


def _paths(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def too_deep(sources: Sequence[Source]) -> Iterator[Complaint]:
    """Folders whose files, those in folders below included, import each other over more than `MOST_FLOORS` floors."""
    folders = {source.room for source in sources} - COLLECTIONS
    for folder in sorted(folders):
        chain = longest_chain([source for source in sources if f"{source.room}/".startswith(f"{folder}/")])
        if len(chain) > MOST_FLOORS:
            floors = " > ".join(name.rpartition(".")[2] for name in chain)
            yield Complaint(((folder, 0),), f"{len(chain)} floors of imports, at most {MOST_FLOORS}: {floors}")


def longest_chain(files: Sequence[Source]) -> list[str]:
    """Modules of the longest way down by imports among these files, those of type checkers included."""
    known = {source.module for source in files}
    below = {source.module: sorted({*_imported(source.tree, known, at_top=True)} - {source.module}) for source in files}
    return max((_chain(name, below, {}, ()) for name in sorted(known)), key=len, default=[])


def _chain(
    name: str, below: Mapping[str, Sequence[str]], found: dict[str, list[str]], above: tuple[str, ...]
) -> list[str]:
    if name not in found:
        ways = [_chain(one, below, found, (*above, name)) for one in below[name] if one not in above]
        found[name] = [name, *max(ways, key=len, default=[])]
    return found[name]


def said_twice(sources: Sequence[Source], least: int = EQUAL_LINES) -> Iterator[Complaint]:
    """Runs of equal lines in two places, unless a comment in or above one of them names the other's file."""
    code = {source.path: code_lines(source) for source in sources}
    notes = {source.path: comments_of(source) for source in sources}
    places = defaultdict(list)
    for path, lines in code.items():
        for at in range(len(lines) - least + 1):
            places[tuple(line for _, line in lines[at : at + least])].append((path, at))
    pairs = {
        (*one, *other)
        for found in places.values()
        for one, other in combinations(found, 2)
        if one[0] != other[0] or other[1] - one[1] >= least  # a run does not overlap with itself
    }
    for path, at, other, start in sorted(pairs):
        if (path, at - 1, other, start - 1) in pairs:
            continue  # part of a longer run
        length = next(n for n in count(least) if (path, at + n - least + 1, other, start + n - least + 1) not in pairs)
        one, two = (code[file][first : first + length] for file, first in ((path, at), (other, start)))
        if not _told_apart(notes[path], one, other) and not _told_apart(notes[other], two, path):
            yield Complaint(((str(path), one[0][0]), (str(other), two[0][0])), f"{length} equal lines in two places")


def _told_apart(notes: Mapping[int, str], lines: Sequence[tuple[int, str]], other: Path) -> bool:
    near = range(lines[0][0] - 3, lines[-1][0] + 1)
    return any(re.search(rf"\b{other.stem}\b", notes.get(line, "")) for line in near)
