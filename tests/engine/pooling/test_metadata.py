from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.pooling import PoolerFactory, PoolingMetadata, PoolingStates, PoolingStrategy
from penstock.engine.protocol.tasks import PoolingType

from .conftest import SEQUENCE_TYPES, describe


def test_whole_sequences_need_no_state() -> None:
    metadata = describe([2, 3])
    assert not metadata.is_partial
    assert metadata.cu_seqlens.tolist() == [0, 2, 5]
    assert metadata.get_incomplete_indices() == []
    with pytest.raises(ValueError, match="whole sequences"):
        metadata.update_all(torch.zeros(5, 4))


def test_chunks_of_several_sequences_over_several_batches() -> None:
    torch.manual_seed(0)
    sequences = [torch.randn(n, 4) for n in (5, 9, 2)]
    types = [(PoolingType.MEAN, PoolingType.LAST), (PoolingType.ALL,), (PoolingType.MEAN, PoolingType.LAST)]
    states: list[PoolingStates | None] = [None, None, None]
    starts = [0, 0, 0]
    pooled: dict[int, Tensor] = {}
    for sizes, incomplete in (([2, 4, 2], [0, 1]), ([0, 4, 0], [0, 1]), ([3, 1, 0], [])):
        metadata = describe([len(s) for s in sequences], chunk_sizes=sizes, states=states)
        metadata.initialize_states(4, types)
        parts = [s[b : b + n] for s, b, n in zip(sequences, starts, sizes, strict=True)]
        metadata.update_all(torch.cat(parts))
        assert metadata.get_incomplete_indices() == incomplete
        assert [metadata.states[i].num_tokens for i in range(3)] == [b + n for b, n in zip(starts, sizes, strict=True)]
        pooled.update(metadata.finalize_all())
        starts = [metadata.cursors[i].start for i in range(3)]
        states = [metadata.states[i] for i in range(3)]
    assert sorted(pooled) == [0, 2]
    for index, row in pooled.items():
        expected = torch.cat([sequences[index].mean(0), sequences[index][-1]])
        torch.testing.assert_close(row, expected, atol=1e-6, rtol=1e-6)


def test_states_say_where_chunks_begin() -> None:
    state = PoolingStates.initialize(4, [PoolingType.MEAN])
    state.update(torch.zeros(3, 4))
    metadata = describe([8, 2], states=[state, None])
    assert (metadata.seq_lens, list(metadata.cursors)) == ((5, 2), [0])
    assert (metadata.cursors[0].chunk_start, metadata.cursors[0].row) == (3, 0)
    metadata = describe([8, 2], chunk_starts=[1, 0], states=[state, None])
    assert (metadata.seq_lens, metadata.cursors[0].num_repeated) == ((7, 2), 2)


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
    assert isinstance(rows, Tensor)
    assert rows.tolist() == [0, 1, 5]
    assert (part.seq_lens, part.cu_seqlens.tolist()) == ((2, 1), [0, 2, 3])
    assert part.token_ids is not None
    assert part.skip_tokens is not None
    assert (part.token_ids.tolist(), part.skip_tokens.tolist()) == ([0, 1, 5], [1, 2])
    assert [metadata.select(i)[0] for i in ([0, 1, 2], [1, 2], [])] == [slice(0, 6), slice(2, 6), slice(0, 0)]


def sent(num_tokens: int) -> PoolingStates:
    """The state of a sequence whose first rows went out already."""
    state = PoolingStates.initialize(4, PoolingType.ALL)
    state.num_tokens = num_tokens
    return state


def test_select_leaves_out_rows_that_come_again() -> None:
    metadata = describe(
        [6, 3, 9],
        chunk_sizes=[4, 3, 5],
        chunk_starts=[0, 0, 2],
        states=[sent(1), None, sent(8)],
        token_ids=torch.arange(12),
    )
    rows, part = metadata.select([0, 1, 2], new_only=True)
    assert isinstance(rows, Tensor)
    assert rows.tolist() == [1, 2, 3, 4, 5, 6]
    assert part.token_ids is not None
    assert (part.seq_lens, part.token_ids.tolist()) == ((3, 3, 0), [1, 2, 3, 4, 5, 6])
    assert metadata.select([0, 1, 2])[1].seq_lens == (4, 3, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": []}, "params holds 0 values for 2 sequences"),
        ({"states": [None], "chunk_starts": [0, 0]}, "states holds 1 values"),
        ({"chunk_sizes": [3, 3]}, "3 tokens at 0 do not lie in a sequence of 2"),
        ({"chunk_sizes": [2, 1], "chunk_starts": [0, 3]}, "1 tokens at 3 do not lie in a sequence of 3"),
        ({"chunk_sizes": [3, 3], "chunk_starts": [-1, 0]}, "3 tokens at -1 do not lie in a sequence of 2"),
    ],
)
def test_lengths_that_do_not_fit(arguments: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe([2, 3], **arguments)


def test_a_chunk_without_state_is_refused() -> None:
    metadata = describe([2, 3], chunk_sizes=[1, 3])
    with pytest.raises(ValueError, match="1 sequences have no running state"):
        metadata.update_all(torch.zeros(4, 4))


# Sequences that the caller runs itself ---------------------------------------------------------------------------


LENGTHS, WIDTH = (5, 9, 1), 4


def rows_of(generator_seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(generator_seed)
    return [torch.randn(n, WIDTH, generator=generator) for n in LENGTHS]


def expected_of(strategy: str, sequences: list[Tensor], weights: list[Tensor]) -> Tensor:
    metadata = describe([len(s) for s in sequences])
    return PoolerFactory.create(strategy).pool(torch.cat(sequences), metadata, torch.cat(weights)[:, None])


@pytest.mark.parametrize("strategy", ["mean", "MAX", "First", "last", "attention_weighted", *SEQUENCE_TYPES])
@pytest.mark.parametrize("chunk_sizes", [None, [2, 4, 3], [1, 9, 1]])
@pytest.mark.parametrize("as_tensor", [True, False], ids=["packed", "by sequence"])
def test_batches_of_the_caller(strategy: str, chunk_sizes: list[int] | None, as_tensor: bool) -> None:
    """Packed rows with gaps between the sequences, or the next rows of each sequence, as torch and numpy arrays."""
    sequences, weights = rows_of(), [torch.rand(n) + 0.1 for n in LENGTHS]
    starts = [3, 20, 10]
    packed, packed_weights = torch.full((30, WIDTH), float("nan")), torch.full((30,), float("nan"))
    for start, rows, w in zip(starts, sequences, weights, strict=True):
        packed[start : start + len(rows)], packed_weights[start : start + len(rows)] = rows, w
    metadata = PoolingMetadata.create(starts, LENGTHS, WIDTH, strategy, chunk_sizes)
    sizes = LENGTHS if chunk_sizes is None else chunk_sizes
    done = [0, 0, 0]
    while metadata.get_incomplete_indices():
        ends = [min(d + n, length) for d, n, length in zip(done, sizes, LENGTHS, strict=True)]
        cursors = [metadata.cursors[i] for i in range(3)]
        assert [c.global_start - start for c, start in zip(cursors, starts, strict=True)] == done
        assert [c.global_end - start for c, start in zip(cursors, starts, strict=True)] == ends
        if as_tensor:
            metadata.update_all(packed, packed_weights)
        else:
            parts = [rows[d:e] for rows, d, e in zip(sequences, done, ends, strict=True)]
            metadata.update_all([parts[0].numpy(), *parts[1:]], [w[:e] for w, e in zip(weights, ends, strict=True)])
        done = ends
        assert metadata.get_incomplete_indices() == [i for i in range(3) if done[i] < LENGTHS[i]]
    pooled = metadata.finalize_all()
    assert list(pooled) == [0, 1, 2]
    expected = expected_of(strategy, sequences, weights)
    torch.testing.assert_close(torch.stack(list(pooled.values())), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("starts", [(0, 5, 14), (2, 7, 16), (11, 1, 20)])
@pytest.mark.parametrize("strategy", ["mean", "attention_weighted", "all"])
def test_poolers_take_what_create_describes(strategy: str, starts: tuple[int, ...]) -> None:
    sequences, weights = rows_of(), [torch.rand(n) + 0.1 for n in LENGTHS]
    packed, packed_weights = torch.zeros(30, WIDTH), torch.zeros(30)
    for start, rows, w in zip(starts, sequences, weights, strict=True):
        packed[start : start + len(rows)], packed_weights[start : start + len(rows)] = rows, w
    metadata = PoolingMetadata.create(
        seq_starts=starts, seq_lens=LENGTHS, hidden_dim=WIDTH, strategy=strategy, chunk_sizes=None
    )
    pooled = PoolerFactory.create(strategy).pool(packed, metadata, packed_weights[:, None])
    torch.testing.assert_close(pooled, expected_of(strategy, sequences, weights))
    partial = PoolingMetadata.create(starts, LENGTHS, WIDTH, strategy, chunk_sizes=[3, 9, 1])
    with pytest.raises(ValueError, match="takes whole sequences"):
        PoolerFactory.create(strategy).pool(packed, partial, packed_weights[:, None])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 2], [2, 3], 4, "median"), "no pooling type 'median'; known are CLS, LAST, MEAN"),
        (([0, 2], [2, 3], 4, 5), "no pooling type 5; known are CLS"),
        (([0, 2], [2, 3], 0), "hidden_dim is 0; it must be at least 1"),
        (([0, 2, 5], [2, 3], 4), "seq_starts holds 3 values for 2 sequences"),
        (([0, 2], [2, 3], 4, "mean", [1]), "chunk_sizes holds 1 values for 2 sequences"),
        (([0, 2], [2, 3], 4, "mean", [1, 0]), "chunk_sizes .1, 0. at least 1"),
        (([-1, 2], [2, 3], 4), "seq_starts .-1, 2. and seq_lens .2, 3. must be 0 or more"),
        (([0, 2], [2, -3], 4), "seq_starts .0, 2. and seq_lens .2, -3. must be 0 or more"),
    ],
)
def test_create_names_what_is_wrong(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolingMetadata.create(*arguments)


def test_no_sequences_are_complete() -> None:
    for chunk_sizes in (None, []):
        metadata = PoolingMetadata.create([], [], 4, "mean", chunk_sizes)
        assert (metadata.num_seqs, metadata.get_incomplete_indices(), metadata.finalize_all()) == (0, [], {})


def test_more_rows_than_remain_are_refused() -> None:
    metadata = PoolingMetadata.create([0, 2], [2, 3], 4, "mean")
    with pytest.raises(ValueError, match="cannot schedule 3: 2 of 2 tokens remain"):
        metadata.update_all([torch.zeros(3, 4), torch.zeros(1, 4)])
    with pytest.raises(ValueError, match="hidden_states_batch holds 1 values for 2 sequences"):
        metadata.update_all([torch.zeros(2, 4)])


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


@pytest.mark.parametrize("make", [torch.from_numpy, np.asarray, lambda rows: rows.astype(np.float64)])
def test_one_packed_array_for_all_sequences(make: Any) -> None:
    packed, weights = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32), np.ones(7, np.float32)
    for strategy in ("mean", "attention"):
        metadata = PoolingMetadata.create([0, 3], [3, 4], 4, strategy, [2, 2])
        while metadata.get_incomplete_indices():
            metadata.update_all(make(packed), make(weights))
        results = metadata.finalize_all()
        for index, rows in enumerate((packed[:3], packed[3:])):
            np.testing.assert_allclose(results[index].numpy(), rows.mean(0), atol=1e-6)
