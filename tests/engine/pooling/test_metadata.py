"""Descriptions of a batch, cursors and names of pooling types."""

import numpy as np
import pytest

from penstock.engine.executors.cpu.array_encoder import PackedArrays
from penstock.engine.pooling import PoolerFactory, PoolingCursor, PoolingMetadata, PoolingStrategy
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingType

from ...tables import cases
from .conftest import make_metadata


def test_cursor_counts_pooled_tokens() -> None:
    cursor = PoolingCursor(5, global_start=3, chunk_len=2)
    assert (cursor.global_start, cursor.global_end, cursor.is_complete, cursor.remaining) == (3, 5, False, 5)
    with pytest.raises(ValueError, match="advance by 6: 5 of 5 tokens remain"):
        cursor.advance(6)
    cursor.advance(2)
    assert (cursor.num_pooled, cursor.chunk_len, cursor.remaining, cursor.is_complete) == (2, 0, 3, False)
    cursor.advance(3)
    assert (cursor.is_complete, cursor.remaining) == (True, 0)
    cursor.reset()
    assert (cursor.num_pooled, cursor.remaining, cursor.is_complete) == (0, 5, False)
    assert (cursor.global_start, cursor.global_end) == (0, 0)


def test_batch_of_chunks_records_their_spans() -> None:
    starts, lengths = [0, 3, 16], [7, 2, 24]
    batch = PackedArrays.build([TokenizedInput(np.ones(n, np.int32)) for n in lengths], starts=starts)
    params = [PoolingParams()] * 3
    metadata = PoolingMetadata.for_batch(batch, params, seq_ids="abc", starts=starts, total_lens=[7, 5, 63])
    assert metadata.chunks is not None
    assert (metadata.chunks.starts.tolist(), metadata.chunks.ends.tolist()) == ([0, 3, 16], [7, 5, 40])
    assert (metadata.is_partial, metadata.get_incomplete_indices()) == (True, [2])
    assert not PoolingMetadata.for_batch(batch, params).is_partial
    assert not PoolingMetadata.for_batch(batch, params, seq_ids="abc").is_partial
    with pytest.raises(ValueError, match="total_lens has 1 values for 3 sequences"):
        PoolingMetadata.for_batch(batch, params, seq_ids="abc", total_lens=[7])


@cases(__file__, "arguments", "message")
def test_lengths_that_do_not_fit_are_rejected(arguments: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_metadata([2, 3], **arguments)


def test_strategy_names_are_read_in_any_case() -> None:
    assert PoolingStrategy is PoolingType
    names = {
        "mean": PoolingType.MEAN,
        "First": PoolingType.CLS,
        "LAST_token": PoolingType.LAST,
        "Attention-Weighted": PoolingType.ATTENTION,
        "mean_sqrt_len": PoolingType.MEAN_SQRT_LEN,
    }
    assert {name: PoolingStrategy(name) for name in names} == names
    assert PoolingStrategy.FIRST is PoolingType.CLS
    assert "FIRST" not in list(PoolingType)  # an alias is not a member
    for wrong in ("median", "", 3, None):
        with pytest.raises(ValueError, match=f"no pooling type {wrong!r}; known are CLS, LAST, MEAN, MAX"):
            PoolerFactory.create(wrong)  # type: ignore[arg-type]
