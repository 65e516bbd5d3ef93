"""Chunked prefill: which tokens of which prompts one step computes.

Prompts are cut into chunks under a token budget; what one leaves of it goes to the next, so short ones are packed into
one step (Sarathi-Serve, section 4). Half of the budget goes by age and the rest by urgency: priority, then the least
left to compute. So a short prompt does not wait for all the long ones before it, and the oldest is delayed to half its
speed at most, whatever comes. A prompt is admitted with its first chunk and gets all its blocks then, so admitted
prompts never wait for each other. One that lacks blocks may be passed by others, a bounded number of times. A prompt
whose prefix an admitted one is computing waits for it instead of computing it twice.

Pure: knows no clock, no model and no transfer. A finished sequence keeps its table; the lease's owner releases it.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.ids import BlockHash
from kvstore.block_pool import BlockPool
from kvstore.sequence import Chunk, Sequence

MAX_BYPASS = 16
"""A waiting prompt that lacks blocks is passed by this many later ones at most; then all wait for it."""

MAX_LOOKAHEAD = 8
"""So many waiting prompts that lack blocks are looked past in one step."""


@dataclass(slots=True, eq=False)
class _Prompt:
    sequence: Sequence
    computing: Seq[BlockHash] | None = None
    """Hashes of the full blocks that it was admitted to compute; None while it waits."""
    num_bypassed: int = 0

    @property
    def is_admitted(self) -> bool:
        return self.computing is not None

    @property
    def num_left(self) -> int:
        """Tokens to compute, by what is cached now."""
        sequence = self.sequence
        if self.is_admitted or sequence.wants_prompt_logprobs:
            return sequence.num_remaining_tokens
        return max(1, sequence.num_tokens - sequence.table.cached_prefix(sequence.token_ids))

    @property
    def urgency(self) -> tuple[int, int]:
        return self.sequence.sampling.priority, self.num_left


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One decision: ``chunks`` are computed together; ``admitted`` got their blocks just now and have their first."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[Sequence, ...]


class PrefillScheduler:
    """Owns the waiting and the admitted prompts.

    A step computes at most ``token_budget`` tokens; at most ``max_num_seqs`` prompts are admitted at a time.
    """

    def __init__(self, pool: BlockPool, *, token_budget: int, max_num_seqs: int) -> None:
        self._pool = pool
        self._token_budget = token_budget
        self._max_num_seqs = max_num_seqs
        self._prompts: dict[Sequence, _Prompt] = {}  # in order of arrival
        self._computing: Counter[BlockHash] = Counter()

    @property
    def num_waiting(self) -> int:
        """Prompts without blocks."""
        return len(self._prompts) - self.num_running

    @property
    def num_running(self) -> int:
        """Prompts that are being computed."""
        return sum(prompt.is_admitted for prompt in self._prompts.values())

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed, by what is cached now."""
        return sum(prompt.num_left for prompt in self._prompts.values())

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt; its table must be empty."""
        self._prompts[sequence] = _Prompt(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a prompt in whatever state; unknown is fine. Its blocks are left to the caller."""
        prompt = self._prompts.pop(sequence, None)
        if prompt is not None and prompt.computing:
            self._computing.subtract(prompt.computing)
            self._computing = +self._computing

    def schedule(self) -> PrefillStep:
        """Share the budget out, first to the oldest prompt that can be computed, then by urgency.

        So a prompt takes blocks only when its first chunk is computed.
        """
        by_age = list(self._prompts.values())
        round_ = _Round(self._token_budget, self._max_num_seqs - self.num_running)
        if len(by_age) > 1:
            for prompt in by_age:
                if self._serve(prompt, self._token_budget - self._token_budget // 2, round_):
                    break
            by_age.sort(key=lambda prompt: prompt.urgency)
        for prompt in by_age:
            self._serve(prompt, round_.budget, round_)
        return round_.step()

    def computed(self, chunk: Chunk) -> None:
        """Record that ``chunk`` was computed: publish its full blocks; a finished prompt leaves the scheduler."""
        sequence = chunk.sequence
        sequence.num_computed_tokens += chunk.num_scheduled_tokens
        sequence.table.publish(sequence.token_ids, sequence.num_computed_tokens)
        if sequence.num_remaining_tokens == 0:
            self.remove(sequence)

    def _serve(self, prompt: _Prompt, num_tokens: int, round_: "_Round") -> bool:
        """Let ``prompt`` have up to ``num_tokens`` of the round, admitting it if need be; whether it got any."""
        if round_.budget == 0 or not (prompt.is_admitted or self._admit(prompt, round_)):
            return False
        return round_.give(prompt.sequence, num_tokens)

    def _admit(self, prompt: _Prompt, round_: "_Round") -> bool:
        if not round_.admits or prompt in round_.blocked or self._prefix_is_being_computed(prompt.sequence):
            return False
        if not self._take_blocks(prompt):
            round_.block(prompt)
            return False
        round_.admit(prompt.sequence)
        return True

    def _prefix_is_being_computed(self, sequence: Sequence) -> bool:
        hashes = sequence.table.block_hashes(sequence.token_ids)
        num_cached = self._pool.match(hashes)
        return num_cached < len(hashes) and self._computing[hashes[num_cached]] > 0

    def _take_blocks(self, prompt: _Prompt) -> bool:
        """Give ``prompt`` its cached prefix and all further blocks; False, with nothing taken, if they lack."""
        sequence = prompt.sequence
        table = sequence.table
        sequence.adopt_prefix()
        if table.blocks_needed(sequence.num_tokens) > self._pool.num_available:
            table.release()
            sequence.num_computed_tokens = 0
            return False
        table.grow(sequence.num_tokens)
        num_cached_blocks = sequence.num_computed_tokens // self._pool.block_size
        prompt.computing = table.block_hashes(sequence.token_ids)[num_cached_blocks:]
        self._computing.update(prompt.computing)
        return True


class _Round:
    """One step while it is decided."""

    def __init__(self, budget: int, num_seats: int) -> None:
        self.budget = budget
        """Tokens that are left."""
        self.blocked: list[_Prompt] = []
        """Prompts that lack blocks."""
        self._num_seats = num_seats
        self._is_closed = False
        self._tokens: dict[Sequence, int] = {}
        self._admitted: list[Sequence] = []

    @property
    def admits(self) -> bool:
        """Whether a prompt may be admitted."""
        return self._num_seats > 0 and not self._is_closed

    def admit(self, sequence: Sequence) -> None:
        """``sequence`` has its blocks, and has passed those that are blocked."""
        self._num_seats -= 1
        self._admitted.append(sequence)
        for blocked in self.blocked:
            blocked.num_bypassed += 1

    def block(self, prompt: _Prompt) -> None:
        """``prompt`` lacks blocks; after so many, or when it was passed so often, nobody is admitted any more."""
        self.blocked.append(prompt)
        self._is_closed = prompt.num_bypassed >= MAX_BYPASS or len(self.blocked) == MAX_LOOKAHEAD

    def give(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let ``sequence`` have up to ``num_tokens`` more; whether it could have any."""
        before = self._tokens.get(sequence, 0)
        most = min(sequence.num_remaining_tokens, sequence.max_chunk_tokens) - before
        given = min(num_tokens, most, self.budget)
        if given > 0:
            self._tokens[sequence] = before + given
            self.budget -= given
        return given > 0

    def step(self) -> PrefillStep:
        """Return the decision."""
        chunks = tuple(Chunk(sequence, num_tokens) for sequence, num_tokens in self._tokens.items())
        return PrefillStep(chunks, tuple(self._admitted))
