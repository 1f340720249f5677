"""Results of a batch: arrays of many sequences, arrays of one, and the messages that carry them."""

import numpy as np
import pytest

from penstock.engine.protocol.batch_outputs import BatchOutputs, OutputArray, ResultArray, pack_results, unpack_results
from penstock.engine.protocol.messages import StepResults, decode_from_core, encode

OUTPUTS = [
    OutputArray(name="embedding", values=np.arange(12, dtype=np.float32).reshape(4, 3), widths=[3, 1, 2, 3]),
    OutputArray(name="token_scores", values=np.arange(10, dtype=np.float32).reshape(5, 2), row_lens=[2, 0, 3]),
    OutputArray(name="scores", values=np.ones((1, 1), np.float32)),
    OutputArray(name="sparse", values=np.zeros((0, 2), np.float32), row_lens=[0, 0], widths=[2, 1]),
]


def rows(num_rows: int, width: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + num_rows * width, dtype=np.float32).reshape(num_rows, width)


def test_blocks_are_split_into_arrays_of_each_sequence() -> None:
    vectors, scores, tokens = rows(4, 3), rows(2, 5, 100), rows(6, 2, 200)
    outputs = BatchOutputs.of(
        4,
        [
            OutputArray(name="embedding", values=vectors, widths=(3, 1, 2, 3)),
            OutputArray(name="scores", values=scores, indices=(3, 1)),
            OutputArray(name="token_scores", values=tokens, indices=(0, 1, 2), row_lens=(1, 0, 5), widths=(2, 1, 1)),
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
def test_sequence_is_finite_if_all_its_values_are(value: float) -> None:
    vectors, tokens = rows(4, 3), rows(6, 2)
    vectors[1, 2] = value  # beyond the columns of this one
    vectors[3, 0] = value
    tokens[3, 1] = value  # of sequence 2
    outputs = [
        OutputArray(name="embedding", values=vectors, widths=(3, 2, 3, 3)),
        OutputArray(name="token_embeddings", values=tokens, indices=(0, 2), row_lens=(2, 4)),
    ]
    assert BatchOutputs.of(4, outputs).is_finite.tolist() == [True, True, False, False]
    assert BatchOutputs.of(2, ()).is_finite.tolist() == [True, True]
    assert BatchOutputs.of(2, ()).split() == [{}, {}]


def results_of(output: OutputArray) -> ResultArray:
    numbers = range(len(output.split()))
    return ResultArray(
        output, [(1 << 41) + n for n in numbers], [3 * n for n in numbers], [bool(n % 2) for n in numbers]
    )


def test_blocks_of_any_shape_survive_their_message() -> None:
    sent = [results_of(output) for output in OUTPUTS]
    headers, frames = pack_results(sent)
    assert [len(frame) for frame in frames] == [output.values.nbytes for output in OUTPUTS]
    message = StepResults(headers, 1, 0.1, finished=[(7, 0.5, 2.0), (1 << 50, 0.0, 1e-9)])
    decoded = decode_from_core(encode(message))
    assert isinstance(decoded, StepResults)
    assert decoded == message
    received = unpack_results(decoded, [bytes(frame) for frame in frames])
    for theirs, ours in zip(sent, received, strict=True):
        assert ours.output.name == theirs.output.name
        for column in ("request_ids", "indices", "is_last"):
            assert getattr(ours, column) == getattr(theirs, column)
        for before, after in zip(theirs.output.split(), ours.output.split(), strict=True):
            assert after.dtype == np.float32
            assert after.shape == before.shape
            np.testing.assert_array_equal(after, before)
    for output, frame in zip(OUTPUTS[:3], frames, strict=False):  # not copied
        assert np.shares_memory(np.frombuffer(frame, np.float32), output.values)


@pytest.mark.parametrize("output", OUTPUTS)
def test_pick_keeps_the_chosen_sequences(output: OutputArray) -> None:
    whole = results_of(output)
    everything = range(len(whole.request_ids))
    assert whole.pick(everything) is whole
    for places in (everything[1:], everything[::2], everything[:0]):
        part = whole.pick(places)
        assert part.indices == [3 * place for place in places]
        expected = [output.split()[place] for place in places]
        for ours, theirs in zip(part.output.split(), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
