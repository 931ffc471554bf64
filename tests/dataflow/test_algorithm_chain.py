"""A data algorithm of the user's own that fails: what is said, and that nothing is lost by it."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict, deque
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from flowjax.config import default_config, save_run
from flowjax.dataflow.algorithms import Algorithm, AlgorithmError, Candidate, Chain, Result, Table
from flowjax.dataflow.server import serve
from flowjax.records import Task, pack, unpack
from tests.dataflow import flows
from tests.dataflow.test_algorithms import GROUPS, MEMBERS, Population

RESULT = Result("g", Task("t", "toy", 0), "agent", np.zeros(4), np.full(4, 3))


CANDIDATES = [Candidate("a", 1, 0), Candidate("b", 2, 0), Candidate("c", 3, 0)]


def own(name: str, **options) -> dict:
    return {"path": f"tests.dataflow.own_algorithm:{name}", **options}


def failing(hook: str, answer):
    """An algorithm whose `hook` is so."""
    return type("Failing", (Algorithm,), {hook: lambda self, *args: answer()})(seed=0)


def divide():
    raise ZeroDivisionError("division\nby zero")


HOOKS = [
    ("choose", (RESULT.task, 0)),
    ("chosen", (RESULT.task, 0)),
    ("keep", (RESULT,)),
    ("trains", (RESULT,)),
    ("serve", ([], [], 4)),
    ("published", ("agent", 1)),
    ("metrics", ()),
]


@pytest.mark.parametrize(("hook", "args"), HOOKS)
def test_an_algorithm_that_raises_is_named_and_so_for_ever(hook, args):
    chain = Chain({"fine": Algorithm(seed=0), "mine": failing(hook, divide)})
    message = f"config.dataflow.algorithms.mine.{hook} raised ZeroDivisionError: division by zero"
    with pytest.raises(AlgorithmError, match=message):
        getattr(chain, hook)(*args)
    with pytest.raises(AlgorithmError, match=message):
        chain.metrics()
    with pytest.raises(AlgorithmError, match=message), chain.state_changes():
        pytest.fail("what others have learnt since is not to be written down")


@pytest.mark.parametrize(
    ("hook", "args", "answer", "message"),
    [
        ("trains", (RESULT,), [True, False], "trains raised ValueError: cannot reshape array of size 2"),
        ("trains", (RESULT,), np.arange(4), r"trains raised TypeError: it answers array\(.*: give a mask"),
        ("serve", ([], [], 4), ["a group"], "serve raised AttributeError: 'str' object has no attribute 'group_id'"),
        ("serve", ([], [], 4), None, "serve raised TypeError: 'NoneType' object is not iterable"),
        ("serve", (CANDIDATES, [], 2), CANDIDATES[:1], "serve raised ValueError: it answers 1 groups, too few for"),
        ("metrics", (), None, "metrics raised TypeError: it answers None: give a map from names to numbers"),
        ("metrics", (), {"kept": None}, "metrics raised TypeError: it answers {'kept': None}: give a map from names"),
        ("metrics", (), {"kept": np.nan}, "metrics raised ValueError: it answers nan for 'kept': give a finite number"),
        ("metrics", (), {"a": 1, "b": np.float32(-np.inf)}, "metrics raised ValueError: it answers -inf for 'b'"),
        ("metrics", (), {"kept": np.zeros(3)}, "metrics raised TypeError: it answers {'kept': array"),
    ],
)
def test_an_answer_that_cannot_be_used_is_named(hook, args, answer, message):
    with pytest.raises(AlgorithmError, match=f"config.dataflow.algorithms.mine.{message}"):
        getattr(Chain({"mine": failing(hook, lambda: answer)}), hook)(*args)


def test_an_order_may_leave_out_what_no_batch_needs_yet():
    assert Chain({"mine": failing("serve", lambda: CANDIDATES[1:])}).serve(CANDIDATES, [], 2) == CANDIDATES[1:]
    assert Chain({"mine": failing("serve", lambda: CANDIDATES[1:])}).serve(CANDIDATES, [], 4) == CANDIDATES[1:]


def test_metrics_are_numbers_for_json():
    chain = Chain({"mine": failing("metrics", lambda: {"kept": np.int64(3), "share": np.float32(0.5), "tasks": 2})})
    assert json.loads(json.dumps(chain.metrics())) == {"mine": {"kept": 3, "share": 0.5, "tasks": 2}}


@pytest.mark.parametrize(
    ("seen", "reason"), [(set(), "set "), ({("source", "task"): 1.0}, ".*the key"), ([{("a",): 1}], ".*the key")]
)
def test_a_state_that_cannot_be_written_down_or_read_again_is_named(seen, reason):
    chain = Chain({"mine": failing("state", lambda: {"seen": seen})})
    with (
        pytest.raises(AlgorithmError, match=rf"mine\.state raised TypeError: {reason}.*: let it be numbers.* keys are"),
        chain.state_changes(),
    ):
        pytest.fail("it cannot be written down")


class Kind(StrEnum):
    HARD = "hard"


def test_names_of_an_enumeration_may_be_keys_of_a_state():
    algorithm = failing("state", lambda: {"seen": {Kind.HARD: 1, "easy": 2}})
    vars(algorithm)["seen"] = {}  # what it would be restored to
    chain = Chain({"mine": algorithm})
    with chain.state_changes() as rows:
        assert unpack(rows[0][-1] or b"") == {"seen": {"hard": 1, "easy": 2}}


def test_a_failing_group_is_judged_again_when_the_algorithm_is_mended(tmp_path):
    population = Population(tmp_path, {"dynamic_sampling": {}, "mine": own("Raises", after=3)})
    with pytest.raises(AlgorithmError, match=r"config\.dataflow\.algorithms\.mine\.keep raised KeyError: 'level'"):
        population.play()
    with pytest.raises(AlgorithmError, match=r"mine\.keep"):
        population.flow.status()
    population.flow.close()
    population.config.dataflow.algorithms.mine.after = 10**6
    population.open()
    while (served := flows.credited(population.flow, "agent", 0)) is None:
        population.play()
    assert len(served[0].rows) == GROUPS * MEMBERS
    status = population.flow.status()
    judged = status["policies"]["agent"]["dropped"]["not_kept"] + status["policies"]["agent"]["ready_groups"] + GROUPS
    assert population.flow.algorithms.by_name["dynamic_sampling"].state()["seen"] == judged, "each group counts once"


def test_the_service_ends_when_an_algorithm_has_failed(tmp_path):
    population = Population(tmp_path, {"mine": own("Raises", after=0)})
    with pytest.raises(AlgorithmError):
        population.play()
    run = serve(population.flow, tmp_path, dataflow=population.config.dataflow, port=0, stop=asyncio.Event())
    with pytest.raises(AlgorithmError, match=r"mine\.keep raised KeyError"):
        asyncio.run(asyncio.wait_for(run, 10))


def start(folder: Path, algorithms: dict) -> tuple[subprocess.Popen[str], str]:
    """A dataflow of its own, and its address."""
    config = default_config()
    config.env.name = "flowjax.envs.math:Math"
    config.reward.components = {"success": 1.0}
    config.eval.tasks = 0
    config.dataflow.algorithms = algorithms
    save_run(config, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    (folder / "endpoints.json").write_text(json.dumps({"dataflow": url}))
    command = [sys.executable, "-m", "flowjax.dataflow", f"--run={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment), url


@pytest.mark.integration
def test_the_role_says_so_in_its_last_line_and_is_not_to_be_started_again(tmp_path):
    role, url = start(tmp_path, {"mine": own("Refuses")})
    try:
        until_s = time.monotonic() + 120
        while role.poll() is None and time.monotonic() < until_s:
            for name, body in (("versions", {"policy": "agent", "serving": 0}), ("lease", {"slots": 1})):
                try:
                    request = pack({"worker": "w", **body})
                    with urllib.request.urlopen(f"{url}/{name}", request, timeout=60) as answer:
                        unpack(answer.read())
                except OSError:
                    time.sleep(0.1)
        _, errors = role.communicate(timeout=60)
    finally:
        role.kill()
    assert role.returncode == 2
    line = "dataflow: config.dataflow.algorithms.mine.choose raised KeyError: 'level'"
    assert errors.strip().splitlines()[-1] == line


def test_a_table_knows_what_has_changed():
    table = Table({"a": 1, "b": 2})
    assert table.changed == {"a", "b"}, "those that it begins with have to be written down, too"
    table.changed.clear()
    table["a"] = 3
    table.setdefault("c", 4)
    table.pop("b")
    assert table.changed == {"a", "b", "c"} and dict(table) == {"a": 3, "c": 4}


@pytest.mark.parametrize("value", [1, Table()])
def test_a_state_that_nothing_would_restore_is_refused(value):
    message = r"mine\.state raised ValueError: it has no attribute seen to restore: name an attribute, or write"
    with (
        pytest.raises(AlgorithmError, match=message),
        Chain({"mine": failing("state", lambda: {"seen": value})}).state_changes(),
    ):
        pytest.fail("it would be lost")


def test_a_state_of_another_name_is_taken_where_the_algorithm_restores_it():
    class Renames(Algorithm):
        _seen = 3

        def state(self):
            return {"seen": self._seen}

        def restore(self, state):
            self._seen = state["seen"]

    with Chain({"mine": Renames(seed=0)}).state_changes() as changes:
        assert len(changes) == 1


def test_a_map_keeps_its_type_when_it_is_restored():
    class Counts(Algorithm):
        def __init__(self):
            self.counted, self.by_source = Counter(), defaultdict(list)

        def keep(self, result):
            self.counted[result.task.task_id] += 1
            self.by_source[result.task.source].append(1)
            return True

        def state(self):
            return {"counted": self.counted, "by_source": self.by_source}

    before, after = Counts(), Counts()
    chain = Chain({"mine": before})
    assert chain.keep(RESULT)
    with chain.state_changes("keep", ("agent", "g")) as changes:
        chain = Chain({"mine": after}, changes)
    assert after.state() == before.state() and chain.keep(RESULT)
    other = Result("h", Task("u", "toy", 0), "agent", np.zeros(4), np.full(4, 3))
    assert chain.keep(other) and after.counted == {"t": 2, "u": 1}


def test_an_array_may_be_changed_after_it_is_restored():
    class Sums(Algorithm):
        def __init__(self):
            self.sums = {"rewards": np.zeros(2)}

        def keep(self, result):
            self.sums["rewards"][0] += len(result.rewards)
            return True

        def state(self):
            return {"sums": self.sums}

    restored, chain = Sums(), Chain({"mine": Sums()})
    assert chain.keep(RESULT)
    with chain.state_changes("keep", ("agent", "g")) as changes:
        chain = Chain({"mine": restored}, changes)
    assert chain.keep(RESULT) and restored.sums["rewards"].tolist() == [8, 0]


def test_an_array_in_a_table_can_be_changed_after_a_restart():
    class Counts(Algorithm):
        def __init__(self):
            self.counts = Table()

        def keep(self, result):
            row = self.counts.get(result.task.task_id, np.zeros(2))
            row += 1
            self.counts[result.task.task_id] = row
            return True

        def state(self):
            return {"counts": self.counts}

    restored, chain = Counts(), Chain({"mine": Counts()})
    assert chain.keep(RESULT)
    with chain.state_changes() as changes:
        chain = Chain({"mine": restored}, changes)
    assert chain.keep(RESULT) and restored.counts["t"].tolist() == [2, 2]


class Remembers(Algorithm):
    """Knows every task that it was asked about."""

    def __init__(self):
        self.table, self.small = Table(), 0

    def state(self):
        return {"table": self.table, "small": self.small}


def test_only_what_has_changed_is_written_down():
    algorithm = Remembers()
    chain = Chain({"mine": algorithm})
    algorithm.table.update({number: [number] for number in range(3)})
    with chain.state_changes() as changes:
        assert [attribute for _, attribute, _, _ in changes] == ["", "table", "table", "table"]
    algorithm.table[7] = [7]
    del algorithm.table[0]
    with chain.state_changes() as changes:
        assert sorted((unpack(key), value and unpack(value)) for _, _, key, value in changes) == [
            (0, None),
            (7, [7]),
        ]
    with pytest.raises(OSError, match="full"), chain.state_changes():
        algorithm.table[8] = [8]
        raise OSError("the disk is full")
    algorithm.small = 1
    with chain.state_changes() as changes:
        assert [(attribute, key and unpack(key)) for _, attribute, key, _ in changes] == [("", b""), ("table", 8)]


def restarted(chain: Chain, ledger: dict, algorithm: Algorithm) -> Chain:
    """A chain of `algorithm` that goes on after another, whose changes are written to `ledger`."""
    with chain.state_changes() as changes:
        ledger |= {tuple(place): value for *place, value in changes}
    return Chain({"mine": algorithm}, [(*place, value) for place, value in ledger.items() if value is not None])


def test_rows_that_a_table_began_with_are_kept_over_a_restart_until_they_are_deleted():
    class Primed(Remembers):
        def __init__(self):
            self.table, self.small = Table({"a": 1.0, "b": 2.0}), 0

    first, second, third, ledger = Primed(), Primed(), Primed(), {}
    first.table["a"] = 0.5
    chain = restarted(Chain({"mine": first}), ledger, second)
    assert dict(second.table) == {"a": 0.5, "b": 2.0}
    with chain.state_changes() as changes:
        assert not any(attribute for _, attribute, _, _ in changes), "no row has changed since"
    second.table.clear()
    restarted(chain, ledger, third)
    assert isinstance(third.table, Table) and dict(third.table) == {}


@pytest.mark.parametrize("written", [list, lambda found: found])
def test_a_window_keeps_its_length_over_a_restart(written):
    class Window(Algorithm):
        def __init__(self):
            self.newest, self.seen = deque([0.5], maxlen=2), set()

        def state(self):
            return {"newest": written(self.newest), "seen": sorted(self.seen)}

    first, second = Window(), Window()
    first.newest.extend([1, 2, 3])
    first.seen.add("t")
    restarted(Chain({"mine": first}), {}, second)
    second.newest.append(4)
    assert second.newest == deque([3, 4]) and second.newest.maxlen == 2 and second.seen == {"t"}


def test_what_one_write_refused_is_not_learnt_again_after_another():
    """It was, where the disk had room for a new group's row and none for the group whose verdict was asked for."""

    class Counts(Algorithm):
        seen = 0

        def keep(self, result):
            self.seen += 1
            return True

    counts = Counts(seed=0)
    chain = Chain({"mine": counts})
    with pytest.raises(OSError, match="full"):
        assert chain.keep(RESULT)
        with chain.state_changes("keep", ("agent", "g")):
            raise OSError("the disk is full")
    with chain.state_changes("chosen", 3):
        pass
    assert chain.keep(RESULT) and counts.seen == 1
    with chain.state_changes("keep", ("agent", "g")):
        pass
    assert chain.keep(RESULT) and counts.seen == 2, "another group of that name"


def test_a_key_that_would_come_back_as_another_is_refused():
    algorithm = Remembers()
    algorithm.table["a", 1] = 1
    with (
        pytest.raises(AlgorithmError, match=r"table has the key \('a', 1\): let keys"),
        Chain({"m": algorithm}).state_changes(),
    ):
        pytest.fail("the run could not be resumed")


def test_a_table_is_not_to_be_replaced():
    algorithm = Remembers()
    chain = Chain({"mine": algorithm})
    with chain.state_changes():
        algorithm.table = Table()
    with (
        pytest.raises(AlgorithmError, match=r"mine\.state raised ValueError: table is another Table"),
        chain.state_changes(),
    ):
        pytest.fail("rows of the first one would stay")


@pytest.mark.parametrize("name", ["deduplicate", "difficulty", "skip_solved", "greso"])
def test_what_is_written_for_a_group_does_not_grow_with_the_tasks(tmp_path, name):
    population = Population(tmp_path, {name: {}}, tasks=10_000)
    (algorithm,) = population.flow.algorithms.by_name.values()
    keep, written = population.flow.ledger._write_state, []

    def measured(changes):
        written.append(sum(len(key) + len(value) for _, _, key, value in changes))
        keep(changes)

    population.flow.ledger._write_state = measured
    population.step()
    few_known = max(written)
    (table,) = [value for value in algorithm.state().values() if isinstance(value, Table)]
    for number in range(2000):
        table[10**9 + number if name == "deduplicate" else f"other-{number}"] = next(iter(table.values()))
    population.step()
    written.clear()
    population.step()
    assert 0 < max(written) <= 2 * few_known
    population.flow.close()
    before = algorithm.state()
    population.open()
    assert population.flow.algorithms.by_name[name].state() == before
