"""A run under a service that sends well-typed nonsense: a live dataflow, an honest worker, and a trainer's checks.

    python -m tests.dataflow.hostile_run [--episodes=10000] [--slow_senders=20]

Prints what was refused and taken in, the steps that the trainer made meanwhile, and how long honest messages took.
"""

import argparse
import asyncio
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import ClientSession

from flowjax.broker import connect
from flowjax.trainer.batch import pack as pack_rows
from flowjax.trainer.batch import unusable_rows
from flowjax.trainer.sources import DataflowSource
from tests.dataflow.hostile_messages import array, episode, on_the_wire
from tests.dataflow.test_hostile import VOCABULARY, Dataflow, Message, body_of

PROMPT, REPLY, TURNS, ROW_TOKENS = 16, 8, 12, 24
STEPS_AFTER = 2  # the last hostile episode
PER_LEASE = 5  # hostile episodes for each one that was leased


def ids(*values: int) -> Message:
    return array("<i4", len(values), struct.pack(f"<{len(values)}i", *values))


def floats(*values: float) -> Message:
    return array("<f4", len(values), struct.pack(f"<{len(values)}f", *values))


def _turn(**values: Any) -> Callable[[Message, Any], None]:
    def change(whole: Message, random: Any) -> None:
        name = str(random.choice(list(values)))
        options = values[name]
        part = whole["trajectories"][random.integers(len(whole["trajectories"]))]
        part["turns"][0][name] = options[random.integers(len(options))]

    return change


def _parts(whole: Message, random: Any) -> None:
    (part,) = whole["trajectories"][:1]
    count = int(random.choice([0, 2, 3, 13, 200, 500]))
    named = random.random() < 0.5
    whole["trajectories"] = [
        {**deepcopy(part), "trajectory_id": f"{whole['episode_id']}/{i}" if named else part["trajectory_id"]}
        for i in range(count)
    ] or [part]


def _turns(whole: Message, random: Any) -> None:
    part = whole["trajectories"][0]
    part["turns"] = part["turns"] * int(random.choice([0, 2, 12, 13, 900])) or part["turns"]


def _everywhere(name: str, *values: Any) -> Callable[[Message, Any], None]:
    def change(whole: Message, random: Any) -> None:
        whole[name] = values[random.integers(len(values))]
        for part in whole["trajectories"]:
            part[name] = whole[name]

    return change


def _outcome(whole: Message, random: Any) -> None:
    outcomes: list[Message] = [{}, {"success": float("nan")}, {"success": -1e9}, {"success": 1e9}, {"success": 1e300}]
    outcomes += [{"success": 1.0, **{f"n{i}": 0.0 for i in range(int(random.choice([5, 2000])))}}, {"score": 1.0}]
    whole["trajectories"][0]["outcome"] = outcomes[random.integers(len(outcomes))]


CHANGES: dict[str, Callable[[Message, Any], None]] = {
    "tokens": _turn(
        prompt_ids=[ids(), ids(*[1] * PROMPT), ids(*[1] * (PROMPT + 1)), ids(*[1] * 5000), ids(VOCABULARY), ids(-1)],
        sampled_ids=[ids(), ids(1, VOCABULARY), ids(1, 2**31 - 1), ids(*[1] * (REPLY + 1)), ids(1, 2), ids(1)],
    ),
    "log-probabilities": _turn(
        logprobs=[floats(*two) for two in ((0, 0), (1, -1), (-1e3, 0), (-2e3, 0), (-3e38, 0), (1e-4, 0))]
        + [floats(float("nan"), 0), floats(float("-inf"), 0), floats(-1), floats(-1, -1, -1)]
    ),
    "version": _turn(version=[-1, 0, 1, 5, 10**9, -(2**63)]),
    "spans": _turn(
        spans=[[[0, 1], [1, 1]], [[1, 1], [0, 1]], [[1, 2]], [b"\0\2"], [[0, 3]], [[0, 0], [0, 2]], [[0, 2**40]]]
    ),
    "reward": _turn(env_reward=[1e9, -1e9, 1e30, float("nan"), float("inf"), 0.0], generate_s=[-1.0, 1e30, 1e9]),
    "state keys": _turn(state_key=[0, 2**64 - 1, -1], next_state_key=[0, 1, 2**63, -5]),
    "flags": _turn(valid=[True, False], terminal=[True, False], finish_reason=["", "x" * 400, "x" * 600]),
    "policy": _turn(policy=["base", "stranger", ""]),
    "parts": _parts,
    "turns": _turns,
    "task": _everywhere("task_id", "task-99", "", "x" * 600),
    "group": _everywhere("group_id", "train-00000000", "train-99999999", ""),
    "seed": _everywhere("seed", 0, -1, 2**63 - 1),
    "status": _everywhere("status", "ok", "truncated", "env_error", "timeout", "cancelled", "perfect"),
    "error": _everywhere("error", "x", "x" * 9_000, "x" * 20_000),
    "outcome": _outcome,
    "name": lambda whole, random: whole["trajectories"][0].update(trajectory_id="another/000"),
}


def hostile(lease: Message, version: int, random: Any) -> Message:
    """An episode of that lease with one or two things changed, each of the right type."""
    whole = fair(lease, version)
    for name in random.choice(list(CHANGES), size=random.integers(1, 3), replace=False):
        CHANGES[str(name)](whole, random)
    return whole


def fair(lease: Message, version: int) -> Message:
    whole = deepcopy(episode(lease))
    whole["trajectories"][0]["turns"][0].update(version=version, spans=[[version, 2]])
    whole["trajectories"][0]["outcome"] = {"success": float(lease["seed"] % 2)}
    return whole


@dataclass
class Report:
    answers: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    rows: int = 0
    put_aside: int = 0
    honest_s: list[float] = field(default_factory=list)


class Trainer(threading.Thread):
    """Takes batches as the real one does: its checks, its packing; then says that the version is on disk."""

    def __init__(self, url: str, steps: int):
        super().__init__(daemon=True)
        self._url, self.steps, self.step, self.rows = url, steps, 0, 0
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            check = {"row_tokens": ROW_TOKENS, "vocabulary": VOCABULARY}
            source = DataflowSource(
                partial(connect, self._url), timeout_s=600.0, unusable=lambda _, rows: unusable_rows(rows, **check)
            )
            source.claim({"agent": 0})
            while self.step < self.steps:
                rows = source.batch({"agent": self.step}).rows
                for batch in pack_rows(rows, row_tokens=ROW_TOKENS, micro_batch_rows=4):
                    assert np.isfinite(batch.advantages).all() and np.isfinite(batch.behaviour_logprobs).all()
                    assert (np.asarray(batch.tokens) < VOCABULARY).all()
                source.committed("agent", self.step + 1)
                self.rows += len(rows)
                self.step += 1
        except BaseException as error:
            self.failed = error


async def send_slowly(dataflow: Dataflow) -> None:
    """Send a body byte by byte, and another when that one is refused."""
    while True:
        _, writer = await asyncio.open_connection(dataflow.server.host, dataflow.server.port)
        try:
            writer.write(b"POST /episodes HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b"\x00")
                await writer.drain()
                await asyncio.sleep(0.1)
        except ConnectionError:
            continue
        finally:
            writer.close()


async def run(folder: Path, episodes: int, *, slow_senders: int = 0, seed: int = 0) -> Report:
    """Send that many hostile episodes to a live dataflow, honest ones between them.

    Raises:
        AssertionError: the server failed over a message, or the trainer over a batch.
    """
    bounds = {"max_prompt_tokens": PROMPT, "max_new_tokens": REPLY, "max_episode_turns": TURNS}
    dataflow = Dataflow(folder, rollout=bounds, steps=episodes)  # more than are made
    report, random = Report(), np.random.default_rng(seed)
    async with dataflow.server, ClientSession() as session:
        url = str(dataflow.server.make_url("/")).rstrip("/")

        async def post(name: str, **body: Any) -> tuple[int, Message]:
            async with session.post(f"{url}/{name}", data=on_the_wire({"worker": "honest", **body})) as answer:
                return answer.status, body_of(await answer.read())

        async def send(lease: Message, whole: Message, worker: str) -> int:
            items = [{"lease_id": lease["lease_id"], "episode": whole}]
            started_s = time.perf_counter()
            status, answer = await post("episodes", items=items, worker=worker)
            if worker == "honest":
                report.honest_s.append(time.perf_counter() - started_s)
            assert status < 500, answer
            report.answers[f"{worker} {status} {answer.get('accepted', '')}"] += 1
            return status

        slow = [asyncio.create_task(send_slowly(dataflow)) for _ in range(slow_senders)]
        trainer, sent = Trainer(url, episodes), 0
        trainer.start()
        while trainer.step < trainer.steps:
            assert trainer.failed is None, repr(trainer.failed)
            if sent >= episodes == trainer.steps:
                trainer.steps = trainer.step + STEPS_AFTER  # it still goes on
            version = trainer.step
            await post("versions", policy="agent", serving=version)
            status, answer = await post("lease", slots=8)
            assert status == 200
            for lease in answer["leases"]:
                for _ in range(PER_LEASE if sent < episodes else 0):
                    await send(lease, hostile(lease, version, random), "hostile")
                    sent += 1
                while await send(lease, fair(lease, version), "honest") == 429:
                    await asyncio.sleep(0.01)
        for sender in slow:
            sender.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await asyncio.to_thread(trainer.join)
        assert trainer.failed is None, repr(trainer.failed)
    report.steps, report.rows = trainer.step, trainer.rows
    report.put_aside = len(dataflow.flow.status()["put_aside"])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--slow_senders", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.perf_counter()
        report = asyncio.run(run(Path(folder), arguments.episodes, slow_senders=arguments.slow_senders))
    for answer, count in sorted(report.answers.items()):
        print(f"{answer:24} {count:8,}")
    print(f"{report.steps} steps on {report.rows:,} rows, {report.put_aside} groups put aside")
    p50, p99 = np.percentile(report.honest_s, [50, 99])
    print(f"honest messages beside {arguments.slow_senders} slow senders: median {p50:.4f} s, p99 {p99:.4f} s")
    print(f"{time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
