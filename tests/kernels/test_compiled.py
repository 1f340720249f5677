"""Triton kernels compile without register spills for GPUs that this machine need not have."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from ..interpreter import IS_INTERPRETED, needs_triton
from ..tables import table

pytestmark = [needs_triton, pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels do not compile")]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TYPES = {name: kind for kind, names in table(__file__, "types_of_arguments").items() for name in names}
SIZES = ("head_size", "width", "group_width", "hidden_size", "state_size", "num_channels", "num_in", "num_out")
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Launch(NamedTuple):
    """A kernel with its constants and launch options.

    Attributes:
        types: Of pointers, if they differ from TYPES. The other pointers have the dtype `dtype`.
        is_aligned: Whether rows start at multiples of 16 elements.
        ptx: Instructions that the PTX must have.
    """

    function: Any
    dtype: str
    constants: dict[str, Any]
    types: Mapping[str, str] = MappingProxyType({})
    is_aligned: bool = True
    ptx: tuple[str, ...] = ()


def triton_module(kernel: str) -> Any:
    return import_module(f"penstock.kernels.{kernel}._triton")


def attention(
    capability: int, dtype: str, head_size: int, group_size: int, features: tuple[str, ...], num_rows: int
) -> Launch:
    module = triton_module("attention")
    is_loaded = "HAS_BIAS" in features or "HAS_CAP" in features
    device = (capability // 10, capability % 10)
    tile = module.tile_of(DTYPES[dtype], head_size, device, num_rows=num_rows, is_loaded=is_loaded)
    flags = ("IS_PAGED", "HAS_LEFT", "HAS_RIGHT", "HAS_CAP", "HAS_BIAS")
    constants = {flag: flag in features for flag in flags} | {
        "LOG2_E": module.LOG2_E,
        "GROUP_SIZE": group_size,
        "BLOCK_SIZE": 16,
        "HEAD_SIZE": head_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": module.padded_head(head_size),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.max_registers,
    }
    # Products run on the tensor cores of the device.
    product = "wgmma.mma_async" if capability == 90 else "mma.sync"
    return Launch(module._attention_kernel, dtype, constants, ptx=() if dtype == "fp32" else (product,))


def rotary(_capability: int, dtype: str, head_size: int, num_pairs: int, has_norm: bool) -> Launch:
    module = triton_module("rotary")
    constants = {"HAS_NORM": has_norm, "HAS_STORE": True, "HEAD_SIZE": head_size, "NUM_PAIRS": num_pairs}
    constants |= module.tile_options(24, head_size, num_pairs)
    wide_copies = ("ld.global.v4.b32", "st.global.v4.b32")
    return Launch(module._rotary_kernel, dtype, constants, {"weight_ptr": "*fp32"}, ptx=wide_copies)


def rows(_capability: int, kernel: str, dtype: str, width: int, options: dict[str, Any]) -> Launch:
    """The kernels of norm and gated."""
    module = triton_module("gated" if kernel.startswith("_gated") else "norm")
    function = getattr(module, kernel)
    is_gated_norm = kernel == "_gated_norm_kernel"
    flags = [name for name in function.arg_names if name.startswith(("HAS_", "STORES_"))]
    tile = module.norm_tile_options(width) if is_gated_norm else module.tile_options(width)
    constants = {"IS_RMS": False} | dict.fromkeys(flags, True) | tile | options
    if width == 1:  # Triton makes a constant of an integer argument that is 1
        constants["width"] = 1
    types = {"weight_ptr": "*fp32"} if is_gated_norm else {}
    wide_copies = (".v4.b32", "st.global.v4.b32") if width % 16 == 0 else ()
    return Launch(function, dtype, constants, types, width % 16 == 0, wide_copies)


def pooling(_capability: int, kernel: str, dtype: str, kind: str, width: int) -> Launch:
    module = triton_module("pooling")
    constants = {"POOLING": kind, "NORMALIZE": "by_sequence", "HAS_DIMENSIONS": True, "HAS_SKIP": True}
    constants |= {"BLOCK_ROWS": module.BLOCK_ROWS} | module.tile_options(width)
    if width == 1:
        constants |= {"hidden_size": 1, "stride_row": 1}
    wide_reads = (".v4.b32",) if width % 16 == 0 else ()
    return Launch(getattr(module, kernel), dtype, constants, {"out_ptr": "*fp32"}, width % 16 == 0, wide_reads)


def maxsim(_capability: int, dtype: str, block_q: int) -> Launch:
    module = triton_module("maxsim")
    constants = {"BLOCK_Q": block_q, "BLOCK_R": module.BLOCK_R, "BLOCK_D": module.BLOCK_D, "num_warps": 4}
    return Launch(module._maxsim_kernel, dtype, constants, {"out_ptr": "*fp32"}, is_aligned=False)


def grouped_linear(_capability: int, dtype: str, num_groups: int, num_rows: int) -> Launch:
    module = triton_module("grouped_linear")
    tile = module.tile_options(DTYPES[dtype], num_rows, num_groups)
    return Launch(module._grouped_kernel, dtype, {"BLOCK_G": num_groups, "PRECISION": "ieee"} | tile)


def recurrent(_capability: int, name: str, kernel: str, dtype: str, state_size: int, chunk_size: int) -> Launch:
    module = triton_module(name)
    flags = ("HAS_BIAS", "HAS_INITIAL", "HAS_SILU", "HAS_D", "HAS_STATES", "WANTS_FINAL")
    constants: dict[str, Any] = dict.fromkeys(flags, True) | {"WIDTH": 4}
    if name == "causal_conv1d":
        constants |= {size: getattr(module, size) for size in ("TILE_ROWS", "BLOCK_ROWS", "BLOCK_CHANNELS")}
    elif name == "selective_scan":
        constants |= module.tile_options(state_size) | {"SIZE": module.CHUNK_SIZE, "BLOCK": module.BLOCK_STATES}
    else:
        constants |= module.tile_options(DTYPES[dtype], 64, state_size, chunk_size) | {"BLOCK": module.BLOCK_STATES}
    function = getattr(module, kernel)
    types = {}
    if name != "causal_conv1d":
        typed_like_x = {"x_ptr", "y_ptr", "b_ptr", "c_ptr", "cu_seqlens_ptr"}
        types = {arg: "*fp32" for arg in function.arg_names if arg.endswith("_ptr") and arg not in typed_like_x}
    return Launch(function, dtype, constants, types, ptx=("mma",) if (name, kernel, dtype) == MMA else ())


MMA = ("ssd", "_rows_kernel", "bf16")
# The slow launches of attention needed more registers than ptxas gave them.
LAUNCHES = {make.__name__: make for make in (attention, rotary, rows, pooling, maxsim, grouped_linear, recurrent)}


def cases() -> list[Any]:
    """Each launch for sm_80 and sm_90. The quick tests compile only the quick launches, for sm_90."""
    found = []
    for capability in (80, 90):
        for launches in ("quick_launches", "slow_launches"):
            marks = [pytest.mark.slow] if capability == 80 or launches == "slow_launches" else []
            for name, *arguments in table(__file__, launches):
                case = "-".join([name, *map(str, arguments), str(capability)])
                found.append(pytest.param(LAUNCHES[name], (capability, *arguments), id=case, marks=marks))
    return found


@pytest.mark.parametrize(("make", "arguments"), cases())
def test_kernel_compiles_without_spills(
    make: Callable[..., Launch], arguments: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    capability, launch = arguments[0], make(*arguments)
    function, names = launch.function, launch.function.arg_names
    options = {name: launch.constants[name] for name in OPTIONS if name in launch.constants}
    constants = {name: value for name, value in launch.constants.items() if name in names}
    types = {**TYPES, **launch.types}

    def type_of(name: str) -> str:
        return types.get(name, f"*{launch.dtype}" if name.endswith("_ptr") else "i32")

    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    not_specialised = {parameter.name for parameter in function.params if parameter.do_not_specialize}
    aligned = {name for name in names if name.endswith("_ptr")}
    if launch.is_aligned:
        aligned |= {name for name in names if name.startswith("stride") or name in SIZES}
    aligned -= not_specialised | set(constants)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    report = capsys.readouterr().out
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    for instruction in launch.ptx:
        assert instruction in compiled.asm["ptx"]
    assert compiled.metadata.shared <= {80: 163 << 10, 90: 227 << 10}[capability]
