"""Queries per second of the retrieval server over 50,000 documents; steps per second and scores of the search world:

    python -m tests.benchmarks.worlds_search

Client and server share the machine. The baseline is bm25s's own batched retrieval in one process, without a server.
Scores are of the held-out questions of two hops over 1,000 documents, at most five turns each.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import aiohttp
import numpy as np

from flowjax.envs import Observation
from flowjax.envs.search import Search
from flowjax.envs.search.corpus import Document, encyclopedia
from flowjax.envs.search.index import BM25Index, import_bm25s
from flowjax.envs.search.world import SearchEnv

DOCUMENTS = 50_000
TOPK = 3
TURNS = 5
QUERIES_PER_REQUEST = 64
REQUESTS_AT_ONCE = 8
CLIENTS_AT_ONCE = 128  # of one query each


def benchmark(seconds: float = 3.0) -> dict[str, float]:
    """Rates per second, each measured for so many seconds, and the shares of questions answered right."""
    documents = encyclopedia(DOCUMENTS, 0).documents()
    queries = _queries(4096)
    rates = {
        "stock_bm25s_queries_per_s": _stock(documents, queries, seconds),
        "index_queries_per_s": _index(documents, queries, seconds),
        "world_steps_per_s": _steps(seconds),
    }
    del documents
    command = [sys.executable, "-m", "flowjax.envs.search.server", f"--documents={DOCUMENTS}", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1] + "/retrieve"
        try:
            rates["server_queries_per_s_batched"] = asyncio.run(_served(url, queries, QUERIES_PER_REQUEST, seconds))
            rates["server_queries_per_s_single"] = asyncio.run(_served(url, queries, 1, seconds))
        finally:
            process.terminate()
    rates["server_batched_over_stock"] = rates["server_queries_per_s_batched"] / rates["stock_bm25s_queries_per_s"]
    rates["expert_success"] = _success(lambda env, observation, rng: Search().expert(env), 100)
    rates["random_success"] = _success(lambda env, observation, rng: Search().random_action(observation, rng), 1000)
    rates["index_over_stock"] = rates["index_queries_per_s"] / rates["stock_bm25s_queries_per_s"]
    return rates


def _queries(count: int) -> list[str]:
    """Half names, half whole questions."""
    source = Search(documents=DOCUMENTS, hops=2).tasks("train", 0)
    rng = np.random.default_rng(0)
    queries = []
    for index in rng.integers(len(source), size=count).tolist():
        task = source[index]
        assert task is not None
        queries.append(task.payload["question"] if index % 2 else task.payload["chain"][0])
    return queries


def _stock(documents: Sequence[Document], queries: Sequence[str], seconds: float) -> float:
    bm25s, _, stemmer = import_bm25s()
    settings = {"stopwords": "en", "stemmer": stemmer, "show_progress": False}
    index = bm25s.BM25()
    index.index(bm25s.tokenize([passage.contents for passage in documents], **settings), show_progress=False)
    done, started_s = 0, time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        block = [queries[(done + offset) % len(queries)] for offset in range(QUERIES_PER_REQUEST)]
        index.retrieve(bm25s.tokenize(block, **settings), k=TOPK, show_progress=False, backend_selection="numpy")
        done += len(block)
    return done / (time.perf_counter() - started_s)


def _index(documents: Sequence[Document], queries: Sequence[str], seconds: float) -> float:
    index = BM25Index([passage.contents for passage in documents])
    done, started_s = 0, time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        index.search([queries[(done + offset) % len(queries)] for offset in range(QUERIES_PER_REQUEST)], TOPK)
        done += QUERIES_PER_REQUEST
    return done / (time.perf_counter() - started_s)


def _steps(seconds: float) -> float:
    env, source = Search(documents=1000).env(), Search(documents=1000).tasks("train", 0)
    steps, episode, started_s = 0, 0, time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        task = source[episode % len(source)]
        assert task is not None
        env.reset(task, 0)
        terminal = False
        while not terminal:
            terminal = env.step(Search().expert(env)).terminal
            steps += 1
        episode += 1
    return steps / (time.perf_counter() - started_s)


def _success(policy: Callable[[SearchEnv, Observation, np.random.Generator], str], episodes: int) -> float:
    env, source = Search(documents=1000, topk=1).env(), Search(documents=1000).tasks("held_out", 0)
    rng, right = np.random.default_rng(0), 0.0
    for index in range(episodes):
        task = source[index]
        assert task is not None
        observation = env.reset(task, 0)
        for _ in range(TURNS):
            step = env.step(policy(env, observation, rng))
            observation = step.observation
            if step.terminal:
                right += step.outcome["success"]
                break
    return right / episodes


async def _served(url: str, queries: Sequence[str], per_request: int, seconds: float) -> float:
    """`per_request` queries in each request, several requests under way at once."""
    bodies = []
    for start in range(0, len(queries), per_request):
        asked = {"queries": queries[start : start + per_request], "topk": TOPK, "return_scores": True}
        bodies.append(json.dumps(asked).encode())
    done, until_s = 0, time.perf_counter() + seconds

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal done
        while time.perf_counter() < until_s:
            async with session.post(url, data=bodies[number % len(bodies)]) as response:
                answer = json.loads(await response.read())
            assert len(answer["result"]) == per_request
            done += per_request
            number += 17

    clients = REQUESTS_AT_ONCE if per_request > 1 else CLIENTS_AT_ONCE
    started_s = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:
        await asyncio.gather(*(client(session, number) for number in range(clients)))
    return done / (time.perf_counter() - started_s)


if __name__ == "__main__":
    for name, value in benchmark().items():
        print(f"{name:32} {value:12,.2f}")
