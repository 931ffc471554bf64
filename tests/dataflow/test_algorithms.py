"""Data algorithms on a population of tasks whose pass rates are known: each does what it promises."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import grain
import numpy as np
import pytest

from flowjax.config import ConfigError, default_config
from flowjax.dataflow.algorithms import AlgorithmError, Candidate, Result, build_algorithms
from flowjax.dataflow.built_in_algorithms import Greso
from flowjax.dataflow.flow import Flow
from flowjax.records import Episode, Lease, Task, Trajectory, Turn
from flowjax.run import resolve
from tests.dataflow import flows

MEMBERS, GROUPS = 8, 4
ALWAYS, NEVER, SOMETIMES = 1.0, 0.0, 0.5
PASS_RATES = (ALWAYS, ALWAYS, NEVER, SOMETIMES, SOMETIMES)  # of the tasks, over and over


class Population:
    """A run without engine and trainer: tasks are passed at their rates, versions come one after the other."""

    def __init__(
        self,
        folder: Path,
        algorithms: dict,
        *,
        tasks: int = 40,
        max_staleness: int = 1,
        steps: int = 1000,
        reply_tokens: Callable[[int], int] = lambda seed: 2,
    ):
        config = default_config()
        config.rollout.group_size = MEMBERS
        config.trainer.update({"steps": steps, "groups_per_step": GROUPS})
        config.eval.tasks = 0
        config.reward.components = {"success": 1.0}
        config.dataflow.update({"max_staleness": max_staleness, "algorithms": algorithms, "keep_trajectories": False})
        self.config, self.folder, self.tasks, self.reply_tokens = config, folder, tasks, reply_tokens
        self.version, self.rollouts = 0, 0
        self.played: dict[float, float] = dict.fromkeys(PASS_RATES, 0.0)  # groups by pass rate
        self.open()

    def open(self) -> None:
        tasks = grain.MapDataset.range(self.tasks).map(lambda index: Task(f"task-{index}", "toy", index)).repeat()
        self.flow = Flow(resolve(self.config, self.folder), train_tasks=tasks, held_out_tasks=tasks)
        self.flow.report_serving("agent", self.version)

    def play(self) -> None:
        """Play all that is admitted."""
        for lease in flows.lease(self.flow, "w", 10_000):
            rate = PASS_RATES[lease.task.seed % len(PASS_RATES)]
            success = float(np.random.default_rng(lease.seed).random() < rate)
            flows.accept(
                self.flow, lease.lease_id, episode(lease, self.version, success, self.reply_tokens(lease.seed))
            )
            self.rollouts += 1
            self.played[rate] += 1 / MEMBERS

    def step(self):
        """Play until the batch is there; train on it."""
        while (served := flows.credited(self.flow, "agent", self.version)) is None:
            self.play()
        self.version += 1
        self.flow.batches.commit("agent", self.version)
        self.flow.report_serving("agent", self.version)
        return served[0]

    def informative_share(self, steps: int) -> float:
        """Share of the trained groups whose advantages are not all zero."""
        rows = [row for _ in range(steps) for row in self.step().rows]
        groups = np.array([np.abs(row.advantages).max() for row in rows]).reshape(-1, MEMBERS)
        return float((groups.max(axis=1) > 0).mean())


def episode(lease: Lease, version: int, success: float, reply_tokens: int = 2) -> Episode:
    ids, nothing = np.arange(reply_tokens, dtype=np.int32), np.zeros(reply_tokens, np.float32)
    turn = Turn("agent", version, ids, ids, nothing, "stop", 1, 2, 0.0, True, True)
    names = lease.episode_id, lease.group_id, lease.task.task_id, lease.seed
    outcome = {"success": success}
    return Episode(*names, [Trajectory(*names, [turn], outcome)], outcome)


def test_without_algorithms_most_groups_teach_nothing(tmp_path):
    assert Population(tmp_path, {}).informative_share(20) == pytest.approx(0.4, abs=0.05)


def test_dynamic_sampling_fills_batches_with_groups_that_teach(tmp_path):
    population = Population(tmp_path, {"dynamic_sampling": {}})
    assert population.informative_share(20) == 1.0
    assert population.rollouts > 2 * 20 * GROUPS * MEMBERS, "at the price of the groups left out"
    assert population.flow.status()["algorithms"]["dynamic_sampling"]["left_out_share"] == pytest.approx(0.6, abs=0.05)


def test_dynamic_sampling_lets_the_asked_share_through(tmp_path):
    population = Population(tmp_path, {"dynamic_sampling": {"accept_share": 0.5}})
    assert population.informative_share(40) == pytest.approx(0.4 / 0.7, abs=0.1)


def test_greso_wastes_fewer_rollouts(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "greso").mkdir()
    plain = Population(tmp_path / "plain", {"dynamic_sampling": {}})
    greso = Population(tmp_path / "greso", {"greso": {}, "dynamic_sampling": {}})
    for population in (plain, greso):
        assert population.informative_share(60) == 1.0
    assert greso.rollouts < 0.75 * plain.rollouts
    wasted = {p: 1 - p.played[SOMETIMES] / sum(p.played.values()) for p in (plain, greso)}
    assert wasted[plain] == pytest.approx(0.6, abs=0.03)
    assert wasted[greso] < 0.45
    assert greso.played[NEVER] > 0 < greso.played[ALWAYS], "it still explores both"


def test_greso_remembers_over_a_restart(tmp_path):
    population = Population(tmp_path, {"greso": {}, "dynamic_sampling": {}})
    population.informative_share(20)
    before = {name: algorithm.state() for name, algorithm in population.flow.algorithms.by_name.items()}
    population.flow.close()
    population.open()
    assert {name: algorithm.state() for name, algorithm in population.flow.algorithms.by_name.items()} == before
    assert population.flow.status()["algorithms"]["greso"]["streaks"] > 0


@pytest.mark.parametrize(
    "algorithms",
    [
        {"dynamic_sampling": {"accept_share": 0.3}},
        {"greso": {"window": 8}, "dynamic_sampling": {}},
        {"skip_solved": {"decay": 0.5}, "difficulty": {}},
        {"deduplicate": {}, "overlong_filter": {"limit_tokens": 8}},
        {"earliest_deadline": {}, "replay": {"ratio": 0.5}},
        {"last_in_first_out": {}},
    ],
)
def test_a_run_that_is_restarted_at_every_step_is_the_same_run(tmp_path, algorithms):
    batches = []
    for name, restarts in (("whole", False), ("restarted", True)):
        (tmp_path / name).mkdir()
        population = Population(tmp_path / name, algorithms, max_staleness=2)
        for _ in range(12):
            rows = population.step().rows
            batches.append([(row.tokens.tolist(), row.advantages.tolist(), row.versions.tolist()) for row in rows])
            if restarts:
                population.flow.close()
                population.open()
    assert batches[:12] == batches[12:]


def test_skip_solved_stops_playing_what_is_solved(tmp_path):
    population = Population(tmp_path, {"skip_solved": {"decay": 0.5}})
    for _ in range(60):
        population.step()
    early = population.played.copy()
    for _ in range(60):
        population.step()
    late = {rate: groups - early[rate] for rate, groups in population.played.items()}
    assert late[ALWAYS] == 0 < early[ALWAYS]
    assert late[NEVER] > 0 < late[SOMETIMES]


def test_difficulty_prefers_tasks_near_the_target(tmp_path):
    population = Population(tmp_path, {"difficulty": {"floor": 0.05}})
    for _ in range(100):
        population.step()
    share = population.played[SOMETIMES] / sum(population.played.values())
    assert share > 0.65, "against 0.4 of the tasks"


def test_replay_needs_fewer_rollouts_per_step(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "replay").mkdir()
    plain = Population(tmp_path / "plain", {}, max_staleness=2)
    replay = Population(tmp_path / "replay", {"replay": {"ratio": 0.5}}, max_staleness=2)
    for population in (plain, replay):
        for _ in range(30):
            served = population.step()
            assert len(served.rows) == GROUPS * MEMBERS
            ages = [population.version - 1 - row.versions.max() for row in served.rows]
            assert max(ages) <= (2 if population is plain else 4)
    assert replay.rollouts < 0.65 * plain.rollouts


@pytest.mark.parametrize("order", [["replay"], ["last_in_first_out", "replay"], ["replay", "earliest_deadline"]])
def test_replay_saves_as_much_where_training_is_synchronous(tmp_path, order):
    algorithms = {name: {"ratio": 0.5} if name == "replay" else {} for name in order}
    population = Population(tmp_path, algorithms, max_staleness=0)
    population.step()
    assert population.rollouts == GROUPS * MEMBERS, "there is nothing to replay yet"
    for _ in range(10):
        assert len(population.step().rows) == GROUPS * MEMBERS
    assert population.rollouts == (GROUPS + 10 * GROUPS / 2) * MEMBERS
    assert population.flow.status()["policies"]["agent"]["dropped"] == {}


def test_a_replayed_batch_is_the_same_after_a_restart(tmp_path):
    population = Population(tmp_path, {"replay": {"ratio": 0.5}}, max_staleness=2)
    for _ in range(5):
        population.step()
    before, _ = flows.credited(population.flow, "agent", 4) or pytest.fail("no batch")
    population.flow.close()
    population.open()
    again, _ = flows.credited(population.flow, "agent", 4) or pytest.fail("no batch")
    for row, same in zip(before.rows, again.rows, strict=True):
        np.testing.assert_array_equal(row.tokens, same.tokens)
        np.testing.assert_array_equal(row.advantages, same.advantages)


def tasks_of(contents, **named) -> list[Task]:
    return [Task(f"row-{row}", "toy", row, {"text": text, "row": row}, **named) for row, text in enumerate(contents)]


def passed(algorithm, tasks) -> list[bool]:
    """Which of these tasks, one after the other, are passed over."""
    over = []
    for position, task in enumerate(tasks):
        over.append(not algorithm.choose(task, position))
        if not over[-1]:
            algorithm.chosen(task, position)
    return over


def test_deduplicate_knows_a_copy_by_its_content_and_plays_the_first_again_in_later_epochs():
    tasks = [Task(f"row-{row}", "toy", row, {"text": text}) for row, text in enumerate("abac")]
    assert passed(one("deduplicate"), tasks + tasks) == 2 * [False, False, True, False]
    assert passed(one("deduplicate", once=True), tasks + tasks) == [False, False, True, False, *4 * [True]]


def test_deduplicate_compares_the_fields_asked_for():
    assert not any(passed(one("deduplicate"), tasks_of("aab")))
    assert passed(one("deduplicate", fields=["text"]), tasks_of("aab")) == [False, True, False]


def test_deduplicate_goes_by_seed_and_source_where_a_task_is_nothing_else():
    tasks = [Task(f"{seed}", "toy", seed, source=source) for source in ("small", "large") for seed in (1, 2, 1)]
    assert passed(one("deduplicate", once=True), tasks) == 2 * [False, False, True]


def test_a_copy_is_one_of_what_was_played_not_of_what_another_algorithm_refused(tmp_path):
    even = {"path": "tests.dataflow.own_algorithm:OnlyEven", "modulus": 2}
    for order in ({"deduplicate": {}, "even": even}, {"even": even, "deduplicate": {}}):
        folder = tmp_path / next(iter(order))
        folder.mkdir()
        population = Population(folder, order, tasks=60)
        leases = population.flow.leases
        leases._tasks = leases._tasks.map(lambda task: dataclasses.replace(task, payload={"of": task.seed // 2}))
        for _ in range(3):
            population.step()
        assert population.flow.status()["forced_tasks"] == 0


def test_an_exhausted_source_does_not_stop_the_run(tmp_path):
    population = Population(tmp_path, {"deduplicate": {"once": True}}, tasks=6)
    for _ in range(3):
        population.step()
    status = population.flow.status()
    assert status["passed_over_tasks"] > 0 < status["forced_tasks"]
    population.flow.close()
    population.open()
    again = population.flow.status()
    for count in ("passed_over_tasks", "forced_tasks"):
        assert again[count] == status[count], "they go on where they were"


def result(rewards, longest=None, **task) -> Result:
    tokens = np.full(len(rewards), 5) if longest is None else np.array(longest)
    return Result("g", Task(task.get("task_id", "t"), "toy", 0), "agent", np.array(rewards, float), tokens)


def one(name: str, **options):
    config = default_config()
    config.dataflow.algorithms = {name: options}
    return build_algorithms(config)[name]


@pytest.mark.parametrize("name", ["skip_solved", "difficulty"])
def test_a_reward_for_the_format_alone_solves_no_task(name):
    algorithm = one(name, **({"target": 0.0} if name == "difficulty" else {}))
    for reward, played in ((0.1, True), (1.0, False)):
        for _ in range(100):
            algorithm.keep(result([reward] * 8))
        assert all(algorithm.choose(Task("t", "toy", 0), position) for position in range(30)) == played


def test_greso_learns_nothing_from_a_group_of_one():
    """In a group that went on short nothing differs, whatever its task is like."""
    greso = one("greso")
    greso.keep(result([1.0, 0.0]))
    before = greso.state()["_verdicts"]["t"]
    for _ in range(20):
        assert greso.keep(result([1.0]))
    assert greso.state()["_verdicts"]["t"] == before and not greso.state()["_counts"]


def test_overlong_filter_leaves_out_groups_that_were_mostly_cut():
    algorithm = one("overlong_filter", limit_tokens=8)
    assert algorithm.keep(result([0, 1, 0, 1], [8, 8, 3, 4]))
    assert not algorithm.keep(result([0, 1, 0, 1], [8, 8, 9, 4]))
    assert algorithm.metrics() == {"left_out": 1, "masked_trajectories": 2}
    strict = one("overlong_filter", limit_tokens=8, share=0.25)
    assert strict.keep(result([0, 1, 0, 1], [8, 7, 3, 4])) and not strict.keep(result([0, 1, 0, 1], [8, 8, 3, 4]))


def test_cut_replies_have_no_part_in_the_loss_but_in_their_groups_statistics(tmp_path):
    populations = []
    for name, algorithms in (("plain", {}), ("filtered", {"overlong_filter": {"limit_tokens": 5, "share": 0.9}})):
        (tmp_path / name).mkdir()
        populations.append(Population(tmp_path / name, algorithms, reply_tokens=lambda seed: 2 + 3 * (seed % 3 == 0)))
    plain, filtered = (
        {(len(row.tokens), row.tokens.tobytes(), float(row.advantages[-1])): row for row in population.step().rows}
        for population in populations
    )
    assert {row.sampled.sum() for row in plain.values()} == {2, 5}
    assert filtered.keys() == {key for key, row in plain.items() if row.sampled.sum() == 2}


@pytest.mark.parametrize("name", ["dynamic_sampling", "greso"])
def test_groups_of_one_have_nothing_to_compare(name):
    config = default_config()
    config.rollout.group_size = 1
    config.dataflow.algorithms = {name: {}}
    with pytest.raises(ConfigError, match=f"config.rollout.group_size is 1, but .*{name} compares .*: raise it to 2"):
        build_algorithms(config)


def test_a_replay_without_room_in_a_batch_is_refused():
    config = default_config()
    config.trainer.groups_per_step, config.dataflow.algorithms = 3, {"replay": {"ratio": 0.25}}
    with pytest.raises(
        ConfigError, match=r"groups_per_step is 3, of which .*replay replays none: raise it, or .* 0.25"
    ):
        build_algorithms(config)
    config.trainer.groups_per_step = 4
    assert build_algorithms(config)


CANDIDATES = [Candidate("a", 3, 1), Candidate("b", 1, 0), Candidate("c", 2, 2)]


@pytest.mark.parametrize(
    ("name", "order"), [("first_in_first_out", "bca"), ("earliest_deadline", "cab"), ("last_in_first_out", "acb")]
)
def test_orders(name, order):
    assert "".join(each.group_id for each in one(name).serve(CANDIDATES, [], 3)) == order


def test_replay_takes_the_youngest_and_none_too_often():
    used = [
        Candidate("old", 1, 9, 1),
        Candidate("younger", 2, 2, 1),
        Candidate("young", 3, 3, 1),
        Candidate("twice", 4, 1, 2),
    ]
    served = one("replay", ratio=0.5, times=1).serve(CANDIDATES, used, 2)
    assert [each.group_id for each in served] == ["younger", "a", "b", "c"]
    served = one("replay", ratio=0.5, times=1).serve(CANDIDATES, used, 8)
    assert [each.group_id for each in served] == ["younger", "young", "a", "b", "c"]


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        ({"dynamic": {}}, "config.dataflow.algorithms.dynamic is no data algorithm: use dynamic_sampling, "),
        ({"replay": {"ratio": 2.0}}, "config.dataflow.algorithms.replay .* ratio is 2.0: give a share between 0 and 1"),
        ({"greso": {"speed": 1}}, "config.dataflow.algorithms.greso.speed is no option of 'greso'; it has target_easy"),
        (
            {"overlong_filter": {}},
            "config.dataflow.algorithms.overlong_filter.limit_tokens is not given, and .*OverlongFilter has no default",
        ),
        (
            {"mine": {"path": "no.such:Thing"}},
            "config.dataflow.algorithms.mine.path is 'no.such:Thing', which cannot be imported",
        ),
    ],
)
def test_mistakes_are_named(algorithms, message):
    config = default_config()
    config.dataflow.algorithms = algorithms
    with pytest.raises(ConfigError, match=message):
        build_algorithms(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TooFew", r"mine.path is .*:TooFew, whose keep cannot be called with \(result\): too many"),
        (
            "Misspelt",
            r"mine.path is .*:Misspelt, whose chose is nothing that .* asks for: name it choose or chosen, or",
        ),
        ("MisspeltSetting", "whose fresh_shares is nothing that .* asks for: name it fresh_share, or"),
        ("Seedless", r"mine.path is .*:Seedless, whose __init__ takes no seed: write it as .self, ., seed, "),
        ("SharedAsText", "whose fresh_share is '0.5': give a number"),
        ("SharedTwice", "whose fresh_share is 2: it must be positive and at most 1"),
        ("OfAnySize", "whose least_group_size is None: give a whole number"),
        ("Waiting", r"mine.path is .*:Waiting, whose keep is async, and nothing waits for it: make it a plain"),
    ],
)
def test_hooks_of_ones_own_that_cannot_be_called_are_refused(name, message):
    config = default_config()
    config.dataflow.algorithms = {"mine": {"path": f"tests.dataflow.own_algorithm:{name}"}}
    with pytest.raises(ConfigError, match=message):
        build_algorithms(config)


# It may have no __init__, one that calls its base's, and helpers named as the hooks that they are for.
@pytest.mark.parametrize("name", ["Plain", "CallsUp", "Divided"])
def test_an_algorithm_of_ones_own_is_built(name):
    config = default_config()
    config.dataflow.algorithms = {"mine": {"path": f"tests.dataflow.own_algorithm:{name}"}}
    assert [type(algorithm).__name__ for algorithm in build_algorithms(config).values()] == [name]


def test_an_answer_that_is_neither_yes_nor_no_ends_the_run_with_its_hook(tmp_path):
    with pytest.raises(AlgorithmError, match=r"algorithms.mine.choose raised TypeError: it answers None: give True"):
        Population(tmp_path, {"mine": {"path": "tests.dataflow.own_algorithm:Forgetful"}}).step()


def test_one_of_the_users_own_is_found_by_its_path(tmp_path):
    population = Population(tmp_path, {"even": {"path": "tests.dataflow.own_algorithm:OnlyEven", "modulus": 2}})
    population.step()
    assert population.flow.status()["passed_over_tasks"] > 0


def test_greso_shows_its_chances_by_kind_and_where_there_are_several_by_policy():
    greso = Greso(seed=0)
    assert greso.metrics() == {"streaks": 0}
    greso.restore({"_chances": {"first": {"easy": 0.5, "hard": 0.4}}, "_streaks": 3})
    assert greso.metrics() == {"p_easy": 0.5, "p_hard": 0.4, "streaks": 3}
    greso.restore({"_chances": {"first": {"easy": 0.5}, "second": {"easy": 0.3}}})
    assert greso.metrics() == {"p_easy_first": 0.5, "p_easy_second": 0.3, "streaks": 3}
