"""The fault proxy itself: stopped at any moment, it leaves nothing on the loop."""

import asyncio
from typing import Any

import pytest
import uvloop

from tests.chaos.proxy import FaultProxy


@pytest.mark.parametrize("turns", range(8))
def test_a_proxy_stopped_while_clients_dial_leaves_nothing_behind(turns: int) -> None:
    uvloop.run(stop_while_clients_dial(turns))  # on a loop of its own: the cluster's has tasks that come and go


async def stop_while_clients_dial(turns: int) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    before = asyncio.all_tasks()
    target = await asyncio.start_server(lambda _, writer: writer.transport.abort(), "127.0.0.1", 0)
    async with target:
        proxy = FaultProxy(target_port=target.sockets[0].getsockname()[1])
        await proxy.start()
        dials = [asyncio.create_task(asyncio.open_connection("127.0.0.1", proxy.port)) for _ in range(5)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await proxy.stop()
        for dial in await asyncio.gather(*dials, return_exceptions=True):
            if not isinstance(dial, BaseException):
                dial[1].transport.abort()
    await asyncio.sleep(0)
    assert complaints == []
    assert asyncio.all_tasks() == before
