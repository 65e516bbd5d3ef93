"""Measures transformers, as a library: ``generate``, or its continuous batching. See library.py.

    python -m benchmarks.peers.libraries.transformers_run generate|continuous

Both are told to write a number of tokens and note when each was there: ``generate`` by a stopping criterion, which is
asked after each step, continuous batching by its own timestamps. Decoding counts from the moment when all sequences
have their first token to the one when the first is done.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
)

Measure = Callable[[PreTrainedModel, Sequence[Sequence[int]], int], list[list[float]]]
"""Of a model, prompts and a count: for each sequence when it began and when each token was there."""


STEP_TOKENS = 2048
CACHE = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=STEP_TOKENS, max_requests_per_batch=32)
"""Blocks of 256 tokens, enough for 32 sequences; left to itself it takes most of the memory, and a minute to do so, and
as many requests as the first call has."""


class Clock(StoppingCriteria):
    """Stops nothing; notes the time after each step."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Note the time."""
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def settings(count: int) -> GenerationConfig:
    """Return greedy decoding of ``count`` tokens, whatever they are."""
    return GenerationConfig(
        max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=2
    )


def generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int) -> list[list[float]]:
    """Write with ``generate``; all sequences take their steps together."""
    inputs = torch.tensor(prompts)  # [sequences, tokens]
    clock = Clock()
    with torch.inference_mode():
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=settings(count),
            stopping_criteria=[clock],
        )
    return [clock.times] * len(prompts)


def continuous(model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int) -> list[list[float]]:
    """Write with ``generate_batch``; the first call makes its cache, which the next ones use."""
    began = time.perf_counter()
    done = model.generate_batch(
        [list(prompt) for prompt in prompts],
        generation_config=settings(count),
        continuous_batching_config=CACHE,
        record_timestamps=True,
        persistent_manager=True,
        warmup=False,
        max_new_tokens=count,
    )
    if len(done) != len(prompts) or any(one.error for one in done.values()):
        raise RuntimeError(f"continuous batching failed: {[one.error for one in done.values()]}")
    return [[began, *(one.timestamps or [])] for one in done.values()]


def decode_rate(sequences: Sequence[Sequence[float]]) -> float:
    """Return tokens a second while all sequences decode; 0 when they never do."""
    begin = max(times[1] for times in sequences)
    end = min(times[-1] for times in sequences)
    tokens = sum(sum(begin < at <= end for at in times[1:]) for times in sequences)
    return tokens / (end - begin) if end > begin else 0.0


def say(workload: str, **figures: float) -> None:
    """Write one part."""
    sys.stdout.write(json.dumps({"workload": workload, "figures": figures}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure what the job says."""
    measure: Measure = {"generate": generate, "continuous": continuous}[sys.argv[1]]
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    measure(model, [job["contexts"][0][:64]], 4)  # warm up
    rates: dict[int, list[float]] = {}
    for prompt in job["prefills"]:
        times = measure(model, [prompt], 2)[0]
        rates.setdefault(len(prompt), []).append(len(prompt) / (times[1] - times[0]))
    for length, found in rates.items():
        say(f"prefill {length}", tokens_per_s=statistics.median(found))
    for batch in job["batches"]:
        contexts = job["contexts"][:batch]
        num_steps = sum(map(len, contexts)) // STEP_TOKENS  # until the last of them has begun
        sequences = measure(model, contexts, job["answer"] + (num_steps if measure is continuous else 0))
        say(f"decode x {batch}", tokens_per_s=decode_rate(sequences))


if __name__ == "__main__":
    main()
