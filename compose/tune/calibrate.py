"""Measures a running cluster through its own HTTP API and returns the numbers that a simulation runs on.

Cold prompts of several lengths give the time to a first token, remote where the gateway decides so and local for short
ones; prompts that queue give what a step takes beside its tokens; streams side by side give the time between tokens by
how many there are and how long their contexts are; and answers that are written while prompts are read show how far
workers slow each other down, as they do on one machine. The cluster should have nothing else to do meanwhile.
"""

import httpx2

from common.errors import Unavailable
from compose.status import fetch_cluster
from compose.tune.fit import fit
from compose.tune.probe import measure, prompt, stream
from compose.tune.profile import CostProfile


async def calibrate(url: str, api_key: str = "") -> CostProfile:
    """Return the profile of the cluster behind ``url``; raises Unavailable when it does not answer well enough."""
    cluster = await fetch_cluster(url, api_key)
    headers = {"Authorization": f"Bearer {api_key.split()[0]}"} if api_key.strip() else {}
    async with httpx2.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=300.0) as client:
        try:
            await stream(client, prompt(256), 24)  # kernels are compiled, rates measured
            probes = await measure(client, min(worker.max_model_len for worker in cluster.workers))
        except httpx2.HTTPError as error:
            raise Unavailable(f"{url} stopped answering while it was measured ({type(error).__name__})") from error
    return fit(probes, kv_blocks=min(worker.blocks.total for worker in cluster.workers))
