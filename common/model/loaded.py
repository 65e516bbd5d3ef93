"""A model in memory, ready to be run on paged KV."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from common.model.attention import LayerAttention
from common.model.spec import ModelSpec
from common.model.straight import StraightModel


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """The module with paged attention switched on, and what is known about it. Never changed after load."""

    module: PreTrainedModel
    spec: ModelSpec
    attention: tuple[LayerAttention, ...]
    """One a layer, in the order of ``spec.layers``."""
    narrows: bool = False
    """Whether the last layer returns only the rows whose logits are wanted."""
    straight: StraightModel | None = None
    """The way through the module without transformers' own code around its parts, if there is one."""
