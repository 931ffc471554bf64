"""For vLLM's server: replaces all weights in place, and names the served model by their version.

    POST /v1/load_weights {"name": "<policy>@<version>", "path": "<Hugging Face folder>"}

Requests for completions that have begun end on the weights they began with; those that come meanwhile wait. Then the
folder is loaded, the prefix cache (keys and values of the old weights) is dropped, and the server's own model name
becomes `name`: `/v1/models` and every answer say which weights are served, and a request that asks for an older name
is answered 404. `ServedWeights` is ASGI middleware, `WorkerExtension` the part in each of vLLM's workers; both are
named on vLLM's command line, with this folder on PYTHONPATH. It runs in whatever environment the server has: standard
library, Starlette and vLLM only.
"""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

logger = logging.getLogger("vllm.flowjax")  # a child of vLLM's own logger, so that it is shown
_ROUTE = "/v1/load_weights"
_UNNAMED = "weights-half-loaded"  # what is served while nothing whole is there: nobody asks for it
_CACHE_ATTEMPTS, _CACHE_PAUSE_S = 100, 0.05


class WorkerExtension:
    """Methods that vLLM adds to its worker (`--worker-extension-cls`)."""

    def flowjax_load_folder(self: Any, path: str) -> None:
        """Load a folder in place; then have a head tied to the embedding take its new weights too.

        vLLM takes such a head for a layer without weights in the folder. On CPU it keeps a packed copy of the old ones.
        """
        self.reload_weights(weights_path=path)
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)


class ServedWeights:
    """The gate that completions pass, and the only one who opens and closes it."""

    def __init__(self, app: Any):
        self._app = app
        self._answering = 0
        self._loading = False
        self._changed = asyncio.Condition()
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        if not posted or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
        elif scope["path"] == _ROUTE:
            await (await self._load(Request(scope, receive)))(scope, receive, send)
        else:
            await self._enter()
            try:
                await self._app(scope, receive, send)
            finally:
                await self._leave()

    async def _enter(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._loading)
            self._answering += 1

    async def _leave(self) -> None:
        async with self._changed:
            self._answering -= 1
            self._changed.notify_all()

    async def _load(self, request: Request) -> JSONResponse:
        try:
            body = await request.json()
            name, path = str(body["name"]), Path(body["path"])
            check_folder(path)
        except (KeyError, TypeError, ValueError, OSError) as error:
            return _refusal(400, f"the weights cannot be loaded: {error!r}")
        state = request.scope["app"].state
        async with self._one_at_a_time:
            # Sent again because its answer was lost: the weights are there.
            if _served(state)[0].name == name:
                return JSONResponse({"loaded": name})
            # Closed first, then emptied: no new completion may begin while the last ones end.
            try:
                async with self._changed:
                    self._loading = True
                    await self._changed.wait_for(lambda: not self._answering)
                await _replace(state, name, path)
            except Exception as error:
                logger.exception("weights of %s could not be loaded", path)
                return _refusal(500, f"the weights could not be loaded: {error!r}")
            finally:
                async with self._changed:
                    self._loading = False
                    self._changed.notify_all()
        return JSONResponse({"loaded": name})


async def _replace(state: Any, name: str, path: Path) -> None:
    """Load the folder into the running model. On failure nothing is served under any version's name."""
    # The name goes before the old weights and comes after the new ones: no answer is ever labelled with the wrong one.
    for model in _served(state):
        model.name = _UNNAMED
    await state.engine_client.collective_rpc("flowjax_load_folder", args=(str(path),))
    for _ in range(_CACHE_ATTEMPTS):
        if await state.engine_client.reset_prefix_cache() is not False:
            break
        await asyncio.sleep(_CACHE_PAUSE_S)  # the last request's blocks are about to be freed
    else:
        raise RuntimeError("the prefix cache cannot be emptied")
    for model in _served(state):
        model.name = name


def _served(state: Any) -> list[Any]:
    """The server's own list of names; answers are labelled from it."""
    return state.openai_serving_models.base_model_paths


def check_folder(path: Path) -> None:
    """Refuse what would kill the engine half-way: vLLM does not survive a file that is cut off.

    Raises:
        ValueError: there is no safetensors file, or one is shorter or longer than its header says.
        OSError: the folder cannot be read.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has no safetensors file")
    for file in files:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_bytes))
        end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        if file.stat().st_size != 8 + header_bytes + end:
            raise ValueError(f"{file} has {file.stat().st_size} bytes and should have {8 + header_bytes + end}")


def _refusal(status: int, message: str) -> JSONResponse:
    logger.warning("%s", message)
    return JSONResponse({"error": {"message": message}}, status_code=status)
