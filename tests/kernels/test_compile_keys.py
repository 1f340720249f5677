"""Arguments that differ between batches are not specialised, so that no batch compiles a kernel again.

Triton compiles one variant of a kernel for an integer argument that is 1, one for multiples of 16 and one for the rest,
and variants for the alignment of pointers. A compilation in the middle of traffic takes a second.
"""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock.kernels

from ..interpreter import IS_INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels have no compile keys")]

ROOT = Path(penstock.kernels.__file__).parent
MODULES = [
    ".".join(("penstock.kernels", *path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted(ROOT.rglob("*.py"))
    if "import triton" in path.read_text("utf-8")
]
OF_A_MODEL = re.compile(
    r"stride_(?!table)\w+|(\w+_)?(width|size|heads|channels|groups|positions)|heads_per_group|head_states|num_in|num_out"
)
"""Integers that are fixed for a model: widths, numbers of heads and strides."""
OF_A_CLIENT = frozenset({("penstock.kernels.pooling._triton", "width")})
"""Arguments with such a name that a request sets: `dimensions` is the width of the pooled rows."""
FLOATS = frozenset({"cap", "eps", "log2_e", "scale"})
INDICES = (
    *("cu_seqlens", "context_lens", "block_tables", "bounds", "rows", "slots"),
    *("ids", "positions", "types", "dimensions", "normalize", "skip"),
)
"""Pointers to values that are read one by one; they may start anywhere in a larger buffer."""


def kernels() -> list[Any]:
    """Triton functions with the suffix `_kernel`. Only these are launched."""
    from triton.runtime.jit import JITFunction

    return [
        value
        for name in MODULES
        for key, value in vars(importlib.import_module(name)).items()
        if isinstance(value, JITFunction) and value.module == name and key.endswith("_kernel")
    ]


def varies(module: str, name: str) -> bool:
    """Whether two batches of one model may have different values of this argument."""
    if name.endswith("_ptr"):
        return name.removesuffix("_ptr") in INDICES
    return name not in FLOATS and (OF_A_MODEL.fullmatch(name) is None or (module, name) in OF_A_CLIENT)


def keys_of(kernel: Any, is_varied: Any) -> set[str]:
    """Compile keys as Triton makes them at launch, for several values of the varied arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    buffer = torch.zeros(64, dtype=torch.int32)
    assert buffer.data_ptr() % 16 == 0
    keys = set()
    for number, pointer in ((1, buffer), (16, buffer[1:]), (17, buffer), (2, buffer[1:]), (-1, buffer)):
        arguments: dict[str, Any] = {}
        for param in kernel.params:
            if param.is_constexpr:
                arguments[param.name] = 64
            elif param.name.endswith("_ptr"):
                arguments[param.name] = pointer if is_varied(param) else buffer
            elif param.name in FLOATS:
                arguments[param.name] = number / 3
            else:
                arguments[param.name] = number if is_varied(param) else 384
        keys.add(str(bind(**arguments)[1]))
    return keys


def test_compile_keys_do_not_depend_on_the_batch() -> None:
    """A failing argument belongs in do_not_specialize, or in OF_A_MODEL if it is fixed for a model."""
    assert len(kernels()) >= 11
    for kernel in kernels():
        keys = keys_of(kernel, lambda param, module=kernel.module: varies(module, param.name))
        assert len(keys) == 1, f"{kernel.module} {kernel.__name__}: {keys}"
    kernel = next(k for k in kernels() for p in k.params if p.name == "width" and not p.do_not_specialize)
    assert len(keys_of(kernel, lambda param: param.name == "width")) == 3, "a specialised number must be detected"
