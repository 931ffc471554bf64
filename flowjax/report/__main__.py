"""Report on runs: `python -m flowjax.report runs/<name> [runs/<other> ...] --svg[=curve.svg]`.

--svg[=FILE]  the two pictures: `learning_curve.svg`, in the first run's folder unless FILE names another, and
              `state_graph.svg` in each run's folder
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from flowjax.report.pictures import draw_state_graph, learning_curves


def main(argv: Sequence[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return 0
    jax.config.update("jax_platforms", "cpu")  # drawing needs no accelerator
    runs = [Path(argument) for argument in argv if not argument.startswith("--")]
    options = [argument for argument in argv if argument.startswith("--")]
    unknown = [option for option in options if option != "--svg" and not option.startswith("--svg=")]
    if unknown or not runs:
        print(__doc__ if not unknown else f"{unknown[0]} is not known: see --help", file=sys.stderr)
        return 2
    target = (
        Path(options[-1].removeprefix("--svg=")) if "--svg=" in "".join(options) else runs[0] / "learning_curve.svg"
    )
    try:
        target.write_text(learning_curves(runs))
        print(target)
        for run in runs:
            if (graph := draw_state_graph(run)) is not None:
                (run / "state_graph.svg").write_text(graph)
                print(run / "state_graph.svg")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
