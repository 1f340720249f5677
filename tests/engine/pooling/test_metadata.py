import pytest
import torch
from torch import Tensor

from penstock.engine.pooling import PoolingMetadata, PoolingStates
from penstock.engine.protocol.tasks import PoolingType


def test_whole_sequences_need_no_state() -> None:
    metadata = PoolingMetadata.create([2, 3])
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
        metadata = PoolingMetadata.create(
            [len(s) for s in sequences], chunk_sizes=sizes, seq_starts=starts, states=states
        )
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
    metadata = PoolingMetadata.create([8, 2], states=[state, None])
    assert (metadata.seq_lens, list(metadata.cursors)) == ((5, 2), [0])
    assert (metadata.cursors[0].chunk_start, metadata.cursors[0].row) == (3, 0)
    metadata = PoolingMetadata.create([8, 2], chunk_starts=[1, 0], states=[state, None])
    assert (metadata.seq_lens, metadata.cursors[0].num_repeated) == ((7, 2), 2)
    with pytest.raises(ValueError, match="seq_starts says that 2 tokens of sequence 0 were pooled; its state holds 3"):
        PoolingMetadata.create([8, 2], seq_starts=[2, 0], states=[state, None])


def test_as_whole_counts_skipped_tokens_from_the_chunk() -> None:
    skip_tokens = torch.tensor([3, 3, 0], dtype=torch.int32)
    metadata = PoolingMetadata.create([9, 9, 4], chunk_starts=[2, 5, 0], skip_tokens=skip_tokens)
    whole = metadata.as_whole()
    assert not whole.is_partial
    assert whole.skip_tokens is not None
    assert (whole.seq_lens, whole.skip_tokens.tolist()) == ((7, 4, 4), [1, 0, 0])


def test_select_describes_some_sequences() -> None:
    metadata = PoolingMetadata.create(
        [2, 3, 1], token_ids=torch.arange(6), skip_tokens=torch.tensor([1, 0, 2], dtype=torch.int32)
    )
    rows, part = metadata.select([0, 2])
    assert isinstance(rows, Tensor)
    assert rows.tolist() == [0, 1, 5]
    assert (part.seq_lens, part.cu_seqlens.tolist()) == ((2, 1), [0, 2, 3])
    assert part.token_ids is not None
    assert part.skip_tokens is not None
    assert (part.token_ids.tolist(), part.skip_tokens.tolist()) == ([0, 1, 5], [1, 2])
    assert [metadata.select(i)[0] for i in ([0, 1, 2], [1, 2], [])] == [slice(0, 6), slice(2, 6), slice(0, 0)]


def test_select_leaves_out_rows_that_come_again() -> None:
    metadata = PoolingMetadata.create(
        [6, 3, 9], chunk_sizes=[4, 3, 5], seq_starts=[1, 0, 8], chunk_starts=[0, 0, 2], token_ids=torch.arange(12)
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
        ({"chunk_sizes": [1]}, "chunk_sizes holds 1 values for 2 sequences"),
        ({"seq_starts": [0, 0, 0]}, "seq_starts holds 3 values"),
        ({"params": []}, "params holds 0 values"),
        ({"chunk_starts": [0]}, "chunk_starts holds 1 values"),
        ({"chunk_sizes": [3, 3]}, "3 tokens at 0 do not lie in a sequence of 2"),
        ({"chunk_sizes": [2, 1], "chunk_starts": [0, 3]}, "1 tokens at 3 do not lie in a sequence of 3"),
    ],
)
def test_lengths_that_do_not_fit(arguments: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolingMetadata.create([2, 3], **arguments)


def test_a_chunk_without_state_is_refused() -> None:
    metadata = PoolingMetadata.create([2, 3], chunk_sizes=[1, 3])
    with pytest.raises(ValueError, match="1 sequences have no running state"):
        metadata.update_all(torch.zeros(4, 4))
