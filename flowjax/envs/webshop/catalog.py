"""Products and instructions, read from WebShop's own three files or generated in their format."""

import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from flowjax.envs import NotReady, WorldError
from flowjax.envs.webshop.search import LuceneIndex

ITEMS, ATTRIBUTES, HUMAN = "items_shuffle", "items_ins_v2", "items_human_ins"
SMALL = 1000  # products of the files whose names end in _1000
HITS = 50
HOW_TO_GET = (
    "the files come with WebShop (github.com/princeton-nlp/WebShop: `bash setup.sh -d small` or `-d all` fetches them "
    "into its data folder); data of the same format is made by `python -m data.webshop.build --out=FOLDER`"
)

BRANDS = (
    *("Alder", "Briarley", "Cobalt", "Dunmore", "Elmfield", "Fenwick"),
    *("Garland", "Hollis", "Ivers", "Juniper", "Kestrel", "Larkin"),
)
COLORS = ["black", "white", "red", "blue", "green", "grey", "navy", "pink"]
SIZES = ["small", "medium", "large", "x-large"]
# (category, query, product category, types, attributes, options other than color and size)
DEPARTMENTS: tuple[tuple[str, str, str, list[str], list[str], dict[str, list[str]]], ...] = (
    (
        "fashion",
        "women's shoes",
        "Clothing, Shoes & Jewelry › Women › Shoes",
        ["hiking boots", "running shoes", "ankle boots", "beach sandals"],
        ["waterproof", "rubber sole", "memory foam", "arch support", "non slip", "lace up"],
        {"color": COLORS, "size": ["6", "7", "8", "9"]},
    ),
    (
        "fashion",
        "men's shirts",
        "Clothing, Shoes & Jewelry › Men › Shirts",
        ["polo shirt", "flannel shirt", "henley top", "hooded jacket"],
        ["machine wash", "slim fit", "long sleeve", "quick drying", "moisture wicking", "button closure"],
        {"color": COLORS, "size": SIZES},
    ),
    (
        "garden",
        "living room furniture",
        "Home & Kitchen › Furniture › Living Room Furniture",
        ["coffee table", "floor lamp", "accent chair", "storage ottoman"],
        ["easy assemble", "solid wood", "space saving", "heavy duty", "metal legs", "easy clean"],
        {"color": COLORS},
    ),
    (
        "electronics",
        "headphones",
        "Electronics › Headphones › Earbud Headphones",
        ["wireless earbuds", "gaming headset", "portable speaker", "phone charger"],
        ["noise cancelling", "fast charging", "long lasting", "hands free", "high definition", "water resistant"],
        {"color": COLORS},
    ),
    (
        "beauty",
        "hair care",
        "Beauty & Personal Care › Hair Care › Shampoo & Conditioner",
        ["argan shampoo", "hair mask", "body lotion", "lip balm"],
        ["sulfate free", "cruelty free", "tea tree", "natural ingredients", "paraben free", "dry hair"],
        {"scent": ["rose", "citrus", "coconut", "mint"], "size": ["4 ounce", "8 ounce", "16 ounce"]},
    ),
    (
        "grocery",
        "snacks",
        "Grocery & Gourmet Food › Snack Foods › Bars & Nuts",
        ["granola bars", "trail mix", "kettle chips", "fruit leather"],
        ["gluten free", "low sugar", "non gmo", "high protein", "dairy free", "individually wrapped"],
        {"flavor": ["honey", "chocolate", "vanilla", "berry"], "size": ["pack of 6", "pack of 12"]},
    ),
)
INSTRUCTIONS = ("i am looking for {}", "i need {}", "find me {}", "i want to buy {}")


@dataclass(frozen=True, slots=True)
class Product:
    """One product, with the fields that pages and reward use. `prices` is one price or a range, in dollars."""

    asin: str
    name: str
    description: str
    bullet_points: tuple[str, ...]
    prices: tuple[float, ...]
    category: str
    query: str
    product_category: str
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    instruction: str | None
    instruction_attributes: tuple[str, ...]

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def everything(self) -> str:
        """The product's text in the search index."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        first_point = self.bullet_points[0] if self.bullet_points else ""
        return f"{self.name} {self.description} {first_point} {options}".lower()

    def option_of(self, value: str) -> str | None:
        """The option that a click on a value sets: of two with the same value the last, as in the published shop."""
        return next((name for name, values in reversed(list(self.options.items())) if value in values), None)

    def price(self, data_seed: int) -> float:
        """The product's price; of a range, the number between its ends that a hash of ASIN and data seed gives."""
        if len(self.prices) == 1:
            return self.prices[0]
        digest = blake2b(f"{data_seed} {self.asin}".encode(), digest_size=8).digest()
        low, high = self.prices
        return low + (high - low) * int.from_bytes(digest, "little") / 2**64


class Catalog:
    """All products, the human instructions by ASIN, and the search over the products."""

    def __init__(self, products: Sequence[Product], human: Mapping[str, Sequence[Mapping[str, Any]]]):
        self.products = tuple(products)
        self.human = human
        self.by_asin = {product.asin: number for number, product in enumerate(self.products)}
        self._by_link = {product.asin.lower(): number for number, product in enumerate(self.products)}
        self._index = LuceneIndex([p.everything for p in self.products], [p.asin for p in self.products])
        self.search = lru_cache(maxsize=1 << 14)(self._search)

    def linked(self, link: str) -> int | None:
        """Position of the product with this link, its ASIN in lower case; None for no product."""
        return self._by_link.get(link)

    def _search(self, query_key: str) -> tuple[int, ...]:
        return tuple(self._index.rank(query_key.split(), HITS))


@lru_cache(maxsize=8)
def load_catalog(path: str | None, products: int, seed: int, human: bool) -> Catalog:
    """The first `products` products at `path`, or as many generated from `seed`.

    Raises:
        WorldError: a file is missing or not of the format; the message says how to get it.
    """
    files = generate(products, seed) if path is None else _read(Path(path), products, human)
    try:
        return Catalog(_products(files[ITEMS], files[ATTRIBUTES], products), files.get(HUMAN, {}))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        source = f"env.options path={path!r}"
        raise WorldError(f"{source}: the files are not in WebShop's format ({error!r}); {HOW_TO_GET}") from error


def _read(folder: Path, products: int, human: bool) -> dict[str, Any]:
    names = [ITEMS, ATTRIBUTES, *([HUMAN] if human else [])]
    found = {name: _file(folder, name, products) for name in names}
    missing = [f"{name}.json" for name, file in found.items() if file is None]
    if missing:
        raise NotReady(f"env.options path={str(folder)!r} lacks {', '.join(missing)}: {HOW_TO_GET}")
    read: dict[str, Any] = {}
    for name, file in found.items():
        try:
            read[name] = json.loads(file.read_text(encoding="utf-8")) if file else None
        except (OSError, ValueError) as error:
            raise WorldError(f"{file} cannot be read ({error}): {HOW_TO_GET}") from error
    return read


def _file(folder: Path, name: str, products: int) -> Path | None:
    small, full = folder / f"{name}_{SMALL}.json", folder / f"{name}.json"
    order = (small, full) if products <= SMALL else (full,)
    return next((file for file in order if file.is_file()), None)


def _products(items: Sequence[Mapping[str, Any]], attributes: Mapping[str, Any], limit: int) -> list[Product]:
    found: dict[str, Product] = {}
    long: list[str] = []
    for item in items[:limit]:
        asin = item["asin"]
        if len(asin) > 10:  # as WebShop does
            long.append(asin)
        elif asin != "nan" and asin not in found:
            try:
                found[asin] = _product(item, attributes.get(asin, {}))
            except (TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"product {asin}: {error}") from error
    if long:
        said = "%d of %d products are left out: an asin has at most 10 characters, and there is %s"
        logging.warning(said, len(long), len(items[:limit]), long[0])
    return list(found.values())


def _product(item: Mapping[str, Any], instructions: Mapping[str, Any]) -> Product:
    """The product of an item.

    Raises:
        ValueError, TypeError, KeyError: a field is missing or is none of the format.
    """
    points = item["small_description"]
    return Product(
        asin=item["asin"],
        name=_text(item, "name"),
        description=item["full_description"] or "",
        bullet_points=tuple(point for point in (points if isinstance(points, list) else [points]) if point is not None),
        prices=_prices(item.get("pricing")),
        category=item["category"],
        query=item["query"].lower().strip(),
        product_category=item["product_category"] or "",
        options=_options(item["customization_options"]),
        attributes=as_texts(instructions, "attributes", ["DUMMY_ATTR"]),
        instruction=instructions.get("instruction"),
        instruction_attributes=as_texts(instructions, "instruction_attributes"),
    )


def _text(item: Mapping[str, Any], field: str) -> str:
    if not isinstance(item[field], str):
        raise TypeError(f"{field} of {item['asin']} is {item[field]!r}: give a text")
    return item[field]


def as_texts(row: Mapping[str, Any], field: str, default: Sequence[str] = ()) -> tuple[str, ...]:
    """A list of texts; one that is missing or null is the default."""
    given = default if row.get(field) is None else row[field]
    if isinstance(given, str | Mapping) or not all(isinstance(each, str) for each in given):
        raise TypeError(f"{field} is {given!r}: give a list of texts")
    return tuple(given)


def _prices(pricing: str | float | None) -> tuple[float, ...]:
    """One or two prices; 100 dollars where none is given, as in WebShop. A number without a dollar sign is one, too.

    Raises:
        ValueError: there are several numbers and no dollar sign.
    """
    if not pricing:
        return (100.0,)
    if isinstance(pricing, int | float) or "$" not in pricing:
        numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", str(pricing))
        if len(numbers) > 1:
            raise ValueError(f"pricing {pricing!r} has several numbers: put a $ before each price")
        return tuple(float(number.replace(",", "")) for number in numbers) or (100.0,)
    return tuple(float(re.sub(r"[^\d.]", "", part)) for part in pricing.split("$")[1:3]) or (100.0,)


def _options(custom: Mapping[str, Any] | str) -> dict[str, tuple[str, ...]]:
    if not isinstance(custom, Mapping):
        return {}
    options = {
        name.lower(): [content["value"].strip().replace("/", " | ").lower() for content in contents]
        for name, contents in custom.items()
        if contents is not None
    }
    # An empty value is on no page and fits no goal; an option with empty values only is left out.
    return {name: tuple(filter(None, values)) for name, values in options.items() if not values or any(values)}


def generate(products: int, seed: int) -> dict[str, Any]:
    """Generated contents of items_shuffle, items_ins_v2 and items_human_ins, as `json.load` would return them."""
    rng = random.Random(f"webshop {seed}")
    items: list[dict[str, Any]] = []
    instructions: dict[str, dict[str, Any]] = {}
    human: dict[str, list[dict[str, Any]]] = {}
    for number in range(products):
        item, attributes, kind = _item(rng, number)
        items.append(item)
        asin = item["asin"]
        wanted = sorted(rng.sample(attributes, rng.choice((1, 2))))
        sentence = _sentence(rng, wanted, kind)
        instructions[asin] = {"attributes": attributes, "instruction": sentence, "instruction_attributes": wanted}
        if rng.random() < 0.2:  # some products have no instruction; in the real files most have none
            instructions[asin] = {"attributes": attributes, "instruction": None, "instruction_attributes": []}
        if rng.random() < 0.5:
            human[asin] = [_human(rng, item, attributes, kind, worker) for worker in range(rng.choice((1, 2)))]
    return {"items_shuffle": items, "items_ins_v2": instructions, "items_human_ins": human}


def _item(rng: random.Random, number: int) -> tuple[dict[str, Any], list[str], str]:
    category, query, path, kinds, pool, choices = rng.choice(DEPARTMENTS)
    kind, brand = rng.choice(kinds), rng.choice(BRANDS)
    attributes = rng.sample(pool, 3)
    shown = " ".join(word.capitalize() for word in f"{attributes[0]} {kind}".split())
    options = {name: _some(rng, values) for name, values in choices.items()}
    low = rng.randrange(500, 9000) / 100
    pricing = f"${low:.2f}" if rng.random() < 0.7 else f"${low:.2f} - ${low + rng.randrange(100, 2000) / 100:.2f}"
    asin = f"B{number:09d}"
    item = {
        "asin": asin,
        "name": f"{brand} {shown}",
        "full_description": f"The {brand} {kind} for every day. It is {attributes[0]} and {attributes[1]}.",
        "small_description": [f"{a.capitalize()}, as one expects of {brand}." for a in attributes],
        "pricing": "" if rng.random() < 0.02 else pricing,
        "product_category": path,
        "category": category,
        "query": query,
        "images": [f"https://example.invalid/{asin}.jpg"],
        "customization_options": {
            name.capitalize(): [{"value": value, "image": None, "is_selected": False} for value in values]
            for name, values in options.items()
        }
        if rng.random() < 0.9
        else "",
        "brand": brand,
        "average_rating": rng.randrange(30, 51) / 10,
        "total_reviews": rng.randrange(2000),
    }
    return item, attributes, kind


def _some(rng: random.Random, values: Sequence[str]) -> list[str]:
    return rng.sample(values, rng.choice((2, 3) if len(values) > 2 else (2,)))


def _sentence(rng: random.Random, wanted: Sequence[str], kind: str) -> str:
    return rng.choice(INSTRUCTIONS).format(f"{', '.join(wanted)} {kind}")


def _human(rng: random.Random, item: dict[str, Any], attributes: list[str], kind: str, worker: int) -> dict[str, Any]:
    wanted = rng.sample(attributes, rng.choice((1, 2)))
    custom = item["customization_options"] or {}
    chosen = {name.lower(): rng.choice(contents)["value"] for name, contents in custom.items()}
    words = "".join(f", {value} {name}" for name, value in chosen.items())
    return {
        "instruction": f"{_sentence(rng, wanted, kind)}{words}.",
        "instruction_attributes": wanted,
        "instruction_options": list(chosen.values()),
        "attributes": attributes,
        "options": [f"{name}: {value}" for name, value in chosen.items()],
        "asin": item["asin"],
        "assignment_id": f"A{item['asin']}{worker}",
        "worker_id": f"W{worker}",
    }
