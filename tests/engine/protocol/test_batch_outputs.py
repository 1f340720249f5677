"""The record of a batch: blocks of rows as the arrays of each sequence, and which of these are finite."""

import numpy as np
import pytest

from penstock.engine.protocol.batch_outputs import ArrayBlock, BatchOutputs


def rows(num_rows: int, width: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + num_rows * width, dtype=np.float32).reshape(num_rows, width)


def test_blocks_become_the_arrays_of_each_sequence_by_name() -> None:
    vectors, scores, tokens = rows(4, 3), rows(2, 5, 100), rows(6, 2, 200)
    outputs = BatchOutputs.of(
        4,
        [
            ArrayBlock(name="embedding", values=vectors, widths=(3, 1, 2, 3)),
            ArrayBlock(name="scores", values=scores, indices=(3, 1)),
            ArrayBlock(name="token_scores", values=tokens, indices=(0, 1, 2), row_lens=(1, 0, 5), widths=(2, 1, 1)),
        ],
    )
    expected = [
        {"embedding": vectors[0], "token_scores": tokens[:1]},
        {"embedding": vectors[1, :1], "scores": scores[1], "token_scores": tokens[1:1, :1]},
        {"embedding": vectors[2, :2], "token_scores": tokens[1:, :1]},
        {"embedding": vectors[3], "scores": scores[0]},
    ]
    for ours, theirs in zip(outputs.split(), expected, strict=True):
        assert list(ours) == [name for name in ("embedding", "scores", "token_scores") if name in theirs]
        for name, array in ours.items():
            np.testing.assert_array_equal(array, theirs[name])
            assert array.shape == theirs[name].shape
            assert np.shares_memory(array, theirs[name]) or not array.size
    assert outputs.is_finite.all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_sequence_is_finite_where_all_that_it_got_is(value: float) -> None:
    vectors, tokens = rows(4, 3), rows(6, 2)
    vectors[1, 2] = value  # beyond the columns of this one
    vectors[3, 0] = value
    tokens[3, 1] = value  # of sequence 2
    blocks = [
        ArrayBlock(name="embedding", values=vectors, widths=(3, 2, 3, 3)),
        ArrayBlock(name="token_embeddings", values=tokens, indices=(0, 2), row_lens=(2, 4)),
    ]
    assert BatchOutputs.of(4, blocks).is_finite.tolist() == [True, True, False, False]


def test_without_blocks_every_sequence_is_finite_and_has_nothing() -> None:
    outputs = BatchOutputs.of(2, ())
    assert outputs.is_finite.tolist() == [True, True]
    assert outputs.split() == [{}, {}]
