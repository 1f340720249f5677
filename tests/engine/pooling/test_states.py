"""Chunks of one sequence, added one after another, finish to what the whole gives."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.pooling import PoolerFactory, PoolingStates, SequencePooler
from penstock.engine.pooling.array_ops import ArrayOps
from penstock.engine.pooling.heads import RowOps
from penstock.engine.pooling.states import update_states
from penstock.engine.pooling.tensor_ops import TensorOps
from penstock.engine.protocol.tasks import PoolingType
from penstock.kernels.cpu import shared_machine

from .conftest import describe

SEQUENCE_TYPES = [t for t in PoolingType if not t.is_token_level]
TOKEN_TYPES = [t for t in PoolingType if t.is_token_level]


def rows(num_rows: int = 65, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(num_rows, 12).to(dtype), torch.rand(num_rows)


@pytest.fixture(params=["tensors", "arrays"])
def ops(request: pytest.FixtureRequest) -> RowOps[Any]:
    machine = shared_machine()
    if request.param == "arrays" and machine is None:
        pytest.skip("the C library is not built")
    return TensorOps() if request.param == "tensors" else ArrayOps(machine)


def as_tensor(row: Any) -> Tensor:
    return row if isinstance(row, Tensor) else torch.from_numpy(row)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 65])
@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
@pytest.mark.parametrize("skip_tokens", [0, 3, 70])
def test_chunks_of_either_kind_finish_to_the_whole(
    ops: RowOps[Any], pooling_type: PoolingType, chunk_size: int, skip_tokens: int
) -> None:
    hidden, weights = rows()
    states = PoolingStates.initialize(12, [pooling_type], ops)
    for start in range(0, len(hidden), chunk_size):
        part = slice(start, start + chunk_size)
        states.update(hidden[part], weights[: part.stop], skip_tokens=skip_tokens)
    skip = torch.tensor([skip_tokens], dtype=torch.int32)
    whole = PoolerFactory.create(pooling_type).pool(hidden, describe([65], skip_tokens=skip), weights[:, None])
    assert type(states.finalize()) is (Tensor if isinstance(ops, TensorOps) else np.ndarray)
    torch.testing.assert_close(as_tensor(states.finalize()), whole[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("values", [(1.0, 1e8, 1.0, -1e8), (1e8, 1.0, -1e8, 1.0), (1.0, -1e8, 1e8, 1.0)])
@pytest.mark.parametrize(("strategy", "expected"), [("mean", 0.5), ("mean_sqrt_len", 1.0)])
def test_rounding_errors_of_sums_are_kept(
    ops: RowOps[Any], strategy: str, expected: float, values: tuple[float, ...]
) -> None:
    """float32 alone would give 0 or 1 for the sum, not 2."""
    states = PoolingStates.initialize(8, strategy, ops)
    for value in values:
        states.update(np.full((1, 8), value, np.float32))
    assert states.finalize().tolist() == [expected] * 8


@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
def test_single_token_chunks_of_a_long_sequence(ops: RowOps[Any], pooling_type: PoolingType) -> None:
    """A large common offset, so that a running sum in float32 drifts."""
    hidden, weights = rows(1000)
    hidden += 30
    states = PoolingStates.initialize(12, [pooling_type], ops)
    for i in range(1000):
        states.update(hidden[i : i + 1], weights[: i + 1])
    places = torch.arange(1, 1001).double()
    expected = {
        "CLS": hidden[0],
        "LAST": hidden[-1],
        "MAX": hidden.amax(0),
        "MEAN": hidden.double().mean(0),
        "MEAN_SQRT_LEN": hidden.double().sum(0) / 1000**0.5,
        "WEIGHTED_MEAN": places @ hidden.double() / places.sum(),
        "ATTENTION": weights.double() @ hidden.double() / weights.double().sum(),
    }[pooling_type]
    torch.testing.assert_close(as_tensor(states.finalize()), expected.float(), atol=0, rtol=1e-6)


def test_poisoned_chunk_touches_no_other_state(ops: RowOps[Any]) -> None:
    hidden = ops.rows_of(np.repeat(np.array([np.nan, 1.0], np.float32), 24).reshape(4, 12))
    states = [PoolingStates.initialize(12, ["mean", "max"], ops) for _ in range(2)]
    zeros, ends = np.zeros(2, np.int64), np.array([2, 4])
    update_states(states, hidden, ends - 2, ends, zeros, zeros, [None, None])
    assert states[0].finalize()[0] != states[0].finalize()[0]
    assert states[1].finalize().tolist() == [1.0] * 24


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
@pytest.mark.parametrize("skip_tokens", [0, 3])
def test_chunks_finish_to_the_whole(
    pooling_type: PoolingType, dtype: torch.dtype, chunk_size: int, skip_tokens: int
) -> None:
    hidden, weights = rows(dtype=dtype)
    states = PoolingStates.initialize(12, [pooling_type])
    for start in range(0, len(hidden), chunk_size):
        part = slice(start, start + chunk_size)
        states.update(hidden[part], weights[: part.stop], skip_tokens=skip_tokens)
    skip = torch.tensor([skip_tokens], dtype=torch.int32)
    metadata = describe([len(hidden)], skip_tokens=skip)
    whole = PoolerFactory.create(pooling_type).pool(hidden, metadata, weights[:, None])
    torch.testing.assert_close(states.finalize(), whole[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
@pytest.mark.parametrize("skip_tokens", [0, 25])
def test_rows_that_come_again_are_left_out(pooling_type: PoolingType, skip_tokens: int) -> None:
    hidden, weights = rows()
    once, again = (PoolingStates.initialize(12, [pooling_type]) for _ in range(2))
    once.update(hidden, weights, skip_tokens=skip_tokens)
    for start, end in ((0, 20), (5, 15), (0, 30), (30, 50), (49, 65)):
        again.update(hidden[start:end], weights[:end], chunk_start=start, skip_tokens=skip_tokens)
        assert again.num_tokens == max(end, 20)
    torch.testing.assert_close(again.finalize(), once.finalize(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("pooling_type", TOKEN_TYPES)
def test_token_level_states_count_and_keep_nothing(pooling_type: PoolingType) -> None:
    states = PoolingStates.initialize(12, [pooling_type])
    for part in rows()[0].split(30):
        states.update(part)
    assert states.is_token_level
    assert (states.num_tokens, states.running, states.rows) == (65, {}, [])
    with pytest.raises(ValueError, match=f"{pooling_type} pooling go out with their chunks"):
        states.finalize()


def test_attention_keeps_copies_of_its_rows_in_their_type() -> None:
    hidden, weights = rows(dtype=torch.bfloat16)
    buffer = torch.empty(30, 12, dtype=torch.bfloat16)
    states = PoolingStates.initialize(12, [PoolingType.ATTENTION])
    for part in hidden.split(30):
        buffer[: len(part)] = part
        states.update(buffer[: len(part)], weights if len(part) == 5 else None)
    kept = torch.cat(states.rows)
    assert kept.dtype is torch.bfloat16
    assert torch.equal(kept, hidden)
    expected = (weights[:, None] * hidden.float()).sum(0) / weights.sum()
    torch.testing.assert_close(states.finalize(), expected, atol=1e-6, rtol=1e-6)
    states.update(hidden[:0])
    with pytest.raises(ValueError, match="needs the attention weights"):
        states.finalize()


@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
def test_weights_of_the_chunk_alone_are_refused(pooling_type: PoolingType) -> None:
    hidden, weights = rows()
    states = PoolingStates.initialize(12, [pooling_type])
    states.update(hidden[:60], weights[:60])
    with pytest.raises(ValueError, match=r"weights must be \[65\], those of all tokens .* 5 rows, got \[5\]"):
        states.update(hidden[60:], weights[60:])
    states.update(hidden[60:], weights)  # the failed call has changed nothing
    expected = PoolerFactory.create(pooling_type).pool(hidden, describe([65]), weights)
    torch.testing.assert_close(states.finalize(), expected[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
def test_arrays_are_taken_like_tensors(pooling_type: PoolingType, dtype: type) -> None:
    hidden, weights = (values.numpy().astype(dtype) for values in rows())
    hidden.flags.writeable = False
    states = PoolingStates.initialize(12, [pooling_type])
    for start in range(0, 65, 30):
        end = min(start + 30, 65)
        states.update(hidden[start:end], weights[:end])
    pooler = PoolerFactory.create(pooling_type)
    tensors = torch.from_numpy(hidden.astype(np.float32)), torch.from_numpy(weights.astype(np.float32))
    expected = pooler.pool(tensors[0], describe([65]), tensors[1])
    torch.testing.assert_close(pooler.pool(hidden, describe([65]), weights), expected)
    torch.testing.assert_close(pooler.pool(hidden, describe([65]), weights[:, None]), expected)
    torch.testing.assert_close(states.finalize(), expected[0], atol=1e-6, rtol=1e-6)


def test_attention_weights_of_another_shape_are_refused() -> None:
    hidden, weights = rows()
    pooler = PoolerFactory.create(PoolingType.ATTENTION)
    with pytest.raises(ValueError, match=r"must be \[T, H\] or \[T\], got \[65, 1, 1\]"):
        pooler.pool(hidden, describe([65]), weights[:, None, None])
    with pytest.raises(ValueError, match=r"weights must be torch.float32 \[65\]"):
        pooler.pool(hidden, describe([65]), weights[:60])


def test_token_pooler_takes_an_array() -> None:
    hidden, _ = rows()
    assert torch.equal(PoolerFactory.create("all").pool(hidden.numpy(), describe([60, 5])), hidden)


def test_only_last_may_leave_tokens_out() -> None:
    hidden, _ = rows()
    last = PoolingStates.initialize(12, [PoolingType.LAST])
    last.update(hidden[:4], chunk_start=10)
    last.update(hidden[5:9], chunk_start=40, skip_tokens=43)
    assert last.num_tokens == 44
    assert torch.equal(last.finalize(), hidden[8])
    with pytest.raises(ValueError, match="MEAN pooling needs every row, but a chunk begins at 10 and 0 tokens"):
        PoolingStates.initialize(12, [PoolingType.MEAN]).update(hidden, chunk_start=10)


def test_a_copy_goes_its_own_way() -> None:
    hidden, weights = rows()
    states = PoolingStates.initialize(12, [PoolingType.MAX, PoolingType.MEAN, PoolingType.ATTENTION])
    states.update(hidden[:40])
    copy = states.copy()
    copy.update(torch.full((25, 12), 9.0), weights)
    states.update(hidden[40:], weights)
    torch.testing.assert_close(states.finalize()[:24], torch.cat([hidden.amax(0), hidden.mean(0)]))
    assert copy.finalize()[0] == 9


@pytest.mark.parametrize("strategy", ["mean", "Mean", PoolingType.MEAN, ["MEAN"], (PoolingType.MEAN,)])
def test_a_strategy_by_name(strategy: str | list[str]) -> None:
    states = PoolingStates.initialize(12, strategy)
    assert states.pooling_types == (PoolingType.MEAN,)
    states.update(rows()[0])
    torch.testing.assert_close(states.finalize(), rows()[0].mean(0), atol=1e-6, rtol=1e-6)
    assert PoolingStates.initialize(hidden_dim=12, strategy=["max", "first"]).finalize().shape == (24,)
    with pytest.raises(ValueError, match="no pooling type 'median'; known are CLS, LAST, MEAN"):
        PoolingStates.initialize(12, "median")


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
