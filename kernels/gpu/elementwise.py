"""The GPU version of the operations between matrix products and attention."""

from torch import Tensor

from kernels.gpu.add_rms_norm import add_rms_norm
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.rotary import rotary
from kernels.gpu.silu_mul import silu_mul
from kernels.norm_form import NormForm


class TritonElementwise:
    """See :class:`kernels.elementwise.Elementwise`."""

    def rms_norm(self, x: Tensor, weight: Tensor, form: NormForm) -> Tensor:
        """See :class:`kernels.elementwise.Elementwise`."""
        return rms_norm(x, weight, form)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, form: NormForm) -> tuple[Tensor, Tensor]:
        """See :class:`kernels.elementwise.Elementwise`."""
        return add_rms_norm(x, residual, weight, form)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`kernels.elementwise.Elementwise`."""
        return rotary(q, k, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See :class:`kernels.elementwise.Elementwise`."""
        return silu_mul(gate_up)
