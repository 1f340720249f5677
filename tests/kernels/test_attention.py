"""attention and attention_paged equal their float32 references on every backend."""

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.kernels import attention as module, backends
from penstock.kernels.attention import _torch, attention, attention_paged
from penstock.kernels.attention._torch import has_flash_operator

from ..interpreter import IS_INTERPRETED
from ..tables import table
from .assertions import assert_close
from .attention_reference import attention_paged_reference, attention_reference
from .cases import (
    AttentionCase,
    AttentionInputs,
    PagedCase,
    PagedInputs,
    make_attention_inputs,
    make_block_table,
    make_cu_seqlens,
    make_paged_inputs,
)
from .parameters import FLOAT_DTYPES, Target, cases_of, every_pair, targets, tupled

ATTENTION_CASES, PAGED_CASES = cases_of(AttentionCase, "attention"), cases_of(PagedCase, "paged_attention")
# Shares of the largest absolute value of v.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MASKS, PAGED_MASKS = tupled(table(__file__, "masks")), tupled(table(__file__, "masks_of_paged_attention"))
UNCAPPED = [name for name, options in MASKS.items() if "softcap" not in options]
TARGETS = targets("sdpa", cuda=("sdpa", "varlen", "triton", None))
PAGED_TARGETS = targets("sdpa", cuda=("sdpa", "triton", None))
POISONS = [float("nan"), float("inf")]

ignores_nan_warnings = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter


def arguments(case: AttentionCase, inputs: AttentionInputs, options: dict[str, Any]) -> dict[str, Any]:
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "cu_seqlens": inputs.cu_seqlens, "seq_lens": case.seq_lens}
    return given | {"max_seqlen": max(case.seq_lens), "scale": case.head_size**-0.5} | options


def attend(case: AttentionCase, inputs: AttentionInputs, backend: Any = None, **options: Any) -> torch.Tensor:
    return attention(**arguments(case, inputs, options), backend=backend)


def expect(case: AttentionCase, inputs: AttentionInputs, **options: Any) -> torch.Tensor:
    return attention_reference(**arguments(case, inputs, options))


def paged_arguments(case: PagedCase, inputs: PagedInputs, options: dict[str, Any]) -> dict[str, Any]:
    names = ("q", "k_cache", "v_cache", "block_tables", "cu_seqlens", "seq_lens", "context_lens")
    return {name: getattr(inputs, name) for name in names} | {"scale": case.head_size**-0.5} | options


def attend_paged(case: PagedCase, inputs: PagedInputs, backend: Any = None, **options: Any) -> torch.Tensor:
    return attention_paged(**paged_arguments(case, inputs, options), backend=backend)


def expect_paged(case: PagedCase, inputs: PagedInputs, **options: Any) -> torch.Tensor:
    return attention_paged_reference(**paged_arguments(case, inputs, options))


def largest(inputs: AttentionInputs | PagedInputs) -> float:
    values = inputs.v if isinstance(inputs, AttentionInputs) else inputs.v_cache
    return values.nan_to_num(nan=0.0, posinf=0.0).abs().max().item()


def is_supported(
    target: Target, mask: str, dtype: torch.dtype, case: AttentionCase | None = None, bias: bool = False, **_: Any
) -> bool:
    """The interpreter takes milliseconds for a row and has no products in bfloat16."""
    if target.backend == "varlen":
        is_plain = not bias and "softcap" not in MASKS[mask]
        return is_plain and dtype != torch.float32 and (case is None or case.head_size % 8 == 0)
    is_quick = case is None or sum(case.seq_lens) * case.num_heads <= 800
    return not IS_INTERPRETED or (is_quick and dtype == torch.float32)


@every_pair(
    is_supported, target=TARGETS, case=ATTENTION_CASES, mask=list(MASKS), bias=[False, True], dtype=FLOAT_DTYPES
)
def test_backend_equals_reference(
    target: Target, case: AttentionCase, mask: str, bias: bool, dtype: torch.dtype
) -> None:
    inputs = make_attention_inputs(case, dtype, target.device)
    copies = [x.clone() for x in (inputs.q, inputs.k, inputs.v)]
    options = MASKS[mask] | ({"relative_bias": inputs.relative_bias} if bias else {})
    actual = attend(case, inputs, target.backend, **options)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 and "softcap" in options else TOLERANCE[dtype]
    assert_close("attended", expect(case, inputs, **options), actual, tolerance, largest(inputs))
    assert all(map(torch.equal, (inputs.q, inputs.k, inputs.v), copies))


@pytest.mark.parametrize(("length", "side"), [(127, "left"), (129, "right"), (300, "left"), (300, "right")])
def test_window_as_wide_as_a_block_equals_reference(length: int, side: str) -> None:
    case = AttentionCase("", (length,), 2, 1, 16)
    inputs = make_attention_inputs(case)
    for reach in sorted({0, 1, *range(125, 131), *range(length - 3, length + 1)}):
        options = {"window": (reach, 0) if side == "left" else (0, reach)}
        actual = attend(case, inputs, "sdpa", **options)
        assert_close(str(reach), expect(case, inputs, **options), actual, TOLERANCE[torch.float32], largest(inputs))


@pytest.mark.parametrize("mask", MASKS)
def test_blocks_of_rows_equal_reference(monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    monkeypatch.setattr(_torch, "MAX_BLOCK_SCORES", 1 << 14)
    case = AttentionCase("", (515, 12), 4, 2, 32)
    inputs = make_attention_inputs(case)
    for bias in (None, inputs.relative_bias):
        options = MASKS[mask] | {"relative_bias": bias}
        actual = attend(case, inputs, "sdpa", **options)
        assert_close("attended", expect(case, inputs, **options), actual, 1e-5, largest(inputs))


@pytest.mark.parametrize("mask", ["causal", "local"])
def test_long_sequence_makes_no_matrix_of_all_scores(mask: str) -> None:
    """The 17 million scores of 4,096 tokens would take 64 MiB."""
    case = AttentionCase("", (4096,), 1, 1, 16)
    inputs = make_attention_inputs(case)
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(case, inputs, **MASKS[mask])
    assert max(event.self_cpu_memory_usage for event in profile.events()) < 16 << 20


@ignores_nan_warnings
@every_pair(is_supported, target=TARGETS, mask=UNCAPPED, dtype=FLOAT_DTYPES, poison=POISONS)
def test_nan_stays_in_its_sequence(target: Target, mask: str, dtype: torch.dtype, poison: float) -> None:
    lengths = (5, 11, 12, 1, 2, 20, 3, 6) if IS_INTERPRETED else (5, 11, 12, 12, 13, 70, 75, 6)
    case = AttentionCase("", lengths, *((1, 1) if IS_INTERPRETED else (12, 12)))
    inputs = make_attention_inputs(case, dtype, target.device)
    clean = attend(case, inputs, target.backend, **MASKS[mask])
    bounds = inputs.cu_seqlens.tolist()
    is_clean = torch.ones(bounds[-1], dtype=torch.bool, device=target.device)
    for n in (2, 5):
        poisoned = slice(bounds[n], bounds[n + 1])
        inputs.q[poisoned], inputs.k[poisoned], inputs.v[poisoned] = poison, poison, poison
        is_clean[poisoned] = False
    actual = attend(case, inputs, target.backend, **MASKS[mask])
    assert_close("other sequences", clean[is_clean], actual[is_clean], TOLERANCE[dtype], largest(inputs))
    assert actual[bounds[5]].isnan().any()


@every_pair(
    target=targets("sdpa", cuda=("sdpa", "triton", None)), factor=[30.0, -30.0], mask=["full", "causal", "local"]
)
def test_scores_beyond_the_range_of_exp(target: Target, factor: float, mask: str) -> None:
    case = AttentionCase("", (9, 12, 33, 70), 2, 1, 32)
    inputs = make_attention_inputs(case, device=target.device, is_fused=False)
    inputs.k.copy_(inputs.k.abs())
    inputs.q.copy_(inputs.q.abs() * factor)
    actual = attend(case, inputs, target.backend, **MASKS[mask])
    assert_close("attended", expect(case, inputs, **MASKS[mask]), actual, 1e-4, largest(inputs))


def test_batch_without_rows_gives_no_rows(device: torch.device) -> None:
    q = torch.ones(0, 4, 8, device=device)
    assert attention(q, q, q, make_cu_seqlens((0, 0), device), (0, 0), max_seqlen=0, scale=1.0).shape == (0, 4, 8)
    cache, table = torch.zeros(1, 4, 2, 8, device=device), torch.empty(0, 0, dtype=torch.int32)
    assert attention_paged(q, cache, cache, table, make_cu_seqlens((), device), (), (), scale=1.0).shape == (0, 4, 8)


def is_quick(dtype: torch.dtype, case: PagedCase | None = None, mask: str = "all", **_: Any) -> bool:
    """The interpreter takes milliseconds for a row and has no products in bfloat16."""
    is_exact = dtype == torch.float32 or (dtype == torch.float16 and mask == "all")
    return not IS_INTERPRETED or (is_exact and (case is None or case.is_quick))


@every_pair(is_quick, target=PAGED_TARGETS, case=PAGED_CASES, mask=list(PAGED_MASKS), dtype=FLOAT_DTYPES)
def test_paged_backend_equals_reference(target: Target, case: PagedCase, mask: str, dtype: torch.dtype) -> None:
    """Slots of no token hold NaN, and the tables end with invalid blocks."""
    inputs = make_paged_inputs(case, dtype, target.device)
    expected = expect_paged(case, inputs, **PAGED_MASKS[mask])
    assert not expected.isnan().any()
    actual = attend_paged(case, inputs, target.backend, **PAGED_MASKS[mask])
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    assert_close("attended", expected, actual, TOLERANCE[dtype], largest(inputs))
    on_device = replace(inputs, block_tables=inputs.block_tables.to(target.device))
    assert torch.equal(attend_paged(case, on_device, target.backend, **PAGED_MASKS[mask]), actual)


@every_pair(
    target=[Target(None, "cpu"), Target(None, "cuda")],
    dtype=[torch.float32, torch.bfloat16],
    mask=["all", "window", "capped"],
    chunk_size=[1, 7, 64, 100],
    is_scattered=[False, True],
)
def test_chunks_equal_the_whole(
    target: Target, dtype: torch.dtype, mask: str, chunk_size: int, is_scattered: bool
) -> None:
    device = target.device
    length, block_size = (60 if chunk_size == 1 else 300), 16
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, heads, 32, generator=generator).to(dtype).to(device) for heads in (4, 2, 2))
    options: dict[str, Any] = {"scale": 0.2} | PAGED_MASKS[mask]
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


@ignores_nan_warnings
@every_pair(is_quick, target=PAGED_TARGETS, mask=list(PAGED_MASKS), dtype=FLOAT_DTYPES, poison=POISONS)
def test_nan_stays_in_its_blocks(target: Target, mask: str, dtype: torch.dtype, poison: float) -> None:
    case = PagedCase("", ((9, 5), (20, 3), (0, 13), (34, 1)), 4, 2, 16)
    inputs = make_paged_inputs(case, dtype, target.device)
    clean = attend_paged(case, inputs, target.backend, **PAGED_MASKS[mask])
    for n in (1, 2):
        blocks = inputs.block_tables[n, : -(-sum(case.chunks[n]) // case.block_size)].long().to(target.device)
        inputs.k_cache[blocks], inputs.v_cache[blocks] = poison, poison
        inputs.q[inputs.cu_seqlens[n] : inputs.cu_seqlens[n + 1]] = poison
    actual = attend_paged(case, inputs, target.backend, **PAGED_MASKS[mask])
    first, last = slice(inputs.cu_seqlens[1]), slice(inputs.cu_seqlens[3], None)
    for rows in (first, last):
        assert_close("other sequences", clean[rows], actual[rows], TOLERANCE[dtype], largest(inputs))
    assert not actual[inputs.cu_seqlens[1] : inputs.cu_seqlens[2]].isfinite().any()


def test_triton_rejects_wide_heads(device: torch.device) -> None:
    inputs = make_paged_inputs(case := PagedCase("", ((5, 3), (0, 9)), 4, 2, 320), torch.float32, device)
    assert_close("attended", expect_paged(case, inputs), attend_paged(case, inputs), 4e-6, largest(inputs))
    if find_spec("triton") is not None:
        with pytest.raises(ValueError, match="head sizes of at most 256, got 320"):
            attend_paged(case, inputs, backend="triton")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("capability", "head_size", "has_triton", "is_recordable"),
    tupled(table(__file__, "test_cuda_backend_reads_lengths_on_the_device")),
)
def test_cuda_backend_reads_lengths_on_the_device(
    capability: tuple[int, int],
    head_size: int,
    has_triton: bool,
    is_recordable: bool | None,
    has_bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA graphs need this: from Ampere on and with heads of at most 256, for each dtype, with and without bias."""
    monkeypatch.setattr(backends, "capability_of", lambda device: capability)
    monkeypatch.setattr(_torch, "capability_of", lambda device: capability)
    monkeypatch.setattr(backends, "has_triton", lambda: has_triton)
    if is_recordable is None:  # flash attention without Triton
        is_recordable = dtype != torch.float32 and not has_bias
    q: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=dtype, shape=(9, 2, head_size))
    backend = module._choose(q, torch.ones(2, 9, 9) if has_bias else None, None)
    assert (backend in ("varlen", "triton")) is is_recordable


def test_torch_has_the_operator_of_flash_attention() -> None:
    assert has_flash_operator(), torch.ops.aten._flash_attention_forward.default._schema
