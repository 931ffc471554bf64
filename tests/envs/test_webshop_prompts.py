"""Prompts of the WebShop world, and what becomes of replies."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowjax.envs import Observation, Past
from flowjax.envs.webshop import WebShop
from flowjax.envs.webshop.goals import LIMITS, words
from flowjax.envs.webshop.pages import SEARCH_TEMPLATE, read_action
from flowjax.published.worlds import PublishedWebShop
from flowjax.records import Task

OPTIONS = {"products": 60}
LEGAL = (SEARCH_TEMPLATE, "click[back to search]", "click[< prev]", "click[8 ounce]")


def episode(index: int, seed: int = 0, stray: float = 0.3):
    """(observation, past turns, action, step) along an expert's way that strays."""
    env = WebShop(**OPTIONS).env()
    found = WebShop(**OPTIONS).tasks("train", 0)[index]
    assert isinstance(found, Task)
    observation, past, rng = env.reset(found, 0), [], np.random.default_rng([seed, index])
    for turn in range(1, 16):
        action = WebShop().random_action(observation, rng) if rng.random() < stray else WebShop().expert(env)
        step = env.step(action)
        yield observation, tuple(past), action, step
        past.append(Past(turn, observation.view, action))
        observation = step.observation
        if step.terminal:
            return


@pytest.mark.parametrize("options", [OPTIONS, {"products": 200, "goals": "human"}])
def test_compact_words_are_all_in_the_vocabulary(options: dict):
    known = set(WebShop(**options).vocabulary())
    assert all(word.split() == [word] for word in known) and len(known) < 700
    env = WebShop(**options).env()
    rng = np.random.default_rng(0)
    source = WebShop(**options).tasks("train", 0)
    longest = 0
    for index in range(60):
        found = source[index]
        assert isinstance(found, Task)
        observation = env.reset(found, 0)
        past = [Past(1, observation.view, "")]
        for turn in range(2, 14):
            [message] = WebShop().prompt(observation, past[-2:], "compact")
            [more] = WebShop().follow_up(observation, "compact")
            action = WebShop().random_action(observation, rng) if rng.random() < 0.5 else WebShop().expert(env)
            reply = WebShop().reply(action, "compact", observation.legal_actions)
            assert set(f"{message['content']} {more['content']} {reply}".split()) <= known
            longest = max(longest, len(message["content"].split()))
            past.append(Past(turn, observation.view, action))
            step = env.step(action)
            observation = step.observation
            if step.terminal:
                assert set(WebShop().follow_up(observation, "compact")[0]["content"].split()) <= known
                break
    assert longest <= 88 or options is not OPTIONS  # configs/webshop.py


@pytest.mark.parametrize("style", ["instruct", "compact"])
def test_what_the_expert_says_is_read_back(style):
    for index in range(30):
        for observation, _, action, step in episode(index):
            assert (
                WebShop().parse_action(
                    WebShop().reply(action, style, observation.legal_actions), observation.legal_actions
                )
                == action
            )
            assert step.valid


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<think>so</think><action>Click[8 Ounce]</action>", "click[8 ounce]"),
        ("<action>click[< prev]</action> or rather <action> search[red  Shoes] </action>", "search[red  shoes]"),
        ("<think>I could <action>click[8 ounce]</action> but the price", None),
        ("<think>not <action>click[8 ounce]</action></think> I do not know", None),
        ("<think>so</think> click 8 ounce", "click[8 ounce]"),
        ("search lotion rose", "search[lotion rose]"),
        ("click < prev", "click[< prev]"),
        ("click[8 ounce]", "click[8 ounce]"),
        ("<action>click 8 ounce</action>", None),
        ("<action>click[16 ounce]</action>", None),
        ("<action>search[<words>]</action>", None),
        ("<action>search[ ]</action>", None),
        ("<action>search[a] and more</action>", None),
        ("<action>search[a", None),
        ("search[a]</action>", None),
        ("search", None),
        ("", None),
    ],
)
def test_replies(reply: str, action: str | None):
    assert WebShop().parse_action(reply, LEGAL) == action


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<think>a</think><action>click[Nothing]</action>", "click[nothing]"),
        ("one <action> of <action>click[x]</action>", "of <action>click[x]"),
        ("</action><action>click[x]", None),  # an empty action
        ("I will now press click[buy now]", " press click[buy now]"[-20:]),
        ("", None),
    ],
)
def test_the_published_projection_is_kept_on_request(reply: str, action: str | None):
    assert PublishedWebShop().parse_action(reply, LEGAL) == action


@given(st.text("ab[]\n ", max_size=14))
@settings(max_examples=300, deadline=None)
def test_actions_are_read_by_the_published_pattern(text: str):
    match = re.match(r"(.+)\[(.+)\]", text)
    assert read_action(text) == (match.groups() if match else ("", ""))


def fuzzed(rng: np.random.Generator, legal: tuple[str, ...]) -> str:
    pieces = [
        *("<action>", "</action>", "<think>", "</think>", "search[", "click[", "]", "[", "search", "click", " ", "\n"),
        *("buy now", "< prev", "next >", "back to search", "<words>", "[SEP]", "中文", "\x00", "%s", "{}", "é" * 300),
        *("b000000001", "description", "a" * 5000, "[" * 5000, "\ud800", "None", "' OR 1", "<r>", "<a> x"),
        *(legal[rng.integers(len(legal))] if legal else "" for _ in range(4)),
    ]
    return "".join(pieces[i] for i in rng.integers(len(pieces), size=rng.integers(0, 7)))


def test_ten_thousand_odd_replies():
    """None crashes; what is invalid is marked and leaves everything as it was."""
    env = WebShop(**OPTIONS).env()
    source = WebShop(**OPTIONS).tasks("train", 0)
    rng = np.random.default_rng(0)
    observation: Observation | None = None
    invalid = 0
    for number in range(10_000):
        if number % 20 == 0:
            found = source[number % len(source)]
            assert isinstance(found, Task)
            observation = env.reset(found, 0)
        assert observation is not None
        reply = fuzzed(rng, observation.legal_actions)
        world = PublishedWebShop() if number % 3 == 0 else WebShop()
        action = world.parse_action(reply, observation.legal_actions) or ""
        step = env.step(action if number % 2 else reply)
        if not step.valid:
            invalid += 1
            assert step.observation == observation and step.reward == 0.0
        observation = step.observation
        WebShop().prompt(observation, [Past(1, observation.view, action)], "compact")
    assert 2_000 < invalid < 9_990


def test_the_instruct_prompt_shows_task_page_actions_and_window():
    steps = list(episode(0, stray=0.0))
    observation, past, _, _ = steps[2]
    [message] = WebShop().prompt(observation, past[-2:], "instruct")
    text = message["content"]
    goal = observation.view.instruction
    for part in (
        f"Your task: {goal}",
        "2 actions so far",
        "[Observation 1: ''Search'', Action 1: 'search[",
        "<action>",
    ):
        assert part in text
    page = observation.view.texts
    assert " [SEP] ".join(f"'{p}'" for p in page) in text
    assert all(f"'{action}',\n" in text for action in observation.legal_actions[1:])
    assert "search[<your query>]" not in text
    first = WebShop().prompt(steps[0][0], [], "instruct")[0]["content"]
    assert "'search[<your query>]'," in first and "actions so far" not in first
    more = WebShop().follow_up(observation, "instruct")[0]["content"]
    assert goal not in more and "Buy Now" in more and "<action>" in more


def test_a_prompt_that_grows_too_long_is_told_without_its_history():
    observation, past, _, _ = list(episode(0, stray=0.0))[2]
    long = Past(1, replace(past[0].view, texts=(" x" * 7000,)), past[0].action)
    [short] = WebShop().prompt(observation, [long, past[1]], "instruct")
    assert short == WebShop().prompt(observation, [], "instruct")[0]
    fits = Past(1, replace(past[0].view, texts=(" x" * 4000,)), past[0].action)
    assert "actions so far" in WebShop().prompt(observation, [fits, past[1]], "instruct")[0]["content"]


def test_products_are_opened_by_their_place():
    """Each of a results page by the words that stand before its title, on later pages too, and nowhere else."""
    env = WebShop(**OPTIONS).env()
    found = WebShop(**OPTIONS).tasks("train", 0)[0]
    assert isinstance(found, Task)
    start = env.reset(found, 0)
    assert WebShop().parse_action("open 1", start.legal_actions) is None
    pages = [env.step("search[hair color size]").observation, env.step("click[next >]").observation]
    for page in pages:
        assert len(page.view.products) == 10
        for place, (asin, title) in enumerate(page.view.products, 1):
            action = WebShop().parse_action(f"open {place}", page.legal_actions)
            assert action == f"click[{asin.lower()}]"
            assert f" {place} {words(title)[-4]} " in WebShop().compact(page, ())
        assert WebShop().parse_action("open 11", page.legal_actions) is None
    item = env.step(f"click[{pages[1].view.products[2][0].lower()}]").observation
    assert WebShop().parse_action("open 1", item.legal_actions) is None
    past = [Past(3, pages[1].view, f"click[{pages[1].view.products[2][0].lower()}]")]
    assert "then open 3 page item" in WebShop().compact(item, past)


def test_the_compact_price_is_within_a_limit_where_the_price_is():
    """Limits of goals are multiples of ten dollars, and so is what is shown."""
    catalog = WebShop(**OPTIONS).options.catalog()
    env = WebShop(**OPTIONS).env()
    found = WebShop(**OPTIONS).tasks("train", 0)[0]
    assert isinstance(found, Task)
    seen = set()
    for product in catalog.products:
        env.reset(found, 0)
        env.step(f"search[{product.name} {product.description}]")
        page = env.step(f"click[{product.asin.lower()}]").observation
        if page.view.page != "item" or page.view.title != product.name.strip():
            continue
        said = int(WebShop().compact(page, ()).rpartition(" price ")[2])
        seen.add(said)
        assert all((max(product.prices) <= limit) == (said <= limit) for limit in LIMITS)
    assert len(seen) > 5
