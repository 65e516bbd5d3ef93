"""The small files of a model that a gateway reads: tokenizer, chat template, end-of-sequence tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from tokenizers import Tokenizer

from common.errors import ConfigError

PATTERNS = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json"]
"""Every file that is looked at."""

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Keys of tokenizer_config.json that chat templates may use."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files say."""

    tokenizer_json: str
    """The tokenizer, as the ``tokenizers`` library writes it."""
    chat_template: str | None
    """Jinja source of the chat template, if the model has one."""
    special_tokens: dict[str, str]
    """Text of the special tokens by their names in chat templates."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    vocab_size: int
    """Token ids are below it."""


def read_model_files(source: str) -> ModelFiles:
    """Read the files of the model in directory ``source``, or of that name on the model hub; raises ConfigError."""
    folder = _folder(source)
    path = folder / "tokenizer.json"
    try:
        tokenizer_json = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except OSError as error:
        raise ConfigError(f"--model {source} has no tokenizer.json that can be read") from error
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"tokenizer.json of --model {source} is not valid: {error}") from error
    tokenizer_config = _read_json(folder, "tokenizer_config.json")
    config = _read_json(folder, "config.json")
    special_tokens = _special_tokens(tokenizer_config)
    eos = _eos_token_ids(_read_json(folder, "generation_config.json"), config)
    if not eos and (token_id := tokenizer.token_to_id(special_tokens.get("eos_token", ""))) is not None:
        eos = (token_id,)
    return ModelFiles(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=special_tokens,
        eos_token_ids=eos,
        vocab_size=_text_config(config, "vocab_size") or tokenizer.get_vocab_size(),
    )


def _folder(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ConfigError(f"--model {source} is not a directory")
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=PATTERNS))
    except (OSError, ValueError) as error:  # every error of the hub's client is one of these
        raise ConfigError(f"--model {source} is neither a directory nor a model that can be fetched") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} of the model cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name} of the model is not a JSON object")
    return content


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = tokenizer_config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _text_config(config: dict[str, Any], key: str) -> Any:
    """Return a value of the language model's configuration; multimodal models nest it."""
    nested = config.get("text_config")
    return config.get(key, nested.get(key) if isinstance(nested, dict) else None)


def _eos_token_ids(generation_config: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    value = generation_config.get("eos_token_id")
    if value is None:
        value = _text_config(config, "eos_token_id")
    values = value if isinstance(value, list) else [value]
    return tuple(token_id for token_id in values if isinstance(token_id, int))
