import pytest

from penstock.engine.pooling import PoolingCursor


def test_a_whole_sequence() -> None:
    cursor = PoolingCursor(5, 5, row=3)
    assert (cursor.global_start, cursor.global_end) == (3, 8)
    assert (cursor.is_whole, cursor.is_complete, cursor.remaining) == (True, False, 5)
    cursor.advance(5)
    assert (cursor.is_complete, cursor.remaining) == (True, 0)


def test_chunks() -> None:
    cursor = PoolingCursor(5, 2)
    assert (cursor.start, cursor.chunk_start, cursor.global_start, cursor.is_whole) == (0, 0, 0, False)
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


def test_rows_that_come_again() -> None:
    cursor = PoolingCursor(10, 4, start=6, row=2, offset=-5)
    assert (cursor.chunk_start, cursor.chunk_end, cursor.num_repeated) == (1, 5, 4)
    cursor.finish_chunk()
    assert (cursor.start, cursor.offset, cursor.num_scheduled) == (6, 0, 0)
    cursor.schedule(6, row=0, chunk_start=4)
    assert (cursor.num_repeated, cursor.global_end) == (2, 6)
    cursor.finish_chunk()
    assert cursor.is_complete


def test_a_gap() -> None:
    cursor = PoolingCursor(10, 2, offset=4)
    assert (cursor.chunk_start, cursor.num_repeated, cursor.is_whole) == (4, 0, False)
    cursor.finish_chunk()
    assert (cursor.start, cursor.remaining) == (6, 4)
    assert PoolingCursor(10, 10, start=3, offset=-3).is_whole


def test_chunks_outside_of_the_sequence_are_refused() -> None:
    cursor = PoolingCursor(5, 0, start=3)
    for num_tokens, start in ((3, 3), (1, -1), (0, 6)):
        with pytest.raises(ValueError, match=f"cannot schedule {num_tokens}"):
            cursor.schedule(num_tokens, 0, start)
    with pytest.raises(ValueError, match="2 tokens at -1 do not lie"):
        PoolingCursor(5, 2, start=3, offset=-4)
    with pytest.raises(ValueError, match="6 tokens cannot have been pooled of a sequence of 5"):
        PoolingCursor(5, 0, start=6)
