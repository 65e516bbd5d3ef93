"""How much KV memory is saved because samples and beams of a prompt share blocks (PagedAttention, section 6.3)."""

from collections.abc import Collection

from kvstore.block_table import BlockTable


class SharingMeter:
    """Counts blocks of requests with several sequences, once a step, so that what lasts longer counts more."""

    def __init__(self) -> None:
        self._counts = {"forked_block_steps": 0, "saved_block_steps": 0}

    def observe(self, tables: Collection[BlockTable]) -> None:
        """Note what the sequences of one request hold in one step."""
        if len(tables) > 1:
            named = [block_id for table in tables for block_id in table.block_ids]
            self._counts["forked_block_steps"] += len(named)
            self._counts["saved_block_steps"] += len(named) - len(set(named))

    def counters(self) -> dict[str, int]:
        """Return the blocks that sequences would have held without sharing, and those of them that were saved."""
        return dict(self._counts)
