"""What a rollout service has done so far and does per second."""

import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from flowjax.records import COUNTED_STATUSES, Episode

_WINDOW_S = 10.0  # over which rates are taken


@dataclass
class Counters:
    """Totals since the start. An episode fails when its status is neither ok nor truncated."""

    episodes: int = 0
    failed_episodes: int = 0
    given_back: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0

    def add(self, episode: Episode) -> None:
        turns = episode.turns
        self.episodes += 1
        self.failed_episodes += episode.status not in COUNTED_STATUSES
        self.turns += len(turns)
        self.sampled_tokens += sum(len(turn.sampled_ids) for turn in turns)
        self.prompt_tokens += sum(len(turn.prompt_ids) for turn in turns)


class Rates:
    """Increase per second of the totals over the last seconds."""

    def __init__(self):
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def update(self, counters: Counters, now_s: float) -> dict[str, float]:
        """`<total>_per_s` for every total."""
        self._samples.append((now_s, asdict(counters)))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= _WINDOW_S:
            self._samples.popleft()
        (then_s, before), (_, after) = self._samples[0], self._samples[-1]
        elapsed_s = now_s - then_s
        return {f"{name}_per_s": (after[name] - before[name]) / elapsed_s if elapsed_s else 0.0 for name in after}


def read_leases(path: Path) -> list[str]:
    """Leases that were held when the status file was last written: after a crash, those of the predecessor."""
    try:
        return [str(lease_id) for lease_id in json.loads(path.read_text())["leases"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
