"""``baton doctor`` against a real gateway and a real Redis, with stub workers."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from common.errors import Unavailable
from compose.doctor import DoctorConfig, doctor
from tests.support.gateway_bench import Bench, open_bench

pytestmark = pytest.mark.anyio


@pytest.fixture
async def bench(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(redis, redis_url, tmp_path) as running:
        yield running


async def test_it_sees_a_cluster_and_tells_what_does_not_move(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    await bench.prefill(await bench.decode())
    client = await bench.gateway(prefill_expected=True)
    await bench.wait_workers(2)
    config = DoctorConfig(url=str(client.base_url), redis=bench.redis_url, model=str(bench.folder / "model"))
    with pytest.raises(Unavailable, match="3 of the checks failed"):
        await doctor(config)
    said = capsys.readouterr().out
    for line in (
        "ok    redis eviction: noeviction",
        "ok    tokenizer: ",
        "FAIL  weights: missing",
        "ok    decode workers: 1 ready",
        "ok    fingerprints: 2 workers can exchange blocks",
        "FAIL  prefill-0: 127.0.0.1:1 cannot be connected to from here (ConnectionRefusedError)",  # a stub's
        "FAIL  test transfer: no block has moved",  # stubs move none
    ):
        assert line in said
    assert re.search(r"^ok    decode-0: 127\.0\.0\.1:\d+ can be connected to$", said, re.MULTILINE)


async def test_a_cluster_that_is_not_there_is_one_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unavailable, match="2 of the checks failed"):
        await doctor(DoctorConfig(url="http://127.0.0.1:9", redis="redis://127.0.0.1:9"))
    said = capsys.readouterr().out
    assert "FAIL  gateway: does not answer at http://127.0.0.1:9" in said
    assert "FAIL  redis: does not answer" in said
