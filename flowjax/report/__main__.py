"""Report on runs: `python -m flowjax.report runs/<name> [runs/<other> ...]`.

Writes one HTML page that needs no network: what was learned and where the time went, every kept episode turn by turn,
why a move got its credit, and how runs differ (docs/report.md). Runs that differ in their seed alone are one method.

--out=FILE     where the page goes; report.html in the first run's folder by default
--groups=N     groups of each batch whose episodes the page has; as many as it holds well by default
--serve[=PORT] show the page as the runs go on, made anew for each look, until Ctrl-C; at 8700 by default
--host=HOST    with --serve: listen there; 127.0.0.1, which nobody else reaches, by default
--svg[=FILE]   in place of the page two pictures: learning_curve.svg, in the first run's folder unless FILE names
               another, and state_graph.svg in each run's folder

Exit status: 0 done, 2 something to correct in what was asked for.
"""

import http.server
import os
import sys
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from flowjax.config import ConfigError
from flowjax.files import replace_file
from flowjax.monitor.metrics import METRICS_FILE
from flowjax.monitor.token import known_run_id
from flowjax.monitor.trouble import in_words
from flowjax.report.page import Made, make_page
from flowjax.report.pictures import draw_state_graph, learning_curves

_OPTIONS = ("out", "groups", "serve", "host", "svg")
_PORT = 8700
_AGAIN_S = 5


def main(argv: Sequence[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return 0
    os.environ["JAX_PLATFORMS"] = "cpu"  # values of states need no accelerator, which may be busy with the run itself
    named = [Path(argument) for argument in argv if not argument.startswith("-")]
    runs = [run if run.name.strip(".") else run.resolve() for run in named]  # "." has a name only when resolved
    given = [argument.lstrip("-").partition("=") for argument in argv if argument.startswith("-")]
    options = {name: value for name, _, value in given}
    try:
        _check(runs, options)
        if "svg" in options:
            return _write_pictures(runs, options["svg"])
        if "serve" in options:
            return _serve(runs, options)
        target = Path(options.get("out") or runs[0] / "report.html")
        page = make_page(runs, groups_per_step=int(options.get("groups") or 0))
        replace_file(target, page, durable=False)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"{in_words(error)}; --{'svg' if 'svg' in options else 'out'}=<file> writes it elsewhere", file=sys.stderr
        )
        return 2
    print(f"{target} ({len(page.encode()) / 2**20:.1f} MB)")
    return 0


def _check(runs: Sequence[Path], options: dict[str, str]) -> None:
    """Check the command line.

    Raises:
        ValueError: an unknown or impossible option, no run, or one that is named twice.
    """
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise ValueError(f"--{unknown[0]} is not known: use some of {', '.join(f'--{name}' for name in _OPTIONS)}")
    if not runs:
        raise ValueError("no run is named: give the folder of one, for example runs/sokoban-nano")
    if twice := [run for place, run in enumerate(runs) if run.resolve() in map(Path.resolve, runs[:place])]:
        raise ValueError(f"{twice[0]} is named twice, which would pass for two seeds: name each run once")
    by_id: dict[str, Path] = {}
    for run in runs:
        if (run_id := known_run_id(run)) and (first := by_id.setdefault(run_id, run)) is not run:
            raise ValueError(f"{run} is a copy of {first}, which would pass for a second seed: name one of them")
    for run in runs:  # else only the page in the browser would show the mistake, each time anew
        if "serve" in options and not (run / "config.json").exists():
            flags = "values of flags after '=', as in --serve=8700"
            raise ValueError(f"{run} has no config.json: give the folder of a run, and {flags}")
    if not (out := Path(options.get("out") or ".")).parent.is_dir():
        raise ValueError(f"--out is {out}, and there is no folder {out.parent}: make it, or give another")
    if out.is_dir() and options.get("out"):
        raise ValueError(f"--out is {out}, which is a folder: give a file, such as {out / 'report.html'}")
    for name in ("groups", "serve"):
        if options.get(name) and not options[name].isdecimal():
            raise ValueError(f"--{name} is {options[name]!r}: give a whole number")
    if int(port := options.get("serve") or _PORT) > 65535:
        raise ValueError(f"--serve is {port}: give a port of at most 65535")
    if "svg" in options and (others := [name for name in options if name != "svg"]):
        raise ValueError(f"--{others[0]} is of the page, which --svg takes the place of: give one of them")
    if "host" in options and "serve" not in options:
        raise ValueError("--host says where --serve listens: give both")


def _write_pictures(runs: Sequence[Path], target: str) -> int:
    path = Path(target or runs[0] / "learning_curve.svg")
    path.write_text(learning_curves(runs))
    print(path)
    for run in runs:
        if (graph := draw_state_graph(run)) is not None:
            (run / "state_graph.svg").write_text(graph)
            print(run / "state_graph.svg")
    return 0


def _serve(runs: Sequence[Path], options: dict[str, str]) -> int:
    """Answer every request with the page as the runs are now, until Ctrl-C."""
    host, port = options.get("host") or "127.0.0.1", int(options.get("serve") or _PORT)
    handler = partial(PageHandler, runs, int(options.get("groups") or 0), {})
    try:
        server = http.server.ThreadingHTTPServer((host, port), handler)
    except OSError as error:
        raise ValueError(f"nobody can listen at --host={host} and --serve={port} ({error}): give others") from error
    with server:
        print(f"http://{host}:{server.server_port}/ shows {', '.join(map(str, runs))}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


class PageHandler(http.server.BaseHTTPRequestHandler):
    """Answers / with the page, made anew for each request, and /written with a number (see `_written`); serves no file
    of the machine."""

    def __init__(self, runs: Sequence[Path], groups_per_step: int, known: dict[Any, Made], *arguments: object):
        self._runs, self._groups_per_step, self._known = runs, groups_per_step, known
        super().__init__(*arguments)  # pyright: ignore[reportArgumentType] (request, address and server, as they come)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path not in ("/", "/written"):
            self.send_error(404, "there is one page, at /")
            return
        try:
            body, status = (self._page() if path == "/" else self._written()).encode(), 200
        except Exception as error:  # a run under way may have half-written files: the next request finds them whole
            body, status = _later(error).encode(), 503
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        # A run's page shows texts that a model wrote: should one get in as HTML, it may load and send nothing.
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; connect-src 'self'; img-src data:; "
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'",
        )
        self.end_headers()
        self.wfile.write(body)

    def _page(self) -> str:
        return make_page(self._runs, groups_per_step=self._groups_per_step, known=self._known)

    def _written(self) -> str:
        """Size in bytes of the runs' metrics files, as text: the page asks for it, and reports a run that has gone on
        when it changes. Folders of evaluations have no such file."""
        files = [run / METRICS_FILE for run in self._runs]
        return str(sum(file.stat().st_size for file in files if file.exists()))

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: by default every request would be a line in the terminal."""


def _later(error: Exception) -> str:
    """A page that shows the error and loads itself again after some seconds."""
    said = escape(str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}")
    return (
        f'<!DOCTYPE html><html lang="en"><meta http-equiv="refresh" content="{_AGAIN_S}"><title>flowjax</title>'
        f"<p>{said}</p><p>This page looks again every {_AGAIN_S} seconds.</p></html>"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
