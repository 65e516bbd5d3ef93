"""Fields that OpenAI, vLLM or SGLang know, that change the answer, and that Baton does not serve (yet).

Such a field is refused by name, never ignored: a client that asked for JSON must not get prose with status 200. A value
that asks for nothing (the neutral ones below, and null) is fine. Fields in no table are unknown and accepted.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from common.errors import InvalidRequest

MAX_NEUTRAL_BYTES = 64
"""A longer value is not looked into."""

_NULL = msgspec.Raw(b"null")

# Each field with the values, besides null, that ask for nothing.
_COMMON: dict[str, tuple[Any, ...]] = {
    "functions": (),
    "function_call": ("none",),
    "stop_regex": ([],),
    "no_stop_trim": (False,),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "structural_tag": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "vllm_xargs": ({},),
    "extra_key": (),
    "session_params": ({},),
    "lora_path": (),
    "kv_transfer_params": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "routed_dp_rank": (),
    "disagg_prefill_dp_rank": (),
    "data_parallel_rank": (),
}

CHAT: dict[str, tuple[Any, ...]] = _COMMON | {
    "best_of": (1,),
    "echo": (False,),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
"""Fields refused on chat completions."""

COMPLETIONS: dict[str, tuple[Any, ...]] = _COMMON | {
    "top_logprobs": (0,),
    "tools": (),
    "tool_choice": ("none",),
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}
"""Fields refused on completions."""


class RefusedFields:
    """Looks for the refused fields of one endpoint in a request's body."""

    def __init__(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        self._neutral = neutral
        fields = [(name, msgspec.Raw, _NULL) for name in neutral]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Refused", fields))

    def check(self, body: bytes) -> None:
        """Raise InvalidRequest, naming the field, when ``body`` asks for something that is not served."""
        found = self._decoder.decode(body)
        for name, neutral in self._neutral.items():
            raw = getattr(found, name)
            if raw is not _NULL and not _is_neutral(bytes(raw), neutral):
                raise InvalidRequest(f"{name} is not supported{_hint(name, neutral)}", param=name)


def _is_neutral(raw: bytes, neutral: tuple[Any, ...]) -> bool:
    if len(raw) > MAX_NEUTRAL_BYTES:
        return False
    value = msgspec.json.decode(raw)
    return value is None or any(type(value) is type(known) and value == known for known in neutral)


def _hint(name: str, neutral: tuple[Any, ...]) -> str:
    return f" beyond {msgspec.json.encode(neutral[0]).decode()}" if neutral else ""
