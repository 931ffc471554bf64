"""Problems of mathematics; see `world`."""

from flowjax.envs.math.world import Math

__all__ = ["Math"]
