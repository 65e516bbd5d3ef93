"""The shared cache as a client and an operator meet it: real processes, the real small model."""

import json
import subprocess

import httpx2

from tests.e2e.test_baton import BATON, WIDE
from tests.support.cluster import Cluster

SYSTEM = "You are a careful assistant who knows the tides of the North Sea. " * 12


def ask(cluster: Cluster, question: str) -> int:
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = httpx2.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120.0, trust_env=False)
    usage = answer.raise_for_status().json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def baton_cache(cluster: Cluster, *argv: str) -> str:
    command = (str(BATON), "cache", *argv, "--url", cluster.url)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=WIDE).stdout


def test_a_shared_system_prompt_is_computed_once_and_the_operator_can_see_it(cluster: Cluster) -> None:
    assert ask(cluster, "When is high water?") < 16 * 4  # the chat template's own beginning may be known already
    cached = ask(cluster, "When is low water?")
    assert cached >= 144
    assert cached % 16 == 0
    question = ("lookup", "--prompt", "Is it safe?", "--chat", "--system", SYSTEM, "--json")

    def held() -> list[tuple[str, int]]:
        found = json.loads(baton_cache(cluster, *question))["workers"]
        return sorted((worker["role"], worker["cached_tokens"]) for worker in found)

    both = [("decode", cached), ("prefill", cached)]
    cluster.wait_until(lambda view: held() == both, "the index names both holders")
    (prefix,) = [
        one
        for one in json.loads(baton_cache(cluster, "top", "--json"))["prefixes"]
        if "tides of the North Sea" in one["first_words"]
    ]
    assert prefix["saved_tokens"] >= cached
    assert "tides" in baton_cache(cluster, "top")
    cluster.wait_until(
        lambda view: json.loads(baton_cache(cluster, "stats", "--json"))["hit_tokens"] >= cached, "hits are counted"
    )
    stats = json.loads(baton_cache(cluster, "stats", "--json"))
    assert 0 < stats["hit_rate"] < 1
    table = baton_cache(cluster, "stats")
    for name in ("all", "prefill", "decode", "prefill-0", "decode-0"):
        assert f" {name} " in table
