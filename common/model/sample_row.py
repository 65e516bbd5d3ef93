"""What the sampler is told about one row of logits."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.model.history import TokenHistory
from common.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row of logits becomes a token."""

    params: SamplingParams
    sample_index: int
    """Number of the parallel sample of the prompt."""
    position: int
    """Tokens before the one to sample."""
    num_output_tokens: int = 0
    """How many of them are output."""
    history: TokenHistory | None = None
    """Given when the parameters read it; then it has seen all ``position`` tokens."""
    allowed: NDArray[np.bool_] | None = None
    """``[vocab]`` tokens of which one is to be sampled, at least one; None: any."""
