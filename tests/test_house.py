"""The check of what is reachable, on a small tree of its own."""

import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.house import unreachable

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
