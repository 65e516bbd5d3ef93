"""Loads a transformers model and switches its attention to paged KV, or says why it cannot."""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from common.errors import ConfigError, UnsupportedModel
from common.model import attention
from common.model.context_limit import context_limit
from common.model.cpu_fuse import fuse_for_cpu
from common.model.digest import model_digest, tokenizer_digest
from common.model.fuse import fuse
from common.model.loaded import LoadedModel
from common.model.probe import ProbedLayer, probe
from common.model.self_check import check_paged, reference_logits
from common.model.spec import ModelSpec
from common.model.straight import straight_model
from kernels.select import choose_elementwise

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(source: str, *, dtype: str, device: str, max_model_len: int | None) -> LoadedModel:
    """Load the causal language model at ``source``, a local directory or a hub name.

    ``dtype`` is ``auto`` (float32 on a CPU, the checkpoint's own on CUDA), ``float32``, ``bfloat16`` or ``float16``;
    ``device`` is ``auto``, ``cpu`` or ``cuda``. Raises ConfigError for a source, dtype, device or ``max_model_len``
    that does not exist or fit, UnsupportedModel for a model that cannot run on the paged path.
    """
    began = time.monotonic()
    where = _device(device)
    config = _config(source)
    _refuse(config)
    limit = context_limit(config.get_text_config(), max_model_len)
    module = _weights(source, config, _dtype(dtype, where), where)
    directory = model_directory(source)
    loaded = make_paged(
        module,
        name=directory.name if Path(source).is_dir() else source,
        max_model_len=limit,
        model_digest=model_digest(directory),
        tokenizer_digest=tokenizer_digest(directory),
    )
    log.info("loaded %s in %.1f s: %s on %s", loaded.spec.name, time.monotonic() - began, module.dtype, where)
    return loaded


def make_paged(
    module: PreTrainedModel, *, name: str, max_model_len: int, model_digest: str, tokenizer_digest: str
) -> LoadedModel:
    """Switch a model in memory, with transformers' eager attention, to paged KV, fused where its device gains by it.

    Raises UnsupportedModel when it cannot run so.
    """
    expected = reference_logits(module)
    layers = probe(module)
    spec = ModelSpec(
        name=name,
        layers=tuple(layer.spec for layer in layers),
        vocab_size=module.config.get_text_config().vocab_size,
        max_model_len=max_model_len,
        dtype=module.dtype,
        device=module.device,
        eos_token_ids=_eos_token_ids(module),
        model_digest=model_digest,
        tokenizer_digest=tokenizer_digest,
    )
    _switch_attention(module, layers)
    attentions = tuple(layer.attention for layer in layers)
    narrows = fuse_for_cpu(module, attentions)
    elementwise = choose_elementwise(module.device)
    if elementwise is not None:
        narrows = fuse(module, [layer.module for layer in layers], elementwise).residuals > 0
    straight = straight_model(module, max_model_len)
    loaded = LoadedModel(module, spec, attentions, narrows, straight)
    check_paged(loaded, expected)
    return loaded


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {name!r}; it must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but no CUDA device can be used here")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    """Return what transformers takes as ``dtype``; its own ``auto`` means the checkpoint's."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in _DTYPES:
        raise ConfigError(f"--dtype is {name!r}; it must be auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _config(source: str) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source)
    except OSError as error:
        raise ConfigError(f"--model {source!r} is neither a model directory nor a model that can be fetched") from error
    except (KeyError, ValueError) as error:
        raise UnsupportedModel(f"{source!r} is not a model that transformers knows: {error}") from error
    return config


def _refuse(config: PretrainedConfig) -> None:
    """Raise UnsupportedModel for what is known from the configuration not to fit, before any weight is read."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} is an encoder-decoder model; only decoder-only models are served")
    attn_config = getattr(config, "attn_config", None)
    if kind == "bloom" or getattr(config, "alibi", False) or getattr(attn_config, "alibi", False):
        raise UnsupportedModel(f"{kind} uses ALiBi position biases, which the paged attention does not compute")


def _weights(source: str, config: PretrainedConfig, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    placement: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        module = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, attn_implementation="eager", **placement
        )
    except OSError as error:
        raise ConfigError(f"the weights of --model {source!r} cannot be read: {error}") from error
    except ValueError as error:
        raise UnsupportedModel(f"{config.model_type} is not a causal language model: {error}") from error
    model: PreTrainedModel = module.requires_grad_(False)
    model.train(False)
    return model


def _switch_attention(module: PreTrainedModel, layers: list[ProbedLayer]) -> None:
    module.set_attn_implementation(attention.NAME)
    for layer in layers:
        if layer.attention.temperature is not None:
            layer.module.attn_temperature_tuning = False  # type: ignore[assignment]  # done by our attention


def model_directory(source: str) -> Path:
    """Return the local directory that holds the files of ``source``."""
    if Path(source).is_dir():
        return Path(source).resolve()
    found = cached_file(source, "config.json")
    if found is None:
        raise ConfigError(f"--model {source!r} has no config.json")
    return Path(found).parent


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the generation settings, else of the configuration."""
    for settings in (module.generation_config, module.config, module.config.get_text_config()):
        found: int | list[int] | None = getattr(settings, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()
