"""Measures Baton's model runner as a library: no scheduling, transfer or HTTP. See library.py."""

import json
import sys

import torch

from benchmarks.model import Bench
from benchmarks.peers.names import decode_name, prefill_name
from common.model.load import load_model

RUNS = 5


def main() -> None:
    """Measure what the job says; its prompts count by their lengths."""
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    loaded = load_model(job["model"], dtype="bfloat16", device="cpu", max_model_len=None)
    bench = Bench(loaded, ["auto"], context=len(job["contexts"][0]), runs=RUNS)
    for length in sorted({len(prompt) for prompt in job["prefills"]}):
        _say(prefill_name(length), length / bench.prefill(length)["auto"].wall_s)
    for batch in job["batches"]:
        _say(decode_name(batch), batch / bench.decode(batch)["auto"].wall_s)


def _say(workload: str, rate: float) -> None:
    sys.stdout.write(json.dumps({"workload": workload, "figures": {"tokens_per_s": rate}}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
