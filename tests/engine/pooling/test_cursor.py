import pytest

from penstock.engine.pooling import PoolingCursor


def test_a_whole_sequence() -> None:
    cursor = PoolingCursor(5, 5, row=3)
    assert (cursor.global_start, cursor.global_end) == (3, 8)
    assert (cursor.is_whole, cursor.is_complete, cursor.remaining) == (True, False, 5)
    cursor.advance(5)
    assert (cursor.is_complete, cursor.remaining) == (True, 0)


def test_slices() -> None:
    cursor = PoolingCursor(5, 2)
    assert not cursor.is_whole
    cursor.advance(2)
    assert (cursor.start, cursor.num_scheduled, cursor.remaining, cursor.is_complete) == (2, 0, 3, False)
    cursor.schedule(3, row=10)
    assert (cursor.global_start, cursor.global_end, cursor.is_whole) == (10, 13, False)
    cursor.advance(3)
    assert cursor.is_complete
    cursor.reset()
    assert (cursor.start, cursor.remaining, cursor.is_complete) == (0, 5, False)


def test_more_than_remains_is_refused() -> None:
    cursor = PoolingCursor(5, 2)
    with pytest.raises(ValueError, match="advance by 6: 5 of 5 tokens remain"):
        cursor.advance(6)
    with pytest.raises(ValueError, match="schedule 6: 5 of 5 tokens remain"):
        cursor.schedule(6, row=0)
    with pytest.raises(ValueError, match="4 tokens at 2 do not lie in a sequence of 5"):
        PoolingCursor(5, 4, start=2)
