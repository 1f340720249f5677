"""The triton kernels of state space models compiled ahead of time for GPUs that this machine need not have."""

from importlib import import_module
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
# Tensors in the dtype of x; the others are float32, and cu_seqlens int32.
TYPED_LIKE_X = {
    "causal_conv1d": ("x_ptr", "y_ptr", "weight_ptr", "bias_ptr", "initial_ptr", "final_ptr"),
    "selective_scan": ("x_ptr", "y_ptr", "b_ptr", "c_ptr"),
    "ssd": ("x_ptr", "y_ptr", "b_ptr", "c_ptr"),
}


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize("chunk_size", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("operation", "kernel", "dtype", "state_size"),
    [
        ("causal_conv1d", "_convolve_kernel", "bf16", 0),
        pytest.param("causal_conv1d", "_final_states_kernel", "fp32", 0, marks=pytest.mark.slow),
        ("selective_scan", "_rows_kernel", "bf16", 16),
        pytest.param("selective_scan", "_rows_kernel", "fp32", 128, marks=pytest.mark.slow),
        pytest.param("selective_scan", "_chunk_states_kernel", "bf16", 16, marks=pytest.mark.slow),
        pytest.param("selective_scan", "_chunk_states_kernel", "fp32", 128, marks=pytest.mark.slow),
        pytest.param("selective_scan", "_pass_states_kernel", "bf16", 16, marks=pytest.mark.slow),
        ("ssd", "_chunk_states_kernel", "bf16", 128),
        pytest.param("ssd", "_chunk_states_kernel", "fp32", 128, marks=pytest.mark.slow),
        pytest.param("ssd", "_pass_states_kernel", "bf16", 128, marks=pytest.mark.slow),
        ("ssd", "_rows_kernel", "bf16", 128),
        pytest.param("ssd", "_rows_kernel", "fp16", 64, marks=pytest.mark.slow),
        pytest.param("ssd", "_rows_kernel", "fp32", 256, marks=pytest.mark.slow),
    ],
)
def test_compiles_without_spills(
    operation: str,
    kernel: str,
    dtype: str,
    state_size: int,
    chunk_size: int,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if chunk_size != 64 and (operation != "ssd" or dtype == "fp32"):
        pytest.skip("chunks of another size are for the products of ssd in 16 bits")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = import_module(f"penstock.kernels.{operation}._triton")
    function = getattr(module, kernel)
    constants: dict[str, Any] = dict.fromkeys(("HAS_BIAS", "HAS_INITIAL", "HAS_SILU", "HAS_D", "HAS_STATES"), True)
    constants |= {"WANTS_FINAL": True, "WIDTH": 4}
    if operation == "causal_conv1d":
        constants |= {name: getattr(module, name) for name in ("TILE_ROWS", "BLOCK_ROWS", "BLOCK_CHANNELS")}
    elif operation == "selective_scan":
        constants |= module.tile_options(state_size) | {"SIZE": module.CHUNK_SIZE, "BLOCK": module.BLOCK_STATES}
    else:
        constants |= module.tile_options(DTYPES[dtype], 64, state_size, chunk_size) | {"BLOCK": module.BLOCK_STATES}
    options = {name: constants[name] for name in ("num_warps", "maxnreg") if name in constants}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types = {"cu_seqlens_ptr": "*i32", "log2_e": "fp32"}
    types |= dict.fromkeys(TYPED_LIKE_X[operation], f"*{dtype}")

    def type_of(name: str) -> str:
        return types.get(name, "*fp32" if name.endswith("_ptr") else "i32")

    signature = {name: "constexpr" if name in constants else type_of(name) for name in function.arg_names}
    # What triton finds out at launch: tensors are aligned, and so are rows whose length is a multiple of 16.
    aligned = [
        name
        for name in function.arg_names
        if name.endswith("_ptr") or name.startswith("stride") or name in ("num_channels", "head_size", "state_size")
    ]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}

    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    report = ptxas_report(ptx, capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    if operation == "ssd" and kernel == "_rows_kernel" and dtype == "bf16":
        assert "mma" in ptx, "products do not use the tensor cores"
