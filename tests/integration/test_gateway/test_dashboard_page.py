"""The dashboard in a real, headless browser."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.messages import BlockCounts, WorkerLoad
from tests.support.browser import CHROMIUM, Browser, Look, Page, open_browser
from tests.support.gateway_bench import Bench

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]

AXE = Path(__file__).parents[2] / "assets" / "axe-core" / "axe.min.js"
LOOKS = [Look(theme, width) for theme in ("light", "dark") for width in (400, 1600)]
DESK = Look("light", 1600)
LIVE = "document.body.dataset.state === 'live' && document.querySelector('#tiles .tile')"
ANSWERED = "document.querySelector('.turn.assistant .facts li') && !document.querySelector('.said.writing')"


@pytest.fixture(scope="session")
async def browser(one_event_loop: None) -> AsyncIterator[Browser]:
    """One browser for all tests here; each opens a page of its own."""
    async with open_browser() as opened:
        yield opened


async def dashboard(bench: Bench, page: Page, live: bool = True) -> None:
    assert bench.server is not None
    await page.open(f"{bench.server.url}/dashboard")
    if live:
        await page.until(LIVE)


async def violations(page: Page) -> list[dict[str, Any]]:
    """Return what axe-core finds wrong."""
    await page.evaluate(f"{AXE.read_text()}; 0")
    found = await page.evaluate("axe.run().then((result) => result.violations)")
    return [{"id": one["id"], "impact": one["impact"], "html": one["nodes"][0]["html"][:200]} for one in found]


async def ask(page: Page, text: str) -> None:
    await page.evaluate("document.querySelector('#chat-text').focus()")
    await page.type(text)
    await page.press("Enter")


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: f"{look.theme}-{look.width}")
async def test_it_fits_and_axe_finds_nothing(bench: Bench, browser: Browser, look: Look) -> None:
    decode = await bench.decode()
    await bench.prefill(decode, cached_tokens=48)
    await bench.gateway(prefill_expected=True)
    for _ in range(2):
        await bench.complete("The tides of the North Sea turn twice a day, as everybody knows. " * 2, max_tokens=40)
    async with browser.page(look) as page:
        await dashboard(bench, page)
        await ask(page, "What is the capital of France?")
        await page.until(ANSWERED)
        await page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        await page.until("document.querySelector('.prefixes tbody tr') && document.querySelector('.values tbody tr')")
        assert await page.evaluate("document.documentElement.scrollWidth") == look.width
        assert await violations(page) == []
        await page.click("#open-keys")
        assert await violations(page) == []
        assert page.errors == []


async def test_workers_are_shown_with_role_state_batch_and_blocks(bench: Bench, browser: Browser) -> None:
    decode = await bench.decode()
    await bench.prefill(decode)
    decode.change(load=WorkerLoad(3, 2, 0, 50.0, 0.0), blocks=BlockCounts(100, 60, 20, 15, 5))
    await decode.beat()
    await bench.gateway(prefill_expected=True)
    async with browser.page(DESK) as page:
        await dashboard(bench, page)
        await page.until("document.querySelectorAll('.worker').length === 2")
        await page.until("document.querySelector('#decode-workers .worker').innerText.includes('3 running')")
        card = [line for line in (await page.text("#decode-workers .worker")).split("\n") if line]
        assert card == ["decode-0", "ready", "3 running · 2 waiting", "15 held · 20 cached · 60 free"]
        label = await page.evaluate("document.querySelector('#decode-workers .blocks').getAttribute('aria-label')")
        assert label == "100 blocks: 15 held, 20 cached, 5 quarantined, 60 free"
        assert (await page.text("#ratio")).startswith("1 : 1")
        decode.change(load=WorkerLoad(7, 0, 0, 50.0, 9.0))
        await decode.beat()
        await page.until("document.querySelector('#decode-workers .worker').innerText.includes('no step for 9 s')")


async def test_a_planner_is_shown_with_its_last_decisions(bench: Bench, browser: Browser) -> None:
    await bench.gateway(is_ready=False)
    step = {"at_s": 1_790_000_000, "action": "to_prefill", "reason": "prefill_hot", "ratio": "1:3", "outcome": "done"}
    cluster = {
        "ratio": {"prefill": 2, "decode": 2},
        "pressure": {"prefill": 0.4, "decode": 0.25},
        "planner": {"mode": "auto", "leader": "gateway-1", "home": "1:3", "local_prefill_tokens": 64, "steps": [step]},
    }
    async with browser.page(DESK) as page:
        await dashboard(bench, page, live=False)
        await page.evaluate(
            "import('/dashboard/panels.js').then(({ showRatio }) => "
            f"showRatio(document.createElement('div'), document.querySelector('#planner'), {json.dumps(cluster)}))"
        )
        shown = " ".join((await page.evaluate("document.querySelector('#planner').textContent")).split())
    assert "Mode auto · prompts up to 64 tokens stay where they are decoded · home 1:3" in shown
    assert "Prefill pressure0.40" in shown
    assert "to prefillat 1:3prefill hot, done" in shown


async def test_an_empty_cluster_says_how_to_start_a_worker(bench: Bench, browser: Browser) -> None:
    await bench.gateway(is_ready=False)
    async with browser.page(DESK) as page:
        await dashboard(bench, page)
        await page.until("!document.querySelector('#no-workers').hidden")
        assert "baton prefill" in await page.text("#no-workers")
        assert await violations(page) == []


async def test_charts_are_told_in_words_and_as_a_table(bench: Bench, browser: Browser) -> None:
    await bench.decode()
    await bench.gateway()
    await bench.complete("x")
    async with browser.page(DESK) as page:
        await dashboard(bench, page)
        plot = "document.querySelector('.chart .plot')"
        await page.until(f"/median: now [0-9.]+ m?s/.test({plot}.getAttribute('aria-label'))")
        await page.evaluate("document.querySelector('.chart summary').focus()")
        await page.press("Enter")
        await page.click("input[name=span][value='120']")
        await page.until("document.querySelectorAll('.chart tbody td').length >= 2")
        assert "last 2 minutes" in await page.evaluate(f"{plot}.getAttribute('aria-label')")


async def test_the_chat_streams_text_as_text_and_says_how_it_was_served(bench: Bench, browser: Browser) -> None:
    answer = "<img src=x onerror=alert(1)> & <b>Paris</b>"
    decode = await bench.decode(answer, cached_tokens=16)
    decode.faults.pause_after = 4
    await bench.gateway()
    async with browser.page(DESK) as page:
        await dashboard(bench, page)
        await ask(page, "What is the capital of France?")
        await page.until("document.querySelector('.said.writing')?.innerText.length > 0")
        decode.resume()
        await page.until(ANSWERED)
        assert await page.text(".turn.assistant .said") == answer
        assert await page.evaluate("document.querySelectorAll('#chat-log img, #chat-log b').length") == 0
        facts = (await page.text(".facts")).split("\n")
        assert facts[0].startswith("TTFT ")
        assert facts[1].endswith(" tokens/s")
        assert facts[2] == f"{len(bench.tokens(answer))} tokens"
        assert facts[3].startswith("16 of ")
        assert facts[4] == "decode-0, cached"
        assert (await page.text("#chat-status")).startswith("The answer is complete. TTFT")
        await ask(page, "And of Spain?")
        await page.until("document.querySelectorAll('.turn').length === 4")
        sent = bench.tokenizer.decode(list(decode.submits[-1].token_ids))
        assert "What is the capital of France?" in sent


async def test_stop_ends_the_answer_on_the_worker(bench: Bench, browser: Browser) -> None:
    decode = await bench.decode()
    decode.faults.pause_after = 3
    await bench.gateway()
    async with browser.page(DESK) as page:
        await dashboard(bench, page)
        await ask(page, "What is the capital of France?")
        await page.until("document.querySelector('.said.writing')?.innerText.length > 0")
        await page.click("#chat-stop")
        await page.until("[...document.querySelectorAll('.facts li')].some((one) => one.innerText === 'was stopped')")
        await decode.wait_for(lambda stub: len(stub.aborts) == 1)
        assert await page.evaluate("document.querySelector('#chat-send').disabled") is False


async def test_an_error_is_told(bench: Bench, browser: Browser) -> None:
    await bench.decode()
    await bench.gateway()
    async with browser.page(DESK) as page:
        await dashboard(bench, page)
        await page.evaluate("document.querySelector('#chat-max').value = 100000")
        await ask(page, "What is the capital of France?")
        await page.until("document.querySelector('.turn .error')")
        assert "256" in await page.text(".turn .error")


async def test_a_key_is_asked_for_and_kept_in_the_tab(bench: Bench, browser: Browser) -> None:
    await bench.decode()
    await bench.gateway(is_ready=False, api_key=("client-key",), admin_key="admin-key")
    async with browser.page(DESK) as page:
        await dashboard(bench, page, live=False)
        await page.until("document.querySelector('#keys').open")
        assert await violations(page) == []
        await page.type("wrong")
        await page.press("Enter")
        await page.until("!document.querySelector('#keys-error').hidden")
        await page.evaluate("document.querySelector('#api-key').select()")
        await page.type("client-key")
        await page.press("Enter")
        await page.until(LIVE)
        assert await page.evaluate("[sessionStorage['baton.api-key'], localStorage.length]") == ["client-key", 0]
        assert "admin key" in await page.text("#prefixes")
        await ask(page, "What is the capital of France?")
        await page.until(ANSWERED)
        await page.click("#prefixes button")
        await page.evaluate("document.querySelector('#admin-key').focus()")
        await page.type("admin-key")
        await page.press("Enter")
        await page.until("document.querySelector('#prefixes').dataset.kind === 'none'")


async def test_a_gateway_that_comes_back_is_found_again(bench: Bench, browser: Browser) -> None:
    await bench.gateway(is_ready=False)
    assert bench.server is not None
    port = bench.server.port
    async with browser.page(DESK) as page:
        await dashboard(bench, page)
        bench.server.stop()
        await page.until("document.body.dataset.state === 'lost'")
        await page.until("!document.querySelector('#notice-lost').hidden")
        assert await violations(page) == []
        await bench.stack.aclose()
        await bench.gateway(is_ready=False, port=port)
        await page.until(LIVE)
        assert await page.evaluate("document.querySelector('#notice-lost').hidden")


async def test_the_keyboard_reaches_everything(bench: Bench, browser: Browser) -> None:
    await bench.decode()
    await bench.gateway()
    async with browser.page(DESK) as page:
        await dashboard(bench, page)
        await page.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.press("Enter")
        await page.until("document.activeElement.id === 'main'")
        reached: list[str] = []
        for _ in range(40):
            await page.press("Tab")
            reached.append(
                await page.evaluate(
                    "document.activeElement.id || document.activeElement.value || document.activeElement.tagName"
                )
            )
            if reached[-1] == "chat-send":
                break
        assert {"300", "SUMMARY", "chat-clear", "chat-log", "chat-text"} <= set(reached), reached
        await page.evaluate("document.querySelector('input[name=span]:checked').focus()")
        await page.press("ArrowRight")
        assert await page.evaluate("document.querySelector('input[name=span]:checked').value") == "900"


async def test_the_theme_is_chosen_and_remembered(bench: Bench, browser: Browser) -> None:
    await bench.gateway(is_ready=False)
    background = "getComputedStyle(document.body).backgroundColor"
    async with browser.page(DESK) as page:
        await dashboard(bench, page)
        light = await page.evaluate(background)
        for _ in range(2):
            await page.click("#theme")
        assert await page.text("#theme") == "Theme: dark"
        dark = await page.evaluate(background)
        assert dark != light
        await dashboard(bench, page)
        assert await page.evaluate(background) == dark
