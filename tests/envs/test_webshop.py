"""The WebShop world: pages, actions, state keys, splits, expert."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from two_processes import printed_in_two_processes

from flowjax.envs import NotReady, Observation, Split, WorldError
from flowjax.envs.webshop import WebShop, goals
from flowjax.envs.webshop.catalog import ATTRIBUTES, ITEMS, generate
from flowjax.envs.webshop.goals import goal_words, split_goals
from flowjax.envs.webshop.pages import SEARCH_TEMPLATE
from flowjax.envs.webshop.world import WebShopEnv
from flowjax.envs.worker import Frames, frame, pack_task
from flowjax.records import Task

SMALL: dict[str, Any] = {"products": 120}


def start(index: int = 0, **options) -> tuple[WebShopEnv, Observation]:
    options = {**SMALL, **options}
    env = WebShop(**options).env()
    return env, env.reset(task(index, **options), 0)


def page_text(observation: Observation) -> str:
    """The page in the published text mode."""
    view = observation.view
    bar = ["WebShop"] if view.page == "search" else []
    asked = ["Instruction:", view.instruction] if view.page != "done" else []
    return " [SEP] ".join([*bar, *asked, *view.texts])


def task(index: int, split: Split = "train", **options) -> Task:
    found = WebShop(**options).tasks(split, 0)[index]
    assert isinstance(found, Task)
    return found


def go(env: WebShopEnv, *actions: str) -> Observation:
    for action in actions[:-1]:
        assert env.step(action).valid
    step = env.step(actions[-1])
    assert step.valid
    return step.observation


def with_two_options() -> tuple[WebShopEnv, list[tuple[str, list[str]]]]:
    """On the page of a product with two options of several values: the environment, and the options."""
    for index in range(200):
        env, _ = start(index)
        while env.state.page != "item":
            env.step(WebShop().expert(env))
        options = [(name, list(values)) for name, values in env.catalog.products[env.state.product].options.items()]
        if len(options) == 2:
            return env, options
    raise AssertionError("no such product")


def test_the_pages_say_what_the_published_ones_say():
    env, observation = start()
    goal = env.goal
    assert page_text(observation) == f"WebShop [SEP] Instruction: [SEP] {goal.instruction} [SEP] Search"
    assert observation.legal_actions == (SEARCH_TEMPLATE,)
    head = f"Instruction: [SEP] {goal.instruction} [SEP] Back to Search [SEP] "

    page = go(env, f"search[{env.catalog.products[0].name}]")
    hits = [env.catalog.products[i] for i in env.catalog.search(env.state.query)]
    shown = " [SEP] ".join(f"{p.asin} [SEP] {p.name} [SEP] {p.price_tag}" for p in hits[:10])
    assert page_text(page) == f"{head}Page 1 (Total results: {len(hits)}) [SEP] Next > [SEP] {shown}"
    links = [f"click[{p.asin.lower()}]" for p in hits[:10]]
    assert page.legal_actions == (SEARCH_TEMPLATE, "click[back to search]", "click[next >]", *links)

    second = go(env, "click[next >]")
    assert page_text(second).startswith(f"{head}Page 2 (Total results: {len(hits)}) [SEP] < Prev [SEP] Next > [SEP] ")
    assert second.legal_actions[1:4] == ("click[back to search]", "click[< prev]", "click[next >]")
    empty = go(env, *["click[next >]"] * 9)
    assert page_text(empty) == f"{head}Page 11 (Total results: {len(hits)}) [SEP] < Prev [SEP] Next >"

    item = go(env, *["click[< prev]"] * 10, links[0])
    product = hits[0]
    options = "".join(f"{name} [SEP] {' [SEP] '.join(values)} [SEP] " for name, values in product.options.items())
    assert page_text(item) == (
        f"{head}< Prev [SEP] {options}{product.name} [SEP] Price: {product.price_tag} [SEP] Rating: N.A. [SEP] "
        "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    values = tuple(f"click[{value}]" for values in product.options.values() for value in values)
    buttons = ("back to search", "< prev", "description", "features", "reviews", "buy now")
    assert item.legal_actions == (SEARCH_TEMPLATE, *(f"click[{b}]" for b in buttons), *values)

    for sub_page, said in [
        ("description", product.description),
        ("features", " [SEP] ".join(product.bullet_points)),
        ("reviews", "No reviews found"),
    ]:
        page = go(env, f"click[{sub_page}]")
        assert page_text(page) == f"{head}< Prev [SEP] {said}"
        assert page.legal_actions == (SEARCH_TEMPLATE, "click[back to search]", "click[< prev]")
        assert go(env, "click[< prev]") == item

    step = env.step("click[buy now]")
    assert step.terminal and step.observation.legal_actions == ()
    assert page_text(step.observation).startswith("Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP]")
    ending = f"Your score (min 0.0, max 1.0) [SEP] {step.outcome['score']} [SEP] Reward Details [SEP] None"
    assert page_text(step.observation).endswith(ending)


def test_a_shop_does_not_open_without_what_its_score_needs(monkeypatch: pytest.MonkeyPatch):
    """Found out at the first purchase, it would be the episode's fault."""

    def missing() -> None:
        raise NotReady("the WebShop world needs rapidfuzz")

    monkeypatch.setattr(goals, "_ratio", missing)
    with pytest.raises(NotReady, match="rapidfuzz"):
        WebShop().env()


def test_attributes_are_a_sub_page_on_request():
    env, _ = start(show_attributes=True)
    while env.state.page != "item":
        env.step(WebShop().expert(env))
    product = env.catalog.products[env.state.product]
    page = go(env, "click[attributes]")
    assert page_text(page).endswith(
        " [SEP] ".join((*product.attributes, product.category, product.query, product.product_category))
    )
    plain, _ = start()
    while plain.state.page != "item":
        plain.step(WebShop().expert(plain))
    assert not plain.step("click[attributes]").valid


def test_search_works_on_every_page_and_in_any_case():
    env, _ = start()
    for _ in range(2):
        for action in ("search[Rose SHAMPOO]", WebShop().expert(env), "search[zzz]"):
            assert env.step(action).valid
    assert "(Total results: 0)" in page_text(env.step("search[  ]").observation)
    assert env.step("click[Back To Search]").valid


@pytest.mark.parametrize(
    "action",
    ["", "buy", "click[search]", "click[]", "search[]", "click[nothing]", "Search[a]", "search", "x search[a]"],
)
def test_what_is_not_possible_is_marked_and_changes_nothing(action: str):
    env, _ = start()
    for prepared in (None, "search[boots]"):
        before = go(env, prepared) if prepared else env.reset(task(0, **SMALL), 0)
        step = env.step(action)
        assert (step.valid, step.reward, step.terminal, step.observation) == (False, 0.0, False, before)


def test_after_the_end_nothing_changes():
    env, _ = start()
    step = env.step(WebShop().expert(env))
    while not step.terminal:
        step = env.step(WebShop().expert(env))
    assert (step.reward, step.outcome) == (10.0, {"success": 1.0, "score": 1.0})
    for action in ("click[buy now]", "search[boots]", "click[back to search]", WebShop().expert(env)):
        after = env.step(action)
        assert (after.observation, after.reward, after.terminal, after.valid) == (step.observation, 0.0, True, False)
        assert after.outcome["success"] == 1.0


def test_a_part_of_what_is_wanted_earns_a_score_but_no_reward():
    env, options = with_two_options()
    step = env.step("click[buy now]")
    wanted = len(env.goal.attributes) + len(options) + 1
    assert step.terminal and step.reward == 0.0
    assert step.outcome == {"success": 0.0, "score": pytest.approx(1 - 2 / wanted)}


def test_chosen_options_are_in_the_key_whatever_their_order():
    env, [(_, first), (_, second)] = with_two_options()
    bare = go(env, f"click[{first[0]}]")
    page, keys = env.state, {}
    for a in first[:2]:
        for b in second[:2]:
            one = go(env, f"click[{a}]", f"click[{b}]")
            other = go(env, f"click[{b}]", f"click[{a}]")
            around = go(env, "click[description]", "click[< prev]")
            assert one == other == around
            assert page_text(one) == page_text(bare)  # what is chosen is not seen
            keys[a, b] = one.state_key
    assert len({*keys.values(), bare.state_key}) == 5
    results = go(env, "click[< prev]")
    fresh = go(env, f"click[{env.catalog.products[page.product].asin.lower()}]")
    assert fresh.state_key not in keys.values()  # going back to the results forgets the options
    assert go(env, "click[< prev]") == results


def test_the_key_tells_goals_queries_and_pages_apart():
    env, observation = start()
    keys = [observation.state_key, start(1)[1].state_key]
    for action in ("search[hiking boots]", "click[next >]", "search[boots]", "search[rose lotion]"):
        keys.append(go(env, action).state_key)
    assert len(set(keys)) == len(keys)
    same = [go(env, action).state_key for action in ("search[hiking boots]", "search[the boots, HIKING]")]
    assert same[0] == same[1] == keys[2]
    assert go(env, "click[back to search]").state_key == keys[0]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_keys_are_equal_exactly_where_states_are(data: st.DataObject):
    """Random walks: the visible text and what was chosen decide the key; equal keys behave equally."""
    env, observation = start(data.draw(st.integers(0, 3)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    seen: dict[int, tuple] = {}
    for _ in range(30):
        state = env.state
        seen_and_chosen = (env.goal, page_text(observation), observation.legal_actions, state.options)
        snapshot = (*seen_and_chosen, state.query, state.number, state.product, state.sub_page)
        assert seen.setdefault(observation.state_key, snapshot) == snapshot
        action = WebShop().random_action(observation, rng)
        if action == "click[buy now]":
            continue
        step = env.step(action)
        assert step.valid
        observation = step.observation
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("options", [{}, {"goals": "human"}, {"products": 60, "seed": 3}])
def test_the_expert_buys_what_is_wanted(options: dict):
    env = WebShop(**options).env()
    source = WebShop(**options).tasks("train", 1)
    turns = []
    for index in range(100):
        env.reset(task_of(source, index), 0)
        for turn in range(1, 41):
            step = env.step(WebShop().expert(env))
            assert page_text(step.observation)
            assert step.valid
            if step.terminal:
                assert (step.reward, step.outcome["score"]) == (10.0, 1.0)
                turns.append(turn)
                break
        else:
            pytest.fail("nothing is bought within 40 turns")
    assert np.mean(np.array(turns) <= 15) >= 0.9


def shop_with(folder: Path, **options: list[str]) -> dict[str, Any]:
    """The options of a shop whose products all have these options."""
    files = generate(5, 0)
    for item in files[ITEMS]:
        item["customization_options"] = {
            name: [{"value": value} for value in values] for name, values in options.items()
        }
    for name in (ITEMS, ATTRIBUTES):
        (folder / f"{name}.json").write_text(json.dumps(files[name]))
    return {"path": str(folder), "products": 5}


def test_every_listed_action_can_be_taken(tmp_path: Path):
    """Values with marks of actions in them, too; one without text is not listed and not asked for."""
    at = shop_with(tmp_path, Size=["6 [wide]", "", "[7]", "a\nb", "Search"], Style=[""])
    env, source = WebShop(**at).env(), WebShop(**at).tasks("train", 0)
    values = ("6 [wide]", "[7]", "a\nb", "search")
    for index in range(len(source)):
        page = env.reset(task_of(source, index), 0)
        assert env.goal.options[0] in values and env.goal.option_names == ("size",)
        while env.state.page != "item":
            page = go(env, WebShop(**at).expert(env))
        assert page.legal_actions[-4:] == tuple(f"click[{value}]" for value in values)
        for value, action in zip(values, page.legal_actions[-4:], strict=True):
            assert env.step(action).valid and env.state.options == (("size", value),)
            world = WebShop(**at)
            assert world.parse_action(world.reply(action, "instruct"), page.legal_actions) == action
            if "\n" not in value:
                assert world.parse_action(world.reply(action, "compact"), page.legal_actions) == action


@pytest.mark.parametrize("sizes", [["7"], ["7", "8"]])
def test_the_expert_ends_where_options_share_a_value(sizes: list[str], tmp_path: Path):
    """A click sets the last of them, so that the first cannot be had; what can be is bought."""
    at = shop_with(tmp_path, Color=["7", "red"], Size=sizes)
    env, source = WebShop(**at).env(), WebShop(**at).tasks("train", 0)
    scores: dict[tuple[str, ...], set[bool]] = {}
    for index in range(len(source)):
        env.reset(task_of(source, index), 0)
        last = [env.step(WebShop(**at).expert(env)) for _ in range(20)][-1]
        assert last.terminal
        scores.setdefault(env.goal.options, set()).add(last.outcome["score"] == 1.0)
    assert len(scores) == 2 * len(sizes)
    assert all(won == {wanted != ("7", "8")} for wanted, won in scores.items())


def test_the_expert_looks_at_what_the_results_name_first_and_at_nothing_twice():
    others, left = 0, 0
    for index in range(100):
        env, _ = start(index)
        looked: list[int] = []
        before = env.state
        while env.state.page != "done":
            before = env.state
            env.step(WebShop().expert(env))
            if before.page == "results" and env.state.page == "item":
                looked.append(env.state.product)
        assert len(set(looked)) == len(looked)
        hits = env.catalog.search(before.query)
        ranks = [hits.index(product) for product in looked]
        assert ranks == sorted(ranks)
        others += env.catalog.products[before.product].asin != env.goal.asin
        left += len(looked) > 1
    assert others >= 5
    assert left >= 10


def test_a_hasty_expert_buys_what_it_opens_first():
    def turns_at_items(share: float, index: int) -> list[str]:
        world = WebShop(hasty_share=share)
        env = world.env()
        env.reset(task_of(world.tasks("train", 0), index), 0)
        said = []
        while env.state.page != "done":
            page, action = env.state.page, world.expert(env)
            said += [action] if page == "item" else []
            env.step(action)
        return said

    assert all(turns_at_items(1.0, index) == ["click[buy now]"] for index in range(20))
    hasty = sum(turns_at_items(0.5, index) == ["click[buy now]"] for index in range(100))
    nothing_to_choose = sum(turns_at_items(0.0, index) == ["click[buy now]"] for index in range(100))
    assert nothing_to_choose + 20 < hasty < 80


def task_of(source, index: int) -> Task:
    found = source[index]
    assert isinstance(found, Task)
    return found


def test_the_expert_finds_its_way_from_anywhere():
    rng = np.random.default_rng(0)
    for index in range(40):
        env, observation = start(index)
        for _ in range(6):
            action = WebShop().random_action(observation, rng)
            if action != "click[buy now]":
                observation = env.step(action).observation
        for _ in range(40):
            step = env.step(WebShop().expert(env))
            if step.terminal:
                assert step.outcome["score"] == 1.0
                break
        else:
            pytest.fail("nothing is bought within 40 turns")


def test_an_expert_at_a_product_that_does_not_fit_goes_back_to_its_results():
    strayed = 0
    for index in range(60):
        env, observation = start(index)
        while env.state.page != "results":
            observation = go(env, WebShop().expert(env))
        opened = [f"click[{product.asin.lower()}]" for product in env.catalog.products]
        other = [each for each in observation.legal_actions if each in opened][-1]
        go(env, other)
        if WebShop().expert(env) == "click[< prev]":
            strayed += 1
            go(env, "click[< prev]")
            assert WebShop().expert(env) in set(observation.legal_actions) - {other}, "a new search would cost a turn"
    assert strayed >= 30


@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_what_is_held_out_of_one_shop_is_said_in_no_training_goal_of_another(goals: str):
    """Nor with other filler words, in another order, at another price."""
    seen: dict[Split, set[frozenset[str]]] = {"train": set(), "held_out": set()}
    for products, data_seed in itertools.product((60, 200, 300), range(4)):
        sizes = {}
        for split, contents in seen.items():
            source = WebShop(products=products, goals=goals).tasks(split, data_seed)
            goal_of = [task_of(source, index).payload["goal"]["instruction"] for index in range(len(source))]
            contents |= {frozenset(goal_words(goal.split(", and price")[0])) for goal in goal_of}
            sizes[split] = len(goal_of)
        assert 0.1 < sizes["held_out"] / sum(sizes.values()) < 0.3
    assert not seen["train"] & seen["held_out"]


def test_the_data_seed_alone_decides_tasks():
    for split in ("train", "held_out"):
        one, again, other = (WebShop(**SMALL).tasks(split, seed) for seed in (3, 3, 4))
        assert [task_of(one, i) for i in range(10)] == [task_of(again, i) for i in range(10)]
        assert task_of(one, 0) != task_of(other, 0)


def test_the_index_split_holds_out_single_goals():
    both = split_goals(None, 120, 0, "synthetic", 0, "index")
    by_content = split_goals(None, 120, 0, "synthetic", 0, "content")
    assert both["held_out"] != by_content["held_out"]
    assert sorted(map(repr, [*both["train"], *both["held_out"]])) == sorted(
        map(repr, [*by_content["train"], *by_content["held_out"]])
    )


def test_episodes_are_the_same_in_every_process():
    program = (
        "import numpy as np\n"
        "from flowjax.envs.webshop import WebShop\n"
        "from flowjax.envs.webshop.goals import split_goals\n"
        "from flowjax.envs.webshop.world import _task\n"
        "goals = split_goals(None, 150, 0, 'human', 2, 'content')['train']\n"
        "env = WebShop(products=150, goals='human').env()\n"
        "rng = np.random.default_rng(0)\n"
        "for index in range(10):\n"
        "    observation = env.reset(_task(goals, 't', index), 0)\n"
        "    for turn in range(12):\n"
        "        step = env.step(WebShop().random_action(observation, rng) if turn < 6 else WebShop().expert(env))\n"
        "        observation = step.observation\n"
        "        print(observation, step.reward, step.outcome)\n"
        "print(WebShop(products=150).vocabulary())\n"
    )
    printed_in_two_processes(program)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"product": 6}, "product is no option of WebShop .did you mean 'products'"),
        ({"goals": "all"}, "goals is 'all': use one of"),
        ({"split_by": "none"}, "split_by is 'none': use one of"),
        ({"products": 0}, "products=0"),
        ({"path": "/nowhere"}, "lacks items_shuffle.json"),
    ],
)
def test_wrong_options_are_named(options: dict, named: str):
    with pytest.raises(WorldError, match=named):
        WebShop(**options).env()


def test_a_task_is_the_same_after_the_way_to_a_worker():
    env, observation = start(3)
    [message] = Frames().feed(frame([pack_task(task(3, **SMALL))]))
    assert env.reset(Task(*message), 1) == observation


def test_a_task_of_another_catalog_is_refused():
    env = WebShop(products=5).env()
    with pytest.raises(WorldError, match="not in the catalog"):
        for index in range(20):
            env.reset(task(index, products=120), 0)
