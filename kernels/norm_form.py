"""How one RMS normalisation treats its weight; families of models differ in it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormForm:
    """``x / sqrt(mean(x ** 2) + eps) * (offset + weight)``, in float32."""

    eps: float
    offset: float = 0.0
    """1 where the weight is stored as its difference from 1."""
    rounds_first: bool = True
    """The normalised x is rounded to its dtype before it meets the weight."""
