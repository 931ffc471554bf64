"""WebShop: buy the product that an instruction describes."""

from flowjax.envs.webshop.world import WebShop

__all__ = ["WebShop"]
