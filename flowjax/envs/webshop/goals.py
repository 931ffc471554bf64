"""Goals of a catalog, and WebShop's score of a purchase, in [0, 1] (Yao et al. 2022, arXiv 2207.01206, section 3).

Price limits and order of the goals depend on the data seed; their split depends on their words (or place) alone.
"""

import functools
import importlib.util
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from flowjax.envs import NotReady, Split, WorldError
from flowjax.envs.webshop.catalog import HUMAN, Catalog, Product, as_texts, load_catalog
from flowjax.records import state_key

GoalKind = Literal["synthetic", "human"]
SplitBy = Literal["content", "index"]
NO_LIMIT = 1_000_000.0  # dollars; for a product with fewer than two of `LIMITS` above its price
LIMITS = tuple(10.0 * tens for tens in range(1, 100))
HELD_OUT_ONE_IN = 5  # goals, by content: a small shop has few

_LIMIT_CLAUSE = ", and price lower than "
_FILLER_WORDS = "i am looking for need find me want to buy a an the with and price lower than dollars"
_FILLER = frozenset(_FILLER_WORDS.split())
_WORD = re.compile(r"[^\s,;:()\[\]]+")

# A colour is compared by the first of these words, in this order, that it contains: "white black" by black.
_COLOR_WORDS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy
camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral
cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite
grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta
maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy nude olive orange
peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell silver skull slate
steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow
"""
COLORS = tuple(_COLOR_WORDS.split())
MATCH = 85  # a token set ratio above this is a hit
SPACY_MODEL = "en_core_web_sm"
_NO_LATIN_1 = dict.fromkeys(range(128, 256))  # thefuzz drops these characters before it compares

_CLOSED_CLASS_WORDS = """
a an the this that these those my your his her its our their i you he she it we they me him us them who whom whose
which what all any both each either every few many more most much neither no none other several some such
about above across after against along among around as at before behind below beneath beside between beyond by
despite down during except for from in inside into like near of off on onto out outside over past per since
through throughout to toward under until up upon via with within without
and but or nor so yet if because although while when where than whether not only also very too
am is are was were be been being do does did have has had can could may might must shall should will would
"""
_CLOSED_CLASS = frozenset(_CLOSED_CLASS_WORDS.split())
_TITLE_WORD = re.compile(r"(?<![A-Za-z0-9])[A-Za-z](?:[A-Za-z0-9]|[.'](?=[A-Za-z]))*")
_PARTICIPLE = re.compile(r".{2,}[^e]ed")


@dataclass(frozen=True, slots=True)
class Goal:
    """A wanted purchase. `options` are values of the options in `option_names`, or of any options where that is empty;
    `price_below` is in dollars."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    option_names: tuple[str, ...]
    price_below: float
    data_seed: int


def goals(catalog: Catalog, kind: GoalKind, data_seed: int) -> list[Goal]:
    """Every goal of the catalog, in its order. Each goal's price limit is drawn independently of the others."""
    find = _human if kind == "human" else _synthetic
    return [goal for product in catalog.products for goal in find(catalog, product, data_seed)]


def _human(catalog: Catalog, product: Product, data_seed: int) -> Iterator[Goal]:
    for number, asked in enumerate(catalog.human.get(product.asin, ())):
        try:
            text = asked["instruction"].strip(".")
            attributes, options = as_texts(asked, "instruction_attributes"), as_texts(asked, "instruction_options")
        except (KeyError, TypeError, AttributeError) as error:
            place = f"{HUMAN}.json, product {product.asin}, instruction {number + 1}"
            raise WorldError(f"{place}: {type(error).__name__}: {error}") from error
        if attributes:
            limit, clause = _limit(product, data_seed, number)
            yield Goal(product.asin, text + clause, attributes, options, (), limit, data_seed)


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
    """A price limit and its clause in the instruction: the larger of two random ones among the next four multiples of
    ten dollars above the price."""
    above = [limit for limit in LIMITS if limit > product.price(data_seed)][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    # Seeded by a text, which `random` hashes in the same way in every process, unlike `hash`.
    limit = max(random.Random(f"limit {data_seed} {product.asin} {number}").sample(above, 2))
    return limit, f"{_LIMIT_CLAUSE}{limit:.2f} dollars"


def _content(goal: Goal) -> tuple[str, ...]:
    """A goal's set of words without the price: goals with the same words are the same task, for any product."""
    return tuple(sorted(set(words(without_price(goal.instruction)))))


@lru_cache(maxsize=16)
def split_goals(
    path: str | None, products: int, seed: int, kind: GoalKind, data_seed: int, by: SplitBy
) -> Mapping[Split, tuple[Goal, ...]]:
    """Both splits, each in a random order by the data seed; one in `HELD_OUT_ONE_IN` contents is held out.

    A hash of the content alone decides which, so a goal held out under one data seed or number of products is trained
    on under no other; the data seed changes order and prices only. By content, goals with the same words are in the
    same split. By index they may not be: there a goal's content is its place in the catalog. In the published split the
    sides overlap: it is by place in a list that each worker shuffles with its own seed.
    """
    found = goals(load_catalog(path, products, seed, kind == "human"), kind, data_seed)
    both: dict[Split, list[Goal]] = {"held_out": [], "train": []}
    for number, goal in enumerate(found):
        content = _content(goal) if by == "content" else (str(number),)
        both["train" if state_key("webshop", *content) % HELD_OUT_ONE_IN else "held_out"].append(goal)
    for split, chosen in both.items():
        random.Random(f"order {data_seed} {split}").shuffle(chosen)
    return {split: tuple(chosen) for split, chosen in both.items()}


def words(text: str) -> list[str]:
    """Words of an instruction or a title, in lower case, without punctuation and filler words."""
    found = (word.strip(".!?\"'") for word in _WORD.findall(text.lower()))
    return [word for word in found if word and word not in _FILLER]


def without_price(instruction: str) -> str:
    """An instruction without its price limit."""
    return instruction.partition(_LIMIT_CLAUSE)[0]


def goal_words(instruction: str) -> list[str]:
    """An instruction in short: its words, then "under" and the price in whole dollars."""
    limit = instruction.partition(_LIMIT_CLAUSE)[2]
    return [*words(without_price(instruction)), *(("under", limit.split(".")[0]) if limit else ())]


@functools.cache
def noun_finder() -> tuple[str, Callable[[str], tuple[str, ...]]]:
    """Name of a method, and its function from a title to its nouns: spaCy's small English model if installed, else a
    filter of function words."""
    if importlib.util.find_spec("spacy") and importlib.util.find_spec(SPACY_MODEL):
        import spacy  # pyright: ignore[reportMissingImports]

        model = spacy.load(SPACY_MODEL)
        return SPACY_MODEL, lambda title: tuple(t.text.lower() for t in model(title) if t.pos_ in ("NOUN", "PROPN"))
    return "closed-class filter", _open_class_words


def _open_class_words(title: str) -> tuple[str, ...]:
    """Words that can be nouns: no function words, no numbers, no past participles."""
    words = [match[0].lower() for match in _TITLE_WORD.finditer(title.replace("-", " "))]
    return tuple(word for word in words if word not in _CLOSED_CLASS and not _PARTICIPLE.fullmatch(word))


@functools.lru_cache(maxsize=1 << 16)
def nouns(title: str) -> tuple[str, ...]:
    """The nouns of a title, by `noun_finder`."""
    return noun_finder()[1](title)


@functools.cache
def _ratio() -> Callable[[str, str], float]:
    try:
        from rapidfuzz.fuzz import token_set_ratio
    except ImportError as error:
        raise NotReady('the WebShop world needs rapidfuzz: pip install -e ".[webshop]"') from error
    return token_set_ratio


@functools.lru_cache(maxsize=1 << 16)
def similarity(first: str, second: str) -> int:
    """thefuzz's token_set_ratio, 0 to 100: lower case, letters and digits only, Latin-1 letters dropped, rounded."""
    return round(_ratio()(_processed(first), _processed(second)))


def _processed(text: str) -> str:
    from rapidfuzz.utils import default_process

    return default_process(text.translate(_NO_LATIN_1))


def check_requirements() -> None:
    """Check that the packages of the score are installed.

    Raises:
        NotReady: rapidfuzz is not.
    """
    _ratio()


def normal_color(value: str) -> str:
    """The first of `COLORS`, in their order, that a value contains, be it inside a word; or else the value."""
    return next((color for color in COLORS if color in value), value)


def type_score(bought: Product, wanted: Product) -> float:
    """Similarity of the kinds of product, by query, category and nouns of the title: 1, 0.5, 0.1 or 0."""
    asked = nouns(wanted.name)
    shared = len(set(nouns(bought.name)) & set(asked))
    title = shared / len(asked) if asked else 0.2
    if title == 0:
        return 0.0
    if title < 0.1:
        return 0.1
    parts = [{part.strip() for part in p.product_category.split("›")} for p in (bought, wanted)]
    same = bought.query == wanted.query or len(parts[0] & parts[1]) >= 2 or title > 0.2
    return 1.0 if same else 0.5


def attribute_matches(bought: Product, wanted: Sequence[str]) -> int:
    """Wanted attributes found among the product's, or word for word in its texts."""
    texts = (bought.name, " ".join(bought.bullet_points), bought.description)
    return sum(
        any(similarity(known, attribute) > MATCH for known in bought.attributes)
        or any(attribute in text.lower() for text in texts)
        for attribute in wanted
    )


def option_fits(chosen: str, wanted: str) -> bool:
    """True where a chosen value counts as the wanted one: similar, or of the same colour."""
    return similarity(normal_color(chosen), normal_color(wanted)) > MATCH


def option_matches(chosen: Sequence[str], wanted: Sequence[str]) -> int:
    """Number of wanted values that some chosen value fits."""
    return sum(any(option_fits(each, value) for each in chosen) for value in wanted)


def score(goal: Goal, bought: Product, wanted: Product, chosen: Mapping[str, str]) -> float:
    """type_score * (hits of attributes, options and price) / (their number), in [0, 1]. The bought product's price is
    that of the goal's data seed."""
    hits = attribute_matches(bought, goal.attributes) + option_matches(tuple(chosen.values()), goal.options)
    hits += bought.price(goal.data_seed) <= goal.price_below
    return hits / (len(goal.attributes) + len(goal.options) + 1) * type_score(bought, wanted)
