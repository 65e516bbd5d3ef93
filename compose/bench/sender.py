"""Sends requests when they are due, whether or not earlier ones have been answered."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import SplitResult

import msgspec

from common.errors import Unavailable
from compose.bench.answer import Answer
from compose.bench.config import BenchServeConfig
from compose.bench.connection import Pool
from compose.bench.workload import Job

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Sender:
    """Owns the connections to one server."""

    def __init__(self, config: BenchServeConfig, url: SplitResult, model: str) -> None:
        self._config = config
        self._model = model
        self._pool = Pool(url)
        self._places = asyncio.Semaphore(config.max_concurrency) if config.max_concurrency else None
        path = url.path.rstrip("/") + _PATHS[config.endpoint]
        key = f"Authorization: Bearer {config.api_key.split()[0]}\r\n" if config.api_key.strip() else ""
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {url.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\n{key}Content-Length: "
        )

    async def send_all(self, jobs: Sequence[Job], on_end: Callable[[Answer], None]) -> list[Answer]:
        """Send each job when it is due, from now on; return the answers in the jobs' order when all have ended."""
        bodies = [self._body(job) for job in jobs]  # encoded before the clock starts
        began = time.perf_counter()
        sent: list[asyncio.Task[Answer]] = []
        async with asyncio.TaskGroup() as group:
            for job, body in zip(jobs, bodies, strict=True):
                due_at = began + job.at_s
                if (wait_s := due_at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                sent.append(group.create_task(self._send_one(job, body, due_at, on_end)))
        return [task.result() for task in sent]

    async def send(self, job: Job) -> Answer:
        """Send one job now."""
        return await self._send_one(job, self._body(job), time.perf_counter(), lambda answer: None)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    async def _send_one(self, job: Job, body: bytes, due_at: float, on_end: Callable[[Answer], None]) -> Answer:
        answer = Answer(len(job.prompt), due_at)
        if self._places is None:
            await self._exchange(body, answer)
        else:
            async with self._places:
                answer.due_at = time.perf_counter()
                await self._exchange(body, answer)
        on_end(answer)
        return answer

    async def _exchange(self, body: bytes, answer: Answer) -> None:
        answer.sent_at = time.perf_counter()
        status = 0
        try:
            async with asyncio.timeout(self._config.timeout_s):
                connection = await self._pool.take()
                try:
                    await connection.request(f"{self._head}{len(body)}\r\n\r\n".encode(), body, answer.take)
                finally:
                    status = connection.status
                    self._pool.give_back(connection)
        except TimeoutError:
            answer.error = f"no answer within {self._config.timeout_s:g} s"
        except Unavailable as error:
            answer.error = error.message
        answer.finish(status or 200, time.perf_counter())

    def _body(self, job: Job) -> bytes:
        fields: dict[str, Any] = {
            "model": self._model,
            "temperature": self._config.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._config.endpoint == "chat":
            fields |= {"messages": [{"role": "user", "content": job.text()}], "max_completion_tokens": job.output_len}
        else:
            fields |= {"prompt": job.prompt, "max_tokens": job.output_len}
        return msgspec.json.encode(fields)
