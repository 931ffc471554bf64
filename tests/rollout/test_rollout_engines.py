"""Several engines behind one face: where calls go, and what becomes of them when an engine dies."""

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from counting_engine import CountingEngine

from flowjax.config import default_config
from flowjax.rollout import engines as engines_module
from flowjax.rollout.client import EngineAway, EngineClient, EngineError, SamplingOptions, UnknownModel
from flowjax.rollout.engines import EnginePool, Member, choose, engines_of_base, share_calls
from flowjax.run import resolve

MODEL = "agent@3"
SAMPLING = SamplingOptions(1.0, 8)


@contextlib.asynccontextmanager
async def pool_of(engines: Sequence[CountingEngine], away_s: float = 120.0, **options) -> AsyncIterator[EnginePool]:
    """A pool that knows what its engines serve, and bears it for `away_s` that all of them are away."""
    await asyncio.gather(*(engine.server.start_server() for engine in engines))
    clients = [
        EngineClient(engine.url, request_timeout_s=away_s, patient=False, batch_window_s=0.0, **options)
        for engine in engines
    ]
    try:
        async with EnginePool(clients, request_timeout_s=away_s) as pool:
            for member in pool.members:
                await member.models()
            yield pool
    finally:
        await asyncio.gather(*(engine.server.close() for engine in engines))


def run(scenario, *engines: CountingEngine, **options):
    async def inside():
        async with pool_of(engines, **options) as pool:
            return await scenario(pool)

    return asyncio.run(inside())


@pytest.fixture
def pair() -> list[CountingEngine]:
    return [CountingEngine(MODEL), CountingEngine(MODEL)]


def _members(count: int) -> list[Member]:
    return [Member(EngineClient(f"http://host:{port}")) for port in range(count)]


def test_an_engine_that_leaves_moves_only_its_own_conversations():
    members = _members(4)
    keys = [f"group-{number}" for number in range(400)]
    before = {key: choose(key, members) for key in keys}
    assert all(60 < count < 140 for count in Counter(before.values()).values())
    left = members[1:]
    assert all(choose(key, left) is before[key] for key in keys if before[key] is not members[0])
    assert len({choose(key, left) for key in keys if before[key] is members[0]}) == 3


@pytest.mark.parametrize("count", [2, 3, 8])
def test_one_popular_conversation_cannot_flood_an_engine(count):
    members = _members(count)
    for _ in range(100 * count):
        choose("the same for all", members).in_flight += 1
    loads = [member.in_flight for member in members]
    assert sum(loads) == 100 * count and max(loads) <= 126


class Simulated:
    """Engines that share a rate of tokens evenly between their calls; 64 groups of 4 conversations whose turns, of 20
    to 60 tokens, follow each other without end."""

    def __init__(self, rates_per_s: Sequence[float]):
        self.members = _members(len(rates_per_s))
        self.rates_per_s = rates_per_s
        self.rng = np.random.default_rng(0)

    def run(self, seconds: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each call: the engine, its tokens and its seconds, of those begun in the second half."""
        calls = [self._begin(conversation, 0.0) for conversation in range(256)]
        done = []
        step_s = 0.01
        for now_s in np.arange(0.0, seconds, step_s).tolist():
            loads = Counter(engine for engine, *_ in calls)
            for place, (engine, tokens, left, began_s) in enumerate(calls):
                left -= step_s * self.rates_per_s[engine] / loads[engine]
                calls[place] = (engine, tokens, left, began_s)
                if left > 0:
                    continue
                took_s = now_s + step_s - began_s
                self.members[engine].in_flight -= 1
                share_calls(self.members, self.members[engine], tokens, took_s)
                done += [(engine, tokens, took_s)] if began_s > seconds / 2 else []
                calls[place] = self._begin(place, now_s)
        engines, tokens, took_s = zip(*done, strict=True)
        return np.array(engines), np.array(tokens), np.array(took_s)

    def _begin(self, conversation: int, now_s: float) -> tuple[int, int, float, float]:
        member = choose(f"group-{conversation // 4}", self.members)
        member.in_flight += 1
        tokens = int(self.rng.integers(20, 61))
        return self.members.index(member), tokens, float(tokens), now_s


def test_a_slow_engine_gets_fewer_calls_until_they_take_about_as_long():
    rates = (4000.0, 4000.0, 4000.0, 1000.0)
    engines, tokens, took_s = Simulated(rates).run(60.0)
    assert tokens.sum() > 0.9 * 30.0 * sum(rates), "no engine idles"
    token_s = [np.median(took_s[engines == engine] / tokens[engines == engine]) for engine in range(4)]
    assert token_s[3] < 1.7 * max(token_s[:3]), token_s


def test_an_engine_that_is_slow_however_few_calls_it_has_keeps_an_eighth():
    members = _members(4)
    for _ in range(1000):
        for member, token_s in zip(members, (0.01, 0.01, 0.01, 0.04), strict=True):
            share_calls(members, member, 1, token_s)
    assert [member.share for member in members] == [1, 1, 1, 1 / 8]
    for _ in range(400):  # it has become as fast
        share_calls(members, members[3], 1, 0.01)
    assert members[3].share == 1


def test_equal_engines_have_equal_shares():
    pool = Simulated((1000.0, 1000.0, 1000.0, 1000.0))
    engines, *_ = pool.run(30.0)
    assert min(member.share for member in pool.members) > 0.9
    assert np.bincount(engines).min() > 0.6 * np.bincount(engines).max()


def test_short_replies_do_not_make_an_engine_slow():
    """Groups of 8 replies of 2 or of 300 tokens, each reply with 0.3 s before its first token."""
    members, rng = _members(4), np.random.default_rng(0)
    running: list[tuple[float, int, int, int, float]] = []  # end, number, engine, tokens, start
    least, begun = 1.0, 0

    def begin_group(now_s: float) -> None:
        nonlocal begun
        tokens = int(rng.choice([2, 300]))
        for _ in range(8):
            begun += 1
            engine = members.index(choose(f"group-{begun // 8}", members))
            members[engine].in_flight += 1
            heapq.heappush(running, (now_s + 0.3 + 0.02 * tokens, begun, engine, tokens, now_s))

    for _ in range(64):
        begin_group(0.0)
    for ended in range(1, 40_001):
        now_s, _, engine, tokens, began_s = heapq.heappop(running)
        members[engine].in_flight -= 1
        share_calls(members, members[engine], tokens, now_s - began_s)
        if ended > 10_000:
            least = min(least, *(member.share for member in members))
        if ended % 8 == 0:
            begin_group(now_s)
    assert least > 0.75


def test_calls_of_a_group_meet_at_one_engine(pair):
    async def ask(pool):
        for turn, group in itertools.product(range(4), range(20)):  # one by one: there is always room
            await pool.generate(MODEL, [group, turn], SAMPLING, group=str(group))

    run(ask, *pair)
    first, second = (set(engine.asked) for engine in pair)
    assert first and second and not first & second
    assert len(pair[0].asked) + len(pair[1].asked) == 80


def test_without_a_group_the_beginning_of_the_prompt_decides(pair):
    prefixes = [[number] * engines_module._PREFIX_TOKENS for number in range(20)]

    async def ask(pool):
        for turn, prefix in itertools.product(range(3), prefixes):
            await pool.generate(MODEL, [*prefix, turn], SAMPLING)

    run(ask, *pair)
    first, second = (set(engine.asked) for engine in pair)
    assert first and second and not first & second


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_whose_engine_dies_is_answered_by_another(pair, stream):
    async def ask(pool):
        answers = await asyncio.gather(*(pool.generate(MODEL, [n, n], SAMPLING, group=str(n)) for n in range(40)))
        assert pool.moved_calls > 0 and pool.continued_calls == (pool.moved_calls if stream else 0)
        assert [member.up for member in pool.members] == [False, True]
        return answers

    pair[0].dies_after = 3
    for answer in run(ask, *pair, stream=stream):
        assert answer.sampled_ids == tuple(range(2, 10))
        assert answer.logprobs == tuple(-float(n) for n in range(2, 10))
        assert (answer.finish_reason, answer.spans) == ("length", ((MODEL, 8),))


def test_what_was_sampled_before_the_death_is_not_sampled_again(pair):
    async def ask(pool):
        pair[0].dies_after = pair[1].dies_after = 3  # whichever is asked; the other lives on
        pair[0].on_death = lambda: setattr(pair[1], "dies_after", None)
        pair[1].on_death = lambda: setattr(pair[0], "dies_after", None)
        return await pool.generate(MODEL, [7, 7], SAMPLING)

    assert run(ask, *pair, stream=True).sampled_ids == tuple(range(2, 10))
    first, second = sorted((request for engine in pair for request in engine.requests), key=lambda r: -r["max_tokens"])
    assert (first["prompt"], first["max_tokens"]) == ([[7, 7]], 8)
    assert (second["prompt"], second["max_tokens"]) == ([[7, 7, 2, 3, 4]], 5)
    assert first["model"] == second["model"] == MODEL


def test_both_engines_say_which_weights_sampled_which_token(pair):
    """Weights are replaced in each engine under its own part of the reply, in the first one twice."""

    async def ask(pool):
        first, other = pair if pool.members[0].client.url == pair[0].url else pair[::-1]
        first.dies_after, first.swaps = 5, [(1, "agent@4"), (4, "agent@5"), (6, "agent@6")]
        other.swaps, other.models = [(2, "agent@4")], set()
        first.on_death = lambda: other.models.add(MODEL)
        await pool.members[1].models()
        first.on_death = lambda: (other.models.add(MODEL), pool.members[1].names.add(MODEL))
        return await pool.generate(MODEL, [7, 7], SAMPLING)

    answer = run(ask, *pair, stream=True)
    assert answer.sampled_ids == tuple(range(2, 10))
    assert answer.spans == ((MODEL, 1), ("agent@4", 3), ("agent@5", 1), (MODEL, 2), ("agent@4", 1))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_which_weights_sampled_which_token(pair, stream):
    pair[0].swaps = [(3, "agent@4")]
    answer = run(lambda pool: pool.generate(MODEL, [7, 7], SAMPLING), pair[0], stream=stream)
    assert answer.spans == ((MODEL, 3), ("agent@4", 5))


@pytest.mark.parametrize("held", [{"stop": ("</action>",)}, {"structured_outputs": "{}"}, {"seed": 11}])
def test_a_reply_that_no_engine_would_see_whole_begins_anew(pair, held):
    async def ask(pool):
        pair[0].dies_after = pair[1].dies_after = 3
        pair[0].on_death = lambda: setattr(pair[1], "dies_after", None)
        pair[1].on_death = lambda: setattr(pair[0], "dies_after", None)
        answer = await pool.generate(MODEL, [7, 7], replace(SAMPLING, **held))
        assert (pool.moved_calls, pool.continued_calls) == (1, 0)
        return answer

    assert run(ask, *pair, stream=True).sampled_ids == tuple(range(2, 10))
    requests = [request for engine in pair for request in engine.requests]
    assert [(request["prompt"], request["max_tokens"]) for request in requests] == [([[7, 7]], 8)] * 2


def test_an_answer_is_there_as_soon_as_it_is_whole(pair):
    """In a stream of several prompts, one that has ended does not wait for the others, nor for the engine's death."""
    engine = pair[0]

    async def ask(pool):
        client = pool.members[0].client
        engine.dies_after = 5
        short = asyncio.create_task(client.generate(MODEL, [1], SamplingOptions(1.0, 5)))
        long = asyncio.create_task(client.generate(MODEL, [1, 1], SamplingOptions(1.0, 8)))
        assert (await short).sampled_ids == (1, 2, 3, 4, 5)
        with pytest.raises(EngineAway) as error:
            await long
        return error.value.partial

    partial = run(ask, engine, stream=True)
    assert (partial.sampled_ids, partial.logprobs) == ([2, 3, 4, 5, 6], [-2.0, -3.0, -4.0, -5.0, -6.0])


def test_a_version_that_only_the_dead_engine_had_is_asked_for_anew(pair):
    pair[1].models = {"agent@4"}
    pair[0].dies_after = 3

    async def ask(pool):
        with pytest.raises(UnknownModel, match="agent@3"):
            await pool.generate(MODEL, [1], SAMPLING)
        return await pool.generate("agent@4", [1], SAMPLING)

    assert run(ask, *pair, stream=True).spans[0][0] == "agent@4"


def test_calls_go_only_where_their_version_is(pair):
    pair[1].models.add("agent@4")

    async def ask(pool):
        calls = [pool.generate(name, [n], SAMPLING, group=str(n)) for n in range(30) for name in (MODEL, "agent@4")]
        await asyncio.gather(*calls)

    run(ask, *pair)
    assert {request["model"] for request in pair[0].requests} == {MODEL}
    assert {request["model"] for request in pair[1].requests} == {MODEL, "agent@4"}


def test_an_engine_that_has_lost_a_version_is_left_out_until_it_lists_it_again(pair):
    async def ask(pool):
        pair[0].models.clear()  # restarted, unnoticed
        await asyncio.gather(*(pool.generate(MODEL, [n], SAMPLING, group=str(n)) for n in range(20)))
        assert MODEL not in pool.members[0].names
        pair[0].models.add(MODEL)
        await pool.members[0].models()
        pair[0].requests.clear()
        await asyncio.gather(*(pool.generate(MODEL, [n], SAMPLING, group=str(n)) for n in range(20)))
        assert pair[0].requests

    run(ask, *pair)


def test_calls_wait_while_all_engines_are_away_but_not_forever(pair):
    async def wait(pool):
        for engine in pair:
            engine.dead = True
        assert not await pool.healthy()
        waiting = asyncio.create_task(pool.generate(MODEL, [1], SAMPLING))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        pair[1].dead = False
        assert (await waiting).sampled_ids[0] == 1

    async def give_up(pool):
        for engine in pair:
            engine.dead = True
        with pytest.raises(EngineError, match=r"all engines .* have been away for 1 s"):
            await pool.generate(MODEL, [1], SAMPLING)

    run(wait, *pair)
    pair[:] = [CountingEngine(MODEL), CountingEngine(MODEL)]
    run(give_up, *pair, away_s=1.0)


def test_a_prompt_that_every_engine_fails_at_is_not_asked_without_a_pause(pair, monkeypatch):
    """It was asked again every 0.05 s. Pauses double: 0.2 s in front of the second round, then 0.8 s, then a second."""

    async def fails(engine: CountingEngine, request: web.Request) -> web.Response:
        engine.requests.append(await request.json())
        return web.Response(status=500)

    async def ask(pool):
        with pytest.raises(EngineAway):
            await pool.generate(MODEL, [1], SAMPLING)

    monkeypatch.setattr(CountingEngine, "_completions", fails)
    pair[:] = [CountingEngine(MODEL), CountingEngine(MODEL)]
    run(ask, *pair, away_s=2.0)
    assert len(pair[0].requests) + len(pair[1].requests) <= 10


def test_an_engine_that_has_not_been_asked_is_asked_however_long_the_others_took_to_fail(monkeypatch):
    """The second may have sampled for longer than the time-out, which is no failing."""
    answer, failed = CountingEngine._completions, []

    async def dies(engine: CountingEngine, request: web.Request) -> web.StreamResponse:
        if len(failed) == 2:
            return await answer(engine, request)
        if failed:
            await asyncio.sleep(0.05)
        failed.append(engine)
        engine.dead = True
        return web.Response(status=500)

    monkeypatch.setattr(CountingEngine, "_completions", dies)

    async def ask(pool):
        pool._timeout_s = 0.01
        return await pool.generate(MODEL, [7, 7], SAMPLING)

    assert run(ask, *(CountingEngine(MODEL) for _ in range(3))).sampled_ids == tuple(range(2, 10))
    assert len({id(engine) for engine in failed}) == 2


def test_the_load_of_the_pool_is_that_of_its_engines(pair):
    lines = 'vllm:num_requests_waiting{{engine="0"}} {0}\nvllm:kv_cache_usage_perc{{engine="0"}} {1}\n'
    pair[0].metrics, pair[1].metrics = lines.format(3.0, 0.25), lines.format(4.0, 0.5)

    async def ask(pool):
        both = await pool.load()
        pair[1].dead = True
        return both, await pool.load()

    both, one = run(ask, *pair)
    assert (both.waiting, both.cache_share) == (7, 0.5)
    assert (one.waiting, one.cache_share) == (3, 0.25)


def test_what_was_preempted_is_counted_by_engine(pair):
    """One that missed a look, or was started anew, changed the sum by all that it had preempted since its start."""

    async def ask(pool):
        found = []
        for counts, dead in (((1000, 5), False), ((1000, 5), True), ((1002, 5), False), ((3, 6), False)):
            for engine, count in zip(pair, counts, strict=True):
                engine.metrics = f'vllm:num_preemptions_total{{engine="0"}} {count}.0\n'
            pair[0].dead = dead
            await pool.healthy()
            found.append((await pool.load()).preemptions)
        return found

    assert run(ask, *pair) == [0, 0, 2, 6]


def test_one_engine_needs_no_pool(tmp_path):
    config = default_config()
    assert isinstance(engines_of_base(resolve(config).bases["base"], tmp_path, ["http://host:1"]), EngineClient)
    config.engine.stream_partial = True
    for urls in (["http://host:1"], ["http://host:1", "http://host:2"]):
        pool = engines_of_base(resolve(config).bases["base"], tmp_path, urls)
        assert isinstance(pool, EnginePool) and [member.client.url for member in pool.members] == urls
