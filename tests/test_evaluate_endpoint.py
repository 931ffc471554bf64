"""Evaluations against an OpenAI-style endpoint: played once, gone on with, and stopped in words when it is away."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flowjax.canvas.backends import Completion, Request, Usage
from flowjax.evaluate import main
from flowjax.grading.math import equal
from flowjax.monitor.held_out import read_held_out
from flowjax.monitor.provenance import read_starts
from flowjax.report.page import make_page
from flowjax.rollout.client import SamplingOptions
from flowjax.rollout.episode import EndpointAgent, EpisodeFile

RECIPE = """
from ml_collections import ConfigDict
from flowjax.config import default_config

def get_config():
    config = default_config()
    config.name = "sums"
    config.env.name = "flowjax.envs.math:Math"
    config.env.options = ConfigDict({"answer": "last_number", "digits": 4})
    config.env.max_turns = 1
    config.model.path = "nowhere"
    config.reward.components = ConfigDict({"success": 1.0})
    config.eval.tasks, config.eval.samples = 12, 2
    config.engine.request_timeout_s = 2.0
    return config
"""
Answer = Callable[[Mapping[str, Any]], tuple[int, Any]]


def said(text: str, **extra: Any) -> tuple[int, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 2}, **extra}


def adds(body: Mapping[str, Any]) -> tuple[int, Any]:
    """The right sum where the seed is even, one too many where it is odd."""
    question = body["messages"][-1]["content"]
    if "=" not in question:
        return said("yes")
    return said(str(eval(question.partition("=")[0]) + body["seed"] % 2))


@dataclass
class Endpoint:
    """An endpoint that answers by a function of the request."""

    answer: Answer = adds
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    url: str = ""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.bodies.append(body)
            found.keys.add(self.headers.get("Authorization", ""))
            status, answer = found.answer(body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def command(tmp_path: Path, endpoint: Endpoint) -> list[str]:
    (tmp_path / "recipe.py").write_text(RECIPE)
    where = [f"--endpoint={endpoint.url}", "--model_name=adder", f"--out={tmp_path / 'out'}"]
    return [f"--config={tmp_path / 'recipe.py'}", *where]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "held_out" / "adder.jsonl").read_text().splitlines()]


def test_an_endpoint_is_evaluated_and_a_second_start_asks_nothing_again(
    tmp_path, endpoint, command, capsys, monkeypatch
):
    monkeypatch.setenv("ADDER_KEY", "secret")
    out = tmp_path / "[lr=2]"  # which is no markup
    command[-1] = f"--out={out}"
    command += ["--api_key_env=ADDER_KEY", "--price_prompt=1", "--price_sampled=10"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert endpoint.keys == {"Bearer secret"} and "secret" not in printed and "[lr=2]" in "".join(printed.split())
    results = json.loads((out / "results.json").read_text())
    asked = [body for body in endpoint.bodies if body["messages"][0]["content"] != "Say yes."]
    assert len(asked) == 24 and len({body["seed"] for body in asked}) == 24
    right = [body["seed"] % 2 == 0 for body in asked]
    assert results["metrics"]["success"]["mean"] == pytest.approx(sum(right) / 24)
    assert results["metrics"]["reward"]["mean"] == results["metrics"]["success"]["mean"]
    assert set(results["pass_at"]) == {"1", "2"} == set(results["majority_at"])
    assert results["tokens"] == {"prompt": 240, "sampled": 48} and results["cost"] == pytest.approx((240 + 480) / 1e6)
    assert results["played"]["endpoint"] == endpoint.url and not results["unfinished"]
    page = make_page([out])
    assert '"step":0,"success_rate":' in page and '"label":"held out, adder"' in page
    assert "| held-out success |" in (out / "results.md").read_text()
    [start] = read_starts(out)
    assert start["command"][2:] == ["flowjax.evaluate", *command] and start["exit_status"] == 0
    assert start["code"]["commit"] and start["versions"]["jax"] and start["machine"]["cpus"] and start["ended_s"]
    before = (out / "held_out" / "adder.jsonl").read_bytes()
    assert main(command) == 0 and len(endpoint.bodies) == 25
    assert len(read_starts(out)) == 1  # which has played nothing
    assert (out / "held_out" / "adder.jsonl").read_bytes() == before
    assert main([*command, "--config.eval.samples=3"]) == 0  # twelve more, and the first request
    assert len(endpoint.bodies) == 25 + 13 and len(lines(out)) == 36


def test_two_evaluations_with_one_seed_are_equal_in_every_line(tmp_path, command):
    assert main(command) == 0
    again = [each for each in command if not each.startswith("--out")] + [f"--out={tmp_path / 'again'}"]
    assert main(again) == 0
    assert lines(tmp_path / "out") == lines(tmp_path / "again")
    assert main([*again[:-1], f"--out={tmp_path / 'other'}", "--config.eval.seed=1"]) == 0
    assert [line["answer"] for line in lines(tmp_path / "other")] != [
        line["answer"] for line in lines(tmp_path / "out")
    ]


def test_an_endpoint_that_goes_away_stops_the_evaluation_and_the_same_command_goes_on(
    tmp_path, endpoint, command, capsys
):
    def five_then_nothing(body: Mapping[str, Any]) -> tuple[int, Any]:
        return adds(body) if len(endpoint.bodies) <= 6 else (503, {"error": {"message": "too busy"}})

    endpoint.answer = five_then_nothing
    assert main(command) == 1
    assert "nothing has answered for 2 s, the last because" in (text := capsys.readouterr().err)
    assert "the same command goes on from here" in text and "Traceback" not in text
    endpoint.answer, asked = adds, len(endpoint.bodies)
    assert main(command) == 0
    assert len(endpoint.bodies) - asked == 1 + 24 - 5 and len(lines(tmp_path / "out")) == 24


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda body: (401, {"error": {"message": "no such key"}}), "HTTP 401: no such key"),
        (lambda body: (404, {"error": {"message": "no model adder"}}), "HTTP 404: no model adder"),
        (lambda body: (200, b"<html>hello</html>"), "not a chat completion: <html>hello"),
        (lambda body: (200, {"choices": []}), "not a chat completion"),
    ],
)
def test_an_endpoint_that_does_not_answer_is_refused_before_anything_is_played(
    tmp_path, endpoint, command, capsys, answer, message
):
    endpoint.answer = answer
    assert main(command) == 2
    text = capsys.readouterr().err
    assert message in text and f"--endpoint={endpoint.url} does not answer" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "body"), [("eval.top_k=20", {"top_k": 20}), ("rollout.stop=('##',)", {"stop": ["##"]})]
)
def test_what_is_sent_to_no_endpoint_is_given_as_a_field_of_its_own(tmp_path, endpoint, command, capsys, field, body):
    assert main([*command, f"--config.{field}"]) == 2
    text, asked = capsys.readouterr().err, f"--endpoint_body={json.dumps(body)}"
    assert f"config.{field.partition('=')[0]} is" in text and f"'{json.dumps(body)}'" in text and not endpoint.bodies
    assert main([*command, f"--config.{field}", asked, "--config.eval.tasks=1"]) == 0
    assert all(sent.items() >= body.items() for sent in endpoint.bodies)
    played = json.loads((tmp_path / "out" / "results.json").read_text())["played"]
    assert (played["top_k"], played["top_p"]) == (body.get("top_k", 0), 1.0)
    assert (played["max_turns"], played["sources"]) == (1, {})


def test_a_folder_that_cannot_be_made_is_said_in_words(tmp_path, command, capsys):
    (tmp_path / "file").touch()
    assert main([*command[:-1], f"--out={tmp_path / 'file' / 'out'}"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("evaluate: [Errno") and f"{tmp_path / 'file'}" in text and "--out" in text


def test_a_request_that_is_refused_costs_its_episode_alone(tmp_path, endpoint, command, capsys):
    def refuses_sevens(body: Mapping[str, Any]) -> tuple[int, Any]:
        return (400, {"error": {"message": "too long"}}) if "7" in body["messages"][-1]["content"] else adds(body)

    endpoint.answer = refuses_sevens
    assert main(command) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert 0 < results["unfinished"] == 24 - results["episodes"]
    assert "came to nothing and are left out" in capsys.readouterr().out
    endpoint.answer = adds
    assert main(command) == 0  # they are tried again, the others are not
    assert json.loads((tmp_path / "out" / "results.json").read_text())["unfinished"] == 0


def test_replies_to_attempts_that_failed_are_counted_and_paid_for(tmp_path, endpoint, command, capsys):
    """Some episodes fail after their reply, each time that they are played."""
    workflow = "tests.rollout.unruly_workflows:every_fourth_lacks_its_outcome"
    command += [f"--config.workflow={workflow}", "--price_prompt=1", "--price_sampled=10"]
    for _ in range(2):  # the second start tries the same ones again
        assert main(command) == 0
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        asked = sum(body["messages"][0]["content"] != "Say yes." for body in endpoint.bodies)
        lost = asked - results["episodes"]
        assert results["unfinished"] and lost > results["unfinished"]
        assert results["tokens"] == {"prompt": 10 * asked, "sampled": 2 * asked}
        assert results["tokens_lost"] == {"prompt": 10 * lost, "sampled": 2 * lost}
        assert results["cost"] == pytest.approx(30 * asked / 1e6)
        said = f"{10 * asked:,} read, {2 * asked:,} sampled ({10 * lost:,} and {2 * lost:,} of them by attempts"
        assert said in (tmp_path / "out" / "results.md").read_text()


TOO_LONG = [
    "This model's maximum context length is 64 tokens. However, you requested 99 tokens",  # OpenAI, vLLM
    "You passed 99 input tokens. However, the model's context length is only 64 tokens",  # vLLM
    "The decoder prompt (length 99) is longer than the maximum model length of 64",  # vLLM
    "The input (99 tokens) is longer than the model's context length (64 tokens).",  # SGLang
    "prompt is too long: 99 tokens > 64 maximum",  # Anthropic
    "The input token count (99) exceeds the maximum number of tokens allowed (64).",  # Gemini
    "Input validation error: `inputs` must have less than 64 tokens. Given: 99",  # TGI
]


@pytest.mark.parametrize("text", TOO_LONG)
def test_a_conversation_beyond_the_models_context_is_no_success(tmp_path, endpoint, command, text):
    """It counted as a fault of the world: it was played three times, and left out of the mean."""

    def holds_little(body: Mapping[str, Any]) -> tuple[int, Any]:
        return (400, {"error": {"message": text}}) if body["seed"] % 2 else adds(body)

    endpoint.answer = holds_little
    assert main([*command, "--config.eval.tasks=4"]) == 0
    refused = sum(body["seed"] % 2 for body in endpoint.bodies if "=" in body["messages"][-1]["content"])
    assert 0 < refused < 8, "as many requests as episodes"
    assert [line["status"] for line in lines(tmp_path / "out")].count("truncated") == refused
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["episodes"] == 8 and results["metrics"]["success"]["mean"] == 1 - refused / 8
    said = f"8 episodes; {refused} ended at a prompt over the model's context"
    assert said in (tmp_path / "out" / "results.md").read_text()


def test_another_refusal_says_nothing_about_the_model(tmp_path, endpoint, command, capsys):
    """It must not pass for a failure to solve: an endpoint may refuse whatever is sent."""
    answers = iter([adds])
    endpoint.answer = lambda body: next(answers, lambda body: (400, {"error": {"message": "no such field"}}))(body)
    assert main([*command, "--config.eval.tasks=2"]) == 2
    assert "no episode of this evaluation came to its end" in capsys.readouterr().err


def test_calls_of_one_agent_that_are_under_way_at_once_have_seeds_of_their_own():
    class Holds:
        identity, seeds = "", []

        async def complete(self, request: Request) -> Completion:
            self.seeds.append(request.seed)
            await asyncio.sleep(0)
            return Completion("", Usage(1, 1))

    async def ask() -> None:
        agent = EndpointAgent(Holds(), "agent", SamplingOptions(1.0, 8), lambda number: 100 + number)
        for _ in range(2):
            await asyncio.gather(*(agent.act([{"role": "user", "content": "?"}]) for _ in range(2)))

    asyncio.run(ask())
    assert Holds.seeds == [100, 101, 102, 103]


def test_half_a_character_is_no_text_and_no_fault_of_the_world():
    """An endpoint's JSON can spell half a surrogate pair, which could not be sent on to the environment."""

    class Halves:
        identity, conversations = "", []

        async def complete(self, request: Request) -> Completion:
            self.conversations.append(request.messages)
            return Completion("seven \ud83d", Usage(1, 2))

    async def ask() -> None:
        agent = EndpointAgent(Halves(), "agent", SamplingOptions(1.0, 8), lambda number: number)
        first = await agent.act([{"role": "user", "content": "?"}])
        assert first.text == "seven ?"
        await agent.act([{"role": "user", "content": "again"}], after=first)
        assert Halves.conversations[1][1]["content"] == "seven ?"

    asyncio.run(ask())


def test_a_slow_answer_is_waited_for_and_a_record_that_was_cut_is_played_again(tmp_path, endpoint, command):
    def slow(body: Mapping[str, Any]) -> tuple[int, Any]:
        time.sleep(0.05)
        return adds(body)

    endpoint.answer = slow
    assert main(command) == 0
    file = tmp_path / "out" / "episodes.msgpack"
    file.write_bytes(file.read_bytes()[:-3])
    asked = len(endpoint.bodies)
    assert main(command) == 0
    assert len(endpoint.bodies) == asked + 2 and len(read_held_out(tmp_path / "out")) == 24


def test_looking_at_episodes_takes_none_from_the_process_that_adds_to_them(tmp_path, command):
    assert main(command) == 0
    file = tmp_path / "out" / "episodes.msgpack"
    file.write_bytes(adding := file.read_bytes()[:-3])
    assert len(EpisodeFile(file).read()) == 23 and file.read_bytes() == adding
    assert len(EpisodeFile(file).resume()) == 23 and len(file.read_bytes()) < len(adding)


def test_answers_are_graded_by_the_world(tmp_path, command):
    assert main(command) == 0
    for line in lines(tmp_path / "out"):
        gold = json.loads(line["task"])[2]["answer"]
        assert line["success"] == float(equal(line["answer"], gold))
