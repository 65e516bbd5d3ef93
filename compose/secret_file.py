"""``python -m compose.secret_file FILE``: make a file with a random secret, unless it is there."""

import contextlib
import os
import secrets
import sys
import tempfile
from pathlib import Path


def make_secret(path: Path) -> None:
    """Write a new secret to ``path``, readable by its owner only; a file that is there stays as it is.

    It appears whole or not at all, and of several writers at a time one wins.
    """
    descriptor, part = tempfile.mkstemp(dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        os.unlink(part)


if __name__ == "__main__":
    make_secret(Path(sys.argv[1]))
