"""Which lines of a child's log reach the terminal."""

import json
import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.logs import LogFormat, client_request, configure
from compose.log_lines import LogLines


def line(level: str, text: str) -> bytes:
    return f"2026-01-02 03:04:05,678 {level} decode-0 kvstore.host: {text}\n".encode()


def test_information_is_shown_only_while_starting() -> None:
    lines = LogLines()
    assert lines.feed(line("I", "loading"), quiet=False) == ["I kvstore.host: loading"]
    assert lines.feed(line("I", "busy"), quiet=True) == []
    assert len(lines.feed(line("W", "slow") + line("E", "broken"), quiet=True)) == 2


def test_debug_is_never_shown() -> None:
    assert LogLines().feed(line("D", "detail"), quiet=False) == []


def test_a_traceback_follows_its_error() -> None:
    shown = LogLines().feed(line("E", "fault") + b"Traceback\n  File x\n" + line("I", "on") + b"more\n", quiet=True)
    assert [text.split(" ")[-1] for text in shown] == ["fault", "Traceback", "x"]


def test_what_comes_before_the_first_record_is_left_to_the_log_file() -> None:
    assert LogLines().feed(b"a library says hello\n", quiet=False) == []


@given(st.lists(st.integers(min_value=0, max_value=200)))
def test_lines_cut_anywhere_are_joined(cuts: list[int]) -> None:
    data = line("W", "zwölf Boxkämpfer") + line("I", "hidden") + line("E", "übel")
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    lines = LogLines()
    shown = [text for a, b in pairwise(edges) for text in lines.feed(data[a:b], quiet=True)]
    assert [text.rsplit(": ", 1)[1] for text in shown] == ["zwölf Boxkämpfer", "übel"]


def test_the_formats_are_those_our_processes_write() -> None:
    assert LogLines().feed(written("text", "look"), quiet=True) == ["W k: look"]
    [line] = LogLines().feed(written("json", "req-1f: look"), quiet=True)
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "level": "warning",
        "process": "decode-0",
        "logger": "k",
        "request": "req-1f",
        "message": "req-1f: look",
    }


def test_quiet_json_lines_are_not_shown() -> None:
    assert LogLines().feed(written("json", "hum", logging.INFO), quiet=True) == []
    assert len(LogLines().feed(written("json", "hum", logging.INFO), quiet=False)) == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_gateways_lines_carry_the_clients_request_id(log_format: LogFormat) -> None:
    token = client_request.set("my-id-7")
    try:
        assert b"my-id-7" in written(log_format, "look")
    finally:
        client_request.reset(token)
    assert b"my-id-7" not in written(log_format, "look")


def written(log_format: LogFormat, message: str, level: int = logging.WARNING) -> bytes:
    """Return the line that a process called decode-0 writes."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure("decode-0", log_format=log_format)
        return root.handlers[0].format(logging.LogRecord("k", level, "f", 1, message, None, None)).encode() + b"\n"
    finally:
        root.handlers[:], root.level = before
