"""One line a log record, as text or as JSON.

As text: time, level, process, logger, message, and a traceback's lines behind it. As JSON: one object, with the
traceback in ``error``. Lines about a request begin with its id, ``req-…``, in every process that it passes; those of a
gateway carry the client's own too, the ``X-Request-Id`` of the answer.
"""

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]

client_request: ContextVar[str] = ContextVar("client_request", default="")
"""``X-Request-Id`` of the HTTP request that the current task serves; "" outside one."""

_ABOUT_REQUEST = re.compile(r"(req-[0-9a-f-]+): ")


def configure(process: str, level: str = "INFO", log_format: LogFormat = "text") -> None:
    """Send the logs of this process to stderr; ``process`` names it in each line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else _TextFormatter(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


class _TextFormatter(logging.Formatter):
    """``2026-11-30 12:00:00,000 I gateway gateway.http.door: message``, with ``[X-Request-Id]`` where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        client = client_request.get()
        return super().formatMessage(record) + (f" [{client}]" if client else "")


class _JsonFormatter(logging.Formatter):
    """One object; fields that say nothing are left out."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        about = _ABOUT_REQUEST.match(message)
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "request": about[1] if about else "",
            "client_request": client_request.get(),
            "message": message,
            "error": self.formatException(record.exc_info) if record.exc_info else "",
        }
        return json.dumps({name: value for name, value in fields.items() if value}, ensure_ascii=False)
