"""What must be true of a run folder in the end, whatever became of the processes that wrote it."""

import re
import sqlite3
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.transcripts import batch_path, read_lines
from flowjax.report.episodes import batches_of
from flowjax.run import read_run
from flowjax.weights.publish import committed_steps, read_adapter


def assert_sound(run_dir: Path) -> None:
    """Every task ended once, nothing was trained on twice, every version was made once and in order."""
    assert_versions_in_order(run_dir)
    assert_tasks_ended(run_dir)
    assert_trained_once(run_dir)
    assert_evaluated(run_dir)
    assert_checkpoints(run_dir)
    assert_documented(run_dir)


def assert_documented(run_dir: Path) -> None:
    """Whatever lies in a run's folder is in the table of docs/report.md."""
    page = (
        (Path(__file__).parents[2] / "docs" / "report.md").read_text().partition("| file | |")[2].partition("\n\n")[0]
    )
    cells = [row.split("|")[1] for row in page.splitlines() if row.startswith("| ")]
    patterns = [re.sub("<[^>]+>", "*", name.split("/")[0]) for cell in cells for name in re.findall("`([^`]+)`", cell)]
    found = {path.name.removesuffix("-wal").removesuffix("-shm") for path in run_dir.iterdir()}
    assert len(patterns) > 20
    assert not [name for name in found if not any(fnmatch(name, pattern) for pattern in patterns)]


def assert_versions_in_order(run_dir: Path) -> None:
    """Each version has one line, in order. A step whose checkpoint was lost is taken and written again."""
    train = [entry for entry in read_metrics(run_dir) if entry["kind"] == "train"]
    for policy, own in read_run(run_dir).policies.items():
        steps = [entry["step"] for entry in train if entry["policy"] == policy]
        assert steps == list(range(1, own.trainer.steps + 1)), policy
    assert max(entry["staleness_max"] for entry in train) <= read_run(run_dir).config.dataflow.max_staleness
    # The engine's log-probabilities are those of the version that it says it served.
    assert max(entry["mismatch_kl"] for entry in train if "mismatch_kl" in entry) < 1e-5


def assert_tasks_ended(run_dir: Path) -> None:
    """Nobody holds a lease any more, and of each policy's groups the ledger has those of the newest batches and no more
    others than are admitted ahead; what no checkpoint needs again it has forgotten."""
    run = read_run(run_dir)
    with sqlite3.connect(run_dir / "dataflow.sqlite") as db:
        batches = db.execute("SELECT policy, step, group_id FROM batches").fetchall()
        policy_groups = db.execute("SELECT policy, group_id, state FROM policy_groups WHERE policy != ''").fetchall()
        leased = db.execute("SELECT COUNT(*) FROM episodes WHERE state = 'leased'").fetchone()[0]
    assert not leased, f"{leased} episodes are still leased"
    for policy, own in run.policies.items():
        taken = [(step, group_id) for name, step, group_id in batches if name == policy]
        groups, steps = own.trainer.groups_per_step, Counter(step for step, _ in taken)
        assert steps == dict.fromkeys(range(min(steps), own.trainer.steps), groups), policy
        states = {group_id: state for name, group_id, state in policy_groups if name == policy}
        assert {group_id for _, group_id in taken} >= {
            group_id for group_id, state in states.items() if state == "used"
        }
        left = [group_id for group_id, state in states.items() if state in ("open", "complete", "ready")]
        assert len(left) <= 2 * (run.config.dataflow.max_staleness + 1) * groups, f"{policy}: {left}"


def assert_trained_once(run_dir: Path) -> None:
    """Every batch has its groups, no group and no trajectory is in two batches of a policy, and each was played by a
    version that its batch admits."""
    run = read_run(run_dir)
    for policy, own in run.policies.items():
        assert batches_of(run_dir, policy) == list(range(own.trainer.steps)), policy
        trained: list[str] = []
        groups: list[str] = []
        for step in range(own.trainer.steps):
            file = batch_path(run_dir, policy, step)
            lines = list(read_lines(file))
            names = [line["trajectory_id"] for line in lines]
            trained += names
            groups += (of_batch := sorted({name.partition("/")[0] for name in names}))
            assert len(of_batch) == own.trainer.groups_per_step, f"{policy}, {file}"
            assert all("advantage" in turn for line in lines for turn in line["turns"]), f"{policy}, {file}"
            versions = {turn["version"] for line in lines for turn in line["turns"]}
            assert versions <= set(range(max(step - run.config.dataflow.max_staleness, 0), step + 1)), (
                f"{policy}, {file}"
            )
        assert len(trained) == len(set(trained)), f"a trajectory is in two batches of {policy}"
        assert len(groups) == len(set(groups)), f"a group is in two batches of {policy}"


def assert_evaluated(run_dir: Path) -> None:
    """Before, after and in between, each once and with every task."""
    run = read_run(run_dir)
    lines = [entry for entry in read_metrics(run_dir) if entry["kind"] == "eval"]
    names = [tuple(sorted(line["versions"].items())) for line in lines]
    assert len(names) == len(set(names)), names
    policies = run.policies
    assert tuple(sorted((policy, 0) for policy in policies)) in names
    assert tuple(sorted((policy, own.trainer.steps) for policy, own in policies.items())) in names
    for line in lines:
        assert (line["episodes"], line["unfinished"]) == (run.config.eval.tasks, 0), line


def assert_checkpoints(run_dir: Path) -> None:
    """The newest ones are there, whole."""
    for policy, own in read_run(run_dir).policies.items():
        folder = run_dir / "checkpoints" / policy
        steps = committed_steps(folder)
        assert steps == list(range(own.trainer.steps - own.trainer.keep_checkpoints + 1, own.trainer.steps + 1)), policy
        for step in steps:
            arrays = list(_leaves(read_adapter(folder, step)))
            assert arrays and all(np.isfinite(array).all() for array in arrays), (policy, step)


def _leaves(tree: object) -> Sequence[np.ndarray]:
    return [leaf for each in tree.values() for leaf in _leaves(each)] if isinstance(tree, dict) else [np.asarray(tree)]
