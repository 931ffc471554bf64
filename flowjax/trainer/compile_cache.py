"""Compiled programs kept on disk: the next start of the same run, or of one like it, takes them from there."""

import os
from pathlib import Path

import jax

_WORTH_KEEPING_S = 0.2  # seconds of compilation


def use_compile_cache(folder: str) -> None:
    """Keep programs in `folder`; "auto" is ~/.cache/flowjax/xla, "" is nowhere."""
    if not folder:
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flowjax" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(cache if folder == "auto" else Path(folder).absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)
