"""A running ``baton up`` for tests: real processes, and a hand on each of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import msgspec

from compose.status import ClusterView, WorkerView

BATON = Path(sys.executable).with_name("baton")

_WAIT_S = 90.0
_END_WAIT_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Cluster:
    """One ``baton up``. Lives in the ``with`` block of :func:`running_cluster`."""

    process: subprocess.Popen[str]
    url: str
    log_dir: Path

    def view(self) -> ClusterView:
        """Return what ``GET /v1/cluster`` says."""
        answer = httpx2.get(f"{self.url}/v1/cluster", timeout=10.0, trust_env=False).raise_for_status()
        return msgspec.json.decode(answer.content, type=ClusterView)

    def workers(self) -> tuple[WorkerView, ...]:
        """Return all workers."""
        return self.view().workers

    def worker(self, worker_id: str) -> WorkerView:
        """Return the worker of that id, such as ``decode-0``."""
        return next(worker for worker in self.workers() if worker.id == worker_id)

    def kill(self, worker: WorkerView, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a worker's process."""
        os.kill(worker.pid, number)

    def wait_until(self, holds: Callable[[ClusterView], bool], what: str) -> ClusterView:
        """Return the first view of the cluster for which ``holds`` is true; fails after a minute and a half."""
        give_up_at = time.monotonic() + _WAIT_S
        while not holds(view := self.view()):
            assert time.monotonic() < give_up_at, f"still not so that {what}: {view}"
            time.sleep(_POLL_S)
        return view

    def wait_restarted(self, worker: WorkerView) -> WorkerView:
        """Return the next life of ``worker`` once it is ready."""

        def lives(view: ClusterView) -> list[WorkerView]:
            return [
                one
                for one in view.workers
                if one.id == worker.id and one.epoch != worker.epoch and one.state == "ready"
            ]

        return lives(self.wait_until(lambda view: bool(lives(view)), f"{worker.id} is ready again"))[0]

    def wait_idle(self) -> ClusterView:
        """Wait until no worker holds a block or has a sequence; the view then."""
        return self.wait_until(
            lambda view: all(
                worker.blocks.held == worker.blocks.quarantined == worker.running == worker.waiting == 0
                for worker in view.workers
            ),
            "no worker holds anything",
        )

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.terminate()
        return self.process.wait(_WAIT_S)

    def process_ids(self) -> frozenset[int]:
        """Return the ids of all processes of the cluster but ``baton up`` itself."""
        return frozenset(_descendants(self.process.pid))

    def log(self, name: str) -> str:
        """Return the log of one process, such as ``gateway``; ``up`` is the terminal's."""
        return (self.log_dir / f"{name}.log").read_text()


@contextmanager
def running_cluster(log_dir: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Start ``baton up`` on free ports, wait until it is ready, and stop it at the end, with status 0."""
    log_dir.mkdir(parents=True, exist_ok=True)
    command = (str(BATON), "up", "--port", "0", "--log-dir", str(log_dir), *options)
    with (
        (log_dir / "up.log").open("wb") as said,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=os.environ | (env or {})
        ) as process,
    ):
        try:
            cluster = Cluster(process, _wait_ready(process, log_dir), log_dir)
            yield cluster
            if process.poll() is None:
                processes = cluster.process_ids()
                assert cluster.stop() == 0, cluster.log("up")
                wait_ended(processes)
        finally:
            if process.poll() is None:
                process.kill()


def wait_ended(process_ids: Iterable[int]) -> None:
    """Wait until none of these processes runs; fails after a while, naming those that do."""
    give_up_at = time.monotonic() + _END_WAIT_S
    while left := [pid for pid in process_ids if _is_running(pid)]:
        assert time.monotonic() < give_up_at, f"still running: {left}"
        time.sleep(_POLL_S)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_ready(process: subprocess.Popen[str], log_dir: Path) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready http://"), f"{line!r} instead of ready: {(log_dir / 'up.log').read_text()}"
    return line.removeprefix("ready ").strip()


def _descendants(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))
