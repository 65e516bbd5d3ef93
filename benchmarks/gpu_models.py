"""Whole models with random weights on one GPU: a decode step against its bytes, a prefill against its operations."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from benchmarks.gpu_timing import DEVICE, Ceilings, wall_seconds
from common.ids import BlockId
from common.model.batch import Row, build_step
from common.model.load import make_paged
from common.model.runner import ModelRunner
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
DECODES = ((1, 2000), (64, 2000), (256, 500))
"""Sequences and the tokens of each."""
PREFILLS = (512, 2000, 8000)

_LLAMA_3 = {"rope_theta": 500_000.0, "rope_type": "default"}
CONFIGS: dict[str, PretrainedConfig] = {
    "1B": LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_parameters=_LLAMA_3,
        tie_word_embeddings=True,
    ),
    "Llama-3-8B": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_parameters=_LLAMA_3,
        tie_word_embeddings=False,
    ),
    "Qwen3-8B": Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
    ),
}


@dataclass(frozen=True, slots=True)
class StepFigure:
    """One kind of step; seconds."""

    name: str
    seconds: float
    floor_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a step of a model cannot do without."""

    weight_bytes: int
    """Weights that a step reads: the embedding only where it is the output projection, too."""
    dense_weights: int
    """Weights that each token is multiplied with."""
    head_weights: int
    """Weights of the output projection, which each wanted row of logits is multiplied with."""
    attention_flops: float
    """Operations for each pair of a query and a key, in all layers."""

    @classmethod
    def of(cls, module: PreTrainedModel) -> "Work":
        """Count what ``module`` holds, before it is fused."""
        config = module.config
        embedding, head = (layer.weight for layer in (module.get_input_embeddings(), module.get_output_embeddings()))
        parameters = {id(parameter): parameter.numel() for parameter in module.parameters()}
        read = sum(parameters.values()) - (0 if head is embedding else embedding.numel())
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            weight_bytes=read * embedding.element_size(),
            dense_weights=read - head.numel(),
            head_weights=head.numel(),
            attention_flops=4.0 * config.num_hidden_layers * config.num_attention_heads * dim,
        )

    def prefill_flops(self, length: int) -> float:
        """Return the operations of a prompt whose last row of logits is wanted."""
        return (
            2.0 * self.dense_weights * length
            + 2.0 * self.head_weights
            + self.attention_flops * length * (length + 1) / 2
        )


def build(name: str) -> PreTrainedModel:
    """Return a model with random bfloat16 weights on the GPU."""
    torch.manual_seed(0)
    with DEVICE:
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            CONFIGS[name], dtype=torch.bfloat16, attn_implementation="eager"
        )
    module.requires_grad_(False).train(False)
    return module


class ModelBench:
    """One model with a pool that fits the largest step; checked against its own plain attention."""

    def __init__(self, name: str, ceilings: Ceilings) -> None:
        module = build(name)
        self._work = Work.of(module)
        loaded = make_paged(
            module, name=name, max_model_len=MAX_MODEL_LEN, model_digest="random", tokenizer_digest="none"
        )
        self._ceilings = ceilings
        self._layout = KvLayout(loaded.spec.layers, BLOCK_SIZE, loaded.spec.dtype)
        tokens = max(*PREFILLS, *(batch * (length + BLOCK_SIZE) for batch, length in DECODES))
        storage = KvStorage(self._layout, -(-tokens // BLOCK_SIZE), loaded.spec.device)
        self._order = [BlockId(n) for n in torch.randperm(storage.num_blocks).tolist()]
        self.runner = ModelRunner(loaded, storage.layer_views(), BLOCK_SIZE)
        self.runner.warm_up()

    def decode(self, batch: int, length: int) -> StepFigure:
        """Add a token to each of ``batch`` sequences of ``length`` tokens, packing the step and reading the tokens."""
        each = -(-(length + 1) // BLOCK_SIZE)
        rows = [Row([7], length, self._order[i * each :][:each], wants_logits=True) for i in range(batch)]
        kv_bytes = batch * length * self._layout.block_bytes / BLOCK_SIZE
        return StepFigure(
            f"decode {batch} x {length}",
            wall_seconds(lambda: self.runner.forward(build_step(rows, BLOCK_SIZE)).argmax(-1).tolist()),
            self._ceilings.floor_s(self._work.weight_bytes + kv_bytes),
            batch,
        )

    def prefill(self, length: int) -> StepFigure:
        """Compute a prompt in one step."""
        tokens = torch.randint(10, 10_000, (length,)).tolist()
        step = build_step([Row(tokens, 0, self._order, wants_logits=True)], BLOCK_SIZE)
        return StepFigure(
            f"prefill {length}",
            wall_seconds(lambda: self.runner.forward(step)),
            self._ceilings.floor_s(self._work.weight_bytes, self._work.prefill_flops(length)),
            length,
        )
