"""No kernel is compiled anew because a batch has other lengths: arguments that vary by batch are not specialised.

triton compiles one variant of a kernel for an integer argument that is 1, one for multiples of 16 and one for the rest,
and as many for pointers by their alignment. That pays for what a model fixes, such as the stride of a row, and costs a
second in the middle of traffic for what a batch brings.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock.kernels

from ..interpreter import IS_INTERPRETED, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels have no compile keys"),
]

ROOT = Path(penstock.kernels.__file__).parent
MODULES = [
    ".".join(("penstock.kernels", *path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted(ROOT.rglob("*.py"))
    if "import triton" in path.read_text("utf-8")
]
OF_A_MODEL = re.compile(
    r"stride_(?!table)\w+|(\w+_)?(width|size|heads|channels|groups|positions)|heads_per_group|head_states|num_in|num_out"
)
"""Integers that a model fixes: widths, numbers of heads, and how far rows of one projection lie apart."""
OF_A_CLIENT = frozenset({("penstock.kernels.pooling._triton", "width")})
"""Arguments with such a name that a client fixes: its `dimensions` are the width of the pooled rows."""
FLOATS = frozenset({"cap", "eps", "log2_e", "scale"})
"""Arguments that are no integers: triton specialises none of them."""
INDICES = (
    *("cu_seqlens", "context_lens", "block_tables", "bounds", "rows", "slots"),
    *("ids", "positions", "types", "dimensions", "normalize", "skip"),
)
"""Pointers to values that are read one by one; they may begin anywhere in a larger buffer."""
VALUES = (1, 16, 17, 2, 48, -1)


def kernels() -> list[Any]:
    """The functions that are launched: those whose names end with `_kernel`."""
    from triton.runtime.jit import JITFunction

    found = []
    for name in MODULES:
        module = importlib.import_module(name)
        found += [
            value
            for key, value in vars(module).items()
            if isinstance(value, JITFunction) and value.module == name and key.endswith("_kernel")
        ]
    return found


def test_all_modules_with_kernels_are_found() -> None:
    modules = {kernel.module for kernel in kernels()}
    assert {f"penstock.kernels.{room}._triton" for room in ("attention", "pooling", "rotary", "ssd")} <= modules
    assert len(kernels()) >= 11


def test_arguments_that_vary_by_batch_are_not_specialised() -> None:
    wrong = [
        f"{kernel.module} {kernel.__name__}: {param.name}"
        for kernel in kernels()
        for param in kernel.params
        if not param.is_constexpr and not param.do_not_specialize and varies(kernel.module, param.name)
    ]
    assert not wrong, "list them in do_not_specialize, or in OF_A_MODEL where every batch of a model has the same"


def varies(module: str, name: str) -> bool:
    """Whether an argument of that name may differ between two batches of one model, though the numbers do not show."""
    if name.endswith("_ptr"):
        return name.removesuffix("_ptr") in INDICES
    return name not in FLOATS and (OF_A_MODEL.fullmatch(name) is None or (module, name) in OF_A_CLIENT)


def test_compile_keys_are_the_same_for_all_numbers() -> None:
    """As triton makes them at launch, in 3.6 and 3.7 alike."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    buffer = torch.zeros(64, dtype=torch.int32)
    assert buffer.data_ptr() % 16 == 0
    for kernel in kernels():
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        keys = set()
        for number, pointer in zip(VALUES, [buffer, buffer[1:]] * 3, strict=True):
            arguments = {}
            for param in kernel.params:
                if param.is_constexpr:
                    arguments[param.name] = 64
                elif param.name.endswith("_ptr"):
                    arguments[param.name] = pointer if varies(kernel.module, param.name) else buffer
                else:
                    is_float = param.name in FLOATS
                    is_varied = varies(kernel.module, param.name)
                    arguments[param.name] = number / 3 if is_float else number if is_varied else 384
            _, specialization, _ = bind(**arguments)
            keys.add(str(specialization))
        assert len(keys) == 1, f"{kernel.module} {kernel.__name__}: {keys}"


def test_a_specialised_number_is_found_out() -> None:
    """The test above would see it: triton makes a constant of a 1 where nothing forbids it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, param = next((k, p) for k in kernels() for p in k.params if p.name == "width" and not p.do_not_specialize)
    bind = create_function_from_signature(
        inspect.Signature([kernel.signature.parameters["width"]]), [param], make_backend(GPUTarget("cuda", 90, 32))
    )
    assert len({str(bind(width=number)[1]) for number in (1, 16, 17)}) == 3


@pytest.mark.parametrize("num_rows", [300, 10], ids=["in_blocks", "at_once"])
def test_dimensions_of_a_client_compile_no_other_pooling(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile is part of the compile key, too: it follows the model's width alone."""
    from penstock.kernels.pooling import _triton, pool

    tiles: dict[str, set[str]] = {}

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Any:
            return lambda *_, **options: tiles.setdefault(self.name, set()).add(str(sorted(options.items())))

    for name in ("_pool_kernel", "_partial_kernel", "_combine_kernel"):
        monkeypatch.setattr(_triton, name, Recorded(name))
    rows, bounds = torch.zeros(num_rows, 768), torch.tensor([0, num_rows], dtype=torch.int32)
    for dimensions in (1, 16, 17, 64, 100, 511, 512, 767, 768, None):
        pool(rows, bounds, "mean", dimensions=dimensions, backend="triton")
    assert set(tiles) == ({"_partial_kernel", "_combine_kernel"} if num_rows > 256 else {"_pool_kernel"})
    assert all(len(keys) == 1 for keys in tiles.values()), tiles
