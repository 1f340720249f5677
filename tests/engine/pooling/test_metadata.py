import pytest
import torch

from penstock.engine.params import PoolingType
from penstock.engine.pooling import PoolingMetadata, PoolingStates


def test_whole_sequences_need_no_state() -> None:
    metadata = PoolingMetadata.create([2, 3])
    assert not metadata.is_partial
    assert metadata.cu_seqlens.tolist() == [0, 2, 5]
    assert metadata.get_incomplete_indices() == []
    with pytest.raises(ValueError, match="whole sequences"):
        metadata.update_all(torch.zeros(5, 4))


def test_slices_of_several_sequences_over_several_batches() -> None:
    torch.manual_seed(0)
    sequences = [torch.randn(n, 4) for n in (5, 9, 2)]
    types = [(PoolingType.MEAN, PoolingType.LAST), (PoolingType.ALL,), (PoolingType.MEAN, PoolingType.LAST)]
    states: list[PoolingStates | None] = [None, None, None]
    starts = [0, 0, 0]
    for sizes, incomplete in (([2, 4, 2], [0, 1]), ([0, 4, 0], [0, 1]), ([3, 1, 0], [])):
        metadata = PoolingMetadata.create(
            [len(s) for s in sequences], chunk_sizes=sizes, seq_starts=starts, states=states
        )
        metadata.initialize_states(4, types)
        parts = [s[b : b + n] for s, b, n in zip(sequences, starts, sizes, strict=True)]
        metadata.update_all(torch.cat(parts))
        assert metadata.cursors is not None
        assert metadata.states is not None
        assert metadata.get_incomplete_indices() == incomplete
        assert sorted({0, 1, 2} - set(incomplete)) == list(metadata.finalize_all())
        starts = [cursor.start for cursor in metadata.cursors]
        states = metadata.states
    pooled = metadata.finalize_all()
    for index in (0, 2):
        expected = torch.cat([sequences[index].mean(0), sequences[index][-1]])
        torch.testing.assert_close(pooled[index], expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(pooled[1], sequences[1], atol=0, rtol=0)


def test_select_describes_some_sequences() -> None:
    metadata = PoolingMetadata.create(
        [2, 3, 1], token_ids=torch.arange(6), skip_tokens=torch.tensor([1, 0, 2], dtype=torch.int32)
    )
    rows, part = metadata.select([0, 2])
    assert rows is not None
    assert rows.tolist() == [0, 1, 5]
    assert (part.seq_lens, part.cu_seqlens.tolist()) == ((2, 1), [0, 2, 3])
    assert part.token_ids is not None
    assert part.skip_tokens is not None
    assert (part.token_ids.tolist(), part.skip_tokens.tolist()) == ([0, 1, 5], [1, 2])
    assert metadata.select([0, 1, 2]) == (None, metadata)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_sizes": [1]}, "chunk_sizes holds 1 values for 2 sequences"),
        ({"seq_starts": [0, 0, 0]}, "seq_starts holds 3 values"),
        ({"params": []}, "params holds 0 values"),
        ({"chunk_sizes": [3, 3]}, "3 tokens at 0 do not lie in a sequence of 2"),
    ],
)
def test_lengths_that_do_not_fit(arguments: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolingMetadata.create([2, 3], **arguments)


def test_a_slice_without_state_is_refused() -> None:
    metadata = PoolingMetadata.create([2, 3], chunk_sizes=[1, 3])
    with pytest.raises(ValueError, match="2 sequences have no running state"):
        metadata.update_all(torch.zeros(4, 4))
