"""The record of what entered and left a cache."""

from common.ids import BlockHash, BlockId
from kvstore.cache_log import CacheChange, CacheLog


def test_a_full_log_loses_the_oldest_and_says_so_once():
    log = CacheLog(limit=2)
    for number in range(3):
        log.record(CacheChange.STORED, BlockHash(bytes([number])), BlockId(number))
    drained = log.drain()
    assert not drained.complete
    assert [event.block_id for event in drained.events] == [1, 2]
    log.record(CacheChange.REMOVED, BlockHash(b"x"), BlockId(5))
    assert log.drain().complete


def test_a_log_that_is_exactly_full_is_complete():
    log = CacheLog(limit=2)
    for number in range(2):
        log.record(CacheChange.STORED, BlockHash(bytes([number])), BlockId(number))
    assert log.drain().complete
