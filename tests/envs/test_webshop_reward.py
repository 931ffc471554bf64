"""Score and goals of the WebShop world."""

import dataclasses
import json
from pathlib import Path

import pytest

from data.webshop.build import main as build
from flowjax.envs import WorldError
from flowjax.envs.webshop import goals
from flowjax.envs.webshop.catalog import Product, _prices, load_catalog
from flowjax.envs.webshop.goals import Goal, score

SHAMPOO = Product(
    asin="B1",
    name="Acme Tea Shampoo",
    description="Made with natural ingredients",
    bullet_points=("This shampoo has essential oils and smells like lemons",),
    prices=(35.0,),
    category="beauty",
    query="hair care",
    product_category="a › b › c",
    options={"color": ("grey", "blue"), "size": ("xl", "s")},
    attributes=("tea tree", "essential oil"),
    instruction=None,
    instruction_attributes=(),
)
GOAL = Goal("B1", "", ("tea tree", "essential oils", "natural ingredients"), ("dark grey", "XL"), (), 40.0, 0)


def test_all_that_is_wanted_scores_one():
    assert score(GOAL, SHAMPOO, SHAMPOO, {"color": "dark teal", "size": "xl"}) == 1.0


@pytest.mark.parametrize(
    ("goal", "chosen", "hits"),
    [
        ({}, {}, 4),
        ({}, {"color": "blue", "size": "xl"}, 5),
        ({"price_below": 30.0}, {"color": "dark", "size": "xl"}, 5),
        ({"attributes": ("tea tree", "gluten free", "smells like lemons")}, {"size": "xl"}, 4),
        ({"attributes": ("caffeine", "sugar", "milk")}, {}, 1),
    ],
)
def test_hits_are_counted_one_by_one(goal: dict, chosen: dict, hits: int):
    assert score(dataclasses.replace(GOAL, **goal), SHAMPOO, SHAMPOO, chosen) == pytest.approx(hits / 6)


@pytest.mark.parametrize(
    ("name", "query", "category", "expected"),
    [
        ("Acme Tea Shampoo", "other", "x › y", 1.0),  # the title alone
        ("Something Shampoo", "other", "x › y", 1.0),
        ("Something Else", "hair care", "a › b", 0.0),  # no noun in common counts above all
        ("acme q w e r t", "hair care", "x", 1.0),
    ],
)
def test_kinds_of_product(name: str, query: str, category: str, expected: float):
    other = dataclasses.replace(SHAMPOO, name=name, query=query, product_category=category)
    assert goals.type_score(other, SHAMPOO) == expected


def test_few_common_nouns_cost_a_half_or_nine_tenths():
    long = dataclasses.replace(SHAMPOO, name="Shampoo one two three four five six".replace("one", "zinc"))
    other = dataclasses.replace(SHAMPOO, name="Shampoo", query="other", product_category="a › z")
    assert goals.type_score(other, long) == 0.5  # one of seven
    longer = dataclasses.replace(long, name="Shampoo b c d e f g h j k l m")
    assert goals.type_score(other, longer) == 0.1  # one of twelve
    categories = dataclasses.replace(other, product_category="c › a › a")
    assert goals.type_score(categories, long) == 1.0
    nameless = dataclasses.replace(SHAMPOO, name="42")
    assert goals.type_score(other, nameless) == 0.5  # no nouns count as a fifth, which is not above a fifth


def test_nouns_of_titles():
    """Shares that WebShop's own tests expect of spaCy, to a hundredth."""
    bought = (
        "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home Theater System"
    )
    wanted = "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"
    for name, other, share in [
        (
            "adidas Unisex-Adult D.o.n. Issue 2 Basketball Shoe",
            "adidas Unisex-Adult D.o.n. Issue 2 Indoor Court Shoe",
            0.85,
        ),
        (f"{wanted} Home Theater System Subwoofer", bought, 0.31),
        (wanted, bought, 0.17),
        ("Rusticware 921ORB Kitchen and Bath Cabinet Knob", "Minkissy 2pcs Stainless Steel Eyebrow Tweezers", 0.0),
    ]:
        asked = goals.nouns(name)
        assert len(set(asked) & set(goals.nouns(other))) / len(asked) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("first", "second", "ratio"),
    [
        # thefuzz 0.22's own answers
        ("cool powder snow", "powder snow", 100),
        ("essential oil", "essential oils", 96),
        ("crème brûlée", "creme brulee", 86),
        ("8 ounce", "16 ounce", 83),
        ("X-Large", "large", 100),
        ("", "", 0),
    ],
)
def test_similarity_is_thefuzzs(first: str, second: str, ratio: int):
    assert goals.similarity(first, second) == ratio


def test_colors_are_compared_by_their_first_known_word():
    assert len(goals.COLORS) == 102
    assert goals.normal_color("dark navy blue") == "blue"  # in the order of the list, not of the words
    assert goals.normal_color("12 pack") == "12 pack"


@pytest.mark.parametrize("kind", ["synthetic", "human"])
def test_a_price_limit_is_one_of_the_next_four_tens_but_the_first(kind: goals.GoalKind):
    catalog = load_catalog(None, 200, 0, True)
    found = goals.goals(catalog, kind, 5)
    assert len(found) > 80
    for goal in found:
        price = catalog.products[catalog.by_asin[goal.asin]].price(5)
        assert price < 10 * (price // 10 + 1) < goal.price_below <= 10 * (price // 10 + 4)
        assert goal.instruction.endswith(f", and price lower than {goal.price_below:.2f} dollars")
    assert goals.goals(catalog, kind, 5) == found
    assert [g.price_below for g in goals.goals(catalog, kind, 6)] != [g.price_below for g in found]


def test_synthetic_goals_are_all_combinations_of_options():
    catalog = load_catalog(None, 100, 0, False)
    found = goals.goals(catalog, "synthetic", 0)
    for product in catalog.products:
        combinations = 1
        for values in product.options.values():
            combinations *= len(values)
        own = [goal for goal in found if goal.asin == product.asin]
        assert len(own) == (combinations if product.instruction else 0)
        assert len({goal.options for goal in own}) == len(own)
        for goal in own:
            for name, value in zip(goal.option_names, goal.options, strict=True):
                assert value in product.options[name] and f"{name}: {value}" in goal.instruction


def test_prices_of_ranges_depend_on_seed_and_product_alone():
    product = dataclasses.replace(SHAMPOO, prices=(10.0, 20.0))
    drawn = {product.price(seed) for seed in range(50)}
    assert len(drawn) == 50 and 10 <= min(drawn) < 12 and 18 < max(drawn) <= 20
    assert product.price_tag == "$10.0 to $20.0"


def test_a_written_shop_is_the_generated_one(tmp_path: Path):
    build([f"--out={tmp_path}", "--seed=4", "--products=80"])
    build([f"--out={tmp_path / 'again'}", "--seed=4", "--products=80"])
    for name in ("items_shuffle", "items_ins_v2", "items_human_ins"):
        assert (tmp_path / f"{name}.json").read_bytes() == (tmp_path / "again" / f"{name}.json").read_bytes()
    read, made = load_catalog(str(tmp_path), 80, 0, True), load_catalog(None, 80, 4, True)
    assert read.products == made.products
    assert goals.goals(read, "human", 1) == goals.goals(made, "human", 1)
    assert len(load_catalog(str(tmp_path), 30, 0, True).products) == 30


@pytest.mark.parametrize(
    ("pricing", "prices"),
    [
        ("$5.00", (5.0,)),
        ("$1,299.00$1,500.00", (1299.0, 1500.0)),
        ("19.99", (19.99,)),
        (19.99, (19.99,)),
        ("USD 1,299", (1299.0,)),
        (None, (100.0,)),
        ("Free", (100.0,)),
    ],
)
def test_a_price_without_a_dollar_sign_is_a_price(pricing, prices: tuple):
    assert _prices(pricing) == prices
    with pytest.raises(ValueError, match="'10 - 20' has several numbers"):
        _prices("10 - 20")


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("items_shuffle", "name", None, "product .*: name of .* is None: give a text"),
        ("items_ins_v2", "instruction_attributes", "soft", "instruction_attributes is 'soft': give a list of texts"),
        ("items_human_ins", "instruction_options", {"color": "red"}, "instruction_options is .*: give a list of texts"),
        ("items_human_ins", "instruction", None, "items_human_ins.json, product .*, instruction 1: AttributeError"),
    ],
)
def test_a_field_of_another_kind_is_named(tmp_path: Path, name: str, field: str, value, said: str):
    build([f"--out={tmp_path}", "--seed=4", "--products=8"])
    file = tmp_path / f"{name}.json"
    rows = json.loads(file.read_text())
    of_one = rows[0] if isinstance(rows, list) else next(iter(rows.values()))
    (of_one[0] if isinstance(of_one, list) else of_one)[field] = value
    file.write_text(json.dumps(rows))
    with pytest.raises(WorldError, match=said):
        goals.goals(load_catalog(str(tmp_path), 8, 0, True), "human", 1)


def test_fields_that_are_null_are_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    build([f"--out={tmp_path}", "--seed=4", "--products=8"])
    rows = json.loads((tmp_path / "items_shuffle.json").read_text())
    rows[0] |= {"small_description": ["soft", None], "product_category": None}
    rows[1] |= {"small_description": None}
    rows[2] |= {"asin": "SKU-2026-0001"}
    (tmp_path / "items_shuffle.json").write_text(json.dumps(rows))
    catalog = load_catalog(str(tmp_path), 8, 1, False)
    assert (catalog.products[0].bullet_points, catalog.products[0].product_category) == (("soft",), "")
    assert catalog.products[1].bullet_points == ()
    assert len(catalog.products) == 7 and "1 of 8 products are left out: an asin has at most 10" in caplog.text


def test_what_is_missing_at_a_path_is_named(tmp_path: Path):
    with pytest.raises(WorldError, match=r"items_shuffle.json, items_ins_v2.json.*data.webshop.build"):
        load_catalog(str(tmp_path), 1000, 0, False)
    (tmp_path / "items_shuffle_1000.json").write_text("[]")
    (tmp_path / "items_ins_v2_1000.json").write_text("{}")
    with pytest.raises(WorldError, match=r"lacks items_human_ins.json"):
        load_catalog(str(tmp_path), 1000, 0, True)
    (tmp_path / "items_shuffle_1000.json").write_text('[{"asin": "B1"}]')
    with pytest.raises(WorldError, match="not in WebShop's format"):
        load_catalog(str(tmp_path), 999, 0, False)
    (tmp_path / "items_shuffle_1000.json").write_text("[")
    with pytest.raises(WorldError, match="cannot be read"):
        load_catalog(str(tmp_path), 998, 0, False)


def test_fields_of_the_real_files_are_read_as_published(tmp_path: Path):
    item = {
        "asin": "B0REAL",
        "name": "Real Thing",
        "full_description": "Text",
        "small_description": "one point",
        "pricing": "$1,200.50 - $1,300.00",
        "product_category": "A › B",
        "category": "c",
        "query": " Query ",
        "images": ["x"],
        "customization_options": {"Size": [{"value": " 1/2 Inch ", "image": None}], "Color": None},
    }
    items = [
        item,
        item,
        {**item, "asin": "TOOLONGASIN"},
        {**item, "asin": "nan"},
        {**item, "asin": "B2", "pricing": ""},
    ]
    (tmp_path / "items_shuffle.json").write_text(json.dumps(items))
    (tmp_path / "items_ins_v2.json").write_text("{}")
    first, second = load_catalog(str(tmp_path), 1_000_000, 0, False).products
    assert (first.prices, first.price_tag) == ((1200.5, 1300.0), "$1200.5 to $1300.0")
    assert first.options == {"size": ("1 | 2 inch",)} and first.query == "query"
    assert first.bullet_points == ("one point",) and first.attributes == ("DUMMY_ATTR",)
    assert (second.prices, second.price_tag) == ((100.0,), "$100.0")
