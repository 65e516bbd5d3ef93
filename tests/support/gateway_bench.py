"""A real gateway on loopback between a test's HTTP client and stub workers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from redis.asyncio import Redis
from tokenizers import Tokenizer

from common.messages import Submit
from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from tests.support.stub_decode import MODEL, TOKEN, StubDecode, StubPrefill
from tests.support.tiny_tokenizers import byte_level, write_model

ANSWER = "Paris is the capital of France."
WAIT_S = 20.0
POLL_S = 0.01


@dataclass(slots=True)
class Bench:
    """Everything that one test runs; all of it is ended by :func:`open_bench`."""

    redis: Redis
    redis_url: str
    folder: Path
    stack: AsyncExitStack
    tokenizer: Tokenizer = field(default_factory=byte_level)
    server: GatewayServer | None = None
    decodes: list[StubDecode] = field(default_factory=list)
    client: httpx2.AsyncClient = field(init=False)

    # ---- parts ----

    def tokens(self, text: str, *, eos: bool = True) -> list[int]:
        """Return the tokens of an answer."""
        token_ids: list[int] = self.tokenizer.encode(text).ids
        return [*token_ids, self.tokenizer.token_to_id("<|im_end|>")] if eos else token_ids

    async def decode(
        self,
        answer: str | Sequence[str] | Callable[[Submit], list[int]] = ANSWER,
        *,
        name: str = "decode-0",
        cached_tokens: int = 0,
    ) -> StubDecode:
        """Start a decode worker that writes ``answer``; of several, the one at the sample's index."""

        def script(submit: Submit, index: int) -> list[int]:
            if callable(answer):
                return answer(submit)
            return self.tokens(answer if isinstance(answer, str) else answer[index])

        stub = StubDecode(self.redis, script, name=name, cached_tokens=cached_tokens)
        await stub.start()
        self.stack.push_async_callback(stub.stop)
        self.decodes.append(stub)
        return stub

    async def prefill(self, *decodes: StubDecode, **options: Any) -> StubPrefill:
        """Start a prefill worker for ``decodes``."""
        stub = StubPrefill(self.redis, decodes, **options)
        await stub.start()
        self.stack.push_async_callback(stub.stop)
        return stub

    async def gateway(self, model: Path | None = None, *, is_ready: bool = True, **options: Any) -> httpx2.AsyncClient:
        """Start a gateway and return a client of it; wait until it is ready."""
        model = model or write_model(self.folder / "model", self.tokenizer)
        config = GatewayConfig(
            str(model),
            **{
                "served_model_name": MODEL,
                "port": 0,
                "redis": self.redis_url,
                "cluster_token": TOKEN,
                "drain_seconds": 5.0,
                "worker_wait_s": 0.0,
            }
            | options,
        )
        self.server = server = GatewayServer(config)
        task = asyncio.create_task(server.run())
        self.stack.push_async_callback(_end, server, task)
        self.client = httpx2.AsyncClient(base_url=server.url, timeout=30.0, trust_env=False)
        await self.stack.enter_async_context(self.client)
        await self.wait_until(lambda: self._answers(is_ready))
        return self.client

    async def _answers(self, is_ready: bool) -> bool:
        return (await self.client.get("/ready" if is_ready else "/health")).status_code == 200

    # ---- waiting ----

    async def wait_until(self, holds: Callable[[], Any]) -> None:
        """Wait until ``holds()``, awaited if need be, is true; raises TimeoutError when that takes too long."""
        async with asyncio.timeout(WAIT_S):
            while True:
                found = holds()
                if await found if asyncio.iscoroutine(found) else found:
                    return
                await asyncio.sleep(POLL_S)

    async def wait_workers(self, count: int) -> None:
        """Wait until the gateway has so many connected workers."""

        async def connected() -> bool:
            workers = (await self.client.get("/v1/cluster")).json()["workers"]
            return sum(worker["connected"] for worker in workers) == count

        await self.wait_until(connected)

    # ---- asking ----

    async def chat(self, text: str = "What is the capital of France?", **fields: Any) -> httpx2.Response:
        """Ask for a chat completion that is not streamed."""
        body = {"messages": [{"role": "user", "content": text}]} | fields
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "The capital", **fields: Any) -> httpx2.Response:
        """Ask for a completion that is not streamed."""
        return await self.client.post("/v1/completions", json={"prompt": prompt} | fields)

    async def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Ask for a stream; return its events, without ``[DONE]``, which must be the last."""
        async with self.client.stream("POST", path, json=fields | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            raw = b"".join([part async for part in response.aiter_bytes()])
        return events_of(raw)

    async def metric(self, name: str, **labels: str) -> float:
        """Return one sample of /metrics, 0 when it is not there."""
        text = (await self.client.get("/metrics")).text
        for line in text.splitlines():
            if line.startswith((name + " ", name + "{")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream's bytes; checks the framing and that ``[DONE]`` is the last."""
    assert b"\r" not in raw
    *parts, tail = raw.split(b"\n\n")
    assert tail == b""
    data = [part for part in parts if not part.startswith(b":")]
    assert data[-1] == b"data: [DONE]"
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in data)
    return [json.loads(part.removeprefix(b"data: ")) for part in data[:-1]]


@asynccontextmanager
async def open_bench(redis: Redis, redis_url: str, folder: Path) -> AsyncIterator[Bench]:
    """Give a test its bench, and end all that it started there."""
    async with AsyncExitStack() as stack:
        yield Bench(redis, redis_url, folder, stack)


async def _end(server: GatewayServer, task: "asyncio.Task[None]") -> None:
    server.stop()
    await task
