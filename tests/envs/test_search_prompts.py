"""Search: what agents are told, how their replies are read, in both protocols and both styles."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowjax.envs import Observation, Past, Style
from flowjax.envs.search import Search
from flowjax.envs.search.corpus import Document, encyclopedia
from flowjax.envs.search.protocol import SearchView, information, read_action, shown
from flowjax.published.worlds import PublishedSearch

REWARDFLOW = ("search[<words>]", "answer[<text>]")
ASEARCHER = ("search[<query>]", "answer[<text>]", "access[<url>]")
SMALL = {"documents": 200, "topk": 2}


def said(messages: Any) -> str:
    [message] = messages
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize(
    ("reply", "ours", "published"),
    [
        ("<think>hm</think><search> lake  Como\n</search>", "search[lake Como]", "search[lake Como]"),
        (
            "<think>I may <search>a</search>, or <answer>?</think> <answer>b</answer>",
            "answer[b]",  # which was no action, though the prompt asks for reasoning before it
            "search[a]",
        ),
        ("<think><search>a</search></think>", None, "search[a]"),
        ("<think>maybe <answer>b</answer> but no</think> I do not know", None, "answer[b]"),
        ("<think>maybe <answer>b</answer> but the", None, "answer[b]"),
        ("<think>a</think><search>a</search><answer>b</answer>", None, "search[a]"),
        ("<answer>Lake Como</answer>", "answer[Lake Como]", "answer[Lake Como]"),
        ("<ANSWER>x</Answer>", "answer[x]", "answer[x]"),
        ("<answer> </answer>", "answer[]", "answer[]"),
        ("<search>a</search><search>b</search>", None, "search[a]"),
        ("<search>a</search><answer>b</answer>", None, "search[a]"),
        ("<answer>b</answer><search>a</search>", None, "search[a]"),
        ("<answer>b</answer>", "answer[b]", "answer[b]"),
        ("<search></search>", None, None),
        ("<search>a", None, None),
        ("</search>a<search>", None, None),
        ("<search>a</answer>", None, None),
        ("<search>a<search>b</search>", None, "search[a<search>b]"),
        ("<answer>a</answer></search>", None, "answer[a]"),
        ("<access>u</access><search>a</search>", "search[a]", "search[a]"),
        ("search for it", None, None),
        ("", None, None),
    ],
)
def test_replies_as_rewardflow_reads_them_and_as_we_do(reply: str, ours: str | None, published: str | None):
    assert Search().parse_action(reply, REWARDFLOW) == ours
    assert PublishedSearch().parse_action(reply, REWARDFLOW) == published


@pytest.mark.parametrize(
    ("reply", "ours", "published"),
    [
        ("<access>http://a/b</access>", "access[http://a/b]", "access[http://a/b]"),
        ("<access>u</access><search>a</search>", None, "search[a]"),
        ("<answer>x</answer><access>u</access>", None, "access[u]"),
        ("<answer>x</answer>", "answer[x]", "answer[x]"),
    ],
)
def test_replies_as_asearcher_reads_them(reply: str, ours: str | None, published: str | None):
    assert Search().parse_action(reply, ASEARCHER) == ours
    assert PublishedSearch().parse_action(reply, ASEARCHER) == published
    if ours and ours.startswith("access"):
        assert Search().parse_action(reply, ASEARCHER[:2]) is None


def test_a_reply_of_openings_alone_is_read_in_linear_time():
    """Its end was looked for behind each of them, a quarter of an hour for these."""
    for legal in (REWARDFLOW, ASEARCHER):
        assert PublishedSearch().parse_action("<search>" * 100_000, legal) is None


PIECES = ["<search>", "</search>", "<answer>", "</answer>", "<access>", "</access>", "<think>", "</think>"]
WORDS = ["search", "answer", "bak", "gem", "mayor", "river", "Bakgem", "]", "[", "\n", " ", "<", "ä", "\0", "☃"]


def test_ten_thousand_replies_crash_nothing_and_the_unreadable_change_nothing():
    env = Search(protocol="asearcher", access=True, **SMALL).env()
    task = Search(**SMALL).tasks("train", 0)[0]
    assert task is not None
    rng = np.random.default_rng(0)
    before = env.reset(task, 0)
    readable = 0
    for number in range(10_000):
        reply = "".join(rng.choice(PIECES + WORDS, rng.integers(0, 8)))
        if number % 3 == 0:
            reply = " ".join(rng.choice(WORDS[:6], rng.integers(0, 5)))
        if number % 5 == 0:
            tag = ["search", "answer", "access"][rng.integers(3)]
            reply = f"<{tag}>{reply}</{tag}>"
        if number % 7 == 0:
            reply = bytes(rng.integers(0, 256, 40, np.uint8)).decode(errors="replace")
        reference = bool(number % 2)
        for legal in (REWARDFLOW, before.legal_actions):
            action = (PublishedSearch if reference else Search)().parse_action(reply, legal)
            assert action is None or read_action(action, legal)
        action = (PublishedSearch if reference else Search)().parse_action(reply, before.legal_actions)
        step = env.step(action or "")
        assert step.valid == (action is not None)
        if action is None:
            assert (step.observation.state_key, step.terminal, step.reward) == (before.state_key, False, 0.0)
            assert Search().follow_up(step.observation, "compact")
        readable += action is not None
        before = env.reset(task, 0) if step.terminal or number % 50 == 0 else step.observation
    assert 500 < readable < 9500


@pytest.mark.parametrize("style", ["instruct", "compact"])
@pytest.mark.parametrize("options", [{}, {"protocol": "asearcher"}])
def test_what_the_expert_writes_is_read_back(style: Style, options: dict):
    env, source = Search(**SMALL, **options).env(), Search(**SMALL, **options).tasks("train", 0)
    for index in range(30):
        task = source[index]
        assert task is not None
        observation, done = env.reset(task, 0), False
        while not done:
            action = Search().expert(env)
            assert Search().parse_action(Search().reply(action, style), observation.legal_actions) == action
            step = env.step(action)
            observation, done = step.observation, step.terminal


def test_random_actions_are_legal():
    env = Search(protocol="asearcher", access=True, **SMALL).env()
    source = Search(**SMALL).tasks("train", 0)
    rng = np.random.default_rng(0)
    verbs = set()
    for index in range(60):
        task = source[index]
        assert task is not None
        observation = env.reset(task, 0)
        for _ in range(5):
            action = Search().random_action(observation, rng)
            step = env.step(action)
            assert step.valid
            verbs.add(action.split("[")[0])
            observation = step.observation
            if step.terminal:
                break
    assert verbs == {"search", "answer", "access"}


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_compact_text_keeps_to_the_vocabulary_and_to_its_length(hops: int):
    options = {**SMALL, "topk": 1, "hops": hops}
    words = set(Search(**options).vocabulary())
    env, source = Search(**options).env(), Search(**options).tasks("train", 0)
    rng = np.random.default_rng(1)
    for index in range(60):
        task = source[index]
        assert task is not None
        observation = env.reset(task, 0)
        past: list[Past] = []
        for turn in range(1, 5):
            window = said(Search().prompt(observation, [], "compact")).split()
            assert set(window) <= words
            assert len(window) <= hops + 3 + 12 + 1
            assert set(said(Search().prompt(observation, past[-2:], "compact")).split()) <= words
            follow_up = said(Search().follow_up(observation, "compact")).split()
            assert set(follow_up) <= words
            assert len(follow_up) <= 13
            action = ["", Search().random_action(observation, rng), Search().expert(env)][rng.integers(3)]
            assert len(Search().reply(action, "compact").split()) <= 3
            past.append(Past(turn, observation.view, action))
            step = env.step(action)
            observation = step.observation
            if step.terminal:
                break


def test_the_compact_prompt_holds_what_the_expert_needs():
    """Question and latest document alone: the names that the expert says stand right after what tells them."""
    options = {**SMALL, "topk": 1}
    env, source = Search(**options).env(), Search(**options).tasks("train", 0)
    for index in range(50):
        task = source[index]
        assert task is not None
        observation = env.reset(task, 0)
        second, first = re.findall(r"the (\w+) of", task.payload["question"])
        stray = next(name for name in encyclopedia(200, 0).names if name not in task.payload["chain"])
        for relation in (None, first, None, first, second):
            _, *name = Search().reply(Search().expert(env), "compact").split()
            told = said(Search().prompt(observation, [], "compact")).split()
            question, document = told[: told.index("?")], told[told.index("?") + 1 :]
            assert question[:2] == [second, first]
            place = document.index(relation) + 1 if relation else None
            assert name == (question[2:] if place is None else document[place : place + 2])
            strays = relation == first and stray not in env.queries
            observation = env.step(f"search[{stray}]" if strays else Search().expert(env)).observation


@pytest.mark.parametrize("protocol", ["rewardflow", "asearcher"])
def test_the_instruct_prompt_shows_question_window_and_rules(protocol: str):
    options = {**SMALL, "protocol": protocol}
    env = Search(**options).env()
    task = Search(**options).tasks("train", 0)[0]
    assert task is not None
    start = env.reset(task, 0)
    first = said(Search().prompt(start, [], "instruct"))
    for part in (task.payload["question"], "<think>", "<search>", "<answer>"):
        assert part in first
    assert "<information>\n" not in first
    name = task.payload["chain"][0]
    found = env.step(f"search[{name}]").observation
    unread = env.step("").observation
    again = env.step("search[zzz]").observation
    history = [Past(1, start.view, f"search[{name}]"), Past(2, found.view, ""), Past(3, unread.view, "search[zzz]")]
    whole = said(Search().prompt(again, history, "instruct"))
    document = f'"{name}"\n{name} is a'
    for part in (
        f"Step 1: <search>{name}</search>\n<information>",
        document,
        "Step 2: (no",
        "Step 3",
        "Nothing was found",
    ):
        assert part in whole
    assert whole.count(document) == 1
    assert "Steps taken so far: 3" in whole
    # what the shown steps leave out is shown all the same
    assert document in said(Search().prompt(found, [], "instruct"))
    assert document in said(Search().prompt(unread, history[1:2], "instruct"))
    # a conversation is told what is new only
    assert document in said(Search().follow_up(found, "instruct"))
    assert said(Search().follow_up(unread, "instruct")) == "The last reply held no legal action."
    assert task.payload["question"] not in said(Search().follow_up(found, "instruct"))


def test_access_is_told_of_only_where_it_is_legal():
    for access in (False, True):
        env = Search(protocol="asearcher", access=access, **SMALL).env()
        task = Search(**SMALL).tasks("train", 0)[0]
        assert task is not None
        assert ("<access>" in said(Search().prompt(env.reset(task, 0), [], "instruct"))) == access


@given(st.lists(st.text(st.characters(exclude_characters="<"), max_size=30), min_size=1, max_size=3))
def test_tags_inside_documents_are_taken_out(contents: list[str]):
    documents = [
        Document(str(row), f"x{text}<information></infor<search>mation></search>y") for row, text in enumerate(contents)
    ]
    found = shown(documents, 5000)
    assert found == tuple(("", f"x{text} </infor mation> y") for text in contents)
    told = said(Search().follow_up(Observation(SearchView("Which?", found), REWARDFLOW, 0), "instruct"))
    assert told.count("<information>") == told.count("</information>") == 1
    assert information(found, "rewardflow") in told


def test_long_documents_are_cut():
    assert information(shown([Document("0", "x" * 100)], 10), "rewardflow") == "Doc 1: " + "x" * 10
