"""The methods that workers serve to each other and to gateways."""

from dataclasses import dataclass
from typing import Any

from common.messages import (
    Ack,
    Borrow,
    BorrowReply,
    Cancel,
    Done,
    Drain,
    Hello,
    HelloReply,
    Inspect,
    Keep,
    KvReport,
    Offer,
    OfferReply,
    Pull,
    Renew,
    RenewReply,
    ResetCache,
    SessionDown,
    SessionUp,
    TakeRole,
)


@dataclass(frozen=True, slots=True)
class Method:
    """One gRPC method: its path and the types of what goes in and out (each a message or a union of messages)."""

    path: str
    request: Any
    response: Any


# Served by every worker, whatever its role: the owner of blocks lets others read them.
HELLO = Method("/baton.Blocks/Hello", Hello, HelloReply)  # unary, control channel
RENEW = Method("/baton.Blocks/Renew", Renew, RenewReply)  # unary, control channel
DONE = Method("/baton.Blocks/Done", Done, Ack)  # unary, control channel
CANCEL = Method("/baton.Blocks/Cancel", Cancel, Ack)  # unary, control channel
PULL = Method("/baton.Blocks/Pull", Pull, bytes)  # server stream of encoded PullItem, bulk channel
BORROW = Method("/baton.Blocks/Borrow", Borrow, BorrowReply)  # unary, control channel
KEEP = Method("/baton.Blocks/Keep", Keep, Ack)  # unary, control channel
RESET_CACHE = Method("/baton.Blocks/ResetCache", ResetCache, Ack)  # unary, control channel

DRAIN = Method("/baton.Worker/Drain", Drain, Ack)  # unary, control channel
TAKE_ROLE = Method("/baton.Worker/TakeRole", TakeRole, Ack)  # unary, control channel
INSPECT = Method("/baton.Worker/Inspect", Inspect, KvReport)  # unary, control channel

# Served by a decode worker.
SESSION = Method("/baton.Decode/Session", SessionUp, SessionDown)  # bidirectional stream, one a gateway
OFFER = Method("/baton.Decode/Offer", Offer, OfferReply)  # unary, control channel
