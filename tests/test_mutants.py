"""Mutants are valid, differ from what they were made of, are the same for a seed, and are killed by tests alone."""

import ast
from pathlib import Path

import pytest

from tests.house.sources import Source, read_sources
from tests.mutants import ROOT, Runner, TestFiles, functions, mutants, named, sample

CODE = '''
async def step(self, count: int = 3, *, text: Literal["a", 1] = "a") -> int:
    """Says 1 + 1 < 3, which is not code."""
    _log.info("%d", count + 1)
    if not count:
        raise ValueError(f"{count + 1} is not " + text)
    self.count = count * 2
    await self.save()
    return 0 if count <= 4 and text in ("b", "c") else 5
'''


def lines_of(code: str) -> dict[str, list[str]]:
    """The changed lines of every mutant, by kind."""
    found: dict[str, list[str]] = {}
    (part,) = functions(source := Source(Path("flowjax/file.py"), code))
    for mutant in mutants(source, *part):
        ast.parse(mutant.after)
        new = [line for line in mutant.after.splitlines() if line not in code.splitlines()]
        found.setdefault(mutant.kind, []).append(" / ".join(line.strip() for line in new))
    return found


def test_kinds_of_mutants():
    last = "return 0 if count <= 4 and text in ('b', 'c') else 5"
    assert lines_of(CODE) == {
        "condition negated": ["if (count):", f"return 0 if (not ({last[12:-7]})) else 5"],
        "not dropped": ["if (count):"],
        "statement dropped": ["pass", "pass", "pass"],
        "operator changed": ["self.count = (count / 2)"],
        "await dropped": ["(self.save())"],
        "and, or changed": ["return 0 if (count <= 4 or text in ('b', 'c')) else 5"],
        "comparison changed": [
            'return 0 if (count < 4) and text in ("b", "c") else 5',
            'return 0 if (count > 4) and text in ("b", "c") else 5',
            "return 0 if count <= 4 and (text not in ('b', 'c')) else 5",
        ],
        "off by one": [
            "self.count = count * 3",
            'return 1 if count <= 4 and text in ("b", "c") else 5',
            'return 0 if count <= 5 and text in ("b", "c") else 5',
            'return 0 if count <= 4 and text in ("b", "c") else 6',
        ],
    }


def test_functions_that_do_nothing_have_no_mutants():
    for body in ("...", '"""Words."""', "raise NotImplementedError(1 + 1)", "pass"):
        assert lines_of(f"def f():\n    {body}\n") == {}
    assert lines_of("def f():\n    x.go()\n    return y")["returns at once"] == ["return"]


def test_a_sample_is_the_same_for_a_seed_whatever_else_changes():
    room = Source(Path("flowjax/room/a.py"), "".join(f"def f{n}(x):\n    return x + {n}\n\n\n" for n in range(20)))
    other = Source(Path("flowjax/other.py"), "def g(x):\n    return not x\n")
    first = sample([room, other], 5, seed=0)
    assert sample([other, room], 5, seed=0) == first
    assert {mutant.function for mutant in first} != {mutant.function for mutant in sample([room, other], 5, seed=1)}
    assert len({mutant.function for mutant in first}) == 5
    moved = Source(room.path, "\n\n" + room.text)
    assert [mutant.diff for mutant in sample([moved, other], 5, seed=0)] == [mutant.diff for mutant in first]


def test_the_named_ones_are_there():
    found = named(read_sources(ROOT))
    assert len({mutant.after for mutant in found}) == len(found) and all(mutant.diff for mutant in found)
    for mutant in found:
        ast.parse(mutant.after)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "flowjax/__init__.py": "",
        "flowjax/sums.py": "def total(x):\n    return x + 1\n\n\ndef unseen(x):\n    return x - 1\n",
        "tests/__init__.py": "",
        "tests/test_sums.py": "from flowjax.sums import total\n\n\ndef test_ill():\n    assert 0\n\n\n"
        "def test_total():\n    assert total(1) == 2\n",
        "tests/test_other.py": "def test_other():\n    assert 0\n",
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["integration", "slow", "soak"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_mutant_is_killed_by_a_test_that_passes_without_it(tree: Path):
    sources = read_sources(tree)
    tests, runner = TestFiles(tree, sources), Runner(tree, limit_s=120)
    for mutant in sample(sources, 2, seed=0):
        calls = tests.of(mutant)
        assert calls[-1] == ["tests/test_sums.py"]
        assert calls[:-1] == ([["tests/test_sums.py::test_total"]] if mutant.function == "total" else [])
        verdict = runner.judge(mutant, calls)
        assert verdict.killed_by == ("tests/test_sums.py::test_total" if mutant.function == "total" else "")
        assert (tree / mutant.path).read_text() == mutant.before
