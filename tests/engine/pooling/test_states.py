"""Slices of one sequence, folded one after another, finish to what the whole gives."""

import pytest
import torch
from torch import Tensor

from penstock.engine.params import PoolingType
from penstock.engine.pooling import PoolerFactory, PoolingMetadata, PoolingStates, SequencePooler

SEQUENCE_TYPES = [t for t in PoolingType if not t.is_token_level]
TOKEN_TYPES = [t for t in PoolingType if t.is_token_level]


def rows(num_rows: int = 65, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(num_rows, 12).to(dtype), torch.rand(num_rows)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
@pytest.mark.parametrize("skip_tokens", [0, 3])
def test_slices_finish_to_the_whole(
    pooling_type: PoolingType, dtype: torch.dtype, chunk_size: int, skip_tokens: int
) -> None:
    hidden, weights = rows(dtype=dtype)
    states = PoolingStates.initialize(12, [pooling_type])
    for start in range(0, len(hidden), chunk_size):
        part = slice(start, start + chunk_size)
        states.update(hidden[part], weights[part], skip_tokens=skip_tokens)
    skip = torch.tensor([skip_tokens], dtype=torch.int32)
    metadata = PoolingMetadata.create([len(hidden)], skip_tokens=skip)
    whole = PoolerFactory.create(pooling_type).pool(hidden, metadata, weights[:, None])
    torch.testing.assert_close(states.finalize(), whole[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("pooling_type", TOKEN_TYPES)
def test_token_level_states_keep_copies_of_all_rows(pooling_type: PoolingType) -> None:
    hidden, _ = rows()
    buffer = torch.empty(30, 12)
    states = PoolingStates.initialize(12, [pooling_type])
    for part in hidden.split(30):
        buffer[: len(part)] = part
        states.update(buffer[: len(part)], token_ids=torch.arange(len(part)))
    assert states.is_token_level
    torch.testing.assert_close(states.finalize(), hidden, atol=0, rtol=0)
    assert torch.cat(states.token_ids).tolist() == [*range(30), *range(30), *range(5)]


def test_types_are_concatenated_in_order() -> None:
    hidden, _ = rows()
    states = PoolingStates.initialize(12, [PoolingType.MAX, PoolingType.CLS])
    for part in hidden.split(9):
        states.update(part)
    expected = torch.cat([hidden.amax(0), hidden[0]])
    torch.testing.assert_close(states.finalize(), expected, atol=0, rtol=0)


def test_finalize_leaves_the_state_as_it_is() -> None:
    hidden, _ = rows()
    states = PoolingStates.initialize(12, [PoolingType.MEAN])
    for part in hidden.split(9):
        states.update(part)
        states.finalize()
    torch.testing.assert_close(states.finalize(), hidden.mean(0), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "types", [[], [PoolingType.ALL, PoolingType.MEAN], [PoolingType.MEAN, PoolingType.STEP]], ids=str
)
def test_types_that_do_not_go_together(types: list[PoolingType]) -> None:
    with pytest.raises(ValueError, match="sequence-level or a single token-level one"):
        PoolingStates.initialize(12, types)


def test_every_type_has_a_pooler() -> None:
    for pooling_type in PoolingType:
        pooler = PoolerFactory.create(pooling_type)
        assert isinstance(pooler, SequencePooler) is not pooling_type.is_token_level


@pytest.mark.parametrize("head", [-1, 4])
def test_attention_head_out_of_range(head: int) -> None:
    with pytest.raises(ValueError, match=f"attention_head is {head}; the model has 4 heads"):
        PoolerFactory.create(PoolingType.ATTENTION, attention_head=head, num_heads=4)
