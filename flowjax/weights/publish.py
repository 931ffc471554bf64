"""Versions of one policy. A committed step *is* the publication of its version: nothing else announces it.

The folder of a checkpoint holds three items, each readable without the others: `adapter` (what the engine needs),
`optimizer` and `data` (JSON: counters, iterator and random state). Where all weights are trained a fourth,
`handed_over`, has them as engines read them: nobody has to read the trained ones, twice as large, to make these.

A version between two checkpoints has `handed_over` alone, or `adapter` where there is none. It is a version like any
other, but no trainer can go on from it: it lacks `data`, which every checkpoint has.
"""

import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import future
from orbax.checkpoint.checkpoint_managers import preservation_policy

from flowjax.files import FileHeldError, held, remove_folder
from flowjax.monitor.trouble import explain, quiet_orbax

PyTree = Any
COMMIT_MARKER = "commit_success.txt"
HANDED_OVER = "handed_over"  # in a step: the folder that engines are given; in a node's copy it replaces the arrays
_STATE = "data"  # only checkpoints have it, not the versions between them
_LOCK_FILE = "trainer.lock"
_HANDOVER_S = 10.0  # longest that a trainer that is stopping may take
_log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message names the path and the remedy."""


@dataclass(frozen=True)
class Restored:
    """Contents of a checkpoint, on the devices that were asked for."""

    adapter: PyTree
    optimizer: PyTree
    data: dict[str, Any]


def newest_first(directory: Path) -> Iterator[int]:
    """Steps published in `directory`, descending. The marker of a step is looked for only when that step is asked for,
    so that the first few are cheap to poll, however many are kept. One listing, no manager.

    Orbax writes into a folder of another name, puts the marker there and renames it last (where renames are not atomic
    it writes in place and the marker alone commits), so a numbered folder with a marker is complete.
    """
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        steps = sorted((int(entry.name) for entry in entries if entry.name.isdecimal()), reverse=True)
        yield from (step for step in steps if (directory / str(step) / COMMIT_MARKER).exists())


def committed_steps(directory: Path) -> list[int]:
    """Steps published in `directory`, ascending."""
    return sorted(newest_first(directory))


def whole_steps(directory: Path) -> list[int]:
    """Those of the steps published in `directory` that a trainer can go on from, ascending."""
    return [step for step in committed_steps(directory) if (directory / str(step) / _STATE).exists()]


def has_arrays(directory: Path, step: int) -> bool:
    """True if `read_adapter` can read the step; False if it has only the folder that engines are given."""
    folder = directory / str(step)
    return (folder / "adapter").exists() or not (folder / HANDED_OVER).exists()


def commit_of(directory: Path, step: int) -> str | None:
    """The commit that made a step, in digits; None where there is no such step.

    A version is its number and its commit: one that a trainer makes anew, because it has gone back, has an old number
    and a new commit. The commit is the marker's time in nanoseconds; in a node's copy the marker holds that of the run.
    """
    try:
        with (directory / str(step) / COMMIT_MARKER).open() as marker:
            copied, made_ns = marker.read(), os.fstat(marker.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    return copied if copied.isdecimal() else str(made_ns)  # Orbax writes a sentence


def read_adapter(directory: Path, step: int) -> dict[str, Any]:
    """The adapter of a committed step as nested dicts of host arrays, whatever devices it was saved from.

    Raises:
        CheckpointError: there is no such step or it cannot be read.
    """
    path = epath.Path(_committed_path(directory, step) / "adapter")
    with _readable(path):
        handler = ocp.PyTreeCheckpointHandler()
        metadata: Any = handler.metadata(path)
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
        return _unboxed(handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=on_host)))


class _FolderHandler(ocp.AsyncCheckpointHandler):
    """Has an item of a step made by the caller's function, in the background, as Orbax writes the arrays."""

    async def async_save(self, directory: epath.Path, args: "_FolderSave") -> list[future.Future]:
        return [future.CommitFutureAwaitingContractedSignals(self._make(directory, args), name=HANDED_OVER)]

    async def _make(self, directory: epath.Path, args: "_FolderSave") -> None:
        directory.rmdir()  # made by Orbax; `new_folder` renames a whole folder into place, and refuses one that exists
        args.make(Path(directory))

    def save(self, directory: epath.Path, args: "_FolderSave") -> None:
        raise NotImplementedError

    def restore(self, directory: epath.Path, args: Any = None) -> None:
        raise NotImplementedError


@ocp.args.register_with_handler(_FolderHandler, for_save=True, for_restore=True)  # Orbax asks for both
@dataclass
class _FolderSave(ocp.args.CheckpointArgs):
    make: Callable[[Path], None] = field(repr=False)  # it holds all weights, which no log should print


class _KeepWhole(preservation_policy.PreservationPolicy):
    """Orbax policy that keeps the newest checkpoints, however many versions lie between and after them."""

    def __init__(self, directory: Path, keep: int):
        self._directory, self._keep = directory, keep
        self.saving: int | None = None  # a checkpoint that is on its way to the disk

    def should_preserve(
        self,
        checkpoints: Sequence[preservation_policy.PolicyCheckpointInfo],
        *,
        context: preservation_policy.PreservationContext,
    ) -> Sequence[bool]:
        del context
        whole = {*whole_steps(self._directory), self.saving}
        newest = [info.step for info in checkpoints if info.step in whole][-self._keep :]
        # Orbax fails at a link, as to a folder on another disk: whoever made it may delete it.
        return [info.step in newest or (self._directory / str(info.step)).is_symlink() for info in checkpoints]


class Checkpoints:
    """Saves and restores the versions of one policy, and keeps every other trainer away from them meanwhile.

    Versions beyond the newest checkpoint are deleted: the state that led to them was lost with an earlier trainer, and
    this one makes others with their numbers.

    One writer per directory, which may be several processes: the first of them holds a lock. Without it a trainer that
    another has replaced at the dataflow could still commit the version that it was working on, and engines serve every
    version that is committed.

    Args:
        directory: of the policy, made where it is missing.
        keep: newest versions that are kept, and newest checkpoints.
        keep_every: every step divisible by it is kept, too, as it is; 0: none of those.

    Raises:
        CheckpointError: another trainer writes there, or nobody can.
    """

    def __init__(self, directory: Path, *, keep: int = 3, keep_every: int = 0) -> None:
        self.directory = Path(directory).absolute()
        whole = _KeepWhole(self.directory, keep)
        policies = [preservation_policy.LatestN(keep), whole]
        policies += [preservation_policy.EveryNSteps(keep_every)] if keep_every else []
        self._whole, self._kept = whole, preservation_policy.AnyPreservationPolicy(policies)
        quiet_orbax()
        with _writable(self.directory), ExitStack() as opened:
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                opened.enter_context(_sole_writer(self.directory))
                self._remove_unfinished()  # under the lock: else it could be a version that another trainer is saving
                self._remove_lost(max(whole_steps(self.directory), default=None))
            if jax.process_count() > 1:  # the others wait until the first has the lock and has swept
                multihost_utils.sync_global_devices(f"checkpoints of {self.directory}")
            self._manager = self._open()
            self._lock = opened.pop_all()

    def save(
        self,
        step: int,
        adapter: PyTree,
        optimizer: PyTree,
        data: dict[str, Any],
        *,
        hand_over: Callable[[Path], None] | None = None,
        whole: bool = True,
    ) -> None:
        """Copy the state off the devices and return; writing goes on in the background until the step commits.

        A failure in the background is raised by the next `save`, `wait` or `close`.

        Args:
            hand_over: makes the folder that engines are given, which is then a part of the version.
            whole: save a checkpoint. Else a version that no trainer can go on from: only the folder that engines are
                given or, without `hand_over`, the adapter.
        """
        self.wait()  # one at a time: versions commit in order, and a failed one is not followed by a later one
        trees = {"adapter": adapter, "optimizer": optimizer} if whole else {}
        if not whole and hand_over is None:
            trees["adapter"] = adapter
        # Orbax cannot save an empty tree, such as the state of plain SGD: `_restore_like` does without it, too.
        items: dict[str, ocp.args.CheckpointArgs] = {
            name: ocp.args.PyTreeSave(tree) for name, tree in trees.items() if jax.tree.leaves(tree)
        }
        if whole:
            items[_STATE] = ocp.args.JsonSave(data)
        if hand_over is not None:
            items[HANDED_OVER] = _FolderSave(hand_over)
        self._whole.saving = step if whole else None
        with self._saving():
            self._manager.save(step, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Return when the last save is committed.

        Raises:
            CheckpointError: it failed; earlier checkpoints are as they were.
        """
        with self._saving():
            self._manager.wait_until_finished()

    def check(self) -> None:
        """Raise as `wait` does, if the last save has failed by now."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def restore(self, step: int, *, adapter: PyTree, optimizer: PyTree) -> Restored:
        """The whole checkpoint, shaped and placed like `adapter` and `optimizer` (arrays or ShapeDtypeStructs).

        Raises:
            CheckpointError: there is no such step, it cannot be read, or it has another shape.
        """
        path = _committed_path(self.directory, step)
        with _readable(path):
            saved: Any = ocp.JsonCheckpointHandler().restore(epath.Path(path / "data"), args=ocp.args.JsonRestore())
            return Restored(
                _restore_like(path / "adapter", adapter), _restore_like(path / "optimizer", optimizer), saved
            )

    def restore_newest(self, *, adapter: PyTree, optimizer: PyTree) -> tuple[int, Restored] | None:
        """The newest checkpoint that can be read and its step, as `restore`; None where there is no checkpoint at all.

        Later ones are set aside as `damaged-<step>` with a warning, and all versions after the restored one are made
        anew: the dataflow still has the batches that led to them, as it keeps those of all steps that checkpoints span.

        Raises:
            CheckpointError: none can be read; says why the newest cannot.
        """
        steps = whole_steps(self.directory)
        if not steps and (versions := self.committed_steps()):
            raise CheckpointError(
                f"{self.directory} has versions {', '.join(map(str, versions))}, but no checkpoint to go on from: put "
                "one back, or start another run"
            )
        problems: dict[int, CheckpointError] = {}
        for step in reversed(steps):
            try:
                restored = self.restore(step, adapter=adapter, optimizer=optimizer)
            except CheckpointError as error:
                # Several processes would have to agree on the step. And if this one is short of files or memory, or may
                # not read, that says nothing about the checkpoint.
                if jax.process_count() > 1 or _is_fault_of_reader(error):
                    raise
                problems[step] = error
                continue
            if problems:
                self._set_aside(problems, step)
            return step, restored
        if problems:
            raise problems[steps[-1]]  # as all fail, the run's model or optimiser is probably another one now
        return None

    def _set_aside(self, problems: Mapping[int, CheckpointError], step: int) -> None:
        self._manager.close()
        for damaged, error in problems.items():
            aside = self.directory / f"damaged-{damaged}"
            if aside.exists():
                shutil.rmtree(aside)
            (self.directory / str(damaged)).rename(aside)
            _log.warning("%s. It is set aside as %s; the run goes on from step %d", error, aside, step)
        self._remove_lost(step)
        self._manager = self._open()  # the old one still lists the steps that are gone

    def restore_adapters(self, steps: Iterable[int], adapter: PyTree) -> dict[int, PyTree]:
        """The adapters of those of these steps that can be read, by step; a warning is logged about the others."""
        found = {}
        for step in steps:
            try:
                found[step] = self.restore_adapter(step, adapter)
            except CheckpointError as error:
                _log.warning("%s; the sampler's log-probs of that version are not compared with", error)
        return found

    def restore_adapter(self, step: int, adapter: PyTree) -> PyTree:
        """Only the adapter, shaped and placed like `adapter`; the optimizer is not read.

        Raises:
            CheckpointError: as `restore`.
        """
        path = _committed_path(self.directory, step) / "adapter"
        with _readable(path):
            return _restore_like(path, adapter)

    def committed_steps(self) -> list[int]:
        return committed_steps(self.directory)

    def latest(self) -> int | None:
        """The newest committed step, or None before the first."""
        return next(newest_first(self.directory), None)

    def close(self) -> None:
        with self._lock:
            self.wait()
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None or jax.process_count() == 1:  # one of several that fails would be alone in Orbax's barrier
            self.close()

    def _open(self) -> ocp.CheckpointManager:
        handlers: dict[str, Any] = {name: ocp.PyTreeCheckpointHandler() for name in ("adapter", "optimizer")}
        handlers |= {_STATE: ocp.JsonCheckpointHandler(), HANDED_OVER: _FolderHandler()}
        options = ocp.CheckpointManagerOptions(preservation_policy=self._kept, lightweight_initialize=True)
        options.async_options = ocp.AsyncOptions(barrier_sync_fn=_wait_for_all)
        return ocp.CheckpointManager(self.directory, item_handlers=handlers, options=options)

    def _remove_unfinished(self) -> None:
        """Delete rests of a killed writer: Orbax refuses to write a step while an unfinished folder of it exists."""
        for entry in self.directory.iterdir():
            step, unfinished, _ = entry.name.partition(".orbax-checkpoint-tmp")  # 3.bak is somebody's own copy
            if step.isdecimal() and (unfinished or not (entry / COMMIT_MARKER).exists()):
                remove_folder(entry)

    def _remove_lost(self, newest: int | None) -> None:
        """Delete the versions beyond the step that the trainer goes on from, the newest first: followers, which serve
        the newest one, so step back through versions that are still there."""
        lost = [step for step in self.committed_steps() if newest is not None and step > newest]
        for step in reversed(lost):
            remove_folder(self.directory / str(step), first=COMMIT_MARKER)  # so no reader sees half of a version
        if lost:
            those = ", ".join(map(str, lost))
            _log.warning("versions %s were published after checkpoint %s and are lost: made anew", those, newest)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            with _writable(self.directory):
                yield
        except CheckpointError:
            if jax.process_count() == 1:  # one of several would wait here for the others
                self._remove_unfinished()
                self._manager = self._open()  # the old manager would raise the same error again
            raise


def _wait_for_all(*, key: str, timeout_ms: int) -> None:
    """Barrier of all processes. One whose save has failed passes it: the others wait at another one, for 20 minutes."""
    if sys.exc_info()[0] is None:
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _is_fault_of_reader(error: BaseException) -> bool:
    """True if a checkpoint could not be read because the process lacked something (files, memory, rights)."""
    # An input/output error is explained as a fault of the machine, too, but it is the checkpoint's disk.
    return bool(explain(error)) and os.strerror(errno.EIO) not in explain(error)


def _restore_like(path: Path, tree: PyTree) -> PyTree:
    if not jax.tree.leaves(tree):  # an optimizer without state, which Orbax would not have saved
        return tree
    args = ocp.args.PyTreeRestore(item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
    return ocp.PyTreeCheckpointHandler().restore(epath.Path(path), args=args)


def _unboxed(tree: Any) -> Any:
    """The tree with bare arrays: Flax variables are saved as `{"value": array}`, which needs the model to be read."""
    if not isinstance(tree, dict):
        return tree
    return tree["value"] if set(tree) == {"value"} else {key: _unboxed(child) for key, child in tree.items()}


def _committed_path(directory: Path, step: int) -> Path:
    path = Path(directory).absolute() / str(step)
    if not (path / COMMIT_MARKER).exists():
        found = ", ".join(map(str, committed_steps(directory))) or "none"
        raise CheckpointError(f"there is no committed checkpoint of step {step} in {directory}: it has {found}")
    return path


@contextmanager
def _readable(path: os.PathLike[str]) -> Iterator[None]:
    quiet_orbax()
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read ({_first_line(error)}): rename the folder of its step to damaged-<step> "
            "to take the one before, or give a model and policy.lora of the shape it was saved with"
        ) from error


@contextmanager
def _sole_writer(directory: Path) -> Iterator[None]:
    try:
        with held(directory / _LOCK_FILE, wait_s=_HANDOVER_S):
            yield
    except FileHeldError as error:
        raise CheckpointError(
            f"another trainer ({error}) writes the checkpoints in {directory}: a policy has one trainer. End that "
            "process, then start this one again"
        ) from error


@contextmanager
def _writable(directory: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if "No space left on device" in str(error):
            free_bytes = shutil.disk_usage(directory).free
            remedy = f"only {free_bytes:,} bytes are free: make room, or lower trainer.keep_checkpoints, then --resume"
        else:
            remedy = "see that the folder is on a working disk and may be written to, then --resume"
        raise CheckpointError(
            f"a checkpoint in {directory} could not be written; earlier ones are intact. {remedy} "
            f"({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 300 else text[:300] + "..."
