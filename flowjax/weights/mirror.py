"""A node's copy of a run that another machine has: base models once, then every version that its engines may need.

    python -m flowjax.weights.mirror --run=<run folder of the node>

The copy has the layout of the run's own folder, but each version has the folder that engines are given in place of its
arrays (`flowjax.weights.follow` takes either). Files come from the dataflow (`flowjax.weights.source`). A version comes
as a delta against the newest one that is here, or whole, and is renamed into place when all of it is there.
"""

import argparse
import asyncio
import contextlib
import shutil
import sys
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from absl import logging

from flowjax.config import ConfigError
from flowjax.files import FileHeldError, digest_of, held, new_folder, replace_file
from flowjax.monitor.token import known_run_id, known_token
from flowjax.run import Run, read_endpoints, read_run
from flowjax.weights.delta import DeltaError, open_folder
from flowjax.weights.publish import COMMIT_MARKER, HANDED_OVER, commit_of, committed_steps
from flowjax.weights.source import OriginError, RunSource, source

_LOOK_EVERY_S = 0.5  # at the versions of the run
_LAST_RETRY_S = 10.0
_OF_MODELS = (".json", ".safetensors", ".jinja", ".model", ".txt")  # suffixes of files that a model reads
_OF_MODEL_FOLDERS = (".", "chat_templates")  # and their folders


class OtherModelError(OriginError):
    """A base model here is not the one that the run has."""


async def fetch_bases(run: Run, origin: RunSource) -> None:
    """Fetch the base models of the run that this machine lacks, and check that those already here are the same.

    Raises:
        OtherModelError: the folder of one holds another model, or something else.
        OriginError: the run's machine does not have one either, or it does not come whole.
        aiohttp.ClientError, OSError: the run does not answer any more.
    """
    for name, base in run.bases.items():
        folder = Path(base.model.path)
        if not _has_model(folder):
            async with _sole_fetcher(folder):
                if not _has_model(folder):  # another node may have fetched it while this one waited
                    await _fetch_base(name, folder, origin)
                    continue
        files = (await origin.ask(f"/files/bases/{name}"))["files"]
        if difference := await asyncio.to_thread(_difference, folder, files):
            raise OtherModelError(
                f"config.model.path is {str(folder)!r}, whose {difference} base {name} of the run: give a path that "
                "does not exist, and the run's model is fetched"
            )


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").exists()


@contextlib.asynccontextmanager
async def _sole_fetcher(folder: Path) -> AsyncIterator[None]:
    """While entered, no other node of this machine fetches into the folder; waits until none does."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as lock:
        said = False
        while True:
            try:
                lock.enter_context(held(folder.with_name(f".{folder.name}.lock"), wait_s=0))
                break
            except FileHeldError as other:
                if not said:
                    logging.warning("%s fetches %s: waiting for it", other, folder)
                said = True
            await asyncio.sleep(_LOOK_EVERY_S)
        yield


async def _fetch_base(name: str, folder: Path, origin: RunSource) -> None:
    # Checked before the download: a folder that holds something cannot be replaced by a rename.
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OtherModelError(
            f"config.model.path is {str(folder)!r}, which holds no config.json and is not empty: give a path that does "
            f"not exist, or delete it, and base {name} of the run is fetched"
        )
    unfinished = folder.with_name(f".{folder.name}.part")
    while True:
        had_bytes = origin.received_bytes
        try:
            await origin.copy(f"/files/bases/{name}", unfinished)
            break
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            if origin.received_bytes == had_bytes:
                raise
            logging.warning("base %s goes on where it was (%s: %s)", name, type(error).__name__, error)
    unfinished.rename(folder)


def _difference(folder: Path, files: Sequence[tuple[str, int, str]]) -> str:
    """The first difference of a folder from a model's listed files, in words that go before the model's name; or "".

    Readmes and other formats of the weights do not count.
    """
    listed = {name: rest for name, *rest in files if _is_of_model(Path(name))}
    places = [path.relative_to(folder) for part in _OF_MODEL_FOLDERS for path in (folder / part).glob("*")]
    here = {str(place) for place in places if _is_of_model(place) and (folder / place).is_file()}
    if more := sorted(here - listed.keys()):
        return f"{more[0]} is not in"
    for name, (size_bytes, digest) in listed.items():
        path = folder / name
        if name not in here or path.stat().st_size != size_bytes or digest_of(path) != digest:
            return f"{name} is not that of"
    return ""


def _is_of_model(place: Path) -> bool:
    """True if a file at that place in a model's folder can change the model's output."""
    hidden = place.name.startswith(".")
    return not hidden and place.suffix in _OF_MODELS and str(place.parent) in _OF_MODEL_FOLDERS


_Version = tuple[str, int, str]  # policy, step, identity


@dataclass(frozen=True, slots=True)
class _Listed:
    """Versions of a policy that the run has: all of them by step, and the steps that are fetched."""

    steps: Mapping[int, str]
    fetched: Collection[int]

    def newer_than(self, step: int) -> int:
        """Number of versions to fetch that are newer."""
        return sum(other > step for other in self.fetched)

    def lacks(self, step: int, identity: str | None) -> bool:
        """True if the run has lost that version: it was made anew, or is newer than all that the run has. An older one
        that is not listed may just have been thinned out."""
        return step > max(self.steps, default=-1) or self.steps.get(step, identity) != identity


class WeightsMirror:
    """Brings `checkpoints/` of a run folder to what the run has.

    Args:
        run_dir: of the node.
        one_at_a_time: policies of which an engine holds one version, in place of its base: of these only the newest
            version is fetched, and those that an evaluation needs.
        hold_s: for which the run may hold an answer back while there is nothing new.
    """

    def __init__(
        self, run_dir: Path, origin: RunSource, *, one_at_a_time: Collection[str] = (), hold_s: float = _LOOK_EVERY_S
    ):
        self._checkpoints, self._origin = run_dir / "checkpoints", origin
        self._one_at_a_time, self._latest = one_at_a_time, ""  # the policy of which a version was fetched last
        self._name = uuid.uuid4().hex  # in requests: the run keeps the version that the node of this name has, as base
        self._hold_s, self._mark = hold_s, ""  # the mark of the run's newest answer about its versions

    async def follow(self) -> None:
        """Update until cancelled, however often the run is away."""
        pause_s, said = _LOOK_EVERY_S, ""
        while True:
            try:
                await self.update()
                pause_s, said = _LOOK_EVERY_S, ""
                await self._until_others()
                continue
            except (OriginError, aiohttp.ClientError, OSError) as error:
                if (problem := f"{type(error).__name__}: {error}") != said:
                    logging.warning("versions are not up to date: %s", problem)
                pause_s, said = min(2 * pause_s, _LAST_RETRY_S), problem
            await asyncio.sleep(pause_s)

    async def update(self) -> None:
        """Fetch missing versions, the newest first, and delete those that the run no longer has.

        The run is asked again after each version, since a newer one goes before the rest; and during a download, since
        its trainer may go back and lose that version, or those that are played here.

        Raises:
            OriginError: the run refuses some versions; the others are here.
            aiohttp.ClientError, OSError: a download failed.
        """
        refused: dict[_Version, str] = {}
        while True:
            listed = await self._ask()
            for policy, of in listed.items():
                self._sweep(policy, of.steps)
                # Not the newest that is here, even if the run no longer has it: the next version comes as its delta.
                self._forget(policy, [step for step in self._steps(policy)[:-1] if step not in of.steps])
            missing = [version for version in self._missing(listed) if version not in refused]
            if not missing:
                break
            # Each policy's newest before older ones of any, and the policies in turns.
            version = min(missing, key=lambda of: (listed[of[0]].newer_than(of[1]), of[0] == self._latest))
            policy = self._latest = version[0]
            try:
                await self._fetch_watched(version)
            except (OriginError, DeltaError) as error:
                refused[version] = f"{policy} {version[1]}: {error}"
        if refused:
            raise OriginError("; ".join(refused.values()))

    async def _until_others(self) -> None:
        """Return when the run has other versions than in its newest answer. It holds its answers back until then."""
        mark = self._mark
        while mark == self._mark:
            answer = await self._origin.ask(f"/files/weights?known={mark}&hold_s={self._hold_s:g}")
            mark = answer["mark"]

    async def _ask(self) -> "Mapping[str, _Listed]":
        """Ask for the versions of each policy, and delete those here that the run has lost or made anew.

        They are from an earlier run, or from before its trainer went back; engines must not play them.
        """
        answer = await self._origin.ask("/files/weights")
        self._mark = answer["mark"]
        listed = {}
        for policy, identities in answer["policies"].items():
            steps = {int(step): identity for step, identity in identities.items()}
            pinned, newest = answer["pinned"].get(policy, ()), max(steps, default=-1)
            alone = policy in self._one_at_a_time
            fetched = {step for step in steps if not alone or step == newest or step in pinned}
            listed[policy] = _Listed(steps, fetched)
            here = {step: commit_of(self._checkpoints / policy, step) for step in self._steps(policy)}
            self._forget(policy, [step for step, commit in here.items() if listed[policy].lacks(step, commit)])
        return listed

    def _missing(self, listed: "Mapping[str, _Listed]") -> "list[_Version]":
        return [
            (policy, step, of.steps[step])
            for policy, of in listed.items()
            for step in of.fetched
            if not self._folder(policy, step).exists()
        ]

    async def _fetch_watched(self, version: "_Version") -> None:
        """Fetch a version, unless the run loses it meanwhile."""
        policy, step, identity = version
        fetch = asyncio.create_task(self._fetch(policy, step, identity))
        try:
            while not (await asyncio.wait({fetch}, timeout=_LOOK_EVERY_S))[0]:
                if (await self._ask())[policy].lacks(step, identity):
                    return
        finally:
            if not fetch.done():
                fetch.cancel()
                await asyncio.gather(fetch, return_exceptions=True)
        await fetch

    def _folder(self, policy: str, step: int) -> Path:
        return self._checkpoints / policy / str(step)

    def _steps(self, policy: str) -> list[int]:
        return committed_steps(self._checkpoints / policy)

    def _forget(self, policy: str, steps: Sequence[int]) -> None:
        """Delete versions that are gone at the run, or were made anew there."""
        for step in steps:
            folder = self._folder(policy, step)
            gone = folder.with_name(f".gone-{step}")  # renamed first: a death meanwhile leaves no half of a version
            shutil.rmtree(gone, ignore_errors=True)  # left by such a death
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _unfinished(self, policy: str, step: int, identity: str) -> Path:
        return self._checkpoints / policy / f".part-{step}-{identity}"

    def _sweep(self, policy: str, wanted: Mapping[int, str]) -> None:
        """Delete unfinished downloads of versions that are not wanted any more, and rests of deleted ones."""
        known = {self._unfinished(policy, step, identity) for step, identity in wanted.items()}
        left = {path for name in (".part-*", ".gone-*") for path in self._checkpoints.glob(f"{policy}/{name}")}
        for other in left - known:
            shutil.rmtree(other, ignore_errors=True)

    async def _fetch(self, policy: str, step: int, identity: str) -> None:
        folder = self._folder(policy, step)
        if folder.exists():
            return
        unfinished = self._unfinished(policy, step, identity)
        unfinished.mkdir(parents=True, exist_ok=True)
        base = max(self._steps(policy), default=None)
        try:
            size_bytes = await self._unpack(policy, step, base, unfinished)
        except DeltaError as error:  # for some reason, the base here is not the run's
            logging.warning("%s %d comes whole: %s", policy, step, error)
            size_bytes = await self._unpack(policy, step, None, unfinished)
        if (await self._ask())[policy].lacks(step, identity):
            return
        # Marker, then rename: the follower lists numbered folders with a marker, and must find none that is not whole.
        replace_file(unfinished / COMMIT_MARKER, identity)  # the run's commit, which `commit_of` reads
        unfinished.rename(folder)
        logging.info("%s %d is here, by %d bytes", policy, step, size_bytes)

    async def _unpack(self, policy: str, step: int, base: int | None, unfinished: Path) -> int:
        """Fetch the pack of a version, and make the folder that engines are given from it. Returns the pack's bytes."""
        path, made = f"/files/weights/{policy}/{step}", unfinished / HANDED_OVER
        key = "" if base is None else f"{base}.{commit_of(self._checkpoints / policy, base)}"
        answer = await self._origin.ask(f"{path}?base={key}&node={self._name}")
        name, size_bytes, digest = answer["pack"]
        if Path(name).name != name or answer["base"] not in ("", key):
            raise OriginError(
                f"{self._origin.url}{path} answers with {name[:200]!r}: it is no dataflow of this version"
            )
        packed = unfinished / name
        await self._origin.fetch(f"/files/packs/{name}", packed, size_bytes, digest)
        for left in [path for path in unfinished.iterdir() if path != packed]:  # left by a start that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        known = self._folder(policy, base) / HANDED_OVER if base is not None and answer["base"] else None
        try:
            with new_folder(made) as opened:
                await asyncio.to_thread(open_folder, packed, known, opened)
        except DeltaError:
            packed.unlink()
            raise
        packed.unlink()  # only now: if opening it fails on a full disk, it need not come again
        return size_bytes


async def _follow(run: Run) -> None:
    url = read_endpoints(run.folder)["dataflow"]
    async with source(url, known_token(run.folder), known_run_id(run.folder)) as origin:
        in_place = [name for name, policy in run.policies.items() if policy.train == "full"]
        await WeightsMirror(run.folder, origin, one_at_a_time=in_place, hold_s=run.presence_s).follow()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)  # absl's flags are one table for all that a process imports
    parser.add_argument("--run", type=Path, required=True, help="run folder of the node")
    logging.set_verbosity(logging.INFO)
    try:
        asyncio.run(_follow(read_run(parser.parse_args().run.absolute())))
    except ConfigError as error:
        print(f"mirror: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    logging.use_absl_handler()
    main()
