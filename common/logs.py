"""One line a log record: time, level, process, message."""

import logging
import sys


def configure(process: str, level: str = "INFO") -> None:
    """Send the logs of this process to stderr, one line a record; ``process`` names it in each line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
