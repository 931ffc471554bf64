"""What was played, as JSON lines for the report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowjax.records import Group


def write_transcripts(run_dir: Path, policy: str, step: int, groups: Sequence[Group]) -> None:
    """Write a batch's trajectories to `trajectories/<policy>/<step>.jsonl`, one a line."""
    path = run_dir / "trajectories" / policy / f"{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for group in groups for line in _readable(group)))


def _readable(group: Group) -> list[dict[str, Any]]:
    """One JSON-able map per trajectory."""
    return [
        {
            "trajectory_id": trajectory.trajectory_id,
            "task_id": trajectory.task_id,
            "status": trajectory.status,
            "outcome": dict(trajectory.outcome),
            "turns": [
                {
                    "version": turn.version,
                    "state_key": f"{turn.state_key:016x}",
                    "next_state_key": f"{turn.next_state_key:016x}",
                    "reward": turn.env_reward,
                    "valid": turn.valid,
                    "terminal": turn.terminal,
                    "prompt_ids": turn.prompt_ids.tolist(),
                    "sampled_ids": turn.sampled_ids.tolist(),
                    "logprobs": [round(float(value), 6) for value in turn.logprobs],
                }
                for turn in trajectory.turns
            ],
        }
        for trajectory in group.trajectories
    ]
