"""WebShop's score of a purchase, in [0, 1] (Yao et al. 2022, arXiv 2207.01206, section 3)."""

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowjax.envs.base import WorldError
from flowjax.envs.webshop.catalog import Product

# A color's first of these words stands for the whole of it.
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
_NO_LATIN_1 = dict.fromkeys(range(128, 256))  # what thefuzz drops before it compares

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
_WORD = re.compile(r"(?<![A-Za-z0-9])[A-Za-z](?:[A-Za-z0-9]|[.'](?=[A-Za-z]))*")
_PARTICIPLE = re.compile(r".{2,}[^e]ed")


@dataclass(frozen=True, slots=True)
class Goal:
    """What to buy: values of options, for the options of `option_names` or for any where there are none; dollars."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    option_names: tuple[str, ...]
    price_below: float
    data_seed: int


@functools.cache
def noun_finder() -> tuple[str, Callable[[str], tuple[str, ...]]]:
    """Its name and the function from a title to its nouns: spaCy's small English model where it is installed."""
    if importlib.util.find_spec("spacy") and importlib.util.find_spec(SPACY_MODEL):
        import spacy  # pyright: ignore[reportMissingImports]

        model = spacy.load(SPACY_MODEL)
        return SPACY_MODEL, lambda title: tuple(t.text.lower() for t in model(title) if t.pos_ in ("NOUN", "PROPN"))
    return "closed-class filter", _open_class_words


def _open_class_words(title: str) -> tuple[str, ...]:
    """Words that can be nouns: no function words, no numbers, no past participles."""
    words = [match[0].lower() for match in _WORD.finditer(title.replace("-", " "))]
    return tuple(word for word in words if word not in _CLOSED_CLASS and not _PARTICIPLE.fullmatch(word))


@functools.lru_cache(maxsize=1 << 16)
def nouns(title: str) -> tuple[str, ...]:
    """The nouns of a title, by what `noun_finder` has found."""
    return noun_finder()[1](title)


@functools.cache
def _ratio() -> Callable[[str, str], float]:
    try:
        from rapidfuzz.fuzz import token_set_ratio
    except ImportError as error:
        raise WorldError(
            'env.name is flowjax.envs.webshop, which needs rapidfuzz: pip install -e ".[webshop]"'
        ) from error
    return token_set_ratio


@functools.lru_cache(maxsize=1 << 16)
def similarity(first: str, second: str) -> int:
    """thefuzz's token_set_ratio, 0 to 100: lower case, letters and digits only, Latin-1 letters dropped, rounded."""
    return round(_ratio()(_processed(first), _processed(second)))


def _processed(text: str) -> str:
    from rapidfuzz.utils import default_process

    return default_process(text.translate(_NO_LATIN_1))


def check_requirements() -> None:
    """Nothing, where all that the score needs is installed.

    Raises:
        WorldError: rapidfuzz is not.
    """
    _ratio()


def normal_color(value: str) -> str:
    """The first known colour that a value names, or else the value."""
    return next((color for color in COLORS if color in value), value)


def type_score(bought: Product, wanted: Product) -> float:
    """1, 0.5, 0.1 or 0: how much the kinds of product agree, by query, category and nouns of the title."""
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
        any(similarity(own, attribute) > MATCH for own in bought.attributes)
        or any(attribute in text.lower() for text in texts)
        for attribute in wanted
    )


def option_fits(chosen: str, wanted: str) -> bool:
    """Whether a chosen value is as good as the wanted one."""
    return similarity(normal_color(chosen), normal_color(wanted)) > MATCH


def option_matches(chosen: Sequence[str], wanted: Sequence[str]) -> int:
    """Wanted values that some chosen value fits."""
    return sum(any(option_fits(own, value) for own in chosen) for value in wanted)


def score(goal: Goal, bought: Product, wanted: Product, chosen: Mapping[str, str]) -> float:
    """type * (attributes + options + price hits) / their number. The price of the product bought is that of the
    goal's data seed."""
    hits = attribute_matches(bought, goal.attributes) + option_matches(tuple(chosen.values()), goal.options)
    hits += bought.price(goal.data_seed) <= goal.price_below
    return hits / (len(goal.attributes) + len(goal.options) + 1) * type_score(bought, wanted)
