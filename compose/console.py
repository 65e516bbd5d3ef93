"""What ``baton`` says to the person at the terminal: results on stdout, progress and complaints on stderr."""

import contextlib
import sys


def result(text: str) -> None:
    """Write what was asked for; a script may read it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line of progress; a terminal that has gone away is no reason to end what it was told about."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
