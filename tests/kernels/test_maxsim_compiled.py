"""The triton kernel of maxsim compiled ahead of time for GPUs that this machine need not have."""

from pathlib import Path

import pytest

from ..interpreter import IS_INTERPRETED, needs_triton
from .ptxas import ptxas_report

pytestmark = [
    needs_triton,
    pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels do not compile"),
]


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("dtype", "block_q"),
    [("fp32", 32), pytest.param("bf16", 32, marks=pytest.mark.slow), pytest.param("fp16", 16, marks=pytest.mark.slow)],
)
def test_compiles_without_spills(
    dtype: str, block_q: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from penstock.kernels.maxsim import _triton

    rows = dict.fromkeys(("queries_ptr", "documents_ptr"), f"*{dtype}")
    numbers = dict.fromkeys(("stride_query", "stride_document", "width", "num_columns"), "i32")
    blocks = {"BLOCK_Q": block_q, "BLOCK_R": _triton.BLOCK_R, "BLOCK_D": _triton.BLOCK_D}
    signature = {**rows, "bounds_ptr": "*i64", "out_ptr": "*fp32", **numbers, **dict.fromkeys(blocks, "constexpr")}
    source = ASTSource(_triton._maxsim_kernel, signature, constexprs=blocks)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    report = ptxas_report(compiled.asm["ptx"], capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
