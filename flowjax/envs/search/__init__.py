"""Search: answer a question with a search engine's help."""

from flowjax.envs.search.world import Search

__all__ = ["Search"]
