"""The rules of the house, each on a few small files that break it and some that do not."""

import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.house import shape, words
from tests.house.__main__ import complaints
from tests.house.reach import unreachable
from tests.house.sources import Source

RUN = """
from flowjax.kept import called

class Role:
    def step(self):
        return called()

    def spare(self):
        return 0

def main():
    Role().step()

if __name__ == "__main__":
    main()
"""
KEPT = """
__all__ = ["island"]

def called():
    return by_name("flowjax.kept:named")

def by_name(path):
    return path

def named():
    return 1

def island():
    return bridge()

def bridge():
    return island()

def only_in_words():
    pass
"""
FILES = {
    "flowjax/run.py": RUN,
    "flowjax/kept.py": KEPT,
    "README.md": "    python -m flowjax.run\n",
    "CONTRIBUTING.md": "`only_in_words` is said to be a feature.\n",
    "docs/kept.md": "    only_in_words()\n",
    "launch/start.sh": "python -m flowjax.run\n",
    "pyproject.toml": "",
    "setup.py": "",
}


GLOSSARY = """
| `told` | names, prose | not this table |

## Retired words

| word | retired in | say instead |
|---|---|---|
| `told` ("told apart") | names, prose | message |
| `own` (`kept/`) | names | local |
| `Can` | names | capabilities |
"""


def source(text: str, path: str = "flowjax/room/file.py") -> Source:
    return Source(Path(path), text)


def test_what_only_itself_and_words_reach_is_found(tmp_path: Path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    names = ["flowjax.kept.bridge", "flowjax.kept.island", "flowjax.kept.only_in_words", "flowjax.run.Role.spare"]
    assert unreachable(tmp_path) == names
    (tmp_path / "docs" / "canvas.md").write_text("    only_in_words()\n")  # a page of a library
    assert unreachable(tmp_path) == [*names[:2], names[3]]


@given(st.none())
@settings(max_examples=1)
def test_no_example_is_against_the_clock(_: None):
    assert settings.default is not None and settings.default.deadline is None
    time.sleep(0.3)  # over Hypothesis's own deadline


def test_a_class_name_is_one_class():
    sources = [
        source("class Plan: ...\nclass Other: ...", "flowjax/a.py"),
        source("if 1:\n    class Plan: ...", "flowjax/b.py"),
    ]
    (complaint,) = words.class_names(sources)
    assert complaint.places == (("flowjax/a.py", 1), ("flowjax/b.py", 2))
    assert complaint.rooms == {"flowjax"}


def test_docstrings_open_with_a_noun_or_verb():
    text = '''"""What a file is."""
class Kept:
    """Whatsoever: no question."""
    def method(self):
        """Whether it is so."""
    def _inner(self):
        """Where few look."""
def plain():
    """Rows of a table, and which are left."""
'''
    assert [complaint.places[0][1] for complaint in words.openings([source(text)])] == [1, 4, 6]


def test_retired_words_in_names_and_prose(tmp_path: Path):
    (tmp_path / "docs").mkdir()
    (tmp_path / words.GLOSSARY).write_text(GLOSSARY)
    retired = words.retired_words(tmp_path)
    assert [word.word for word in retired] == ["told", "own", "Can"]
    text = '''"""It is told."""
# told apart, as its own
told_by = was_told = theirs.told
class ToldCan: ...
class Can: ...
def can_bind(self, own): return "told"
def owner(): ...  # as they were Told
'''
    found = [(one.places[0][1], one.text.partition(":")[0]) for one in words.retired([source(text)], retired)]
    assert found == [
        (3, "the name told_by has “told”"),
        (3, "the name was_told has “told”"),
        (4, "the name ToldCan has “told”"),
        (7, "“told” in the text"),
        (1, "“told” in the text"),
        (6, "the name own has “own”"),
        (5, "the name Can has “Can”"),
    ]
    assert not list(words.retired([source("own = 1", "flowjax/kept/file.py")], retired))


def test_a_small_file_with_one_importer():
    small = source('"""Two."""\nONE = 1\nTWO = 2', "flowjax/small.py")
    importer = source("from flowjax import small", "flowjax/a.py")
    (complaint,) = shape.too_small([small, importer])
    assert complaint.places == (("flowjax/small.py", 0),)
    by_path = source('NAME = "flowjax.small:ONE"', "flowjax/b.py")
    assert not list(shape.too_small([small, importer, by_path]))
    assert not list(shape.too_small([source("A = 1\n" * 40, "flowjax/small.py"), importer]))


def test_floors_of_imports():
    chain = [source(f"import flowjax.room.f{n + 1}", f"flowjax/room/f{n}.py") for n in range(6)]
    assert not list(shape.too_deep(chain))
    below = source("from flowjax.room import f0", "flowjax/room/below/door.py")
    (complaint,) = shape.too_deep([*chain, below])
    assert complaint.rooms == {"flowjax/room"} and complaint.text.startswith("7 floors")
    lazy = source("def f():\n    from flowjax.room import f0", "flowjax/room/below/door.py")
    assert not list(shape.too_deep([*chain, lazy]))
    circle = [
        source("from flowjax.room import b", "flowjax/room/a.py"),
        source("from flowjax.room import a", "flowjax/room/b.py"),
    ]
    assert len(shape.longest_chain(circle)) == 2


def test_equal_lines_in_two_places():
    lines = [f"x{n} = {n}" for n in range(7)]
    one, two = source("\n".join(lines), "flowjax/one.py"), "\n\n".join(["import re", *lines]).replace(" = ", "=")
    (complaint,) = shape.said_twice([one, source(two, "flowjax/two.py")])
    assert complaint.places == (("flowjax/one.py", 1), ("flowjax/two.py", 3))
    assert complaint.text.startswith("7 equal lines")
    assert not list(shape.said_twice([one, source("# as in one.py, which jits it\n" + two, "flowjax/two.py")]))
    assert not list(shape.said_twice([one, source("\n".join(lines[:5]), "flowjax/two.py")]))
    assert len(list(shape.said_twice([source("\n".join([*lines, "pass", *lines]))]))) == 1
    assert not list(shape.said_twice([source("x += 1\n" * 10)]))


def test_figures():
    sources = [source('"""Doc.\n\nMore."""\n\n# why\nx = 1  # unit'), *(source("x = 1\n" * n) for n in (10, 20))]
    figures = shape.sizes(sources)
    assert (figures.files, figures.median_lines, figures.lines, figures.code_lines) == (3, 10, 36, 31)
    assert figures.comments_per_1000 == 2000 / 36


def test_a_file_without_faults(tmp_path: Path):
    (tmp_path / "docs").mkdir()
    (tmp_path / words.GLOSSARY).write_text(GLOSSARY)
    assert not complaints(tmp_path, [source('"""Rows."""\n')])
