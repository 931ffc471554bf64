"""Search: the retrieval server over real sockets, its three request formats, and environments that depend on it."""

import asyncio
import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from flowjax.envs import EnvDied, WorldError
from flowjax.envs.pool import EnvPool
from flowjax.envs.search import Search
from flowjax.envs.search.corpus import encyclopedia
from flowjax.envs.search.index import BM25Index, Scored, local
from flowjax.envs.search.protocol import RemoteRetriever, RetrievalError
from flowjax.envs.search.server import Batcher, RetrievalService, check_exposure, load, read_arguments

DOCUMENTS = 200
OPTIONS = {"documents": DOCUMENTS, "topk": 2}
NAMES = encyclopedia(DOCUMENTS, 0).names
ADDRESS = "https://encyclopedia.invalid/wiki/"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "flowjax.envs.search.server", f"--documents={DOCUMENTS}", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()
        assert process.wait(10) == 0


def expected(query: str, count: int) -> list[dict[str, str]]:
    found = local("", DOCUMENTS, 0).search(query, count)
    return [{"id": passage.id, "contents": passage.contents, "url": passage.url} for passage in found]


def ask(url: str, requests: list[tuple[str, Any]]) -> list[tuple[int, Any]]:
    """All requests at once: status and JSON of each."""

    async def one(session: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with session.post(url + path, data=data) as response:
            return response.status, await response.json()

    async def everything() -> list[tuple[int, Any]]:
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(one(session, path, body) for path, body in requests))

    return asyncio.run(everything())


def test_one_query_as_rewardflow_asks(url: str):
    [(status, answer)] = ask(url, [("/retrieve", {"query": NAMES[3], "topk": 3, "return_scores": True})])
    assert status == 200
    [found] = answer["result"]
    assert [item["document"] for item in found] == expected(NAMES[3], 3)
    scores = [item["score"] for item in found]
    assert scores == sorted(scores, reverse=True)


def test_many_queries_as_asearcher_asks(url: str):
    queries = [*NAMES[:5], "nothing at all like it"]
    body = {"queries": queries, "topk": 2, "return_scores": False}
    [(_, bare), (_, scored)] = ask(url, [("/retrieve", body), ("/retrieve", {**body, "return_scores": True})])
    assert bare["result"] == [expected(query, 2) for query in queries]
    assert [[item["document"] for item in found] for found in scored["result"]] == bare["result"]


def test_pages_as_asearcher_opens_them(url: str):
    [(status, answer)] = ask(url, [("/access", {"urls": [ADDRESS + NAMES[5], "http://nowhere"]})])
    page, missing = answer["result"]
    assert (status, missing) == (200, None)
    assert page["contents"].startswith(f'"{NAMES[5]}"\n')


def test_passages_as_astraflow_asks(url: str):
    body = {"query": NAMES[7], "n_docs": 2, "backend": "faiss", "nprobe": 128, "min_words": 20}
    [(_, answer), (_, short)] = ask(url, [("/search", body), ("/search", {**body, "min_words": 1000})])
    [passages], [scores] = answer["results"]["passages"], answer["results"]["scores"]
    assert [passage["text"] for passage in passages] == [found["contents"] for found in expected(NAMES[7], 2)]
    assert len(scores) == len(passages)
    assert set(passages[0]) == {"text", "source", "passage_id", "filename"}
    assert short["results"] == {"passages": [[]], "scores": [[]]}


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/retrieve", b"{", 400, "no JSON"),
        ("/retrieve", b"\xff\xfe", 400, "no JSON"),
        ("/retrieve", b"[" * 100_000, 400, "no JSON"),
        ("/retrieve", [1], 400, "list, not an object"),
        ("/retrieve", {}, 400, "either"),
        ("/retrieve", {"query": "a", "queries": ["a"]}, 400, "either"),
        ("/retrieve", {"query": ""}, 400, "not empty"),
        ("/retrieve", {"query": "x" * 4001}, 400, "4001 characters"),
        ("/retrieve", {"queries": []}, 400, "1 to 1024"),
        ("/retrieve", {"queries": ["a", 3]}, 400, "queries[1]"),
        ("/retrieve", {"queries": ["a"] * 1025}, 400, "1 to 1024"),
        ("/retrieve", {"query": "a", "topk": 0}, 400, "topk"),
        ("/retrieve", {"query": "a", "topk": "3"}, 400, "topk"),
        ("/retrieve", {"queries": ["a"], "return_scores": 1}, 400, "return_scores"),
        ("/retrieve", b" " * (1 << 21), 413, "over 1048576 bytes"),
        ("/access", {"urls": ["u"] * 65}, 400, "1 to 64"),
        ("/search", {"n_docs": 3}, 400, "query"),
        ("/search", {"query": "a", "min_words": -1}, 400, "min_words"),
        ("/nowhere", {}, 404, "Not Found"),
    ],
)
def test_wrong_requests_are_refused_with_a_reason(url: str, path: str, body: Any, status: int, reason: str):
    [(told, answer)] = ask(url, [(path, body)])
    assert told == status
    assert reason in answer["error"]


def test_requests_at_once_share_batches_and_get_their_own_answers(url: str):
    requests = [("/retrieve", {"query": name, "topk": 1 + row % 4}) for row, name in enumerate(NAMES)]
    before = health(url)
    answers = ask(url, requests)
    after = health(url)
    for (_, body), (_, answer) in zip(requests, answers, strict=True):
        assert [item["document"] for item in answer["result"][0]] == expected(body["query"], body["topk"])
    assert after["queries"] - before["queries"] == len(requests)
    assert after["batches"] - before["batches"] < len(requests) / 2


def health(url: str) -> dict[str, Any]:
    async def get() -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(url + "/health") as response:
            return await response.json()

    return asyncio.run(get())


class SlowIndex:
    """Answers when told to."""

    kind = "slow"

    def __init__(self):
        self.go = threading.Event()
        self.batches: list[int] = []

    def search(self, queries: Any, count: int) -> list[Scored]:
        self.batches.append(len(queries))
        self.go.wait(10)
        if "bad" in queries:
            raise RuntimeError("the index fails")
        return [[(0, 1.0)] * count for _ in queries]


def service(index: Any, *, key: str = "", max_waiting: int = 100) -> RetrievalService:
    documents = encyclopedia(DOCUMENTS, 0).documents()
    return RetrievalService(documents, index, Batcher(index, max_batch=8, window_s=0.0, max_waiting=max_waiting), key)


def test_a_full_queue_is_refused_and_a_failing_index_fails_its_batch_only():
    async def scenario() -> tuple[list[int], list[int]]:
        index = SlowIndex()
        async with TestClient(TestServer(service(index, max_waiting=4).app())) as client:

            async def post(query: str) -> int:
                async with client.post("/retrieve", json={"query": query}) as response:
                    return response.status

            first = asyncio.create_task(post("bad"))
            while not index.batches:
                await asyncio.sleep(0.001)
            rest = [asyncio.create_task(post("good")) for _ in range(7)]
            while sum(task.done() for task in rest) < 3:  # refused, which is when the four others wait
                await asyncio.sleep(0.001)
            index.go.set()
            return [await first, *[await task for task in rest]], index.batches

    statuses, batches = asyncio.run(scenario())
    assert statuses[0] == 500
    assert sorted(statuses[1:]) == [200] * 4 + [503] * 3
    assert batches == [1, 4]


def test_requests_are_answered_together_and_each_as_it_asked():
    class Numbers:
        kind = "numbers"

        def search(self, queries: Any, count: int) -> list[Scored]:
            return [[(int(query) + place, 0.0) for place in range(count)] for query in queries]

    async def scenario() -> tuple[list[list[Scored]], int, int]:
        batcher: Any = Batcher(Numbers(), max_batch=8, window_s=0.0, max_waiting=100)  # type: ignore[arg-type]
        asked = [asyncio.create_task(batcher.search(*one)) for one in ((["10", "20"], 1), (["30"], 3))]
        await asyncio.sleep(0)  # both wait before the first batch is taken
        answering = asyncio.create_task(batcher.run())
        found = await asyncio.wait_for(asyncio.gather(*asked), 30)
        answering.cancel()
        batcher.close()
        return found, batcher.batches, batcher.queries

    found, batches, queries = asyncio.run(scenario())
    assert [[[row for row, _ in scored] for scored in answer] for answer in found] == [[[10], [20]], [[30, 31, 32]]]
    assert (batches, queries) == (1, 3)


def test_a_key_is_asked_for():
    async def scenario() -> list[int]:
        index = BM25Index([document.contents for document in encyclopedia(DOCUMENTS, 0).documents()])
        async with TestClient(TestServer(service(index, key="secret").app())) as client:
            statuses = [(await client.get("/health")).status]
            for headers in ({}, {"X-API-Key": "sécret"}, {"X-API-Key": "secret"}):
                for path, body in (("/search", {"query": "a"}), ("/retrieve", {"query": "a"})):
                    statuses.append((await client.post(path, json=body, headers=headers)).status)
            reader, writer = await asyncio.open_connection(client.host, client.port)
            writer.write(b"POST /search HTTP/1.1\r\nHost: a\r\nX-API-Key: \xff\r\nContent-Length: 0\r\n\r\n")
            statuses.append(int((await reader.readline()).split()[1]))
            writer.close()
            return statuses

    assert asyncio.run(scenario()) == [200, 401, 401, 401, 401, 200, 200, 401]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "either --corpus=FILE or --documents=N"),
        (["--corpus=/nowhere/corpus.jsonl"], "/nowhere/corpus.jsonl is missing.*data.search.build"),
        (["--documents=200", "--index=dense"], "needs --encoder"),
        (["--documents=200", "--index=dense", "--encoder=no:no"], "cannot be imported"),
    ],
)
def test_a_start_that_cannot_work_says_why(arguments: list[str], named: str):
    with pytest.raises(WorldError, match=named):
        load(read_arguments(arguments))


@pytest.mark.parametrize(
    "flag",
    ["--port=99999", "--port=-1", "--documents=-5", "--corpus_seed=-1", "--max_batch=0"]
    + [f"--batch_window_ms={value}" for value in ("-1", "nan", "inf")],
)
def test_numbers_out_of_range_are_refused_as_flags(flag: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as refused:
        read_arguments(["--documents=200", flag])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and "give a number from" in said, said
    assert flag.partition("=")[0] in said and flag.partition("=")[2] in said, said


@pytest.mark.parametrize("vectors", [np.zeros(200, np.float32), np.zeros((200, 4), "U1"), None])
def test_vectors_of_another_form_are_refused_before_the_corpus_is_read(vectors: np.ndarray | None, tmp_path: Path):
    file, folder = tmp_path / "vectors.npy", tmp_path / "made.index"
    file.write_bytes(b"nothing of the kind") if vectors is None else np.save(file, vectors)
    flags = ["--index=dense", "--encoder=no:no", "--compress=SQ8", f"--index_path={folder}", f"--vectors={file}"]
    with pytest.raises(WorldError, match=r"--vectors=.*vectors\.npy (holds|cannot be read).*: give a \.npy file with"):
        load(read_arguments(["--corpus=/nowhere/corpus.jsonl", *flags]))


def test_other_machines_are_served_with_a_key_only():
    for host in ("127.0.0.1", "localhost", "::1"):
        check_exposure(host, "", False)
    check_exposure("0.0.0.0", "secret", False)
    check_exposure("0.0.0.0", "", True)
    with pytest.raises(WorldError, match="FLOWJAX_SEARCH_KEY"):
        check_exposure("0.0.0.0", "", False)


# environments that ask a server


@pytest.mark.parametrize("wire", ["query", "queries", "search"])
def test_an_episode_is_the_same_with_a_server(url: str, wire: str):
    here, there = Search(**OPTIONS).env(), Search(**OPTIONS, retriever=f"{url},{url}", wire=wire).env()
    source = Search(**OPTIONS).tasks("held_out", 0)
    for index in range(5):
        task = source[index]
        assert task is not None
        assert here.reset(task, 0) == there.reset(task, 0)
        while not (step := here.step(Search().expert(here))).terminal:
            assert there.step(f"search[{here.queries[-1]}]") == step


def test_a_page_is_the_same_with_a_server(url: str):
    options = {**OPTIONS, "protocol": "asearcher", "access": True}
    envs = [Search(**options).env(), Search(**options, retriever=url).env()]
    task = Search(**options).tasks("train", 0)[0]
    assert task is not None
    for env in envs:
        env.reset(task, 0)
    for action in (f"access[{ADDRESS}{NAMES[9]}]", "access[nowhere]"):
        first, second = (env.step(action) for env in envs)
        assert first == second


def test_servers_that_a_run_cannot_use_are_named_before_it(url: str, tmp_path: Path):
    dead = closed_port()
    assert list(Search(**OPTIONS).obstacles()) == list(Search(**OPTIONS, retriever=url).obstacles()) == []
    assert list(Search(path=str(tmp_path), retriever=url).obstacles()) == [], "what it should hold is not known"
    [silent, other] = Search(documents=300, retriever=[dead, url]).obstacles()
    assert silent.startswith(f"env.options retriever: {dead} gives no passages (ConnectionRefusedError")
    assert other.startswith(f"env.options retriever: {url} does not find '{encyclopedia(300, 0).names[0]}'")
    assert "--documents=300 --corpus_seed=0" in other
    [seed] = Search(**OPTIONS, corpus_seed=1, retriever=url).obstacles()
    assert "--documents=200 --corpus_seed=1" in seed


def test_a_server_may_rank_other_documents_of_the_encyclopedia_first():
    passages = [{"id": "9", "contents": encyclopedia(DOCUMENTS, 0).document(9).contents}]
    handler = type("Handler", (Flaky,), {"failures": [], "nothing": {"result": [passages]}})
    with serving(handler) as address:
        assert list(Search(**OPTIONS, retriever=address).obstacles()) == []
        assert "does not find" in next(Search(**OPTIONS, corpus_seed=1, retriever=address).obstacles())


def test_the_expert_does_not_go_on_from_a_document_that_was_not_found(url: str):
    world = Search(documents=300, retriever=url)
    env, task = world.env(), world.tasks("held_out", 0)[0]
    assert task is not None
    env.reset(task, 0)
    for _ in range(3):
        assert not env.step(world.expert(env)).terminal
    assert not env.titles & set(task.payload["chain"])


class Flaky(http.server.BaseHTTPRequestHandler):
    """Fails as often as asked, then answers nothing found."""

    failures: list[int]
    nothing: Mapping[str, Any] = MappingProxyType({"result": [[]]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status = self.failures.pop() if self.failures else 200
        body = json.dumps(dict(self.nothing)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("failures", "fails"), [([500, 503], False), ([429], False), ([404], True)])
def test_failures_of_the_server_are_tried_again_and_refusals_are_not(failures: list[int], fails: bool):
    handler = type("Handler", (Flaky,), {"failures": failures})
    with serving(handler) as address:
        retriever = RemoteRetriever([address], wire="query", timeout_s=60)
        if fails:
            with pytest.raises(RetrievalError, match="status 404"):
                retriever.search("x", 1)
        else:
            assert retriever.search("x", 1) == []


@pytest.mark.parametrize("passages", [[], [[]]])
def test_a_server_that_finds_nothing_may_give_no_list_at_all(passages: list[Any]):
    handler = type("Handler", (Flaky,), {"failures": [], "nothing": {"results": {"passages": passages}}})
    with serving(handler) as address:
        assert RemoteRetriever([address], wire="search", timeout_s=60).search("x", 1) == []


class Dripping(Flaky):
    """Answers some bytes at a time, ten a second."""

    def do_POST(self) -> None:
        body = json.dumps({"result": [[]]}).rjust(600).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # nobody listens any more
            for byte in body:
                self.wfile.write(bytes([byte]))
                time.sleep(0.1)


class DrippingHead(Dripping):
    """The same, of the head of its answer."""

    def end_headers(self) -> None:
        self.flush_headers()
        with contextlib.suppress(OSError):
            for byte in b"X-Slow: ".ljust(600, b"a"):
                self.wfile.write(bytes([byte]))
                time.sleep(0.1)


@pytest.mark.parametrize("dripping", [Dripping, DrippingHead])
@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
def test_a_server_that_never_stops_answering_ends_the_search_in_time(dripping: type[Dripping], protocol: str):
    handler = type("Handler", (dripping,), {"protocol_version": protocol})
    before = time.monotonic()
    with serving(handler) as address, pytest.raises(RetrievalError, match=r"within 0\.5 s.*TimeoutError"):
        RemoteRetriever([address], wire="query", timeout_s=0.5).search("x", 1)
    assert time.monotonic() - before < 30, "without a limit of the whole it takes a minute"


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
def test_passages_without_an_id_are_named_by_their_contents(protocol: str):
    passages = [{"id": None, "contents": "a"}, {"contents": "b"}, {"id": 0, "contents": "c"}]
    handler = type(
        "Handler", (Flaky,), {"failures": [], "nothing": {"result": [passages]}, "protocol_version": protocol}
    )
    with serving(handler) as address:
        retriever = RemoteRetriever([address], wire="query", timeout_s=60)
        first, second, third = retriever.search("x", 3)
        assert len({first.id, second.id, "None"}) == 3 and third.id == "0"
        assert retriever.search("x", 3) == [first, second, third]


@pytest.mark.parametrize(
    "answer",
    [
        {"result": None},
        {"result": [["a passage"]]},
        {"result": [[{"document": "a passage"}]]},
        {"result": [[{"id": "1"}]]},
        {"result": [[{"id": "1", "contents": None}]]},
        {"result": [[{"contents": 5}]]},
    ],
)
def test_an_answer_without_passages_is_named(answer: Mapping[str, Any]):
    with serving(type("Handler", (Flaky,), {"failures": [], "nothing": answer})) as address:
        retriever = RemoteRetriever([address], wire="query", timeout_s=60)
        with pytest.raises(RetrievalError, match=rf"{address}/retrieve answered b.*Error: "):
            retriever.search("x", 1)
        with pytest.raises(RetrievalError, match=rf"{address}/access answered b.*Error: "):
            retriever.access("x")


def test_pages_without_an_id_are_named_by_their_address():
    answer = {"result": [{"id": None, "contents": "x"}]}
    with serving(type("Handler", (Flaky,), {"failures": [], "nothing": answer})) as address:
        retriever = RemoteRetriever([address], wire="queries", timeout_s=60)
        found = [retriever.access(url) for url in ("http://a", "http://b")]
        assert [page and page.id for page in found] == ["http://a", "http://b"]


def test_an_answer_nested_too_deep_is_named():
    class Deep(Flaky):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[" * 100_000)

    with serving(Deep) as address, pytest.raises(RetrievalError, match=r"answered b.*RecursionError"):
        RemoteRetriever([address], wire="query", timeout_s=60).search("x", 1)


@pytest.mark.parametrize(("failures", "refused"), [([503], False), ([503, 503], True)])
def test_a_server_that_is_busy_at_a_launch_is_asked_again(
    failures: list[int], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flowjax.envs.search.protocol.BUSY_PAUSE_S", 0.0)
    with serving(type("Handler", (Flaky,), {"failures": list(failures)})) as address:
        assert bool(list(Search(path=str(tmp_path), retriever=address).obstacles())) == refused


class Cut(Flaky):
    """Breaks off its first answer."""

    def do_POST(self) -> None:
        if self.failures:
            self.failures.pop()
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{")
        else:
            super().do_POST()


def test_an_answer_that_breaks_off_is_asked_for_again():
    with serving(type("Handler", (Cut,), {"failures": [0]})) as address:
        assert RemoteRetriever([address], wire="query", timeout_s=60).search("x", 1) == []


def test_a_dead_server_is_left_for_one_that_lives(url: str):
    retriever = RemoteRetriever([closed_port(), url], wire="query", timeout_s=60)
    for name in NAMES[:3]:
        assert retriever.search(name, 1)[0].title == name


@pytest.mark.parametrize("failures", [[404], [401], [302], []])
def test_a_server_that_is_none_is_left_for_one_that_is(url: str, failures: list[int]):
    handler = type("Handler", (Flaky,), {"failures": failures, "nothing": {"what": "no retrieval server"}})
    with serving(handler) as address:
        retriever = RemoteRetriever([address, url], wire="query", timeout_s=60)
        retriever._turn = 0
        for name in NAMES[:3]:
            assert retriever.search(name, 1)[0].title == name
        retriever = RemoteRetriever([address, address], wire="query", timeout_s=60)
        with pytest.raises(RetrievalError, match="answered"):
            retriever.search("x", 1)


def test_pauses_are_between_rounds_of_all_servers(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    with serving(type("Handler", (Flaky,), {"failures": [500] * 5})) as address:
        retriever = RemoteRetriever([address] * 3, wire="query", timeout_s=60)
        monkeypatch.setattr("flowjax.envs.search.protocol.time.sleep", pauses.append)
        assert retriever.search("x", 1) == []
    assert pauses == [0.1]


def test_a_silent_server_leaves_time_for_the_others(url: str, monkeypatch: pytest.MonkeyPatch):
    limits: list[float] = []
    exchange = RemoteRetriever._exchange

    def silent_first(self: Any, server: Any, path: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        limits.append(timeout_s)
        if len(limits) < 3:
            raise TimeoutError("timed out")
        return exchange(self, server, path, body, timeout_s)

    monkeypatch.setattr(RemoteRetriever, "_exchange", silent_first)
    assert RemoteRetriever([url, url, url], wire="query", timeout_s=60).search(NAMES[0], 1)
    assert limits == pytest.approx([30, 30, 60], abs=5), "each has half of what is left, the last one all"


def test_a_name_that_is_not_looked_up_ends_the_search_in_time(monkeypatch: pytest.MonkeyPatch):
    over = threading.Event()

    def dead(*_: Any, **__: Any) -> list[Any]:
        over.wait(60)
        return []

    monkeypatch.setattr("socket.getaddrinfo", dead)
    retriever = RemoteRetriever(["http://nowhere.invalid:8000"], wire="query", timeout_s=0.5)
    with pytest.raises(RetrievalError, match=r"within 0\.5 s.*nowhere\.invalid:8000: TimeoutError: .* its name"):
        retriever.search("anything", 1)
    ((_, said),) = retriever.ask_each("anything", 1)
    assert isinstance(said, str) and said.startswith("TimeoutError") and not over.is_set()
    over.set()


@pytest.mark.parametrize("silent", [True, False])
def test_a_dead_or_silent_server_costs_the_episode_in_bounded_time(silent: bool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}" if silent else closed_port()
        options = {**OPTIONS, "retriever": address, "search_timeout_s": 0.5}
        task = Search(**OPTIONS).tasks("train", 0)[0]
        assert task is not None

        async def episode() -> EnvDied:
            async with (
                EnvPool(step_timeout_s=60) as pool,
                pool.session("flowjax.envs.search:Search", options) as session,
            ):
                await session.reset(task, 0)
                with pytest.raises(EnvDied) as died:
                    await session.step("search[anything]")
                return died.value

        died = asyncio.run(episode())
        assert died.status == "env_error"
        assert "no retrieval server answered within 0.5 s" in str(died)


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_episodes_of_one_process_wait_for_a_server_side_by_side():
    together = 8
    meeting = threading.Barrier(together)

    class Meeting(Flaky):
        """Answers once all are there."""

        def do_POST(self) -> None:
            meeting.wait(60)
            super().do_POST()

    async def scenario(address: str) -> list[bool]:
        options = {**OPTIONS, "retriever": address, "search_timeout_s": 60.0}
        task = Search(**OPTIONS).tasks("train", 0)[0]
        assert task is not None

        async def one(pool: EnvPool) -> bool:
            async with pool.session("flowjax.envs.search:Search", options) as session:
                await session.reset(task, 0)
                return (await session.step("search[anything]")).valid

        async with EnvPool(workers=1, step_timeout_s=60) as pool:
            return await asyncio.gather(*(one(pool) for _ in range(together)))

    with serving(type("Handler", (Meeting,), {"failures": []})) as address:
        assert asyncio.run(scenario(address)) == [True] * together
    assert not Search(**OPTIONS).STEPS_WAIT, "the index is in the process, whose hangs the pool ends"
