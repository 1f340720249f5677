"""The triton kernels of norms and gates compiled ahead of time for GPUs that this machine need not have."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ..interpreter import IS_INTERPRETED, needs_triton
from .ptxas import ptxas_report

pytestmark = [
    needs_triton,
    pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels do not compile"),
]

# Tensors in the dtype of the model; places are float32, and what is looked up int64.
TYPES = {"place_ptr": "*fp32", "ids_ptr": "*i64", "positions_ptr": "*i64", "types_ptr": "*i64", "eps": "fp32"}


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("kernel", "dtype", "width", "options"),
    [
        ("_norm_kernel", "bf16", 384, {"IS_RMS": False}),
        ("_norm_kernel", "bf16", 1024, {"IS_RMS": False}),
        ("_norm_kernel", "bf16", 1024, {"IS_RMS": True}),
        ("_norm_kernel", "fp32", 1000, {"IS_RMS": False}),
        ("_norm_kernel", "fp32", 8192, {"IS_RMS": False}),
        ("_norm_kernel", "fp16", 1, {"IS_RMS": True}),
        ("_embed_norm_kernel", "bf16", 384, {}),
        ("_embed_norm_kernel", "bf16", 1024, {}),
        ("_embed_norm_kernel", "fp32", 8192, {}),
        ("_gated_kernel", "bf16", 1152, {"ACTIVATION": "gelu"}),
        ("_gated_kernel", "bf16", 3072, {"ACTIVATION": "silu"}),
        ("_gated_kernel", "fp32", 63, {"ACTIVATION": "gelu_tanh"}),
        ("_gated_norm_kernel", "bf16", 1536, {}),
        ("_gated_norm_kernel", "bf16", 5120, {}),
        ("_gated_norm_kernel", "fp32", 8192, {}),
    ],
)
def test_compiles_without_spills(
    kernel: str,
    dtype: str,
    width: int,
    options: dict[str, Any],
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = import_module(f"penstock.kernels.{'gated' if kernel.startswith('_gated') else 'norm'}._triton")
    function = getattr(module, kernel)
    tile = module.norm_tile_options(width) if kernel == "_gated_norm_kernel" else module.tile_options(width)
    launch = {"num_warps": tile.pop("num_warps")}
    has = [name for name in function.arg_names if name.startswith(("HAS_", "STORES_"))]
    constants = {"IS_RMS": False} | dict.fromkeys(has, True) | tile | options
    if width == 1:
        # triton makes a constant of an integer argument that is 1.
        constants |= {"width": 1}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}

    def type_of(name: str) -> str:
        if (kernel, name) == ("_gated_norm_kernel", "weight_ptr"):
            return "*fp32"
        return TYPES.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")

    signature = {name: "constexpr" if name in constants else type_of(name) for name in function.arg_names}
    # What triton finds out at launch: tensors are aligned, and so are rows whose length is a multiple of 16.
    # Ids lie where the batch has them.
    free = {parameter.name for parameter in function.params if parameter.do_not_specialize}
    aligned = [name for name in function.arg_names if name.endswith("_ptr") and name not in free]
    if width % 16 == 0:
        aligned += [
            name for name in function.arg_names if name.startswith("stride") or name in ("width", "group_width")
        ]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}

    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
    ptx = compiled.asm["ptx"]
    report = ptxas_report(ptx, capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    if width % 16 == 0:
        assert ".v4.b32" in ptx, "rows are not read 16 bytes at a time"
        assert "st.global.v4.b32" in ptx, "rows are not written 16 bytes at a time"
