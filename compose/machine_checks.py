"""Checks of this machine: limits, and the files of a model."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError
from compose.finding import Finding, failed, ok, skipped, warning
from gateway.text.model_files import read_model_files

MIN_OPEN_FILES = 4096
"""A gateway has one for each client and two for each worker."""

_HEADER_LENGTH_BYTES = 8
_REFETCH = "fetch it again: remove the folder, then `baton fetch-model NAME`"


def check_open_files(limit: int | None = None) -> Finding:
    """Say whether a process may have enough files open; ``limit`` is this one's when not given."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES:
        return ok("open files", "no limit" if limit == resource.RLIM_INFINITY else f"up to {limit}")
    return warning("open files", f"only {limit}; {MIN_OPEN_FILES} let 1,000 clients connect", "ulimit -n 65536")


def check_model(folder: str) -> Iterator[Finding]:
    """Say whether the model in ``folder`` is whole."""
    if not folder:
        yield skipped("model files", "not looked at; name their folder with --model")
        return
    try:
        files = read_model_files(folder)
    except ConfigError as error:
        yield failed("model files", error.message, _REFETCH)
        return
    chat = "with" if files.chat_template else "without"
    yield ok("tokenizer", f"{files.vocab_size} tokens, {chat} a chat template")
    yield _check_weights(Path(folder))


def _check_weights(folder: Path) -> Finding:
    shards = sorted(folder.glob("*.safetensors"))
    missing = _shards_in_index(folder) - {shard.name for shard in shards}
    if not shards or missing:
        lacks = ", ".join(sorted(missing)) or "no .safetensors at all"
        return failed("weights", f"missing in {folder}: {lacks}", _REFETCH)
    broken = [shard.name for shard in shards if not _is_whole(shard)]
    if broken:
        return failed("weights", f"cut off or damaged: {', '.join(broken)}", _REFETCH)
    size = sum(shard.stat().st_size for shard in shards)
    return ok("weights", f"{len(shards)} files, {size / 1e9:.2f} GB")


def _shards_in_index(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return {index.name}


def _is_whole(shard: Path) -> bool:
    """Say whether a file is as long as its header says: 8 bytes of length, JSON with offsets, the tensors."""
    try:
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            if length > shard.stat().st_size:
                return False
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return bool(shard.stat().st_size == _HEADER_LENGTH_BYTES + length + max(ends, default=0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False
