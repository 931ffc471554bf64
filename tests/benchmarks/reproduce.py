"""The tables of README and docs made again, and what differs by more than its stated spread:

    python -m tests.benchmarks.reproduce [--quick] [--kept] [--pages=docs/worlds/sokoban.md] [--list]

A table that a command can make again has a mark in the line above it, which a rendered page does not show:

    <!-- made by: python -m tests.benchmarks.skills --recipes=code --out={out}; minutes: 30; not compared: minutes -->

`{out}` is a new folder, so that no run is taken for its own repetition; `minutes` are a guess, for two cores. Others
say `<!-- not made again: why -->`. What the runs of a table came to may lie in a file, which is named behind the
minutes: `; kept: docs/results/<name>.tar.xz` (`tests/benchmarks/kept.py`). `--kept` makes such tables from that, in
seconds, and asks every cell to be the same.

A page may leave out rows and columns of what the command prints. Rows are found by their first cell, columns by their
heading. Figures with a spread agree where their intervals overlap; figures without one, and words, where they are
equal: that is for what is counted, or drawn from a seed alone. Columns of which neither can be asked are not compared:
seconds, and single runs.

Writes `<out>/<page>-<line>.md` for each table, with the command, commit, versions and machine, the table as it came out
and each cell that differs, and prints a line for each table. A command that has been run is not run again. Exit status
1: some cells differ, or a command failed; 2: there is no such page, or a mark of it cannot be read.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from absl import app, flags

from flowjax.files import replace_file
from flowjax.monitor.provenance import read_starts, recorded_start
from tests.benchmarks.kept import unpack
from tests.benchmarks.runs import KEPT_VARIABLE

ROOT = Path(__file__).parents[2]
QUICK_MINUTES = 3.0
MARK = re.compile(r"<!-- (made by|not made again): (.*) -->$")
MADE_BY = re.compile(
    r"python -m (?P<module>tests\.benchmarks\.\w+)(?P<arguments>[^;]*); minutes: (?P<minutes>[\d.]+)"
    r"(?:; kept: (?P<kept>[^;]+))?(?:; not compared: (?P<left_out>.*))?"
)
_NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
    rf"(?P<value>{_NUMBER})(?P<unit> ?%| points)?"
    rf"(?: ?\[(?P<low>{_NUMBER}), (?P<high>{_NUMBER})\]| ± (?P<spread>{_NUMBER}))?"
)


@dataclass(frozen=True)
class Table:
    """A table of Markdown; columns are named by heading, and by number where several have one heading."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def read(cls, lines: Sequence[str]) -> "Table":
        heading, _, *rows = ([_plain(cell) for cell in line.strip().strip("|").split(" |")] for line in lines)
        names = [f"{name} ({heading[: at + 1].count(name)})" for at, name in enumerate(heading)]
        return cls(tuple(name.removesuffix(" (1)") for name in names), tuple(map(tuple, rows)))

    def named(self, column: str, row: str) -> list[Mapping[str, str]]:
        """The rows that have `row` in that column, as maps of columns to cells."""
        found = [dict(zip(self.columns, cells, strict=False)) for cells in self.rows]
        return [cells for cells in found if cells.get(column) == row]


@dataclass(frozen=True)
class Documented:
    """A table of a page and what its mark says. `command` is empty where nothing makes it again, `why` says why."""

    page: str
    line: int
    table: Table
    command: tuple[str, ...] = ()
    minutes: float = 0.0
    left_out: tuple[str, ...] = ()
    kept: str = ""
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def documented(page: Path) -> tuple[list[Documented], list[int]]:
    """The marked tables of a page, and the lines of those that state a spread and have no mark.

    Raises:
        ValueError: a mark that cannot be read, or that no table follows.
    """
    lines, at = page.read_text().splitlines(), 0
    marked, unmarked = [], []
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    while at < len(lines):
        if not lines[at].startswith("|"):
            if MARK.match(lines[at]) and not "".join(lines[at + 1 : at + 2]).startswith("|"):
                raise ValueError(f"{name}:{at + 1}: no table follows the mark")
            at += 1
            continue
        end = next((line for line in range(at, len(lines)) if not lines[line].startswith("|")), len(lines))
        mark = MARK.match(lines[at - 1]) if at else None
        try:
            if mark is not None:
                marked.append(_of_mark(name, at + 1, lines[at:end], mark[1], mark[2]))
            elif any(found["low"] or found["spread"] for line in lines[at:end] for found in FIGURE.finditer(line)):
                unmarked.append(at + 1)
        except ValueError as error:
            raise ValueError(f"{name}:{at + 1}: {error}") from error
        at = end
    return marked, unmarked


def _of_mark(page: str, line: int, lines: Sequence[str], kind: str, text: str) -> Documented:
    table = Table.read(lines)
    if kind == "not made again":
        return Documented(page, line, table, why=text)
    if (found := MADE_BY.fullmatch(text)) is None:
        raise ValueError(f"the mark {text!r} is not of the form '{MADE_BY.pattern}'")
    left_out = tuple(filter(None, (found["left_out"] or "").split("; ")))
    if unknown := set(left_out) - set(table.columns):
        raise ValueError(f"not compared: {'; '.join(sorted(unknown))}, of the columns {'; '.join(table.columns)}")
    if any(len(row) > len(table.columns) for row in table.rows) or len({row[0] for row in table.rows}) < len(
        table.rows
    ):
        raise ValueError("a row has more cells than there are headings, or the name of another row")
    command = ("python", "-m", found["module"], *shlex.split(found["arguments"]))
    return Documented(page, line, table, command, float(found["minutes"]), left_out, found["kept"] or "")


def _plain(cell: str) -> str:
    return re.sub(r"[`*]", "", cell).strip()


# ---------------------------------------------------------------------------------------------------------- comparison


def agree(stated: str, found: str, *, exactly: bool = False) -> bool:
    """True if two cells say the same: the same words around figures that overlap, or are equal without a spread, as all
    are asked to be `exactly`. What stands in brackets behind a spread is what it was taken over."""
    stated, found = (re.sub(r"(± [\d,.]+) \([^)]*\)", r"\1", cell) for cell in (stated, found))
    if exactly:
        return stated == found
    sides = [list(FIGURE.finditer(cell)) for cell in (stated, found)]
    if FIGURE.sub("#", stated) != FIGURE.sub("#", found) or len(sides[0]) != len(sides[1]):
        return False
    return all(_overlap(one, other) for one, other in zip(*sides, strict=True))


def _overlap(one: re.Match[str], other: re.Match[str]) -> bool:
    (low, high), (other_low, other_high) = _interval(one), _interval(other)
    return low <= other_high and other_low <= high and (one["unit"] or "").strip() == (other["unit"] or "").strip()


def _interval(figure: re.Match[str]) -> tuple[float, float]:
    value, low, high, spread = (
        float(text.replace(",", "")) if (text := figure[part]) else None for part in ("value", "low", "high", "spread")
    )
    assert value is not None
    if low is not None and high is not None:
        return low, high
    return value - (spread or 0.0), value + (spread or 0.0)


def compare(stated: Documented, made: Sequence[Table], *, exactly: bool = False) -> tuple[int, list[str]]:
    """How many cells agree, and what does not; `exactly`: in all columns, to the last digit.

    Of the tables that a command printed the last one with the most columns of the page counts, and of these with the
    most rows: some print a table again and again as it grows."""
    if not made:
        return 0, ["the command printed no table"]
    key, *columns = stated.table.columns
    names = [row[0] for row in stated.table.rows]
    table = max(
        reversed(made),
        key=lambda each: (len({key, *columns} & set(each.columns)), sum(bool(each.named(key, name)) for name in names)),
    )
    agreed, problems = 0, []
    for name, *cells in stated.table.rows:
        rows = table.named(key, name)
        for column, cell in zip(columns, cells, strict=False):
            if (column in stated.left_out and not exactly) or not cell:
                continue
            if len(rows) != 1 or column not in rows[0]:
                problems.append(f"{name}, {column}: {cell} on the page, and {len(rows)} rows of that name now")
            elif agree(cell, rows[0][column], exactly=exactly):
                agreed += 1
            else:
                problems.append(f"{name}, {column}: {cell} on the page, {rows[0][column]} now")
    return agreed, problems


def tables(text: str) -> list[Table]:
    """The tables in what a command printed."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [Table.read(lines) for lines in found if len(lines) > 2]


# ------------------------------------------------------------------------------------------------------------- commands


@cache
def printed(command: tuple[str, ...], out: Path, kept: str = "") -> tuple[str | None, Path]:
    """What a command prints, None where it failed, and the folder in which that and `run.json` lie. One that failed is
    tried again by the next start, not for another table of this one. `kept`: a file in this repository of what its runs
    came to."""
    key = shlex.join(command).encode() + ((ROOT / kept).read_bytes() if kept else b"")
    folder = out / f"{command[2].rpartition('.')[2]}-{blake2b(key, digest_size=4).hexdigest()}"
    text = folder / "printed.txt"
    if not text.exists():
        folder.mkdir(parents=True, exist_ok=True)
        arguments = [word.replace("{out}", str(folder / "runs")) for word in command[1:]]
        if kept:
            unpack(ROOT / kept, folder / "runs")
        print("$ python", *arguments, flush=True)
        with recorded_start([folder], ["python", *arguments]) as start, (folder / "log.txt").open("a") as log:
            # Without its kept results a command would make them, which takes hours.
            env = {**os.environ, **({KEPT_VARIABLE: kept} if kept else {})}
            command_line = [sys.executable, *arguments]
            done = subprocess.run(command_line, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=env)
            start["exit_status"] = done.returncode
        if done.returncode:
            return None, folder
        replace_file(text, done.stdout)
    return text.read_text(), folder


def report(stated: Documented, agreed: int, problems: Sequence[str], folder: Path) -> str:
    """The file of a table."""
    start = read_starts(folder)[-1]
    minutes = (start["ended_s"] - start["started_s"]) / 60
    versions = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    text = folder / "printed.txt"
    lines = [
        f"# {stated.name}",
        "",
        f"- Command: `{shlex.join(start['command'])}`, {minutes:.1f} minutes",
        f"- Commit: {start['code'].get('commit') or start['code'].get('problem')}"
        f"{', with changes' if start['code'].get('dirty') else ''}; {versions}",
        f"- Machine: {json.dumps(start['machine'])}",
        f"- Cells that agree: {agreed}; that differ: {len(problems)}",
        f"- Not compared: {', '.join(stated.left_out) or 'nothing'}",
        "",
        *(f"    {problem}" for problem in problems),
        "",
        text.read_text() if text.exists() else "The command failed; see log.txt.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    del argv
    given = flags.FLAGS
    pages = [ROOT / page for page in given.pages] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    out = Path(given.out).absolute()
    try:
        marked = [table for page in pages for table in documented(page)[0]]
    except OSError as error:
        problem = f"--pages has {error.filename}, which cannot be read ({error.strerror})"
        print(f"reproduce: {problem}: name pages from {ROOT}, such as docs/worlds/sokoban.md", file=sys.stderr)
        raise SystemExit(2) from error
    except ValueError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    failed = False
    for stated in marked:
        if stated.why:
            print(f"{stated.name}: not made again: {stated.why}", flush=True)
            continue
        if given.list or (given.quick and stated.minutes > QUICK_MINUTES) or (given.kept and not stated.kept):
            print(f"{stated.name}: {stated.minutes:g} minutes, {shlex.join(stated.command)}", flush=True)
            continue
        text, folder = (
            printed(stated.command, out / "kept", stated.kept) if given.kept else printed(stated.command, out)
        )
        made = None if text is None else tables(text)
        if made is None:
            said = (folder / "log.txt").read_text().splitlines()
            agreed, problems = 0, [": ".join(["the command failed", *said[-1:]])]
        else:
            agreed, problems = compare(stated, made, exactly=given.kept)
        file = out / f"{re.sub(r'[^a-zA-Z0-9]+', '-', stated.name)}.md"
        replace_file(file, report(stated, agreed, problems, folder))
        failed |= bool(problems)
        more = f"; {problems[0]}" + (f" and {len(problems) - 1} more" if len(problems) > 1 else "") if problems else ""
        print(f"{stated.name}: {agreed} cells agree, {len(problems)} differ{more} ({file})", flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    flags.DEFINE_list("pages", [], "Pages whose tables are made again; all where none is named.")
    flags.DEFINE_bool("quick", False, f"Only what takes up to {QUICK_MINUTES:g} minutes.")
    flags.DEFINE_bool("kept", False, "Only what can be made from kept results of its runs, and from these.")
    flags.DEFINE_bool("list", False, "Run nothing: say what would be.")
    flags.DEFINE_string("out", "runs/reproduce", "Folder of what is made.")
    app.run(main)
