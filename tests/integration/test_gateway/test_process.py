"""The gateway as a process: what it prints, how it ends, what it loads."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.tiny_tokenizers import write_model

WAIT_S = 60


@contextmanager
def gateway(*options: str) -> Iterator["subprocess.Popen[str]"]:
    """Run ``python -m gateway``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_it_logs_to_stderr_and_ends_with_zero_on_sigterm(tmp_path: Path, redis_url: str) -> None:
    model = write_model(tmp_path / "some-model")
    with gateway("--model", str(model), "--port", "0", "--redis", redis_url) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        serving = next(line for line in lines if "serving" in line)
        assert re.search(r"serving some-model on http://127\.0\.0\.1:\d+$", serving.rstrip())
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out) == (0, "")


def test_a_taken_port_is_one_line_and_status_two(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with gateway("--model", str(tmp_path), "--port", str(port)) as process:
            out, error = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert out == ""
    assert error.splitlines()[-1].startswith(f"error: cannot listen on --host 127.0.0.1 --port {port}")
    assert "Traceback" not in error


def test_it_never_loads_torch() -> None:
    code = (
        "import gateway.main, sys; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=WAIT_S, cwd=os.getcwd()).returncode == 0
