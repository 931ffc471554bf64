"""Problems with their answers: generated arithmetic, and files in the formats of published data sets.

A problem's split is a hash of its words; a folder has a file for each split. Formats are recognised by their fields:

    GSM8K        question, answer (its last line is "#### 18")
    MATH         problem, solution (its last box is the answer); in MATH-500 also answer
    DeepScaleR   problem, answer, solution
    AIME         problem or question, answer; names in any case
    DAPO         prompt (messages), reward_model.ground_truth

JSON lines (`.jsonl`), a JSON list (`.json`) and parquet are read.
"""

import functools
import json
import logging
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from flowjax.envs import NotReady, Split, WorldError, check_characters
from flowjax.fields import Interval
from flowjax.grading.answers import last_boxed
from flowjax.grading.math import without_unit
from flowjax.records import state_key

HELD_OUT_ONE_IN = 8  # problems, by content
OPERATORS = "+-*/"
MAX_COPIED = 200  # characters of an answer that is looked for in its question
MAX_ATTEMPTS = 10_000  # to draw a problem of one split
SUFFIXES = (".jsonl", ".json", ".parquet")
_PLAIN = re.compile(r"(?:[a-zA-Z]=)?[-+−]?[\d,]*\.?\d+")
# The text of DAPO's prompts before and after a problem.
DAPO_BEFORE = "is the answer to the problem."
DAPO_AFTER = "Remember to put your answer on its own line after"


@dataclass(frozen=True, slots=True)
class MathProblem:
    """A question and its answer. `expression` is the expert's input to the calculator, "" where there is none."""

    question: str
    answer: str
    expression: str = ""


def split_of(question: str) -> Split:
    """The split of a problem, by a hash of its words alone, without case and white space."""
    held_out = state_key("math", _content(question)) % HELD_OUT_ONE_IN == 0
    return "held_out" if held_out else "train"


def copied(answer: str, gold: str, question: str) -> bool:
    """True for an answer that is copied from the question, while the gold answer has another form.

    A grader finds a copy of `2(x+1)` equal to the answer of `Expand 2(x+1)`: a policy would learn to copy. Plain words
    are never copies, nor is a number where the gold answer is a number.
    """
    if len(answer) > MAX_COPIED:
        return False
    said, meant = (_spelled(text) for text in without_unit(answer, gold))
    if said == meant or not re.search(r"[-+*/^=.]|frac|sqrt", said):
        return False
    if _PLAIN.fullmatch(said) and _PLAIN.fullmatch(meant):
        return False
    there = r"\s*".join(map(re.escape, said))
    return bool(re.search(rf"(?<![\w.]){there}(?!\w|\.\d)", _written(question)))


def _spelled(answer: str) -> str:
    """An answer in one spelling, without white space and what may stand at its end."""
    return re.sub(r"\s", "", _written(answer)).rstrip(".%")


def _written(text: str) -> str:
    """A text in one spelling: without optional parts of LaTeX formulas, fractions and products written alike."""
    text = re.sub(r"\\(?:left|right|text(?:bf|rm)?|math(?:bf|rm))(?![a-z])|\\[()\[\],;:!]|\$", " ", text)
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", re.sub(r"\\(?:cdot|times)(?![a-z])", "*", text))
    text = re.sub(r"\\frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", r" \1\2/\3\4 ", text)
    return re.sub(r"[{}\\]", "", text.replace("**", "^"))


def _content(question: str) -> str:
    return " ".join(unicodedata.normalize("NFC", question).casefold().split())


@dataclass(frozen=True)
class Arithmetic:
    """Options of generated problems: `terms` numbers of 1 to `digits` digits, joined by `operators`.

    With `fewest_terms` their number varies from this one to `terms`. Divisions have no remainder. The usual precedence
    of * and / holds.
    """

    digits: Annotated[int, Interval(at_least=1, at_most=12)] = 2
    terms: Annotated[int, Interval(at_least=2, at_most=8)] = 2
    operators: str = "+"
    fewest_terms: Annotated[int, Interval(at_least=2, at_most=8, also=(0,))] = 0  # 0: as many as `terms`

    def __post_init__(self):
        if not self.operators or set(self.operators) - set(OPERATORS):
            raise WorldError(f"env.options.operators is {self.operators!r}: give some of {OPERATORS}")
        if self.fewest_terms > self.terms:
            raise WorldError(
                f"env.options.fewest_terms is {self.fewest_terms}: it must be at most env.options.terms, {self.terms}"
            )


def generate(rng: np.random.Generator, options: Arithmetic, split: Split) -> MathProblem:
    """A problem of one split.

    Raises:
        WorldError: none was found in `MAX_ATTEMPTS` attempts.
    """
    for _ in range(MAX_ATTEMPTS):
        count = int(rng.integers(options.fewest_terms, options.terms + 1)) if options.fewest_terms else options.terms
        lengths = rng.integers(1, options.digits + 1, size=count)
        numbers = [int(rng.integers(10 ** (int(n) - 1) if n > 1 else 0, 10 ** int(n))) for n in lengths]
        signs = [options.operators[i] for i in rng.integers(len(options.operators), size=count - 1)]
        expression = "".join(f"{sign}{number}" for sign, number in zip(["", *signs], numbers, strict=True))
        value = _evaluate(numbers, signs)
        if value is not None and split_of(question := f"{expression}=?") == split:
            return MathProblem(question, str(value), expression)
    raise WorldError(f"no problem in {MAX_ATTEMPTS} attempts with {options}: raise digits or terms")


def worked_out(expression: str) -> str:
    """The steps of a generated expression, one operation at a time: `=46+5=51` for `12+34+5`."""
    numbers = [int(number) for number in re.findall(r"\d+", expression)]
    signs = re.findall(r"[-+*/]", expression)
    lines = ""
    while signs:
        first = next((place for place, sign in enumerate(signs) if sign in "*/"), 0)
        numbers[first : first + 2] = [_evaluate(numbers[first : first + 2], [signs.pop(first)]) or 0]
        lines += "".join(f"{sign}{number}" for sign, number in zip(["=", *signs], numbers, strict=True))
    return lines


def _evaluate(numbers: list[int], signs: list[str]) -> int | None:
    """The value with the usual precedence; None where a division leaves a remainder."""
    products = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            products[-1] *= number
        elif sign == "/":
            if number == 0 or products[-1] % number:
                return None
            products[-1] //= number
        else:
            products.append(-number if sign == "-" else number)
    return sum(products)


@functools.lru_cache(maxsize=4)
def load(path: str, split: Split) -> tuple[MathProblem, ...]:
    """Problems of one split, each once: a file is split by content, a folder has a train and a test file.

    In a folder, training problems that are also in the test file are left out.

    Raises:
        WorldError: there is no such file, or it cannot be read, or it holds no problems of this split.
    """
    place = Path(path)
    if place.is_dir():
        held_out = _read_named(place, "test")
        if split == "held_out":
            problems = held_out
        else:
            known = {_content(problem.question) for problem in held_out}
            problems = [problem for problem in _read_named(place, "train") if _content(problem.question) not in known]
    else:
        problems = [problem for problem in read(place) if split_of(problem.question) == split]
    problems = _each_once(path, problems)
    if not problems:
        raise WorldError(f"env.options path={path!r} holds no {split} problems: give a larger file, or a folder of two")
    return tuple(problems)


def _each_once(path: str, problems: Iterable[MathProblem]) -> list[MathProblem]:
    """The problems without repetitions (DAPO's file has each a hundred times), and without those whose rows have
    different answers: of these nobody knows which one is right."""
    found: dict[str, MathProblem] = {}
    contradicted: set[str] = set()
    for problem in problems:
        content = _content(problem.question)
        if _spelled(found.setdefault(content, problem).answer) != _spelled(problem.answer):
            contradicted.add(content)
    if contradicted:
        logging.warning("%s: %d problems whose rows have different answers are left out", path, len(contradicted))
    return [problem for content, problem in found.items() if content not in contradicted]


def _read_named(folder: Path, name: str) -> list[MathProblem]:
    for suffix in SUFFIXES:
        if (folder / f"{name}{suffix}").is_file():
            return read(folder / f"{name}{suffix}")
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing"
    raise WorldError(
        f"env.options path={str(folder)!r} has no {name}.jsonl, {name}.json or {name}.parquet (it has {found}): "
        "put a train and a test file there, or name one file, which is split by content"
    )


def read(path: Path) -> list[MathProblem]:
    """All problems of a file.

    Raises:
        NotReady: there is no such file, or the package that reads it is not installed.
        WorldError: the file cannot be read, or a row is in no known format.
    """
    if path.suffix not in SUFFIXES or not path.is_file():
        found = f"is no {', '.join(SUFFIXES)} file" if path.exists() else "does not exist"
        raise NotReady(
            f"env.options path={str(path)!r} {found}: fetch data/deepscaler.json with hf download "
            "agentica-org/DeepScaleR-Preview-Dataset deepscaler.json --repo-type dataset --local-dir data, or make a "
            "small set with python -m data.math.build --out=FOLDER, and name file or folder by "
            "--config.env.options.path (docs/worlds/math.md has other formats)"
        )
    problems = []
    for number, row in enumerate(_rows(path), 1):
        if not isinstance(row, Mapping):
            raise WorldError(f"{path}, row {number} is no object with fields: give one problem a row")
        problem = problem_of(row)
        if problem is None:
            raise WorldError(
                f"{path}, row {number} has the fields {', '.join(map(str, row))} in no format that is known, or no "
                "answer in them: give question and answer (GSM8K, AIME), problem and solution (MATH), problem and "
                "answer (DeepScaleR, AIME), or prompt and reward_model (DAPO)"
            )
        check_characters(f"{path}, row {number}", problem.question, problem.answer)
        problems.append(problem)
    return problems


def _rows(path: Path) -> Iterable[Any]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            return parquet.read_table(path).to_pylist()
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            rows = json.loads(text)
            return rows if isinstance(rows, list) else [rows]
        return [_parsed(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    except ImportError as error:
        raise NotReady(f'{path} needs pyarrow to be read: pip install -e ".[math]"') from error
    except (OSError, ValueError) as error:
        raise WorldError(f"{path} cannot be read ({error}): download it again") from error


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise WorldError(f"{path}, line {number}, is no JSON ({error}): correct that line") from error


def _bare_box(solution: str) -> str | None:
    r"""The answer after the last `\boxed` without braces, as in two rows of MATH."""
    found = re.findall(r"\\boxed\s+([^\s${}]+)", solution)
    return found[-1].rstrip(".,") if found else None


def problem_of(row: Mapping[str, Any]) -> MathProblem | None:
    """The problem of a row in one of the known formats; None for other fields, or where the answer is missing."""
    fields = {str(name).lower(): value for name, value in row.items()}
    if isinstance(fields.get("reward_model"), Mapping) and "prompt" in fields:
        question, answer = _dapo_question(fields["prompt"]), fields["reward_model"].get("ground_truth")
    else:
        question = fields.get("problem", fields.get("question"))
        answer = fields.get("answer")
        if answer is None and isinstance(fields.get("solution"), str):
            answer = last_boxed(fields["solution"]) or _bare_box(fields["solution"])
        elif isinstance(answer, str) and "####" in answer:
            answer = answer.rpartition("####")[2]
    if not isinstance(question, str) or isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return None
    if isinstance(answer, float) and not math.isfinite(answer):
        return None
    question, answer = question.strip(), str(answer).strip()
    return MathProblem(question, answer) if question and answer else None


def _dapo_question(prompt: Any) -> str | None:
    if isinstance(prompt, list):
        said = [turn["content"] for turn in prompt if isinstance(turn, Mapping) and turn.get("role") == "user"]
        prompt = said[-1] if said else None
    if not isinstance(prompt, str):
        return None
    _, found, rest = prompt.partition(DAPO_BEFORE)
    return (rest if found else prompt).partition(DAPO_AFTER)[0].strip()
