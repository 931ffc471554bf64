"""A canvas on which a policy builds workflows; see `world`."""

from flowjax.envs.canvas.world import Canvas

__all__ = ["Canvas"]
