"""Names of engines and of what is measured that several files speak of."""

BATON = "baton"
"""One prefill and one decode worker, with as many threads each as a peer has: only one of the two works at a time in
closed-loop workloads."""
BATON_SPLIT = "baton-1t"
"""One prefill and one decode worker with one thread each: as many threads together as a peer has."""
BATON_MODEL = "baton-model"
"""The decode and prefill steps of Baton's model runner, without scheduling, transfer and HTTP."""
HAND_OVER = "hand-over"
VLLM = "vllm"
LLAMA = "llama.cpp"
LLAMA_1T = "llama.cpp-1t"
GENERATE = "generate"
CONTINUOUS = "continuous"

TITLES = {
    BATON: "Baton 1P+1D, 2 threads a worker",
    BATON_SPLIT: "Baton 1P+1D, 1 thread a worker",
    BATON_MODEL: "Baton's model alone, 2 threads",
    HAND_OVER: "Baton's hand-over alone",
    VLLM: "vLLM CPU, 2 threads",
    LLAMA: "llama.cpp, 2 threads",
    LLAMA_1T: "llama.cpp, 1 thread",
    GENERATE: "transformers generate, 2 threads",
    CONTINUOUS: "transformers continuous batching, 2 threads",
}

START = "start"
KV_WASTE = "KV waste"
SHARED = "shared prefixes"


def prefill_name(tokens: int) -> str:
    """Return the workload's name."""
    return f"prefill {tokens}"


def decode_name(batch: int) -> str:
    """Return the workload's name."""
    return f"decode x {batch}"


def chats_name(rate: float, injected: bool) -> str:
    """Return the name of chats at a rate, with or without long prompts beside them."""
    return f"chat at {rate:g}/s" + (", long prompts" if injected else "")


def steady_name(injected: bool) -> str:
    """Return the name of a few chats that go on."""
    return "steady chats" + (", long prompts" if injected else "")
