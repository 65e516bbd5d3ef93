"""The operations between matrix products and attention: the plain versions, and what a fused version must offer."""

from typing import Protocol

import torch
from torch import Tensor

from kernels.norm_form import NormForm


class Elementwise(Protocol):
    """One version of the operations; each reads its inputs once and writes its result once."""

    def rms_norm(self, x: Tensor, weight: Tensor, form: NormForm) -> Tensor:
        """Normalise the last dimension of ``x [..., width]``; returns the dtype of x."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, form: NormForm) -> tuple[Tensor, Tensor]:
        """Return ``x + residual`` ``[..., width]``, and its last dimension normalised."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turn ``q [1, q_heads, T, dim]`` and ``k [1, kv_heads, T, dim]`` by ``cos`` and ``sin [1, T, dim]``."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` ``[..., width]`` for ``gate_up [..., 2 * width]``, the gate first."""


class EagerElementwise:
    """Plain torch on any device: the reference."""

    def rms_norm(self, x: Tensor, weight: Tensor, form: NormForm) -> Tensor:
        """See :class:`Elementwise`."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + form.eps)
        if form.rounds_first:
            normed = normed.to(x.dtype).float()
        return (normed * (form.offset + weight.float())).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, form: NormForm) -> tuple[Tensor, Tensor]:
        """See :class:`Elementwise`."""
        summed = x + residual
        return summed, self.rms_norm(summed, weight, form)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Elementwise`."""
        return _turned(q, cos, sin), _turned(k, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See :class:`Elementwise`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    half_turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos[:, None].float() + half_turned * sin[:, None].float()).to(x.dtype)
