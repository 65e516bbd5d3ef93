"""The dashboard's files, read once from the package: what is served, with which type, and under which ETag."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

PAGE = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Files of other types, such as licences, are not served."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    content: bytes
    media_type: str
    etag: str


def load_assets() -> dict[str, Asset]:
    """Return all files by their path below the folder, with ``/`` in it."""
    return dict(_walk(files("gateway.dashboard") / "static", ""))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Asset]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
            continue
        media_type = _TYPES.get("." + entry.name.rpartition(".")[2])
        if media_type is not None:
            content = entry.read_bytes()
            yield prefix + entry.name, Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
