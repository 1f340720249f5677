"""attention_paged: every backend against the reference, chunks against the whole, and memory that must not be read."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.kernels.attention import PagedLengths, attention, attention_paged
from penstock.kernels.backends import capability_of

from ..interpreter import IS_INTERPRETED, needs_triton
from .assertions import assert_close
from .attention_reference import attention_paged_reference
from .cases import PAGED_CASES, PagedCase, PagedInputs, make_block_table, make_cu_seqlens, make_paged_inputs
from .parameters import FLOAT_DTYPES, Place, every_pair, places

# Of the largest absolute value of v: what attention averages.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "narrow": {"window": (3, 3)},
    "window": {"window": (100, -1)},
    "capped": {"softcap": 5.0},
    "capped_window": {"softcap": 5.0, "window": (40, 0)},
}

PLACES = places("sdpa", cuda=("sdpa", "triton", None))


def arguments(case: PagedCase, inputs: PagedInputs, options: dict[str, Any]) -> dict[str, Any]:
    names = ("q", "k_cache", "v_cache", "block_tables", "cu_seqlens", "seq_lens", "context_lens")
    return {name: getattr(inputs, name) for name in names} | {"scale": case.head_size**-0.5} | options


def attend(case: PagedCase, inputs: PagedInputs, backend: Any = None, **options: Any) -> torch.Tensor:
    return attention_paged(**arguments(case, inputs, options), backend=backend)


def expect(case: PagedCase, inputs: PagedInputs, **options: Any) -> torch.Tensor:
    return attention_paged_reference(**arguments(case, inputs, options))


def largest(inputs: PagedInputs) -> float:
    return inputs.v_cache.nan_to_num().abs().max().item()


def is_quick(dtype: torch.dtype, case: PagedCase | None = None, mask: str = "all", **_: Any) -> bool:
    """The interpreter takes milliseconds for a row, and knows no products in bfloat16."""
    knows = dtype == torch.float32 or (dtype == torch.float16 and mask == "all")
    return not IS_INTERPRETED or (knows and (case is None or case.is_quick))


@every_pair(is_quick, place=PLACES, case=PAGED_CASES, mask=list(MASKS), dtype=FLOAT_DTYPES)
def test_backend_equals_reference(place: Place, case: PagedCase, mask: str, dtype: torch.dtype) -> None:
    """All of the caches that belongs to no token of a chunk's sequence is NaN, and the tables end in no block."""
    inputs = make_paged_inputs(case, dtype, place.device)
    expected = expect(case, inputs, **MASKS[mask])
    assert not expected.isnan().any()
    actual = attend(case, inputs, place.backend, **MASKS[mask])
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    assert_close("attended", expected, actual, TOLERANCE[dtype], largest(inputs))


@every_pair(
    place=[Place(None, "cpu"), Place(None, "cuda")],
    dtype=[torch.float32, torch.bfloat16],
    mask=["all", "window", "capped"],
    chunk_size=[1, 7, 64, 100],
    is_scattered=[False, True],
)
def test_chunks_equal_the_whole(
    place: Place, dtype: torch.dtype, mask: str, chunk_size: int, is_scattered: bool
) -> None:
    device = place.device
    length, block_size = (60 if chunk_size == 1 else 300), 16
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, heads, 32, generator=generator).to(dtype).to(device) for heads in (4, 2, 2))
    options: dict[str, Any] = {"scale": 0.2} | MASKS[mask]
    cu_seqlens = make_cu_seqlens((length,), device)
    whole = attention(q, k, v, cu_seqlens, [length], max_seqlen=length, is_causal=True, **options)
    table = make_block_table(-(-length // block_size), is_scattered)
    slots = (table[:, None].long() * block_size + torch.arange(block_size)).flatten()[:length].to(device)
    k_cache, v_cache = (torch.full((64, block_size, 2, 32), float("nan"), dtype=dtype, device=device) for _ in "kv")
    for start in range(0, length, chunk_size):
        rows = slice(start, min(start + chunk_size, length))
        count = rows.stop - rows.start
        for cache, x in ((k_cache, k), (v_cache, v)):
            cache.view(-1, *cache.shape[2:])[slots[rows]] = x[rows]
        actual = attention_paged(
            q[rows], k_cache, v_cache, table[None], make_cu_seqlens((count,), device), [count], [start], **options
        )
        assert_close(f"rows from {start}", whole[rows], actual, TOLERANCE[dtype], v.abs().max().item())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets triton, tells of every NaN
@every_pair(is_quick, place=PLACES, mask=list(MASKS), dtype=FLOAT_DTYPES, poison=[float("nan"), float("inf")])
def test_poisoned_sequence_touches_no_other(place: Place, mask: str, dtype: torch.dtype, poison: float) -> None:
    case = PagedCase("", ((9, 5), (20, 3), (0, 13), (34, 1)), 4, 2, 16)
    inputs = make_paged_inputs(case, dtype, place.device)
    expected = expect(case, inputs, **MASKS[mask])
    scale = inputs.v_cache.nan_to_num().abs().max().item()
    for n in (1, 2):
        blocks = inputs.block_tables[n, : -(-sum(case.chunks[n]) // case.block_size)].long().to(place.device)
        inputs.k_cache[blocks], inputs.v_cache[blocks] = poison, poison
        inputs.q[inputs.cu_seqlens[n] : inputs.cu_seqlens[n + 1]] = poison
    actual = attend(case, inputs, place.backend, **MASKS[mask])
    for n in (0, 3):
        rows = slice(inputs.cu_seqlens[n], inputs.cu_seqlens[n + 1])
        assert_close(f"sequence {n}", expected[rows], actual[rows], TOLERANCE[dtype], scale)
    assert not actual[inputs.cu_seqlens[1] : inputs.cu_seqlens[2]].isfinite().any()


@every_pair(lambda **_: not IS_INTERPRETED, place=PLACES, factor=[40.0, -40.0], dtype=[torch.float32, torch.float16])
def test_scores_beyond_the_range_of_exp(place: Place, factor: float, dtype: torch.dtype) -> None:
    case = PagedCase("", ((30, 9), (600, 300)))
    inputs = make_paged_inputs(case, dtype, place.device)
    inputs.q.copy_(inputs.q.abs() * factor)
    inputs.k_cache.copy_(inputs.k_cache.abs())
    for options in ({}, {"window": (50, 0)}):
        # Scores of hundreds: their own rounding decides between neighbours.
        tolerance = 1e-4 if dtype == torch.float32 else 0.2
        actual = attend(case, inputs, place.backend, **options)
        assert_close("attended", expect(case, inputs, **options), actual, tolerance, largest(inputs))


def test_table_on_the_device_and_no_chunks(device: torch.device) -> None:
    case = PAGED_CASES[1]
    inputs = make_paged_inputs(case, torch.float32, device)
    expected = attend(case, inputs)
    assert torch.equal(expected, attend(case, replace(inputs, block_tables=inputs.block_tables.to(device))))
    q = torch.empty(0, 4, 32, device=device)
    none = torch.empty(0, 0, dtype=torch.int32)
    cache = inputs.k_cache.new_zeros(1, 4, 2, 32)
    assert attention_paged(q, cache, cache, none, make_cu_seqlens((), device), (), (), scale=1.0).shape == (0, 4, 32)


@needs_triton
@pytest.mark.parametrize(
    ("head_size", "capability", "expected"),
    [
        (64, (8, 0), "triton"),
        (256, (9, 0), "triton"),
        (257, (9, 0), "sdpa"),
        (320, (9, 0), "sdpa"),
        (64, (7, 5), "sdpa"),
    ],
)
def test_wide_heads_and_old_devices_take_sdpa(
    head_size: int, capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.kernels.attention import _triton

    taken: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("penstock.kernels.attention.attention_paged_sdpa", lambda *_: taken.append("sdpa"))
    monkeypatch.setattr(_triton, "attention_triton", lambda *_: taken.append("triton"))
    capability_of.cache_clear()
    with FakeTensorMode():
        q = torch.empty(3, 4, head_size, device="cuda")
        cache = torch.empty(5, 4, 2, head_size, device="cuda")
        table = torch.zeros(1, 1, dtype=torch.int32)
        cu_seqlens = torch.zeros(2, dtype=torch.int32, device="cuda")
        attention_paged(q, cache, cache, table, cu_seqlens, (3,), (0,), scale=1.0)
    capability_of.cache_clear()
    assert taken == [expected]


def test_heads_wider_than_the_kernel_knows(device: torch.device) -> None:
    inputs = make_paged_inputs(case := PagedCase("", ((5, 3), (0, 9)), 4, 2, 320), torch.float32, device)
    assert_close("attended", expect(case, inputs), attend(case, inputs), 4e-6, largest(inputs))
    if find_spec("triton") is not None:
        with pytest.raises(ValueError, match="heads of at most 256, got 320"):
            attend(case, inputs, backend="triton")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.ones(3, 4, 16)}, r"q must be \[T, H, K\]"),
        ({"q": torch.ones(3, 3, 8)}, "heads of q must be a multiple"),
        ({"q": torch.ones(3, 4, 8).half()}, "must share float32, bfloat16 or float16"),
        ({"k_cache": torch.ones(4, 5, 2, 8).transpose(0, 1)}, "must be contiguous"),
        ({"cu_seqlens": make_cu_seqlens((3,))}, r"cu_seqlens must be int32 \[3\]"),
        ({"seq_lens": (1, 1)}, "seq_lens must sum to the 3 rows"),
        ({"seq_lens": (4, -1)}, "seq_lens and context_lens must be 2 numbers from 0 on"),
        ({"context_lens": (1,)}, "context_lens must be 2 numbers"),
        ({"context_lens": (1, -1)}, "context_lens must be 2 numbers"),
        ({"block_tables": torch.zeros(2, 3)}, r"block_tables must be int32 \[2, M\]"),
        ({"context_lens": (0, 10)}, "too few for 12"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"backend": "flash"}, "backend must be one of"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.ones(3, 4, 8),
        "k_cache": torch.ones(5, 4, 2, 8),
        "v_cache": torch.ones(5, 4, 2, 8),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "cu_seqlens": make_cu_seqlens((1, 2)),
        "seq_lens": (1, 2),
        "context_lens": (0, 5),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        attention_paged(**(arguments | changes))


def test_lengths_are_checked_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers pass the lengths of their batch; other lists are checked anew."""
    inputs = make_paged_inputs(case := PagedCase("", ((5, 3), (0, 9)), 4, 2, 16), torch.float32, torch.device("cpu"))
    past, rows = (tuple(numbers) for numbers in zip(*case.chunks, strict=True))
    lengths = PagedLengths.of(rows, past)
    assert (lengths.num_rows, lengths.longest, lengths.longest_sequence) == (12, 9, 9)
    given = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_tables, inputs.cu_seqlens)
    expected = attention_paged(*given, rows, past, scale=1.0)
    made: list[object] = []
    original = PagedLengths.of
    monkeypatch.setattr(PagedLengths, "of", lambda *lists: made.append(lists) or original(*lists))
    for _ in range(3):
        assert torch.equal(attention_paged(*given, rows, past, scale=1.0, lengths=lengths), expected)
    assert not made
    attention_paged(*given, list(rows), past, scale=1.0, lengths=lengths)
    with pytest.raises(ValueError, match="seq_lens must sum"):
        attention_paged(*given, (1, 1), past, scale=1.0, lengths=lengths)
    assert len(made) == 2
