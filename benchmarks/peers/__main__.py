"""Baton beside its peers on this machine: the same model, prompts and threads, engines in turn, several rounds.

    python -m benchmarks.peers [--quick] [--engines baton vllm ...] [--results FILE] [--page FILE]

SmolLM2-135M in bfloat16. Peers are vLLM's CPU build, llama.cpp's Python build and transformers (``generate`` and
continuous batching); their environments are made in ``--home`` on first use. Figures go to ``--results`` as they come,
and a run that was broken off is continued from there; when all is there, only the table and the page are made anew.
``--quick`` tries everything in a few minutes; its figures are worth nothing.
"""

import argparse
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks.peers.budget import FULL, QUICK, Budget
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.goals import verdicts
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.measurement import ResultFile, Settings
from benchmarks.peers.page import write_page
from benchmarks.peers.report import goals_table
from benchmarks.peers.results import Results
from benchmarks.peers.rounds import measure_rounds
from common.errors import BatonError
from compose import smollm2

HOME = Path(".venv-peers")
PAGE = Path(__file__).parents[2] / "docs" / "peers.md"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few minutes, to try it")
    parser.add_argument("--rounds", type=int, help="default 5, or 1 with --quick")
    parser.add_argument("--open-rounds", type=int, help="rounds with open-loop traffic; default 2, or 1")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=tuple(ENGINES))
    parser.add_argument("--home", type=Path, default=HOME, help="folder for environments, logs and results")
    parser.add_argument("--results", type=Path, help="default: full.jsonl or quick.jsonl in --home")
    parser.add_argument(
        "--page", type=Path, help="page to write, with plots beside it; default: docs/peers.md of a whole run"
    )
    return parser.parse_args()


def _budget(options: argparse.Namespace) -> Budget:
    budget = QUICK if options.quick else FULL
    changes = {name: getattr(options, name) for name in ("rounds", "open_rounds") if getattr(options, name) is not None}
    return replace(budget, **changes)


def main() -> None:
    """Measure, print the goals and write the page."""
    options = _options()
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    command = f"python -m benchmarks.peers {' '.join(sys.argv[1:])}".strip()
    settings = Settings(datetime.now(UTC).date().isoformat(), describe_machine(), command, _budget(options))
    path = options.results or options.home / ("quick.jsonl" if options.quick else "full.jsonl")
    try:
        file = ResultFile.open(path, settings)
        measure_rounds(file, options.engines, smollm2.prepare(), options.home, console.print)
    except BatonError as error:
        raise SystemExit(f"error: {error.message}") from error
    results, budget = Results(file.measurements), file.settings.budget
    Console(width=180).print(goals_table(verdicts(results, budget)))
    write_page(options.page or _page(options), file.settings, results, options.home)


def _page(options: argparse.Namespace) -> Path:
    """Only a whole run is for the documentation."""
    is_whole = not options.quick and tuple(options.engines) == tuple(ENGINES)
    return PAGE if is_whole else options.home / "peers.md"


if __name__ == "__main__":
    main()
