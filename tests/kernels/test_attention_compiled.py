"""The triton kernels of attention and kv_store compiled ahead of time for GPUs that this machine need not have."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from .ptxas import ptxas_report

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels do not compile"),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compile_kernel(
    function: Any, dtype: str, constants: dict[str, Any], options: dict[str, int], capability: int, folder: Path
) -> tuple[str, str]:
    """(PTX, what ptxas says about it), for tensors and strides that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"cu_seqlens_ptr": "*i32", "context_lens_ptr": "*i32", "block_tables_ptr": "*i32"}
    types |= {"rows_ptr": "*i64", "slots_ptr": "*i64", "scale": "fp32", "cap": "fp32"}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature = {
        name: "constexpr" if name in constants else types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
    }
    aligned = [name for name in function.arg_names if name.endswith("_ptr") or name.startswith("stride_")]
    aligned += [name for name in ("head_size", "width") if name in function.arg_names]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    return ptx, ptxas_report(ptx, capability, folder)


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("dtype", "head_size", "is_paged", "has_cap", "group_size"),
    [
        ("bf16", 64, True, False, 4),
        pytest.param("bf16", 128, True, False, 2, marks=pytest.mark.slow),
        pytest.param("bf16", 80, True, False, 1, marks=pytest.mark.slow),
        pytest.param("bf16", 256, True, True, 2, marks=pytest.mark.slow),
        pytest.param("fp16", 256, False, True, 2, marks=pytest.mark.slow),
        pytest.param("fp32", 64, True, False, 1, marks=pytest.mark.slow),
        pytest.param("fp32", 128, True, False, 4, marks=pytest.mark.slow),
        pytest.param("fp32", 256, True, True, 2, marks=pytest.mark.slow),
    ],
)
def test_attention_compiles_without_spills(
    dtype: str,
    head_size: int,
    is_paged: bool,
    has_cap: bool,
    group_size: int,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    from penstock.kernels.attention import _triton

    options = _triton.tile_options(head_size, DTYPES[dtype])
    constants = {
        "IS_PAGED": is_paged,
        "HAS_LEFT": True,
        "HAS_RIGHT": True,
        "HAS_CAP": has_cap,
        "GROUP_SIZE": group_size,
        "BLOCK_SIZE": 16,
    } | {name: options.pop(name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
    ptx, report = compile_kernel(_triton._attention_kernel, dtype, constants, options, capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    if dtype != "fp32":
        assert "mma" in ptx, "products do not run on tensor cores"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "width"), [("bf16", 128), ("fp32", 1024)])
def test_kv_store_compiles_to_wide_copies(
    dtype: str, width: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    from penstock.kernels.kv_store import _triton

    options = _triton.tile_options(width, DTYPES[dtype].itemsize)
    constants = {"HAS_ROWS": True, "BLOCK_D": options.pop("BLOCK_D")}
    ptx, report = compile_kernel(_triton._kv_store_kernel, dtype, constants, options, capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    if dtype == "fp32":
        assert ".v4.b32" in ptx, "rows are not copied 16 bytes at a time"
