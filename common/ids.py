"""Identifiers, as distinct types so that the checker catches a swap.

All of them are made by Baton. A name that a client sends (``X-Request-Id``) is only ever echoed.
"""

import secrets
import time
from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a physical KV block in one worker's pool."""

BlockHash = NewType("BlockHash", bytes)
"""16-byte chained content hash of a full block and everything before it."""

RequestId = NewType("RequestId", str)
"""One prompt being served; unique in the cluster."""

TransferId = NewType("TransferId", str)
"""One attempt to hand a prompt's KV blocks over; unguessable, never reused."""

WorkerId = NewType("WorkerId", str)
"""Stable name of a worker, kept over restarts."""

Epoch = NewType("Epoch", int)
"""One life of a worker; differs after each start. Compared for equality only."""


def new_request_id() -> RequestId:
    """Return a fresh 128-bit request id."""
    return RequestId(f"req-{secrets.token_hex(16)}")


def new_transfer_id() -> TransferId:
    """Return a fresh unguessable 128-bit transfer id."""
    return TransferId(f"kv-{secrets.token_hex(16)}")


def new_epoch() -> Epoch:
    """Return the epoch of a worker that starts now: its start in unix milliseconds."""
    return Epoch(time.time_ns() // 1_000_000)
