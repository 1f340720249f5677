"""add_norm and embed_norm on triton equal their torch path, which equals torch's norms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.norm import Embeddings, Norm, NormKind, add_norm, embed_norm

from .assertions import assert_close
from .parameters import FLOAT_DTYPES, TARGETS, Target, every_pair

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
SIZES = [(1, 1), (17, 65), (33, 384), (3, 5000), (2, 8192)]

kinds = pytest.mark.parametrize("kind", ["layer", "rms"])


def make_norm(kind: NormKind, width: int, dtype: torch.dtype, device: torch.device | str, *, bias: bool = True) -> Norm:
    generator = torch.Generator().manual_seed(width)
    weight, shift = (torch.randn(width, generator=generator).to(dtype).to(device) for _ in range(2))
    return Norm(kind, weight, shift if bias else None, 1e-5)


def random_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Tensor:
    """Rows with a mean other than 0, as a view of a wider tensor."""
    generator = torch.Generator().manual_seed(num_rows * 10_000 + width + seed)
    wide = torch.randn(num_rows, width + 16, generator=generator) + 3 * torch.randn(num_rows, 1, generator=generator)
    return wide.to(dtype).to(device)[:, :width]


@pytest.mark.parametrize("bias", [True, False])
@kinds
def test_reference_equals_torch(kind: NormKind, bias: bool) -> None:
    cpu = torch.device("cpu")
    norm = make_norm(kind, 7, torch.float32, cpu, bias=bias)
    x, residual = (random_rows(2, 7, torch.float32, cpu, seed) for seed in range(2))
    normed, sum_ = add_norm(x, norm, residual=residual, return_sum=True, backend="torch")
    assert sum_ is not None
    shift = norm.bias.double() if norm.bias is not None else torch.zeros(7, dtype=torch.float64)
    total = (x + residual).double()
    if kind == "layer":
        expected = F.layer_norm(total, (7,), norm.weight.double(), shift, norm.eps)
    else:
        expected = F.rms_norm(total, (7,), norm.weight.double(), norm.eps) + shift
    assert_close("normed", expected, normed, 1e-5)
    assert_close("sum", total, sum_, 1e-6)


@every_pair(target=TARGETS, kind=["layer", "rms"], size=SIZES, dtype=FLOAT_DTYPES)
def test_backend_equals_reference(target: Target, kind: NormKind, size: tuple[int, int], dtype: torch.dtype) -> None:
    backend, device = target
    num_rows, width = size
    x, residual = (random_rows(num_rows, width, dtype, device, seed) for seed in range(2))
    copies = x.clone(), residual.clone()
    options = {"norm": make_norm(kind, width, dtype, device), "residual": residual, "return_sum": True}
    expected, expected_sum = add_norm(x, **options, backend="torch")
    normed, sum_ = add_norm(x, **options, backend=backend)
    assert expected_sum is not None
    assert sum_ is not None
    assert (normed.dtype, sum_.dtype) == (dtype, dtype)
    assert_close("normed", expected, normed, TOLERANCE[dtype])
    assert_close("sum", expected_sum, sum_, TOLERANCE[dtype])
    assert torch.equal(x, copies[0])
    assert torch.equal(residual, copies[1])


@every_pair(target=TARGETS, kind=["layer", "rms"], bias=[True, False], residual=[True, False], return_sum=[True, False])
def test_optional_terms_may_be_left_out(
    target: Target, kind: NormKind, bias: bool, residual: bool, return_sum: bool
) -> None:
    backend, device = target
    x, other = (random_rows(6, 65, torch.float32, device, seed) for seed in range(2))
    options: dict[str, Any] = {
        "norm": make_norm(kind, 65, torch.float32, device, bias=bias),
        "residual": other if residual else None,
        "return_sum": return_sum,
    }
    expected, expected_sum = add_norm(x, **options, backend="torch")
    normed, sum_ = add_norm(x, **options, backend=backend)
    assert_close("normed", expected, normed, 1e-5)
    assert (sum_ is not None) == return_sum
    if sum_ is not None and expected_sum is not None:
        assert_close("sum", expected_sum, sum_, 1e-5)


def test_sum_has_the_dtype_of_the_residual(target: Target) -> None:
    backend, device = target
    x = random_rows(5, 63, torch.bfloat16, device)
    residual = random_rows(5, 63, torch.float32, device)
    normed, sum_ = add_norm(
        x, make_norm("rms", 63, torch.float32, device), residual=residual, return_sum=True, backend=backend
    )
    assert sum_ is not None
    assert (normed.dtype, sum_.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(sum_, x.float() + residual)


def test_rows_do_not_depend_on_each_other(target: Target) -> None:
    backend, device = target
    norm = make_norm("layer", 200, torch.float32, device)
    x = random_rows(21, 200, torch.float32, device)
    x[4] = float("nan")
    x[9, 3] = float("nan")
    together, _ = add_norm(x, norm, residual=x, backend=backend)
    assert together.isnan().all(1).nonzero().flatten().tolist() == [4, 9]
    alone = torch.cat([add_norm(x[i : i + 1], norm, residual=x[i : i + 1], backend=backend)[0] for i in range(21)])
    assert torch.equal(together.nan_to_num(nan=9.0), alone.nan_to_num(nan=9.0))


def test_batch_without_rows_gives_no_rows(target: Target) -> None:
    backend, device = target
    norm = make_norm("rms", 24, torch.float32, device)
    none = torch.ones(0, 24, device=device)
    normed, sum_ = add_norm(none, norm, return_sum=True, backend=backend)
    assert sum_ is not None
    assert normed.shape == sum_.shape == (0, 24)
    ids = torch.ones(0, dtype=torch.int64, device=device)
    tables = Embeddings(torch.ones(3, 24, device=device))
    assert embed_norm(ids, tables, norm, out_dtype=torch.float32, backend=backend).shape == (0, 24)


def make_embeddings(width: int, dtype: torch.dtype, device: torch.device | str) -> Embeddings:
    generator = torch.Generator().manual_seed(width)
    word = torch.randn(50, width, generator=generator).to(dtype)
    return Embeddings(word.to(device), torch.randn(2 * 20, width, generator=generator).to(device), 20)


@every_pair(
    target=TARGETS,
    size=[(1, 1), (19, 60), (33, 384), (2, 8192)],
    has=["words", "positions", "types"],
    dtype=FLOAT_DTYPES,
    index_dtype=[torch.int64, torch.int32],
)
def test_embeddings_equal_reference(
    target: Target, size: tuple[int, int], has: str, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    backend, device = target
    num_rows, width = size
    generator = torch.Generator().manual_seed(num_rows)
    ids, positions, types = (
        torch.randint(0, limit, (num_rows,), generator=generator).to(index_dtype).to(device) for limit in (50, 20, 2)
    )
    tables = make_embeddings(width, dtype, device)
    tables.word[7] = float("nan")
    run: Callable[..., Tensor] = embed_norm
    arguments = {
        "tables": tables if has != "words" else Embeddings(tables.word),
        "norm": make_norm("layer", width, torch.float32, device, bias=has != "words"),
        "positions": positions if has != "words" else None,
        "token_type_ids": types if has == "types" else None,
        "out_dtype": dtype,
    }
    expected = run(ids, **arguments, backend="torch")
    actual = run(ids, **arguments, backend=backend)
    assert actual.dtype == dtype
    assert_close("embedded", expected, actual, TOLERANCE[dtype])


def test_rows_wider_than_a_program_use_torch(target: Target) -> None:
    backend, device = target
    norm = make_norm("layer", 8193, torch.float32, device)
    x = random_rows(2, 8193, torch.float32, device)
    expected, _ = add_norm(x, norm, backend="torch")
    assert_close("chosen", expected, add_norm(x, norm)[0], 1e-5)
    if backend == "triton":
        with pytest.raises(ValueError, match="at most 8192 columns"):
            add_norm(x, norm, backend="triton")
