"""What backends, policies and readers are shown, kept word for word in `tests/canvas/golden/`.

python -m tests.canvas.golden        # writes the files anew: look at the difference before it is committed
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from flowjax.canvas import Problem, actions, load_operators, mermaid, parse, run, svg
from flowjax.canvas.backends import Completion, Request, Usage
from flowjax.envs import Past, Style
from flowjax.envs.canvas import Canvas
from flowjax.published.canvas import PublishedCanvas, parse_leniently
from tests.canvas.shown_text import text_of

FOLDER = Path(__file__).parent / "golden"
PROBLEMS = (
    Problem("What is 6 times 7?", "math"),
    Problem("Who wrote Faust?", "qa", context="Faust is a play by Goethe."),
    Problem("Which is largest?", "choice", options={"A": "one", "B": "two", "C": "three"}),
    Problem("Add two numbers.", "code", entry_point="add", public_tests=("assert add(1, 2) == 3",)),
    Problem("Say something."),
)
WORKFLOWS = (
    'Plan -> Decompose -> [Custom, AnswerGenerate{"Be brief."}, Custom] -> ScEnsemble -> Format',
    "Plan -> [CustomCodeGenerate, Programmer] -> Aggregate -> (Test ? done : Revise) -> Format",
    '[Custom{"One."}, Custom{"Two."}, Custom{"Three."}] -> MdEnsemble -> (Verify -> Review -> Revise) * 2',
)
EPISODES = (
    ("arithmetic", ("add Plan", "add [Custom, AnswerGenerate] -> ScEnsemble", "delete n9", "add Verify ? done : Revise",
                    "modify n1 Decompose", "nonsense", "prompt n3 Check the units.", "finish")),
    ("list", ("add (Custom -> Review) * 2", "modify n1 * 3", "add Format into n1 at 0", "finish 42")),
    ("program", ("add Programmer", "add Test", "add Custom into n1.true", "delete n2", "finish")),
    ("words", ("add ScEnsemble", "delete n1", "add AnswerGenerate -> Format", "finish")),
)  # fmt: skip
REPLIES = (
    "<action>add</action><operator>Custom</operator>",
    "I think.</think> so <action>add</action><operator>Custom</operator><backend>small</backend><into>n4.false</into>"
    "<position>0</position><prompt>a &lt; b &amp; c</prompt>",
    "<action>add</action><structure>parallel</structure><operators>Custom, Programmer</operators><prompt>x</prompt>"
    "<prompt>y</prompt>",
    "<action>add</action><structure>parallel</structure><operators>Custom, Plan</operators><prompt>x</prompt>",
    "<action>add</action><structure>conditional</structure><condition>Test</condition><true>done</true>"
    "<false>Revise</false>",
    "<action>add</action><structure>loop</structure><operators>Review, Revise</operators><count>2</count>",
    "<action>add</action><structure>loop</structure><operators>Revise</operators>",
    "<action>add</action><structure>loop</structure><operators>Revise</operators><count>77</count>",
    "<action>add</action><workflow>[Custom, Custom] -> ScEnsemble</workflow><into>n4.false</into>",
    "<action>add</action><workflow>[Custom, Custom -> ScEnsemble</workflow>",
    "<action>add</action><structure>sequence</structure><operators>Plan, Custom</operators>",
    "<action>add</action>",
    "<action>delete</action><target>n3</target>",
    "<action>delete</action><target>n3</target><target>n4</target>",
    "<action>modify</action><target>n2</target><operator>Programmer</operator><prompt>go</prompt>",
    "<action>modify</action><target>n2</target><backend>small</backend>",
    "<action>modify</action><target>n2</target><count>4</count>",
    "<action>modify</action><target>n2</target>",
    "<action>set_prompt</action><target>n2</target><prompt>Name the units.</prompt>",
    "<action>set_prompt</action><prompt>Name the units.</prompt><target>n2</target>",
    "<action>finish</action>",
    "<action>finish</action><answer>x = 3</answer>",
    "<action>finish</action><action>finish</action>",
    "<think>never closed <action>finish</action>",
    "```\n<ACTION>Add</ACTION><operator>custm</operator>\n```",
    "[action]add[/action][operator]programmer[/operator]",
    "<action>add<operator>Custom",
    "<action>conditional</action><condition>Verify</condition><false>revise</false><true>none</true>",
    "I am ready to finish",
    "Programmer",
    "plan -> [custom, custom] -> scensemble",
    "Custom or Plan?",
    "",
    "add [ Custom , Custom ] into n3 at 0",
    "add Custom into n4.true",
    'add Custom{"at 3"} @small',
    "modify n2 Programmer",
    "modify n2 @small",
    "modify n5 * 3",
    "modify n5 ? 3",
    "prompt n2 Name the units.",
    "prompt n2",
    "delete",
    "finish 42",
    "ad Custom",
    "add Custom\nfinish",
)


class Recording:
    """Answers everything readably, and keeps what it was asked."""

    identity = "golden"

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def complete(self, request: Request) -> Completion:
        self.asked.append("\n".join(f"[{message['role']}] {message['content']}" for message in request.messages))
        fields = (request.schema or {}).get("properties", {})
        if "passed" in fields:
            text = json.dumps({"feedback": "the sum is wrong", "passed": len(self.asked) % 2 == 0})
        elif "choice" in fields:
            text = json.dumps({"choice": "A"})
        elif "subproblems" in fields:
            text = json.dumps({"subproblems": ["first", "second"]})
        elif "```python" in request.messages[0]["content"]:
            number = len(self.asked)
            text = f"```python\ndef add(a, b):\n    return a + b + {number}\nprint({number})\n```"
        else:
            text = f"Because of that.\nAnswer: {len(self.asked)}"
        return Completion(text, Usage(1, 1, 1))


async def _asked() -> dict[str, list[str]]:
    found = {}
    for problem in PROBLEMS:
        for workflow in WORKFLOWS:
            backend = Recording()
            await run(
                parse(workflow),
                problem,
                operators=load_operators(entry_points=False),
                backends={"golden": backend},
                default_backend="golden",
                max_concurrent=1,
            )
            found[f"{problem.kind}: {workflow}"] = backend.asked
    return found


def _played() -> list[Any]:
    found = []
    for kind, said in EPISODES:
        env = PublishedCanvas(kinds=(kind,), turns=10, max_calls=60, lenient=False).env()
        task = Canvas(kinds=(kind,)).tasks("train", 0)[0]
        assert task is not None
        observation, past = env.reset(task, 0), []
        shown: list[Any] = [PublishedCanvas().prompt(observation, past, "instruct")[0]["content"]]
        for turn, action in enumerate(said, 1):
            past.append(Past(turn, observation.view, action))
            step = env.step(action)
            observation = step.observation
            compact = PublishedCanvas().prompt(observation, past, "compact")[0]["content"]
            styles: tuple[Style, Style] = ("instruct", "compact")
            follow = [PublishedCanvas().follow_up(observation, style)[0]["content"] for style in styles]
            shown.append(
                [action, text_of(env, observation), compact, *follow, step.valid, step.reward, observation.state_key]
            )
        shown.append(PublishedCanvas().prompt(observation, past, "instruct")[0]["content"])
        found.append(shown)
    return found


def _read() -> dict[str, list[str]]:
    names, found = load_operators(entry_points=False), {}
    for text in REPLIES:
        lenient = parse_leniently(text, names)
        results: list[Any] = [actions.parse(text), lenient, actions.parse_compact(text)]
        found[text] = [repr(result) for result in results]
        for result in results:
            if not isinstance(result, actions.Unreadable):
                found[text] += [actions.show(result), actions.show_compact(result, spaced=True), repr(result.repairs)]
    return found


def _drawn() -> list[str]:
    return [draw(parse(workflow)) for workflow in WORKFLOWS for draw in (svg, mermaid)]


def collect() -> dict[str, Any]:
    """File's name -> what belongs into it."""
    return {"asked": asyncio.run(_asked()), "played": _played(), "read": _read(), "drawn": _drawn()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, content in collect().items():
        (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
