"""A test hand-over: one fresh prompt, read by a prefill worker and answered by a decode worker, its blocks checked.

The decode worker checks every frame's checksum, and counts what it has taken and what it refused.
"""

import asyncio
import secrets
from dataclasses import dataclass

import httpx2

from compose.finding import Finding, failed, ok, skipped, warning
from compose.readiness import error_message

NUM_WORDS = 32
"""About 140 tokens: more than the default --local-prefill-tokens, several blocks, and short for any model."""

_COUNTED_S = 5.0
"""Workers report their counters every second."""
_POLL_S = 0.2
_NAMES = {
    "num_bytes": "baton_worker_pull_bytes_received_total",
    "frames": "baton_worker_pull_frames_received_total",
    "corrupt": "baton_worker_pull_corrupt_frames_total",
}


@dataclass(frozen=True, slots=True)
class Moved:
    """Sums of the workers' counters."""

    num_bytes: float = 0.0
    frames: float = 0.0
    corrupt: float = 0.0


async def check_transfer(client: httpx2.AsyncClient) -> Finding:
    """Ask the gateway behind ``client`` for an answer whose prompt nobody has seen, and watch its blocks move."""
    before = moved((await client.get("/metrics")).text)
    body = {"prompt": " ".join(secrets.token_hex(3) for _ in range(NUM_WORDS)), "max_tokens": 4, "temperature": 0}
    began = asyncio.get_running_loop().time()
    answer = await client.post("/v1/completions", json=body, timeout=120.0)
    elapsed_s = asyncio.get_running_loop().time() - began
    if answer.status_code != 200:
        return failed("test transfer", f"the prompt was refused: {error_message(answer)}", "see the gateway's log")
    route = answer.headers.get("x-baton-route", "")
    if not route.startswith("remote"):
        reason = route.rpartition("reason=")[2]
        if reason == "no_prefill_worker":
            return skipped("test transfer", "there is no prefill worker")
        return warning(
            "test transfer", f"the prompt was read where it was answered: {reason}", "see docs/api.md, reasons"
        )
    return judge(before, await _wait_moved(client, before), elapsed_s)


async def _wait_moved(client: httpx2.AsyncClient, before: Moved) -> Moved:
    """Return the counters once they have risen, or as they are when they do not."""
    after = before
    deadline = asyncio.get_running_loop().time() + _COUNTED_S
    while after.num_bytes <= before.num_bytes and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_S)
        after = moved((await client.get("/metrics")).text)
    return after


def judge(before: Moved, after: Moved, elapsed_s: float) -> Finding:
    """Say whether blocks have moved, and whether all were right."""
    kilobytes, frames = (after.num_bytes - before.num_bytes) / 1024, after.frames - before.frames
    if after.corrupt > before.corrupt:
        what = f"{after.corrupt - before.corrupt:g} streams of blocks were damaged or cut on their way"
        return failed(
            "test transfer", what, "test the memory and network of both machines; the workers' logs name them"
        )
    if kilobytes <= 0:
        fix = "see the decode worker's log; can it connect to the prefill worker's address?"
        return failed("test transfer", "no block has moved; the prompt was computed twice", fix)
    return ok(
        "test transfer", f"{kilobytes:.0f} KiB in {frames:.0f} frames, every checksum right; {elapsed_s:.2f} s in all"
    )


def moved(page: str) -> Moved:
    """Return the sums in a gateway's /metrics."""
    sums = dict.fromkeys(_NAMES, 0.0)
    for line in page.splitlines():
        name, _, rest = line.partition("{")
        for field, known in _NAMES.items():
            if name == known and rest:
                sums[field] += float(rest.rpartition(" ")[2])
    return Moved(**sums)
