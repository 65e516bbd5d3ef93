"""Baton and vLLM as their users start them: the commands."""

import os
import sys
from pathlib import Path

from benchmarks.peers.server import ServerCommand
from compose.ports import free_port

HOST = "127.0.0.1"


def baton(model: Path, threads: int, logs: Path) -> ServerCommand:
    """One prefill and one decode worker, each with that many threads."""
    port = free_port(HOST)
    argv = (sys.executable, "-m", "compose.cli", "up", "--model", str(model), "--port", str(port))
    options = ("--dtype", "bfloat16", "--threads", str(threads), "--prefill", "1", "--decode", "1")
    return ServerCommand((*argv, *options, "--log-dir", str(logs)), {}, port, "/ready", model.name)


def vllm(python: Path, model: Path, threads: int, cache: Path) -> ServerCommand:
    """One process with that many threads, each on a core of its own; prefix caching as by default."""
    port = free_port(HOST)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_USE_AOT_COMPILE": "0",  # its cache does not load beside this torch, so it would compile at every start
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "",
    }
    # The package's command asks for the version of a package "vllm", which is not its name; the module does not.
    # -P: our folders are no packages of its.
    argv = (str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model))
    place = ("--served-model-name", model.name, "--host", HOST, "--port", str(port))
    options = ("--dtype", "bfloat16", "--max-model-len", "8192", "--enable-prompt-tokens-details")
    return ServerCommand((*argv, *place, *options), env, port, "/health", model.name)
