"""A headless Chromium, driven over its own protocol: pages opened, clicked, read and photographed."""

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
_START_S, _CALL_S = 300.0, 300.0  # for a machine that is busy with other tests


class Browser:
    """One page of a running Chromium. Whatever it logs as an error is kept in `errors`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(event["params"]["exceptionDetails"])[:2000])
            elif event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] == "error":
                self.errors.append(json.dumps(event["params"]["args"])[:2000])
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        event = await asyncio.wait_for(answer, _CALL_S)
        assert "error" not in event, event
        return event["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression in the page, promises waited for."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, page: Path, address: str = "") -> None:
        """Open a file, and wait until the page says that it has been drawn."""
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=f"file://{page.absolute()}{address}")
        await self.until("document.body && document.body.dataset.ready")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        async with asyncio.timeout(_CALL_S):
            while not await self.run(f"Boolean({condition})"):
                await asyncio.sleep(0.05)

    async def click(self, selector: str) -> None:
        """Click an element as a pointer does, at its middle."""
        place = await self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    async def press(self, key: str, code: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def text(self, selector: str = "main section:not([hidden])") -> str:
        """The text of an element as it is shown."""
        return await self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    async def photograph(self, path: Path, *, whole: bool = False) -> None:
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A Chromium of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *options,
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = await answer.json()
                page = next(each for each in pages if each["type"] == "page")
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    opened = Browser(socket)
                    for domain in ("Page", "Runtime", "Network"):
                        await opened.call(f"{domain}.enable")
                    yield opened
        finally:
            process.kill()
            await process.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(_START_S):
        while not file.exists() or not (text := file.read_text()):
            await asyncio.sleep(0.05)
    return int(text.splitlines()[0])
