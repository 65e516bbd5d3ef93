"""The memory of ended transfers, on a virtual clock."""

from common.errors import UnknownTransfer
from common.ids import TransferId
from kvstore.outgoing import ReleaseReason
from kvstore.tombstones import Tombstones

GONE = UnknownTransfer("gone")


def bury(stones: Tombstones, name: str, now: float, reason: ReleaseReason = ReleaseReason.DONE) -> None:
    stones.bury(TransferId(name), reason, GONE, now)


def test_an_end_is_remembered_for_its_time_only():
    stones = Tombstones(keep_s=60, limit=10)
    bury(stones, "a", now=0)
    assert stones.find(TransferId("a"), 59.9) is not None
    assert stones.find(TransferId("a"), 60) is None
    assert stones.find(TransferId("b"), 0) is None


def test_the_later_end_counts():
    stones = Tombstones(keep_s=60, limit=10)
    bury(stones, "a", now=0)
    bury(stones, "a", now=50, reason=ReleaseReason.CANCELLED)
    found = stones.find(TransferId("a"), 100)
    assert found is not None
    assert found.reason is ReleaseReason.CANCELLED


def test_old_and_surplus_stones_are_forgotten():
    stones = Tombstones(keep_s=60, limit=2)
    for now, name in enumerate("abc"):
        bury(stones, name, now=now)
    assert stones.find(TransferId("a"), 3) is None
    assert len(stones) == 2
    bury(stones, "d", now=100)
    assert len(stones) == 1


def test_a_transfer_that_begins_anew_is_no_longer_dead():
    stones = Tombstones(keep_s=60, limit=2)
    bury(stones, "a", now=0)
    stones.forget(TransferId("a"))
    stones.forget(TransferId("a"))
    assert stones.find(TransferId("a"), 1) is None
