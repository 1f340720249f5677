import pytest

from penstock.engine.pooling import PoolingCursor


def test_chunk_lies_at_its_rows_of_the_batch() -> None:
    cursor = PoolingCursor(5, row=3, num_scheduled=2)
    assert (cursor.global_start, cursor.global_end) == (3, 5)
    assert (cursor.is_complete, cursor.remaining) == (False, 5)


def test_advance_counts_pooled_tokens() -> None:
    cursor = PoolingCursor(5, num_scheduled=2)
    cursor.advance(2)
    assert (cursor.start, cursor.num_scheduled, cursor.remaining, cursor.is_complete) == (2, 0, 3, False)
    cursor.advance(3)
    assert (cursor.is_complete, cursor.remaining) == (True, 0)
    cursor.reset()
    assert (cursor.start, cursor.remaining, cursor.is_complete) == (0, 5, False)


def test_more_tokens_than_remain_are_refused() -> None:
    with pytest.raises(ValueError, match="advance by 6: 5 of 5 tokens remain"):
        PoolingCursor(5).advance(6)
