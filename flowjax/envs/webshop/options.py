"""Options of WebShop."""

from dataclasses import dataclass
from typing import get_args

from flowjax.envs.base import WorldError
from flowjax.envs.webshop.catalog import Catalog, load_catalog
from flowjax.envs.webshop.goals import GoalKind, SplitBy


@dataclass(frozen=True, slots=True)
class WebShopOptions:
    """The catalog is the first `products` of the files at `path`, or generated from `seed` where that is empty.

    `held_out` different goals are held out, a fifth of all at most; `goals` is synthetic or human, `split_by` content
    or, as published, index.
    """

    path: str | None = None
    products: int = 1000
    seed: int = 0
    goals: GoalKind = "synthetic"
    held_out: int = 500
    split_by: SplitBy = "content"
    show_attributes: bool = False

    def __post_init__(self):
        for name, allowed in (("goals", get_args(GoalKind)), ("split_by", get_args(SplitBy))):
            if getattr(self, name) not in allowed:
                raise WorldError(f"env.options {name}={getattr(self, name)!r}: give {' or '.join(allowed)}")
        for name in ("products", "held_out"):
            if getattr(self, name) < 1:
                raise WorldError(f"env.options {name}={getattr(self, name)}: give 1 or more")

    def catalog(self) -> Catalog:
        return load_catalog(self.path or None, self.products, self.seed, self.goals == "human")
