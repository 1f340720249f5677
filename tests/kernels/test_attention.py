"""kernels/attention: every backend against the reference, and sequences apart from each other."""

from typing import Any

import pytest
import torch

from penstock.kernels.attention import _reach, _torch, attention
from penstock.kernels.attention._torch import has_flash_operator, takes_varlen

from ..interpreter import IS_INTERPRETED, needs_triton
from .assertions import assert_close
from .attention_reference import attention_reference
from .cases import ATTENTION_CASES, AttentionCase, AttentionInputs, make_attention_inputs, make_cu_seqlens
from .parameters import FLOAT_DTYPES, Place, every_pair, interpreted_only, places

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
PLACES = places("sdpa", cuda=("sdpa", "varlen", "triton", None))

CAPPED_CASES = [case for case in ATTENTION_CASES if case.name in ("odd_with_empty", "grouped_heads")]
CAPPED_CASES.append(AttentionCase("short", (3, 0, 1, 17, 20), 4, 2, 16))


def arguments(case: AttentionCase, inputs: AttentionInputs, options: dict[str, Any]) -> dict[str, Any]:
    own = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "cu_seqlens": inputs.cu_seqlens, "seq_lens": case.seq_lens}
    return own | {"max_seqlen": max(case.seq_lens), "scale": case.head_size**-0.5} | options


def attend(case: AttentionCase, inputs: AttentionInputs, backend: Any = None, **options: Any) -> torch.Tensor:
    return attention(**arguments(case, inputs, options), backend=backend)


def expect(case: AttentionCase, inputs: AttentionInputs, **options: Any) -> torch.Tensor:
    return attention_reference(**arguments(case, inputs, options))


def knows(place: Place, dtype: torch.dtype, case: AttentionCase | None = None, **_: Any) -> bool:
    """Whether a backend takes this, and in the interpreter within seconds; it has no products in bfloat16."""
    if place.backend == "varlen":
        return dtype != torch.float32 and (case is None or case.head_size % 8 == 0)
    is_quick = case is None or sum(case.seq_lens) * case.num_heads <= 800
    return not IS_INTERPRETED or (is_quick and dtype == torch.float32)


@every_pair(knows, place=PLACES, case=ATTENTION_CASES, mask=list(MASKS), dtype=FLOAT_DTYPES)
def test_backend_equals_reference(place: Place, case: AttentionCase, mask: str, dtype: torch.dtype) -> None:
    inputs = make_attention_inputs(case, dtype, place.device)
    actual = attend(case, inputs, place.backend, **MASKS[mask])
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    assert_close("attended", expect(case, inputs, **MASKS[mask]), actual, TOLERANCE[dtype], largest(inputs))


def largest(inputs: AttentionInputs) -> float:
    return inputs.v.abs().max().item()


@pytest.mark.parametrize("length", [127, 128, 129, 300])
@pytest.mark.parametrize("side", ["left", "right"])
def test_window_about_as_wide_as_a_block(length: int, side: str) -> None:
    """At one exact width the last row hides nothing but the first key, or the first row nothing but the last."""
    case = AttentionCase("", (length,), 2, 1, 16)
    inputs = make_attention_inputs(case)
    for reach in sorted({0, 1, *range(125, 131), *range(length - 3, length + 1)}):
        options = {"window": (reach, 0) if side == "left" else (0, reach)}
        actual = attend(case, inputs, "sdpa", **options)
        assert_close(str(reach), expect(case, inputs, **options), actual, TOLERANCE[torch.float32], largest(inputs))


@every_pair(
    lambda **case: case["place"].backend != "varlen" and knows(**case),
    place=PLACES,
    case=ATTENTION_CASES,
    mask=["full", "local", "causal"],
    dtype=FLOAT_DTYPES,
)
def test_relative_bias(place: Place, case: AttentionCase, mask: str, dtype: torch.dtype) -> None:
    inputs = make_attention_inputs(case, dtype, place.device)
    options = {"relative_bias": inputs.relative_bias} | MASKS[mask]
    actual = attend(case, inputs, place.backend, **options)
    assert_close("attended", expect(case, inputs, **options), actual, TOLERANCE[dtype], largest(inputs))


@every_pair(
    lambda **case: not IS_INTERPRETED or (max(case["case"].seq_lens) <= 64 and case["dtype"] == torch.float32),
    place=places(None, cuda=(None, "sdpa")),
    case=CAPPED_CASES,
    mask=["full", "narrow", "causal_local"],
    dtype=FLOAT_DTYPES,
)
def test_softcap(place: Place, case: AttentionCase, mask: str, dtype: torch.dtype) -> None:
    inputs = make_attention_inputs(case, dtype, place.device)
    actual = attend(case, inputs, place.backend, softcap=3.0, **MASKS[mask])
    tolerance = 1e-5 if dtype == torch.float32 else TOLERANCE[dtype]
    assert_close("attended", expect(case, inputs, softcap=3.0, **MASKS[mask]), actual, tolerance, largest(inputs))


@interpreted_only
@pytest.mark.parametrize("mask", ["full", "left", "causal_local"])
@pytest.mark.parametrize("tile", [(16, 16, 4, 2), (16, 32, 4, 2), (32, 16, 4, 2)], ids=str)
def test_triton_takes_any_tile(tile: tuple[int, int, int, int], mask: str) -> None:
    """Tiles at every kind of border: of the causal limit, of the window, of the sequence, and between them."""
    from penstock.kernels.attention._triton import Tile, attention_triton

    case = AttentionCase("", (1, 0, 47, 48, 97), 1, 1, 16)
    inputs = make_attention_inputs(case)
    options = {"relative_bias": inputs.relative_bias, "softcap": 5.0}
    expected = expect(case, inputs, **options, **MASKS[mask])
    window, is_causal = MASKS[mask].get("window"), MASKS[mask].get("is_causal", False)
    actual = attention_triton(
        *(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, 97, 0.25, _reach(window, is_causal, 97)),
        softcap=5.0,
        relative_bias=inputs.relative_bias,
        tile=Tile(*tile),
    )
    assert_close("attended", expected, actual, 1e-5, inputs.v.abs().max().item())


@needs_triton
@pytest.mark.parametrize("head_size", [8, 16, 33, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_tiles_are_of_sizes_that_products_take(dtype: torch.dtype, head_size: int) -> None:
    from penstock.kernels.attention._triton import tile_of

    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for num_rows in (1, 64, 65, 5000):
            tile = tile_of(dtype, head_size, capability, num_rows=num_rows)
            assert min(tile.block_m, tile.block_n) >= 16, "tl.dot takes no less"
            assert dtype == torch.float32 or tile.block_m <= 64 or tile.num_warps == 8


def test_softcap_changes_scores_before_the_bias() -> None:
    case = AttentionCase("", (3, 5), 1, 1, 8)
    inputs = make_attention_inputs(case)
    scores = (inputs.q[:3, 0] @ inputs.k[:3, 0].T) / 2
    weights = torch.softmax(2 * torch.tanh(scores / 2) + inputs.relative_bias[0, :3, :3], -1)
    for backend in ["triton"] if IS_INTERPRETED else [None]:
        actual = attend(case, inputs, scale=0.5, softcap=2.0, relative_bias=inputs.relative_bias, backend=backend)
        assert_close(str(backend), weights @ inputs.v[:3, 0], actual[:3, 0], 1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_blocks_of_a_long_sequence(monkeypatch: pytest.MonkeyPatch, mask: str, softcap: float | None) -> None:
    """A few rows at a time, as for a sequence of tens of thousands."""
    monkeypatch.setattr(_torch, "MAX_BLOCK_SCORES", 1 << 14)
    case = AttentionCase("", (515, 12), 4, 2, 32)
    inputs = make_attention_inputs(case)
    for options in (MASKS[mask], MASKS[mask] | {"relative_bias": inputs.relative_bias}):
        options = options | {"softcap": softcap}
        actual = attend(case, inputs, "sdpa", **options)
        assert_close("attended", expect(case, inputs, **options), actual, 1e-5, largest(inputs))


@pytest.mark.parametrize("mask", ["full", "causal", "local"])
def test_no_matrix_of_all_scores_is_made(mask: str) -> None:
    """8,192 tokens have 67 million scores: 256 MiB. Blocks of rows need a few."""
    case = AttentionCase("", (8192,), 1, 1, 16)
    inputs = make_attention_inputs(AttentionCase("", (8192,), 1, 1, 16), has_bias=False)
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(case, inputs, **MASKS[mask])
    assert max(event.self_cpu_memory_usage for event in profile.events()) < 16 << 20


@every_pair(knows, place=PLACES, mask=list(MASKS), dtype=FLOAT_DTYPES)
def test_sequence_is_the_same_alone_and_in_a_batch(place: Place, mask: str, dtype: torch.dtype) -> None:
    """To the bit on a CPU."""
    case = AttentionCase("", (3, 9, 12, 12, 14, 40, 61, 150), *((1, 1) if IS_INTERPRETED else (4, 4)))
    inputs = make_attention_inputs(case, dtype, place.device)
    together = attend(case, inputs, place.backend, **MASKS[mask])
    tolerance = 0.0 if place.backend == "sdpa" and place.device == "cpu" else TOLERANCE[dtype]
    start = 0
    for length in case.seq_lens:
        rows = slice(start, start + length)
        alone = attention(
            inputs.q[rows],
            inputs.k[rows],
            inputs.v[rows],
            make_cu_seqlens((length,), place.device),
            (length,),
            max_seqlen=length,
            scale=case.head_size**-0.5,
            backend=place.backend,
            **MASKS[mask],
        )
        assert_close(f"length {length}", alone, together[rows], tolerance, largest(inputs))
        start += length


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets triton, tells of every NaN
@every_pair(knows, place=PLACES, mask=list(MASKS), dtype=FLOAT_DTYPES, poison=[float("nan"), float("inf")])
def test_poisoned_sequence_touches_no_other(place: Place, mask: str, dtype: torch.dtype, poison: float) -> None:
    case = AttentionCase("", (5, 11, 12, 12, 13, 70, 75, 6), *((1, 1) if IS_INTERPRETED else (12, 12)))
    inputs = make_attention_inputs(case, dtype, place.device)
    expected = expect(case, inputs, **MASKS[mask])
    bounds = inputs.cu_seqlens.tolist()
    is_clean = torch.ones(bounds[-1], dtype=torch.bool, device=place.device)
    for n in (2, 5):
        poisoned = slice(bounds[n], bounds[n + 1])
        inputs.q[poisoned], inputs.k[poisoned], inputs.v[poisoned] = poison, poison, poison
        is_clean[poisoned] = False
    actual = attend(case, inputs, place.backend, **MASKS[mask])
    scale = inputs.v[is_clean].abs().max().item()
    assert_close("other sequences", expected[is_clean], actual[is_clean], TOLERANCE[dtype], scale)
    assert actual[bounds[5]].isnan().any()


@every_pair(knows, place=PLACES, factor=[30.0, -30.0], mask=["full", "causal", "local"], dtype=[torch.float32])
def test_scores_beyond_the_range_of_exp(place: Place, factor: float, mask: str, dtype: torch.dtype) -> None:
    """exp of these scores overflows, or underflows for whole rows."""
    case = AttentionCase("", (9, 12, 33, 70), 2, 1, 32)
    inputs = make_attention_inputs(case, dtype, place.device, is_fused=False)
    inputs.k.copy_(inputs.k.abs())
    inputs.q.copy_(inputs.q.abs() * factor)
    actual = attend(case, inputs, place.backend, **MASKS[mask])
    assert_close("attended", expect(case, inputs, **MASKS[mask]), actual, 1e-4, largest(inputs))


def test_order_of_the_batch_does_not_matter() -> None:
    case = AttentionCase("", (70, 12, 3, 0, 12, 65, 12, 30, 1), 4, 2, 32)
    inputs = make_attention_inputs(case, torch.bfloat16)
    assert_close("attended", expect(case, inputs), attend(case, inputs), TOLERANCE[torch.bfloat16], largest(inputs))


def test_inputs_are_not_modified() -> None:
    case = ATTENTION_CASES[4]
    inputs = make_attention_inputs(case, torch.bfloat16)
    copies = [x.clone() for x in (inputs.q, inputs.k, inputs.v)]
    for options in ({}, {"window": (3, 3)}, {"softcap": 2.0, "relative_bias": inputs.relative_bias}):
        attend(case, inputs, **options)
    for name, x, copy in zip("qkv", (inputs.q, inputs.k, inputs.v), copies, strict=True):
        assert torch.equal(x, copy), name


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
        ({"softcap": 1.0, "backend": "varlen"}, "varlen backend knows no softcap"),
        ({"scale": 0.0, "backend": "triton"}, "takes a positive scale"),
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
