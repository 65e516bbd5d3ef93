"""One GPU for each worker process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError, Unavailable
from compose.gpu_claim import claim, gpus_of

IMPORTS = "import os, sys; from pathlib import Path; from compose.gpu_claim import claim; "
HOLD = IMPORTS + "print(claim(Path(sys.argv[1]), [0, 1]), flush=True); sys.stdin.read()"
BECOME_CAT = IMPORTS + "claim(Path(sys.argv[1]), [0]); os.execvp('cat', ['cat'])"


def test_gpus_are_counted_by_their_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus_of(tmp_path) == [0, 1]


def test_each_process_gets_another_and_a_dead_ones_is_free_again(tmp_path: Path) -> None:
    holders = [_hold(tmp_path), _hold(tmp_path)]
    try:
        by_gpu = {_first_line(holder): holder for holder in holders}
        assert sorted(by_gpu) == ["0", "1"]
        with pytest.raises(Unavailable, match="all 2 GPUs"):
            claim(tmp_path, [0, 1])
        by_gpu["0"].kill()
        by_gpu["0"].wait()
        holders.append(_hold(tmp_path))
        assert _first_line(holders[-1]) == "0"
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_claim_outlives_exec(tmp_path: Path) -> None:
    with subprocess.Popen(
        (sys.executable, "-c", BECOME_CAT, str(tmp_path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"x\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"x\n"  # cat runs
        with pytest.raises(Unavailable):
            claim(tmp_path, [0])


def test_no_gpu_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="container toolkit"):
        claim(tmp_path, [])


def _hold(folder: Path) -> "subprocess.Popen[str]":
    command = (sys.executable, "-c", HOLD, str(folder))
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
    return holder


def _first_line(holder: "subprocess.Popen[str]") -> str:
    assert holder.stdout is not None
    return holder.stdout.readline().strip()
