"""Engines as processes: a library's script, a server's start and end, the client; each with a small real process."""

import sys
from pathlib import Path

import pytest

from benchmarks.peers.library import LibraryJob, measure_library
from benchmarks.peers.load import Load, Request, Stream, drive
from benchmarks.peers.measurement import Part
from benchmarks.peers.server import ServerCommand, serving
from common.errors import Unavailable
from compose.ports import free_port

JOB = LibraryJob("model", 1, [[1, 2]], [[3]], [1], 4)

ANSWERING = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in ('{"choices":[{"text":"a"}]}', '{"choices":[{"text":"b"}]}',
                     '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}', "[DONE]"):
            event = f"data: {data}\\n\\n".encode()
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(event), event))
            self.wfile.flush()
        self.wfile.write(b"0\\r\\n\\r\\n")
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def run_script(code: str, log: Path) -> list[Part]:
    return list(measure_library((sys.executable, "-c", code), {}, JOB, log))


def command(code: str) -> ServerCommand:
    port = free_port("127.0.0.1")
    return ServerCommand((sys.executable, "-c", code, str(port)), {}, port, "/health", "model")


def test_what_a_library_measured_before_it_failed_is_kept(tmp_path: Path) -> None:
    code = """
import json, sys
job = json.load(sys.stdin)
print("noise of the library")
print(json.dumps({"workload": "decode x 1", "figures": {"tokens_per_s": job["answer"]}}), flush=True)
sys.exit("the library broke")
"""
    parts = run_script(code, tmp_path / "library.log")
    assert parts[0] == Part("decode x 1", {"tokens_per_s": 4.0})
    assert parts[1:] == [Part("library", error="it ended with status 1: the library broke")]


def test_a_library_that_ends_well_has_no_error(tmp_path: Path) -> None:
    assert run_script("import sys, time; sys.stdout.close(); time.sleep(0.2)", tmp_path / "library.log") == []


def test_the_client_sees_what_a_server_sends(tmp_path: Path) -> None:
    with serving(command(ANSWERING), tmp_path / "server.log") as server:
        assert server.start_s > 0
        streams = [Stream([Request([1, 2, 3], 2), Request([4, 5, 6], 2, at_s=0.05)])]
        observed = drive(Load(server.url, server.model, streams))
    first, second = observed.streams[0]
    assert (first.prompt_len, first.answer_len, len(first.token_times_s), first.error) == (3, 2, 2, "")
    assert second.sent_s > 0.04  # timers are rounded to milliseconds
    assert min(first.ttft_s, second.ttft_s) > 0


def test_a_server_that_ends_at_its_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(Unavailable, match="ended with status 3: no such model"),
        serving(command("import sys; print('no such model'); sys.exit(3)"), tmp_path / "server.log"),
    ):
        pass
