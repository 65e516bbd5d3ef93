"""The folder where prepared models are kept, and how several processes share it.

An entry appears whole or not at all: it is made under a temporary name beside its place and renamed. One lock file an
entry lets one process make it while the others wait.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from compose.console import note


def cache_dir() -> Path:
    """Return ``$BATON_CACHE``, or ``baton`` in the user's cache folder."""
    if chosen := os.environ.get("BATON_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton"


def prepared(place: Path, make: Callable[[Path], None]) -> Path:
    """Return ``place``, a folder; when it is not there yet, ``make`` fills it, in one process at a time.

    ``make`` gets an empty folder; what it raises leaves no entry behind.
    """
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f".{place.name}.lock").open("w") as lock_file:
        _lock(lock_file.fileno(), place)
        if not place.is_dir():
            _make(place, make)
    return place


def _lock(descriptor: int, place: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(f"another process is preparing {place.name}; waiting for it")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _make(place: Path, make: Callable[[Path], None]) -> None:
    for abandoned in place.parent.glob(f".{place.name}.partial-*"):  # by a process that was killed: we hold the lock
        shutil.rmtree(abandoned)
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=place.parent))
    try:
        make(partial)
        partial.chmod(0o755)
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
