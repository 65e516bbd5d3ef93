"""The table that ``baton status`` prints."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.console import Console

from common.errors import Unavailable
from compose.ports import free_port
from compose.status import cluster_table, fetch_cluster

pytestmark = pytest.mark.anyio

CLUSTER: dict[str, Any] = {
    "workers": [
        {
            "id": "decode-0",
            "role": "decode",
            "pid": 4711,
            "epoch": 1767323045678,
            "address": "127.0.0.1:5001",
            "state": "ready",
            "device": "cpu",
            "running": 3,
            "waiting": 2,
            "blocks": {"total": 100, "free": 60, "cached": 29, "held": 10, "quarantined": 1},
            "something_newer": 1,
        }
    ],
    "ratio": {"prefill": 0, "decode": 1},
}


@asynccontextmanager
async def answering(status: str, body: bytes) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_every_worker_is_a_row_with_its_blocks() -> None:
    async with answering("200 OK", json.dumps(CLUSTER).encode()) as url:
        table = cluster_table(await fetch_cluster(url))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    row = next(line for line in captured.get().splitlines() if "decode-0" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [
        *("decode-0", "decode", "ready", "4711", "1767323045678", "127.0.0.1:5001", "cpu", "3", "2"),
        *("10", "29", "60", "1", "100"),
    ]


async def test_nobody_there_is_said_with_the_address() -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(Unavailable, match=url):
        await fetch_cluster(url)


async def test_an_error_is_passed_on() -> None:
    body = b'{"error": {"message": "draining", "type": "unavailable_error"}}'
    async with answering("503 Service Unavailable", body) as url:
        with pytest.raises(Unavailable, match="draining"):
            await fetch_cluster(url)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"workers": []}'])
async def test_another_server_is_recognised(body: bytes) -> None:
    async with answering("200 OK", body) as url:
        with pytest.raises(Unavailable, match="not a Baton gateway"):
            await fetch_cluster(url)
