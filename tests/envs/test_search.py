"""Search: the generated encyclopedia, episodes, keys, splits, rewards."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from two_processes import printed_in_two_processes

from data.search.build import build
from flowjax.envs import Observation, Split, WorldError
from flowjax.envs.search import Search
from flowjax.envs.search.corpus import (
    KINDS,
    SYLLABLES,
    Corpus,
    Encyclopedia,
    Questions,
    encyclopedia,
    read_questions,
    split_name,
)
from flowjax.envs.search.world import SearchEnv
from flowjax.records import Task

SMALL = {"documents": 200, "topk": 2}


def take(source: grain.MapDataset[Task], index: int) -> Task:
    task = source[index]
    assert task is not None
    return task


def started(**options: Any) -> SearchEnv:
    """An environment at its first training question."""
    options = {**SMALL, **options}
    env = Search(**options).env()
    env.reset(take(Search(**options).tasks("train", 0), 0), 0)
    return env


def play(policy: Any, split: Split, count: int, **options: Any) -> float:
    """Share of questions answered right within eight turns."""
    env, source = Search(**options).env(), Search(**options).tasks(split, 1)
    rng, right = np.random.default_rng(0), 0.0
    for index in range(count):
        observation = env.reset(take(source, index), 0)
        for _ in range(8):
            step = env.step(policy(env, observation, rng))
            observation = step.observation
            if step.terminal:
                right += step.outcome["success"]
                break
    return right / count


# the encyclopedia


def told_facts(book: Encyclopedia) -> dict[tuple[str, str], str]:
    """(name, relation) -> name, read from the documents' text alone."""
    facts = {}
    for document in book.documents():
        for relation, name in re.findall(r"The (\w+) of this \w+ is (\w+)\.", document.contents):
            facts[document.title, relation] = name
    return facts


def test_the_documents_tell_what_the_questions_ask():
    book = encyclopedia(300, 4)
    facts = told_facts(book)
    assert len(facts) == 900
    for split, hops in itertools.product(("train", "held_out"), (1, 2, 3)):
        questions = Questions(book, split, 0, [hops])
        for question in (questions[index] for index in range(0, len(questions), 7)):
            [asked] = re.findall(r"^What is (.*)\?$", question.text)
            *relations, name = asked.replace("the ", "").split(" of ")
            assert len(relations) == hops
            seen = [name]
            for relation in reversed(relations):
                name = facts[name, relation]
                seen.append(name)
            assert question.answers == (name,)
            assert question.chain == tuple(seen)
            assert len(set(seen)) == len(seen)


def test_every_walk_is_asked_once():
    book = encyclopedia(160, 0)
    questions = [Questions(book, "train", 0, [2])[i] for i in range(len(Questions(book, "train", 0, [2])))]
    facts = told_facts(book)
    kinds = {name: list(KINDS)[kind] for name, kind in zip(book.names, book.kinds, strict=True)}
    walks = set()
    for name, held_out in zip(book.names, book.held_out, strict=True):
        for first, _ in () if held_out else KINDS[kinds[name]]:
            middle = facts[name, first]
            for second, _ in KINDS[kinds[middle]]:
                if facts[middle, second] not in (name, middle):
                    walks.add(f"What is the {second} of the {first} of {name}?")
    assert {question.text for question in questions} == walks
    assert len(questions) == len(walks)


def test_fifty_thousand_names_are_unique_and_keep_apart_when_stemmed():
    import Stemmer

    names = encyclopedia(50_000, 0).names
    assert len(set(names)) == 50_000
    stems = Stemmer.Stemmer("english").stemWords([name.lower() for name in names])
    assert stems == [name.lower() for name in names]
    assert all(len(split_name(name) or ()) == 3 for name in names[:1000])
    assert len(set(SYLLABLES)) == len(SYLLABLES)


def test_a_name_finds_its_document_first():
    book = encyclopedia(1000, 0)
    env = Search(documents=1000, topk=1).env()
    task = Task("t", "search", 0, {"question": "What?", "answers": ["x"]})
    for name in book.names[::20]:
        env.reset(task, 0)
        env.step(f"search[{name}]")
        assert env.titles == {name}


def test_no_held_out_fact_is_of_use_in_training_over_ten_data_seeds():
    options = {**SMALL, "hops": (1, 2, 3)}
    named: dict[str, set[str]] = {"train": set(), "held_out": set()}
    texts: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for split, data_seed in itertools.product(("train", "held_out"), range(10)):
        source = Search(**options).tasks(split, data_seed)
        for index in range(0, len(source), 3):
            payload = take(source, index).payload
            named[split].update(payload["chain"])
            texts[split].add(payload["question"])
    assert not named["train"] & named["held_out"]
    assert not texts["train"] & texts["held_out"]
    assert min(map(len, texts.values())) > 100
    facts = told_facts(encyclopedia(200, 0))
    assert not any((name in named["train"]) != (target in named["train"]) for (name, _), target in facts.items())


def test_the_kind_of_a_question_is_how_far_its_answer_lies():
    source = Search(**SMALL, hops=(1, 3)).tasks("train", 0)
    for task in (take(source, index) for index in range(40)):
        hops = task.payload["question"].count(" of ")
        assert task.kind == {1: "1 hop", 3: "3 hops"}[hops]


def test_too_many_questions_are_refused():
    with pytest.raises(WorldError, match=r"documents=300000, hops=\(4,\)"):
        Search(documents=300_000, hops=4).tasks("train", 0)


def test_the_data_seed_orders_the_tasks_and_nothing_else():
    first, second = (Search(**SMALL).tasks("train", data_seed) for data_seed in (0, 1))
    ids = [{take(source, index).task_id for index in range(len(source))} for source in (first, second)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == len(first)
    assert [take(first, index) for index in range(20)] != [take(second, index) for index in range(20)]
    assert take(Search(**SMALL).tasks("train", 0), 5) == take(first, 5)


# episodes


def test_the_expert_answers_every_question():
    assert play(lambda env, observation, rng: Search().expert(env), "held_out", 100, documents=1000) == 1.0
    assert play(lambda env, observation, rng: Search().expert(env), "train", 100, documents=400, hops=(1, 3, 4)) == 1.0


def test_the_expert_answers_some_too_early_where_it_is_to():
    """What it says then stands in the first document."""

    def right(count: int, **options: Any) -> float:
        return play(lambda env, observation, rng: Search(**options).expert(env), "held_out", count, **options)

    assert 0.6 < right(200, documents=1000, early_share=0.3) < 0.8
    assert right(30, documents=1000, early_share=1.0, hops=1) == 1.0
    hasty = Search(documents=1000, early_share=1.0)
    env, source = hasty.env(), hasty.tasks("held_out", 0)
    for index in range(10):
        env.reset(take(source, index), 0)
        env.step(hasty.expert(env))
        assert hasty.expert(env) == f"answer[{env.question.chain[1]}]"


def test_the_random_policy_hardly_ever_does():
    assert play(lambda env, observation, rng: Search().random_action(observation, rng), "held_out", 100, **SMALL) < 0.3


@pytest.mark.parametrize(
    ("action", "verdict", "reward"),
    [("right", "right", 1.0), ("answer[nobody at all]", "wrong", 0.0), ("answer[the]", "malformed", 0.0)],
)
def test_an_answer_ends_the_episode(action: str, verdict: str, reward: float):
    env = started()
    answer = env.question.answers[0]
    step = env.step(f"answer[ the {answer.upper()}. ]" if action == "right" else action)
    assert (step.reward, step.terminal, step.valid) == (reward, True, True)
    assert step.outcome["success"] == float(verdict == "right")
    assert step.outcome["answered"] == 1.0
    after = env.step("search[anything]")
    assert (after.observation, after.reward, after.terminal, after.valid) == (step.observation, 0.0, True, False)


def test_right_wrong_and_malformed_answers_are_three_states_whatever_was_searched():
    keys: dict[str, set[int]] = {"right": set(), "wrong": set(), "malformed": set(), "open": set()}
    env = started()
    task = take(Search(**SMALL).tasks("train", 0), 0)
    for searched, verdict in itertools.product(([], env.question.chain[:1], env.question.chain), keys):
        env.reset(task, 0)
        for name in searched:
            step = env.step(f"search[{name}]")
            keys["open"].add(step.observation.state_key)
        said = {"right": env.question.answers[0], "wrong": "nobody", "malformed": "...", "open": None}[verdict]
        if said:
            keys[verdict].add(env.step(f"answer[{said}]").observation.state_key)
    assert [len(keys[verdict]) for verdict in ("right", "wrong", "malformed")] == [1, 1, 1]
    assert len(set.union(*keys.values())) == sum(map(len, keys.values()))


def test_f1_pays_for_part_of_an_answer():
    task = Task("t", "search", 0, {"question": "Who?", "answers": ["Ada King", "Lovelace"]})
    env = Search(score="f1", **SMALL).env()
    keys = set()
    for said, reward, success in (("King", 2 / 3, 0.0), ("Ada of Spades", 0.4, 0.0), ("ada king", 1.0, 1.0)):
        env.reset(task, 0)
        step = env.step(f"answer[{said}]")
        assert (step.reward, step.outcome["success"]) == (pytest.approx(reward), success)
        assert step.outcome["f1"] == step.reward
        keys.add(step.observation.state_key)
    assert len(keys) == 3


@settings(max_examples=60, deadline=None)
@given(picks=st.lists(st.integers(0, 199), min_size=1, max_size=5), order=st.randoms(use_true_random=False))
def test_keys_name_what_is_known_not_how_it_was_found(picks: list[int], order: Any):
    names = encyclopedia(200, 0).names
    env = Search(**SMALL).env()
    task = take(Search(**SMALL).tasks("train", 0), 0)

    def reach(searched: list[int]) -> tuple[int, frozenset[str]]:
        step_key = env.reset(task, 0).state_key
        for pick in searched:
            step_key = env.step(f"search[{names[pick]}]").observation.state_key
        return step_key, env.titles

    shuffled = [*picks, *picks[:1]]
    order.shuffle(shuffled)
    assert reach(picks) == reach(shuffled)
    fewer, more = reach(picks[:-1]), reach(picks)
    assert (fewer[0] == more[0]) == (fewer[1] == more[1])


def test_another_question_is_another_state():
    source = Search(**SMALL).tasks("train", 0)
    env = Search(**SMALL).env()
    assert len({env.reset(take(source, index), 0).state_key for index in range(50)}) == 50


@pytest.mark.parametrize(
    "action", ["", "fly", "search[]", "search[  ]", "search", "access[x]", f"search[{'x' * 1001}]"]
)
def test_what_is_no_action_changes_nothing(action: str):
    env = started()
    before = env.step(f"search[{env.question.chain[0]}]")
    titles = env.titles
    step = env.step(action)
    assert (step.valid, step.reward, step.terminal, step.outcome) == (False, 0.0, False, before.outcome)
    assert step.observation.state_key == before.observation.state_key
    assert env.titles == titles
    assert step.observation.view == replace(before.observation.view, unreadable=True)


def test_a_search_that_finds_nothing_says_so():
    env = started()
    key = env.step("search[zzz]").observation
    assert key.view.found == ()
    assert key.state_key == env.step("search[qqq qqq]").observation.state_key


def test_a_page_is_opened_by_its_address():
    env = started(protocol="asearcher", access=True)
    name = env.question.chain[0]
    step = env.step(f"access[https://encyclopedia.invalid/wiki/{name}]")
    assert env.titles == {name}
    assert [url for url, _ in step.observation.view.found] == [f"https://encyclopedia.invalid/wiki/{name}"]
    assert env.step("access[https://encyclopedia.invalid/wiki/nowhere]").observation.state_key == (
        step.observation.state_key
    )


def test_episodes_are_the_same_in_every_process():
    program = (
        "import numpy as np\n"
        "from flowjax.envs.search import Search\n"
        "from flowjax.envs.search.world import SearchEnv\n"
        "rng = np.random.default_rng(3)\n"
        "source, env = Search(documents=300).tasks('held_out', 7), Search(documents=300).env()\n"
        "for index in (40, 3, 17):\n"
        "    observation = env.reset(source[index], 0)\n"
        "    for turn in range(6):\n"
        "        print(observation)\n"
        "        step = env.step(Search().random_action(observation, rng))\n"
        "        observation = step.observation\n"
        "        print(step.reward, step.outcome)\n"
    )
    printed = printed_in_two_processes(program)
    assert printed.count("Observation") == 18


# files


def test_built_data_is_played_like_any_other(tmp_path: Path):
    build(tmp_path, seed=3, documents=200, train=40, held_out=30, hops=[2])
    assert len(Corpus(tmp_path / "corpus.jsonl")) == 200
    assert Corpus(tmp_path / "corpus.jsonl")[7] == encyclopedia(200, 3).document(7)
    assert play(lambda env, observation, rng: Search().expert(env), "held_out", 30, path=str(tmp_path)) == 1.0
    again = tmp_path / "again"
    build(again, seed=3, documents=200, train=40, held_out=30, hops=[2])
    assert all((tmp_path / name).read_bytes() == (again / name).read_bytes() for name in ("corpus.jsonl", "test.jsonl"))


def test_answers_of_a_users_own_rows_are_read(tmp_path: Path):
    rows = [
        {"question": "Who?", "answer": "Ann"},
        {"question": "who", "answer": ["Bob", "Ann"]},  # a row for each answer
        {"question": "When?", "answer": 1724.0},  # of a column with gaps
        {"question": "Where?", "answer": "Zu\u0308rich"},  # a reply spells it with one letter
        {"question": "What of Jose\u0301?", "answer": "x1"},
        {"question": "What of Jos\u00e9?", "answer": "x2"},
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_questions(tmp_path, "held_out")
    assert [question.answers for question in found] == [("Ann", "Bob"), ("1724",), ("Z\u00fcrich",), ("x1", "x2")]
    for answer, said in (
        (float("nan"), "nan is no number"),
        ("['Paris', 'paris']", "a list that was written as a text"),
    ):
        (tmp_path / "test.jsonl").write_text(json.dumps({"question": "Who?", "answer": answer}))
        with pytest.raises(WorldError, match=f"line 1, is no question .*{said}"):
            read_questions(tmp_path, "held_out")


def test_questions_in_the_published_formats_are_read(tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    rows = [
        {"question": "who wrote it?", "golden_answers": ["The", "B", "E"], "data_source": "nq", "id": "test_0"},
        {"question": "Who wrote  it", "golden_answers": ["A"], "data_source": "nq", "id": "test_1"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    lines = [
        {"question": "WHO wrote it?", "answer": "A"},
        {"question": "Where is it?", "answer": ["C"], "aug_answer": ["sea"]},
        {"question": "When?", "reward_model": {"ground_truth": {"target": ["D"]}}},
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert [question.answers for question in read_questions(tmp_path, "held_out")] == [("B", "E")]
    train = read_questions(tmp_path, "train")
    assert [question.text for question in train] == ["Where is it?", "When?"]  # the first is a test question
    assert (train[0].answers, train[0].augmented, train[1].answers) == (("C",), ("sea",), ("D",))


def test_an_oracle_plays_questions_without_a_known_chain(tmp_path: Path):
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "9", "title": "Lake Como", "text": "A lake."}) + "\n")
    for name in ("train", "test"):
        line = {"question": f"Which {name} lake?", "golden_answers": ["Lake Como"]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    env = Search(path=str(tmp_path)).env()
    env.reset(take(Search(path=str(tmp_path)).tasks("train", 0), 0), 0)
    [[_, contents]] = env.step(Search().expert(env)).observation.view.found
    assert "Lake Como" in contents
    assert env.step(Search().expert(env)).outcome["success"] == 1.0


def test_the_expert_knows_a_title_by_its_words(tmp_path: Path):
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "9", "title": "Lake Como", "text": "A lake."}) + "\n")
    line = {"question": "Where?", "answer": "Italy", "metadata": {"chain": ["lake  como", "Italy"]}}
    (tmp_path / "test.jsonl").write_text(json.dumps(line))
    world = Search(path=str(tmp_path))
    env = world.env()
    env.reset(take(world.tasks("held_out", 0), 0), 0)
    env.step(world.expert(env))
    assert env.step(world.expert(env)).outcome["success"] == 1.0


@pytest.mark.parametrize(
    ("title", "named"), [("The Crash", "Crash"), ("C language", "C++ language"), ("AC/DC", "ACDC")]
)
def test_the_expert_takes_no_other_title_for_the_one_named(title: str, named: str, tmp_path: Path):
    line = {"id": "9", "title": title, "text": f"{named} is not {title}."}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(line) + "\n")
    asked = {"question": "Who made it?", "answer": "Nobody", "metadata": {"chain": [named, "Nobody"]}}
    (tmp_path / "test.jsonl").write_text(json.dumps(asked))
    world = Search(path=str(tmp_path))
    env = world.env()
    env.reset(take(world.tasks("held_out", 0), 0), 0)
    for _ in range(2):
        assert world.expert(env) == f"search[{named}]"
        env.step(world.expert(env))


def test_passages_of_one_id_are_two_states(tmp_path: Path):
    build(tmp_path, seed=3, documents=200, train=1, held_out=1, hops=[2])
    with (tmp_path / "corpus.jsonl").open("w") as file:
        file.writelines(json.dumps({"id": "7", "contents": text}) + "\n" for text in ("alpha one", "beta two"))
    env, task = Search(path=str(tmp_path)).env(), take(Search(path=str(tmp_path)).tasks("train", 0), 0)
    keys = set()
    for searched in (["alpha"], ["beta"], ["alpha", "beta"], ["beta", "alpha"]):
        env.reset(task, 0)
        keys.add([env.step(f"search[{word}]").observation.state_key for word in searched][-1])
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (None, "missing or empty.*data.search.build"),
        ("", "missing or empty"),
        ("{]\n", "line 1, is no document"),
        ('{"id": "0"}\n', "line 1, is no document"),
        ("\n", "is empty.*data.search.build"),
        ("\r\n\r\n \n", "is empty"),
        ("\n\r\n{]\n", "line 3, is no document"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_named(tmp_path: Path, written: str | None, named: str):
    if written is not None:
        (tmp_path / "corpus.jsonl").write_text(written)
    with pytest.raises(WorldError, match=named):
        Search(path=str(tmp_path)).env()


def test_a_corpus_too_large_for_every_process_wants_a_server(tmp_path: Path):
    with (tmp_path / "corpus.jsonl").open("wb") as file:
        file.truncate(200_000_000)  # takes no place on the disk
    with pytest.raises(WorldError, match=r"corpus\.jsonl has 200 MB.*128 MB at most.*search\.server --corpus"):
        Search(path=str(tmp_path)).env()


def test_half_a_surrogate_pair_is_named_in_questions_and_replaced_in_documents(tmp_path: Path):
    (tmp_path / "corpus.jsonl").write_text('{"contents": "\\"T\\"\\nx \\ud800"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "a?", "answer": "b"}\n{"question": "c?", "answer": "\\ud800"}\n')
    assert Corpus(tmp_path / "corpus.jsonl")[0].contents == '"T"\nx ?'
    with pytest.raises(WorldError, match=r"test.jsonl, line 2 has '\\ud800', half a surrogate pair"):
        Search(path=str(tmp_path)).tasks("held_out", 0)


def test_empty_lines_of_a_corpus_are_no_documents(tmp_path: Path):
    passages = [json.dumps({"id": str(number), "contents": f'"T{number}"\nx'}) for number in range(3)]
    (tmp_path / "corpus.jsonl").write_bytes("\r\n{}\r\n\r\n{}\r\n \r\n\n{}".format(*passages).encode())
    assert [passage.id for passage in Corpus(tmp_path / "corpus.jsonl")] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (b'{"question": "a?", "answer": "b"}\n\n{"question": ', r"train\.jsonl, line 3, is no question"),
        (b'{"question": "a?", "answer": "\xff"}\n', r"train\.jsonl, line 1, is no question .UnicodeDecodeError"),
        (b"", "no train questions with an answer that are not among the test questions"),
        (b'{"question": "Who?", "answer": "b"}\n', "no train questions with an answer that are not among the test"),
        (b'{"question": "a?", "answer": ["", "The", "!"]}\n', "no train questions with an answer"),
    ],
)
def test_questions_that_cannot_be_used_are_named(tmp_path: Path, rows: bytes, named: str):
    (tmp_path / "test.jsonl").write_text('{"question": "Who?", "answer": "c"}\n{"question": "a?", "answer": "A"}\n')
    (tmp_path / "train.jsonl").write_bytes(rows)
    assert len(read_questions(tmp_path, "held_out")) == 1
    with pytest.raises(WorldError, match=named):
        read_questions(tmp_path, "train")


@pytest.mark.parametrize(
    "fields",
    [
        {"answer": {"value": "Paris", "aliases": ["City of Paris"]}},
        {"golden_answers": [None]},
        {"golden_answers": [["Rome", "Roma"]]},
        {"golden_answers": [True]},
        {"answer": "x", "aug_answer": [None, "y"]},
        {"answer": "x", "metadata": {"chain": [["a"]]}},
    ],
)
def test_answers_that_are_no_texts_are_named(tmp_path: Path, fields: dict[str, Any]):
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "a?", **fields}))
    with pytest.raises(
        WorldError, match=r"test\.jsonl, line 1, is no question .TypeError: .* is no text and no number"
    ):
        read_questions(tmp_path, "held_out")


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"answer": 1990}, ("1990",)),
        ({"golden_answers": [2, "two"]}, ("2", "two")),
        ({"golden_answers": [], "answer": "x"}, ("x",)),
        ({"golden_answers": ["The"], "reward_model": {"ground_truth": {"target": "y"}}}, ("y",)),
        ({"golden_answers": ["x"], "reward_model": {"style": "rule", "ground_truth": "y"}}, ("x",)),
        ({"answer": "x", "reward_model": "rule"}, ("x",)),
        ({"reward_model": {"ground_truth": "y"}}, ("y",)),
        ({"reward_model": {"ground_truth": ["y", "z"]}}, ("y", "z")),
    ],
)
def test_answers_are_texts_and_numbers_wherever_they_stand(tmp_path: Path, fields: dict[str, Any], answers: Any):
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "a?", **fields, "metadata": {"chain": "Lake Como"}}))
    [question] = read_questions(tmp_path, "held_out")
    assert (question.answers, question.chain) == (answers, ("Lake Como",))


@pytest.mark.parametrize("damage", [slice(100, 400), slice(-300, None)])
def test_a_broken_parquet_file_is_named(tmp_path: Path, damage: slice):
    import pyarrow
    from pyarrow import parquet

    rows = [{"question": f"{number}?", "golden_answers": [f"b{number}"]} for number in range(999)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    content = bytearray((tmp_path / "test.parquet").read_bytes())
    content[damage] = b"\xff" * len(content[damage])
    (tmp_path / "test.parquet").write_bytes(content)
    with pytest.raises(WorldError, match=r"test\.parquet cannot be read as parquet .* fetch it again"):
        read_questions(tmp_path, "held_out")


def test_missing_questions_are_named(tmp_path: Path):
    (tmp_path / "corpus.jsonl").write_text('{"contents": "\\"T\\"\\nx"}\n')
    with pytest.raises(WorldError, match=r"neither train.parquet nor train.jsonl.*nq_hotpotqa_train"):
        Search(path=str(tmp_path)).tasks("train", 0)
    (tmp_path / "train.jsonl").write_text('{"question": "x?"}\n')
    with pytest.raises(WorldError, match=r"train.jsonl, line 1, is no question"):
        Search(path=str(tmp_path)).tasks("train", 0)
    with pytest.raises(WorldError, match=r"holds no corpus\.jsonl"):
        Search(path=str(tmp_path / "nowhere")).tasks("train", 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"document": 5}, "document is no option of Search .did you mean 'documents'"),
        ({"documents": 10}, "documents=10"),
        ({"documents": 10**9}, "documents=1000000000"),
        ({"hops": 9}, "hops=9"),
        ({"hops": ()}, r"hops=\(\)"),
        ({"topk": 0}, "topk=0"),
        ({"protocol": "http"}, "protocol is 'http': use one of"),
        ({"score": "bleu"}, "score is 'bleu': use one of"),
        ({"access": True}, "access=True needs protocol=asearcher"),
        ({"retriever": "ftp://x"}, "retriever='ftp://x'"),
        ({"retriever": []}, r"retriever=\[\]: give local, or"),
        ({"search_timeout_s": 0}, "search_timeout_s=0"),
    ],
)
def test_wrong_options_are_named(options: dict, named: str):
    with pytest.raises(WorldError, match=named):
        Search(**options).env()


@pytest.mark.parametrize("given", ["local", " local", ["local"]])
def test_an_index_in_the_process_is_named_in_a_list_too(given: Any):
    assert Search(retriever=given).options.servers == ()


def test_a_search_that_servers_answer_has_a_limit_which_a_launch_compares():
    assert Search(retriever=["http://a:1"], search_timeout_s=9.0).longest_step_s() == 9.0
    assert Search(search_timeout_s=9.0).longest_step_s() == 0.0, "the index is in the process"


def test_answers_are_compared_as_exact_match_does():
    world, after = Search(), Observation(None, (), 0)
    assert world.answer("answer[The  Eiffel Tower.]", after) == "eiffel tower"
    assert world.answer("answer[eiffel tower]", after) == "eiffel tower"
    assert world.answer("search[eiffel tower]", after) == "" == world.answer("", after)
