"""The triton kernels of pooling compiled ahead of time for GPUs that this machine need not have: no register spills."""

from pathlib import Path

import pytest

from ..interpreter import IS_INTERPRETED, needs_triton
from .ptxas import ptxas_report

pytestmark = [
    needs_triton,
    pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels do not compile"),
]

POINTERS = {
    "cu_seqlens_ptr": "*i32",
    "dimensions_ptr": "*i32",
    "normalize_ptr": "*u8",
    "skip_ptr": "*i32",
    "weights_ptr": "*fp32",
    "out_ptr": "*fp32",
    "block_total_ptr": "*fp32",
    "block_weight_ptr": "*fp32",
}


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("kernel", "dtype", "pooling", "width"),
    [
        ("_pool_kernel", "bf16", "mean", 384),
        ("_pool_kernel", "fp32", "weighted_mean", 1000),
        ("_pool_kernel", "fp32", "weighted", 8192),
        ("_pool_kernel", "fp16", "cls", 1024),
        ("_pool_kernel", "fp32", "mean", 1),
        ("_partial_kernel", "fp32", "max", 384),
        ("_partial_kernel", "bf16", "weighted", 4096),
        ("_combine_kernel", "bf16", "mean", 1024),
    ],
)
def test_compiles_without_spills(
    kernel: str,
    dtype: str,
    pooling: str,
    width: int,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from penstock.kernels.pooling import _triton

    function = getattr(_triton, kernel)
    options = _triton.tile_options(width)
    constants = {
        "POOLING": pooling,
        "NORMALIZE": "by_sequence",
        "HAS_DIMENSIONS": True,
        "HAS_SKIP": True,
        "BLOCK_ROWS": _triton.BLOCK_ROWS,
        "UNROLL": options.pop("UNROLL"),
        "BLOCK_D": options.pop("BLOCK_D"),
    }
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    if width == 1:
        # triton makes a constant of an integer argument that is 1.
        constants |= {"hidden_size": 1, "stride_row": 1}
    types = POINTERS | {"hidden_ptr": f"*{dtype}"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    # What triton finds out at launch: tensors are aligned, and so are rows whose length is a multiple of 16.
    aligned = [name for name in function.arg_names if name.endswith("_ptr")]
    if width % 16 == 0:
        aligned += [name for name in ("stride_row", "hidden_size") if name in function.arg_names]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}

    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    report = ptxas_report(ptx, capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    if width % 16 == 0:
        assert ".v4.b32" in ptx, "rows are not read 16 bytes at a time"
