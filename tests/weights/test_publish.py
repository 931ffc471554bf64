"""Checkpoints: what is committed is complete, what fails says why and harms nothing else."""

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flowjax.monitor.trouble import quiet_orbax
from flowjax.weights import publish
from flowjax.weights.publish import (
    CheckpointError,
    Checkpoints,
    commit_of,
    committed_steps,
    read_adapter,
    whole_steps,
)


def small_adapter(value: float, leaves: int = 3) -> dict:
    return {f"layer_{i}": {"a": jnp.full((4, 8), value + i), "b": jnp.full((8, 4), -value)} for i in range(leaves)}


def save(checkpoints: Checkpoints, step: int, *, whole: bool = True) -> None:
    adapter = small_adapter(float(step))
    optimizer = optax.adam(1e-3).init(adapter)
    checkpoints.save(step, adapter=adapter, optimizer=optimizer, data={"step": step}, whole=whole)


def test_restores_what_was_saved_in_the_asked_structure(tmp_path):
    adapter = small_adapter(2.0)
    optimizer = optax.tree_utils.tree_map_params(optax.adam(1e-3), lambda x: x + 3.0, optax.adam(1e-3).init(adapter))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, adapter=adapter, optimizer=optimizer, data={"iterator": {"position": 17}})
        checkpoints.wait()
        abstract = jax.eval_shape(lambda: (adapter, optimizer))
        restored = checkpoints.restore(5, adapter=abstract[0], optimizer=abstract[1])
    assert jax.tree.structure(restored.optimizer) == jax.tree.structure(optimizer)
    jax.tree.map(np.testing.assert_array_equal, (restored.adapter, restored.optimizer), (adapter, optimizer))
    assert restored.data == {"iterator": {"position": 17}}


def test_restores_onto_the_shardings_asked_for(tmp_path):
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 0)
        checkpoints.wait()
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), small_adapter(0.0))
        restored = checkpoints.restore_adapter(0, wanted)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(restored))


def test_adapter_is_readable_without_model_or_optimizer(tmp_path):
    class LoraParam(nnx.Param):
        pass

    state = nnx.State({"q_proj": {"a": LoraParam(jnp.arange(6.0).reshape(2, 3))}})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, adapter=state, optimizer={}, data={})
    assert not (tmp_path / "1" / "optimizer").exists()
    adapter = read_adapter(tmp_path, 1)
    assert set(adapter) == {"q_proj"}
    np.testing.assert_array_equal(adapter["q_proj"]["a"], np.arange(6.0).reshape(2, 3))


def test_keeps_the_newest_and_every_nth(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(8):
            save(checkpoints, step)
    assert committed_steps(tmp_path) == [0, 4, 6, 7]


def test_a_save_is_not_disturbed_by_donating_its_arrays(tmp_path):
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0.0 - 1.0, tree), donate_argnums=0)
    adapter = {f"layer_{i}": jnp.full((256, 256), 7.0) for i in range(16)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, adapter=adapter, optimizer={}, data={})
        jax.block_until_ready(update(adapter))
    assert all((array == 7.0).all() for array in read_adapter(tmp_path, 0).values())


WRITER = """
import sys, optax, jax.numpy as jnp
from pathlib import Path
from flowjax.weights.publish import Checkpoints
adapter = {f"layer_{i}": jnp.full((64, 64), float(i)) for i in range(24)}
checkpoints = Checkpoints(Path(sys.argv[1]), keep=100)
step = (checkpoints.latest() or 0) + 1
while True:
    checkpoints.save(step, adapter=adapter, optimizer=optax.adam(1e-3).init(adapter), data={"step": step})
    print(step, flush=True)
    step += 1
"""


def test_kill_during_save_leaves_only_complete_steps(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(4):
        process.stdout.readline()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("*tmp*/*")):
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    steps = committed_steps(tmp_path)
    assert steps
    assert list(tmp_path.glob("*tmp*")), "killed between two saves: the test has to hit one in progress"
    for step in steps:
        adapter = read_adapter(tmp_path, step)
        assert [adapter[f"layer_{i}"][0, 0] for i in range(24)] == list(range(24))
    with Checkpoints(tmp_path, keep=100) as checkpoints:
        assert checkpoints.committed_steps() == steps
        save(checkpoints, steps[-1] + 1)
    assert committed_steps(tmp_path) == [*steps, steps[-1] + 1]


def test_a_copy_of_ones_own_beside_the_checkpoints_stays(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in range(4):
            save(checkpoints, step)
    (tmp_path / "3").rename(tmp_path / "3.bak")
    shutil.copytree(tmp_path / "2", tmp_path / "2.before-my-change")
    for unfinished in ("4", "4.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp-1234"):
        (tmp_path / unfinished).mkdir()
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.committed_steps() == [1, 2]
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"1", "2", "2.before-my-change", "3.bak"}
        save(checkpoints, 3)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} >= {"2.before-my-change", "3.bak"}
    (tmp_path / "3").rename(tmp_path / "3.new")
    (tmp_path / "3.bak").rename(tmp_path / "3")
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.latest() == 3


TRAINS = """
import os, sys, time, jax.numpy as jnp
from pathlib import Path
from flowjax.weights.publish import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]))
checkpoints.save(0, adapter={"a": jnp.zeros(4)}, optimizer={}, data={})
checkpoints.wait()
(checkpoints.directory / "1.orbax-checkpoint-tmp").mkdir()  # the version that it is at
if os.fork() == 0:
    time.sleep(300); os._exit(0)
print("trains", flush=True)
sys.stdin.read()
checkpoints.close()
"""


@pytest.fixture
def first_trainer(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "trains\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_second_trainer_is_refused_for_as_long_as_the_first_lives(tmp_path, first_trainer, monkeypatch):
    """One that the dataflow had fenced went on saving, and the newer one swept what it was writing."""
    monkeypatch.setattr(publish, "_HANDOVER_S", 0.0)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=rf"another trainer \(process {first_trainer.pid} on .*End that process"):
        Checkpoints(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    first_trainer.kill()  # as kill -9 does; the child that it forked lives on
    assert first_trainer.wait() == -signal.SIGKILL
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1)
    assert committed_steps(tmp_path) == [0, 1]


def test_a_trainer_that_ends_in_order_hands_its_checkpoints_over(tmp_path, first_trainer):
    assert first_trainer.stdin is not None
    first_trainer.stdin.close()
    with Checkpoints(tmp_path) as checkpoints:  # waits for it
        assert checkpoints.latest() == 0


def test_the_later_processes_of_one_trainer_need_no_lock(tmp_path, first_trainer, monkeypatch):
    monkeypatch.setattr(publish, "_HANDOVER_S", 0.0)
    monkeypatch.setattr(publish.jax, "process_index", lambda: 1)
    Checkpoints(tmp_path).close()
    assert "process " + str(first_trainer.pid) in (tmp_path / "trainer.lock").read_text()


READ_DAMAGED = """
import sys, time, jax.numpy as jnp
from pathlib import Path
from flowjax.monitor.trouble import quiet_orbax
from flowjax.weights import publish
from flowjax.weights.publish import CheckpointError, Checkpoints, read_adapter
folder = Path(sys.argv[1])
like = {f"layer_{i}": {"a": jnp.zeros((4, 8)), "b": jnp.zeros((8, 4))} for i in range(3)}
for read in (lambda: read_adapter(folder, 3), lambda: Checkpoints(folder).restore_adapter(3, like)):
    try:
        read()
    except CheckpointError as error:
        print(error)
time.sleep(0.3)
"""


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_checkpoint_is_named_with_a_remedy_and_without_traces(tmp_path, damage):
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 3)
    largest = max((tmp_path / "3" / "adapter").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    if damage == "truncate":
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    else:
        shutil.rmtree(largest.parent)
    done = subprocess.run([sys.executable, "-c", READ_DAMAGED, str(tmp_path)], capture_output=True, text=True)
    messages = done.stdout.splitlines()
    assert len(messages) == 2
    for message in messages:
        assert str(tmp_path / "3" / "adapter") in message and "rename the folder of its step" in message
    assert "Traceback" not in done.stderr


def test_another_shape_and_a_missing_step_are_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 0)
        checkpoints.wait()
        with pytest.raises(CheckpointError, match=r"policy\.lora"):
            checkpoints.restore_adapter(0, jax.tree.map(lambda x: jnp.zeros((9, 9)), small_adapter(0.0)))
        with pytest.raises(CheckpointError, match=r"no committed checkpoint of step 4 .* it has 0"):
            checkpoints.restore_adapter(4, small_adapter(0.0))


FILL_THE_DISK = """
import resource, signal, sys, jax.numpy as jnp, numpy as np
from pathlib import Path
from flowjax.monitor.trouble import quiet_orbax
from flowjax.weights import publish
from flowjax.weights.publish import CheckpointError, Checkpoints, read_adapter
folder = Path(sys.argv[1])
if sys.argv[2] == "limit":  # no private mount here: let writes of big files fail instead
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = Checkpoints(folder / "checkpoints", keep=100)
def adapter(step):
    noise = np.random.default_rng(step).normal(size=(256, 256))
    return {"a": jnp.asarray(noise), "b": jnp.full((4, 4), float(step))}
checkpoints.save(0, adapter=adapter(0), optimizer={}, data={})
checkpoints.wait()
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    for step in range(1, 60):
        checkpoints.save(step, adapter=adapter(step), optimizer={}, data={})
except CheckpointError as error:
    print("MESSAGE", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
(folder / "ballast").unlink(missing_ok=True)
steps = checkpoints.committed_steps()
assert all(read_adapter(checkpoints.directory, step)["b"][0, 0] == step for step in steps)
checkpoints.save(100, adapter=adapter(100), optimizer={}, data={})
checkpoints.close()
print("KEPT", steps, "AFTERWARDS", checkpoints.latest())
"""


def test_full_disk_is_said_once_and_earlier_checkpoints_stay(tmp_path):
    mount = (
        f"mount -t tmpfs -o size=4m tmpfs {tmp_path} && dd if=/dev/zero of={tmp_path}/ballast bs=1M count=1 status=none"
    )
    can_mount = subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode == 0
    script = [sys.executable, "-c", FILL_THE_DISK, str(tmp_path), "mount" if can_mount else "limit"]
    command = ["unshare", "-rm", "sh", "-c", mount + ' && exec "$@"', "sh", *script] if can_mount else script
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    message, kept = done.stdout.splitlines()
    assert message.startswith("MESSAGE") and "earlier ones are intact" in message and "--resume" in message
    assert "bytes are free" in message or not can_mount
    assert kept.startswith("KEPT [0") and kept.endswith("AFTERWARDS 100")
    assert "Traceback" not in done.stderr


def test_of_several_processes_the_one_whose_save_fails_goes_without_the_others(tmp_path, monkeypatch):
    """A new manager, and the end of the old one, are met by all of them."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 0)
    checkpoints.wait()
    manager = checkpoints._manager
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(manager, "save", lambda *args, **named: (_ for _ in ()).throw(OSError("no disk")))
    monkeypatch.setattr(Checkpoints, "_open", lambda _: pytest.fail("it would wait for the others"))
    monkeypatch.setattr(Checkpoints, "close", lambda _: pytest.fail("it would wait for the others"))
    with pytest.raises(CheckpointError, match="no disk"), checkpoints:
        save(checkpoints, 1)
    monkeypatch.undo()
    checkpoints.close()


@pytest.mark.parametrize("raised_in, shown", [("orbax/checkpoint/x.py", False), ("flowjax/x.py", True)])
def test_errors_of_arrays_that_nobody_waited_for_are_not_told_again(raised_in, shown, caplog):
    quiet_orbax()
    names = {}
    exec(compile("async def write():\n    raise OSError('no space')", raised_in, "exec"), names)

    async def save():
        asyncio.ensure_future(names["write"]())  # noqa: RUF006 - forgetting it is the point
        await asyncio.sleep(0)

    asyncio.run(save())
    gc.collect()
    assert ("never retrieved" in caplog.text) is shown


def damage(folder: Path, item: str) -> None:
    """Cut the files of an item, as a disk that lost its last blocks does."""
    for path in (folder / item).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("item", ["adapter", "optimizer", "data"])
def test_a_damaged_newest_checkpoint_is_set_aside_for_the_one_before(tmp_path, item, caplog):
    like = {"adapter": {"a": jnp.zeros(300)}, "optimizer": {"m": jnp.zeros(300)}}

    def write(checkpoints: Checkpoints, step: int, value: float) -> None:
        trees = {name: jax.tree.map(lambda leaf: leaf + value, tree) for name, tree in like.items()}
        checkpoints.save(step, trees["adapter"], trees["optimizer"], {"counted": step})
        checkpoints.wait()

    with Checkpoints(tmp_path, keep=5) as checkpoints:
        for step in (1, 2, 3):
            write(checkpoints, step, float(step))
    for step in (2, 3):
        damage(tmp_path / str(step), item)
    with Checkpoints(tmp_path, keep=5) as checkpoints:
        newest = checkpoints.restore_newest(**like)
        assert newest is not None
        step, restored = newest
        assert (step, restored.data, float(restored.adapter["a"][0])) == (1, {"counted": 1}, 1.0)
        assert checkpoints.committed_steps() == [1]
        assert (tmp_path / "damaged-2").is_dir() and (tmp_path / "damaged-3").is_dir()
        assert f"checkpoint {tmp_path / '3'} cannot be read" in caplog.text and "goes on from step 1" in caplog.text
        write(checkpoints, 2, 7.0)  # made anew, by the same manager
    with Checkpoints(tmp_path, keep=5) as checkpoints:
        assert (tmp_path / "damaged-3").is_dir(), "kept for whoever wants to look at it"
        newest = checkpoints.restore_newest(**like)
        assert newest is not None and newest[0] == 2 and float(newest[1].adapter["a"][0]) == 7.0


def test_of_several_processes_what_an_unreadable_checkpoint_says_to_do_helps(tmp_path, monkeypatch):
    like = {"adapter": {"a": jnp.zeros(300)}, "optimizer": {}}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, like["adapter"], {}, {})
            checkpoints.wait()
        damage(tmp_path / "2", "adapter")
        with monkeypatch.context() as several, pytest.raises(CheckpointError, match="to damaged-<step>"):
            several.setattr(jax, "process_count", lambda: 2)
            checkpoints.restore_newest(**like)
    (tmp_path / "2").rename(tmp_path / "damaged-2")
    with Checkpoints(tmp_path) as checkpoints, monkeypatch.context() as several:
        several.setattr(jax, "process_count", lambda: 2)
        newest = checkpoints.restore_newest(**like)
        assert newest is not None and newest[0] == 1


def test_checkpoints_of_another_shape_are_not_taken_for_damaged(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"a": jnp.zeros(3)}, {}, {})
            checkpoints.wait()
        with pytest.raises(CheckpointError, match=rf"{tmp_path / '2'}"):
            checkpoints.restore_newest(adapter={"b": jnp.zeros(5)}, optimizer={})
        assert checkpoints.committed_steps() == [1, 2]
        damage(tmp_path / "1", "adapter")
        found = checkpoints.restore_adapters([1, 2], {"a": jnp.zeros(3)})
        assert list(found) == [2]


def test_versions_between_checkpoints_go_first_and_the_newest_checkpoints_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=8) as checkpoints:
        for step in range(14):
            save(checkpoints, step, whole=step % 3 == 0)
    assert whole_steps(tmp_path) == [0, 9, 12], "the newest two, and one that is kept for good"
    assert committed_steps(tmp_path) == [0, 8, 9, 12, 13], "the newest two versions, too"
    assert [path.name for path in (tmp_path / "13").iterdir() if path.is_dir()] == ["adapter"]
    assert read_adapter(tmp_path, 13)["layer_1"]["a"][0, 0] == 14.0


def test_links_in_the_place_of_checkpoints_harm_none(tmp_path):
    """One to a checkpoint that was moved to another disk, which Orbax fails to delete; and one to nothing, with the
    number of a coming version."""
    steps, moved = tmp_path / "steps", tmp_path / "moved"
    with Checkpoints(steps, keep=1) as checkpoints:
        save(checkpoints, 1)
    (steps / "1").rename(moved)
    (steps / "1").symlink_to(moved)
    (steps / "3").symlink_to(tmp_path / "gone")
    with Checkpoints(steps, keep=1) as checkpoints:
        for step in (2, 3, 4):
            save(checkpoints, step)
    assert committed_steps(steps) == [1, 4] and (steps / "1").is_symlink()
    (steps / "9").symlink_to(moved)
    (steps / "9" / "data").rename(tmp_path / "data")  # no trainer can go on from it: it is lost
    with Checkpoints(steps, keep=1) as checkpoints:
        assert checkpoints.committed_steps() == [1, 4]
    assert not (steps / "9").is_symlink() and (moved / publish.COMMIT_MARKER).exists()


def test_a_trainer_goes_on_from_the_newest_checkpoint_and_makes_the_versions_after_it_anew(tmp_path, caplog):
    adapter = small_adapter(0.0)
    like = {"adapter": adapter, "optimizer": optax.adam(1e-3).init(adapter)}
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step in range(6):
            save(checkpoints, step, whole=step % 3 == 0)
    lost = {step: commit_of(tmp_path, step) for step in (4, 5)}
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        assert checkpoints.committed_steps() == [0, 1, 2, 3], "nobody may serve the others any more"
        assert "versions 4, 5 were published after checkpoint 3 and are lost" in caplog.text
        newest = checkpoints.restore_newest(**like)
        assert newest is not None and newest[0] == 3 and newest[1].data == {"step": 3}
        for step in (4, 5):
            save(checkpoints, step, whole=False)
        checkpoints.wait()
        assert all(commit_of(tmp_path, step) not in (None, commit) for step, commit in lost.items())
    damage(tmp_path / "3", "optimizer")
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        newest = checkpoints.restore_newest(**like)
        assert newest is not None and newest[0] == 0
        assert checkpoints.committed_steps() == [0], "what came between the two checkpoints is lost with the second"
    shutil.rmtree(tmp_path / "0" / "data")
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="no checkpoint to go on from"):
        checkpoints.restore_newest(**like)
