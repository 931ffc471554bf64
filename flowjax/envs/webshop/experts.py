"""A shopper that knows the product: searches for it, chooses the options and buys."""

from dataclasses import dataclass
from functools import lru_cache

from flowjax.envs.webshop.bm25 import query_key
from flowjax.envs.webshop.catalog import Catalog, Product
from flowjax.envs.webshop.pages import BACK, BUY, NEXT, PER_PAGE, PREVIOUS, State
from flowjax.envs.webshop.prompts import words
from flowjax.envs.webshop.reward import Goal, option_fits


@dataclass(frozen=True, slots=True)
class Plan:
    """`page` is the results page that shows the product, 0 where no query finds it."""

    product: int
    query: str
    page: int
    options: tuple[tuple[str, str], ...]


@lru_cache(maxsize=1 << 14)
def plan(catalog: Catalog, goal: Goal) -> Plan:
    """The shortest of a few queries that shows the product on the first page; else the one that ranks it best."""
    number = catalog.by_asin[goal.asin]
    product = catalog.products[number]
    asked = goal.instruction.split(", and price lower than ")[0]
    values = " ".join(value for values in product.options.values() for value in values)
    texts = (
        asked.split(" with ")[0],
        asked,
        product.name,
        f"{product.name} {asked}",
        f"{product.name} {asked} {values}",
    )
    best = (0, len(catalog.products), " ".join(words(product.name)))
    for text in texts:
        query = " ".join(words(text))
        hits = catalog.search(query_key(query))
        if number in hits:
            rank = hits.index(number)
            page = rank // PER_PAGE + 1
            if page < (best[0] or page + 1):
                best = (page, rank, query)
            if page == 1:
                break
    page, _, query = best
    return Plan(number, query, page, _options(product, goal))


def _options(product: Product, goal: Goal) -> tuple[tuple[str, str], ...]:
    """Values that fit the wanted ones, of different options where that is possible."""
    if goal.option_names:
        return tuple(zip(goal.option_names, goal.options, strict=True))
    chosen: dict[str, str] = {}
    for wanted in goal.options:
        fitting = [
            (name in chosen, value != wanted.lower(), name, value)
            for name, values in product.options.items()
            for value in values
            if value == wanted.lower() or option_fits(value, wanted)
        ]
        if fitting:
            *_, name, value = min(fitting, key=lambda found: found[:2])
            chosen[name] = value
    return tuple(chosen.items())


def best_action(catalog: Catalog, goal: Goal, state: State) -> str:
    """The next action towards the purchase, from any state; on the last page, one that no longer matters."""
    aim = plan(catalog, goal)
    found = state.query == query_key(aim.query)
    if state.page == "search":
        return f"search[{aim.query}]"
    if state.page == "sub":
        return f"click[{PREVIOUS}]"
    if state.page == "results":
        hits = catalog.search(state.query)
        if aim.product not in hits:
            return f"click[{BACK}]"
        page = hits.index(aim.product) // PER_PAGE + 1
        if page == state.number:
            return f"click[{goal.asin.lower()}]"
        return f"click[{NEXT if page > state.number else PREVIOUS}]"
    if state.product != aim.product:
        return f"click[{PREVIOUS if found and state.number == aim.page else BACK}]"
    missing = [value for name, value in aim.options if dict(state.options).get(name) != value]
    return f"click[{missing[0] if missing else BUY}]"
