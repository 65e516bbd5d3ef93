"""The command ``baton`` as a person meets it."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from common.cli import flag, variable
from compose.bench.config import BenchServeConfig
from compose.cache_view import CacheLookupConfig, CacheStatsConfig, CacheTopConfig
from compose.doctor import DoctorConfig
from compose.status import StatusConfig
from compose.top import TopConfig
from compose.up_config import UpConfig
from gateway.config import GatewayConfig
from kvstore.host.config import WorkerConfig
from tests.support.cluster import Cluster

BATON = Path(sys.executable).with_name("baton")
WIDE = os.environ | {"COLUMNS": "250"}


def baton(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((str(BATON), *argv), capture_output=True, text=True, timeout=60, check=False, env=WIDE)


def test_version() -> None:
    ended = baton("version")
    assert (ended.returncode, ended.stdout) == (0, version("baton") + "\n")


def test_help_lists_every_command() -> None:
    ended = baton("--help")
    assert ended.returncode == 0
    for name in (
        "up",
        "gateway",
        "prefill",
        "decode",
        "fetch-model",
        "status",
        "top",
        "cache",
        "bench",
        "doctor",
        "version",
    ):
        assert f" {name} " in ended.stdout


@pytest.mark.parametrize(
    ("name", "config_type"),
    [
        ("up", UpConfig),
        ("gateway", GatewayConfig),
        ("prefill", WorkerConfig),
        ("decode", WorkerConfig),
        ("status", StatusConfig),
        ("top", TopConfig),
        ("doctor", DoctorConfig),
        ("bench serve", BenchServeConfig),
        ("cache stats", CacheStatsConfig),
        ("cache top", CacheTopConfig),
        ("cache lookup", CacheLookupConfig),
    ],
)
def test_each_option_is_a_flag_and_a_variable(name: str, config_type: type[Any]) -> None:
    said = baton(*name.split(), "--help").stdout
    for field in dataclasses.fields(config_type):
        assert f"{flag(field.name)} " in said
        assert variable(field.name) in said


def test_up_lists_the_options_of_its_processes_by_process() -> None:
    said = baton("up", "--help").stdout
    parts = [said.index(f"─ {name} ─") for name in ("Workers", "Gateway", "Gateway and workers")]
    assert parts == sorted(parts)
    places = [said.index(f"{name} ") for name in ("--preemption", "--tool-parser", "--drain-seconds")]
    assert parts[0] < places[0] < parts[1] < places[1] < parts[2] < places[2]


def test_an_option_that_a_process_would_refuse_is_said_before_anything_is_started(tmp_path: Path) -> None:
    ended = baton("up", "--port", "0", "--swap-memory", "much", "--log-dir", str(tmp_path))
    assert ended.returncode == 2
    assert "--swap-memory" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_command_loads_neither_torch_nor_a_model_library() -> None:
    script = "import compose.commands, sys; print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    ended = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"


INTERRUPTED = """
import os, signal, sys
from compose.cli import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "compose.commands":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["baton", "up"]
main()
"""


def test_an_interrupt_while_the_command_loads_ends_it_without_a_word() -> None:
    ended = subprocess.run((sys.executable, "-c", INTERRUPTED), capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = baton("up", "--port", "0", "--log-dir", str(tmp_path / "file" / "logs"))
    assert ended.returncode == 2
    assert "--log-dir" in ended.stderr


def test_a_port_in_use_is_said_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = baton("up", "--port", str(port), "--log-dir", str(tmp_path))
    assert ended.returncode == 2
    assert str(port) in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_exist_ends_the_start(tmp_path: Path) -> None:
    ended = baton("up", "--port", "0", "--model", "no-such-model", "--log-dir", str(tmp_path))
    assert ended.returncode == 2
    assert "no-such-model" in ended.stderr
    assert ended.stdout == ""


def test_a_worker_that_cannot_start_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    ended = baton("up", "--port", "0", "--model", str(model), "--log-dir", str(tmp_path / "logs"))
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "ended with status" in ended.stderr


def test_fetch_model_prints_only_the_folder_on_stdout(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ended = baton("fetch-model", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (0, f"{tmp_path}\n")


def test_a_stop_while_it_starts_ends_it_with_status_0(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    command = (str(BATON), "up", "--port", "0", "--model", str(model), "--log-dir", str(tmp_path / "logs"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("starting "):
                break
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 0


def test_the_doctor_finds_a_running_cluster_well_and_moves_blocks_through_it(cluster: Cluster, model_dir: Path) -> None:
    ended = baton("doctor", "--url", cluster.url, "--model", str(model_dir))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ok    fingerprints: 2 workers can exchange blocks" in ended.stdout
    assert re.search(r"^ok    test transfer: \d+ KiB in \d+ frames, every checksum right", ended.stdout, re.MULTILINE)


def test_top_shows_one_look(cluster: Cluster) -> None:
    ended = baton("top", "--once", "--url", cluster.url)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("1 prefill, 1 decode, ")
    assert "prefill-0" in ended.stdout


def test_bench_serve_measures_a_running_cluster(cluster: Cluster) -> None:
    options = ("--num-prompts", "4", "--num-warmups", "1", "--input-len", "80", "--output-len", "6", "--json")
    ended = baton("bench", "serve", "--url", cluster.url, *options)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["completed"], found["failed"]) == (4, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (320, 24)
    assert 0 < found["p50_ttft_ms"] < found["p50_e2el_ms"]
