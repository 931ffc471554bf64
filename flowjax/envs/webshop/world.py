"""WebShop (Yao et al. 2022, arXiv 2207.01206): options, environment, tasks, texts and expert."""

import functools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np

from flowjax.envs import (
    History,
    Message,
    Observation,
    Split,
    Step,
    Style,
    World,
    WorldError,
    check_split,
    user_says,
)
from flowjax.envs.webshop.catalog import Catalog, Product, load_catalog
from flowjax.envs.webshop.goals import (
    Goal,
    GoalKind,
    SplitBy,
    check_requirements,
    goal_words,
    noun_finder,
    option_fits,
    score,
    split_goals,
    type_score,
    without_price,
    words,
)
from flowjax.envs.webshop.pages import (
    ATTRIBUTES,
    BACK,
    BUY,
    NEXT,
    PER_PAGE,
    PREVIOUS,
    SEARCH_TEMPLATE,
    SUB_PAGES,
    Pages,
    PageView,
    State,
    last_page,
    read_action,
)
from flowjax.envs.webshop.search import query_key
from flowjax.fields import Interval
from flowjax.grading.answers import between_tags, without_thoughts
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

SUCCESS_REWARD = 10.0
MAX_RANDOM_WORDS = 3
MAX_CHARACTERS = 13_000  # of an instruct prompt; a longer one is given without its history
TITLE_WORDS = 4  # of a product on a compact results page
PRICE_STEP = 10  # dollars; a compact price is rounded up to it, as the limits of goals are multiples of it
OPEN = "open"  # in compact replies, before the number of a product on its results page
PLACES = tuple(map(str, range(1, PER_PAGE + 1)))
PAGES = ("1", "2", "3", "4", "5")  # compact names of results pages; later ones are "more"

_ROLE = """You are shopping in WebShop, an online shop. Find the product that the task describes, choose the options \
it asks for, and buy it. Buying ends the task; what you buy is then compared with the task."""
_ASK = """First reason step by step about the next action inside <think> </think>, then give one of the actions above \
inside <action> </action>."""


@dataclass(frozen=True, slots=True)
class WebShopOptions:
    """The catalog is the first `products` of the files at `path`, or generated from `seed` where that is empty.

    `goals` is synthetic or human, `split_by` content or index (of the catalog). For a share `hasty_share` of the goals
    the expert buys the first product that it opens, without choosing options.
    """

    path: str | None = None
    products: int = 1000
    seed: int = 0
    goals: GoalKind = "synthetic"
    split_by: SplitBy = "content"
    show_attributes: bool = False
    hasty_share: Annotated[float, Interval(at_least=0, at_most=1)] = 0.0

    def __post_init__(self):
        if self.products < 1:
            raise WorldError(f"env.options products={self.products}: give 1 or more")

    def catalog(self) -> Catalog:
        return load_catalog(self.path or None, self.products, self.seed, self.goals == "human")


class WebShop(World):
    """Buy the product that an instruction describes.

    State: the goal, page, query, results page, product, sub page and chosen options.
    """

    OUTCOMES = ("success", "score")
    Options = WebShopOptions
    View = PageView

    def env(self) -> "WebShopEnv":
        return WebShopEnv(self.options)

    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        """The goals of a split, shuffled; their number (`len`) depends on the catalog."""
        import grain  # imports jax, which processes that only hold environments do without

        check_split(split)
        at: WebShopOptions = self.options
        both = split_goals(at.path or None, at.products, at.seed, at.goals, data_seed, at.split_by)
        if not both[split]:
            raise WorldError(f"env.options products={at.products} leaves no {split} goals: raise it")
        name = f"{at.goals}-{split}-{data_seed}"
        return grain.MapDataset.range(len(both[split])).map(functools.partial(_task, both[split], name))

    def instruct(self, observation: Observation, history: History) -> str:
        """Task, latest turns, page and actions; without the turns where the prompt would be too long."""
        text = _instruct(observation, history)
        return text if len(text) <= MAX_CHARACTERS or not history else _instruct(observation, ())

    def compact(self, observation: Observation, history: History) -> str:
        """The goal, the actions of the history, the page."""
        view: PageView = observation.view
        done = [word for past in history for word in ("then", *_spoken(past.action, _places(past.view)).split())]
        return " ".join(["goal", *goal_words(view.instruction), *done, *_compact(view)])

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        if style == "compact":
            return user_says(" ".join(_compact(observation.view)))
        return user_says(f"The page now:\n{_quoted(observation.view)}\n\n{_actions(observation)}\n\n{_ASK}")

    def reply(self, action: str, style: Style, legal: tuple[str, ...] = ()) -> str:
        """In compact prompts a product of a results page is named by its place there: `open 3`."""
        return _spoken(action, _products(legal)) if style == "compact" else f"<action>{action}</action>"

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        """The action inside the last tags, or a whole reply without tags: `click[x]`, or compact `click x` and
        `open 3`."""
        said = without_thoughts(reply).lower()
        text = between_tags(said, "action")
        if text is None:
            return None
        action = text.strip()
        name, _, argument = action.partition(" ")
        if "[" not in name and text == said:
            if name == OPEN:
                return dict(zip(PLACES, _products(legal), strict=False)).get(argument.strip())
            action = f"{name}[{' '.join(argument.split())}]"
        return action if _is_legal(action, legal) else None

    def vocabulary(self) -> tuple[str, ...]:
        """Every word of compact prompts about the catalog, and of replies to them."""
        catalog: Catalog = self.options.catalog()
        names = (BACK, PREVIOUS, NEXT, BUY, *SUB_PAGES, ATTRIBUTES)
        fixed = f"goal then none under price search click {OPEN} page results item sub done more "
        fixed += " ".join((*names, *PAGES, *PLACES))
        found: dict[str, None] = dict.fromkeys(fixed.split())
        highest = math.ceil(max((max(product.prices, default=0.0) for product in catalog.products), default=0.0)) + 50
        found.update(dict.fromkeys(str(price) for price in range(0, highest + 1, PRICE_STEP)))
        texts: list[str] = []
        for product in catalog.products:
            texts += [product.name, product.instruction or ""]
            texts += [asked["instruction"] for asked in catalog.human.get(product.asin, ())]
            for name, values in product.options.items():
                texts += [name, *values]
                found.update(dict.fromkeys(word for text in (name, *values) for word in text.split()))
        found.update(dict.fromkeys(word for text in texts for word in words(text)))
        return tuple(found)

    def expert(self, env: "WebShopEnv") -> str:
        """The next action of a scripted shopper. It opens results of the wanted kind in order, leaves those that do not
        fit, and buys the first that does, which may be another one as good as the goal's. For some goals it buys the
        first product that it opens (`hasty_share`)."""
        hasty = state_key("hasty", env.goal.instruction) % 1000 < 1000 * self.options.hasty_share
        return _best_action(env.catalog, env.goal, env.state, env.opened, hasty)

    def random_action(self, observation: Observation, rng: np.random.Generator) -> str:
        """Any legal action; a search is for one to three words of the instruction."""
        if not observation.legal_actions:
            return ""
        action = super().random_action(observation, rng)
        if action != SEARCH_TEMPLATE:
            return action
        known = words(without_price(observation.view.instruction)) or ["gift"]
        count = min(len(known), int(rng.integers(1, MAX_RANDOM_WORDS + 1)))
        return f"search[{' '.join(cast(str, word) for word in rng.choice(known, count, replace=False))}]"


def _task(goals: tuple[Goal, ...], name: str, index: int) -> Task:
    """The index-th goal of a split."""
    return Task(f"webshop-{name}-{index}", "webshop", index, {"goal": asdict(goals[index])})


def _instruct(observation: Observation, history: History) -> str:
    view: PageView = observation.view
    parts = [_ROLE, f"Your task: {view.instruction}"]
    if history:
        past = [
            f"[Observation {p.turn}: '{_quoted(p.view)}', Action {p.turn}: '{p.action or 'none'}']" for p in history
        ]
        parts.append(f"You have taken {history[-1].turn} actions so far. The latest:\n" + "\n".join(past))
    parts += [f"The page now:\n{_quoted(view)}", _actions(observation), _ASK]
    return "\n\n".join(parts)


def _quoted(view: PageView) -> str:
    return " [SEP] ".join(f"'{text}'" for text in view.texts)


def _actions(observation: Observation) -> str:
    """The actions a page offers; the search bar, which works everywhere, where it is shown."""
    offered = ["search[<your query>]"] if observation.view.page == "search" else []
    offered += [action for action in observation.legal_actions if action != SEARCH_TEMPLATE]
    return "Your actions are:\n[\n" + "\n".join(f"'{action}'," for action in offered) + "\n]"


def _compact(view: PageView) -> list[str]:
    if view.page == "results":
        number = str(view.number)
        found = [
            word for place, (_, title) in zip(PLACES, view.products, strict=False) for word in (place, *_title(title))
        ]
        return ["page", "results", number if number in PAGES else "more", *found]
    if view.page == "item":
        options = [word for text in view.options for word in text.split()]
        price = PRICE_STEP * math.ceil(view.price / PRICE_STEP)
        return ["page", "item", *_title(view.title), *options, "price", str(price)]
    return ["page", view.page]


def _title(title: str) -> list[str]:
    """The last words of a title: the first ones are the brand, which does not tell the kind of product."""
    return words(title)[-TITLE_WORDS:]


def _spoken(action: str, products: Sequence[str]) -> str:
    """An action in compact words. `products` are the page's actions that open products, in order."""
    if action in products:
        return f"{OPEN} {PLACES[products.index(action)]}"
    name, _, argument = action.removesuffix("]").partition("[")
    return f"{name} {argument}" if name else "none"


def _products(legal: Sequence[str]) -> tuple[str, ...]:
    """The actions of a page that open a product: only a results page has them, after `click[next >]`."""
    following = f"click[{NEXT}]"
    return tuple(legal[legal.index(following) + 1 :]) if following in legal else ()


def _places(view: PageView) -> tuple[str, ...]:
    return tuple(f"click[{asin.lower()}]" for asin, _ in view.products)


def _is_legal(action: str, legal: tuple[str, ...]) -> bool:
    if action == SEARCH_TEMPLATE:
        return False
    name, argument = read_action(action)
    if name == "search":
        return SEARCH_TEMPLATE in legal and bool(argument.strip()) and action == f"search[{argument}]"
    return action in legal


class WebShopEnv:
    """One purchase at a time. `nouns_by` names the method that finds nouns in titles (docs/worlds/webshop.md)."""

    def __init__(self, options: WebShopOptions):
        check_requirements()
        self.catalog = options.catalog()
        self.nouns_by = noun_finder()[0]
        self._pages = Pages(self.catalog, options.show_attributes)
        self._goal: Goal | None = None
        self._goal_key = 0
        self.state = State()
        self.opened: set[int] = set()  # products that were looked at in this episode
        self._score = 0.0

    @property
    def goal(self) -> Goal:
        if self._goal is None:
            raise RuntimeError("the environment has not been reset")
        return self._goal

    def reset(self, task: Task, seed: int) -> Observation:
        """The search page of the task's goal.

        Raises:
            WorldError: the task's product is not in the catalog, which then is not the one its goals were made from.
        """
        fields: Mapping[str, Any] = task.payload["goal"]  # a task sent by wire has lists in place of tuples
        frozen: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        goal = Goal(**frozen)
        if goal.asin not in self.catalog.by_asin:
            raise WorldError(
                f"the task's product {goal.asin} is not in the catalog: env.options differ from the task's"
            )
        self._goal, self.state, self._score = goal, State(), 0.0
        self.opened = set()
        self._goal_key = state_key(repr(goal))
        return self._observe()

    def step(self, action: str) -> Step:
        after = self._pages.follow(self.state, action)
        if after is None:
            return Step(self._observe(), 0.0, self.state.page == "done", False, self._outcome())
        self.state = after
        if after.page == "item":
            self.opened.add(after.product)
        if after.page != "done":
            return Step(self._observe(), 0.0, False, True, self._outcome())
        wanted = self.catalog.products[self.catalog.by_asin[self.goal.asin]]
        self._score = score(self.goal, self.catalog.products[after.product], wanted, dict(after.options))
        return Step(self._observe(), SUCCESS_REWARD * (self._score == 1.0), True, True, self._outcome())

    def _observe(self) -> Observation:
        state = self.state
        if state.page == "done":
            view, legal = last_page(self.catalog.products[state.product], state.options, self._score), ()
        else:
            view, legal = self._pages.show(state, self.goal.instruction)
        return Observation(view, legal, self._key())

    def _key(self) -> int:
        state = self.state
        product = self.catalog.products[state.product].asin if state.product >= 0 else ""
        if state.page == "done":  # how the product was found no longer matters
            state = replace(state, query="", number=1)
        options = [part for pair in state.options for part in pair]
        return state_key(self._goal_key, state.page, state.query, state.number, product, state.sub_page, *options)

    def _outcome(self) -> dict[str, float]:
        return {"success": float(self._score == 1.0), "score": self._score}


@lru_cache(maxsize=1 << 14)
def _query(catalog: Catalog, goal: Goal) -> tuple[str, int]:
    """The query, of a few, that shows the goal's product on the earliest page; and that page, 0 if none shows it. The
    first of equals counts, and queries in the goal's own words come first: an imitating policy knows only these."""
    number = catalog.by_asin[goal.asin]
    product = catalog.products[number]
    asked = without_price(goal.instruction)
    values = " ".join(value for values in product.options.values() for value in values)
    texts = (
        asked,
        asked.split(" with ")[0],
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
    return query, page


@lru_cache(maxsize=1 << 16)
def _wanted_options(catalog: Catalog, goal: Goal, number: int) -> tuple[tuple[str, str], ...] | None:
    """Options with which a product scores 1 for the goal; None if there are none, but never for the goal's product."""
    product, wanted = catalog.products[number], catalog.products[catalog.by_asin[goal.asin]]
    chosen = _fitting_options(product, goal)
    fits = score(goal, product, wanted, dict(chosen)) == 1.0
    return chosen if fits or product is wanted else None


def _fitting_options(product: Product, goal: Goal) -> tuple[tuple[str, str], ...]:
    """Values that fit the wanted ones, of different options where possible. Only values whose click sets their own
    option: otherwise the expert would click them for ever."""
    named = tuple(zip(goal.option_names, goal.options, strict=False))
    if named and all(product.option_of(value) == name for name, value in named):
        return named
    chosen: dict[str, str] = {}
    for wanted in goal.options:
        fitting = [
            (name in chosen, value != wanted.lower(), name, value)
            for name, values in product.options.items()
            for value in values
            if product.option_of(value) == name and (value == wanted.lower() or option_fits(value, wanted))
        ]
        if fitting:
            *_, name, value = min(fitting, key=lambda found: found[:2])
            chosen[name] = value
    return tuple(chosen.items())


def _best_action(catalog: Catalog, goal: Goal, state: State, opened: Set[int], hasty: bool) -> str:
    """The next action towards the purchase, from any state; on the last page, any action, which has no effect."""
    query, page = _query(catalog, goal)
    if state.page == "search":
        return f"search[{query}]"
    if state.page == "sub":
        return f"click[{PREVIOUS}]"
    if state.page == "results":
        return _next_product(catalog, goal, state, opened)
    chosen = () if hasty else _wanted_options(catalog, goal, state.product)
    if chosen is None:
        return f"click[{PREVIOUS if state.query == query_key(query) and state.number <= page else BACK}]"
    missing = [value for name, value in chosen if dict(state.options).get(name) != value]
    return f"click[{missing[0] if missing else BUY}]"


def _next_product(catalog: Catalog, goal: Goal, state: State, opened: Set[int]) -> str:
    """The next click on a results page. First towards the page with the goal's product (back to search if no page has
    it); there, on each product before it that is of its kind and not yet opened; then on it."""
    hits = catalog.search(state.query)
    number = catalog.by_asin[goal.asin]
    if number not in hits:
        return f"click[{BACK}]"
    page = hits.index(number) // PER_PAGE + 1
    if page != state.number:
        return f"click[{NEXT if page > state.number else PREVIOUS}]"
    wanted = catalog.products[number]
    for product in hits[(page - 1) * PER_PAGE : hits.index(number)]:
        if product not in opened and type_score(catalog.products[product], wanted) == 1.0:
            return f"click[{catalog.products[product].asin.lower()}]"
    return f"click[{goal.asin.lower()}]"
