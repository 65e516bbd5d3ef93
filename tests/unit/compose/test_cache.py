"""Entries of the model cache appear whole or not at all."""

import threading
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


def test_two_at_once_make_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "small"
    begun, go_on = threading.Event(), threading.Event()
    made: list[int] = []

    def make(folder: Path) -> None:
        made.append(1)
        begun.set()
        assert go_on.wait(30)

    first = threading.Thread(target=prepared, args=(place, make))
    first.start()
    assert begun.wait(30)
    second = threading.Thread(target=prepared, args=(place, make))
    second.start()
    said = ""
    while "another process is preparing small" not in said:
        said += capsys.readouterr().err
    go_on.set()
    first.join(30)
    second.join(30)
    assert made == [1]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("BATON_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/someone/.cache/baton")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/baton")
    monkeypatch.setenv("BATON_CACHE", "/models")
    assert cache_dir() == Path("/models")
