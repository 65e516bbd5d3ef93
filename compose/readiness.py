"""Waiting for a gateway to say that its cluster is ready."""

import asyncio
import json
from collections.abc import Callable

import httpx2

_POLL_S = 0.2
_REPORT_S = 10.0


async def wait_ready(url: str, report: Callable[[str], None]) -> None:
    """Wait until ``url``/ready answers 200; every ten seconds ``report`` gets what is missing."""
    clock = asyncio.get_running_loop().time
    report_at = clock() + _REPORT_S
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=5.0) as client:
        while (missing := await _missing(client)) is not None:
            if clock() >= report_at:
                report_at = clock() + _REPORT_S
                report(missing)
            await asyncio.sleep(_POLL_S)


async def _missing(client: httpx2.AsyncClient) -> str | None:
    try:
        answer = await client.get("/ready")
    except httpx2.HTTPError:
        return "the gateway does not answer yet"
    return None if answer.status_code == 200 else error_message(answer)


def error_message(answer: httpx2.Response) -> str:
    """Return what an error answer says, in Baton's form or in any other."""
    try:
        return str(answer.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"status {answer.status_code}"
