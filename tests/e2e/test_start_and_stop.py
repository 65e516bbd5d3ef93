"""``baton up`` from its first line to its last process."""

import re
import signal

import httpx2
import pytest

from tests.e2e.test_baton import baton
from tests.support.cluster import Cluster, wait_ended

ONE_WORKER = pytest.mark.parametrize("own_cluster", [("--prefill", "0")], indirect=True, ids=["one-worker"])
"""Starts in half the time."""


def ask(url: str) -> str:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60.0, trust_env=False).raise_for_status()
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_it_serves_the_small_model(cluster: Cluster) -> None:
    assert "Paris" in ask(cluster.url)


def test_the_answer_names_its_model_as_clients_know_it(cluster: Cluster) -> None:
    models = httpx2.get(f"{cluster.url}/v1/models", trust_env=False).json()
    assert [model["id"] for model in models["data"]] == ["SmolLM2-135M-Instruct"]


def test_status_shows_each_worker(cluster: Cluster) -> None:
    ended = baton("status", "--url", cluster.url)
    assert ended.returncode == 0
    for worker in cluster.workers():
        row = next(line for line in ended.stdout.splitlines() if worker.id in line)
        assert str(worker.pid) in row
        assert worker.role in row
        assert str(worker.blocks.total) in row


@ONE_WORKER
def test_ctrl_c_stops_everything_with_status_0(own_cluster: Cluster) -> None:
    processes = own_cluster.process_ids()
    assert len(processes) == 3  # Redis, gateway, decode worker
    own_cluster.process.send_signal(signal.SIGINT)
    assert own_cluster.process.wait(60) == 0
    wait_ended(processes)


@ONE_WORKER
def test_a_stop_lets_a_running_answer_end(own_cluster: Cluster) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
    url = f"{own_cluster.url}/v1/completions"
    with httpx2.stream("POST", url, json=body, timeout=60.0, trust_env=False) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        own_cluster.process.terminate()
        events = [line for line in (first, *lines) if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert own_cluster.process.wait(60) == 0


@ONE_WORKER
def test_nothing_is_left_when_the_supervisor_is_killed(own_cluster: Cluster) -> None:
    processes = own_cluster.process_ids()
    own_cluster.process.kill()
    own_cluster.process.wait(60)
    wait_ended(processes)


def test_a_killed_worker_comes_back_with_a_new_epoch(own_cluster: Cluster) -> None:
    assert "Paris" in ask(own_cluster.url)
    for worker_id in ("prefill-0", "decode-0"):
        worker = own_cluster.worker(worker_id)
        own_cluster.kill(worker)
        again = own_cluster.wait_restarted(worker)
        assert again.pid != worker.pid
        assert "Paris" in ask(own_cluster.url)
        assert re.search(f"{worker_id} was ended by signal 9; it is started again", own_cluster.log("up"))


@pytest.mark.parametrize("own_cluster", [("--prefill", "2")], indirect=True, ids=["two-to-one"])
def test_a_worker_that_dies_after_a_change_comes_back_in_the_role_that_it_took(own_cluster: Cluster) -> None:
    ended = baton("ratio", "set", "1:2", "--url", own_cluster.url)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"^(prefill-\d) became a decode worker in \d+\.\d\d s$", ended.stdout, re.MULTILINE)
    assert found is not None, ended.stdout
    assert "Paris" in ask(own_cluster.url)
    worker = own_cluster.worker(found[1])
    assert worker.role == "decode"
    own_cluster.kill(worker)
    assert own_cluster.wait_restarted(worker).role == "decode"
    shown = baton("ratio", "--url", own_cluster.url)
    assert "ratio 1:2" in shown.stdout
    refused = baton("ratio", "set", "0:3", "--url", own_cluster.url)
    assert (refused.returncode, "at least one worker" in refused.stderr) == (2, True)
