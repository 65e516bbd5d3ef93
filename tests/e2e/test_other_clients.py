"""Clients that bring too many packages for our own environment: each runs in another, against the real processes."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import clients
from tests.support.cluster import Cluster

pytestmark = pytest.mark.clients

PYTHON = os.environ.get("BATON_CLIENTS_PYTHON", "")
"""Interpreter of the environment that ``make test-clients`` makes."""

FOLDER = Path(clients.__file__).parent
KEPT = ("PATH", "HOME", "LANG")
"""Variables that a client gets; proxies and keys of ours are none of them."""


@pytest.mark.parametrize("client", ["litellm_client", "langchain_client"])
def test_it_works_with(cluster: Cluster, client: str) -> None:
    assert PYTHON, "run `make test-clients`"
    command = (PYTHON, "-P", str(FOLDER / f"{client}.py"), cluster.url, "SmolLM2-135M-Instruct")
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
