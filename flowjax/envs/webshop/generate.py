"""A shop of made-up products, in the format of WebShop's three files. The same seed makes the same shop."""

import random
from collections.abc import Sequence
from typing import Any

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


def generate(products: int, seed: int) -> dict[str, Any]:
    """items_shuffle, items_ins_v2 and items_human_ins as json.load would give them."""
    rng = random.Random(f"webshop {seed}")
    items: list[dict[str, Any]] = []
    told: dict[str, dict[str, Any]] = {}
    human: dict[str, list[dict[str, Any]]] = {}
    for number in range(products):
        item, attributes, kind = _item(rng, number)
        items.append(item)
        asin = item["asin"]
        wanted = sorted(rng.sample(attributes, rng.choice((1, 2))))
        sentence = _sentence(rng, wanted, kind)
        told[asin] = {"attributes": attributes, "instruction": sentence, "instruction_attributes": wanted}
        if rng.random() < 0.2:  # as in the real files, most products have no instruction
            told[asin] = {"attributes": attributes, "instruction": None, "instruction_attributes": []}
        if rng.random() < 0.5:
            human[asin] = [_human(rng, item, attributes, kind, worker) for worker in range(rng.choice((1, 2)))]
    return {"items_shuffle": items, "items_ins_v2": told, "items_human_ins": human}


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
