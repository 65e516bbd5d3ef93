"""Runs a few prompts through a model runner, packed with each other, without a scheduler."""

import random
from dataclasses import dataclass, field

import torch

from common.model.batch import Row, build_step
from common.model.runner import ModelRunner
from common.model.sample_row import SampleRow
from common.model.sampler import sample
from common.sampling import SamplingParams

CHUNK = 19
"""Neither a multiple of the block size nor of a window or attention chunk."""


@dataclass(slots=True)
class Sequence:
    """A prompt on its way through chunks and decode steps."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    output: list[int] = field(default_factory=list)

    def next_row(self, chunk: int) -> Row:
        piece = self.token_ids[self.num_computed :][:chunk]
        row = Row(piece, self.num_computed, self.block_ids, self.num_computed + len(piece) == len(self.token_ids))
        self.num_computed += len(piece)
        return row


def run_packed(
    runner: ModelRunner, prompts: list[list[int]], num_blocks: int, block_size: int, num_tokens: int
) -> list[list[int]]:
    """Return ``num_tokens`` greedy tokens a prompt, in common steps: long ones in chunks while others decode."""
    order = random.Random(1).sample(range(num_blocks), num_blocks)
    blocks = [-(-(len(prompt) + num_tokens) // block_size) for prompt in prompts]
    waiting = [
        Sequence(list(prompt), [order.pop() for _ in range(n)]) for prompt, n in zip(prompts, blocks, strict=True)
    ]
    greedy = SamplingParams(num_tokens, temperature=0.0)
    while running := [sequence for sequence in waiting if len(sequence.output) < num_tokens]:
        rows = [sequence.next_row(CHUNK) for sequence in running]
        sampled = [sequence for sequence, row in zip(running, rows, strict=True) if row.wants_logits]
        logits = runner.forward(build_step(rows, block_size))
        assert logits.shape[0] == len(sampled)
        assert logits.dtype == torch.float32
        tokens = sample(logits, [SampleRow(greedy, 0, len(sequence.token_ids)) for sequence in sampled])
        for sequence, token in zip(sampled, tokens, strict=True):
            sequence.output.append(token)
            sequence.token_ids.append(token)
    return [sequence.output for sequence in waiting]
