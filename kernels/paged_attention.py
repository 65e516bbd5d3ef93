"""Causal attention of packed query rows over paged keys and values.

``out[t, h] = sum_j softmax_j(cap(scaling * q[t, h] . k[j, h // group])) v[j, h // group]``, j over the keys that
:class:`AttentionForm` lets the row see; a sink adds ``exp(sinks[h])`` to the denominator and nothing to the sum.
"""

import torch
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows


def paged_attention_eager(
    q: Tensor, kv: LayerKV, rows: PackedRows, form: AttentionForm, sinks: Tensor | None = None
) -> Tensor:
    """Attend with ``q [T, q_heads, k_dim]``, return ``[T, q_heads, v_dim]`` in q's dtype; softmax in float32.

    Gathers every sequence and builds its whole mask: slow, obvious, and the reference of every other version.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], kv.v.shape[3])
    starts = rows.cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(rows.seq_lens.tolist()):
        begin, end = starts[seq], starts[seq + 1]
        if begin == end:
            continue
        block_ids = rows.block_tables[seq, : -(-seq_len // kv.block_size)].long()
        k, v = (_gather(view, block_ids, seq_len) for view in (kv.k, kv.v))
        visible = _visible(end - begin, seq_len, form).to(q.device)
        out[begin:end] = _attend(q[begin:end], k, v, visible, form, sinks).to(q.dtype)
    return out


def _gather(view: Tensor, block_ids: Tensor, seq_len: int) -> Tensor:
    """Return one sequence of a paged view as ``[kv_heads, seq_len, dim]`` float32."""
    blocks = view[block_ids].float()  # [blocks, kv_heads, block_size, dim]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :seq_len]


def _visible(num_queries: int, seq_len: int, form: AttentionForm) -> Tensor:
    """Return ``[num_queries, seq_len]`` bool: which keys the last ``num_queries`` positions see."""
    keys = torch.arange(seq_len)
    positions = range(seq_len - num_queries, seq_len)
    first = torch.tensor([form.first_key(position) for position in positions])
    last = torch.tensor(positions)
    return (keys >= first[:, None]) & (keys <= last[:, None])


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, form: AttentionForm, sinks: Tensor | None) -> Tensor:
    """Attend with one sequence's ``q [n, q_heads, k_dim]``; return ``[n, q_heads, v_dim]`` float32."""
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("nhd,hjd->hnj", q.float(), k) * form.scaling
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[1]]
    return torch.einsum("hnj,hjd->nhd", weights, v)
