"""Product files as the checks read them, and complaints about them."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A product file. `path` is relative to the repository, `flowjax/room/file.py`."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def module(self) -> str:
        """The dotted name that it is imported by."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The folder that the file lies in, the unit in which rooms are kept clean."""
        return str(self.path.parent)


@dataclass(frozen=True)
class Complaint:
    """A broken rule. It counts against a room list where every one of its places lies in a listed room."""

    places: tuple[tuple[str, int], ...]  # file or folder, and line (0: the whole of it)
    text: str

    @property
    def rooms(self) -> set[str]:
        return {str(Path(path).parent) if path.endswith(".py") else path for path, _ in self.places}

    def __str__(self) -> str:
        where = ", ".join(f"{path}:{line}" if line else path for path, line in self.places)
        return f"{where}: {self.text}"


def read_sources(root: Path) -> list[Source]:
    return [Source(path.relative_to(root), path.read_text()) for path in sorted((root / "flowjax").rglob("*.py"))]
