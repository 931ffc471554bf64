"""What things are called: one class for a class's name, docstrings that open with a noun or verb, no retired words."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.house.shape import comments_of
from tests.house.sources import Complaint, Source

GLOSSARY = Path("docs/glossary.md")
OPENINGS = re.compile(r"(What|Whatever|Whether|Which|Who|Whoever|Whose|Where|How|When|Why)\b")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ROW = re.compile(r"^\| `(\w+)`(.*?)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
_Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Retired:
    """A word that names nothing here any more. `prose`: comments and docstrings do without it, too."""

    word: str
    instead: str
    prose: bool = False
    stays: tuple[str, ...] = ()  # phrases of plain English, and folders, in which it stays

    def is_in(self, name: str) -> bool:
        name = name.strip("_")
        parts = (
            [name.lower()] if "_" in self.word or self.word[0].isupper() else [p.lower() for p in _PART.findall(name)]
        )
        return self.word.lower() in parts


def retired_words(root: Path) -> list[Retired]:
    """The table of retired words in the glossary."""
    table = (root / GLOSSARY).read_text().partition("## Retired words")[2]
    words = []
    for word, rest, where, instead in _ROW.findall(table):
        stays = tuple(re.findall(r"[\"`]([^\"`]+)[\"`]", rest))
        words.append(Retired(word, instead.strip(), "prose" in where, stays))
    return words


def class_names(sources: Sequence[Source]) -> Iterator[Complaint]:
    """Class names that two classes have."""
    places = defaultdict(list)
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append((str(source.path), node.lineno))
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield Complaint(tuple(where), f"the class name {name} is used {len(where)} times")


def openings(sources: Sequence[Source]) -> Iterator[Complaint]:
    """Docstrings that open with a question word."""
    for source in sources:
        for node in (each for each in ast.walk(source.tree) if isinstance(each, ast.Module | _Named)):
            said, name = ast.get_docstring(node) or "", getattr(node, "name", "the module")
            if match := OPENINGS.match(said):
                place = (str(source.path), getattr(node, "lineno", 1))
                text = f"the docstring of {name} opens with {match[0]}: open with the noun or verb that says what it is"
                yield Complaint((place,), text)


def retired(sources: Sequence[Source], words: Sequence[Retired]) -> Iterator[Complaint]:
    """Names, and comments and docstrings, with a word that the glossary has retired."""
    for source in sources:
        names = sorted(_first_lines(source).items(), key=lambda item: item[1])
        prose = [*_prose(source)]
        for word in words:
            if any(str(source.path).startswith(f"flowjax/{stays}") for stays in word.stays):
                continue
            for name, line in names:
                if word.is_in(name):
                    yield Complaint(((str(source.path), line),), f"the name {name} has “{word.word}”: {word.instead}")
            for line, text in prose if word.prose else ():
                for phrase in word.stays:
                    text = text.replace(phrase, "")
                if re.search(rf"\b{word.word}\b", text, re.IGNORECASE):
                    yield Complaint(((str(source.path), line),), f"“{word.word}” in the text: {word.instead}")


def _first_lines(source: Source) -> dict[str, int]:
    """Every name that the file defines or binds, and where first: what others define is theirs to rename."""
    found: dict[str, int] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, _Named):
            found.setdefault(node.name, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.attr, node.lineno)
        elif isinstance(node, ast.arg):
            found.setdefault(node.arg, node.lineno)
        elif isinstance(node, ast.alias) and node.asname:
            found.setdefault(node.asname, node.lineno or 0)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            found.setdefault(node.name, node.lineno)
    return found


def _prose(source: Source) -> Iterator[tuple[int, str]]:
    """Lines of comments and docstrings."""
    yield from comments_of(source).items()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | _Named) and ast.get_docstring(node) is not None:
            first = node.body[0]
            for number in range(first.lineno, (first.end_lineno or first.lineno) + 1):
                yield number, source.lines[number - 1]
