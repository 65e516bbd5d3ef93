"""The model's folder as a GGUF file in bfloat16, which is what llama.cpp reads.

    python -m benchmarks.peers.bf16_gguf FOLDER FILE

Llama architecture only. GGUF lays the rows of query and key heads out in pairs (x0, x1), where transformers rotates
halves; so the rows are reordered, as llama.cpp's own converter does.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """Return GGUF's name of a transformers weight: ``model.layers.3.mlp.up_proj.weight`` is ``blk.3.ffn_up.weight``."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(middle)]}.{kind}"


def in_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return rows [heads * head_size, ...] with each head's first and second half interleaved."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(folder: Path, target: Path) -> None:
    """Write ``folder``, a Llama model with a byte-level BPE tokenizer, to ``target``."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise SystemExit(f"only Llama models can be written, not {config['model_type']}")
    writer = gguf.GGUFWriter(target, "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    for name, weight in load_file(folder / "model.safetensors").items():
        _add_weight(writer, name, weight, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    ordered = sorted(vocab, key=vocab.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(ordered))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(ordered)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _add_weight(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor, config: dict[str, Any]) -> None:
    """Matrices in bfloat16, vectors in float32."""
    if ".q_proj." in name:
        weight = in_pairs(weight, config["num_attention_heads"])
    elif ".k_proj." in name:
        weight = in_pairs(weight, config["num_key_value_heads"])
    if weight.ndim == 1:
        writer.add_tensor(gguf_name(name), weight.float().numpy())
        return
    packed = weight.bfloat16().contiguous().view(torch.uint8).numpy()  # [rows, 2 * columns]
    writer.add_tensor(gguf_name(name), packed, raw_shape=packed.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
