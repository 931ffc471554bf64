"""Problems from files in the formats of published data sets."""

import json
from pathlib import Path

import pytest

from data.math.build import FORMATS, build
from flowjax.envs import Split, WorldError
from flowjax.envs.math import Math
from flowjax.envs.math.problems import MathProblem, copied, load, problem_of, read, split_of
from flowjax.grading.math import equal
from flowjax.records import Task

DAPO_PROMPT = """Solve the following math problem step by step. The last line of your response should be of the form \
Answer: $Answer (without quotes) where $Answer is the answer to the problem.

Find x.

Remember to put your answer on its own line after "Answer:"."""


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"question": "How many?", "answer": "Well, 9*2=<<9*2=18>>18.\n#### 1,018"}, "How many?", "1,018"),
        (
            {"problem": "Find x.", "level": "Level 5", "type": "Algebra", "solution": r"So \boxed{\frac{1}{2}}."},
            "Find x.",
            r"\frac{1}{2}",
        ),
        ({"problem": "Find x.", "solution": "long", "answer": "7", "subject": "Algebra"}, "Find x.", "7"),
        ({"problem": "Find x.", "answer": r"\sqrt2", "solution": r"\boxed{3}"}, "Find x.", r"\sqrt2"),
        (
            {"id": 60, "problem": "Every morning", "solution": "", "answer": "204", "year": "2024"},
            "Every morning",
            "204",
        ),
        ({"ID": "2024-I-1", "Problem": "Every morning", "Solution": "", "Answer": 204}, "Every morning", "204"),
        (
            {
                "data_source": "math_dapo",
                "prompt": [
                    {
                        "role": "user",
                        "content": DAPO_PROMPT,
                    }
                ],
                "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            },
            "Find x.",
            "34",
        ),
    ],
    ids=["gsm8k", "math", "math500", "deepscaler", "aime", "aime-capitals", "dapo"],
)
def test_each_format_is_known_by_its_fields(row: dict, question: str, answer: str):
    assert problem_of(row) == MathProblem(question, answer)


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x", "label": 1},
        {"problem": "x"},
        {"problem": "x", "solution": "no box"},
        {"question": "", "answer": "1"},
        {"question": "x", "answer": None},
        {"question": ["x"], "answer": "1"},
        {"prompt": [], "reward_model": {"ground_truth": "1"}},
        {"prompt": "x", "reward_model": {}},
    ],
)
def test_other_fields_are_named(row: dict, tmp_path: Path):
    good = {"question": "a", "answer": "1"}
    with pytest.raises(WorldError, match=f"row 2 has the fields {', '.join(row)}"):
        read(write(tmp_path / "x.jsonl", [good, row]))


@pytest.mark.parametrize("form", FORMATS)
def test_built_sets_are_read_back_and_play(form: str, tmp_path: Path):
    once, again = (build(tmp_path / name, 3, form, train=30, test=12) for name in ("once", "again"))
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]
    options = {"path": str(tmp_path / "once")}
    env = Math(**options).env()
    counts: dict[Split, int] = {"train": 30, "held_out": 12}
    for split, count in counts.items():
        source = Math(**options).tasks(split, 0)
        assert len(source) == count
        for index in range(count):
            task = source[index]
            assert task is not None
            env.reset(task, 0)
            assert env.step(Math().expert(env)).outcome["success"] == 1.0
    train, test = ({p.question for p in load(options["path"], split)} for split in ("train", "held_out"))
    assert not train & test
    first = [task_at(Math(**options).tasks("train", seed), 0).payload["question"] for seed in range(10)]
    assert len(set(first)) > 3


def task_at(source, index: int) -> Task:
    task = source[index]
    assert isinstance(task, Task)
    return task


def test_one_file_is_split_by_content_over_ten_orders(tmp_path: Path):
    rows = [{"question": f"What is {i} plus 1?", "answer": str(i + 1)} for i in range(300)]
    files = [tmp_path / "a.jsonl", tmp_path / "b.json"]
    write(files[0], rows)
    files[1].write_text(json.dumps([{**row, "question": row["question"].upper() + "  "} for row in rows[::-1]]))
    for data_seed in range(10):
        halves = [
            {
                " ".join(task_at(Math(path=str(path)).tasks(split, data_seed), i).payload["question"].lower().split())
                for i in range(30)
            }
            for path in files
            for split in ("train", "held_out")
        ]
        assert not (halves[0] | halves[2]) & (halves[1] | halves[3])
    assert len(load(str(files[0]), "train")) + len(load(str(files[0]), "held_out")) == 300


def test_training_problems_that_are_tested_are_left_out(tmp_path: Path):
    write(tmp_path / "train.jsonl", [{"question": q, "answer": "1"} for q in ("a", "b ", "C  d")])
    write(tmp_path / "test.jsonl", [{"question": q, "answer": "1"} for q in ("B", "c d")])
    assert [problem.question for problem in load(str(tmp_path), "train")] == ["a"]


def test_each_problem_is_there_once_and_none_with_two_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    answers = [("a", "1"), ("b", "2"), ("A ", "1"), ("c", r"\dfrac{1}{2}"), ("c", r"\frac12"), ("b", "3"), ("b", "2")]
    write(tmp_path / "train.jsonl", [{"question": question, "answer": answer} for question, answer in answers])
    write(tmp_path / "test.jsonl", [{"question": "d", "answer": "1"}])
    assert [problem.question for problem in load(str(tmp_path), "train")] == ["a", "c"]
    assert "1 problems whose rows have different answers are left out" in caplog.text
    write(tmp_path / "only.jsonl", [{"question": "a", "answer": answer} for answer in ("1", "2")])
    with pytest.raises(WorldError, match="holds no"):
        load(str(tmp_path / "only.jsonl"), split_of("a"))


def test_one_text_in_two_ways_of_writing_accents_is_one_problem(tmp_path: Path):
    write(
        tmp_path / "train.jsonl",
        [{"question": "Where is Jose\u0301?", "answer": "1"}, {"question": "b", "answer": "2"}],
    )
    write(tmp_path / "test.jsonl", [{"question": "Where is Jos\u00e9?", "answer": "1"}])
    assert [problem.question for problem in load(str(tmp_path), "train")] == ["b"]


def test_a_broken_line_is_named_and_a_mark_of_byte_order_is_none(tmp_path: Path):
    whole = "\ufeff" + "\n".join(json.dumps({"question": f"q{n}", "answer": n}) for n in range(3))
    (tmp_path / "whole.jsonl").write_text(whole)
    assert len(read(tmp_path / "whole.jsonl")) == 3
    (tmp_path / "broken.jsonl").write_text(whole + '\n\n{"question": "q",}\n')
    with pytest.raises(WorldError, match=r"broken.jsonl, line 5, is no JSON .*: correct that line"):
        read(tmp_path / "broken.jsonl")
    (tmp_path / "gap.jsonl").write_text('{"question": "q", "answer": NaN}')
    with pytest.raises(WorldError, match="row 1"):
        read(tmp_path / "gap.jsonl")


def test_compact_prompts_spell_what_files_say(tmp_path: Path):
    path = str(write(tmp_path / "a.jsonl", [{"question": "Is 3 < 4?", "answer": "yes"}] * 3))
    words = set(Math(path=path).vocabulary())
    task = task_at(Math(path=path).tasks(split_of("Is 3 < 4?"), 0), 0)
    observation = Math(path=path, answer="whole").env().reset(task, 0)
    [message] = Math().prompt(observation, [], "compact")
    assert message["content"] == "I s _ 3 _ < _ 4 ?" and set(message["content"].split()) <= words


@pytest.mark.parametrize(
    "name", ["nothing.jsonl", "notes.txt", "broken.jsonl", "list.jsonl", "half.jsonl", "empty", "one"]
)
def test_what_is_wrong_with_a_path_is_said(name: str, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "broken.jsonl").write_text('{"question": ')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    write(tmp_path / "half.jsonl", [{"question": "a", "answer": "1"}, {"question": "a\ud800", "answer": "1"}])
    (tmp_path / "empty").mkdir()
    write(tmp_path / "one.jsonl", [])
    (tmp_path / "one").mkdir()
    write(tmp_path / "one" / "train.jsonl", [{"question": "a", "answer": "1"}])
    said = {
        "nothing.jsonl": "does not exist: .*hf download .*data.math.build.*--config.env.options.path",
        "notes.txt": "data.math.build",
        "broken.jsonl": "cannot be read",
        "list.jsonl": "no object with fields",
        "half.jsonl": r"half.jsonl, row 2 has '\\ud800', half a surrogate pair",
        "empty": r"it has nothing",
        "one": r"no test.jsonl.*it has train.jsonl",
    }
    with pytest.raises(WorldError, match=said[name]):
        Math(path=str(tmp_path / name)).tasks("train", 0)


def test_gold_answers_equal_themselves():
    for answer in (r"\frac{3}{8}", "1,018", r"\sqrt2", "204"):
        assert equal(rf"\boxed{{{answer}}}", answer)


@pytest.mark.parametrize(
    ("answer", "gold", "question"),
    [
        ("2(x+1)", "2x+2", "Expand $2(x + 1)$."),
        (r"\frac{84}{144}", r"\frac{7}{12}", r"Simplify $\dfrac{84}{144}.$"),
        (r"\dfrac{5}{\sqrt{125}}", r"\frac{\sqrt5}{5}", r"Rationalize the denominator of \(\frac{5}{\sqrt{125}}\)."),
        (r"\sqrt{12}", r"2\sqrt3", r"Simplify \(\sqrt{12}\)"),
        ("0.375", r"\frac38", "Write 0.375 as a fraction."),
        (r"3 \cdot x^2", "3xx", r"What is $3\times x^{2}$ without powers?"),
    ],
)
def test_a_copy_of_what_is_asked_for_is_no_answer(answer: str, gold: str, question: str):
    env = Math().env()
    env.reset(Task("t", "math", 0, {"question": question, "answer": gold}), 0)
    assert copied(answer, gold, question) and env.step(rf"\boxed{{{answer}}}").outcome["success"] == 0.0
    assert not copied(gold, gold, question) and not copied(answer, answer, question)


@pytest.mark.parametrize(
    ("answer", "gold", "question"),
    [
        ("18", "18.0", "There are 18 eggs."),
        ("10.00", "10", "A ticket costs $10.00."),
        ("-1.5", "-1.50", "It falls to -1.5 degrees."),
        ("x=5", "5", "Show that x=5 solves it."),
        ("50%", "50", "After a discount of 50% ..."),
        (r"5.5\text{ cm}", "5.5", "A side of 5.5 cm"),
        (r"\$2.5", "2.50", "It costs $2.5 or more."),
        (r"\frac{3}{4}", "3/4", r"She ate $\frac34$ of it."),
        ("(B)", r"\text{(B)}", "(A) 3 (B) 4"),
        ("June 20", r"\text{June 20}", "From June 20 on"),
        ("x+1", "1+x", "Where is 2x+10?"),
        ("0.5", "1/2", "At most 0.55"),
        ("+" * 100_000, "5", "+" * 100_000),
    ],
)
def test_an_answer_may_stand_in_the_question(answer: str, gold: str, question: str):
    assert not copied(answer, gold, question)
