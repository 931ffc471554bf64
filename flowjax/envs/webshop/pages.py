"""Pages of the shop: their texts, their links, and the page that each link leads to."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from flowjax.envs.webshop.catalog import Catalog, Product
from flowjax.envs.webshop.search import query_key

SEARCH_TEMPLATE = "search[<words>]"
PER_PAGE = 10
BACK, PREVIOUS, NEXT, BUY = "back to search", "< prev", "next >", "buy now"
SUB_PAGES = ("description", "features", "reviews")
ATTRIBUTES = "attributes"  # a fourth sub page, shown on request


PageName = Literal["search", "results", "item", "sub", "done"]


@dataclass(frozen=True, slots=True)
class PageView:
    """A page as a shopper sees it. `texts` are all its texts in order, as in the published shop, which does not show
    the chosen options. The last page has no instruction."""

    page: PageName
    instruction: str
    texts: tuple[str, ...]
    number: int = 0  # of a results page
    products: tuple[tuple[str, str], ...] = ()  # ASIN and title of each on a results page
    title: str = ""  # of an item
    options: tuple[str, ...] = ()  # of an item: each one's name, then its values
    price: float = 0.0  # of an item, the highest where it has several; dollars


@dataclass(frozen=True, slots=True)
class State:
    """Place of a shopper. `query` is the normalised query (`query_key`), `options` are the chosen values by name."""

    page: PageName = "search"
    query: str = ""
    number: int = 1  # of the results page
    product: int = -1  # position in the catalog
    sub_page: str = ""
    options: tuple[tuple[str, str], ...] = ()


def read_action(action: str) -> tuple[str, str]:
    """Name and lower-case argument of `name[argument]`; ("", "") for another form.

    The published pattern is (.+)\\[(.+)\\], matched from the start. This finds the same match in linear time.
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 0, max(end - 1, 0))
    return (line[:start], line[start + 1 : end].lower()) if start > 0 else ("", "")


class Pages:
    """Views, legal actions and links of a catalog."""

    def __init__(self, catalog: Catalog, show_attributes: bool):
        self._catalog = catalog
        self._sub_pages = (*SUB_PAGES, ATTRIBUTES) if show_attributes else SUB_PAGES
        self._body = lru_cache(maxsize=1 << 14)(self._make_body)

    def follow(self, state: State, action: str) -> State | None:
        """The state after an action; None for an action that is not possible there."""
        if state.page == "done":
            return None
        name, argument = read_action(action)
        if action != SEARCH_TEMPLATE and action in self.show(state, "")[1]:
            # As listed, since the published pattern misreads values with brackets: `click[6 [wide]]`.
            return self._click(state, action.removeprefix("click[").removesuffix("]"))
        if name == "search":
            return State("results", query_key(argument))
        if name == "click" and argument != "search":
            return self._click(state, argument)
        return None

    def show(self, state: State, instruction: str) -> tuple[PageView, tuple[str, ...]]:
        """View and legal actions of a page before the end."""
        if state.page == "search":
            return PageView("search", instruction, ("Search",)), (SEARCH_TEMPLATE,)
        body, legal = self._body(replace(state, options=()))
        return replace(body, instruction=instruction), legal

    def _click(self, state: State, target: str) -> State | None:
        if state.page == "search":
            return None
        if target == BACK:
            return State()
        if state.page == "results":
            return self._click_results(state, target)
        if state.page == "sub":
            return replace(state, page="item", sub_page="") if target == PREVIOUS else None
        if target == PREVIOUS:
            return State("results", state.query, state.number)
        if target == BUY:
            return replace(state, page="done")
        if target in self._sub_pages:
            return replace(state, page="sub", sub_page=target)
        option = self._catalog.products[state.product].option_of(target)
        if option is None:
            return None
        return replace(state, options=tuple(sorted({**dict(state.options), option: target}.items())))

    def _click_results(self, state: State, target: str) -> State | None:
        if target == NEXT:
            return replace(state, number=state.number + 1)
        if target == PREVIOUS:
            return replace(state, number=state.number - 1) if state.number > 1 else None
        product = self._catalog.linked(target)
        if product is None or product not in self.results(state):
            return None
        return replace(state, page="item", product=product)

    def results(self, state: State) -> tuple[int, ...]:
        """Products on the state's results page."""
        return self._catalog.search(state.query)[(state.number - 1) * PER_PAGE : state.number * PER_PAGE]

    def _make_body(self, state: State) -> tuple[PageView, tuple[str, ...]]:
        if state.page == "results":
            return self._results_body(state)
        product = self._catalog.products[state.product]
        return self._item_body(product) if state.page == "item" else _sub_body(product, state.sub_page)

    def _results_body(self, state: State) -> tuple[PageView, tuple[str, ...]]:
        shown = [self._catalog.products[number] for number in self.results(state)]
        total = len(self._catalog.search(state.query))
        back = ("< Prev",) if state.number > 1 else ()
        said = [text for product in shown for text in (product.asin, product.name, product.price_tag)]
        texts = _kept("Back to Search", f"Page {state.number} (Total results: {total})", *back, "Next >", *said)
        titles = tuple((product.asin, product.name.strip()) for product in shown)
        links = (BACK, *((PREVIOUS,) if back else ()), NEXT, *(product.asin.lower() for product in shown))
        return PageView("results", "", texts, number=state.number, products=titles), _legal(links)

    def _item_body(self, product: Product) -> tuple[PageView, tuple[str, ...]]:
        options = [text for name, values in product.options.items() for text in (name, *values)]
        buttons = [name.capitalize() for name in self._sub_pages]
        about = (product.name, f"Price: {product.price_tag}", "Rating: N.A.", *buttons, "Buy Now")
        values = [value for values in product.options.values() for value in values]
        links = dict.fromkeys((BACK, PREVIOUS, *self._sub_pages, BUY, *values))
        texts = _kept("Back to Search", "< Prev", *options, *about)
        title, price = product.name.strip(), max(product.prices, default=0.0)
        return PageView("item", "", texts, title=title, options=_kept(*options), price=price), _legal(tuple(links))


def _sub_body(product: Product, name: str) -> tuple[PageView, tuple[str, ...]]:
    said = {
        "description": (product.description,),
        "features": product.bullet_points,
        "reviews": ("No reviews found",),  # the published files hold none
        ATTRIBUTES: (*product.attributes, product.category, product.query, product.product_category),
    }[name]
    return PageView("sub", "", _kept("Back to Search", "< Prev", *said)), _legal((BACK, PREVIOUS))


def last_page(product: Product, options: Sequence[tuple[str, str]], score: float) -> PageView:
    """The page after a purchase: the product bought, the score, and the empty fields of the published template."""
    chosen = json.dumps(dict(options), sort_keys=True)
    # Escaped as by `tojson` in the published template.
    for mark in "<>&'":
        chosen = chosen.replace(mark, f"\\u{ord(mark):04x}")
    nothing = ("attrs", "None", "category", "None", "query", "None", "product category", "None")
    goal = ("Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category")
    texts = (
        *("Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)"),
        *("Purchased", "asin", product.asin, "options", chosen, *nothing),
        *(*goal, "query", "Goal", "None", "Reward"),
        *("Your score (min 0.0, max 1.0)", str(score), "Reward Details", "None"),
    )
    return PageView("done", "", texts)


def _kept(*parts: str) -> tuple[str, ...]:
    """Texts without surrounding white space; blank ones are left out, as on the published page."""
    return tuple(part.strip() for part in parts if part.strip())


def _legal(links: Sequence[str]) -> tuple[str, ...]:
    return (SEARCH_TEMPLATE, *(f"click[{link}]" for link in links))
