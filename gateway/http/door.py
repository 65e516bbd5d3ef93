"""What every HTTP request passes first: its id, the key that it needs, and the last net for errors.

``X-Request-Id`` is the client's, if it is a sane one, and is only echoed; inside, ids are made by Baton.
"""

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import BatonError, InternalError, NotFound
from common.logs import client_request
from gateway.errors import MethodNotAllowed
from gateway.http.client_gone import ClientGone
from gateway.http.errors import error_headers, error_reply
from gateway.http.keys import Keys, bearer
from gateway.http.salt import CACHE_SALT
from gateway.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
CLIENT_CLOSED = 499
"""Status in metrics of a request whose client has left; nobody gets it."""

_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PROTECTED = ("/v1/", "/tokenize", "/detokenize")
_WATCH = "/v1/dashboard/events"
"""Open to the admin key too, which need not be an API key."""
_ADMIN = ("/v1/cluster/", "/v1/cache/stats", "/v1/cache/prefixes", "/v1/cache/reset", "/debug/")


class Door:
    """Wraps the application and decides, by the path that is routed, which key a request needs."""

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = _Answer(send, _request_id(headers))
        client_request.set(answer.request_id)  # of this request's task, and of those that it starts
        try:
            scope[CACHE_SALT] = self._authorize(scope["path"], headers)
            await self._app(scope, receive, answer.send)
        except ClientGone:
            answer.status = CLIENT_CLOSED
        except BatonError as error:
            await error_response(error)(scope, receive, answer.send)
        except Exception:
            log.exception("%s %s: fault", scope["method"], scope["path"])
            if answer.status:  # its headers are out; closing the connection is all that is left
                raise
            await error_response(InternalError("internal error"))(scope, receive, answer.send)
        finally:
            self._metrics.http_requests.labels(_handler(scope), scope["method"], str(answer.status)).inc()

    def _authorize(self, path: str, headers: Headers) -> str:
        """Return the request's cache salt; raises Unauthorized."""
        sent = bearer(headers)
        if path == _WATCH and self._keys.is_admin(sent):
            return ""
        if path.startswith(_ADMIN):
            self._keys.check_admin(sent)
            return ""
        return self._keys.check_client(sent) if path.startswith(_PROTECTED) else ""


class _Answer:
    """Adds the request id to the response and remembers its status, 0 until there is one."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.status = 0
        self.request_id = request_id
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.request_id
        await self._send(message)


def error_response(error: BatonError) -> Response:
    """Return the response that tells a client about ``error``."""
    return Response(error_reply(error), error.http_status, error_headers(error), "application/json")


async def on_error(request: Request, error: Exception) -> Response:
    """Answer an error that an endpoint raised."""
    assert isinstance(error, BatonError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer a request that no route takes."""
    assert isinstance(error, HTTPException)
    if error.status_code == MethodNotAllowed.http_status:
        response = error_response(MethodNotAllowed(f"{request.method[:20]} is not allowed here"))
        response.headers.update(error.headers or {})
        return response
    return error_response(NotFound("there is nothing at this address"))


def _request_id(headers: Headers) -> str:
    sent = headers.get(REQUEST_ID, "")
    return sent if _SANE_ID.fullmatch(sent) else f"http-{secrets.token_hex(16)}"


def _handler(scope: Scope) -> str:
    """Return the route's path, so that made-up addresses do not make up metrics."""
    route = scope.get("route")
    return str(getattr(route, "path", "none"))
