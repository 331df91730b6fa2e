"""A headless Chromium over its own DevTools protocol: open a page, run a script in it, take a picture of it."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.skips import NEEDS_CHROMIUM

DRAWN = "document.documentElement.dataset.drawn === 'yes'"
"""What a page of the package says of itself once everything on it is drawn."""
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
_PATIENCE = 60.0  # seconds, on a machine that is busy


def chromium() -> str:
    """The path of a Chromium; skips the test where there is none."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip(NEEDS_CHROMIUM)
    return found


class Browser:
    """One page of a headless Chromium; use it as a context manager."""

    def __enter__(self) -> Browser:
        self._folder = tempfile.mkdtemp()
        command = [chromium(), *_FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._loop = asyncio.new_event_loop()
        self._count = 0
        self.errors: list[str] = []
        self._wait(self._connect())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._session.close())
        self._loop.close()
        self._process.terminate()
        self._process.wait(20)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False, ready: str = "true") -> None:
        """Open a page in a window of a width, and wait until an expression is true in it."""
        # Not as a mobile device, which zooms out of a page that is too wide instead of showing it.
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.errors.clear()
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href !== 'about:blank' && Boolean({ready})")

    def until(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + _PATIENCE
        while not self.value(expression):
            assert time.monotonic() < end, f"never true: {expression}; errors: {self.errors}"
            self._wait(asyncio.sleep(0.05))

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page; it must give plain data."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Take a picture of the page."""
        clip = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        return self._wait(self._call(method, parameters))

    def _wait(self, work: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, _PATIENCE))

    async def _connect(self) -> None:
        import aiohttp

        port = Path(self._folder) / "DevToolsActivePort"
        end = time.monotonic() + _PATIENCE
        while not (port.is_file() and len(port.read_text().split()) == 2):
            assert time.monotonic() < end, "Chromium does not start"
            await asyncio.sleep(0.05)
        base = f"http://127.0.0.1:{port.read_text().split()[0]}"
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"{base}/json/list") as answer:
            pages = [one for one in await answer.json() if one["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=2**28)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._call(f"{domain}.enable", {})

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        number = self._count
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what a person would see as an error of the page, and every request that leaves the machine."""
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:", "blob:", "http://127.0.0.1", "http://localhost")):
                self.errors.append(f"asks for {url}")
