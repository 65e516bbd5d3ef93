"""The dashboard's files and its stream, without a browser."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from gateway.dashboard.assets import load_assets
from tests.support.gateway_bench import Bench

pytestmark = pytest.mark.anyio

EVENTS = "/v1/dashboard/events"
SHARED = "The tides of the North Sea turn twice a day, and so does the harbour's traffic. "


@asynccontextmanager
async def watching(client: httpx2.AsyncClient, key: str = "") -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Give the events of one viewer's stream."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with client.stream("GET", EVENTS, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield (json.loads(line.removeprefix("data: ")) async for line in response.aiter_lines() if line)


async def test_every_file_has_its_type_and_may_reach_nothing_but_the_gateway(bench: Bench) -> None:
    client = await bench.gateway(is_ready=False)
    for path in ("/dashboard", *(f"/dashboard/{name}" for name in load_assets())):
        response = await client.get(path)
        assert response.status_code == 200, path
        kind = path.rpartition(".")[2] if "." in path else "html"
        expected = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[kind]
        assert response.headers["content-type"].startswith(expected)
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", response.text), path


async def test_the_page_names_only_files_that_are_there(bench: Bench) -> None:
    client = await bench.gateway(is_ready=False)
    page = (await client.get("/dashboard")).text
    named = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page)
    assert len(named) >= 5
    for name in named:
        assert (await client.get(f"/{name}")).status_code == 200, name


async def test_an_unchanged_file_is_not_sent_again(bench: Bench) -> None:
    client = await bench.gateway(is_ready=False)
    first = await client.get("/dashboard/app.js")
    again = await client.get("/dashboard/app.js", headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    changed = await client.get("/dashboard/app.js", headers={"If-None-Match": '"other"'})
    assert (changed.status_code, changed.content) == (200, first.content)


async def test_nothing_else_is_served_from_the_folder(bench: Bench) -> None:
    client = await bench.gateway(is_ready=False)
    for path in ("vendor/uplot/LICENSE", "vendor", "../assets.py", "%2e%2e/assets.py", "nothing.js"):
        assert (await client.get(f"/dashboard/{path}")).status_code == 404, path
    moved = await client.get("/dashboard/")
    assert (moved.status_code, moved.headers["location"]) == (307, "../dashboard")


async def test_a_viewer_gets_the_history_and_then_each_second(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.prefill(decode, cached_tokens=48)
    client = await bench.gateway()
    for _ in range(2):
        assert (await bench.complete(SHARED * 2, max_tokens=40)).status_code == 200
    async with watching(client) as events:
        history, first, second = [await anext(events) for _ in range(3)]
    assert (history["type"], history["model"]) == ("history", "stub-model")
    assert [len(point) for point in history["points"]] == [len(history["fields"])] * len(history["points"])
    point = dict(zip(history["fields"], second["point"], strict=True))
    assert second["point"][0] >= first["point"][0]
    assert point["ttft_p50_ms"] > 0
    assert point["generation_tokens_per_s"] >= 0
    cluster = (await client.get("/v1/cluster")).json()
    assert second["cluster"]["ratio"] == cluster["ratio"] == {"prefill": 1, "decode": 1}
    assert [worker["id"] for worker in second["cluster"]["workers"]] == ["decode-0", "prefill-0"]
    (route,) = second["routes"]
    assert (route["plan"], route["reason"], route["recent"], route["total"]) == ("remote", "remote", 2, 2)
    assert second["stages"]["queue_ms"] > 0
    (prefix,) = second["prefixes"]
    assert (prefix["tokens"], prefix["saved_tokens"]) == (48, 96)
    assert prefix["first_words"].startswith("The tides of the North Sea")


async def test_viewers_share_a_sample_and_one_who_leaves_is_forgotten(bench: Bench) -> None:
    client = await bench.gateway(is_ready=False)
    async with watching(client) as one, watching(client) as other:
        seen = [[await anext(events) for _ in range(3)] for events in (one, other)]
        assert await bench.metric("baton_dashboard_viewers") == 2
    assert seen[0][2]["point"] in [event["point"] for event in seen[1][1:]]

    async def nobody_watches() -> bool:
        return await bench.metric("baton_dashboard_viewers") == 0

    await bench.wait_until(nobody_watches)


async def test_the_stream_needs_a_key_and_shows_prompts_to_the_admin_only(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway(api_key=("client-key",), admin_key="admin-key")
    assert (await client.get("/dashboard")).status_code == 200
    for key in ("none", "wrong"):
        refused = await client.get(EVENTS, headers={"Authorization": f"Bearer {key}"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    for key, sees_prefixes in (("client-key", False), ("admin-key", True)):
        async with watching(client, key) as events:
            _, snapshot = [await anext(events) for _ in range(2)]
        assert (snapshot["prefixes"] is not None) is sees_prefixes


async def test_a_gateway_that_ends_ends_its_streams(bench: Bench) -> None:
    client = await bench.gateway(is_ready=False)
    assert bench.server is not None
    async with watching(client) as events:
        await anext(events)
        bench.server.stop()
        assert [event async for event in events if event["type"] == "history"] == []
