"""The stock engine: textworld's PDDL environment under alfworld's wrapper, as alfworld itself plays a game."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowjax.envs.alfworld.generate import package


class StockGame:
    """One game in play. `commands` are the admissible ones, `said` the latest text."""

    def __init__(self, data: Mapping[str, Any]):
        textworld = package("textworld")
        wrapper = package("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._env = wrapper(package("textworld.envs").PddlEnv(infos))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "game.tw-pddl"
            path.write_text(json.dumps(dict(data)))
            self._env.load(str(path))
        self._take(self._env.reset())

    def step(self, command: str) -> str:
        """Give a command; returns what the game says."""
        state, score, done = self._env.step(command)
        self._take(state)
        assert (score, done) == (int(self.won), self.won)
        return self.said

    def _take(self, state: Any) -> None:
        self.said: str = state.feedback
        self.commands: list[str] = list(state.admissible_commands)
        self.won: bool = bool(state["won"])

    @staticmethod
    def collect(folder: Path) -> list[str]:
        """The game files that alfworld finds under a folder."""
        config = {
            "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]},
            "dataset": {"data_path": str(folder), "num_train_games": 0},
        }
        return package("alfworld.agents.environment.alfred_tw_env").AlfredTWEnv(config).game_files
