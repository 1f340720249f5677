"""Choice of a backend, checks of arguments and uploads to a device, for all kernels."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Backend = Literal["triton", "torch", "reference"]


class Recurrence(NamedTuple):
    """Arguments of a recurrence of state space models; `selective_scan` and `ssd` state the shapes."""

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
    """Whether the kernels for CUDA can be imported."""
    return find_spec("triton") is not None


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; of a CPU, where triton interprets, the least that the kernels are for."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def takes_tensor_cores(device: torch.device) -> bool:
    """Whether the triton kernels that are made for Ampere and later can run: on CUDA, where triton is installed."""
    return device.type == "cuda" and has_triton() and capability_of(device) >= (8, 0)


def choose(backend: Backend | None, x: Tensor, *, has_products: bool = False) -> Backend:
    """Returns the given backend; for None triton if `x` is on CUDA and triton is installed, else torch.

    Args:
        backend: As the caller of the kernel gave it.
        x: The kernel's input.
        has_products: Whether the triton kernel multiplies matrices: its tiles are made for compute capability 8.0, and
            devices before that have too little shared memory, or too few registers, for them. They take torch.

    Raises:
        ValueError: There is no such backend.
    """
    if backend is None:
        is_fit = takes_tensor_cores(x.device) if has_products else x.is_cuda and has_triton()
        return "triton" if is_fit else "torch"
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")
    return backend


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the device of a tensor the current one, for triton; does nothing on a CPU, where it interprets."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_rows(x: Tensor, cu_seqlens: Tensor, seq_lens: Sequence[int]) -> None:
    """Checks that the rows of `x` are floats and as many as the sequences say.

    Raises:
        ValueError: They are not.
    """
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    check_cu_seqlens(cu_seqlens, len(seq_lens))
    if sum(seq_lens) != x.shape[0] or min(seq_lens, default=0) < 0:
        raise ValueError(f"seq_lens must sum to the {x.shape[0]} rows of x, got a sum of {sum(seq_lens)}")


def check_cu_seqlens(cu_seqlens: Tensor, num_seqs: int) -> None:
    """Raises ValueError unless cu_seqlens is int32 and has the length for `num_seqs` sequences."""
    if cu_seqlens.shape != (num_seqs + 1,) or cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens must be int32 [{num_seqs + 1}], got {describe(cu_seqlens)}")


def check_softcap(softcap: float | None) -> None:
    """Raises ValueError for a cap that is not positive."""
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")


def check_tensor(
    name: str, value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Checks shape, dtype and device of an argument; one that is None passes.

    Raises:
        ValueError: One of them is wrong; the message names the argument.
    """
    if value is None:
        return
    if value.shape != shape or value.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {describe(value)}")
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like x, got {value.device}")


def describe(tensor: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def upload(values: Tensor, device: torch.device | str) -> Tensor:
    """Returns a tensor on `device`: itself where it is there.

    On CUDA the host goes on at once. The copy runs through pinned memory, which torch keeps until it has been made: one
    out of memory that is not pinned may wait for all that the stream has to do before it.
    """
    if values.is_cuda or torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
