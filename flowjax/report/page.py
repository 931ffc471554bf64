"""One self-contained HTML page about runs: data and assets put together, needing no network.

The overview is in the page as JSON. Episodes are in compressed pieces (gzip, base64), one for each batch and
evaluation, which the browser unpacks when they are opened: so a page of 200 steps opens at once.
"""

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from flowjax.monitor.transcripts import batch_path, held_out_path, trained_path
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
from flowjax.report.overview import differences, methods, names_of, overview, version_of
from flowjax.run import Run, read_run

ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("base.js", "charts.js", "overview.js", "episodes.js", "credit.js", "canvas.js", "runs.js")
_MOST_GROUPS = 800  # of all batches of a policy together, where no --groups is given
_MOST_BYTES = 10 * 2**20  # of the transcript files of these groups
_MOST_EVALUATIONS = 8
_LEVEL = 6  # of gzip


Made = tuple[str, dict[str, Any]]  # a packed piece and its description


def make_page(runs: Sequence[Path], *, groups_per_step: int = 0, known: dict[Any, Made] | None = None) -> str:
    """The page as HTML text.

    Args:
        runs: folders of the runs.
        groups_per_step: groups of each batch whose episodes are in the page; 0: as many as a page holds well.
        known: cache of pieces, for a page that is made again and again; new pieces are added.

    Raises:
        ConfigError: a folder is not a run's.
    """
    shown = [overview(run_dir) for run_dir in runs]
    pieces: list[str] = []
    known = {} if known is None else known
    for number, (run_dir, data) in enumerate(zip(runs, shown, strict=True)):
        run = read_run(run_dir)
        data |= {"pieces": [], "notes": [], "workflows": [], "weights": _weights(run)}
        data["estimators"] = {name: policy.credit.name for name, policy in run.policies.items()}
        for packed, described in _pieces(run, groups_per_step, data["notes"], known):
            key = f"piece-{number}-{len(data['pieces'])}"
            data["pieces"].append({name: value for name, value in described.items() if name != "use"} | {"key": key})
            if described.get("use"):
                data["workflows"].append({"step": described["step"], "policy": described["policy"], **described["use"]})
            pieces.append(f'<script type="text/plain" id="{key}">{packed}</script>')
        costs = [piece["cost"] for piece in data["pieces"] if "cost" in piece]
        # A sum over some of the batches would be less than the run has cost: none is shown then.
        whole = len(costs) == sum(len(batches_of(run_dir, policy)) for policy in run.policies)
        data["spent"]["cost"] = sum(costs) if whole else None
    data = {"runs": shown, "differences": differences(shown), "methods": methods(shown)}
    for run, name in zip(shown, names_of(runs), strict=True):
        run["name"] = name
    parts = {
        "TITLE": escape(", ".join(run["name"] for run in shown)),
        "STYLE": (ASSETS / "page.css").read_text(encoding="utf-8"),
        # Texts that a model wrote are in here: a "<" in them must not end the script element, nor open the marker of
        # another part ("<!-- SCRIPT -->").
        "DATA": _json(data).replace("<", "\\u003c"),
        "PIECES": "\n".join(pieces),
        "SCRIPT": "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    template = (ASSETS / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        template = template.replace(f"<!-- {name} -->", part, 1)
    return template


def _weights(run: Run) -> dict[str, dict[str, float]]:
    """Weight of each component of every policy's reward."""
    components = {name: policy.reward.components.to_dict() for name, policy in run.policies.items()}
    return {
        name: {part: each.get("weight", 1.0) if isinstance(each, dict) else each for part, each in of.items()}
        for name, of in components.items()
    }


def _packed(piece: dict[str, Any]) -> str:
    return base64.b64encode(gzip.compress(_json(piece).encode(), _LEVEL, mtime=0)).decode()


def _json(value: Any) -> str:
    """JSON that browsers can parse: numbers that are not finite, as of a diverged policy, become null. Python would
    write them as NaN or Infinity, which is no JSON."""
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _pieces(run: Run, groups_per_step: int, notes: list[str], known: dict[Any, Made]) -> Iterator[Made]:
    """Every piece of a run. Adds a sentence to `notes` for each kind of data that is left out."""
    pages = EpisodePages(run)
    evaluations = evaluations_of(run.folder)
    if len(kept := _spread(evaluations, _MOST_EVALUATIONS)) < len(evaluations):
        notes.append(f"Episodes of {len(kept)} of the {len(evaluations)} evaluations are in this page, evenly spread.")

    def made(paths: Sequence[Path], most: int, make: Callable[[], Made | None]) -> Iterator[Made]:
        """The piece of some files, from the cache unless one of them has changed or is new."""
        stamp = (*((path, path.stat().st_mtime_ns) for path in paths if path.exists()), most)
        if stamp not in known and (piece := make()) is not None:
            known[stamp] = piece
        if stamp in known:
            yield known[stamp]

    for name in kept:
        yield from made([held_out_path(run.folder, name)], 0, partial(_evaluation, run, pages, name))
    for policy in run.policies:
        every = batches_of(run.folder, policy)
        steps, most = (every, groups_per_step) if groups_per_step else _affordable(run, policy, every)
        if len(steps) < len(every):
            notes.append(f"Episodes of {len(steps)} of the {len(every)} batches of {policy} are in this page.")
        for step in steps:
            paths = [batch_path(run.folder, policy, step), trained_path(run.folder, policy, step)]
            yield from made(paths, most, partial(_batch, run, pages, policy, step, most))
    if not run.is_evaluation and not any(batches_of(run.folder, policy) for policy in run.policies):
        notes.append("No trajectories were kept (config.dataflow.keep_trajectories): there are no training episodes.")
    notes += pages.problems


def _evaluation(run: Run, pages: EpisodePages, name: str) -> Made | None:
    if not (groups := read_evaluation(run.folder, name)):
        return None
    described = {"kind": "held out", "label": f"held out, {name}", "step": version_of(name), "policy": ""}
    return _packed(pages.piece(groups)), {**described, "episodes": index_of(groups)}


def _batch(run: Run, pages: EpisodePages, policy: str, step: int, most: int) -> Made | None:
    whole = read_batch(run.folder, policy, step)
    if not (groups := _chosen(whole, most)):
        return None
    piece = pages.piece(groups)
    explain_credit(groups, piece, run.policies[policy].credit)
    ranks = [interest(group, made.get("graph")) for group, made in zip(groups, piece["groups"], strict=True)]
    return _packed(piece), {
        "kind": "training",
        "label": f"step {step + 1}" + (f" of {policy}" if len(run.policies) > 1 else ""),
        "step": step + 1,
        "policy": policy,
        "episodes": index_of(groups),
        "interest": ranks,
        "groups": len(groups),
        "of": len(whole),
        "cost": sum(line["outcome"].get("executor_cost", 0.0) for group in whole for line in group.lines),
        "use": workflow_use(whole),
    }


def _affordable(run: Run, policy: str, steps: Sequence[int]) -> tuple[list[int], int]:
    """The batches of a policy that a page can hold, evenly spread, and the number of groups of each.

    Pieces are about as large as the files they are made of. The number is a power of two: as a run grows it changes
    seldom, and with it the cached pieces of a page that is made again.
    """
    if not steps:
        return [], 0
    size = sum(batch_path(run.folder, policy, step).stat().st_size for step in steps)
    each = size / (len(steps) * run.policies[policy].trainer.groups_per_step)
    groups = max(min(int(_MOST_BYTES / max(each, 1.0)), _MOST_GROUPS), 2)
    if groups >= 2 * len(steps):
        return list(steps), 1 << (groups // len(steps)).bit_length() - 1
    return _spread(steps, groups // 2), 2


def _spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / max(most - 1, 1))] for place in range(most)]


def _chosen(groups: Sequence[RecordedGroup], most: int) -> list[RecordedGroup]:
    """The groups of a batch that are shown: one half those whose episodes differ most in success, one half an even
    sample of the others, so that the page shows common groups, too."""
    if len(groups) <= most:
        return list(groups)
    divided = sorted(groups, key=lambda group: -group.evenness)[: (most + 1) // 2]
    rest, others = [group for group in groups if group not in divided], most - len(divided)
    return [*divided, *(rest[:: max(len(rest) // others, 1)][:others] if others else ())]
