"""The compute thread's nice value: of its own, and inherited by what it starts."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common.messages import Role
from kvstore.host.compute_thread import ComputeThread
from kvstore.host.config import WorkerConfig

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the nice values of threads apart"),
]


def nice() -> int:
    """Return the nice value of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def nice_of_a_helper() -> int:
    with ThreadPoolExecutor(1) as helpers:
        return helpers.submit(nice).result()


async def test_only_the_compute_thread_and_what_it_starts_step_back() -> None:
    before = nice()
    thread = ComputeThread()
    thread.set_nice(3)
    assert await thread.call(nice) == min(before + 3, 19)
    assert await thread.call(nice_of_a_helper) == min(before + 3, 19)
    assert nice() == before
    thread.close()


async def test_a_thread_that_stepped_back_is_followed_by_one_that_does_not() -> None:
    before, thread = nice(), ComputeThread()
    thread.set_nice(5)
    first = await thread.call(threading.get_ident)
    thread.set_nice(5)
    assert await thread.call(threading.get_ident) == first
    thread.set_nice(0)
    assert await thread.call(nice) == before
    thread.close()


async def test_a_new_thread_computes_with_as_many_threads_as_the_one_before() -> None:
    x, weight = torch.ones(600, 512, dtype=torch.bfloat16), torch.ones(512, 512, dtype=torch.bfloat16)

    def num_started() -> int:
        before = set(os.listdir("/proc/self/task"))
        torch.nn.functional.linear(x, weight)
        return len(set(os.listdir("/proc/self/task")) - before)

    thread, num_threads = ComputeThread(), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        thread.set_nice(1)
        assert await thread.call(num_started) == 2
    finally:
        torch.set_num_threads(num_threads)
        thread.close()


def test_only_prefill_on_a_cpu_steps_back() -> None:
    config = WorkerConfig(model="-", prefill_nice=7)
    assert config.compute_nice(Role.PREFILL, "cpu") == 7
    assert config.compute_nice(Role.DECODE, "cpu") == config.compute_nice(Role.PREFILL, "cuda") == 0
