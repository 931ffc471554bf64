"""One self-contained HTML page about runs: data and assets put together, needing no network.

What is seen first lies in the page as JSON. Episodes lie beside it in compressed pieces, one for each batch and
evaluation, which the browser unpacks when somebody opens them: so a page of 200 steps opens at once.
"""

import base64
import gzip
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from flowjax.report.credit import explain_credit, interest
from flowjax.report.episodes import (
    EpisodePages,
    RecordedGroup,
    batches_of,
    evaluations_of,
    index_of,
    read_batch,
    read_evaluation,
    workflow_use,
)
from flowjax.report.overview import differences, methods, overview
from flowjax.run import Run, read_run

ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("base.js", "charts.js", "overview.js", "episodes.js", "credit.js", "canvas.js", "runs.js")
_MOST_GROUPS = 800  # of all batches of a run, where the command does not say
_MOST_EVALUATIONS = 8
_LEVEL = 6


def make_page(runs: Sequence[Path], *, groups_per_step: int = 0) -> str:
    """The page as HTML text.

    Args:
        runs: their folders.
        groups_per_step: groups of each batch whose episodes are in the page; 0: as many as a page holds well.

    Raises:
        ConfigError: a folder is none of a run.
    """
    shown = [overview(run_dir) for run_dir in runs]
    pieces: list[str] = []
    for number, (run_dir, data) in enumerate(zip(runs, shown, strict=True)):
        data |= {"pieces": [], "notes": [], "workflows": []}
        for piece, described in _pieces(read_run(run_dir), groups_per_step, data):
            described["key"] = f"piece-{number}-{len(data['pieces'])}"
            data["pieces"].append(described)
            pieces.append(f'<script type="text/plain" id="{described["key"]}">{_packed(piece)}</script>')
    data = {"runs": shown, "differences": differences(shown), "methods": methods(shown)}
    template = (ASSETS / "page.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": escape(", ".join(run["name"] for run in shown)),
        "STYLE": (ASSETS / "page.css").read_text(encoding="utf-8"),
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
        "PIECES": "\n".join(pieces),
        "SCRIPT": "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    for name, part in parts.items():
        template = template.replace(f"<!-- {name} -->", part, 1)
    return template


def _packed(piece: dict[str, Any]) -> str:
    return base64.b64encode(gzip.compress(json.dumps(piece, separators=(",", ":")).encode(), _LEVEL, mtime=0)).decode()


def _pieces(run: Run, groups_per_step: int, data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every piece of a run with its description; what was left out is said in `data["notes"]`."""
    pages, notes = EpisodePages(run), data["notes"]
    evaluations = evaluations_of(run.folder)
    if len(evaluations) > _MOST_EVALUATIONS:
        last = len(evaluations) - 1
        kept = {round(place * last / (_MOST_EVALUATIONS - 1)) for place in range(_MOST_EVALUATIONS)}
        notes.append(f"Episodes of {len(kept)} of the {len(evaluations)} evaluations are in this page, evenly spread.")
        evaluations = [name for place, name in enumerate(evaluations) if place in kept]
    for name in evaluations:
        if groups := read_evaluation(run.folder, name):
            described = {"kind": "held out", "label": f"held out, {name}", "step": _version(name), "policy": ""}
            yield pages.piece(groups), {**described, "episodes": index_of(groups)}
    for policy, settings in run.policies.items():
        steps = batches_of(run.folder, policy)
        for step in steps:
            whole = read_batch(run.folder, policy, step)
            groups = _chosen(whole, groups_per_step or _share(len(steps)))
            if not groups:
                continue
            if used := workflow_use(whole):
                data["workflows"].append({"step": step + 1, "policy": policy, **used})
            piece = pages.piece(groups)
            explain_credit(groups, piece, settings.credit)
            ranks = [interest(group, made.get("graph")) for group, made in zip(groups, piece["groups"], strict=True)]
            label = f"step {step + 1}" + (f" of {policy}" if len(run.policies) > 1 else "")
            yield (
                piece,
                {
                    "kind": "training",
                    "label": label,
                    "step": step + 1,
                    "policy": policy,
                    "episodes": index_of(groups),
                    "interest": ranks,
                    "groups": len(groups),
                    "of": len(whole),
                },
            )
    if not steps_kept(run):
        notes.append("No trajectories were kept (config.dataflow.keep_trajectories): there are no training episodes.")
    notes += pages.problems


def steps_kept(run: Run) -> bool:
    """True where any batch of the run has transcripts."""
    return any(batches_of(run.folder, policy) for policy in run.policies)


def _share(steps: int) -> int:
    return max(_MOST_GROUPS // max(steps, 1), 2)


def _chosen(groups: Sequence[RecordedGroup], most: int) -> list[RecordedGroup]:
    """The groups of a batch that are shown: those whose episodes differ most come first, but
    every other one is any, so that the page shows what is common, too."""
    if len(groups) <= most:
        return list(groups)
    divided = sorted(groups, key=lambda group: -group.evenness)[: (most + 1) // 2]
    rest, others = [group for group in groups if group not in divided], most - len(divided)
    return [*divided, *(rest[:: max(len(rest) // others, 1)][:others] if others else ())]


def _version(evaluation: str) -> int:
    """Version of a policy in the name of an evaluation, the lowest of several."""
    versions = [part.rpartition("@")[2] for part in evaluation.split(",")]
    return min((int(version) for version in versions if version.isdigit()), default=0)
