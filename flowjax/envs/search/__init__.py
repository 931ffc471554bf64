"""Search: answer a question with a search engine's help. State: the question and the documents retrieved so far."""

from flowjax.envs.search.options import Options
from flowjax.envs.search.prompts import follow_up, parse_action, prompt, reply, vocabulary
from flowjax.envs.search.protocol import View
from flowjax.envs.search.world import OUTCOMES, Search, expert, make, random_action, tasks

__all__ = [
    "OUTCOMES",
    "Options",
    "Search",
    "View",
    "expert",
    "follow_up",
    "make",
    "parse_action",
    "prompt",
    "random_action",
    "reply",
    "tasks",
    "vocabulary",
]
