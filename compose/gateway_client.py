"""How a command asks a running gateway: one client, and errors that say what to do."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from common.errors import Unavailable
from compose.readiness import error_message


@asynccontextmanager
async def open_gateway(url: str, key: str = "", timeout_s: float = 5.0) -> AsyncIterator[httpx2.AsyncClient]:
    """Give a client of the gateway at ``url``; raises Unavailable in place of what HTTP goes wrong inside.

    ``key`` is sent where it is not empty, of several the first.
    """
    headers = {"Authorization": f"Bearer {key.split()[0]}"} if key.strip() else {}
    try:
        async with httpx2.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=timeout_s) as client:
            yield client
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise Unavailable(
            f"no gateway answers at {url} ({error}); is `baton up` running, and there? --url takes another address"
        ) from error


def accepted(answer: httpx2.Response) -> httpx2.Response:
    """Return ``answer``; raises Unavailable with what it says unless its status is 200."""
    if answer.status_code != 200:
        address = str(answer.url).removesuffix(answer.url.path)
        raise Unavailable(f"{address} answers: {error_message(answer)}")
    return answer
