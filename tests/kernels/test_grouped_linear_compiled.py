"""The triton kernel of grouped_linear compiled ahead of time for GPUs that this machine need not have."""

from pathlib import Path

import pytest
import torch

from ..interpreter import IS_INTERPRETED, needs_triton
from .ptxas import ptxas_report

pytestmark = [
    needs_triton,
    pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels do not compile"),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize("is_many", [False, True], ids=["few_rows", "many_rows"])
@pytest.mark.parametrize("num_groups", [16, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_compiles_without_spills(
    dtype: str, num_groups: int, is_many: bool, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from penstock.kernels.grouped_linear import _triton

    tile = _triton.tile_options(DTYPES[dtype], 100_000 if is_many else 1, num_groups)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in tile}
    constants = {"BLOCK_G": num_groups, "PRECISION": "ieee", **tile}
    pointers = dict.fromkeys(("x_ptr", "weight_ptr"), f"*{dtype}") | {"ends_ptr": "*i32", "out_ptr": f"*{dtype}"}
    numbers = dict.fromkeys(("stride_x", "num_groups", "num_in", "num_out"), "i32")
    names = ("x_ptr", "weight_ptr", "ends_ptr", "out_ptr", *numbers)
    signature = {name: (pointers | numbers)[name] for name in names} | dict.fromkeys(constants, "constexpr")
    # What launches specialise: pointers and widths that are multiples of 16.
    aligned = [names.index(n) for n in (*pointers, "stride_x", "num_in", "num_out")]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(_triton._grouped_kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    report = ptxas_report(compiled.asm["ptx"], capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert compiled.metadata.shared <= {80: 163 << 10, 90: 227 << 10}[capability]
