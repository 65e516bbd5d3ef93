"""``/openapi.json`` lists every route with the types that are really used, and no input that it allows makes a 500."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from gateway.api.openapi import OPERATIONS, document
from gateway.app import ROUTES
from tests.support.gateway_bench import Bench

pytestmark = pytest.mark.anyio

FUZZ_SECONDS = int(os.environ.get("BATON_FUZZ_SECONDS", "60"))
FUZZ_SEED = os.environ.get("BATON_FUZZ_SEED", "1")
"""The suite tries the same requests every time; ``make fuzz`` asks for ten minutes of others."""

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
LEAVE_S = 120
"""What the tool may take beyond its time to report."""


def test_every_route_is_described_and_every_description_is_a_route() -> None:
    paths = {route.path.replace("{model:path}", "{model}"): route.methods or set() for route in ROUTES}
    paths = {path: methods for path, methods in paths.items() if "dashboard" not in path}  # a page and its own stream
    assert set(paths) == {operation.path for operation in OPERATIONS}
    for operation in OPERATIONS:
        assert operation.method.upper() in paths[operation.path]


def test_schemas_are_complete() -> None:
    described = document()
    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    found: set[str] = set()
    level = [described]
    while level:
        value = level.pop()
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        found.update(item for item in items if isinstance(item, str) and item.startswith("#/components"))
        level += [item for item in items if isinstance(item, dict | list)]
    assert found <= known
    chat = described["components"]["schemas"]["ChatFields"]["properties"]
    assert {"messages", "tools", "tool_choice", "temperature", "response_format", "stream"} <= set(chat)


@pytest.mark.timeout(FUZZ_SECONDS + LEAVE_S + 60)
async def test_no_input_makes_a_fault(bench: Bench, tmp_path: Path) -> None:
    await bench.decode()
    await bench.gateway(trust_request_template=True, tool_parser="hermes", keep_alive_s=1.0)
    assert bench.server is not None
    url = bench.server.url
    command = (
        *(sys.executable, "-P", "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--checks", ",".join(CHECKS), "--max-time", str(FUZZ_SECONDS), "--seed", FUZZ_SEED),
        *("--phases", "examples,coverage,fuzzing"),
        *("--workers", "1", "--request-timeout", "30", "--suppress-health-check", "all", "--warnings", "off"),
        *("--exclude-path", "/v1/cluster/drain", "--exclude-path", "/v1/cluster/ratio"),  # ask what a stub is not
        *("--continue-on-failure", "--no-color", "--max-examples", "1000000"),
    )
    done = await anyio.to_thread.run_sync(lambda: _run(command, tmp_path))
    assert done.returncode == 0, done.stdout[-8000:]
    assert await bench.metric("baton_http_requests_total", status="500") == 0
    assert (await bench.chat()).status_code == 200


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    limit_s = FUZZ_SECONDS + LEAVE_S
    return subprocess.run(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s, check=False
    )
