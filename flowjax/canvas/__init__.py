"""Workflows of operators as values: built, edited, drawn and run with any OpenAI-compatible backend."""

from flowjax.canvas.backends.config import backends_from_config, open_backends
from flowjax.canvas.cache import Cache
from flowjax.canvas.context import Budget
from flowjax.canvas.draw import mermaid, svg
from flowjax.canvas.graph import Call, Conditional, Loop, Parallel, Sequence, Workflow
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.run import run
from flowjax.canvas.text import parse, show
from flowjax.canvas.values import Problem

__all__ = [
    "Budget",
    "Cache",
    "Call",
    "Conditional",
    "Loop",
    "Parallel",
    "Problem",
    "Sequence",
    "Workflow",
    "backends_from_config",
    "load_operators",
    "mermaid",
    "open_backends",
    "parse",
    "run",
    "show",
    "svg",
]
