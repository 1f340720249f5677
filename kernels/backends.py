"""Backend selection, argument checks and uploads to the device, shared by all kernels."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Backend = Literal["triton", "torch"]


class Recurrence(NamedTuple):
    """Arguments of a state space recurrence. `selective_scan` and `ssd` document the shapes."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    cu_seqlens: Tensor
    seq_lens: Sequence[int]
    d: Tensor | None
    initial_states: Tensor | None
    return_final_states: bool


@cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device. (8, 0), the lowest supported one, for a CPU (triton's interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def can_run_triton_products(device: torch.device) -> bool:
    """Whether triton is installed and the device is a CUDA device with compute capability 8.0 (Ampere) or later."""
    return device.type == "cuda" and has_triton() and capability_of(device) >= (8, 0)


def choose(backend: Backend | None, x: Tensor, *, has_products: bool = False) -> Backend:
    """Returns the backend; None becomes "triton" if `x` is on CUDA and triton is installed, else "torch".

    Args:
        backend: The argument of the kernel.
        x: The kernel's input.
        has_products: Whether the triton kernel multiplies matrices. Its tiles need the shared memory and registers of
            compute capability 8.0; on older devices None becomes "torch".

    Raises:
        ValueError: The backend is unknown.
    """
    if backend is None:
        can_run = can_run_triton_products(x.device) if has_products else x.is_cuda and has_triton()
        return "triton" if can_run else "torch"
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")
    return backend


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the CUDA device of a tensor current, as a triton launch needs. Does nothing for a CPU tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_rows(x: Tensor, cu_seqlens: Tensor, seq_lens: Sequence[int]) -> None:
    """Raises ValueError unless `x` has a float dtype and `seq_lens` and `cu_seqlens` fit its number of rows."""
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    check_cu_seqlens(cu_seqlens, len(seq_lens))
    if sum(seq_lens) != x.shape[0] or min(seq_lens, default=0) < 0:
        raise ValueError(f"seq_lens must sum to the {x.shape[0]} rows of x, got a sum of {sum(seq_lens)}")


def check_cu_seqlens(cu_seqlens: Tensor, num_seqs: int) -> None:
    """Raises ValueError unless cu_seqlens is int32 [num_seqs + 1]."""
    if cu_seqlens.shape != (num_seqs + 1,) or cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens must be int32 [{num_seqs + 1}], got {describe(cu_seqlens)}")


def check_softcap(softcap: float | None) -> None:
    """Raises ValueError if the cap is not positive."""
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")


def check_tensor(
    name: str, value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ValueError if an argument has another shape, dtype or device. Accepts None."""
    if value is None:
        return
    if value.shape != shape or value.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {describe(value)}")
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like x, got {value.device}")


def describe(tensor: Tensor) -> str:
    """Dtype and shape for error messages."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def upload(values: Tensor, device: torch.device | str) -> Tensor:
    """Returns the tensor on `device`. Does not copy if it is already there.

    A copy to CUDA is asynchronous: it reads pinned memory, which torch keeps until the copy is done. A copy from
    pageable memory could block the host until the stream has finished its earlier work.
    """
    if values.is_cuda or torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
