"""Tiny random models of every family that must run, saved with a tokenizer as a directory to load.

Weights come from a fixed seed and are large enough that greedy tokens vary. Windows, chunks and scales are small, so
that prompts of a few dozen tokens reach them.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support import tiny_tokenizers

VOCAB_SIZE = 512
EOS_TOKEN_ID = 2
MAX_MODEL_LEN = 2048


def build(family: str, directory: Path) -> None:
    """Write a float32 model of ``family`` with generation settings, tokenizer and chat template to ``directory``."""
    tiny_tokenizers.write_model(directory)
    config = AutoConfig.for_model(family, **_settings(family))
    config.dtype = torch.float32
    torch.manual_seed(sum(family.encode()))
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config).float()
        _randomise(model)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(directory)


def _randomise(model: torch.nn.Module) -> None:
    """Give vectors (biases, norms, sinks) values that matter; matrices have them from the configuration."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif "experts" in name and parameter.dim() == 2:
            parameter.data += 0.02 * torch.randn_like(parameter)


def _settings(family: str) -> dict[str, Any]:
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return common | _FAMILIES[family]


_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 24},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 20,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "qwen2_moe": _MOE
    | {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3_moe": _MOE | {"moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 20},
    "deepseek_v2": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "olmo2": {},
    "olmoe": _MOE,
    "granite": {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "starcoder2": {"sliding_window": 24},
    "cohere": {"use_qk_norm": True},
    "glm4": {"head_dim": 16},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "stablelm": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"num_key_value_heads": None},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "gpt2": {"n_positions": MAX_MODEL_LEN},
    "nemotron": {"head_dim": 16},
    "llama4_text": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 20,
        "no_rope_layers": [1, 1, 1, 0],
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "exaone4": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 20,
        "sliding_window_pattern": 4,
    },
    "ernie4_5": {"head_dim": 16},
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
