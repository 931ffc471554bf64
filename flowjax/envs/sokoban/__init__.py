"""Sokoban: push every box onto a target."""

from flowjax.envs.sokoban.world import Sokoban

__all__ = ["Sokoban"]
