"""Several projections of one input as one matrix product.

transformers' code asks one projection after the other with the same tensor. The first one asked computes all of them
and the others find their share; so nothing of that code has to change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class MergedLinear:
    """The weights of several projections below each other. Owned by its parts, used by one thread."""

    def __init__(self, projections: Sequence[nn.Linear]) -> None:
        """Take over the weights of ``projections``, which have equal input widths, and biases all or none."""
        self.widths: list[int] = [projection.out_features for projection in projections]
        weights: list[Tensor] = [projection.weight for projection in projections]
        self._weight = torch.cat(weights)  # [sum of widths, in_features]
        biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()
        self._waiting: set[int] = set()
        for projection, weight in zip(projections, torch.split(self._weight, self.widths), strict=True):
            projection.weight = nn.Parameter(weight, requires_grad=False)  # a view: the old memory is given back

    def __call__(self, x: Tensor) -> Tensor:
        """Return all projections of ``x [..., in_features]``: ``[..., sum of widths]``."""
        return linear(x, self._weight, self._bias)

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return one projection of ``x``; computes all when this ``x`` is new or the part was taken already."""
        if x is not self._input or index not in self._waiting:
            self._input, self._outputs = x, torch.split(self(x), self.widths, dim=-1)
            self._waiting = set(range(len(self.widths)))
        output = self._outputs[index]
        self._waiting.discard(index)
        if not self._waiting:
            self._input, self._outputs = None, ()
        return output


class ProjectionPart(nn.Module):
    """Stands in a model for one of the projections of a :class:`MergedLinear`."""

    def __init__(self, merged: MergedLinear, index: int, projection: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = projection.in_features, projection.out_features
        self.weight, self.bias = projection.weight, projection.bias
        self._merged, self._index = merged, index

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]`` for ``x [..., in_features]``."""
        return self._merged.part(self._index, x)


def mergeable(projections: Sequence[nn.Module | None]) -> list[nn.Linear]:
    """Return ``projections`` if all are plain ones of one input width, with biases all or none; else nothing."""
    plain = [projection for projection in projections if type(projection) is nn.Linear]
    widths = {projection.in_features for projection in plain}
    biased = {projection.bias is not None for projection in plain}
    return plain if len(plain) == len(projections) and len(widths) == len(biased) == 1 else []


def merge(owner: nn.Module, names: Sequence[str]) -> MergedLinear | None:
    """Merge the projections of ``owner`` that are called ``names``, where they are :func:`mergeable`."""
    projections = mergeable([getattr(owner, name, None) for name in names])
    if not projections:
        return None
    merged = MergedLinear(projections)
    for index, (name, projection) in enumerate(zip(names, projections, strict=True)):
        setattr(owner, name, ProjectionPart(merged, index, projection))
    return merged
