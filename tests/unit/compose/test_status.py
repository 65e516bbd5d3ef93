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
from compose.status import ClusterView, cluster_table, fetch_cluster

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


def printed(cluster: ClusterView, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(cluster_table(cluster, width))
    return captured.get().splitlines()


async def test_every_worker_is_a_row_with_its_blocks() -> None:
    async with answering("200 OK", json.dumps(CLUSTER).encode()) as url:
        lines = printed(await fetch_cluster(url), width=200)
    assert "0 prefill, 1 decode" in lines[0]
    row = next(line for line in lines if "decode-0" in line)
    assert row.split() == [
        *("decode-0", "decode", "ready", "4711", "1767323045678", "127.0.0.1:5001", "cpu", "3", "2"),
        *("10", "29", "60", "1", "100"),
    ]


async def test_a_narrow_terminal_cuts_nothing_off() -> None:
    worker = CLUSTER["workers"][0]
    wide = worker | {"id": "prefill-12", "role": "prefill", "state": "draining", "pid": 4194304}
    wide["blocks"] = dict.fromkeys(worker["blocks"], 99999)
    async with answering("200 OK", json.dumps(CLUSTER | {"workers": [wide]}).encode()) as url:
        lines = printed(await fetch_cluster(url), width=80)
    row = next(line for line in lines if "prefill-12" in line)
    assert row.split() == ["prefill-12", "prefill", "draining", "4194304", "3", "2", *["99999"] * 4]


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


async def test_the_first_key_is_sent() -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        with pytest.raises(Unavailable):
            await fetch_cluster(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "first second")
    assert b"\r\nauthorization: bearer first\r\n" in heads[0].lower()
