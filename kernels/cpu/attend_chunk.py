"""Attention of many queries of one sequence by torch: the prefill path of the CPU, where no compiled one serves.

Keys and values of the sequence are gathered once. Queries are cut into pieces whose visible keys begin together, and
each piece is attended by torch's blocked CPU attention: the keys before the piece in full, the piece itself causally,
the two joined by their logsumexp (Dao et al., FlashAttention, 2022, section 3.1). A sink enters the same way. A window
makes the keys begin apart; then a piece is short and carries a mask.

Soft caps, and values as wide as keys are not, are beyond torch's attention: those take plain matrix products.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_form import AttentionForm

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

_MASKED_QUERIES = 128
"""Queries in a piece that carries a mask."""
_PLAIN_QUERIES = 64
"""Queries in a piece of plain matrix products; its scores should stay in the cache."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries ``begin`` to ``end`` of the chunk, and the first position that one of them sees."""

    begin: int
    end: int
    first_key: int
    masked: bool
    """Some query does not see all keys from ``first_key`` to itself."""


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, position: int, first_key: int, form: AttentionForm, sinks: Tensor | None
) -> Tensor:
    """Attend with queries at ``position`` and on over gathered keys from ``first_key`` to the last query.

    ``q [kv_heads, group, n, k_dim]``, ``k [kv_heads, keys, k_dim]``, ``v [kv_heads, keys, v_dim]``; returns
    ``[kv_heads, group, n, v_dim]`` in the dtype of q.
    """
    plain = form.softcap is not None or k.shape[2] != v.shape[2]
    out = q.new_empty(*q.shape[:3], v.shape[2])
    shares = None if sinks is None else sinks.float().view(q.shape[0], q.shape[1], 1)  # [kv_heads, group, 1]
    for piece in _pieces(q.shape[2], position, form, _PLAIN_QUERIES if plain else None):
        part = q[:, :, piece.begin : piece.end]
        low, high = piece.first_key - first_key, position + piece.end - first_key
        keys, values = k[:, low:high], v[:, low:high]
        if plain:
            result, logsumexp = _attend_plain(part, keys, values, form, _mask(piece, position, form))
        elif piece.masked:
            result, logsumexp = _attend_flash(part, keys, values, form, mask=_mask(piece, position, form))
        else:
            result, logsumexp = _attend_causal(part, keys, values, form)
        if shares is not None:
            result = result * torch.sigmoid(logsumexp - shares)[..., None]
        out[:, :, piece.begin : piece.end] = result
    return out


def _pieces(num_queries: int, position: int, form: AttentionForm, limit: int | None) -> Iterator[_Piece]:
    """Cut the queries where the first visible key jumps, and into at most ``limit`` where a mask is needed."""
    begin = 0
    while begin < num_queries:
        first_key = form.first_key(position + begin)
        end = num_queries
        if form.chunk is not None:
            end = min(end, (position + begin) // form.chunk * form.chunk + form.chunk - position)
        if limit is None and form.window is not None and position + end - form.window > first_key:
            end = min(end, begin + _MASKED_QUERIES)
        if limit is not None:
            end = min(end, begin + limit)
        yield _Piece(begin, end, first_key, masked=form.first_key(position + end - 1) > first_key)
        begin = end


def _mask(piece: _Piece, position: int, form: AttentionForm) -> Tensor:
    """Return ``[queries, keys]`` float32: 0 where a query sees a key, else -inf."""
    positions = torch.arange(position + piece.begin, position + piece.end)[:, None]
    keys = torch.arange(piece.first_key, position + piece.end)
    hidden = keys > positions
    if form.window is not None:
        hidden |= keys <= positions - form.window
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> tuple[Tensor, Tensor]:
    """Attend causally; the last keys are the queries' own."""
    before = k.shape[1] - q.shape[2]
    own, own_sum = _attend_flash(q, k[:, before:], v[:, before:], form, causal=True)
    if before == 0:
        return own, own_sum
    past, past_sum = _attend_flash(q, k[:, :before], v[:, :before], form)
    total = torch.logaddexp(own_sum, past_sum)
    joined = past * (past_sum - total).exp()[..., None] + own * (own_sum - total).exp()[..., None]
    return joined, total


def _attend_flash(
    q: Tensor, k: Tensor, v: Tensor, form: AttentionForm, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result and its logsumexp ``[kv_heads, group, n]``.

    A kv head is an entry of the batch, so that its keys serve the heads of its group without being repeated.
    """
    group = q.shape[1]
    keys, values = (states[:, None].expand(-1, group, -1, -1) for states in (k, v))
    result, logsumexp = _flash(q, keys, values, 0.0, causal, attn_mask=mask, scale=form.scaling)
    return result, logsumexp


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result and its logsumexp ``[kv_heads, group, n]``, in float32."""
    kv_heads, group, num_queries, _ = q.shape
    flat_q = q.float().reshape(kv_heads, group * num_queries, -1) * form.scaling
    scores = torch.bmm(flat_q, k.float().transpose(1, 2))  # [kv_heads, group * n, keys]
    if form.softcap is not None:
        scores = scores.div_(form.softcap).tanh_().mul_(form.softcap)
    scores = scores.view(kv_heads, group, num_queries, -1).add_(mask)
    logsumexp = scores.logsumexp(dim=-1)
    weights = scores.sub_(logsumexp[..., None]).exp_().view(kv_heads, group * num_queries, -1)
    return torch.bmm(weights, v.float()).view(kv_heads, group, num_queries, -1), logsumexp
