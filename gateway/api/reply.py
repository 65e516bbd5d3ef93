"""What the replies of both endpoints have in common."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.sampling import FinishReason
from gateway.api.usage import Usage
from gateway.generation import IndexedPiece
from gateway.text_stream import Piece


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What is the same in every chunk of a reply."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    return_token_ids: bool
    prompts: Sequence[tuple[int, ...]]

    @classmethod
    def new(cls, prefix: str, model: str, *, return_token_ids: bool, prompts: Sequence[tuple[int, ...]]) -> "ReplyHead":
        """Return the head of a reply that begins now; its id starts with ``prefix``."""
        created = time.time_ns() // 1_000_000_000
        return cls(f"{prefix}-{secrets.token_hex(16)}", created, model, return_token_ids, prompts)


@dataclass(slots=True)
class WholeAnswer:
    """One answer, gathered from its pieces."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


def gather(pieces: Sequence[Piece]) -> WholeAnswer:
    """Return the answer that ``pieces`` make up."""
    last = pieces[-1]
    return WholeAnswer(
        "".join([piece.text for piece in pieces]),
        tuple(token_id for piece in pieces for token_id in piece.token_ids),
        last.finish,
        last.stop_reason,
    )


class ReplyWriter(Protocol):
    """Writes one reply, as a stream of JSON chunks or whole."""

    def chunks(self, piece: IndexedPiece, usage: Usage | None) -> list[bytes]:
        """Return the chunks for a piece, each with ``usage`` if it is given."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk that has no choices, only usage."""

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        """Return the reply that is not streamed."""
