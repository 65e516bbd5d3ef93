"""Which tokens of which sequences one step computes, as the attention and cache kernels see them.

The queries of all sequences lie behind each other in one packed dimension of T rows. Those of one sequence are its
last tokens, in order: a decode row is a sequence with one query, a prefill chunk one with many.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Index tensors of one step, shared by all layers and never written."""

    cu_seqlens_q: Tensor
    """``[S + 1]`` int32; the queries of sequence s are rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]``."""
    seq_lens: Tensor
    """``[S]`` int32; keys of each sequence, this step's tokens included."""
    block_tables: Tensor
    """``[S, max_blocks]`` int32; physical block ids, -1 past the end of a sequence."""
    slot_mapping: Tensor
    """``[T]`` int64; ``block_id * block_size + offset`` where a row's key and value go, -1 to store nothing."""
