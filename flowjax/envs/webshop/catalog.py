"""Products and instructions, read from WebShop's own three files or generated in their format."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from flowjax.envs.base import NotReady, WorldError
from flowjax.envs.webshop.bm25 import Index
from flowjax.envs.webshop.generate import generate

ITEMS, ATTRIBUTES, HUMAN = "items_shuffle", "items_ins_v2", "items_human_ins"
SMALL = 1000  # products of the files whose names end in _1000
HITS = 50
HOW_TO_GET = (
    "the files come with WebShop (github.com/princeton-nlp/WebShop: `bash setup.sh -d small` or `-d all` fetches them "
    "into its data folder); data of the same format is made by `python -m data.webshop.build --out=FOLDER`"
)


@dataclass(frozen=True, slots=True)
class Product:
    """One product as pages and reward see it. `prices` is one price or a range, in dollars."""

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
        """What the search index holds of it."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        first_point = self.bullet_points[0] if self.bullet_points else ""
        return f"{self.name} {self.description} {first_point} {options}".lower()

    def price(self, data_seed: int) -> float:
        """Its price; in a range, a number drawn for this product and seed alone."""
        if len(self.prices) == 1:
            return self.prices[0]
        digest = blake2b(f"{data_seed} {self.asin}".encode(), digest_size=8).digest()
        low, high = self.prices
        return low + (high - low) * int.from_bytes(digest, "little") / 2**64


class Catalog:
    """All products, the people's instructions by ASIN, and the search over them."""

    def __init__(self, products: Sequence[Product], human: Mapping[str, Sequence[Mapping[str, Any]]]):
        self.products = tuple(products)
        self.human = human
        self.by_asin = {product.asin: number for number, product in enumerate(self.products)}
        self._by_link = {product.asin.lower(): number for number, product in enumerate(self.products)}
        self._index = Index([p.everything for p in self.products], [p.asin for p in self.products])
        self.search = lru_cache(maxsize=1 << 14)(self._search)

    def linked(self, link: str) -> int | None:
        """The product behind the text of a link."""
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
    for item in items[:limit]:
        asin = item["asin"]
        if asin != "nan" and len(asin) <= 10 and asin not in found:
            found[asin] = _product(item, attributes.get(asin, {}))
    return list(found.values())


def _product(item: Mapping[str, Any], told: Mapping[str, Any]) -> Product:
    points = item["small_description"]
    return Product(
        asin=item["asin"],
        name=item["name"],
        description=item["full_description"] or "",
        bullet_points=tuple(points) if isinstance(points, list) else (points,),
        prices=_prices(item.get("pricing")),
        category=item["category"],
        query=item["query"].lower().strip(),
        product_category=item["product_category"],
        options=_options(item["customization_options"]),
        attributes=tuple(told.get("attributes", ["DUMMY_ATTR"])),
        instruction=told.get("instruction"),
        instruction_attributes=tuple(told.get("instruction_attributes") or ()),
    )


def _prices(pricing: str | None) -> tuple[float, ...]:
    if not pricing:
        return (100.0,)
    return tuple(float(re.sub(r"[^\d.]", "", part)) for part in pricing.split("$")[1:3]) or (100.0,)


def _options(custom: Mapping[str, Any] | str) -> dict[str, tuple[str, ...]]:
    if not isinstance(custom, Mapping):
        return {}
    return {
        name.lower(): tuple(content["value"].strip().replace("/", " | ").lower() for content in contents)
        for name, contents in custom.items()
        if contents is not None
    }
