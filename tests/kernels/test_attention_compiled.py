"""The triton kernels of attention and rotary compiled for GPUs that this machine need not have."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ..interpreter import IS_INTERPRETED, needs_triton
from .ptxas import ptxas_report

pytestmark = [
    needs_triton,
    pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels do not compile"),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compile_kernel(
    function: Any, dtype: str, constants: dict[str, Any], options: dict[str, int | None], capability: int, folder: Path
) -> tuple[str, str]:
    """Returns the PTX and the report of ptxas, for addresses and strides that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"cu_seqlens_ptr": "*i32", "context_lens_ptr": "*i32", "block_tables_ptr": "*i32"}
    types |= {"rows_ptr": "*i64", "slots_ptr": "*i64", "scale": "fp32", "cap": "fp32"}
    types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "weight_ptr": "*fp32", "eps": "fp32"}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature = {
        name: "constexpr" if name in constants else types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
    }
    free = {parameter.name for parameter in function.params if parameter.do_not_specialize}
    aligned = [name for name in function.arg_names if name.endswith("_ptr") or name.startswith("stride_")]
    aligned += [name for name in ("head_size", "width") if name in function.arg_names]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in free}
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    return ptx, ptxas_report(ptx, capability, folder)


def attention_cases() -> list[Any]:
    """dtype, head size, query heads of a key head, features; one of them is quick enough for every run."""
    bias, cap, causal, window = ("HAS_BIAS",), ("HAS_CAP",), ("HAS_RIGHT",), ("HAS_LEFT", "HAS_RIGHT")
    paged = ("IS_PAGED", *window)
    cases = [
        ("bf16", 64, 1, bias),
        *(("bf16", size, 1, ()) for size in (32, 64, 80, 128, 256)),
        *(("bf16", size, 1, bias) for size in (32, 80)),
        *(("bf16", size, 4, paged) for size in (64, 80, 128)),
        *(("bf16", size, 4, ("IS_PAGED", *causal)) for size in (64, 96, 128)),
        ("bf16", 256, 4, (*paged, *cap)),
        ("fp16", 256, 2, (*cap, *window)),
        *(("fp32", size, 1, bias) for size in (32, 64, 128, 256)),
        *(("fp32", size, 1, ()) for size in (32, 64, 80)),
        *(("fp32", size, 4, paged) for size in (64, 128)),
        ("fp32", 256, 4, (*paged, *cap)),
        # These have needed more registers than ptxas gave them.
        *(("bf16", size, 1, (*bias, *window)) for size in (80, 128)),
        *(("fp32", size, 1, (*bias, *window)) for size in (32, 64)),
        ("fp32", 128, 1, window),
        ("fp32", 128, 1, (*causal, *cap)),
        *(("bf16", size, 1, ("IS_PAGED", *window, *cap)) for size in (80, 128)),
        *(("fp32", 16, heads, bias) for heads in (1, 4)),
        ("fp32", 16, 1, ("HAS_LEFT",)),
        ("fp32", 16, 4, ("HAS_LEFT", *cap)),
        *(("fp32", 32, 4, features) for features in ((), ("IS_PAGED", *causal), ("IS_PAGED", *causal, *cap))),
    ]
    return [cases[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[1:])]


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize("num_rows", [40, 4096])
@pytest.mark.parametrize(("dtype", "head_size", "group_size", "features"), attention_cases())
def test_attention_compiles_without_spills(
    dtype: str,
    head_size: int,
    group_size: int,
    features: tuple[str, ...],
    num_rows: int,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    from penstock.kernels.attention import _triton

    is_loaded = "HAS_BIAS" in features or "HAS_CAP" in features
    device = (capability // 10, capability % 10)
    tile = _triton.tile_of(DTYPES[dtype], head_size, device, num_rows=num_rows, is_loaded=is_loaded)
    flags = ("IS_PAGED", "HAS_LEFT", "HAS_RIGHT", "HAS_CAP", "HAS_BIAS")
    constants = {flag: flag in features for flag in flags} | {
        "LOG2_E": _triton.LOG2_E,
        "GROUP_SIZE": group_size,
        "BLOCK_SIZE": 16,
        "HEAD_SIZE": head_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": _triton.padded_head(head_size),
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.max_registers}
    ptx, report = compile_kernel(_triton._attention_kernel, dtype, constants, options, capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    if dtype != "fp32":
        wanted = "wgmma.mma_async" if capability == 90 else "mma.sync"
        assert wanted in ptx, "products do not run on the tensor cores of this device"


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("dtype", "head_size", "num_pairs", "has_norm"),
    [
        ("bf16", 64, 32, False),
        ("bf16", 128, 64, True),
        ("bf16", 80, 16, True),
        ("fp32", 256, 128, True),
        ("fp32", 128, 32, True),
    ],
)
def test_rotary_compiles_to_wide_copies(
    dtype: str,
    head_size: int,
    num_pairs: int,
    has_norm: bool,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    from penstock.kernels.rotary import _triton

    tile = _triton.tile_options(24, head_size, num_pairs)
    options = {name: tile.pop(name) for name in ("num_warps", "maxnreg")}
    constants = {"HAS_NORM": has_norm, "HAS_STORE": True, "HEAD_SIZE": head_size, "NUM_PAIRS": num_pairs} | tile
    ptx, report = compile_kernel(_triton._rotary_kernel, dtype, constants, options, capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    assert "ld.global.v4.b32" in ptx, "heads are not read 16 bytes at a time"
    assert "st.global.v4.b32" in ptx, "heads are not written 16 bytes at a time"
