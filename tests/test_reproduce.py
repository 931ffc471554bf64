"""Tables that are made again: what agrees, what differs, and that every page says where its figures come from."""

import importlib.util
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.benchmarks.reproduce import QUICK_MINUTES, ROOT, agree, compare, documented, tables

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    ("stated", "found", "same"),
    [
        ("54.5 % [50.2, 58.8]", "57.0 % [52.1, 61.9]", True),
        ("54.5 % [50.2, 58.8]", "64.0 % [59.1, 68.9]", False),
        ("0.468 [0.421, 0.515]", "0.500 [0.455, 0.546]", True),
        ("0.468 [0.421, 0.515]", "0.468 % [0.421, 0.515]", False),
        ("+4.1 points [+1.4, +6.7]", "-2.0 points [-4.0, +1.0]", False),
        ("3,108 ± 551 (2,534, 3,632)", "4,323 ± 912 (4,587, 3,308)", True),
        ("3,108 ± 100 (3,008, 3,208)", "4,323 ± 912 (4,587, 3,308)", False),
        ("51,611 ± 12,099", "51,611 ± 12,099, 1 never", False),
        ("23.0%", "23.0%", True),
        ("23.0%", "22.9%", False),
        ("3.9 (13)", "3.9 (14)", False),
        ("won all", "won all", True),
        ("won all", "won most", False),
    ],
)
def test_figures_agree_within_their_spread_and_others_when_they_are_equal(stated: str, found: str, same: bool):
    assert agree(stated, found) is same
    assert agree(found, stated) is same


PAGE = """# A page

<!-- made by: python -m tests.benchmarks.made --out={out}; minutes: 0.1; not compared: seconds; each (2) -->
| estimator | success | each | seconds | each |
|---|---|---|---|---|
| `rewardflow` | **57.7 %** [51.6, 63.9] | 3 | 12 | 5 |
| grpo | 52.5 % [46.7, 58.2] | 4 | | |

<!-- not made again: a single run -->
| | after |
|---|---|
| one | 0.5 [0.4, 0.6] |

| what | figure |
|---|---|
| nobody knows | 3.0 [2.0, 4.0] |

| no figure | at all |
|---|---|
| x | y |
"""
PRINTED = """made: something

| recipe | estimator | success | each | seconds | each |
|---|---|---|---|---|---|
| a | rewardflow | 57.0 % [51.0, 63.0] | 3 | 99 | 6 |

| recipe | estimator | success | each | seconds | each |
|---|---|---|---|---|---|
| a | rewardflow | 57.0 % [51.0, 63.0] | 3 | 99 | 6 |
| a | grpo | 40.0 % [36.0, 44.0] | 4 | 99 | 6 |
| a | rloo | 40.0 % [36.0, 44.0] | 4 | 99 | 6 |
"""


def test_a_page_is_compared_with_what_its_command_prints(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (table, other), unmarked = documented(page)
    assert (table.line, table.command[2:], table.minutes) == (4, ("tests.benchmarks.made", "--out={out}"), 0.1)
    assert other.why == "a single run" and unmarked == [14]
    agreed, problems = compare(table, tables(PRINTED))
    assert agreed == 3
    assert problems == ["grpo, success: 52.5 % [46.7, 58.2] on the page, 40.0 % [36.0, 44.0] now"]
    assert len(compare(table, tables(PRINTED.split("\n\n")[1]))[1]) == 2, (
        "of a table without a row each cell is missing"
    )
    assert compare(table, []) == (0, ["the command printed no table"])


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("minutes: 0.1", "min: 0.1", "is not of the form"),
        ("not compared: seconds", "not compared: secs", "not compared: secs, of the columns"),
        ("| grpo |", "| rewardflow |", "the name of another row"),
        ("-->\n| estimator", "-->\n\n| estimator", "no table follows the mark"),
    ],
)
def test_a_mark_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, before: str, after: str, complaint: str):
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(before, after))
    with pytest.raises(ValueError, match=rf"page.md:[34]: .*{complaint}"):
        documented(page)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (
            "docs/nope.md",
            "--pages has {page}, which cannot be read (No such file or directory): name pages from {root}, ",
        ),
        ("{folder}/torn.md", "torn.md:1: no table follows the mark"),
    ],
)
def test_a_page_that_cannot_be_read_is_named_in_one_line(tmp_path: Path, page: str, said: str):
    (tmp_path / "torn.md").write_text("<!-- not made again: why -->\n\nNo table.\n")
    page = page.format(folder=tmp_path)
    command = [sys.executable, "-m", "tests.benchmarks.reproduce", "--list", f"--pages={page}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"reproduce: {said.format(page=ROOT / page, root=ROOT)}")


def test_every_table_with_a_spread_says_what_makes_it_and_the_command_is_there():
    for page in PAGES:
        marked, unmarked = documented(page)
        assert not unmarked, f"{page}: lines {unmarked}: say what makes the table, or why it is not made again"
        for table in marked:
            assert table.why or importlib.util.find_spec(table.command[2]), table.name
            assert table.why or set(table.left_out) < set(table.table.columns[1:]), table.name


def test_tables_of_kept_runs_are_what_these_came_to(tmp_path: Path):
    of_kept_runs = [table for page in PAGES for table in documented(page)[0] if table.kept]
    assert {table.kept for table in of_kept_runs} == {
        str(file.relative_to(ROOT)) for file in (ROOT / "docs" / "results").iterdir()
    }
    command = [sys.executable, "-m", "tests.benchmarks.reproduce", "--kept", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    for table in of_kept_runs:
        cells = sum(bool(cell) for row in table.table.rows for cell in row[1:])
        assert said[table.name].startswith(f"{cells} cells agree, 0 differ")
    pictures = {file.read_bytes() for file in (ROOT / "docs" / "images").glob("estimators_*.svg")}
    assert {file.read_bytes() for file in tmp_path.rglob("*.svg")} <= pictures


def test_a_seed_that_kept_runs_lack_is_named_instead_of_trained(tmp_path: Path):
    """It was trained, for hours and without a word."""
    with tarfile.open(tmp_path / "kept.tar.xz", "w:xz"):
        pass
    page, command = tmp_path / "page.md", "python -m tests.benchmarks.algorithms --seeds=7 --out={out}"
    mark = f"<!-- made by: {command}; minutes: 1; kept: {tmp_path / 'kept.tar.xz'} -->"
    page.write_text(f"{mark}\n| estimator | greedy |\n|---|---|\n| grpo | 52.5 % [46.7, 58.2] |\n")
    asked = [sys.executable, "-m", "tests.benchmarks.reproduce", "--kept", f"--out={tmp_path}", f"--pages={page}"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    said = f"the command failed: {tmp_path / 'kept.tar.xz'} lacks what this makes: python -m flowjax.launch "
    assert said in done.stdout and "--config.seed=7" in done.stdout, done.stdout + done.stderr


def test_what_is_made_again_is_made_once_and_written_with_where_it_comes_from(tmp_path: Path):
    """One whole command: that of the smallest table that there is."""
    page = ROOT / "docs" / "worlds" / "math.md"
    (table,) = (each for each in documented(page)[0] if not each.why and each.minutes <= QUICK_MINUTES)
    assert "math_scores" in table.command[2]
    command = [sys.executable, "-m", "tests.benchmarks.reproduce", "--quick", f"--pages={page.relative_to(ROOT)}"]
    first, again = (
        subprocess.run([*command, f"--out={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert "9 cells agree, 0 differ" in first and "not made again" in first
    assert "$ python -m tests.benchmarks.math_scores" in first and "$" not in again
    (written,) = tmp_path.glob("*.md")
    assert "math_scores" in written.read_text() and "Commit: " in written.read_text() and "jax" in written.read_text()
