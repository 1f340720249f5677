"""Every small batch finds the smallest bucket that it fits in, and what it leaves empty is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from penstock.engine.core.cuda_graphs import Bucket, Buckets


@pytest.mark.parametrize("max_model_len", [16, 128, 512, 8192])
@pytest.mark.parametrize("max_tokens", [64, 1000, 4096])
@pytest.mark.parametrize("max_num_seqs", [1, 100, 2048])
def test_buckets_come_largest_first_and_can_be_filled(max_model_len: int, max_tokens: int, max_num_seqs: int) -> None:
    found = Buckets(max_tokens, max_model_len, max_num_seqs).all()
    assert len(found) == len(set(found)) <= 32
    assert [b.num_tokens for b in found] == sorted((b.num_tokens for b in found), reverse=True)
    for bucket in found:
        lengths = bucket.seq_lens()
        assert bucket.num_tokens <= max_tokens
        assert len(lengths) == bucket.num_seqs
        assert sum(lengths) == bucket.num_tokens
        assert max(lengths) == bucket.max_seqlen <= max_model_len
        assert min(lengths) >= 0


def test_a_device_without_room_for_the_smallest_has_none() -> None:
    buckets = Buckets(63, 512, 512)
    assert buckets.all() == []
    assert buckets.find(1, 1, 1) is None


@given(st.lists(st.integers(1, 512), min_size=1, max_size=600) | st.lists(st.integers(1, 9), min_size=1, max_size=600))
def test_a_batch_finds_the_smallest_that_it_fits_in(lengths: list[int]) -> None:
    buckets = Buckets(4096, 512, 2048)
    sizes = sorted({b.num_tokens for b in buckets.all()})
    size = sum(lengths), len(lengths), max(lengths)
    bucket = buckets.find(*size)
    fitting = [
        b for b in buckets.all() if all(of_batch <= of_bucket for of_batch, of_bucket in zip(size, b, strict=True))
    ]
    if bucket is None:
        # Too many tokens, sequences so unlike in length that attention would have too much for nothing, or so short
        # that the buckets that have as many of them have far more tokens.
        near = [num_tokens for num_tokens in sizes if num_tokens >= size[0]][:3]
        assert max(lengths) > 128 or all(b.num_tokens not in near for b in fitting)
        return
    assert bucket in fitting
    assert bucket.num_tokens == min(b.num_tokens for b in fitting)
    # Those that are smaller, and have as many tokens, have too few sequences.
    nearest = next(num_tokens for num_tokens in sizes if num_tokens >= size[0])
    assert nearest < 2 * size[0] or nearest == 64
    assert nearest <= bucket.num_tokens <= 4 * nearest
    assert bucket.num_tokens == nearest or all(
        b.num_seqs < size[1] for b in buckets.all() if nearest <= b.num_tokens < bucket.num_tokens
    )
    assert bucket.num_seqs <= 4 * size[1] or bucket.num_seqs == 8


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        ((64, 10, 6), Bucket(128, 32, 128)),
        ((20, 10, 3), Bucket(128, 32, 128)),
        ((200, 60, 5), Bucket(512, 128, 128)),
        ((129, 33, 6), Bucket(512, 128, 128)),
        ((900, 200, 6), Bucket(2048, 512, 128)),
        ((120, 40, 3), None),  # four times as many tokens as the nearest size
        ((700, 200, 4), None),
        ((64, 10, 55), Bucket(128, 32, 128)),
    ],
)
def test_many_short_texts_take_a_bucket_of_more_tokens(size: tuple[int, int, int], bucket: Bucket | None) -> None:
    assert Buckets(4096, 512, 2048).find(*size) == bucket


def test_many_sequences_have_a_short_longest() -> None:
    buckets = Buckets(4096, 8192, 2048)
    assert buckets.find(4000, 300, 100) == Bucket(4096, 512, 128)
    assert buckets.find(4000, 300, 129) is None
    assert buckets.find(4000, 100, 500) == Bucket(4096, 128, 512)
    assert buckets.find(4000, 2, 3990) == Bucket(4096, 8, 4096)
    assert buckets.find(4097, 2, 3990) is None
    assert buckets.find(4000, 513, 10) is None
