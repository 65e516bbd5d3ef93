"""What a step takes on a worker, and what lies between workers: the numbers that a simulation runs on.

A step that computes prompt chunks and decodes ``S`` sequences takes

    base + prompt_token_s · P + prompt_attention_s · Q + sequence_s · S + context_token_s · C        seconds

with P prompt tokens, Q the sum over chunks of tokens times the context that they attend to, and C the context of all
decoding sequences; the base is ``decode_base_s`` when something decodes, else ``prefill_base_s``. (The form of Vidur's
and SplitwiseSim's models.) Workers that share a machine slow each other down.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.errors import ConfigError
from kvstore.sequence import Chunk


class CostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured by :mod:`compose.tune.calibrate`, or written by hand."""

    prefill_base_s: float
    prompt_token_s: float
    prompt_attention_s: float
    decode_base_s: float
    sequence_s: float
    context_token_s: float
    local_overhead_s: float
    """From a request's arrival to its first step and from that step's end to the client, where it is decoded."""
    remote_overhead_s: float
    """The same for a prompt that a prefill worker reads: queue, offer and hand-over of the first token."""
    transfer_base_s: float
    """From the first token to the first step on the decode worker."""
    transfer_token_s: float
    """What each prompt token adds to that."""
    prefill_contention: float = 0.0
    """Share by which each other worker that computes meanwhile makes a prefill worker's step longer."""
    decode_contention: float = 0.0
    """The same for a decode worker's."""
    change_s: float = 0.5
    """From a drained worker to one that takes work in its new role."""
    kv_blocks: int = 4096
    """Of each worker."""
    block_size: int = 16
    token_budget: int = 512
    local_chunk_tokens: int = 64
    max_num_seqs: int = 64
    shared_cores: int = 0
    """Cores that all workers share, one thread each; 0: each worker has a device of its own."""

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Return what a step of these chunks takes on a worker that nobody slows down."""
        sizes = [chunk.num_scheduled_tokens for chunk in chunks]
        return self.pieces_s(sizes, [chunk.sequence.num_computed_tokens for chunk in chunks])

    def pieces_s(self, sizes: Sequence[int], starts: Sequence[int]) -> float:
        """Return the same for pieces of ``sizes`` tokens, each behind ``starts`` tokens of its sequence."""
        contexts = [start + 1 for size, start in zip(sizes, starts, strict=True) if size == 1]
        seconds = self.decode_base_s if contexts else self.prefill_base_s
        seconds += self.sequence_s * len(contexts) + self.context_token_s * sum(contexts)
        for size, start in zip(sizes, starts, strict=True):
            if size > 1:
                seconds += size * (self.prompt_token_s + self.prompt_attention_s * (start + size / 2))
        return seconds

    def prompt_tokens_per_s(self) -> float:
        """Return the rate at which a full step computes prompt tokens."""
        size = self.token_budget
        step_s = self.prefill_base_s + size * (self.prompt_token_s + self.prompt_attention_s * size / 2)
        return size / step_s


def read_profile(path: Path) -> CostProfile:
    """Return the profile in a JSON file; raises ConfigError when there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostProfile)
    except OSError as error:
        raise ConfigError(f"--profile {path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--profile {path} is not a profile: {error}") from error


def write_profile(profile: CostProfile, path: Path) -> None:
    """Write ``profile`` as JSON; raises ConfigError when that cannot be done."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--save-profile {path} cannot be written: {error.strerror}") from error
