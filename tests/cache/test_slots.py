import pytest

from sidestream.cache.slots import SlotPool
from sidestream.errors import CapacityError


def test_slots_come_back_and_slot_0_stays() -> None:
    pool = SlotPool(4)
    taken = [pool.allocate() for _ in range(3)]
    assert taken == [1, 2, 3]
    assert pool.allocate() is None
    pool.release(2)
    pool.check_integrity({"a": 1, "b": 3})
    assert pool.allocate() == 2
    with pytest.raises(CapacityError, match="1 state slots"):
        SlotPool(1)


def test_integrity_check_finds_each_kind_of_fault() -> None:
    pool = SlotPool(4)
    pool.allocate()
    with pytest.raises(AssertionError, match="nobody owns it"):
        pool.release(2)
    with pytest.raises(AssertionError, match=r"slots \[1\] count as owned, the owners hold \[\]"):
        pool.check_integrity({})
    with pytest.raises(AssertionError, match="two owners"):
        pool.check_integrity({"a": 1, "b": 1})
    with pytest.raises(AssertionError, match="scratch slot is owned"):
        pool.check_integrity({"a": 0, "b": 1})
    pool._free.append(1)
    with pytest.raises(AssertionError, match="free slots"):
        pool.check_integrity({"a": 1})
