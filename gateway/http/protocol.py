"""uvicorn's HTTP protocol, with one change: what is no HTTP is answered as every other error is."""

import secrets

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import InvalidRequest
from gateway.http.errors import error_reply


class HttpProtocol(HttpToolsProtocol):
    """Speaks HTTP/1.1 on one connection."""

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be read, and close the connection: where the next one begins is unknown."""
        body = error_reply(InvalidRequest("this is not a valid HTTP request"))
        head = (
            "HTTP/1.1 400 Bad Request\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: http-{secrets.token_hex(16)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
