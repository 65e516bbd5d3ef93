"""``baton bench serve``: warm up, send, measure, report; and say so when it measured itself."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.errors import ConfigError, Unavailable
from compose.bench.answer import Answer
from compose.bench.config import BenchServeConfig, parse_goals
from compose.bench.figures import Run, figures, percentile
from compose.bench.lag import LagMeter, client_warnings
from compose.bench.report import report
from compose.bench.sender import Sender
from compose.bench.workload import Job, make_jobs, make_warmups
from compose.console import result as print_result
from compose.readiness import error_message


async def bench_serve(config: BenchServeConfig) -> None:
    """Run the benchmark and print its figures; raises Unavailable when nothing was answered."""
    url = urlsplit(config.url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"--url must be like http://127.0.0.1:8000, not {config.url!r}")
    jobs = make_jobs(config)
    model = config.model or await _served_model(config)
    sender = Sender(config, url, model)
    try:
        await _warm_up(sender, make_warmups(config))
        answers, meter = await _measure(sender, jobs)
    finally:
        sender.close()
    _print(config, model, answers, meter)
    if all(answer.error for answer in answers):
        raise Unavailable(f"no request was answered: {answers[0].error}")


async def _served_model(config: BenchServeConfig) -> str:
    headers = {"Authorization": f"Bearer {config.api_key.split()[0]}"} if config.api_key.strip() else {}
    try:
        async with httpx2.AsyncClient(base_url=config.url, headers=headers, trust_env=False, timeout=10.0) as client:
            answer = await client.get("/v1/models")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise Unavailable(f"nothing answers at {config.url} ({error})") from error
    if answer.status_code != 200:
        raise Unavailable(f"{config.url} answers: {error_message(answer)}")
    return str(answer.json()["data"][0]["id"])


async def _warm_up(sender: Sender, jobs: Sequence[Job]) -> None:
    for job in jobs:
        answer = await sender.send(job)
        if answer.error:
            raise Unavailable(f"the first request failed: {answer.error}")


async def _measure(sender: Sender, jobs: Sequence[Job]) -> tuple[list[Answer], LagMeter]:
    meter = LagMeter()
    metering = asyncio.create_task(meter.run())
    try:
        with _progress(len(jobs)) as on_end:
            return await sender.send_all(jobs, on_end), meter
    finally:
        metering.cancel()
        await asyncio.wait((metering,))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Answer], None]]:
    """Show a bar on stderr, redrawn seldom: drawing takes time from measuring."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=True) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda answer: progress.advance(task)


def _print(config: BenchServeConfig, model: str, answers: Sequence[Answer], meter: LagMeter) -> None:
    lag_p99_s = percentile(meter.lags_s, 99)
    late_p99_s = percentile([answer.sent_at - answer.due_at for answer in answers], 99)
    busy_share = meter.busy_share()
    warnings = client_warnings(lag_p99_s, late_p99_s, busy_share)
    found = _settings(config, model) | figures(_run(answers), config.percentiles, parse_goals(config.goodput))
    found["errors"] = dict(Counter(answer.error for answer in answers if answer.error))
    found["client"] = {
        "loop_lag_p99_ms": round(lag_p99_s * 1e3, 3),
        "send_delay_p99_ms": round(late_p99_s * 1e3, 3),
        "cpu_share": round(busy_share, 4),
        "warnings": warnings,
    }
    if config.detailed:
        found |= _detailed(answers)
    encoded = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    if config.save is not None:
        try:
            config.save.write_text(encoded + "\n")
        except OSError as error:
            raise ConfigError(f"--save {config.save} cannot be written: {error.strerror}") from error
    if config.json:
        print_result(encoded)
    else:
        Console().print(report(found, config.percentiles, warnings))


def _run(answers: Sequence[Answer]) -> Run:
    return Run(answers, max(answer.ended_at for answer in answers) - min(answer.sent_at for answer in answers))


def _settings(config: BenchServeConfig, model: str) -> dict[str, Any]:
    """Return what was run; names as in vLLM's result file where it has one."""
    options = {name: value for name, value in asdict(config).items() if name in _SHOWN}
    rate = "inf" if math.isinf(config.request_rate) else config.request_rate
    return {"backend": "baton", "model_id": model} | options | {"request_rate": rate}


_SHOWN = (
    *("endpoint", "dataset", "num_prompts", "input_len", "output_len", "range_ratio", "request_rate", "burstiness"),
    *("max_concurrency", "num_warmups", "seed"),
)


def _detailed(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return every request, in the order of sending."""
    done = [None if answer.error else answer for answer in answers]
    return {
        "input_lens": [answer.prompt_len for answer in answers],
        "output_lens": [answer.output_len for answer in answers],
        "ttfts": [answer.ttft_s if answer else 0.0 for answer in done],
        "itls": [answer.itls_s if answer else [] for answer in done],
        "start_times": [answer.sent_at - answers[0].sent_at for answer in answers],
    }
