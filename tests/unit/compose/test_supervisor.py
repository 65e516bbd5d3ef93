"""The supervisor against real, tiny processes."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.errors import Unavailable
from compose.child import ChildSpec, start_child
from compose.restart_policy import MAX_EARLY_DEATHS
from compose.supervisor import Supervisor
from tests.support.door import Door, open_door

pytestmark = pytest.mark.anyio


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async with open_door(tmp_path) as opened:
        yield opened


@asynccontextmanager
async def supervising(folder: Path) -> AsyncIterator[Supervisor]:
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(folder, group)
        try:
            yield supervisor
        finally:
            supervisor.kill()


async def test_a_killed_child_is_started_again(door: Door, tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        supervisor.mark_ready()
        keeper = supervisor.start(door.spec("worker"))
        first = await door.next()
        os.kill(first.pid, signal.SIGKILL)
        second = await door.next()
        assert second.pid != first.pid
        assert keeper.starts == 2
        await supervisor.stop([keeper])
        await second.gone.wait()


async def test_stages_end_one_after_the_other(door: Door, tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        names = ("redis", "worker-0", "worker-1", "gateway")
        keepers = {name: supervisor.start(door.spec(name)) for name in names}
        for _ in names:
            await door.next()
        await supervisor.stop([keepers["gateway"]], [keepers["worker-0"], keepers["worker-1"]], [keepers["redis"]])
    assert door.departures[0] == "gateway"
    assert set(door.departures[1:3]) == {"worker-0", "worker-1"}
    assert door.departures[3] == "redis"


async def test_a_child_that_does_not_stop_is_killed(
    door: Door, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    spec = door.spec("deaf", "while True: signal.pause()", stop_s=0.1)
    spec = ChildSpec(spec.name, (*spec.argv[:-1], "import signal\n" + deaf + spec.argv[-1]), {}, spec.stop_s)
    async with supervising(tmp_path) as supervisor:
        keeper = supervisor.start(spec)
        visitor = await door.next()
        await supervisor.stop([keeper])
        await visitor.gone.wait()
    assert "deaf did not stop" in capsys.readouterr().err


async def test_a_frozen_child_is_killed(door: Door, tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        keeper = supervisor.start(door.spec("frozen", stop_s=0.1))
        visitor = await door.next()
        os.kill(visitor.pid, signal.SIGSTOP)
        await supervisor.stop([keeper])
        await visitor.gone.wait()


async def test_what_dies_at_once_again_and_again_is_given_up_with_the_end_of_its_log(
    door: Door, tmp_path: Path
) -> None:
    async with supervising(tmp_path) as supervisor:
        keeper = supervisor.start(door.spec("broken", "sys.exit('no such file: weights')"))
        with pytest.raises(Unavailable, match=r"(?s)broken ended with status 1.*no such file: weights"):
            await supervisor.wait_given_up()
        assert keeper.starts == MAX_EARLY_DEATHS


async def test_options_that_cannot_work_are_not_tried_twice(door: Door, tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        keeper = supervisor.start(door.spec("broken", "print('error: --kv-blocks is bad'); sys.exit(2)"))
        with pytest.raises(Unavailable, match="--kv-blocks is bad"):
            await supervisor.wait_given_up()
        assert keeper.starts == 1


async def test_stop_does_not_wait_for_a_restart_that_is_due_later(door: Door, tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        supervisor.mark_ready()
        keeper = supervisor.start(door.spec("flaky", "sys.exit(1)"))
        for _ in range(2):
            visitor = await door.next()
            await visitor.gone.wait()
        await supervisor.stop([keeper])
    assert keeper.starts == 2


async def test_what_a_child_started_ends_with_it(door: Door, tmp_path: Path) -> None:
    inner = door.knock("nested") + "signal.pause()"
    nested = f"import subprocess; subprocess.Popen([sys.executable, '-c', {inner!r}])"
    async with supervising(tmp_path) as supervisor:
        keeper = supervisor.start(door.spec("outer", nested + "\nsignal.pause()"))
        visitors = [await door.next(), await door.next()]
        assert {visitor.name for visitor in visitors} == {"outer", "nested"}
        await supervisor.stop([keeper])
        for visitor in visitors:
            await visitor.gone.wait()


async def test_a_child_has_a_group_of_its_own_so_that_ctrl_c_passes_it_by(door: Door, tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        supervisor.start(door.spec("worker"))
        visitor = await door.next()
        assert visitor.group == visitor.pid


async def test_children_share_a_session_so_that_linux_compares_their_nice_values(door: Door, tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        supervisor.start(door.spec("worker"))
        assert (await door.next()).session == os.getsid(0)


async def test_a_child_can_be_killed_before_it_has_its_group(door: Door, tmp_path: Path) -> None:
    child = await start_child(door.spec("young"), tmp_path / "young.log")
    child.kill()
    async with asyncio.timeout(30):
        assert await child.wait(lambda line: None, lambda: True) == -signal.SIGKILL


async def test_output_goes_to_the_log_and_warnings_also_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], door: Door
) -> None:
    says = (
        "print('2026-01-01 00:00:00,000 I talker x: quiet'); print('2026-01-01 00:00:00,000 W talker x: loud');"
        "print(sys.stdin.read(), flush=True)"
    )
    spec = door.spec("talker", says)
    async with supervising(tmp_path) as supervisor:
        supervisor.mark_ready()
        keeper = supervisor.start(ChildSpec(spec.name, spec.argv, {}, stdin=b"from stdin"))
        visitor = await door.next()
        await visitor.gone.wait()
        await supervisor.stop([keeper])
    assert (tmp_path / "talker.log").read_text().split("\n")[:3] == [
        "2026-01-01 00:00:00,000 I talker x: quiet",
        "2026-01-01 00:00:00,000 W talker x: loud",
        "from stdin",
    ]
    said = capsys.readouterr().err
    assert "talker | W x: loud" in said
    assert "quiet" not in said


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from compose.child import ChildSpec, start_child
from compose.supervisor import Supervisor

async def main():
    async with asyncio.TaskGroup() as group:
        Supervisor(Path(sys.argv[1]), group).start(ChildSpec("orphan", tuple(sys.argv[2:]), {}))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
async def test_children_end_when_the_supervisor_is_killed(door: Door, tmp_path: Path) -> None:
    spec = door.spec("orphan")
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", SUPERVISOR, str(tmp_path), *spec.argv)
    visitor = await door.next()
    supervisor.kill()
    await visitor.gone.wait()
    await supervisor.wait()
