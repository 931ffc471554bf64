"""Files that a node without the run's folder fetches over HTTP: the run's config, base models, published versions.

    GET /run                                         {name, id, config, bases}: config as JSON, bases by name
    GET /files/bases/<base>                          {files: [[path, bytes, digest], ...]} of a base model's folder
    GET /files/bases/<base>/<path>                   one of them; a part of it by the header Range
    GET /files/weights?known=<mark>&hold_s=<seconds> {policies: {policy: {step: identity}}, pinned: {policy: [step]},
                                                     mark}: versions that may be needed, and those of evaluations. With
                                                     `known`, the mark of an earlier answer: held back until they
                                                     change, or until hold_s is over
    GET /files/weights/<policy>/<step>?base=<key>&node=<name>
                                                     {pack: [name, bytes, digest], base: key}: a version as engines are
                                                     given it, packed (`flowjax.weights.delta`) against the base if
                                                     that is still here, else whole, with base "". The base of a node
                                                     that gives its name is kept here as long as the node asks
    GET /files/packs/<name>                          the packed version; a part of it by the header Range

A step that is made anew, because its trainer has gone back, has another identity; a key is `<step>.<identity>`. Digests
are SHA-256 of the content. 202: it is being made, ask again. 404: it is gone. 500: it cannot be made, and why.
"""

import asyncio
import hashlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from aiohttp import web

from flowjax.files import digest_of
from flowjax.monitor.token import known_run_id
from flowjax.records import pack
from flowjax.run import Run
from flowjax.weights.delta import pack_folder
from flowjax.weights.publish import CheckpointError, commit_of, newest_first

PACKED = "packed"  # folder of the run with versions that are sent to nodes
KEPT = 3  # newest versions of a policy that stay there, needed or not
_BASES = 3  # older ones that stay because a slow node has them: without a delta it would fall ever further behind
_HEARD_S = 600.0  # silence of a node after which the version that it has is deleted
_LONGEST = 20  # digits of a step
_LONGEST_NAME = 100  # characters
_LISTED_S, _LOOK_S = 0.1, 0.4  # age of a list of versions that waiting nodes may share; time between their looks
_HELD_S = 20.0  # longest that an answer is held back: nodes hang up after half a minute of silence
FileList = list[tuple[str, int, str]]


class RunFiles:
    """Answers from the run's folder and its base models'.

    Args:
        run: whose files these are.
        oldest_needed: the oldest version of a policy that a worker may still be asked for.
        pinned: versions of a policy that an evaluation under way needs. One that was packed stays available until the
            evaluation is over, even if its checkpoint is deleted.
    """

    def __init__(self, run: Run, oldest_needed: Callable[[str], int], pinned: Callable[[str], Collection[int]]):
        self._run, self._oldest_needed, self._pinned = run, oldest_needed, pinned
        self._packed = run.folder / PACKED
        self._digests: dict[Path, str] = {}  # of packs
        self._base_files: dict[tuple[Path, str], FileList] = {}
        self._making: dict[Hashable, asyncio.Task[Any]] = {}
        # Keys of the versions that a node has and is fetching, and when it asked, by policy and the node's name.
        self._nodes: dict[tuple[str, str], tuple[set[str], float]] = {}
        self._busy = asyncio.Lock()  # one folder is read at a time
        self._said = ""  # the last failure that was logged
        self._newest: dict[str, Any] = {}  # the newest answer about versions, and when it was made
        self._newest_s = -math.inf
        self.stopping = False  # once set, no answer is held back any more

    def routes(self) -> dict[str, Callable]:
        """Handlers of GET requests, by path."""
        return {
            "/run": self._describe,
            "/files/weights": self._versions,
            "/files/weights/{policy}/{step}": self._version,
            "/files/packs/{name}": self._pack,
            "/files/bases/{base}": self._base,
            "/files/bases/{base}/{path:.+}": self._base,
        }

    async def _describe(self, request: web.Request) -> web.Response:
        run = self._run
        described = {"name": run.folder.name, "id": known_run_id(run.folder), "config": run.config.to_json()}
        return _answer({**described, "bases": list(run.bases)})

    async def _versions(self, request: web.Request) -> web.Response:
        known, until_s = request.query.get("known"), time.monotonic() + queried_hold_s(request)
        while True:
            # Many nodes wait for the next version: one look at the disk serves all of them.
            if known is None or time.monotonic() - self._newest_s > _LISTED_S:
                self._newest, self._newest_s = self._list_versions(), time.monotonic()
            if self._newest["mark"] != known or time.monotonic() >= until_s or self.stopping:
                return _answer(self._newest)
            await asyncio.sleep(min(_LOOK_S, max(until_s - time.monotonic(), 0.0)))

    def _list_versions(self) -> dict[str, Any]:
        listed = {policy: self._needed(policy) for policy in self._run.policies}
        policies = {policy: {str(step): commit for step, commit in known.items()} for policy, known in listed.items()}
        answer = {"policies": policies, "pinned": {policy: sorted(self._pinned(policy)) for policy in listed}}
        mark = hashlib.blake2b(pack(answer), digest_size=8).hexdigest()
        return {**answer, "mark": mark}

    def _needed(self, policy: str) -> dict[int, str]:
        """Versions of a policy that may be needed, and their commits."""
        folder = self._run.folder / "checkpoints" / policy
        oldest = min(self._oldest_needed(policy), next(newest_first(folder), 0))
        steps = takewhile(lambda step: step >= oldest, newest_first(folder))
        # Listed a moment ago, and perhaps deleted since: then it has no commit.
        known = {step: self._commit(policy, step) for step in {*self._pinned(policy), *steps} if step >= oldest}
        return {step: commit for step, commit in sorted(known.items()) if commit is not None}

    def _commit(self, policy: str, step: int) -> str | None:
        """Commit of a version that is available, as a checkpoint or as packed for an evaluation; None: it is not."""
        if (commit := commit_of(self._run.folder / "checkpoints" / policy, step)) is not None:
            return commit
        packed = [key.partition(".") for key in self._engine_folders(policy)] if step in self._pinned(policy) else []
        return next((commit for known, _, commit in packed if known == str(step)), None)

    async def _version(self, request: web.Request) -> web.Response:
        policy, digits = request.match_info["policy"], request.match_info["step"]
        known = policy in self._run.policies and digits.isdecimal() and len(digits) < _LONGEST
        step = int(digits) if known else -1
        commit = self._commit(policy, step) if known else None
        if commit is None:
            raise web.HTTPNotFound(text=f"there is no version {digits[:20]} of {policy[:100]} now: ask /files/weights")
        key, base = f"{step}.{commit}", self._engine_folders(policy).get(request.query.get("base", ""))
        if node := request.query.get("node", "")[:_LONGEST_NAME]:
            self._nodes[policy, node] = {key, request.query.get("base", "")[:_LONGEST_NAME]}, time.monotonic()
        try:
            return _answer(await self._made((policy, key, base), partial(self._packed_as, policy, key, base)))
        except web.HTTPException:
            raise
        except Exception as error:
            if self._commit(policy, step) != commit:
                raise web.HTTPNotFound(text=f"version {step} is gone or made anew: ask /files/weights again") from error
            raise self._failure(f"version {step} of {policy} cannot be packed", error) from error

    async def _pack(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        path = self._packed / name
        if name not in {each.name for each in self._packed.glob("*.pack")}:
            raise web.HTTPNotFound(text=f"there is no {name[:200]} any more: ask /files/weights again")
        return web.FileResponse(path)

    async def _made(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Result of `make`, which runs once for a key, however many nodes ask, and to its end, even if they hang up.

        Raises:
            web.HTTPAccepted: it takes longer than an answer may be held back; a node that asks again waits on.
        """
        if (task := self._making.get(key)) is None:
            task = self._making[key] = asyncio.create_task(make())
            task.add_done_callback(lambda _: self._making.pop(key))
        await asyncio.wait({task}, timeout=_HELD_S)  # unlike `wait_for`, it never cancels the task
        if not task.done():
            raise web.HTTPAccepted(text="it is being made: ask again")
        return task.result()

    def _failure(self, what: str, error: Exception) -> web.HTTPException:
        """Answer of status 500 with the problem, which is logged once: nodes ask again and again."""
        problem = f"{what} ({type(error).__name__}: {error})"
        if problem != self._said:
            logging.error("%s", problem, exc_info=error)
            self._said = problem
        return web.HTTPInternalServerError(text=problem)

    async def _packed_as(self, policy: str, key: str, base: Path | None) -> dict[str, Any]:
        """The answer about a packed version."""
        async with self._busy:
            if base is not None and not base.exists():  # deleted while this waited for the lock
                base = None
            made = await asyncio.to_thread(self._make_pack, policy, key, base)
            await asyncio.to_thread(self._delete_old, policy, self._needed(policy), self._held(policy), key)
            against = base.name.partition("@")[2] if base else ""
            return {"pack": [made.name, made.stat().st_size, self._digests[made]], "base": against}

    def _engine_folders(self, policy: str) -> dict[str, Path]:
        """Folders of the versions that are here in the form that engines load, by key."""
        folders = [path for path in self._packed.glob(f"{policy}@*") if path.is_dir()]
        return {folder.name.partition("@")[2]: folder for folder in folders}

    def _make_pack(self, policy: str, key: str, base: Path | None) -> Path:
        """The packed version, made at the first call.

        Raises:
            CheckpointError: it cannot be read, or was made anew meanwhile.
        """
        from flowjax.weights.hand_over import (  # slow, and for runs with nodes only
            hand_over,
            make_folder,
            remove_unfinished,
        )

        self._packed.mkdir(exist_ok=True)
        folder = self._packed / f"{policy}@{key}"  # the key has the commit: this name never gets other content
        if not folder.exists():
            remove_unfinished(self._packed, policy)
            checkpoints = self._run.folder / "checkpoints" / policy
            step, _, commit = key.partition(".")
            make_folder(hand_over(self._run.policies[policy]), checkpoints, int(step), folder)
            if commit_of(checkpoints, int(step)) not in (commit, None):  # None: thinned out since it was read
                shutil.rmtree(folder)
                raise CheckpointError(f"version {step} of {policy} was made anew while it was read")
        made = self._packed / f"{folder.name}-from-{base.name.partition('@')[2] if base else 'nothing'}.pack"
        if made not in self._digests or not made.exists():
            unfinished = made.with_suffix(".part")
            pack_folder(folder, base, unfinished)
            self._digests[made] = digest_of(unfinished)
            unfinished.rename(made)
        return made

    def _delete_old(self, policy: str, listed: Mapping[int, str], held: Collection[str], asked: str) -> None:
        """Delete all versions but the newest, those listed or held, and the one asked for. A download of one goes on.

        Newest by number, not by time: for a node that joins, old versions are made last, but others need the newest.
        """
        folders, newest = self._engine_folders(policy), max(listed, default=-1)
        known = sorted((int(step), commit) for step, _, commit in (key.partition(".") for key in folders))
        # A version that the trainer has made anew, or lost by going back, is no base any more.
        valid = [(step, commit) for step, commit in known if step <= newest and listed.get(step, commit) == commit]
        needed = [*valid[-KEPT:], *(version for version in valid if version[0] in listed)]
        needed += [version for version in valid[:-KEPT] if f"{version[0]}.{version[1]}" in held][-_BASES:]
        kept = {asked, *(f"{step}.{commit}" for step, commit in needed)}
        for key in folders.keys() - kept:
            for made in self._packed.glob(f"{policy}@{key}-from-*"):
                made.unlink(missing_ok=True)
                self._digests.pop(made, None)
            shutil.rmtree(folders[key], ignore_errors=True)

    def _held(self, policy: str) -> set[str]:
        """Keys of the versions that nodes have or are fetching."""
        now_s = time.monotonic()
        self._nodes = {name: node for name, node in self._nodes.items() if now_s - node[1] < _HEARD_S}
        return {key for (name, _), (keys, _) in self._nodes.items() if name == policy for key in keys}

    async def _base(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["base"]
        if name not in self._run.bases:
            raise web.HTTPNotFound(text=f"there is no base {name[:100]}: this run has {', '.join(self._run.bases)}")
        folder = Path(self._run.bases[name].model.path)
        if not (folder / "config.json").is_file():
            raise web.HTTPNotFound(text=f"{folder} of base {name} is not on this machine: put the model on the node")
        identity = str(folder.stat().st_mtime_ns)  # hashed anew once files were added to or removed from the folder
        if (folder, identity) not in self._base_files:
            try:
                await self._made((folder, identity), partial(self._hash_base, folder, identity))
            except OSError as error:
                raise self._failure(f"base {name} cannot be read", error) from error
        files, path = self._base_files[folder, identity], request.match_info.get("path")
        if path is None:
            return _answer({"files": files})
        if path not in {name for name, _, _ in files} or not (folder / path).is_file():
            raise web.HTTPNotFound(text=f"there is no file {path[:200]} in it")
        return web.FileResponse(folder / path)

    async def _hash_base(self, folder: Path, identity: str) -> None:
        async with self._busy:
            self._base_files[folder, identity] = await asyncio.to_thread(_file_list, folder)


def queried_hold_s(request: web.Request) -> float:
    """Seconds for which a request asks to hold its answer back; 0 if they cannot be read."""
    try:
        asked_s = float(request.query.get("hold_s", 0.0))
    except ValueError:
        return 0.0
    return min(max(asked_s, 0.0), _HELD_S) if math.isfinite(asked_s) else 0.0


def _file_list(folder: Path) -> FileList:
    """Path, size in bytes and digest of each file; those of Git and of unfinished downloads are left out."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder) for path in paths]
    kept = [(path, name) for path, name in zip(paths, names, strict=True) if not name.parts[0].startswith(".")]
    return [(str(name), path.stat().st_size, digest_of(path)) for path, name in kept]


def _answer(body: dict[str, Any]) -> web.Response:
    return web.Response(body=pack(body), content_type="application/msgpack")
