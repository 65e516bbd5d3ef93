"""The record of what entered and left a cache."""

from common.ids import BlockHash, BlockId
from kvstore.cache_log import CacheChange, CacheEvent, CacheLog


def stored(number: int) -> CacheEvent:
    return CacheEvent(CacheChange.STORED, BlockHash(bytes([number])), BlockId(number), None)


def test_a_full_log_loses_the_oldest_and_says_so_once():
    log = CacheLog(limit=2)
    for number in range(3):
        log.record(stored(number))
    drained = log.drain()
    assert not drained.complete
    assert [event.block_id for event in drained.events] == [1, 2]
    log.record(stored(5))
    assert log.drain().complete


def test_a_log_that_is_exactly_full_is_complete():
    log = CacheLog(limit=2)
    for number in range(2):
        log.record(stored(number))
    assert log.drain().complete


def test_only_the_first_event_after_a_drain_calls():
    log, calls = CacheLog(limit=8), []
    log.on_first = lambda: calls.append(1)
    log.record(stored(1))
    log.record(stored(2))
    assert calls == [1]
    log.drain()
    log.record(stored(3))
    assert calls == [1, 1]
