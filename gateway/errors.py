"""Errors that only a gateway raises; the tree they belong to is in :mod:`common.errors`.

Each carries the ``code`` that OpenAI's API gives such an error.
"""

from typing import ClassVar

from common.errors import BatonError, InvalidRequest, NotFound


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt and answer, do not fit the model."""

    code: ClassVar[str] = "context_length_exceeded"


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    code: ClassVar[str] = "model_not_found"


class RequestTimeout(BatonError):
    """The client took too long to send its request."""

    http_status = 408
    type = "request_timeout"


class Conflict(BatonError):
    """The cluster is busy with something that this would disturb."""

    http_status = 409
    type = "conflict_error"


class MethodNotAllowed(BatonError):
    """The route exists, but not for this method."""

    http_status = 405
    type = "method_not_allowed"
