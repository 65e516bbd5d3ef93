"""A peer that is a library, not a server: a script of its own in the peer's environment measures it.

The script (:mod:`benchmarks.peers.libraries`) gets a job as JSON on stdin and writes a line of JSON for each part, so
what was measured before a crash is kept. Times are taken beside the library, so no client can be in the way.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from benchmarks.peers.measurement import Part
from benchmarks.peers.server import last_line

SCRIPTS = Path(__file__).parent / "libraries"


@dataclass(frozen=True, slots=True)
class LibraryJob:
    """What a script is asked to measure; it reads this as JSON, without knowing this class."""

    model: str
    threads: int
    prefills: Sequence[Sequence[int]]
    """Prompts to time one after the other."""
    contexts: Sequence[Sequence[int]]
    """Prompts of the largest batch; smaller batches take the first of them."""
    batches: Sequence[int]
    answer: int
    """Tokens to write for each."""


def measure_library(argv: Sequence[str], env: Mapping[str, str], job: LibraryJob, log: Path) -> Iterator[Part]:
    """Run a script and yield what it measures; a script that fails yields why."""
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job.threads))
    with (
        log.open("wb") as said,
        subprocess.Popen(
            argv, env=os.environ | threads | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
        ) as process,
    ):
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(asdict(job)).encode())
            process.stdin.close()
            for line in process.stdout:
                if line.startswith(b'{"workload"'):
                    yield msgspec.json.decode(line, type=Part)
            process.wait()
        finally:
            process.kill()
    if process.returncode != 0:
        yield Part("library", error=f"it ended with status {process.returncode}: {last_line(log)}")
