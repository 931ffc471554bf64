"""The rules of the house: `python -m tests.house` prints the figures of flowjax/ and what breaks a rule.

    python -m tests.house                       # what a change must pass
    python -m tests.house flowjax/envs/sokoban  # every complaint about one folder, and those below it

The rules: what is public is reachable (`reach`); a class name is one class, public docstrings open with a noun or verb,
and words that docs/glossary.md has retired stay away (`words`); no small file with one importer, no folder of more than
six floors of imports, nothing said in two places (`shape`).
"""

import sys
from pathlib import Path

from tests.house import reach, shape, words
from tests.house.sources import Complaint, Source, read_sources

ROOT = Path(__file__).parents[2]
# Most files, and most lines at the 90th percentile: what has been reached is not to be lost again. A workflow is a file
# of its own, which is named in configs: each one more than the first three may add to the 200 that there were. So may
# another carrier of what nodes say (`flowjax/relay.py`), and a launch's trial of own parts (`flowjax/launch/trial.py`),
# an idea apart from its checks of the config.
MOST_FILES = 207
MOST_P90_LINES = 450


def complaints(root: Path, sources: list[Source]) -> list[Complaint]:
    return [
        *words.class_names(sources),
        *words.openings(sources),
        *words.retired(sources, words.retired_words(root)),
        *shape.too_small(sources),
        *shape.too_deep(sources),
        *shape.said_twice(sources),
    ]


def main(arguments: list[str]) -> int:
    sources = read_sources(ROOT)
    found = complaints(ROOT, sources)
    if arguments:
        folders = tuple(argument.rstrip("/") for argument in arguments)
        found = [one for one in found if any(room.startswith(folders) for room in one.rooms)]
        print(shape.sizes([source for source in sources if str(source.path).startswith(folders)]), *found, sep="\n")
        return 1 if found else 0
    figures = shape.sizes(sources)
    print(figures)
    print(f"{len(list(shape.too_small(sources)))} files under {shape.SMALL_LINES} lines have a single importer")
    failures = [
        f"{name}: nothing reaches it: give it a config field or a command, or remove it"
        for name in reach.unreachable(ROOT)
    ]
    if figures.files > MOST_FILES or figures.p90_lines > MOST_P90_LINES:
        failures.append(
            f"at most {MOST_FILES} files and {MOST_P90_LINES} lines at the 90th percentile: merge or cut by idea"
        )
    failures += [str(one) for one in found]
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
