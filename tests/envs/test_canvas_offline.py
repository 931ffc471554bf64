"""The simulated executor: better workflows cause better answers; generated data files; what it cannot do."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from data.canvas.build import build, row
from flowjax.canvas.backends import BackendError, Request
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.run import run
from flowjax.canvas.text import parse
from flowjax.canvas.values import Problem
from flowjax.envs.canvas import Canvas, exercises
from flowjax.envs.canvas.offline import FAULTS, SimulatedSolver, program
from flowjax.envs.canvas.problem_files import load
from tests.canvas.shown_text import read, text_of

OPERATORS = load_operators(entry_points=False)
EXERCISES = 150


def share_right(source: str, kinds: tuple[str, ...] = ("words",), seed: int = 0, skill: float = 0.0) -> float:
    """Of a workflow's answers to exercises."""
    workflow = parse(source)

    async def main() -> float:
        right = 0
        for index in range(EXERCISES):
            made = exercises.generate(np.random.default_rng([5, index]), kinds, "train")
            told = exercises.problem(exercises.payload(made))
            backends = {"offline": SimulatedSolver(seed, skill)}
            played = await run(workflow, told, operators=OPERATORS, backends=backends, default_backend="offline")
            right += played.answer == made.answer
        return right / EXERCISES

    return asyncio.run(main())


def test_a_plan_helps_with_word_problems_if_it_comes_first():
    alone = share_right("AnswerGenerate")
    assert share_right("Plan -> AnswerGenerate") > alone + 0.12
    assert share_right("AnswerGenerate -> Plan") == alone


def test_revising_by_a_checks_feedback_helps_and_blind_repetition_does_not():
    alone = share_right("AnswerGenerate")
    assert share_right("AnswerGenerate -> (Verify ? done : Revise)") > alone + 0.12
    assert abs(share_right("AnswerGenerate -> Revise -> Revise") - alone) < 0.12


def test_branches_err_independently_so_that_a_vote_helps():
    alone = share_right("AnswerGenerate", ("list",))
    assert share_right("[AnswerGenerate, AnswerGenerate, AnswerGenerate] -> ScEnsemble", ("list",)) > alone + 0.06


def test_the_instruction_that_suits_helps_and_other_words_are_no_new_throw():
    alone = share_right("AnswerGenerate")
    told = f'AnswerGenerate{{"{exercises.PHRASES["stepwise"]}"}}'
    assert share_right(told) > alone + 0.1
    assert share_right(f'AnswerGenerate{{"{exercises.PHRASES["sorted"]}"}}') < alone + 0.05
    assert share_right('AnswerGenerate{"Please, please be right."}') == alone
    assert share_right("AnswerGenerate", skill=0.3) > alone + 0.15
    planned = "Go through the text in its order and keep every number."  # words of a good plan, and nobody's plan
    for before in ("Plan", "Decompose"):
        assert share_right(f'{before} -> AnswerGenerate{{"{planned}"}}') == share_right(f"{before} -> AnswerGenerate")


def test_what_is_written_is_paid_for():
    """Reasoning too, which a brief answer leaves out."""
    solver = SimulatedSolver(reasoning_tokens=60, prices={"prompt": 1.0, "sampled": 4.0})

    def cost(workflow: str) -> float:
        problem = Problem("Compute 2 + 3.", "math")
        backends = {"small": solver}
        made = run(parse(workflow), problem, operators=OPERATORS, backends=backends, default_backend="small")
        return asyncio.run(made).usage.cost

    usual = cost("AnswerGenerate")
    assert usual > 60 * 4e-6
    assert cost(f'AnswerGenerate{{"{exercises.PHRASES["brief"]}"}}') < usual - 60 * 4e-6 + 1e-5
    assert cost(f"[{', '.join(['AnswerGenerate'] * 30)}] -> Aggregate") > 30 * usual


def test_formatting_helps_where_answers_are_wordy():
    assert share_right("Custom -> Format", ("list",)) > share_right("Custom", ("list",)) + 0.15
    assert share_right("Format -> Custom", ("list",)) == 0.0  # there is nothing to format yet


def test_equal_requests_have_equal_answers_and_other_seeds_other_ones():
    assert share_right("Custom") == share_right("Custom")
    assert len({share_right("[Custom, AnswerGenerate] -> Aggregate", seed=seed) for seed in range(4)}) > 1


def test_it_knows_generated_exercises_only():
    request = Request(
        [{"role": "user", "content": "?"}], tags={"operator": "Custom", "input.problem": "Who wrote Faust?"}
    )
    with pytest.raises(BackendError, match="generated exercises only"):
        asyncio.run(SimulatedSolver().complete(request))
    backends = {"offline": SimulatedSolver()}
    problem = Problem("Who wrote Faust?", "qa")
    played = run(parse("Custom"), problem, operators=OPERATORS, backends=backends, default_backend="offline")
    assert asyncio.run(played).status == "error"


def test_its_right_programs_are_right_and_its_wrong_ones_mostly_wrong():
    wrong = 0
    for index in range(100):
        made = exercises.generate(np.random.default_rng([6, index]), ["program"], "train")
        reading = exercises.read(made.text)
        assert reading is not None
        assert passes(program(made.text, reading), made)
        wrong += sum(not passes(program(made.text, reading, fault), made) for fault in range(FAULTS))
    assert wrong > 0.85 * 100 * FAULTS


@pytest.mark.parametrize("kind", ["arithmetic", "words", "list"])
def test_its_programs_of_questions_print_the_answer(kind, capsys):
    for index in range(50):
        made = exercises.generate(np.random.default_rng([6, index]), [kind], "train")
        reading = exercises.read(made.text)
        assert reading is not None
        exec(program(made.text, reading), {})
        assert capsys.readouterr().out.strip() == made.answer


def passes(source: str, exercise: exercises.Exercise) -> bool:
    names: dict = {}
    exec(source, names)
    try:
        for test in (*exercise.public_tests, *exercise.hidden_tests):
            exec(test, names)
    except (AssertionError, NameError):
        return False
    return True


def test_built_files_are_equal_disjoint_and_played(tmp_path: Path):
    train, test = build(tmp_path / "a", 3, train=40, test=10)
    again = build(tmp_path / "b", 3, train=40, test=10)
    assert [path.read_bytes() for path in (train, test)] == [path.read_bytes() for path in again]
    told = [{json.loads(line)["problem"] for line in path.read_text().splitlines()} for path in (train, test)]
    assert (len(told[0]), len(told[1])) == (40, 10) and not told[0] & told[1]
    assert not load(train).left_out
    folder = str(tmp_path / "a")
    source = Canvas(path=folder).tasks("held_out", 0)
    assert len(source) == 10 and len(Canvas(path=folder).tasks("train", 0)) == 40
    env = Canvas(path=folder).env()
    for index in range(10):
        task = source[index]
        assert task is not None
        assert read(text_of(env, env.reset(task, 0))).problem.partition("\n\n")[0] in told[1]
    env.step("add AnswerGenerate")
    assert env.step("finish").terminal


def test_the_shipped_files_are_what_the_builder_makes(tmp_path: Path):
    shipped = Path(__file__).parents[2] / "data" / "canvas"
    for path in build(tmp_path, 0, train=400, test=100):
        assert path.read_bytes() == (shipped / path.name).read_bytes()


def test_a_single_file_is_split_by_content(tmp_path: Path):
    train, _ = build(tmp_path, 0, train=60, test=1)
    rows = [len(Canvas(path=str(train)).tasks(split, 0)) for split in ("train",)]
    assert rows == [60]  # every one is a training problem by its words


def test_no_problem_is_trained_on_that_is_held_out_in_other_letters_or_blanks(tmp_path: Path):
    rows = {"test": ["Who won?"], "train": ["who  won? ", "Who lost?"]}
    for name, questions in rows.items():
        lines = [json.dumps({"question": text, "answer": "Ann", "problem_type": "qa"}) for text in questions]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    assert len(Canvas(path=str(tmp_path)).tasks("train", 0)) == 1


def test_a_question_in_other_letters_or_blanks_is_on_the_same_side_of_a_single_file(tmp_path: Path):
    texts = [f"Who won {form} {number}?" for number in range(40) for form in ("game", " GAME ")]
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answer": "Ann", "source": "nq"}) + "\n" for text in texts))
    sides = [Canvas(path=str(file)).tasks(split, 0) for split in ("train", "held_out")]
    rows = [{task.payload["row"] // 2 for task in side if task} for side in sides]
    assert all(rows) and not rows[0] & rows[1]


def test_one_question_about_two_passages_is_two_states(tmp_path: Path):
    lines = [
        json.dumps({"question": "Who won?", "context": context, "answer": "Ann", "problem_type": "qa"})
        for context in ("Ann beat Bob.", "Bob lost against Ann.")
    ]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    world = Canvas(path=str(tmp_path))
    env, tasks = world.env(), world.tasks("held_out", 0)
    found = [task for index in range(2) if (task := tasks[index]) is not None]
    assert len({env.reset(task, 0).state_key for task in found}) == 2


def test_an_answer_that_does_not_follow_is_refused():
    with pytest.raises(ValueError, match="does not follow"):
        row(exercises.Exercise("arithmetic", "math", "Compute 2 + 2.", "5", 2), 1)
