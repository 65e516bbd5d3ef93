"""Messages to bytes and back: msgpack maps with names, checked against the message's type.

``msgpack`` does the bytes and bounds what a peer can make us allocate; ``msgspec`` does the types.

The elements of a Pull stream carry checksums over every byte, since a wrong one may become a wrong answer:

    handover or end:  b"M", xxh3-64 of the message, message
    KV frame:         b"F", xxh3-64 of the header, length of the header, header, payload (its checksum is in the header)
    announcement:     b"A", and as a KV frame without a payload: the receiver reads the blocks itself

The payload travels raw, so that block bytes are copied once on each side.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import msgspec
import xxhash

from common.envelope import seal, unseal
from common.errors import CorruptFrame, InvalidRequest
from common.ids import BlockId, TransferId
from common.messages import End, Handover, KvFrame, PullItem

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""No message may be larger; a prompt of a million tokens is about 5 MiB."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""No KV frame may be larger; senders aim for 1-4 MiB."""

_MESSAGE = b"M"
_FRAME = b"F"
_ANNOUNCEMENT = b"A"
_CHECKSUM = struct.Struct("<Q")
_FRAME_START = struct.Struct("<QI")  # checksum and length of the header
_FRAME_HEADER = 1 + _FRAME_START.size


class _FrameHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    transfer_id: str
    seq: int
    token_start: int
    token_end: int
    block_ids: tuple[int, ...]
    checksum: int
    num_bytes: int


def encode(message: msgspec.Struct) -> bytes:
    """Return ``message`` as a msgpack map with its ``type``."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    return packed


def decode(data: bytes, kind: Any) -> Any:
    """Return the message of type ``kind`` (a struct or a union of tagged structs) that ``data`` holds.

    Raises InvalidRequest when the bytes are not msgpack, too large, or not of that type.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return msgspec.convert(msgpack.unpackb(data, raw=False), kind)
    except (ValueError, msgpack.UnpackException, msgspec.ValidationError) as error:
        raise InvalidRequest(f"malformed message: {error}") from error


def encode_sealed(message: msgspec.Struct) -> bytes:
    """Return ``message`` with a checksum, for a place where others keep it."""
    return seal(encode(message))


def decode_sealed(data: bytes, kind: Any) -> Any:
    """Return the message that :func:`encode_sealed` wrote; raises InvalidRequest when it was damaged since."""
    try:
        return decode(unseal(data), kind)
    except CorruptFrame as error:
        raise InvalidRequest(error.message) from error


def payload_checksum(parts: Iterable[bytes | memoryview]) -> int:
    """Return the xxh3-64 of the bytes that ``parts`` make up."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return int(digest.intdigest())


def encode_pull_item(item: PullItem) -> bytes:
    """Return one element of a Pull stream as bytes."""
    if not isinstance(item, KvFrame):
        message = encode(item)
        return b"".join((_MESSAGE, _CHECKSUM.pack(payload_checksum((message,))), message))
    parts = () if item.payload is None else (item.payload,)
    header = _FrameHeader(
        item.transfer_id,
        item.seq,
        item.token_start,
        item.token_end,
        item.block_ids,
        item.checksum,
        sum(len(part) for part in parts),
    )
    return _frame_bytes(_ANNOUNCEMENT if item.payload is None else _FRAME, header, parts)


def encode_frame(
    transfer_id: TransferId,
    seq: int,
    token_start: int,
    token_end: int,
    block_ids: Sequence[BlockId],
    parts: Sequence[memoryview],
) -> bytes:
    """Return a KV frame whose payload is ``parts`` in order, as bytes; they are summed and copied once, here."""
    num_bytes = sum(part.nbytes for part in parts)
    checksum = payload_checksum(parts)
    header = _FrameHeader(transfer_id, seq, token_start, token_end, tuple(block_ids), checksum, num_bytes)
    return _frame_bytes(_FRAME, header, parts)


def _frame_bytes(kind: bytes, header: _FrameHeader, parts: Sequence[bytes | memoryview]) -> bytes:
    packed = encode(header)
    return b"".join((kind, _FRAME_START.pack(payload_checksum((packed,)), len(packed)), packed, *parts))


def decode_pull_item(data: bytes) -> PullItem:
    """Return the element of a Pull stream that ``data`` holds; the payload of a frame is a view of ``data``.

    Raises CorruptFrame when the bytes are malformed. The checksum of a payload is left to the receiver.
    """
    view = memoryview(data)
    try:
        if view[:1] == _MESSAGE:
            (checksum,) = _CHECKSUM.unpack(view[1:9])
            item: Handover | End = decode(_checked(view[9:], checksum), Handover | End)
            return item
        if view[:1] not in (_FRAME, _ANNOUNCEMENT) or len(data) > MAX_FRAME_BYTES:
            raise CorruptFrame("frame has an unknown kind or is too large")
        checksum, header_len = _FRAME_START.unpack(view[1:_FRAME_HEADER])
        payload = view[_FRAME_HEADER + header_len :]
        header: _FrameHeader = decode(
            _checked(view[_FRAME_HEADER : _FRAME_HEADER + header_len], checksum), _FrameHeader
        )
    except (InvalidRequest, struct.error) as error:
        raise CorruptFrame(f"malformed frame: {error}") from error
    if len(payload) != header.num_bytes:
        raise CorruptFrame(
            f"frame {header.seq} has {len(payload)} bytes of payload, its header says {header.num_bytes}"
        )
    if payload and view[:1] == _ANNOUNCEMENT:
        raise CorruptFrame(f"frame {header.seq} is only announced and has a payload")
    return KvFrame(
        header.transfer_id,  # type: ignore[arg-type]
        header.seq,
        header.token_start,
        header.token_end,
        header.block_ids,  # type: ignore[arg-type]
        header.checksum,
        payload if view[:1] == _FRAME else None,
    )


def _checked(part: memoryview, checksum: int) -> bytes:
    if payload_checksum((part,)) != checksum:
        raise CorruptFrame("the checksum of a header or message is wrong")
    return bytes(part)
