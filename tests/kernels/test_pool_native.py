"""pool_native accepts arrays and tensors of every layout, with and without the C library."""

import enum
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.protocol.tasks import PoolingType
from penstock.kernels.cpu import PoolingCode, shared_library
from penstock.kernels.pooling import _native, pool_native

WIDTH = 20
NUMBERS = np.random.default_rng(5)
ROWS = NUMBERS.standard_normal((30, WIDTH), np.float32)
STARTS, LENGTHS = [4, 0, 20, 4, 30], [7, 1, 10, 26, 0]
STRATEGIES = ("cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean")


class Strategy(enum.Enum):
    """An enum of the caller; pool_native reads the names of its members."""

    FIRST = enum.auto()
    ATTENTION_WEIGHTED = enum.auto()


@pytest.fixture(autouse=True, params=["library", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test with and without the C library."""
    if request.param == "torch":
        monkeypatch.setattr(_native, "shared_library", lambda: None)
    elif shared_library() is None:
        pytest.skip("needs the C library: make native")


def expect(rows: np.ndarray, strategy: str) -> np.ndarray:
    functions = {
        "cls": lambda x: x[0],
        "last": lambda x: x[-1],
        "mean": lambda x: x.mean(0),
        "max": lambda x: x.max(0),
        "mean_sqrt_len": lambda x: x.sum(0) / np.sqrt(len(x)),
        "weighted_mean": lambda x: np.average(x, axis=0, weights=np.arange(1, len(x) + 1)),
    }
    pooled = np.zeros((len(STARTS), WIDTH))
    for row, start, length in zip(pooled, STARTS, LENGTHS, strict=True):
        if length:
            row[:] = functions[strategy](rows[start : start + length].astype(np.float64))
    return pooled


def assert_close(actual: object, rows: np.ndarray, strategy: str) -> None:
    np.testing.assert_allclose(np.asarray(actual), expect(rows, strategy), atol=5e-6, rtol=5e-6)


def forms(rows: np.ndarray) -> dict[str, Any]:
    wide = np.full((60, WIDTH * 3), np.nan, np.float32)
    wide[::2, 1 : 3 * WIDTH : 3] = rows
    raw = bytearray(rows.nbytes + 1)
    raw[1:] = rows.tobytes()
    read_only = rows.copy()
    read_only.flags.writeable = False
    return {
        "float32": rows,
        "every third column": wide[::2, 1 : 3 * WIDTH : 3],
        "by columns": np.asfortranarray(rows),
        "not aligned": np.frombuffer(raw, np.float32, offset=1).reshape(rows.shape),
        "read only": read_only,
        "other byte order": rows.astype(">f4"),
        "tensor": torch.from_numpy(rows),
        "tensor transposed": torch.from_numpy(rows).T.contiguous().T,
        "tensor with gradient": torch.from_numpy(rows).clone().requires_grad_(),
    }


@pytest.mark.parametrize("form", forms(ROWS))
def test_every_layout_of_rows_gives_equal_results(form: str) -> None:
    for strategy in STRATEGIES:
        pooled = pool_native(forms(ROWS)[form], STARTS, LENGTHS, strategy)
        assert type(pooled) is (torch.Tensor if "tensor" in form else np.ndarray)
        assert np.asarray(pooled).dtype == np.float32
        assert_close(pooled, ROWS, strategy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_of_16_bits_are_pooled_in_float32(strategy: str, dtype: torch.dtype) -> None:
    rows = torch.from_numpy(ROWS).to(dtype)
    pooled = pool_native(rows, STARTS, LENGTHS, strategy)
    assert pooled.dtype is torch.float32
    assert_close(pooled, rows.float().numpy(), strategy)


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        *(lambda v, t=t: np.array(v, t) for t in (np.int8, np.uint64)),
        torch.tensor,
        lambda v: np.repeat(np.array(v), 2)[::2],
        lambda v: torch.tensor(v).repeat_interleave(3)[::3],
    ],
)
def test_indices_may_have_any_integer_type(make: Any) -> None:
    assert_close(pool_native(ROWS, make(STARTS), make(LENGTHS), "mean"), ROWS, "mean")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("FIRST", "cls"),
        ("Last-Token", "last"),
        (Strategy.FIRST, "cls"),
        (PoolingType.MEAN_SQRT_LEN, "mean_sqrt_len"),
        (PoolingCode.WEIGHTED_MEAN, "weighted_mean"),
    ],
)
def test_strategy_may_be_a_name_or_enum_member(given: Any, kind: str) -> None:
    assert np.array_equal(pool_native(ROWS, STARTS, LENGTHS, given), pool_native(ROWS, STARTS, LENGTHS, kind))


def test_empty_sequences_give_zeros() -> None:
    assert pool_native(ROWS, [], [], "mean").shape == (0, WIDTH)
    assert pool_native(torch.from_numpy(ROWS), torch.tensor([]), torch.tensor([]), "mean").shape == (0, WIDTH)
    for strategy in STRATEGIES:
        assert not pool_native(ROWS[:0], [0, 0], [0, 0], strategy).any()


@pytest.mark.parametrize(
    ("starts", "lengths", "message"),
    [
        ([0, 28], [3, 3], "sequence 1 has 3 rows from row 28 on; hidden_states has 30 rows"),
        ([31], [0], "sequence 0 has 0 rows from row 31 on"),
        ([0], [-2], "sequence 0 has -2 rows"),
        (np.array([2**32 + 1]), np.array([1]), "sequence 0 has 1 rows from row 4294967297 on"),
        (np.array([1]), np.array([2**63 - 1]), "sequence 0 has 9223372036854775807 rows"),
        (np.array([2**64 - 1], np.uint64), np.array([1], np.uint64), "from row 18446744073709551615 on"),
        ([0, 1], [1], "seq_starts has 2 values and seq_lens 1"),
        ([[0]], [[1]], r"seq_starts must be \[N\], got \[1, 1\]"),
    ],
)
def test_sequence_outside_the_rows_is_rejected(starts: Any, lengths: Any, message: str) -> None:
    for rows in (ROWS, torch.from_numpy(ROWS)):
        with pytest.raises(ValueError, match=message):
            pool_native(rows, starts, lengths, "mean")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((ROWS.tolist(), [0], [1], "mean"), TypeError, "must be a numpy array or a torch tensor, got list"),
        ((ROWS.astype(np.int32), [0], [1], "mean"), TypeError, "hidden_states must be of a float type, got int32"),
        ((ROWS[0], [0], [1], "mean"), ValueError, r"must be \[T, D\] with D at least 1, got \[20\]"),
        ((ROWS[:, :0], [0], [1], "mean"), ValueError, r"got \[30, 0\]"),
        ((ROWS, [0.0], [1], "mean"), TypeError, "seq_starts must hold integers, got float64"),
        ((ROWS, [0], torch.tensor([True]), "mean"), TypeError, "seq_lens must hold integers, got bool"),
        ((ROWS, 0, [1], "mean"), TypeError, "seq_starts must be an array, a tensor or a list of integers, got int"),
        ((ROWS, [0], [1], "median"), ValueError, "strategy must be one of cls, last, mean, .*, got 'median'"),
        ((ROWS, [0], [1], "weighted"), ValueError, "needs weights: use `pool`"),
        ((ROWS, [0], [1], Strategy.ATTENTION_WEIGHTED), ValueError, "got 'ATTENTION_WEIGHTED'"),
        ((ROWS, [0], [1], 2), TypeError, "strategy must be a name or an enum member, got int"),
    ],
)
def test_invalid_argument_is_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pool_native(*arguments)


@pytest.mark.gpu
def test_rows_on_a_gpu_stay_there() -> None:
    pooled = pool_native(torch.from_numpy(ROWS).cuda(), STARTS, LENGTHS, "mean")
    assert pooled.is_cuda
    assert_close(pooled.cpu(), ROWS, "mean")
