"""Programs that pass tests; see `world`."""

from flowjax.envs.code.world import Code

__all__ = ["Code"]
