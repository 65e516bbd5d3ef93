"""The dashboard as it looks on a cluster at work: what docs/ shows of it.

    python -m benchmarks.screenshots [--folder docs] [--seconds 75]

Starts `baton up` with the small model, lets a few clients chat behind shared system prompts, and takes pictures with a
headless Chromium: light and dark, 400 and 1,600 pixels wide.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import uvloop

from tests.support.browser import Look, Page, open_browser
from tests.support.cluster import running_cluster

LOOKS = [Look(theme, width, 1000) for theme in ("light", "dark") for width in (1600, 400)]
CLUSTER = ("--prefill", "1", "--decode", "2", "--kv-memory", "64MiB", "--threads", "1")
NUM_CLIENTS = 3
ANSWER_WAIT_S = 180.0
SYSTEMS = (
    "You are a guide to the tides of the North Sea, careful with times and heights. " * 8,
    "You write short notes for a relay team: who runs when, and who takes the baton next. " * 6,
    "You answer questions about the capitals of Europe in one sentence. " * 4,
)
QUESTIONS = (
    "When is high water?",
    "Who runs the second leg?",
    "What is the capital of France?",
    "Is it safe to walk out?",
    "Say it in other words.",
)
ASKED = "What is the capital of France?"
ANSWERED = "document.querySelector('.turn.assistant .facts li') && !document.querySelector('.said.writing')"


async def chat(client: httpx2.AsyncClient, draw: random.Random) -> None:
    """Ask one question after the other until cancelled."""
    for number in itertools.count():
        messages = [
            {"role": "system", "content": draw.choice(SYSTEMS)},
            {"role": "user", "content": f"{draw.choice(QUESTIONS)} ({number})"},
        ]
        body = {"messages": messages, "max_tokens": draw.randint(12, 40), "temperature": 0.7}
        (await client.post("/v1/chat/completions", json=body)).raise_for_status()
        await asyncio.sleep(draw.expovariate(0.7))


@contextlib.asynccontextmanager
async def load(url: str) -> AsyncIterator[None]:
    """Keep the cluster at work."""
    async with httpx2.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:
        clients = [asyncio.create_task(chat(client, random.Random(seed))) for seed in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def take_pictures(url: str, folder: Path, seconds: float) -> None:
    """Watch the cluster for ``seconds`` and write one PNG for each look."""
    async with load(url), open_browser() as browser, browser.page(LOOKS[0]) as page:
        await page.open(f"{url}/dashboard")
        await page.click("input[name=span][value='120']")
        await asyncio.sleep(seconds)
        await page.evaluate("document.querySelector('#chat-max').value = 32")
        await page.evaluate("document.querySelector('#chat-temperature').value = 0")
        await page.evaluate("document.querySelector('#chat-text').focus()")
        await page.type(ASKED)
        await page.press("Enter")
        await page.until(ANSWERED, ANSWER_WAIT_S)
        for look in LOOKS:
            await page.show(look)
            await _settled(page)
            (folder / f"dashboard-{look.theme}-{look.width}.png").write_bytes(await page.screenshot(full=True))


async def _settled(page: Page) -> None:
    """Wait until the page has been laid out and drawn anew, and the next second has come."""
    await page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 1500)))")


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description="Take the pictures of the dashboard in docs/.")
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    parser.add_argument("--seconds", type=float, default=75.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs, running_cluster(Path(logs), *CLUSTER) as cluster:
        uvloop.run(take_pictures(cluster.url, options.folder, options.seconds))


if __name__ == "__main__":
    main()
