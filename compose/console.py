"""What ``baton`` says to the person at the terminal: results on stdout, progress and complaints on stderr."""

import sys


def result(text: str) -> None:
    """Write what was asked for; a script may read it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line of progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
