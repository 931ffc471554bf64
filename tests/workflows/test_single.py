"""One agent in one world: what is recorded, and how episodes end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from flowjax.dataflow.batches import token_rows
from flowjax.envs import EnvDied, Observation, Step
from flowjax.envs.pool import EnvPool
from flowjax.envs.sokoban import Sokoban
from flowjax.envs.sokoban.levels import moves_to_go
from flowjax.envs.sokoban.rooms import key, parse
from flowjax.models.nano import build_tokenizer
from flowjax.published.worlds import PublishedSokoban
from flowjax.records import Task, Trajectory, Turn
from flowjax.workflows import UNVERSIONED, Agent, Played, served_version
from flowjax.workflows.codec import Codec
from flowjax.workflows.single import EPISODE_OUTCOMES, OUTCOMES, EpisodeOptions, play

WORLD = Sokoban()
CORRIDOR = Task("corridor", "sokoban", 0, {"level": "#######\n#P_X_O#\n#######"})


@dataclass(frozen=True)
class Scripted:
    """An engine's answer."""

    sampled_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int]]
    finish_reason: str = "stop"


class LocalSession:
    """An environment in this process that dies at its n-th step, if told so."""

    def __init__(self, dies_at: int = 0, status: str = "timeout"):
        self.env, self._dies_at, self._status, self._steps = Sokoban().env(), dies_at, status, 0

    async def reset(self, task: Task, seed: int) -> Observation:
        return self.env.reset(task, seed)

    async def step(self, action: str) -> Step:
        self._steps += 1
        if self._steps == self._dies_at:
            raise EnvDied("gone", self._status)  # pyright: ignore[reportArgumentType]
        return self.env.step(action)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(WORLD.vocabulary(), path)
    return path


def scripted_agent(codec: Codec, reply: Callable[[str], str], *, model: str = "agent@7") -> Agent:
    """Answers each prompt with `reply(prompt text)`."""

    async def generate(prompt_ids: list[int]) -> Scripted:
        ids = codec.encode_reply(reply(codec.decode(prompt_ids)))
        return Scripted(ids, [-0.5] * len(ids), [(model, len(ids))])

    return Agent(codec, generate)


def expert_reply(prompt: str) -> str:
    """The expert, reading the level off the last grid of a compact prompt."""
    inside = prompt.split()[-16:]
    rows = ["#" + "".join(inside[start : start + 4]) + "#" for start in range(0, 16, 4)]
    level = "\n".join(["######", *rows, "######"])
    env = Sokoban().env()
    env.reset(Task("read", "sokoban", 0, {"level": level}), 0)
    return Sokoban().expert(env)


def episode(folder: Path, replies: list[str], *, session: LocalSession | None = None, **changes) -> Played:
    codec = Codec(folder, max_prompt_tokens=changes.pop("max_prompt_tokens", None))
    left = iter(replies)
    agents = {"agent": scripted_agent(codec, lambda _: next(left))}
    options = EpisodeOptions(WORLD, **({"max_turns": 5, "prompt": "compact"} | changes))
    return asyncio.run(play(CORRIDOR, seed=0, env=session or LocalSession(), agents=agents, options=options))


def test_the_expert_behind_real_tokens_solves_levels_in_the_pool(folder: Path):
    source = WORLD.tasks("held_out", 0)
    codec = Codec(folder)

    async def one(pool: EnvPool, task: Task) -> None:
        agents = {"agent": scripted_agent(codec, expert_reply)}
        async with pool.session("flowjax.envs.sokoban:Sokoban", {}) as env:
            played = await play(
                task, seed=0, env=env, agents=agents, options=EpisodeOptions(WORLD, 20, "compact", history=2)
            )
        shortest = moves_to_go(*parse(task.payload["level"]))
        assert (played.outcome["success"], len(played.turns), played.status) == (1.0, shortest, "ok")
        assert played.outcome["env_return"] == pytest.approx(10 + 1 - 0.1 * len(played.turns))

    async def main() -> None:
        async with EnvPool() as pool:
            await asyncio.gather(*(one(pool, task) for task in map(source.__getitem__, range(20)) if task))

    asyncio.run(main())


def test_a_turn_is_of_the_oldest_version_and_says_which_sampled_which_token(folder: Path):
    codec = Codec(folder)
    (up,) = codec.encode_reply("up")[:1]

    def replies(*spans: tuple[str, int]) -> Agent:
        async def generate(prompt_ids: list[int]) -> Scripted:
            tokens = sum(tokens for _, tokens in spans)
            return Scripted([up] * tokens, [-0.5] * tokens, list(spans))

        return Agent(codec, generate)

    def turn_of(agent: Agent) -> Turn:
        options = EpisodeOptions(WORLD, max_turns=1, prompt="compact")
        (turn,) = asyncio.run(
            play(CORRIDOR, seed=0, env=LocalSession(), agents={"agent": agent}, options=options)
        ).turns
        return turn

    turn = turn_of(replies(("agent@7", 2), ("agent@9", 1), ("agent@8.1732", 3)))
    assert (turn.version, list(turn.spans)) == (7, [(7, 2), (9, 1), (8, 3)])
    assert (turn_of(replies(("agent@8", 2))).version, turn_of(replies(("agent@8", 2))).spans) == (8, ())
    with pytest.raises(ValueError, match="agent@7, weights-half-loaded in one reply"):
        turn_of(replies(("agent@7", 2), ("weights-half-loaded", 1)))


def test_what_a_turn_records(folder: Path):
    session = LocalSession()
    played = episode(folder, ["right", "√", "up", "right", "right"], session=session)
    codec = Codec(folder)
    first = played.turns[0]
    assert (first.policy, first.version, first.finish_reason) == ("agent", 7, "stop")
    assert first.sampled_ids.tolist() == codec.encode_reply("right")
    assert first.logprobs.tolist() == [-0.5, -0.5]
    assert codec.decode(first.prompt_ids.tolist()) == "P _ X _ O"
    assert [turn.valid for turn in played.turns] == [True, False, True, True, True]
    assert [turn.terminal for turn in played.turns] == [False, False, False, False, True]
    assert np.allclose([turn.env_reward for turn in played.turns], [-0.1, -0.1, -0.1, -0.1, 10.9])
    for before, after in zip(played.turns, played.turns[1:], strict=False):
        assert before.next_state_key == after.state_key
    stays = [turn.state_key == turn.next_state_key for turn in played.turns]
    assert stays == [False, True, True, False, False]
    assert played.turns[-1].next_state_key == key(*parse("#######\n#___P√#\n#######"))


def test_published_parsing_makes_the_move_of_a_reply_without_thoughts_and_counts_it_invalid(folder: Path):
    replies = {"moves": "<action>right</action>", "thinks": "<think>a</think><action>right</action>"}

    class Words:
        """A tokenizer of whole replies."""

        def encode(self, messages) -> list[int]:
            return [0]

        def decode(self, ids) -> str:
            return list(replies.values())[ids[0]]

        encode_after = within_limit = None

    def played(number: int, reference: bool) -> list[tuple[bool, bool]]:
        async def generate(prompt_ids: list[int]) -> Scripted:
            return Scripted([number], [-0.5], [("agent@7", 1)])

        options = EpisodeOptions(PublishedSokoban() if reference else WORLD, 2)
        agents = {"agent": Agent(Words(), generate)}  # pyright: ignore[reportArgumentType]
        found = asyncio.run(play(CORRIDOR, seed=0, env=LocalSession(), agents=agents, options=options))
        assert found.outcome["invalid_actions"] == sum(not turn.valid for turn in found.turns)
        return [(turn.valid, turn.state_key != turn.next_state_key) for turn in found.turns]

    assert played(0, reference=True) == [(False, True)] * 2
    assert played(1, reference=True) == played(0, reference=False) == [(True, True)] * 2


def test_success_on_the_last_allowed_turn_counts(folder: Path):
    played = episode(folder, ["right"] * 3, max_turns=3)
    assert (played.outcome["success"], played.outcome["turns"], played.turns[-1].terminal) == (1.0, 3.0, True)


def test_running_out_of_turns_is_an_ordinary_end(folder: Path):
    played = episode(folder, ["left", "# #"] * 2, max_turns=4)
    assert (played.status, len(played.turns), played.turns[-1].terminal) == ("ok", 4, False)
    assert played.outcome["success"] == 0.0
    assert played.outcome["invalid_actions"] == 2.0
    assert played.outcome["env_return"] == pytest.approx(-0.4)
    assert set(played.outcome) == {*WORLD.OUTCOMES, *OUTCOMES["agent"]} == {*WORLD.OUTCOMES, *EPISODE_OUTCOMES}


@pytest.mark.parametrize("status", ["timeout", "env_error"])
def test_when_the_environment_dies_the_turns_so_far_remain(folder: Path, status: str):
    played = episode(folder, ["right"] * 3, session=LocalSession(dies_at=3, status=status))
    assert (played.status, played.error, len(played.turns)) == (status, "gone", 2)
    assert played.outcome["success"] == 0.0 and played.outcome["turns"] == 2.0


def test_outcomes_that_the_world_leaves_out_are_not_made_up(folder: Path):
    class Misspelt(LocalSession):
        async def step(self, action: str) -> Step:
            return replace(await super().step(action), outcome={"sucess": 1.0})

    assert episode(folder, ["left"], session=Misspelt(), max_turns=1).outcome.keys() == {"sucess", *OUTCOMES["agent"]}
    at_once = episode(folder, ["left"], session=LocalSession(dies_at=1))
    assert at_once.outcome["success"] == 0.0 and not at_once.turns, "no step was taken that could have said it"


def test_a_prompt_that_grows_too_long_truncates_the_episode(folder: Path):
    played = episode(folder, ["left"] * 5, history=3, max_prompt_tokens=17)
    assert played.status == "truncated"
    assert len(played.turns) == 3  # 5 words to a grid, 6 with an action: three grids fit, four do not
    assert "max_prompt_tokens=17" in played.error


def test_the_window_holds_the_latest_turns(folder: Path):
    played = episode(folder, ["left", "right", "# #", "left"], history=2, max_turns=4)
    codec = Codec(folder)
    shown = codec.decode(played.turns[3].prompt_ids.tolist())
    assert shown == "P _ X _ O right _ P X _ O none _ P X _ O"


def test_the_engine_s_own_name_says_the_version():
    assert served_version("solver@12") == ("solver", 12)
    assert served_version("a@b@3") == ("a@b", 3)
    assert served_version("solver@12.1732300000000000000") == ("solver", 12), "of a version that was made anew"
    assert served_version("base@1.5b") == ("base@1.5b", UNVERSIONED)
    assert served_version("base") == ("base", UNVERSIONED)
    assert served_version("me@home") == ("me@home", UNVERSIONED)


def test_append_mode_is_one_conversation_token_by_token(folder: Path):
    codec = Codec(folder)
    played = episode(folder, ["left", "nonsense", "right"], context="append", max_turns=3)
    assert [turn.valid for turn in played.turns] == [True, False, True]
    before = played.turns[0]
    assert codec.decode(before.prompt_ids.tolist()) == "P _ X _ O"
    for turn in played.turns[1:]:
        known = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
        assert turn.prompt_ids.tolist()[: len(known)] == known
        assert codec.decode(turn.prompt_ids.tolist()[len(known) :]) == "P _ X _ O"
        before = turn
    (row,) = token_rows(Trajectory("a", "g", "t", 0, played.turns, {}), [1.0, 2.0, 3.0])
    assert row.tokens.tolist() == [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
    assert row.advantages[row.sampled].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_append_mode_ends_truncated_when_the_conversation_grows_too_long(folder: Path):
    played = episode(folder, ["left"] * 5, context="append", max_prompt_tokens=12)
    assert (played.status, len(played.turns)) == ("truncated", 2)
