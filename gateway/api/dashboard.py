"""``GET /dashboard``: the page and its files, which are nobody's secret, and the stream of what they show.

The page may load and reach nothing but this gateway. Its stream needs an API key where there are keys; the admin key
opens it too, and shows the shared prefixes besides.
"""

from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from common.errors import NotFound
from gateway.dashboard.assets import PAGE, Asset, load_assets
from gateway.dashboard.sampler import Sampler
from gateway.http import sse
from gateway.http.client_gone import race
from gateway.http.keys import bearer
from gateway.parts import parts_of

_ASSETS = load_assets()

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """Return the page."""
    return _respond(request, _ASSETS[PAGE])


async def asset(request: Request) -> Response:
    """Return one of the page's files; raises NotFound."""
    path = request.path_params["path"]
    if not path:
        return RedirectResponse("../dashboard")  # the page's own links begin there
    found = _ASSETS.get(path)
    if found is None:
        raise NotFound("there is nothing at this address")
    return _respond(request, found)


async def events(request: Request) -> Response:
    """Stream a history and then a snapshot a second, until the viewer leaves or the gateway drains."""
    parts = parts_of(request)
    is_operator = parts.keys.is_admin(bearer(request.headers))
    return SnapshotStream(parts.sampler, is_operator=is_operator)


class SnapshotStream(Response):
    """One viewer's stream."""

    def __init__(self, sampler: Sampler, *, is_operator: bool) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(sse.HEADERS)
        self._sampler = sampler
        self._is_operator = is_operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until one side ends it; raises ClientGone when it was the viewer."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await race(receive, self._send_frames(send))

    async def _send_frames(self, send: Send) -> None:
        async with aclosing(self._sampler.frames(is_operator=self._is_operator)) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": sse.event(frame), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _respond(request: Request, found: Asset) -> Response:
    headers = _HEADERS | {"etag": found.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if found.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
