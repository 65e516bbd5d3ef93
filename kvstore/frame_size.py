"""How many blocks a frame of a Pull stream covers."""

from common.wire import MAX_FRAME_BYTES

FRAME_BYTES = 2 * 1024 * 1024
"""Bytes that a frame aims for; a larger block has one of its own."""

MAX_BLOCK_BYTES = MAX_FRAME_BYTES - 64 * 1024
"""A block must fit a frame with its header."""


def blocks_in_frame(block_bytes: int) -> int:
    """Return the most blocks that one frame covers."""
    return max(1, FRAME_BYTES // block_bytes)
