"""The GGUF file that llama.cpp is measured with: names, the order of rows, and the very weights."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.peers.bf16_gguf import gguf_name, in_pairs, write

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
    "vocab_size": 3,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
TOKENIZER = {
    "model": {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]},
    "added_tokens": [{"content": "<end>", "id": 2}],
}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.3.mlp.up_proj.weight", "blk.3.ffn_up.weight"),
        ("model.layers.29.post_attention_layernorm.weight", "blk.29.ffn_norm.weight"),
        ("model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight"),
    ],
)
def test_weights_get_the_names_that_llama_cpp_knows(ours: str, theirs: str) -> None:
    assert gguf_name(ours) == theirs


def test_rows_of_each_head_alternate_between_its_halves() -> None:
    rows = torch.arange(8.0).reshape(8, 1)  # two heads of 4 rows
    assert in_pairs(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_file_holds_the_weights_in_bfloat16(tmp_path: Path) -> None:
    matrix, norm = torch.randn(3, 8), torch.randn(8)
    save_file({"model.embed_tokens.weight": matrix, "model.norm.weight": norm}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    write(tmp_path, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    embedding = tensors["token_embd.weight"]
    assert embedding.tensor_type == gguf.GGMLQuantizationType.BF16
    assert embedding.shape.tolist() == [8, 3]  # GGUF names the innermost dimension first
    read = torch.from_numpy(embedding.data.copy()).view(torch.bfloat16).reshape(3, 8)
    assert torch.equal(read, matrix.bfloat16())
    assert torch.equal(torch.from_numpy(tensors["output_norm.weight"].data.copy()), norm)
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b", "<end>"]


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "mamba"}))
    with pytest.raises(SystemExit, match="only Llama models"):
        write(tmp_path, tmp_path / "model.gguf")
