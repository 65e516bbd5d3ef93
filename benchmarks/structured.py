"""What sampling takes of a decode step, without and with structure, and what structure itself takes.

    python -m benchmarks.structured MODEL [--batch 32] [--context 512] [--threads 1] [--runs 15] [--clock wall|cpu]

MODEL is a directory. Each row follows a schema of 20 properties and is inside a string, where most tokens are allowed.
Sampling draws by temperature 1. Figures are the best of several runs; the share is of the whole step. Compiling is what
happens once for each schema, on a thread aside. ``--clock cpu`` counts processor time, on a machine that is busy with
other things; it sees nothing of a GPU.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table

from common.constraint import Constraint
from common.grammar import Grammar, compile_grammar, model_tokenizer
from common.model.batch import Row, build_step
from common.model.grammar_state import GrammarState
from common.model.load import load_model
from common.model.loaded import LoadedModel
from common.model.runner import ModelRunner
from common.model.sampler import SampleRow, sample
from common.sampling import SamplingParams
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage

BLOCK_SIZE = 16
SCHEMA = {
    "type": "object",
    "properties": {f"property_{n}": {"type": "string"} for n in range(20)},
    "required": ["property_0"],
    "additionalProperties": False,
}
WRITTEN = '{"property_0": "The quick brown fox jumps over the lazy'

T = TypeVar("T")


def best(runs: int, work: Callable[[], T], clock: Callable[[], float]) -> tuple[float, T]:
    """Return the milliseconds of the fastest of ``runs`` runs, and what the last one returned."""
    fastest, result = float("inf"), None
    for _ in range(runs):
        began = clock()
        result = work()
        fastest = min(fastest, clock() - began)
    assert result is not None
    return 1e3 * fastest, result


def model_step(loaded: LoadedModel, batch: int, context: int) -> Callable[[], torch.Tensor]:
    """Return what adds one token to each of ``batch`` sequences and gives their logits."""
    layout = KvLayout(loaded.spec.layers, BLOCK_SIZE, loaded.spec.dtype)
    num_blocks = context // BLOCK_SIZE + 1
    storage = KvStorage(layout, batch * num_blocks, loaded.spec.device)
    runner = ModelRunner(loaded, storage.layer_views(), BLOCK_SIZE)
    tables = [range(index * num_blocks, (index + 1) * num_blocks) for index in range(batch)]
    step = build_step([Row([7], context, table, wants_logits=True) for table in tables], BLOCK_SIZE)
    return lambda: runner.forward(step)


def constrained(grammar: Grammar, rows: list[SampleRow], written: list[int], vocab_size: int) -> list[SampleRow]:
    """Return ``rows`` with what the grammar allows after ``written``; each has seen all but the last token before."""
    states = [GrammarState(grammar, ()) for _ in rows]
    for state in states:
        state.extend(written)
    return [replace(row, allowed=state.allowed(vocab_size)) for row, state in zip(rows, states, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    torch.set_num_threads(args.threads)
    loaded = load_model(str(args.model), dtype="auto", device="auto", max_model_len=None)
    vocab_size, eos = loaded.spec.vocab_size, loaded.spec.eos_token_ids
    tokenizer = model_tokenizer((args.model / "tokenizer.json").read_text(), vocab_size, eos)
    constraint = Constraint.json_schema(json.dumps(SCHEMA))
    compile_ms, grammar = best(args.runs, lambda: compile_grammar(constraint, tokenizer), clock)
    written = tokenizer.tokenize_str(WRITTEN)
    params = SamplingParams(64, temperature=1.0)
    rows = [SampleRow(params, index, args.context, len(written)) for index in range(args.batch)]
    forward_ms, logits = best(args.runs, model_step(loaded, args.batch, args.context), clock)
    plain_ms, _ = best(args.runs, lambda: sample(logits, rows), clock)
    mask_ms, masked = best(args.runs, lambda: constrained(grammar, rows, written, vocab_size), clock)
    masked_ms, _ = best(args.runs, lambda: sample(logits, masked), clock)
    table = Table(title=f"{loaded.spec.name}, {loaded.spec.dtype}, batch {args.batch}, {args.threads} thread(s)")
    for column in ("", "ms", "share of the step"):
        table.add_column(column, justify="right")
    table.add_row("model", f"{forward_ms:.1f}", "")
    for name, took in (
        ("sampling, no structure", plain_ms),
        ("sampling, structure", masked_ms),
        (f"replay of {len(written)} tokens and masks", mask_ms),
    ):
        table.add_row(name, f"{took:.2f}", f"{100 * took / (forward_ms + took):.1f} %")
    table.add_row("compiling the schema, once", f"{compile_ms:.2f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
