"""The command ``baton``, from its first moment: Ctrl-C ends it without a word, also while it loads.

Loading the commands takes most of a second, and an interrupt within an import would show a traceback of whatever
library it met. So until they are there it ends the process at once, when there is nothing yet that would have to be
ended in order; from then on it is the command's own.
"""

import os
import signal

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""What a shell says of a program that SIGINT has ended."""


def main() -> None:
    """Run ``baton``."""
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    from common.cli import execute
    from compose.commands import baton

    app = baton()
    signal.signal(signal.SIGINT, before)
    execute(app)


if __name__ == "__main__":
    main()
