"""One pull at its destination: what has arrived, and whether the next element of the stream may be believed.

Every element is checked before it counts, so what was taken is always a gapless valid prefix. Knows nothing of streams
and storage.
"""

from collections.abc import Iterable, Sequence

from common.errors import CorruptFrame
from common.ids import BlockId, TransferId
from common.messages import End, Handover, KvFrame
from common.wire import payload_checksum


class Incoming:
    """The progress of one Pull into ``block_ids``, the puller's own table for the whole prompt. Owned by the pull.

    A loan fills all of ``block_ids`` and brings no handover.
    """

    def __init__(
        self,
        transfer_id: TransferId,
        have_tokens: int,
        block_ids: Sequence[BlockId],
        block_size: int,
        block_bytes: int,
        *,
        is_loan: bool = False,
    ) -> None:
        self.num_tokens = have_tokens
        """Leading tokens whose KV is in place."""
        self.handover: Handover | None = None
        self.is_complete = False
        """Whether the stream has ended as it should."""
        self._transfer_id = transfer_id
        self._block_ids = tuple(block_ids)
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._num_frames = 0
        self._is_loan = is_loan
        self._may_repeat = False

    def check_frame(self, frame: KvFrame) -> tuple[BlockId, ...]:
        """Return the blocks that its bytes belong in; raises CorruptFrame unless it is the very next frame.

        The bytes themselves are left to :func:`check_bytes`.
        """
        self._require_open(frame.transfer_id)
        if frame.seq != self._num_frames:
            raise CorruptFrame(f"frame {frame.seq} came where frame {self._num_frames} was due")
        if frame.token_start != self.num_tokens or frame.token_start % self._block_size:
            raise CorruptFrame(f"frame {frame.seq} starts at token {frame.token_start}, not at {self.num_tokens}")
        self._check_token_end(frame)
        first, past = frame.token_start // self._block_size, -(-frame.token_end // self._block_size)
        num_bytes = (past - first) * self._block_bytes if frame.payload is None else len(frame.payload)
        if len(frame.block_ids) != past - first or num_bytes != (past - first) * self._block_bytes:
            raise CorruptFrame(
                f"frame {frame.seq} has {num_bytes} bytes in {len(frame.block_ids)} blocks, its tokens take "
                f"{past - first} blocks of {self._block_bytes} bytes"
            )
        return self._block_ids[first:past]

    def take_frame(self, frame: KvFrame) -> None:
        """The checked frame's bytes are in place."""
        self.num_tokens = frame.token_end
        self._num_frames += 1

    def begin_again(self) -> None:
        """Expect another stream of the same transfer, behind what this one brought; it repeats the handover."""
        self._num_frames = 0
        self._may_repeat = self.handover is not None

    def take_handover(self, handover: Handover) -> bool:
        """Keep the next token and return whether it is news.

        Raises CorruptFrame when it is not the one handover of a prompt that fits the table.
        """
        self._require_open(handover.transfer_id)
        if self._may_repeat and handover == self.handover:
            self._may_repeat = False
            return False
        if self.handover is not None:
            raise CorruptFrame("a second handover came")
        if self._is_loan:
            raise CorruptFrame("a handover came in a loan")
        num_slots = max(self.num_tokens, len(self._block_ids) * self._block_size)
        if not self.num_tokens <= handover.num_tokens <= num_slots:
            raise CorruptFrame(
                f"the handover covers {handover.num_tokens} tokens, {self.num_tokens} are here and {num_slots} fit"
            )
        self.handover = handover
        return True

    def take_end(self, end: End) -> None:
        """Close the stream; raises CorruptFrame when something is missing."""
        self._require_open(end.transfer_id)
        if end.num_frames != self._num_frames:
            raise CorruptFrame(f"{end.num_frames} frames were sent and {self._num_frames} came")
        num_due = self._num_due()
        if num_due is not None and self.num_tokens != num_due:
            raise CorruptFrame(f"the stream ended at token {self.num_tokens} of {num_due}")
        self.is_complete = True

    def _num_due(self) -> int | None:
        """Return how many tokens a complete stream has brought; None when the answer ended and none need come."""
        if self._is_loan:
            return len(self._block_ids) * self._block_size
        if self.handover is None:
            raise CorruptFrame("the stream ended without a handover")
        return self.handover.num_tokens if self.handover.has_kv else None

    def _require_open(self, transfer_id: TransferId) -> None:
        if transfer_id != self._transfer_id:
            raise CorruptFrame("the stream carries another transfer")
        if self.is_complete:
            raise CorruptFrame("something came after the end of the stream")

    def _check_token_end(self, frame: KvFrame) -> None:
        num_slots = len(self._block_ids) * self._block_size
        if not frame.token_start < frame.token_end <= num_slots:
            raise CorruptFrame(f"frame {frame.seq} ends at token {frame.token_end}, the table ends at {num_slots}")
        if self.handover is not None and frame.token_end > self.handover.num_tokens:
            raise CorruptFrame(
                f"frame {frame.seq} ends at token {frame.token_end}, past the prompt's {self.handover.num_tokens}"
            )
        if frame.token_end % self._block_size and (
            self.handover is None or frame.token_end != self.handover.num_tokens
        ):
            raise CorruptFrame(f"frame {frame.seq} ends inside a block, at token {frame.token_end}")


def check_bytes(frame: KvFrame, parts: Iterable[bytes | memoryview]) -> None:
    """Raise CorruptFrame unless ``parts`` are the bytes that the source has summed."""
    if payload_checksum(parts) != frame.checksum:
        raise CorruptFrame(f"the checksum of frame {frame.seq} is wrong")
