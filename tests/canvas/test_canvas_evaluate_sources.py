"""The twelve data sets in the forms of their publication, against an endpoint whose answers are known: hand counts."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowjax.canvas.evaluate import main

SITE = str(Path(np.__file__).parent.parent)  # holds numpy and scipy

# How every row of DS-1000 runs a program, here by the number of its cases.
EXECUTION = """def test_execution(solution: str):
    code = exec_context.replace("[insert]", solution)
    for i in range(CASES):
        test_input, expected_result = generate_test_case(i + 1)
        test_env = {"test_input": test_input}
        exec(code, test_env)
        assert exec_test(test_env["result"], expected_result)
"""
ARRAYS = '''
import numpy as np
import copy


def generate_test_case(test_case_id):
    def define_test_input(test_case_id):
        if test_case_id == 1:
            a = np.array([[1, 2], [3, 4]])
        elif test_case_id == 2:
            np.random.seed(42)
            a = np.random.rand(4, 3)
        return a

    def generate_ans(data):
        _a = data
        a = _a
        return a.max(axis=0)

    test_input = define_test_input(test_case_id)
    expected_result = generate_ans(copy.deepcopy(test_input))
    return test_input, expected_result


def exec_test(result, ans):
    np.testing.assert_array_equal(result, ans)
    return 1


exec_context = r"""
import numpy as np
a = test_input
[insert]
"""

''' + EXECUTION.replace("CASES", "2")
SPARSE = (
    '''
import numpy as np
import copy
import tokenize, io
from scipy import sparse


def generate_test_case(test_case_id):
    def define_test_input(test_case_id):
        if test_case_id == 1:
            np.random.seed(10)
            sa = sparse.random(10, 10, density=0.3, format="csr", random_state=42)
        return sa

    def generate_ans(data):
        return data.multiply(2).tocsr()

    test_input = define_test_input(test_case_id)
    expected_result = generate_ans(copy.deepcopy(test_input))
    return test_input, expected_result


def exec_test(result, ans):
    assert type(result) == sparse.csr_matrix
    assert len(sparse.find(result != ans)[0]) == 0
    return 1


exec_context = r"""
from scipy import sparse
def f(sA):
[insert]
sA = test_input
result = f(sA)
"""

'''
    + EXECUTION.replace("CASES", "1")
    + """

def test_string(solution: str):
    tokens = []
    for token in tokenize.tokenize(io.BytesIO(solution.encode("utf-8")).readline):
        tokens.append(token.string)
    assert "while" not in tokens and "for" not in tokens
"""
)
FRAMES = '''
import pandas as pd
import numpy as np
import copy


def generate_test_case(test_case_id):
    def generate_ans(data):
        df, order = data
        df = df.iloc[order]
        return df.assign(rank=df.groupby("kind")["size"].rank().astype("Int64"))

    def define_test_input(test_case_id):
        if test_case_id == 1:
            df = pd.DataFrame(
                {"kind": ["a", "b", "a"], "size": [2.5, np.nan, 1.0], "day": pd.date_range("2024-02-28", periods=3)},
                index=["x", "y", "z"],
            )
            order = np.random.permutation(len(df))
        return df, order

    test_input = define_test_input(test_case_id)
    expected_result = generate_ans(copy.deepcopy(test_input))
    return test_input, expected_result


def exec_test(result, ans):
    try:
        pd.testing.assert_frame_equal(result, ans)
        return 1
    except:
        return 0


exec_context = r"""
import pandas as pd
import numpy as np
df, order = test_input
[insert]
"""

''' + EXECUTION.replace("CASES", "1")
MODELS = "import xgboost\n" + ARRAYS
BEGUN = "Problem:\n{}\nA:\n<code>\nimport numpy as np\n</code>\nresult = ... # put solution here\nBEGIN SOLUTION\n"


def python(program: str) -> str:
    return f"Like this:\n```python\n{program}\n```"


@dataclass(frozen=True)
class Case:
    """A row as its data set has it, what the endpoint answers to it, and what that takes."""

    row: dict[str, Any]
    said: str
    prompt: int
    sampled: int


# What is right, and the means of tokens and cost (1 and 2 for a million tokens read and written), were counted by hand.
SETS: dict[str, tuple[list[Case], tuple[float, float, float]]] = {
    "gsm8k": (
        [
            Case(
                {"question": "Ann has 3 boxes of 4 eggs. Eggs?", "answer": "3*4=<<3*4=12>>12\n#### 12"}, "12", 100, 10
            ),
            Case({"question": "Bo drives 1,200 km in 3 days. Km a day?", "answer": "#### 400"}, "1200", 200, 30),
        ],
        (0.5, 170.0, 190e-6),
    ),
    "math": (
        [
            Case(
                {
                    "problem": "Simplify $\\frac{2}{4}$.",
                    "level": "Level 1",
                    "type": "Prealgebra",
                    "solution": "We have $\\boxed{\\frac{1}{2}}$.",
                },
                "0.5",
                50,
                5,
            )
        ],
        (1.0, 55.0, 60e-6),
    ),
    "hotpotqa": (
        [
            Case(
                {
                    "id": "5a8b",
                    "question": "Which of the two rivers, Oste or Wumme, is longer?",
                    "answer": "the Oste",
                    "type": "comparison",
                    "level": "hard",
                    "supporting_facts": {"title": ["Oste", "Wumme"], "sent_id": [0, 0]},
                    "context": {"title": ["Oste", "Wumme"], "sentences": [["It has 153 km."], ["It has 118 km."]]},
                },
                "Oste",
                300,
                3,
            )
        ],
        (1.0, 303.0, 306e-6),
    ),
    "squad_v2": (
        [
            Case(
                {
                    "id": "56be",
                    "title": "Oste",
                    "context": "The Oste flows into the Elbe.",
                    "question": "Where does the Oste end?",
                    "answers": {"text": ["the Elbe", "Elbe"], "answer_start": [20, 24]},
                },
                "The Elbe",
                80,
                2,
            ),
            Case(
                {
                    "id": "5ad3",
                    "title": "Oste",
                    "context": "The Oste flows into the Elbe.",
                    "question": "Where does the Wumme end?",
                    "answers": {"text": [], "answer_start": []},
                },
                "unanswerable",
                80,
                4,
            ),
        ],
        (1.0, 83.0, 86e-6),
    ),
    "triviaqa": (
        [
            Case(
                {
                    "question": "Which metal is liquid in a warm room?",
                    "question_id": "tc_2",
                    "answer": {
                        "aliases": ["Mercury", "Quicksilver", "Hg"],
                        "normalized_aliases": ["mercury"],
                        "value": "Mercury",
                    },
                },
                "quicksilver",
                20,
                1,
            )
        ],
        (1.0, 21.0, 22e-6),
    ),
    "nq": (
        [
            Case({"question": "who wrote the book of the oste", "answer": ["Ann Lee", "A. Lee"]}, "Bo Lee", 20, 2),
            Case({"question": "when was the oste bridge built", "answer": ["1909"]}, "1909", 20, 2),
            Case({"question": "who built the oste bridge", "answer": ["Louis Pinette"]}, "nobody knows", 23, 2),
        ],
        (1 / 3, 23.0, 25e-6),
    ),
    "mathqa": (
        [
            Case(
                {
                    "Problem": "6 workers need 8 days. How many days do 4 need?",
                    "Rationale": "6 * 8 / 4 = 12",
                    "options": "a ) 10 , b ) 11 , c ) 12 , d ) 13 , e ) 14",
                    "correct": "c",
                    "annotated_formula": "divide(multiply(6, 8), 4)",
                    "linear_formula": "multiply(n0,n1)|divide(#0,n2)|",
                    "category": "physics",
                },
                "C",
                40,
                1,
            )
        ],
        (1.0, 41.0, 42e-6),
    ),
    "aime2025": (
        [Case({"id": "0", "problem": "Find the sum of all n > 9 with ...", "answer": "070"}, "70", 60, 900)],
        (1.0, 960.0, 1860e-6),
    ),
    "mbpp": (
        [
            Case(
                {
                    "task_id": 602,
                    "text": "Write a function to double a number.",
                    "code": "def double(x):\r\n  return 2 * x",
                    "test_list": ["assert double(2) == 4", "assert double(5) == 10"],
                    "test_setup_code": "",
                    "challenge_test_list": [],
                },
                python("def double(x):\n    return x * x"),
                70,
                20,
            )
        ],
        (0.0, 90.0, 110e-6),
    ),
    "humaneval": (
        [
            Case(
                {
                    "task_id": "HumanEval/164",
                    "prompt": 'def third(text: str) -> str:\n    """ The third letter. """\n',
                    "canonical_solution": "    return text[2]\n",
                    "test": "def check(candidate):\n    assert candidate('abc') == 'c'\n",
                    "entry_point": "third",
                },
                python("def third(text: str) -> str:\n    return text[2]"),
                70,
                30,
            )
        ],
        (1.0, 100.0, 130e-6),
    ),
    "apps": (
        [
            Case(
                {
                    "problem_id": 5000,
                    "question": "Read two numbers and print their sum.",
                    "solutions": '["print(sum(map(int, input().split())))"]',
                    "input_output": '{"inputs": ["1 2\\n", "3 4\\n"], "outputs": ["3\\n", "7\\n"]}',
                    "difficulty": "introductory",
                    "url": "",
                    "starter_code": "",
                },
                python("a, b = map(int, input().split())\nprint(a + b)"),
                90,
                25,
            )
        ],
        (1.0, 115.0, 140e-6),
    ),
    "ds1000": (
        [
            Case(
                {
                    "prompt": BEGUN.format("The largest of each column of a."),
                    "reference_code": "result = a.max(axis=0)",
                    "metadata": {"problem_id": 291, "library": "Numpy", "test_case_cnt": 2},
                    "code_context": ARRAYS,
                },
                python("result = np.max(a, axis=0)"),
                400,
                10,
            ),
            Case(
                {
                    "prompt": BEGUN.format("The smallest of each column, no: the largest."),
                    "reference_code": "result = a.max(axis=0)",
                    "metadata": {"problem_id": 292, "library": "Numpy", "test_case_cnt": 2},
                    "code_context": ARRAYS,
                },
                python("result = a.min(axis=0)"),
                400,
                12,
            ),
            Case(
                {
                    "prompt": BEGUN.format("Double the sparse sA."),
                    "reference_code": "    return sA.multiply(2).tocsr()",
                    "metadata": {"problem_id": 711, "library": "Scipy", "test_case_cnt": 1},
                    "code_context": SPARSE,
                },
                python("    doubled = sA + sA\n    return doubled"),
                400,
                20,
            ),
            Case(
                {
                    "prompt": BEGUN.format("Double the sparse matrix sA."),
                    "reference_code": "    return sA.multiply(2).tocsr()",
                    "metadata": {"problem_id": 712, "library": "Scipy", "test_case_cnt": 1},
                    "code_context": SPARSE,
                },
                python("    doubled = sA.copy()\n    for i in range(10):\n        doubled[i] *= 2\n    return doubled"),
                400,
                30,
            ),
            Case(
                {
                    "prompt": BEGUN.format("The rows of df in this order, with their rank of size among their kind."),
                    "reference_code": "result = df.iloc[order]",
                    "metadata": {"problem_id": 3, "library": "Pandas", "test_case_cnt": 1},
                    "code_context": FRAMES,
                },
                python(
                    'df = df.iloc[order]\nresult = df.assign(rank=df.groupby("kind")["size"].rank().astype("Int64"))'
                ),
                400,
                24,
            ),
            Case(
                {
                    "prompt": BEGUN.format(
                        "The rows of df in the order of the list, with their rank of size among their kind."
                    ),
                    "reference_code": "result = df.iloc[order]",
                    "metadata": {"problem_id": 4, "library": "Pandas", "test_case_cnt": 1},
                    "code_context": FRAMES,
                },
                python('result = df.assign(rank=df.groupby("kind")["size"].rank().astype("Int64"))["size"]'),
                400,
                12,
            ),
        ],
        (0.5, 418.0, 436e-6),
    ),
}
PROBLEMS, RIGHT = 21, 14


@dataclass
class Endpoint:
    """Answers to the problem that a request holds; the number of requests."""

    url: str = ""
    asked: int = 0
    cases: list[Case] = field(default_factory=lambda: [case for cases, _ in SETS.values() for case in cases])

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        text = body["messages"][-1]["content"]
        names = ("question", "problem", "Problem", "text", "prompt")
        case = next(
            case for case in self.cases if next(case.row[name] for name in names if name in case.row).strip() in text
        )
        # The answer of DS-1000 is a part of a program, and the request says so.
        assert ("goes on where the program in the problem leaves off" in text) == ("code_context" in case.row)
        said = case.said if "```" in case.said else f"Answer: {case.said}"
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"prompt_tokens": case.prompt, "completion_tokens": case.sampled}}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = json.dumps(found.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def command(tmp_path: Path, endpoint: Endpoint) -> list[str]:
    (tmp_path / "sets").mkdir()
    for name, (cases, _) in SETS.items():
        (tmp_path / f"sets/{name}.jsonl").write_text("".join(f"{json.dumps(case.row)}\n" for case in cases))
    told = {"kind": "openai", "base_url": endpoint.url, "model": "m", "prices": {"prompt": 1.0, "sampled": 2.0}}
    (tmp_path / "backends.json").write_text(json.dumps({"main": told}))
    where = [f"--data={tmp_path / 'sets'}", f"--backends={tmp_path / 'backends.json'}", f"--out={tmp_path / 'out'}"]
    return ["--workflow=Custom", *where]


def test_all_twelve_sets_have_the_accuracy_tokens_and_cost_of_a_hand_count(tmp_path, endpoint, command, capsys):
    assert main([*command, f"--packages={SITE}"]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())["workflow"]
    found = {name: (of["accuracy"], of["tokens"], of["cost"]) for name, of in results["sources"].items()}
    assert set(found) == set(SETS) and len(SETS) == 12
    rows = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    for name, (cases, counted) in SETS.items():
        wrong = [(row["question"], row["answer"], row["remark"]) for row in rows if row["source"] == name]
        assert found[name] == pytest.approx(counted), wrong
        assert results["sources"][name]["problems"] == len(cases)
        assert results["sources"][name]["calls"] == 1.0
    assert (results["problems"], results["accuracy"]) == (PROBLEMS, pytest.approx(RIGHT / PROBLEMS))
    assert endpoint.asked == PROBLEMS and not results["left_out"]
    assert main([*command, f"--packages={SITE}"]) == 0 and endpoint.asked == PROBLEMS
    assert "| workflow | ds1000 | 50.0 % [" in capsys.readouterr().out


def test_rows_whose_packages_are_not_there_are_left_out_and_counted(tmp_path, endpoint, command, capsys):
    row = SETS["ds1000"][0][0].row
    models = row | {"code_context": MODELS, "metadata": {"library": "Sklearn"}}
    (tmp_path / "sets/ds1000.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in (row, models)))
    arguments = [command[0], f"--data={tmp_path / 'sets/ds1000.jsonl'}", *command[2:]]
    assert main(arguments) == 2
    assert "ds1000.jsonl holds no problems" in capsys.readouterr().err
    assert main([*arguments, f"--packages={SITE}"]) == 0
    reason = "ds1000: needs xgboost in the sandbox: give packages, folders that hold it"
    assert json.loads((tmp_path / "out/results.json").read_text())["workflow"]["left_out"] == {reason: 1}
    assert f"Rows left out: 1 of {reason}." in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--packages=nowhere"])
    assert "--packages: nowhere is no folder" in capsys.readouterr().err
