"""Every error that Baton raises on purpose, and the one table that maps it to HTTP and gRPC.

BatonError
├── InvalidRequest        the client's input is wrong; ``param`` names the field
├── Unauthorized          missing or wrong key
├── NotFound              unknown model, worker or route
├── PayloadTooLarge       body over the limit
├── Overloaded            no room now; ``retry_after_s`` says when to come back
├── Unavailable           no worker can serve this, or the process is draining
├── DeadlineExceeded      a limit in time ran out
├── TransferError         a hand-over of KV blocks failed; what follows the valid prefix is recomputed
│   ├── UnknownTransfer   released, expired or never known
│   ├── StaleEpoch        the message belongs to an earlier life of the worker
│   ├── CorruptFrame      checksum, order or length is wrong
│   └── FingerprintMismatch   the two workers do not hold the same model and layout
├── UnsupportedModel      the model cannot run on the paged path; said at load
├── ConfigError           a flag or environment variable is wrong; said at start
└── InternalError         a fault of ours

An error says what, why and the limit, in a sentence that may be shown to a client: no paths, addresses or traces.
"""

from typing import ClassVar

import grpc
import msgspec


class BatonError(Exception):
    """Root of the tree. ``param`` names the offending input field, if one does."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    type: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(BatonError):
    """The client's input is wrong."""

    http_status = 400
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    type = "invalid_request_error"


class Unauthorized(BatonError):
    """The key is missing or wrong."""

    http_status = 401
    grpc_status = grpc.StatusCode.UNAUTHENTICATED
    type = "authentication_error"


class NotFound(BatonError):
    """The named model, worker or route does not exist."""

    http_status = 404
    grpc_status = grpc.StatusCode.NOT_FOUND
    type = "not_found_error"


class PayloadTooLarge(BatonError):
    """The body is over the limit."""

    http_status = 413
    grpc_status = grpc.StatusCode.OUT_OF_RANGE
    type = "payload_too_large"


class Overloaded(BatonError):
    """There is no room now."""

    http_status = 429
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    type = "overloaded_error"


class Unavailable(BatonError):
    """Nobody can serve this now."""

    http_status = 503
    grpc_status = grpc.StatusCode.UNAVAILABLE
    type = "unavailable_error"


class DeadlineExceeded(BatonError):
    """A limit in time ran out."""

    http_status = 504
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    type = "timeout_error"


class TransferError(BatonError):
    """A hand-over of KV blocks failed."""

    http_status = 502
    grpc_status = grpc.StatusCode.ABORTED
    type = "transfer_error"


class UnknownTransfer(TransferError):
    """The transfer was released, has expired, or was never known here."""

    type = "unknown_transfer"


class StaleEpoch(TransferError):
    """The message belongs to an earlier life of the worker."""

    type = "stale_epoch"


class CorruptFrame(TransferError):
    """A frame's checksum, order or length is wrong."""

    type = "corrupt_frame"


class FingerprintMismatch(TransferError):
    """The two workers do not hold the same model and layout."""

    type = "fingerprint_mismatch"


class UnsupportedModel(BatonError):
    """The model cannot run on the paged path."""

    type = "unsupported_model"


class ConfigError(BatonError):
    """A flag or environment variable is wrong."""

    type = "config_error"


class InternalError(BatonError):
    """A fault of ours."""


class ErrorDetail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What crosses a wire about an error: its class by ``type``, and the fields of :class:`BatonError`."""

    type: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


def _tree(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(found for child in root.__subclasses__() for found in _tree(child))]


_BY_TYPE: dict[str, type[BatonError]] = {cls.type: cls for cls in reversed(_tree(BatonError)) if cls is not BatonError}


def to_detail(error: BatonError) -> ErrorDetail:
    """Return what may be told about ``error`` to another process."""
    return ErrorDetail(error.type, error.message, error.param, error.retry_after_s)


def from_detail(detail: ErrorDetail) -> BatonError:
    """Rebuild the error that ``detail`` describes; an unknown type becomes :class:`InternalError`."""
    cls = _BY_TYPE.get(detail.type, InternalError)
    return cls(detail.message, param=detail.param, retry_after_s=detail.retry_after_s)
