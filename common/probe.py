"""``python -m common.probe URL``: exit with 0 when the URL answers 200, for health checks in images without curl."""

import sys
import urllib.request

TIMEOUT_S = 3.0


def is_fine(url: str) -> bool:
    """Say whether ``url`` answers 200 in time; asks no proxy."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):  # URLError and HTTPError are OSErrors
        return False


if __name__ == "__main__":
    sys.exit(not is_fine(sys.argv[1]))
