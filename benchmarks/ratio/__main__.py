"""The ratio of prefill to decode workers: a load that turns, live, and how well `baton tune` foretells.

    python -m benchmarks.ratio shift [--seconds 60] [--only auto 3:1] [--json shift.json]
    python -m benchmarks.ratio accuracy [--paced] [--json accuracy.json]

Each says in its module what it measures. The status is 1 when what must hold does not.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.ratio.accuracy import Accuracy, accuracy
from benchmarks.ratio.shift import Run, shift

NAMES = ("1:3", "2:2", "3:1", "auto")


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shift", "accuracy"))
    parser.add_argument("--seconds", type=float, default=60.0, help="shift: length of a phase")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="shift: not all of them")
    parser.add_argument("--paced", action="store_true", help="accuracy: with paced workers")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--keep", type=Path, help="folder for the processes' logs; a temporary one otherwise")
    options = parser.parse_args()
    found: Accuracy | Sequence[Run]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if options.what == "shift":
            found, holds = shift(options.seconds, options.only, folder)
        else:
            found, holds = accuracy(paced=options.paced, folder=folder)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
