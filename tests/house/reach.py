"""Reachability: every public function, class and method of flowjax is used by a command, a config or documented code.

Directly, or through code that is. What nothing reaches is no feature: it gets a config field, or leaves. Names are
compared, not types, so what is called like something in use counts as used.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Called by libraries, by their names: a class may override what its base in another package calls.
CALLED_FROM_OUTSIDE = {
    "add_expand": "vLLM's LoRA wrapper",
    "add_lora_embedding": "vLLM's LoRA wrapper",
    "add_lora_linear": "vLLM's LoRA wrapper",
    "add_lora_logits": "vLLM's LoRA wrapper",
    "add_shrink": "vLLM's LoRA wrapper",
    "async_save": "Orbax's checkpoint handlers",
    "connection_lost": "asyncio.Protocol",
    "data_received": "asyncio.Protocol",
    "do_GET": "http.server",
    "facts_with_signature": "textworld's State",
    "find_class": "pickle.Unpickler",
    "log_message": "http.server",
    "on_broken_pipe": "rich's Console",
    "recv_into": "files made of sockets",
    "should_preserve": "Orbax's preservation policies",
    "update_metadata": "vLLM's LoRA wrapper",
}
# Pages whose code uses parts of flowjax as libraries; elsewhere only commands count.
LIBRARIES = ("README.md", "docs/canvas", "docs/worlds/sokoban.md")
_CODE_BLOCK = re.compile(r"^```\w*\n(.*?)^```|^((?: {4}.*\n?)+)", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")
_PATH = re.compile(r"^[\w.]+(?::\w+)?$")


@dataclass
class Definition:
    """A function, class or method, and the names that its body uses."""

    name: str
    where: str
    uses: set[str] = field(default_factory=set)


@dataclass
class Module:
    """A file: its definitions, and the names used outside of them."""

    name: str
    definitions: list[Definition] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)


def names_in(node: ast.AST) -> Iterator[str]:
    """Every name that code uses, and the parts of strings that are dotted paths; `__all__` uses nothing."""
    if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
        return
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")
    elif isinstance(node, ast.ImportFrom):
        yield from (node.module or "").split(".")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _PATH.match(node.value):
        yield from _WORD.findall(node.value)
    for child in ast.iter_child_nodes(node):
        yield from names_in(child)


def read_module(path: Path, name: str) -> Module:
    module = Module(name)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            module.definitions += _definitions(node, name)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            module.uses |= set(names_in(node))
    return module


def _definitions(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, where: str) -> Iterator[Definition]:
    own = Definition(node.name, where, {name for part in node.decorator_list for name in names_in(part)})
    if not isinstance(node, ast.ClassDef):
        own.uses |= set(names_in(node))
    else:
        for part in (*node.bases, *node.keywords):
            own.uses |= set(names_in(part))
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and not part.name.startswith("_"):
                yield Definition(part.name, f"{where}.{node.name}", set(names_in(part)))
            else:
                own.uses |= set(names_in(part))
    own.uses.discard(own.name)
    yield own


def documented(root: Path) -> set[str]:
    """Words of documented commands and libraries, of scripts, recipes and builders of data."""
    words: set[str] = set()
    for page in (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))):
        text = page.read_text()
        words.update(word for line in re.findall(r"python -m (.*)", text) for word in _WORD.findall(line))
        if str(page.relative_to(root)).startswith(LIBRARIES):
            words.update(
                word for blocks in _CODE_BLOCK.findall(text) for block in blocks for word in _WORD.findall(block)
            )
    for script in (*(root / "launch").rglob("*"), root / "pyproject.toml", root / "setup.py"):
        if script.is_file():
            words.update(_WORD.findall(script.read_text()))
    for folder in ("configs", "data", "docs"):
        for path in sorted((root / folder).rglob("*.py")):
            words.update(names_in(ast.parse(path.read_text())))
    return words


def unreachable(root: Path) -> list[str]:
    """Public definitions that nothing reaches, as `module.name`."""
    modules = [
        read_module(path, ".".join(path.relative_to(root).with_suffix("").parts))
        for path in sorted((root / "flowjax").rglob("*.py"))
    ]
    live = documented(root) | set(CALLED_FROM_OUTSIDE)
    waiting = [definition for module in modules for definition in module.definitions]
    for module in modules:
        live |= module.uses
    while True:
        reached = [one for one in waiting if one.name in live or one.name.startswith("_")]
        if not reached:
            return sorted(f"{one.where}.{one.name}" for one in waiting)
        waiting = [one for one in waiting if one not in reached]
        live = live.union(*(one.uses for one in reached))
