"""kernels/attention: every backend against the reference, sequences apart from each other, plans complete."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from penstock.kernels import _scratch
from penstock.kernels.attention import AttentionPlan, Backend, attention
from penstock.kernels.attention._tiles import Tile, tile_of
from penstock.kernels.attention._varlen import has_flash_operator, takes_varlen
from penstock.kernels.attention.cpu import _blockwise, _groups, _plan, reach_of

from ..interpreter import IS_INTERPRETED
from .assertions import assert_close
from .cases import ATTENTION_CASES, AttentionCase, AttentionInputs, make_attention_inputs, make_cu_seqlens
from .places import interpreted_only

# Of the largest absolute value of v: what attention averages.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "narrow": {"window": (8, 8)},
    "local": {"window": (64, 64)},
    "left": {"window": (7, -1)},
    "causal_local": {"window": (40, 40), "is_causal": True},
}

CAPPED_CASES = [case for case in ATTENTION_CASES if case.name in ("odd_with_empty", "grouped_heads")]
CAPPED_CASES.append(AttentionCase("short", (3, 0, 1, 17, 20), 4, 2, 16))

cases = pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
masks = pytest.mark.parametrize("mask", MASKS)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])


def attend(case: AttentionCase, inputs: AttentionInputs, **options: Any) -> torch.Tensor:
    options = {"scale": case.head_size**-0.5} | options
    return attention(
        inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, case.seq_lens, max_seqlen=max(case.seq_lens), **options
    )


@pytest.fixture(
    params=[
        ("grouped", "cpu"),
        ("blockwise", "cpu"),
        ("sdpa", "cpu"),
        pytest.param(("triton", "cpu"), marks=interpreted_only),
        pytest.param(("sdpa", "cuda"), marks=pytest.mark.gpu),
        pytest.param(("varlen", "cuda"), marks=pytest.mark.gpu),
        pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
    ],
    ids="-".join,
)
def place(request: pytest.FixtureRequest) -> tuple[Backend, torch.device]:
    """A backend and a device that it runs on."""
    backend, device = request.param
    return backend, torch.device(device)


def skip_what_does_not_fit(backend: Backend, inputs: AttentionInputs) -> None:
    """Ends a test whose case a backend does not know, or which takes the interpreter too long."""
    if backend == "varlen" and not takes_varlen(inputs.q, None):
        pytest.skip("flash attention does not know this dtype or head size")
    if IS_INTERPRETED and (inputs.q[..., 0].numel() > 800 or inputs.q.dtype != torch.float32):
        pytest.skip("too slow for the interpreter, which has no products in bfloat16")


@dtypes
@masks
@cases
def test_backend_equals_reference(
    place: tuple[Backend, torch.device], case: AttentionCase, mask: str, dtype: torch.dtype
) -> None:
    backend, device = place
    inputs = make_attention_inputs(case, dtype, device)
    skip_what_does_not_fit(backend, inputs)
    expected = attend(case, inputs, backend="reference", **MASKS[mask])
    actual = attend(case, inputs, backend=backend, **MASKS[mask])
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    assert_close("attended", expected, actual, TOLERANCE[dtype], inputs.v.abs().max().item())


@pytest.mark.parametrize("length", [8, 31, 64, 255, 256, 257])
@pytest.mark.parametrize("side", ["left", "right"])
def test_window_about_as_wide_as_a_block(length: int, side: str) -> None:
    """At one exact width the last row hides nothing but the first key, or the first row nothing but the last."""
    case = AttentionCase("", (length,), 2, 1, 16)
    inputs = make_attention_inputs(case)
    widest = _blockwise.padded_rows(length)
    for reach in sorted({*range(length - 3, length + 1), *range(widest - 3, widest + 1)}):
        window = (reach, 0) if side == "left" else (0, reach)
        expected = attend(case, inputs, backend="reference", window=window)
        actual = attend(case, inputs, backend="blockwise", window=window)
        assert_close(str(window), expected, actual, TOLERANCE[torch.float32], inputs.v.abs().max().item())


@dtypes
@pytest.mark.parametrize("mask", ["full", "local", "causal"])
@cases
def test_relative_bias(place: tuple[Backend, torch.device], case: AttentionCase, mask: str, dtype: torch.dtype) -> None:
    backend, device = place
    if backend == "varlen":
        pytest.skip("flash attention takes no bias")
    inputs = make_attention_inputs(case, dtype, device)
    skip_what_does_not_fit(backend, inputs)
    options = {"relative_bias": inputs.relative_bias} | MASKS[mask]
    expected = attend(case, inputs, backend="reference", **options)
    actual = attend(case, inputs, backend=backend, **options)
    assert_close("attended", expected, actual, TOLERANCE[dtype], inputs.v.abs().max().item())


@pytest.fixture(
    params=[
        (None, "cpu"),
        ("grouped", "cpu"),
        ("blockwise", "cpu"),
        pytest.param(("triton", "cpu"), marks=interpreted_only),
        pytest.param((None, "cuda"), marks=pytest.mark.gpu),
    ],
    ids=lambda place: f"{place[0]}-{place[1]}",
)
def capping_place(request: pytest.FixtureRequest) -> tuple[Backend | None, torch.device]:
    """A backend that knows softcap and a device that it runs on."""
    backend, device = request.param
    return backend, torch.device(device)


@dtypes
@pytest.mark.parametrize("mask", ["full", "narrow", "causal_local"])
@pytest.mark.parametrize("case", CAPPED_CASES, ids=lambda case: case.name)
def test_softcap(
    capping_place: tuple[Backend | None, torch.device], case: AttentionCase, mask: str, dtype: torch.dtype
) -> None:
    backend, device = capping_place
    if IS_INTERPRETED and (max(case.seq_lens) > 64 or dtype != torch.float32):
        pytest.skip("too slow for the interpreter")
    inputs = make_attention_inputs(case, dtype, device)
    expected = attend(case, inputs, backend="reference", softcap=3.0, **MASKS[mask])
    actual = attend(case, inputs, backend=backend, softcap=3.0, **MASKS[mask])
    tolerance = 1e-5 if dtype == torch.float32 else TOLERANCE[dtype]
    assert_close("attended", expected, actual, tolerance, inputs.v.abs().max().item())


@interpreted_only
@pytest.mark.parametrize("mask", ["full", "left", "causal_local"])
@pytest.mark.parametrize("tile", [Tile(16, 16, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)], ids=str)
def test_triton_takes_any_tile(tile: Tile, mask: str) -> None:
    """Tiles at every kind of border: of the causal limit, of the window, of the sequence, and between them."""
    from penstock.kernels.attention._triton import attention_triton

    case = AttentionCase("", (1, 0, 47, 48, 97), 1, 1, 16)
    inputs = make_attention_inputs(case)
    options = {"relative_bias": inputs.relative_bias, "softcap": 5.0}
    expected = attend(case, inputs, backend="reference", **options, **MASKS[mask])
    window, is_causal = MASKS[mask].get("window"), MASKS[mask].get("is_causal", False)
    actual = attention_triton(
        *(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, 97, 0.25, reach_of(window, is_causal, 97)),
        softcap=5.0,
        relative_bias=inputs.relative_bias,
        tile=tile,
    )
    assert_close("attended", expected, actual, 1e-5, inputs.v.abs().max().item())


@pytest.mark.parametrize("head_size", [8, 16, 33, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tiles_are_of_sizes_that_products_take(dtype: torch.dtype, head_size: int) -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for num_rows in (1, 64, 65, 5000):
            tile = tile_of(dtype, head_size, capability, num_rows=num_rows)
            assert min(tile.block_m, tile.block_n) >= 16, "tl.dot takes no less"
            assert dtype == torch.float32 or tile.block_m <= 64 or tile.num_warps == 8


def test_plan_of_other_lengths_is_not_believed() -> None:
    """A plan saves sums over the lengths only where it was built for the very tuple."""
    case = AttentionCase("", (3, 4), 2, 2, 8)
    inputs = make_attention_inputs(case)
    plan = AttentionPlan.build((7,), num_heads=2)
    with pytest.raises(ValueError, match="must sum to the 7 rows"):
        attention(
            inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, (3, 3), max_seqlen=4, scale=1.0, backend="sdpa", plan=plan
        )
    assert (plan.num_tokens, plan.longest) == (7, 7)


def test_softcap_changes_scores_before_the_bias() -> None:
    case = AttentionCase("", (3, 5), 1, 1, 8)
    inputs = make_attention_inputs(case)
    scores = (inputs.q[:3, 0] @ inputs.k[:3, 0].T) / 2
    weights = torch.softmax(2 * torch.tanh(scores / 2) + inputs.relative_bias[0, :3, :3], -1)
    for backend in (None, "reference", *(["triton"] if IS_INTERPRETED else [])):
        actual = attend(case, inputs, scale=0.5, softcap=2.0, relative_bias=inputs.relative_bias, backend=backend)
        assert_close(str(backend), weights @ inputs.v[:3, 0], actual[:3, 0], 1e-5)


@dtypes
@masks
@cases
def test_chosen_backend_and_shared_plan(
    device: torch.device, case: AttentionCase, mask: str, dtype: torch.dtype
) -> None:
    inputs = make_attention_inputs(case, dtype, device, is_fused=False)
    plan = AttentionPlan.build(
        list(case.seq_lens),
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        dtype=dtype,
        device=device,
        **MASKS[mask],
    )
    expected = attend(case, inputs, backend="reference", **MASKS[mask])
    with torch.inference_mode():
        for _ in range(2):
            actual = attend(case, inputs, plan=plan, **MASKS[mask])
            assert_close("attended", expected, actual, TOLERANCE[dtype], inputs.v.abs().max().item())


@masks
def test_tiles_of_a_long_sequence(monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    """A tenth of a head's scores at a time, as for a sequence of tens of thousands."""
    for module in (_groups, _plan):
        monkeypatch.setattr(module, "MAX_SCORES", 1 << 14)
    case = AttentionCase("", (515, 12), 4, 2, 32)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_attention_inputs(case, dtype)
        options = {"relative_bias": inputs.relative_bias} | MASKS[mask]
        expected = attend(case, inputs, backend="reference", **options)
        actual = attend(case, inputs, backend="grouped", **options)
        assert_close("attended", expected, actual, TOLERANCE[dtype], inputs.v.abs().max().item())


@dtypes
@masks
def test_sequence_is_the_same_alone_and_in_a_batch(
    place: tuple[Backend, torch.device], mask: str, dtype: torch.dtype
) -> None:
    backend, device = place
    case = AttentionCase("", (3, 9, 12, 12, 14, 40, 61, 150))
    inputs = make_attention_inputs(case, dtype, device)
    skip_what_does_not_fit(backend, inputs)
    together = attend(case, inputs, backend=backend, **MASKS[mask])
    tolerance = 1e-6 if dtype == torch.float32 else TOLERANCE[dtype]
    start = 0
    for length in case.seq_lens:
        rows = slice(start, start + length)
        one = AttentionCase("", (length,))
        alone = attention(
            inputs.q[rows],
            inputs.k[rows],
            inputs.v[rows],
            make_cu_seqlens((length,), device),
            (length,),
            max_seqlen=length,
            scale=one.head_size**-0.5,
            backend=backend,
            **MASKS[mask],
        )
        assert_close(f"length {length}", alone, together[rows], tolerance, inputs.v.abs().max().item())
        start += length


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets triton, tells of every NaN
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@dtypes
@masks
def test_poisoned_sequence_touches_no_other(
    place: tuple[Backend, torch.device], mask: str, dtype: torch.dtype, poison: float
) -> None:
    backend, device = place
    case = AttentionCase("", (5, 11, 12, 12, 13, 70, 75, 6), *((1, 1) if IS_INTERPRETED else (12, 12)))
    inputs = make_attention_inputs(case, dtype, device)
    skip_what_does_not_fit(backend, inputs)
    expected = attend(case, inputs, backend="reference", **MASKS[mask])
    bounds = inputs.cu_seqlens.tolist()
    is_clean = torch.ones(bounds[-1], dtype=torch.bool, device=device)
    for n in (2, 5):
        poisoned = slice(bounds[n], bounds[n + 1])
        inputs.q[poisoned], inputs.k[poisoned], inputs.v[poisoned] = poison, poison, poison
        is_clean[poisoned] = False
    actual = attend(case, inputs, backend=backend, **MASKS[mask])
    scale = inputs.v[is_clean].abs().max().item()
    assert_close("other sequences", expected[is_clean], actual[is_clean], TOLERANCE[dtype], scale)
    assert actual[bounds[5]].isnan().any()


@pytest.mark.parametrize("factor", [30.0, -30.0])
def test_scores_beyond_the_range_of_exp(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """exp of these scores overflows, or underflows for whole rows: the shifted softmax takes over."""
    case = AttentionCase("", (9, 12, 33, 70), 4, 4, 32)
    inputs = make_attention_inputs(case, torch.bfloat16, is_fused=False)
    inputs.k.copy_(inputs.k.abs())
    inputs.q.copy_(inputs.q.abs() * factor)
    shifted = []
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda *args, **kwargs: shifted.append(1) or softmax(*args, **kwargs))
    actual = attend(case, inputs, backend="grouped")
    assert shifted
    # Scores of hundreds, rounded to bfloat16, decide between neighbours: compare with the same rounding.
    start = 0
    for length in case.seq_lens:
        q, k, v = (x[start : start + length].transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v))
        scores = (q * case.head_size**-0.5) @ k.transpose(1, 2)
        expected = (softmax(scores.float(), -1) @ v.float()).transpose(0, 1)
        rows = actual[start : start + length]
        assert_close(f"length {length}", expected, rows, TOLERANCE[torch.bfloat16], v.abs().max().item())
        start += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("large", [slice(0, 300), slice(600, 700), slice(0, 700)], ids=["early", "late", "all"])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_leave_the_range_of_exp_in_a_tile(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, large: slice, sign: int
) -> None:
    """Sums overflow or vanish in the first tile of the keys, or in a later one only."""
    monkeypatch.setattr(_blockwise, "TILE_SCORES", 1)
    case = AttentionCase("", (700,), 2, 1, 32)
    inputs = make_attention_inputs(case, dtype, is_fused=False)
    inputs.k[large] = sign * (inputs.k[large] / 16 + 4)
    inputs.q.copy_(inputs.q / 16 + 8)
    for mask in ("full", "causal", "local"):
        expected = attend(case, inputs, backend="reference", **MASKS[mask])
        actual = attend(case, inputs, backend="blockwise", **MASKS[mask])
        # Scores of 180, rounded to bfloat16.
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        assert_close(mask, expected, actual, tolerance, inputs.v.abs().max().item())


def test_order_of_the_batch_does_not_matter() -> None:
    lengths = (70, 12, 3, 0, 12, 65, 12, 30, 1)
    case = AttentionCase("", lengths, 4, 2, 32)
    inputs = make_attention_inputs(case, torch.bfloat16)
    expected = attend(case, inputs, backend="reference")
    actual = attend(case, inputs, backend="grouped")
    assert_close("attended", expected, actual, TOLERANCE[torch.bfloat16], inputs.v.abs().max().item())


def test_inputs_are_not_modified() -> None:
    case = ATTENTION_CASES[4]
    inputs = make_attention_inputs(case, torch.bfloat16)
    copies = [x.clone() for x in (inputs.q, inputs.k, inputs.v)]
    attend(case, inputs, backend="grouped")
    for name, x, copy in zip("qkv", (inputs.q, inputs.k, inputs.v), copies, strict=True):
        assert torch.equal(x, copy), name


def test_buffers_serve_any_grad_mode() -> None:
    """A buffer made in inference mode could not be written outside it."""
    case = ATTENTION_CASES[3]
    inputs = make_attention_inputs(case, torch.bfloat16)
    with torch.inference_mode():
        first = attend(case, inputs, backend="grouped").clone()
    assert torch.equal(first, attend(case, inputs, backend="grouped"))


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=40),
    num_heads=st.sampled_from([1, 12, 64]),
)
def test_plan_holds_every_token_once(lengths: list[int], num_heads: int) -> None:
    plan = AttentionPlan.build(lengths, num_heads=num_heads, dtype=torch.bfloat16)
    seen = torch.zeros(sum(lengths), dtype=torch.int64)
    for group in plan.groups:
        assert group.num_true <= group.num_seqs
        if group.rows is None:
            assert group.end - group.start == group.num_true * group.seq_len
            seen[group.start : group.end] += 1
        else:
            assert group.is_true is not None
            assert group.rows.shape == (group.num_seqs * group.length,)
            written = group.rows[group.is_true]
            if group.targets is None:
                assert torch.equal(written, torch.arange(group.start, group.end))
            else:
                assert torch.equal(written, group.targets)
            seen[written] += 1
    assert seen.eq(1).all()


def test_few_shapes_are_computed() -> None:
    """Each shape of a product costs oneDNN up to a millisecond, once, and a place in its cache."""
    shapes = set()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        lengths = torch.randint(5, 200, (32,), generator=generator).sort().values.tolist()
        plan = AttentionPlan.build(lengths, num_heads=12, dtype=torch.bfloat16)
        shapes |= {(group.num_seqs, group.length) for group in plan.groups}
    assert len(shapes) < 80


def test_empty_batch(device: torch.device) -> None:
    q = torch.ones(0, 4, 8, device=device)
    out = attention(q, q, q, make_cu_seqlens((0, 0), device), (0, 0), max_seqlen=0, scale=1.0)
    assert out.shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.ones(5, 3, 8), "v": torch.ones(5, 3, 8)}, "heads of q must be a multiple"),
        ({"k": torch.ones(4, 4, 8)}, r"q must be \[T, H, K\]"),
        ({"v": torch.ones(5, 4, 8).half()}, "must share float32, bfloat16 or float16"),
        ({"cu_seqlens": make_cu_seqlens((5,))}, r"cu_seqlens must be int32 \[3\]"),
        ({"seq_lens": (2, 2)}, "seq_lens must sum to the 5 rows"),
        ({"max_seqlen": 2}, "not pass max_seqlen 2"),
        ({"relative_bias": torch.ones(4, 2, 2)}, "relative_bias must be"),
        ({"backend": "flash"}, "backend must be one of"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"softcap": 1.0, "backend": "sdpa"}, "sdpa backend knows no softcap"),
        ({"scale": 0.0, "backend": "triton"}, "takes a positive scale"),
        ({"plan": AttentionPlan.build((3, 2), num_heads=4), "backend": "grouped"}, "plan was built for other"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, object], message: str) -> None:
    x = torch.ones(5, 4, 8)
    arguments = {
        "q": x,
        "k": x,
        "v": x,
        "cu_seqlens": make_cu_seqlens((2, 3)),
        "seq_lens": (2, 3),
        "max_seqlen": 3,
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        attention(**(arguments | changes))


def test_torch_has_the_operator_of_flash_attention() -> None:
    assert has_flash_operator(), torch.ops.aten._flash_attention_forward.default._schema


@pytest.mark.gpu
def test_cuda_takes_varlen_for_16_bits() -> None:
    q = torch.ones(5, 4, 64, device="cuda", dtype=torch.bfloat16)
    assert takes_varlen(q, None) == (torch.cuda.get_device_capability() >= (8, 0))
    assert not takes_varlen(q.float(), None)
    assert not takes_varlen(q, torch.ones(4, 5, 5, device="cuda"))


def test_kept_buffers_are_bounded() -> None:
    case = AttentionCase("", (12, 300, 700), 12, 12, 64)
    attend(case, make_attention_inputs(case, torch.bfloat16), backend="grouped")
    kept = _scratch._thread.__dict__["buffers"].values()
    assert all(buffer.numel() <= _scratch.MAX_KEPT for buffer in kept)
