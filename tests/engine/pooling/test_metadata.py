import numpy as np
import pytest
import torch

from penstock.engine.pooling import PoolerFactory, PoolingStrategy
from penstock.engine.protocol.tasks import PoolingType

from .conftest import describe


def test_whole_sequences_need_no_state() -> None:
    metadata = describe([2, 3])
    assert not metadata.is_partial
    assert metadata.cu_seqlens.tolist() == [0, 2, 5]
    assert metadata.get_incomplete_indices() == []


def test_as_whole_counts_skipped_tokens_from_the_chunk() -> None:
    skip_tokens = torch.tensor([3, 3, 0], dtype=torch.int32)
    metadata = describe([9, 9, 4], chunk_starts=[2, 5, 0], skip_tokens=skip_tokens)
    whole = metadata.as_whole()
    assert not whole.is_partial
    assert whole.skip_tokens is not None
    assert (whole.seq_lens, whole.skip_tokens.tolist()) == ((7, 4, 4), [1, 0, 0])


def test_select_describes_some_sequences() -> None:
    metadata = describe([2, 3, 1], token_ids=torch.arange(6), skip_tokens=torch.tensor([1, 0, 2], dtype=torch.int32))
    rows, part = metadata.select([0, 2])
    assert isinstance(rows, np.ndarray)
    assert rows.tolist() == [0, 1, 5]
    assert (part.seq_lens, part.cu_seqlens.tolist()) == ((2, 1), [0, 2, 3])
    assert part.token_ids is not None
    assert part.skip_tokens is not None
    assert (part.token_ids.tolist(), part.skip_tokens.tolist()) == ([0, 1, 5], [1, 2])
    assert [metadata.select(i)[0] for i in ([0, 1, 2], [1, 2], [])] == [slice(0, 6), slice(2, 6), slice(0, 0)]


def test_select_leaves_out_rows_that_come_again() -> None:
    metadata = describe([6, 3, 9], chunk_sizes=[4, 3, 5], chunk_starts=[0, 0, 2], token_ids=torch.arange(12))
    assert metadata.chunks is not None
    metadata.chunks.num_pooled[:] = [1, 0, 8]
    rows, part = metadata.select([0, 1, 2], new_only=True)
    assert isinstance(rows, np.ndarray)
    assert rows.tolist() == [1, 2, 3, 4, 5, 6]
    assert part.token_ids is not None
    assert (part.seq_lens, part.token_ids.tolist()) == ((3, 3, 0), [1, 2, 3, 4, 5, 6])
    assert metadata.select([0, 1, 2])[1].seq_lens == (4, 3, 5)
    assert metadata.get_incomplete_indices() == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": []}, "params holds 0 values for 2 sequences"),
        ({"seq_ids": ["a"]}, "seq_ids holds 1 values for 2 sequences"),
        ({"chunk_sizes": [3, 3]}, "3 tokens at 0 do not lie in a sequence of 2"),
        ({"chunk_sizes": [2, 1], "chunk_starts": [0, 3]}, "1 tokens at 3 do not lie in a sequence of 3"),
        ({"chunk_sizes": [3, 3], "chunk_starts": [-1, 0]}, "3 tokens at -1 do not lie in a sequence of 2"),
    ],
)
def test_lengths_that_do_not_fit(arguments: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe([2, 3], **arguments)


def test_names_of_strategies() -> None:
    assert PoolingStrategy is PoolingType
    names = ("mean", "First", "LAST_token", "attention_weighted", "mean_sqrt_len")
    assert [PoolingStrategy(name) for name in names] == [
        PoolingType.MEAN,
        PoolingType.CLS,
        PoolingType.LAST,
        PoolingType.ATTENTION,
        PoolingType.MEAN_SQRT_LEN,
    ]
    for wrong in ("median", "", 3, None):
        with pytest.raises(ValueError, match=f"no pooling type {wrong!r}; known are CLS, LAST, MEAN, MAX"):
            PoolerFactory.create(wrong)  # type: ignore[arg-type]


def test_strategies_have_the_members_of_the_specification() -> None:
    assert PoolingStrategy.FIRST is PoolingType.CLS
    assert PoolingStrategy.LAST_TOKEN is PoolingType.LAST
    assert PoolingStrategy.ATTENTION_WEIGHTED is PoolingType.ATTENTION
    for name in ("attention-weighted", "Attention-Weighted", "ATTENTION_weighted"):
        assert PoolingStrategy(name) is PoolingType.ATTENTION
    assert "FIRST" not in list(PoolingType)  # an alias is not listed by itself
