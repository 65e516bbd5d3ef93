"""The client process: reads a load as JSON, sends it, and writes what it saw.

It asks the system for precedence over the engines, as if it ran on a machine of its own: it needs one or two hundredths
of a core, but at the right moments.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.peers.load import Load, Observed, Seen, Stream
from compose.bench.answer import Answer
from compose.bench.config import BenchServeConfig
from compose.bench.figures import percentile
from compose.bench.lag import LagMeter, client_warnings
from compose.bench.sender import Sender
from compose.bench.workload import Job

REAL_TIME_PRIORITY = 1


async def send(load: Load) -> Observed:
    """Send all streams at once and return what came back."""
    meter = LagMeter()
    metering = asyncio.create_task(meter.run())
    began = time.perf_counter()
    try:
        streams = await asyncio.gather(*(_send_stream(load, stream) for stream in load.streams))
    finally:
        metering.cancel()
        await asyncio.wait((metering,))
    lag_s = percentile(meter.lags_s, 99)
    late_s = percentile([answer.sent_at - answer.due_at for answers in streams for answer in answers], 99)
    share = meter.busy_share()
    seen = [[_seen(answer, began) for answer in answers] for answers in streams]
    return Observed(seen, lag_s * 1e3, late_s * 1e3, share, client_warnings(lag_s, late_s, share))


async def _send_stream(load: Load, stream: Stream) -> Sequence[Answer]:
    config = BenchServeConfig(url=load.url, max_concurrency=stream.at_once, timeout_s=stream.timeout_s)
    sender = Sender(config, urlsplit(load.url), load.model)
    jobs = [Job(request.at_s, tuple(request.prompt), request.answer) for request in stream.requests]
    try:
        return await sender.send_all(jobs, lambda answer: None)
    finally:
        sender.close()


def _seen(answer: Answer, began: float) -> Seen:
    times = [at - began for at in answer.token_times]
    return Seen(answer.sent_at - began, times, answer.prompt_len, answer.output_len, answer.cached_tokens, answer.error)


def main() -> None:
    """Send what stdin says and write the result to stdout."""
    with suppress(PermissionError):  # without it, LagMeter tells whether the client was late
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME_PRIORITY))
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(send(load))))


if __name__ == "__main__":
    main()
