"""Transcripts: every turn as it is kept for people, one trajectory a line, in files of compressed JSON lines.

    trajectories/<policy>/<step>.jsonl.gz     the batch that takes the policy from version <step> to the next
    trajectories/<policy>/<step>.trained.gz   log-probs of its sampled tokens as the trainer found them
    held_out/<policy>@<version>.turns.gz      episodes of an evaluation

Prompts and replies are kept as token ids, which are what was trained on. Readers decode them with the tokenizer of the
policy's base: that costs a run nothing, and the text is exactly that of the ids. A prompt is kept without the prefix
that it shares with the turn before: the first `prompt_shared` tokens of that turn's prompt and reply.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from flowjax.files import replace_file
from flowjax.records import Task, Trajectory, Turn

_LEVEL = 6  # of zlib: a fifth smaller than 4 for 2 ms a megabyte; 9 is a twentieth smaller for 5 ms more


@dataclass(frozen=True, slots=True)
class Credit:
    """Reward and credit of one trajectory.

    advantages: one for each turn.
    parts: terms of which an estimator sums its advantages, by name, such as the episode's and the step's.
    components: terms of the reward, before weighting.
    """

    reward: float
    components: Mapping[str, float]
    advantages: Float[np.ndarray, "turns"] | Sequence[float] = ()
    parts: Mapping[str, Float[np.ndarray, "turns"]] = field(default_factory=dict)


def batch_path(run_dir: Path, policy: str, step: int) -> Path:
    """File of the policy's batch `step`."""
    return run_dir / "trajectories" / policy / f"{step:06d}.jsonl.gz"


def trained_path(run_dir: Path, policy: str, step: int) -> Path:
    """File of the log-probs of that batch at training."""
    return run_dir / "trajectories" / policy / f"{step:06d}.trained.gz"


def held_out_path(run_dir: Path, evaluation: str) -> Path:
    """File of an evaluation's episodes, turn by turn."""
    return run_dir / "held_out" / f"{evaluation}.turns.gz"


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]], *, durable: bool = False) -> None:
    """Write maps as a file of compressed JSON lines, all or none of it; one line at a time is in memory. A `durable`
    file survives a power cut.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, _compressed(lines), durable=durable)


def _compressed(lines: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """The bytes of such a file. Its header has no time: equal lines are equal files."""
    compressor = zlib.compressobj(_LEVEL, wbits=zlib.MAX_WBITS | 16)  # gzip's format
    for line in lines:
        text = json.dumps(line, separators=(",", ":"), default=str) + "\n"
        yield compressor.compress(text.encode())
    yield compressor.flush()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of such a file, up to where it is damaged or cut off; none of one that cannot be read."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
    except (OSError, EOFError, ValueError, zlib.error):  # as after a power cut: the lines before it are shown
        return


def transcript(task: Task, trajectory: Trajectory, credit: Credit | None = None) -> dict[str, Any]:
    """A line: see docs/report.md for its fields."""
    line: dict[str, Any] = {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "policy": trajectory.policy,
        "task_id": task.task_id,
        "source": task.source,
        "kind": task.kind,
        "payload": dict(task.payload),
        "seed": trajectory.seed,
        "status": trajectory.status,
        "error": trajectory.error,
        "outcome": dict(trajectory.outcome),
        "turns": _turns(trajectory.turns),
    }
    if trajectory.shown:
        line["shown"] = _read(trajectory.shown)
    if credit is not None:
        line |= {"reward": _short(credit.reward), "rewards": _rounded(credit.components)}
        # Not strict: an evaluation's credit has a reward and no advantages.
        for number, (turn, advantage) in enumerate(zip(line["turns"], credit.advantages, strict=False)):
            turn["advantage"] = _short(advantage)
            if credit.parts:
                turn["advantage_parts"] = _rounded({name: part[number] for name, part in credit.parts.items()})
    return line


def _turns(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    before: list[int] = []
    for turn in turns:
        prompt_ids, sampled_ids = turn.prompt_ids.tolist(), turn.sampled_ids.tolist()
        shared = _common(before, prompt_ids)
        found.append(
            {
                "version": turn.version,
                "state_key": f"{turn.state_key:016x}",
                "next_state_key": f"{turn.next_state_key:016x}",
                "reward": _short(turn.env_reward),
                "valid": bool(turn.valid),
                "terminal": bool(turn.terminal),
                "finish_reason": turn.finish_reason,
                "generate_s": round(float(turn.generate_s), 4),
                "env_s": round(float(turn.env_s), 4),
                "prompt_shared": shared,
                "prompt_ids": prompt_ids[shared:],
                "sampled_ids": sampled_ids,
                "logprobs": [round(value, 5) for value in turn.logprobs.tolist()],
            }
        )
        if turn.spans:
            found[-1]["spans"] = [list(span) for span in turn.spans]
        if turn.shown:
            found[-1]["shown"] = _read(turn.shown)
        before = prompt_ids + sampled_ids
    return found


def _common(before: list[int], ids: list[int]) -> int:
    """Length of the common prefix."""
    if ids[: len(before)] == before:
        return len(before)
    pairs = enumerate(zip(before, ids, strict=False))
    return next((place for place, (one, other) in pairs if one != other), len(ids))


def whole_prompts(turns: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The token ids of every turn's prompt."""
    found: list[list[int]] = []
    before: list[int] = []
    for turn in turns:
        found.append([*before[: turn.get("prompt_shared", 0)], *turn["prompt_ids"]])
        before = [*found[-1], *turn["sampled_ids"]]
    return found


def _read(shown: str) -> Any:
    """Data of a `shown` text; {"text": ...} where it is no JSON, as from a rollout that is not flowjax's."""
    try:
        return json.loads(shown)
    except ValueError:
        return {"text": shown}


def _rounded(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: _short(value) for name, value in values.items()}


def _short(value: Any) -> float:
    return round(float(value), 5)
