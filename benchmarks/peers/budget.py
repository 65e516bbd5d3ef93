"""How much is measured: the whole run of about half an hour on two cores, or a quick one to try the command."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Counts and lengths of one run. What is equal here can be compared and continued."""

    rounds: int
    open_rounds: int
    """Rounds, of the first ones, with what takes long: open-loop traffic, and continuous batching of transformers."""
    threads: int = 2
    context: int = 512
    """Prompt tokens of a sequence before it decodes."""
    batches: tuple[int, ...] = (1, 8, 32)
    decode_tokens: int = 96
    """Tokens of each answer over HTTP; libraries, which are slower, write :attr:`library_tokens`."""
    library_tokens: int = 12
    prefills: int = 3
    """Prompts of :attr:`context` tokens that are timed one at a time; half as many of :attr:`long_prompt`."""
    long_prompt: int = 2048
    rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Chats a second."""
    window_s: float = 12.0
    """How long each open-loop part sends."""
    chat_prompt: int = 128
    chat_answer: int = 48
    chat_range: float = 0.5
    """Lengths of a chat lie within this share of the mean."""
    injected_prompt: int = 2000
    injected_answer: int = 4
    num_prefixes: int = 4
    prefix: int = 512
    prefix_rate: float = 1.0
    steady_chats: int = 4
    ttft_limit_ms: float = 2000.0
    itl_limit_ms: float = 150.0
    """A request is good when its first token and its mean gap are within these; the planner's own targets."""

    @property
    def library_prefills(self) -> list[int]:
        """Lengths of the prompts that a library is timed with."""
        count = (self.prefills + 1) // 2
        return [self.context] * count + [self.long_prompt] * ((count + 1) // 2)


FULL = Budget(rounds=5, open_rounds=2)

QUICK = Budget(
    rounds=1,
    open_rounds=1,
    decode_tokens=48,
    library_tokens=4,
    prefills=2,
    batches=(1, 8),
    rates=(1.0,),
    window_s=6.0,
)
