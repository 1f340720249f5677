"""Chunks of a sequence give the pooled row of the whole sequence, with tensors and with arrays."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.pooling import PoolerFactory, PoolingStates
from penstock.engine.pooling.array_ops import ArrayOps
from penstock.engine.pooling.row_ops import RowOps
from penstock.engine.pooling.states import update_states
from penstock.engine.pooling.tensor_ops import TensorOps
from penstock.engine.protocol.tasks import PoolingType

from ...tables import cases
from .conftest import SEQUENCE_TYPES, make_metadata


def rows(num_rows: int = 65, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(num_rows, 12).to(dtype), torch.rand(num_rows)


def as_tensor(row: Any) -> Tensor:
    return row if isinstance(row, Tensor) else torch.from_numpy(row)


def pool_whole(pooling_type: str, hidden: Any, weights: Any, skip_tokens: int = 0) -> Tensor:
    metadata = make_metadata([len(hidden)], skip_tokens=torch.tensor([skip_tokens], dtype=torch.int32))
    return PoolerFactory.create(pooling_type).pool(hidden, metadata, weights[:, None])[0]


def assert_close(row: Any, expected: Tensor) -> None:
    torch.testing.assert_close(as_tensor(row), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("chunk_size", "skip_tokens"), [(1, 3), (7, 0), (7, 70), (64, 3), (65, 0)])
@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_give_the_row_of_the_whole_sequence(
    ops: RowOps[Any], dtype: torch.dtype, pooling_type: PoolingType, chunk_size: int, skip_tokens: int
) -> None:
    hidden, weights = rows(dtype=dtype)
    if isinstance(ops, ArrayOps):
        hidden = hidden.float()  # numpy has no bfloat16
    states = PoolingStates.initialize(12, [pooling_type], ops)
    for start in range(0, len(hidden), chunk_size):
        part = slice(start, start + chunk_size)
        states.update(hidden[part], weights[: part.stop], skip_tokens=skip_tokens)
        states.finalize()  # keeps the state
    assert type(states.finalize()) is (Tensor if isinstance(ops, TensorOps) else np.ndarray)
    assert_close(states.finalize(), pool_whole(pooling_type, hidden, weights, skip_tokens))


@pytest.mark.parametrize(("strategy", "expected"), [("mean", 0.5), ("mean_sqrt_len", 1.0)])
def test_sums_are_accumulated_in_float64(ops: RowOps[Any], strategy: str, expected: float) -> None:
    states = PoolingStates.initialize(8, strategy, ops)
    for value in (1.0, 1e8, 1.0, -1e8):
        states.update(np.full((1, 8), value, np.float32))
    assert states.finalize().tolist() == [expected] * 8


def test_nan_in_one_chunk_leaves_other_states_finite(ops: RowOps[Any]) -> None:
    hidden = ops.rows_of(np.repeat(np.array([np.nan, 1.0], np.float32), 24).reshape(4, 12))
    states = [PoolingStates.initialize(12, ["mean", "max"], ops) for _ in range(2)]
    zeros, ends = np.zeros(2, np.int64), np.array([2, 4])
    update_states(states, hidden, ends - 2, ends, zeros, zeros, [None, None])
    assert math.isnan(states[0].finalize()[0])
    assert states[1].finalize().tolist() == [1.0] * 24


@pytest.mark.parametrize("strategy", ["cls", "last", "max", "mean"])
def test_state_keeps_one_row_of_its_batch(ops: RowOps[Any], strategy: str) -> None:
    hidden = ops.rows_of(np.ones((64, 12), np.float32))
    states = [PoolingStates.initialize(12, strategy, ops) for _ in range(32)]
    zeros, ends = np.zeros(32, np.int64), np.arange(2, 66, 2)
    update_states(states, hidden, ends - 2, ends, zeros, zeros, [None] * 32)
    (row,) = states[0].running.values()
    if isinstance(row, Tensor):
        num_bytes = row.untyped_storage().nbytes()
    else:
        num_bytes = (row if row.base is None else row.base).nbytes
    assert num_bytes <= 12 * 8  # the means are float64


@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
@pytest.mark.parametrize("skip_tokens", [0, 25])
def test_repeated_rows_are_pooled_once(pooling_type: PoolingType, skip_tokens: int) -> None:
    hidden, weights = rows()
    states = PoolingStates.initialize(12, [pooling_type])
    for start, end in ((0, 20), (5, 15), (0, 30), (30, 50), (49, 65)):
        states.update(hidden[start:end], weights[:end], chunk_start=start, skip_tokens=skip_tokens)
        assert states.num_tokens == max(end, 20)
    assert_close(states.finalize(), pool_whole(pooling_type, hidden, weights, skip_tokens))


def test_attention_copies_its_rows_in_their_dtype() -> None:
    hidden, weights = rows(dtype=torch.bfloat16)
    buffer = torch.empty(30, 12, dtype=torch.bfloat16)
    states = PoolingStates.initialize(12, [PoolingType.ATTENTION])
    for part in hidden.split(30):
        buffer[: len(part)] = part
        states.update(buffer[: len(part)], weights if len(part) == 5 else None)
    stored = torch.cat(states.rows)
    assert stored.dtype is torch.bfloat16
    assert torch.equal(stored, hidden)
    assert_close(states.finalize(), (weights[:, None] * hidden.float()).sum(0) / weights.sum())
    states.update(hidden[:0])
    with pytest.raises(ValueError, match="needs the attention weights"):
        states.finalize()


def test_weights_of_the_chunk_alone_change_nothing() -> None:
    hidden, weights = rows()
    states = PoolingStates.initialize(12, "attention")
    states.update(hidden[:60], weights[:60])
    with pytest.raises(ValueError, match=r"weights must be \[65\], those of all tokens .* 5 rows, got \[5\]"):
        states.update(hidden[60:], weights[60:])
    states.update(hidden[60:], weights)
    assert_close(states.finalize(), pool_whole("attention", hidden, weights))


def test_attention_weights_of_wrong_shape_are_rejected() -> None:
    hidden, weights = rows()
    pooler = PoolerFactory.create(PoolingType.ATTENTION)
    with pytest.raises(ValueError, match=r"must be \[T, H\] or \[T\], got \[65, 1, 1\]"):
        pooler.pool(hidden, make_metadata([65]), weights[:, None, None])
    with pytest.raises(ValueError, match=r"weights must be torch.float32 \[65\]"):
        pooler.pool(hidden, make_metadata([65]), weights[:60])


@pytest.mark.parametrize("strategy", ["Mean", PoolingType.MEAN, ["MEAN"], (PoolingType.MEAN,)])
def test_strategy_is_one_name_or_a_list(strategy: str | list[str]) -> None:
    assert PoolingStates.initialize(12, strategy).pooling_types == (PoolingType.MEAN,)
    assert PoolingStates.initialize(hidden_dim=12, strategy=["max", "first"]).finalize().tolist() == [0.0] * 24


@cases(__file__, "types", "message")
def test_types_that_cannot_be_combined_are_rejected(types: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolingStates.initialize(12, types)


@pytest.mark.parametrize("name", ["mean", "attention", "all"])
def test_pooler_rejects_chunks(name: str) -> None:
    with pytest.raises(ValueError, match="takes whole sequences"):
        PoolerFactory.create(name).pool(torch.zeros(4, 12), make_metadata([9], chunk_sizes=[4]))
