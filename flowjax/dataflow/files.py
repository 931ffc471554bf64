"""Files that a node without the run's folder fetches over HTTP: the run's config, base models, published versions.

    GET /run                             {name, config, bases}: config as JSON, bases by name
    GET /files/bases/<base>              {files: [[path, bytes, digest], ...]} of a base model's folder
    GET /files/weights                   {policies: {policy: {step: identity}}}: versions that a worker may need now
    GET /files/weights/<policy>/<step>   {files} of that version's checkpoint, without the optimiser's state
    GET <one of the two above>/<path>    the file itself; a part of it by the header Range

A step that is made anew, because its trainer has gone back, has another identity. Digests are BLAKE2b of the content.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from flowjax.files import digest_of
from flowjax.records import pack
from flowjax.run import Run
from flowjax.weights.publish import committed_at_ns, committed_steps

_PRIVATE = ("optimizer", "data")  # items of a checkpoint that only its trainer reads
Listing = list[tuple[str, int, str]]


class RunFiles:
    """Answers from the run's folder and its base models'.

    Args:
        run: whose files these are.
        oldest_needed: the oldest version of a policy that a worker may still be asked for.
    """

    def __init__(self, run: Run, oldest_needed: Callable[[str], int]):
        self._run, self._oldest_needed = run, oldest_needed
        self._listings: dict[tuple[Path, str], Listing] = {}
        self._hashing = asyncio.Lock()

    def routes(self) -> dict[str, Callable]:
        """Handlers of GET requests, by path."""
        return {
            "/run": self._describe,
            "/files/weights": self._versions,
            "/files/weights/{policy}/{step}": self._version,
            "/files/weights/{policy}/{step}/{path:.+}": self._version,
            "/files/bases/{base}": self._base,
            "/files/bases/{base}/{path:.+}": self._base,
        }

    async def _describe(self, request: web.Request) -> web.Response:
        run = self._run
        return _answer({"name": run.folder.name, "config": run.config.to_json(), "bases": list(run.bases)})

    async def _versions(self, request: web.Request) -> web.Response:
        policies = {}
        for policy in self._run.policies:
            folder = self._run.folder / "checkpoints" / policy
            steps = committed_steps(folder)
            oldest = min(self._oldest_needed(policy), max(steps, default=0))
            # Listed a moment ago, and perhaps thinned out since.
            known = {step: committed_at_ns(folder, step) for step in steps if step >= oldest}
            policies[policy] = {str(step): str(at_ns) for step, at_ns in known.items() if at_ns is not None}
        return _answer({"policies": policies})

    async def _version(self, request: web.Request) -> web.StreamResponse:
        policy, step = request.match_info["policy"], request.match_info["step"]
        folder = self._run.folder / "checkpoints" / policy
        made_ns = committed_at_ns(folder, int(step)) if policy in self._run.policies and step.isdecimal() else None
        if made_ns is None:
            raise web.HTTPNotFound(text=f"there is no version {step[:20]} of {policy[:100]} now: ask /files/weights")
        return await self._answer(request, folder / step, str(made_ns), without=_PRIVATE)

    async def _base(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["base"]
        if name not in self._run.bases:
            raise web.HTTPNotFound(text=f"there is no base {name[:100]}: this run has {', '.join(self._run.bases)}")
        folder = Path(self._run.bases[name].model.path)
        if not (folder / "config.json").is_file():
            raise web.HTTPNotFound(text=f"{folder} of base {name} is not on this machine: put the model on the node")
        return await self._answer(request, folder, str(folder.stat().st_mtime_ns))

    async def _answer(
        self, request: web.Request, folder: Path, identity: str, *, without: tuple[str, ...] = ()
    ) -> web.StreamResponse:
        """The folder's list, or the one of its files that was asked for. No other file has a way out of here."""
        try:
            async with self._hashing:  # once, however many nodes ask for the same version at the same moment
                if (folder, identity) not in self._listings:
                    if len(self._listings) >= 64:
                        del self._listings[next(iter(self._listings))]
                    self._listings[folder, identity] = await asyncio.to_thread(_listing, folder, without)
        except FileNotFoundError as error:
            raise web.HTTPNotFound(text=f"{folder.name} is being deleted: ask /files/weights again") from error
        files = self._listings[folder, identity]
        path = request.match_info.get("path")
        if path is None:
            return _answer({"files": files})
        if path not in {name for name, _, _ in files} or not (folder / path).is_file():
            raise web.HTTPNotFound(text=f"there is no file {path[:200]} in it")
        return web.FileResponse(folder / path)


def _listing(folder: Path, without: tuple[str, ...]) -> Listing:
    """Path, size in bytes and digest of each file; those of Git and of unfinished downloads are left out."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    inside = [(path, path.relative_to(folder)) for path in paths]
    kept = [(path, name) for path, name in inside if name.parts[0] not in without and not name.parts[0].startswith(".")]
    return [(str(name), path.stat().st_size, digest_of(path)) for path, name in kept]


def _answer(body: dict[str, Any]) -> web.Response:
    return web.Response(body=pack(body), content_type="application/msgpack")
