"""Entries of the model cache appear whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from compose.cache import cache_dir, prepared


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "weights").write_text("w")

    place = tmp_path / "models" / "small"
    assert prepared(place, make) == prepared(place, make) == place
    assert len(made) == 1
    assert (place / "weights").read_text() == "w"
    assert [path.name for path in place.parent.iterdir() if path.is_dir()] == ["small"]


def test_a_failure_leaves_no_entry_and_the_next_attempt_works(tmp_path: Path) -> None:
    place = tmp_path / "small"

    def fail(folder: Path) -> None:
        (folder / "half").write_text("h")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        prepared(place, fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    prepared(place, lambda folder: (folder / "whole").touch())
    assert [path.name for path in place.iterdir()] == ["whole"]


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    abandoned = tmp_path / ".small.partial-abc"
    abandoned.mkdir()
    (abandoned / "half").touch()
    prepared(tmp_path / "small", lambda folder: None)
    assert not abandoned.exists()


SECOND = """
import sys
from pathlib import Path
from compose.cache import prepared

def make(folder):
    raise SystemExit("it was to be made once")

print(prepared(Path(sys.argv[1]), make))
"""


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    place = tmp_path / "small"

    def make(folder: Path) -> None:
        process = subprocess.Popen(
            (sys.executable, "-c", SECOND, str(place)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        others.append(process)
        assert process.stderr is not None
        assert process.stderr.readline() == "another process is preparing small; waiting for it\n"

    others: list[subprocess.Popen[str]] = []
    prepared(place, make)
    (other,) = others
    assert other.communicate(timeout=30) == (f"{place}\n", "")
    assert other.returncode == 0


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("BATON_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/someone/.cache/baton")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/baton")
    monkeypatch.setenv("BATON_CACHE", "/models")
    assert cache_dir() == Path("/models")
