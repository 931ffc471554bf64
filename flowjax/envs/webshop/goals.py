"""Goals of a catalog: priced and shuffled by the data seed, split by what they say."""

import itertools
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from flowjax.envs.base import Split
from flowjax.envs.webshop.catalog import Catalog, Product, load_catalog
from flowjax.envs.webshop.reward import Goal
from flowjax.records import state_key

GoalKind = Literal["synthetic", "human"]
SplitBy = Literal["content", "index"]
NO_LIMIT = 1_000_000.0  # dollars; the goal of a product for which there are no two round prices above its own
LIMITS = tuple(10.0 * tens for tens in range(1, 100))


def goals(catalog: Catalog, kind: GoalKind, data_seed: int) -> list[Goal]:
    """Every goal of the catalog, in its order. The price limit of each is drawn for it alone."""
    find = _human if kind == "human" else _synthetic
    return [goal for product in catalog.products for goal in find(catalog, product, data_seed)]


def _human(catalog: Catalog, product: Product, data_seed: int) -> Iterator[Goal]:
    for number, told in enumerate(catalog.human.get(product.asin, ())):
        if told["instruction_attributes"]:
            limit, clause = _limit(product, data_seed, number)
            yield Goal(
                product.asin,
                told["instruction"].strip(".") + clause,
                tuple(told["instruction_attributes"]),
                tuple(told["instruction_options"]),
                (),
                limit,
                data_seed,
            )


def _synthetic(catalog: Catalog, product: Product, data_seed: int) -> Iterator[Goal]:
    del catalog
    if product.instruction is None or not product.instruction_attributes:
        return
    limit, clause = _limit(product, data_seed, 0)  # one for all combinations of a product's options
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        pairs = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
        text = product.instruction + (f" with {pairs}" if pairs else "") + clause
        yield Goal(product.asin, text, product.instruction_attributes, tuple(values), tuple(names), limit, data_seed)


def _limit(product: Product, data_seed: int, number: int) -> tuple[float, str]:
    """The larger of two of the next four multiples of ten dollars above the price, and how it is said."""
    above = [limit for limit in LIMITS if limit > product.price(data_seed)][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(random.Random(f"limit {data_seed} {product.asin} {number}").sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _content(goal: Goal) -> tuple[Any, ...]:
    """What makes two goals the same task whatever their price: words, attributes and options."""
    words = goal.instruction.split(", and price lower than ")[0].lower().split()
    return tuple(words), tuple(sorted(goal.attributes)), tuple(sorted(goal.options))


@lru_cache(maxsize=16)
def split_goals(
    path: str | None, products: int, seed: int, kind: GoalKind, data_seed: int, held_out: int, by: SplitBy
) -> Mapping[Split, tuple[Goal, ...]]:
    """Both splits, each in an order that the data seed draws: `held_out` contents are held out, a fifth of all at most.

    Which ones is decided by a hash of the content, so that no data seed trains on what another holds out; the data seed
    changes the order and the prices only. By content, goals that say the same lie on the same side. By index they may
    not, as in the published split: there a goal's content is its place in the catalog.
    """
    found = goals(load_catalog(path, products, seed, kind == "human"), kind, data_seed)
    keys = [_content(goal) if by == "content" else (number,) for number, goal in enumerate(found)]
    ranked = sorted(set(keys), key=lambda key: (state_key("webshop", repr(key)), key))
    kept = set(ranked[: min(held_out, len(ranked) // 5)])
    both: dict[Split, list[Goal]] = {"held_out": [], "train": []}
    for goal, key in zip(found, keys, strict=True):
        both["held_out" if key in kept else "train"].append(goal)
    for split, chosen in both.items():
        random.Random(f"order {data_seed} {split}").shuffle(chosen)
    return {split: tuple(chosen) for split, chosen in both.items()}
