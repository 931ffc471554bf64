"""The ledger's transitions: every episode ends once, every batch is the same batch whenever it is asked for."""

from dataclasses import replace

import numpy as np
import pytest

from flowjax.dataflow.ledger import Kind, Ledger, LedgerError
from flowjax.records import Episode, Status, Task, Trajectory, Turn

NONE = dict.fromkeys(("waiting", "leased", "done", "quarantined", "cancelled"), 0)  # episodes by state


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path, clock) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite", lease_s=10.0, max_attempts=2, clock=clock)


def add(ledger: Ledger, position: int, members: int = 2, policies=("agent",), serving=None) -> str:
    group_id = f"train-{position:08d}"
    task = Task(f"task-{position}", "toy", position, {"level": [1, 2]})
    whose = {"policies": policies, "serving": serving}
    ledger.add_group(group_id, task, list(range(members)), kind="train", position=position, temperature=1.0, **whose)
    return group_id


def played(lease, *, status: Status = "ok", version=0, policies=("agent",)) -> Episode:
    ids = np.array([1, 2], np.int32)
    names = lease.episode_id, lease.group_id, lease.task.task_id
    parts = [
        Trajectory(
            *names,
            lease.seed,
            (Turn(policy, version, ids, ids[:1], np.zeros(1, np.float32), "stop", 1, 2, 0.0, True, True),),
            {},
            status,
            policy=policy,
        )
        for policy in policies
    ]
    return Episode(*names, lease.seed, parts, {}, status)


def first(groups: int, usable=lambda group_id: True):
    """Selects the first ready groups; drops what is not usable."""

    def select(ready, used):
        names = [group.group_id for group in ready]
        good = [name for name in names if usable(name)]
        dropped = {"too_old": [name for name in names if not usable(name)]}
        return (good[:groups] if len(good) >= groups else None), dropped

    return select


def filter_all(ledger: Ledger) -> None:
    for policy, group_id in ledger.complete_groups():
        ledger.filter(policy, group_id, keep=True)


def ready(ledger: Ledger, policy: str) -> list[str]:
    return [group.group_id for group in ledger.groups(policy, "ready")]


def play_all(ledger: Ledger, kind: Kind = "train") -> list[str]:
    complete = []
    for lease in ledger.lease("w", 1000, kind):
        complete += ledger.accept(lease.lease_id, played(lease))[1]
    filter_all(ledger)
    return complete


def test_a_group_is_complete_when_its_last_episode_is_in(ledger):
    group_id = add(ledger, 0, members=3)
    leases = ledger.lease("w", 10, "train")
    assert [lease.seed for lease in leases] == [0, 1, 2]
    assert ledger.accept(leases[0].lease_id, played(leases[0])) == (True, [])
    assert ledger.accept(leases[2].lease_id, played(leases[2])) == (True, [])
    assert ledger.accept(leases[1].lease_id, played(leases[1])) == (True, [group_id])
    group = ledger.group(group_id, "agent")
    assert [trajectory.seed for trajectory in group.trajectories] == [0, 1, 2]
    assert group.task == Task("task-0", "toy", 0, {"level": [1, 2]})


def test_an_episode_counts_once(ledger):
    add(ledger, 0)
    lease = ledger.lease("w", 1, "train")[0]
    assert ledger.accept(lease.lease_id, played(lease))[0]
    assert not ledger.accept(lease.lease_id, played(lease))[0]
    assert ledger.count_episodes() == NONE | {"done": 1, "waiting": 1}


def test_a_leased_episode_is_not_leased_again_until_its_deadline(ledger, clock):
    add(ledger, 0, members=1)
    first = ledger.lease("dead", 1, "train")[0]
    assert ledger.lease("other", 1, "train") == []
    clock.now_s += 10.5
    ledger.expire()
    second = ledger.lease("other", 1, "train")[0]
    assert second.episode_id == first.episode_id
    assert second.lease_id != first.lease_id
    # The dead worker was only slow: its episode counts, and the other's is the duplicate.
    assert ledger.accept(first.lease_id, played(first))[0]
    assert not ledger.accept(second.lease_id, played(second))[0]


def test_renewing_puts_the_deadline_off_and_names_lost_leases(ledger, clock):
    add(ledger, 0, members=1)
    lease = ledger.lease("w", 1, "train")[0]
    clock.now_s += 8.0
    assert ledger.renew([lease.lease_id, "unknown"]) == ["unknown"]
    clock.now_s += 8.0
    ledger.expire()
    assert ledger.count_episodes() == NONE | {"leased": 1}


def test_failed_episodes_are_played_again_then_quarantined_and_the_group_goes_on_short(ledger):
    group_id = add(ledger, 0)
    good, bad = ledger.lease("w", 2, "train")
    assert ledger.accept(good.lease_id, played(good)) == (True, [])
    assert ledger.accept(bad.lease_id, played(bad, status="env_error")) == (True, [])
    again = ledger.lease("w", 2, "train")
    assert [lease.episode_id for lease in again] == [bad.episode_id]
    assert ledger.accept(again[0].lease_id, played(again[0], status="timeout")) == (True, [group_id])
    assert ledger.count_episodes() == NONE | {"done": 1, "quarantined": 1}
    assert len(ledger.group(group_id, "agent").trajectories) == 1


def test_an_outage_uses_up_no_attempt_and_is_counted(ledger):
    add(ledger, 0, members=1)
    for _ in range(7):  # more than the attempts of an episode
        (lease,) = ledger.lease("w", 1, "train")
        assert ledger.accept(lease.lease_id, played(lease, status="executor_error")) == (True, [])
    assert ledger.count_episodes() == NONE | {"waiting": 1}
    assert ledger.counts()["failed/executor_error"] == 7
    (lease,) = ledger.lease("w", 1, "train")
    assert ledger.accept(lease.lease_id, played(lease))[0]


def test_what_came_to_nothing_is_counted_by_its_cause(ledger):
    for position in range(3):
        add(ledger, position, members=1, policies=("agent", "other"))
    for status in ("env_error", "env_error", "timeout"):
        lease = ledger.lease("w", 1, "train")[0]
        ledger.accept(lease.lease_id, played(lease, status=status))
    assert ledger.count_causes("failed") == {"env_error": 2, "timeout": 1}
    ledger.drop("agent", ["train-00000001", "train-00000002"], "too_old")
    ledger.drop("other", ["train-00000002"], "overflow")
    assert ledger.count_causes("dropped", "agent") == {"failed": 1, "too_old": 2}
    assert ledger.count_causes("dropped", "other") == {"failed": 1, "overflow": 1}
    assert ledger.count_causes("failed", "agent") == {}, "episodes fail for all policies at once"


def test_a_failure_reported_under_a_lost_lease_does_not_end_the_new_one(ledger, clock):
    add(ledger, 0, members=1)
    first = ledger.lease("slow", 1, "train")[0]
    clock.now_s += 11
    ledger.expire()
    second = ledger.lease("w", 1, "train")[0]
    assert ledger.accept(first.lease_id, played(first, status="timeout")) == (False, [])
    assert ledger.accept(second.lease_id, played(second))[0]


def test_who_was_cancelled_with_a_sibling_stays_so_when_its_own_lease_runs_out_at_once(tmp_path, clock):
    """It was leased again, and its group stayed open for what was dropped in the end."""
    ledger = Ledger(tmp_path / "drop.sqlite", lease_s=10.0, max_attempts=2, clock=clock, failed="drop")
    add(ledger, 0, members=3)
    ledger.give_back([lease.lease_id for lease in ledger.lease("w", 1, "train")], "no", count_attempt=True)
    assert len(ledger.lease("w", 3, "train")) == 3  # the first for the second time
    clock.now_s += 11
    ledger.expire()
    assert ledger.count_episodes() == {**NONE, "quarantined": 1, "cancelled": 2} and not ledger.lease("w", 3, "train")
    assert ledger.count_causes("failed")["lease_ran_out"] == 1


def test_a_group_without_any_trajectory_is_dropped(ledger):
    group_id = add(ledger, 0, members=1)
    complete = []
    for _ in range(2):
        lease = ledger.lease("w", 1, "train")[0]
        complete += ledger.accept(lease.lease_id, played(lease, status="env_error"))[1]
    assert complete == [group_id]
    assert ledger.count_by_state("agent") == {"dropped": 1}


def test_giving_back_does_not_use_up_an_attempt_unless_it_failed(ledger):
    add(ledger, 0, members=1)
    for _ in range(5):
        lease = ledger.lease("draining", 1, "train")[0]
        ledger.give_back([lease.lease_id], "", count_attempt=False)
    assert len(ledger.lease("w", 1, "train")) == 1


def test_the_same_step_gets_the_same_batch_also_after_a_restart(ledger, tmp_path, clock):
    for position in range(4):
        add(ledger, position)
    play_all(ledger)
    assert ledger.assign("agent", 0, first(2)) == ["train-00000000", "train-00000001"]
    assert ledger.assign("agent", 1, first(2)) == ["train-00000002", "train-00000003"]
    ledger.close()
    reopened = Ledger(tmp_path / "ledger.sqlite", lease_s=10.0, max_attempts=2, clock=clock)
    assert reopened.assign("agent", 1, first(2)) == ["train-00000002", "train-00000003"]
    assert len(reopened.group("train-00000002", "agent").trajectories) == 2


def test_batches_of_a_lost_checkpoint_are_handed_out_again(ledger):
    for position in range(4):
        add(ledger, position)
    play_all(ledger)
    earlier = ledger.assign("agent", 0, first(2))
    second = ledger.assign("agent", 1, first(2))
    assert ledger.claim("restarted", {"agent": 0}, 0) == (True, 1)
    assert ledger.count_by_state("agent") == {"used": 2, "ready": 2}
    assert ledger.assign("agent", 0, first(2)) == earlier
    assert ledger.assign("agent", 1, first(2)) == second


def test_too_few_groups_leave_everything_as_it_was(ledger):
    add(ledger, 0)
    play_all(ledger)
    assert ledger.assign("agent", 0, first(2)) is None
    assert ready(ledger, "agent") == ["train-00000000"]


def test_unusable_groups_are_dropped_not_served(ledger):
    for position in range(3):
        add(ledger, position)
    play_all(ledger)
    assert ledger.assign("agent", 0, first(2, lambda group_id: group_id != "train-00000000")) == [
        "train-00000001",
        "train-00000002",
    ]
    assert ledger.count_by_state("agent") == {"used": 2, "dropped": 1}


def test_closing_batches_forgets_only_older_ones(ledger):
    for position in range(2):
        add(ledger, position)
    play_all(ledger)
    ledger.assign("agent", 0, first(1))
    ledger.assign("agent", 1, first(1))
    ledger.close_batches("agent", 1)
    assert ledger.count_by_state("agent") == {"used": 1}
    assert ledger.episodes("train-00000000") == []
    assert len(ledger.group("train-00000001", "agent").trajectories) == 2


def test_a_forgotten_batch_is_made_anew_though_a_later_one_replays_a_group_of_it(ledger):
    """A trainer that went back to it was served what was left of it."""
    groups = [add(ledger, position) for position in range(4)]
    play_all(ledger)
    for step, chosen in enumerate((groups[:2], [groups[0], groups[2]])):
        assert ledger.assign("agent", step, lambda ready, used, chosen=chosen: (chosen, {})) == chosen
    ledger.close_batches("agent", 1)
    assert [(group.group_id, group.batches) for group in ledger.groups("agent", "used")] == [
        (groups[0], 2),
        (groups[2], 1),
    ]
    for epoch, left in enumerate(([groups[0], *groups[2:]], groups[2:])):
        assert ledger.claim(f"back {epoch}", {"agent": 0}, epoch) == (True, epoch + 1)
        assert ledger.batches_made("agent") == 0
        assert ledger.assign("agent", 0, first(len(left))) == left
        assert ledger.assign("agent", 1, lambda ready, used: (groups[2:], {})) == groups[2:]
        ledger.close_batches("agent", 1)
        assert [group.batches for group in ledger.groups("agent", "used")] == [2, 2]


def add_evaluation(ledger: Ledger, version: int, tasks: int = 1) -> str:
    name, versions = f"agent@{version}", {"agent": version}
    for position in range(tasks):
        task = Task("held-out", "toy", position)
        group_id = f"eval-{name}-{position}"
        ledger.add_group(group_id, task, [0], kind="eval", position=position, evaluation=name, versions=versions)
    return name


def rows(ledger: Ledger) -> dict[str, int]:
    names = [name for (name,) in ledger._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: ledger._db.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] for name in names}


def test_a_long_run_keeps_what_it_may_go_back_to_and_no_more(ledger, tmp_path, clock):
    def step(number: int) -> None:
        played, left_out, passed_over = 3 * number, 3 * number + 1, 3 * number + 2
        add(ledger, played)
        add(ledger, left_out)
        add(ledger, passed_over, members=0, policies=())
        play_all(ledger)
        ledger.assign("agent", number, first(1, lambda group_id: group_id == f"train-{played:08d}"))
        ledger.close_batches("agent", number - 2)

    for number in range(5):
        step(number)
    early = rows(ledger)
    for number in range(5, 40):
        step(number)
    assert rows(ledger) == early
    assert early["batches"] == 3 and early["episodes"] == 6
    assert ledger.count_dropped("agent") == 40
    assert ledger.groups("agent", "used")[0].group_id == "train-00000111", "batch 37 may be asked for again"
    ledger.close()
    reopened = Ledger(tmp_path / "ledger.sqlite", lease_s=10.0, max_attempts=2, clock=clock)
    assert (reopened.count_groups(), reopened.batches_made("agent"), reopened.count_dropped("agent")) == (120, 40, 40)
    assert reopened.count_by_state("agent") == {"used": 3}
    assert reopened.assign("agent", 38, first(1)) == ["train-00000114"]


def test_of_a_finished_evaluation_its_name_and_versions_stay(ledger):
    for version in range(10):
        name = add_evaluation(ledger, version, tasks=4)
        play_all(ledger, "eval")
        ledger.close_evaluation(name)
    expected = {f"agent@{version}": {"agent": version} for version in range(10)}
    assert ledger.evaluations() == ledger.evaluations("closed") == expected
    assert (rows(ledger)["groups"], rows(ledger)["policy_groups"], rows(ledger)["episodes"]) == (10, 10, 0)


def test_an_evaluation_of_which_nothing_came_in_is_finished_too(ledger):
    name = add_evaluation(ledger, 0)
    for _ in range(2):
        (lease,) = ledger.lease("w", 1, "eval")
        ledger.accept(lease.lease_id, played(lease, status="env_error"))
    assert ledger.evaluations("open") == {}
    ledger.close_evaluation(name)
    assert ledger.evaluations("closed") == {name: {"agent": 0}}


def test_workers_that_ask_no_more_are_forgotten(ledger, clock):
    for number in range(100):
        ledger.lease(f"worker-{number}", 1, "train")
        clock.now_s += 1.0
    assert len(ledger._asked_s["train"]) <= 11


def test_a_failing_transaction_leaves_no_trace(ledger):
    add(ledger, 0)

    def broken(_: str) -> bool:
        raise RuntimeError("credit failed")

    play_all(ledger)
    with pytest.raises(RuntimeError, match="credit failed"):
        ledger.assign("agent", 0, first(1, broken))
    assert ledger.count_by_state("agent") == {"ready": 1}


def test_policies_use_up_the_same_groups_at_their_own_rates(ledger):
    both = ("solver", "verifier")
    for position in range(4):
        add(ledger, position, policies=both)
    for lease in ledger.lease("w", 100, "train"):
        ledger.accept(lease.lease_id, played(lease, policies=both))
    filter_all(ledger)
    one, second = "train-00000000", "train-00000001"
    assert ledger.assign("solver", 0, first(1)) == [one]
    assert ledger.assign("solver", 1, first(1)) == [second]
    assert ledger.assign("verifier", 0, first(2, lambda name: name != one)) == [second, "train-00000002"]
    assert ledger.count_by_state("solver") == {"used": 2, "ready": 2}
    assert ledger.count_by_state("verifier") == {"used": 2, "dropped": 1, "ready": 1}
    assert {part.policy for part in ledger.group(one, "verifier").trajectories} == {"verifier"}
    ledger.close_batches("solver", 2)
    assert not ledger.episodes(one), "no policy needs them any more"
    assert len(ledger.episodes(second)) == 2, "the verifier still does"


def test_what_one_policy_has_lost_is_played_with_any_version_of_it(ledger):
    """The group was for a version that nobody serves any more, and waited for it, while it counted as under way."""
    add(ledger, 0, policies=("a", "b"), serving={"a": 7, "b": 7})
    (lease,) = ledger.lease("w", 1, "train", serving={"a": 7, "b": 7})
    ledger.accept(lease.lease_id, played(lease, version=7, policies=("a", "b")))
    ledger.claim("first", {"a": 7}, 0)
    ledger.claim("restarted", {"a": 5}, 1)
    assert ledger.count_by_state("a") == {"dropped": 1} and ledger.unused("b", 0) == (0, 1)
    assert ledger.lease("w", 1, "train", serving={"a": 5, "b": 6}) == []
    assert len(ledger.lease("w", 1, "train", serving={"a": 5, "b": 7})) == 1


def test_a_policy_that_did_not_speak_in_a_group_gets_none_of_it(ledger):
    add(ledger, 0, policies=("solver", "verifier"))
    for lease in ledger.lease("w", 100, "train"):
        ledger.accept(lease.lease_id, played(lease, policies=("solver",)))
    filter_all(ledger)
    assert (ready(ledger, "solver"), ready(ledger, "verifier")) == (["train-00000000"], [])
    assert ledger.count_by_state("verifier") == {"dropped": 1}


def test_a_file_of_another_version_is_refused(ledger, tmp_path, clock):
    ledger._db.execute("PRAGMA user_version = 0")
    ledger.close()
    with pytest.raises(LedgerError, match=r"version 0.*resume the run with"):
        Ledger(tmp_path / "ledger.sqlite", lease_s=10.0, max_attempts=2, clock=clock)


def test_a_group_is_as_old_as_its_oldest_token_and_as_new_as_its_newest(ledger):
    group = add(ledger, 0, members=2)
    for lease, spans in zip(ledger.lease("w", 2, "train"), [(), [(2, 1), (5, 1), (1, 1)]], strict=True):
        episode = played(lease, version=2)
        if spans:
            (part,) = episode.trajectories
            turn = replace(part.turns[0], version=1, spans=spans)
            episode = replace(episode, trajectories=[replace(part, turns=[turn])])
        assert ledger.accept(lease.lease_id, episode)[0]
    ledger.filter("agent", group, keep=True)
    seen = []

    def select(ready, used):
        seen.extend((each.oldest_version, each.newest_version) for each in ready)
        return first(1)(ready, used)

    assert ledger.assign("agent", 0, select) == [group] and seen == [(1, 5)]
