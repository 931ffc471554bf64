"""Programs compiled once are taken from disk by the other tests of this folder, through the trainer's own switch."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from flowjax.trainer.train import use_compile_cache


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("programs")
    use_compile_cache(str(folder))
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)
