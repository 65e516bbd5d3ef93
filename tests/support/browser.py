"""A headless Chromium for tests, driven over its DevTools pipe: no driver program and no package between.

A page is steered with JavaScript expressions and real key presses. What a page logs as an error, or refuses by its
content policy, is kept in :attr:`Page.errors`.
"""

import asyncio
import base64
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
"""Path of an installed one; None without."""

WAIT_S = 30.0
POLL_S = 0.02
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests run as root in containers; only pages of our own are opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
_LAUNCH = (
    "import os, sys; read, write = map(int, sys.argv[1:3]); os.dup2(read, 3); os.dup2(write, 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
_KEYS = {"Enter": ("\r", 13), "Tab": ("\t", 9), "Escape": ("", 27), "ArrowRight": ("", 39), " ": (" ", 32)}


@dataclass(frozen=True, slots=True)
class Look:
    """How a page is looked at."""

    theme: str
    """``light`` or ``dark``."""
    width: int
    height: int = 900


class Browser:
    """One Chromium. Owned by :func:`open_browser`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; raises RuntimeError when the browser refuses it."""
        number = len(self._answers) + 1
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        self._writer.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        async with asyncio.timeout(WAIT_S):
            answer = await self._answers[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def listen(self) -> None:
        """Take answers and events until the browser ends."""
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                self._answers[message["id"]].set_result(message)
            elif page := self._pages.get(message.get("sessionId", "")):
                page.notice(message["method"], message["params"])

    @asynccontextmanager
    async def page(self, look: Look) -> AsyncIterator["Page"]:
        """Give a new page, with no storage but its own."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = (await self.call("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.call(f"{domain}.enable")
            await page.show(look)
            yield page
        finally:
            del self._pages[session]
            await self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.errors: list[str] = []
        self._browser = browser
        self._session = session

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command to this page."""
        return await self._browser.call(method, self._session, **params)

    async def show(self, look: Look) -> None:
        """Look at it differently."""
        size = {"width": look.width, "height": look.height}
        await self.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": look.theme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def open(self, url: str) -> None:
        """Go to ``url``; returns when its scripts have run."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, expression: str) -> Any:
        """Return the JSON value of an expression, awaited if it is a promise; raises RuntimeError when it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(f"{expression}: {details.get('exception', {}).get('description', details['text'])}")
        return answer["result"].get("value")

    async def until(self, condition: str, wait_s: float = WAIT_S) -> None:
        """Wait until a condition is truthy; raises TimeoutError."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    if await self.evaluate(f"Boolean({condition})"):
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            text = await self.evaluate("document.body.innerText.slice(0, 2000)")
            raise TimeoutError(f"still not so: {condition}\n{self.errors}\n{text}") from error

    async def text(self, selector: str) -> str:
        """Return the visible text of the first element that fits."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        """Click the first element that fits."""
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press and release a key, as a keyboard does."""
        typed, code = _KEYS[key]
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=typed, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def screenshot(self, *, full: bool = False) -> bytes:
        """Return a PNG of what is in sight, or of the whole page."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        return base64.b64decode(answer["data"])

    def notice(self, method: str, params: dict[str, Any]) -> None:
        """Take an event; errors are kept."""
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Start a Chromium with an empty profile, and end it."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="baton-chromium-", ignore_cleanup_errors=True) as profile:
        their_read, our_write = _pipe()
        our_read, their_write = _pipe()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _LAUNCH, str(their_read), str(their_write), CHROMIUM),
            *(*_OPTIONS, f"--user-data-dir={profile}"),
            pass_fds=(their_read, their_write),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        try:
            async with _piped(our_read, our_write) as browser:
                await browser.call("Browser.getVersion")  # it is up, and no launcher any more
                yield browser
        finally:
            process.kill()
            await process.wait()


@asynccontextmanager
async def _piped(read: int, write: int) -> AsyncIterator[Browser]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 * 2**20)  # a screenshot is one message
    incoming, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", buffering=0)
    )
    outgoing, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(write, "wb", buffering=0))
    browser = Browser(reader, outgoing)
    listening = asyncio.create_task(browser.listen())
    try:
        yield browser
    finally:
        listening.cancel()
        await asyncio.wait((listening,))
        outgoing.close()
        incoming.close()


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe, above the numbers that the browser wants them under."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in low)
    for one in low:
        os.close(one)
    return high[0], high[1]
