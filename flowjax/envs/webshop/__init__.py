"""WebShop: buy the product that an instruction describes (Yao et al. 2022, arXiv 2207.01206)."""

from flowjax.envs.webshop.options import Options
from flowjax.envs.webshop.prompts import follow_up, parse_action, prompt, reply
from flowjax.envs.webshop.world import OUTCOMES, WebShop, expert, make, random_action, tasks, vocabulary

__all__ = [
    "OUTCOMES",
    "Options",
    "WebShop",
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
