"""`baton bench serve` and aiperf against one server, in turn: do they see the same?

    python -m benchmarks.against_aiperf --aiperf PATH [--rounds 3]

aiperf is installed apart from Baton (`python -m venv X && X/bin/pip install aiperf`). The server answers at a pace of
its own (first token after 200 ms, then one every 20 ms), because a difference between two clients must not be one
between two moments of a busy machine. Both send the same number of chats at the same concurrency; medians of the rounds
are compared. aiperf's inter token latency is what everybody else calls time per output token.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FIRST_S, GAP_S = 0.2, 0.02
NUM_REQUESTS, CONCURRENCY, OUTPUT_TOKENS, PROMPT_TOKENS = 40, 4, 32, 64
PAIRS = {
    "request_throughput": ("request_throughput", "avg"),
    "output_throughput": ("output_token_throughput", "avg"),
    "mean_ttft_ms": ("time_to_first_token", "avg"),
    "p50_ttft_ms": ("time_to_first_token", "p50"),
    "p99_ttft_ms": ("time_to_first_token", "p99"),
    "mean_tpot_ms": ("inter_token_latency", "avg"),
    "p50_tpot_ms": ("inter_token_latency", "p50"),
    "p99_tpot_ms": ("inter_token_latency", "p99"),
    "mean_e2el_ms": ("request_latency", "avg"),
    "p99_e2el_ms": ("request_latency", "p99"),
}
"""Our name of a figure, and aiperf's."""


async def serve_chat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests of one connection, each at the fixed pace."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            body = await reader.readexactly(length)
            if head.startswith(b"post"):
                await _stream(writer, json.loads(body))
            else:
                _whole(writer, {"object": "list", "data": [{"id": "paced", "object": "model"}]})
            await writer.drain()


async def _stream(writer: asyncio.StreamWriter, request: Mapping[str, object]) -> None:
    loop = asyncio.get_running_loop()
    count = int(str(request.get("max_completion_tokens") or request.get("max_tokens") or OUTPUT_TOKENS))
    due_at = loop.time() + FIRST_S
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(count):
        await asyncio.sleep(due_at - loop.time())
        due_at += GAP_S
        _chunk(writer, {"choices": [{"index": 0, "delta": {"content": " a"}, "finish_reason": None}]})
    _chunk(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": count, "total_tokens": PROMPT_TOKENS + count}
    _chunk(writer, {"choices": [], "usage": usage})
    _write(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def _chunk(writer: asyncio.StreamWriter, fields: Mapping[str, object]) -> None:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "paced"}
    _write(writer, b"data: " + msgspec.json.encode(head | dict(fields)) + b"\n\n")


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _whole(writer: asyncio.StreamWriter, content: object) -> None:
    body = json.dumps(content).encode()
    writer.write(
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )


async def run(*argv: str) -> None:
    """Run a command; raises with its output when it fails."""
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{argv[0]} failed:\n{said.decode(errors='replace')[-3000:]}")


async def ours(url: str, folder: Path) -> dict[str, float]:
    """Return our figures of one run."""
    save = folder / "ours.json"
    argv = [sys.executable, "-m", "compose.cli", "bench", "serve", "--url", url, "--model", "paced"]
    argv += ["--endpoint", "chat", "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(CONCURRENCY)]
    argv += ["--input-len", str(PROMPT_TOKENS), "--output-len", str(OUTPUT_TOKENS), "--save", str(save), "--json"]
    await run(*argv)
    found = json.loads(save.read_text())
    return {name: found[name] for name in PAIRS}


async def aiperfs(aiperf: Path, url: str, folder: Path) -> dict[str, float]:
    """Return aiperf's figures of one run, under our names."""
    argv = [str(aiperf), "profile", "--model", "paced", "--url", url, "--endpoint-type", "chat", "--streaming"]
    argv += ["--tokenizer", str(_tokenizer(folder)), "--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS)]
    argv += ["--request-count", str(NUM_REQUESTS), "--concurrency", str(CONCURRENCY), "--warmup-request-count", "4"]
    argv += ["--use-server-token-count", "--ui", "none", "--no-gpu-telemetry", "--artifact-dir", str(folder / "aiperf")]
    await run(*argv)
    found = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return {name: found[theirs][statistic] for name, (theirs, statistic) in PAIRS.items()}


def _tokenizer(folder: Path) -> Path:
    """Write a tokenizer of single bytes, which aiperf wants for making prompts."""
    target = folder / "tokenizer"
    target.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return target


@contextlib.asynccontextmanager
async def paced_server() -> AsyncIterator[str]:
    """Serve on a free port."""
    async with await asyncio.start_server(serve_chat, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def compare(aiperf: Path, rounds: int) -> Table:
    """Return the medians of both tools over ``rounds`` runs each, taken in turn."""
    seen: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    async with paced_server() as url:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                seen[0].append(await ours(url, Path(folder)))
                seen[1].append(await aiperfs(aiperf, url, Path(folder)))
    table = Table(title=f"{rounds} rounds of {NUM_REQUESTS} chats, {CONCURRENCY} at once, {OUTPUT_TOKENS} tokens each")
    for name in ("figure", "baton bench serve", "aiperf", "difference %"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for name in PAIRS:
        our, their = (statistics.median(one[name] for one in found) for found in seen)
        table.add_row(name, f"{our:.2f}", f"{their:.2f}", f"{100 * (our / their - 1):+.2f}")
    return table


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description="Compare baton bench serve with aiperf.")
    parser.add_argument("--aiperf", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    Console(width=100).print(asyncio.run(compare(options.aiperf, options.rounds)))


if __name__ == "__main__":
    main()
