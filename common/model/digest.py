"""Short digests of a model directory, so that two workers can tell whether they hold the same model.

The model digest covers the configuration without the fields that say where it came from, and of every weight file
the name, the size, its first MiB (for safetensors: the header with all names, shapes and offsets) and 64 samples
of 4 KiB spread evenly. So it takes milliseconds whatever the size; it tells models and fine-tunes apart, and is no
proof against someone who edits weights between the samples.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

_HEAD_BYTES = 1 << 20
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
_PROVENANCE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def model_digest(directory: Path) -> str:
    """Return 32 hexadecimal digits that stand for the configuration and the weights in ``directory``."""
    digest = _new()
    _add(digest, "config", _canonical(json.loads((directory / "config.json").read_text())))
    for pattern in _WEIGHT_PATTERNS:
        for path in sorted(directory.glob(pattern)):
            _add_sample(digest, path)
    return digest.hexdigest()


def tokenizer_digest(directory: Path) -> str:
    """Return 32 hexadecimal digits that stand for the tokenizer's files in ``directory``; ``none`` without any."""
    paths = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not paths:
        return "none"
    digest = _new()
    for path in paths:
        _add(digest, path.name, path.read_bytes())
    return digest.hexdigest()


def _new() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16, person=b"baton-model")


def _add(digest: "hashlib.blake2b", name: str, content: bytes) -> None:
    """Add one named part; lengths keep parts apart."""
    digest.update(f"{name}:{len(content)}:".encode())
    digest.update(content)


def _canonical(config: dict[str, Any]) -> bytes:
    kept = {key: value for key, value in config.items() if key not in _PROVENANCE}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _add_sample(digest: "hashlib.blake2b", path: Path) -> None:
    size = path.stat().st_size
    _add(digest, path.name, str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        if size <= _HEAD_BYTES:
            return
        for index in range(_NUM_SAMPLES):
            file.seek(_HEAD_BYTES + (size - _HEAD_BYTES) * index // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(_HEAD_BYTES, size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
