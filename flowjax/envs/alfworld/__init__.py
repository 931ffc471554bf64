"""Household tasks in text; see `world`."""

from flowjax.envs.alfworld.world import Alfworld

__all__ = ["Alfworld"]
