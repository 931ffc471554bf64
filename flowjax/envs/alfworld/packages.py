"""The packages of the `alfworld` extra, imported when they are first needed.

textworld's PDDL engine rests on a planner under the GPL, so nothing outside this package may import it.
"""

import functools
import importlib
import os
import tempfile
from pathlib import Path
from types import ModuleType

from flowjax.envs.base import NotReady

DATA_VARIABLE = "ALFWORLD_DATA"


@functools.cache
def package(name: str) -> ModuleType:
    """A module of alfworld, or one that imports it or textworld.

    alfworld sets ALFWORLD_DATA, and makes a folder for it, when it is imported; here both stay as the user has them.

    Raises:
        NotReady: it is not installed.
    """
    named = os.environ.get(DATA_VARIABLE)
    if named is None:
        os.environ[DATA_VARIABLE] = tempfile.gettempdir()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotReady(
            f'ALFWorld needs packages that are not installed ({error}): pip install -e ".[alfworld]"'
        ) from error
    finally:
        if named is None:
            del os.environ[DATA_VARIABLE]


def constants() -> ModuleType:
    """alfworld's tables of object classes, what may hold what, and which scenes are for training."""
    return package("alfworld.gen.constants")


def goal_library() -> ModuleType:
    """alfworld's goals as PDDL, and the sentences that state them."""
    return package("alfworld.gen.goal_library")


def folder() -> Path:
    """Where alfworld is installed: its domain, its grammar and its floor plans."""
    return Path(str(package("alfworld").__file__)).parent
