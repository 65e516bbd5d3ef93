"""Decoder layers that are known by class, because a class is its formula.

middle = x + attention(norm(x))
out = middle + mlp(norm(middle))
"""

LLAMA_PATTERN = frozenset(
    {
        "LlamaDecoderLayer",
        "MistralDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "SmolLM3DecoderLayer",
    }
)
"""Classes of transformers; their attention is ``self_attn``, their norms RMS norms."""
