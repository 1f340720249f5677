"""Writes keys and values of packed tokens into their slots of a paged cache.

Knows nothing about who owns a block. `attention_paged` of kernels/attention reads what is written here.
"""

import torch
from torch import Tensor

from .._packed import Backend, choose
from ._reference import kv_store_reference
from ._torch import kv_store_torch

__all__ = ["Backend", "kv_store"]


def kv_store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    rows: Tensor | None,
    slots: Tensor,
    backend: Backend | None = None,
) -> None:
    """Writes row rows[s] of `k` and `v` to slot slots[s] of `k_cache` and `v_cache`, in place, for every s.

    Slot b * block_size + i is place i of block b. Nothing else of the caches is read or written, and they are never
    copied. The values are copied bit for bit, NaN included.

    Args:
        k: [T, Hkv, K], any float type, last two axes contiguous (a chunk of a fused product is). Not modified.
        v: [T, Hkv, K], as `k`.
        k_cache: [P, block_size, Hkv, K], dtype and device of k, contiguous. Written in place.
        v_cache: As `k_cache`.
        rows: [S], int64, same device, in 0..T-1. None is all rows in order, and S = T.
        slots: [S], int64, same device, in 0..P * block_size - 1, no slot twice. On CUDA the values of `rows` and
            `slots` are not checked: that would cost a device-to-host copy.
        backend: None takes "triton" for CUDA tensors where it is installed, else "torch".

    Raises:
        ValueError: Shapes, dtypes, devices or strides do not fit together; the message says which.
        IndexError: On CPU: a row or a slot does not exist.
    """
    _check(k, v, k_cache, v_cache, rows, slots)
    if slots.shape[0] == 0:
        return
    backend = choose(backend, k)
    if backend == "triton":
        from ._triton import kv_store_triton

        kv_store_triton(k, v, k_cache, v_cache, rows, slots)
        return
    run = kv_store_torch if backend == "torch" else kv_store_reference
    run(k, v, k_cache, v_cache, rows, slots)


def _check(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor | None, slots: Tensor) -> None:
    """Checks what the host knows, in a few microseconds: this runs once a layer."""
    if k.dim() != 3 or k.shape != v.shape:
        raise ValueError(f"k and v must be [T, Hkv, K] alike, got {list(k.shape)} and {list(v.shape)}")
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[2:] != k.shape[1:]:
        raise ValueError(
            f"k_cache and v_cache must be [P, block_size, {k.shape[1]}, {k.shape[2]}], "
            f"got {list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    if not k.dtype == v.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(
            f"rows and caches must share one dtype, got {k.dtype}, {v.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    if not k_cache.is_contiguous() or not v_cache.is_contiguous():
        raise ValueError("k_cache and v_cache must be contiguous")
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] and x[0].numel() and not x[0].is_contiguous():
            raise ValueError(f"the last two axes of {name} must be contiguous, got strides {x.stride()}")
    num_stored = k.shape[0] if rows is None else rows.shape[0]
    for name, index in (("rows", rows), ("slots", slots)):
        if index is not None and (index.dtype != torch.int64 or index.shape != (num_stored,)):
            raise ValueError(f"{name} must be int64 [{num_stored}], got {index.dtype} {list(index.shape)}")
        if index is not None and index.device != k.device:
            raise ValueError(f"{name} must be on {k.device} like k, got {index.device}")
    if not k.device == v.device == k_cache.device == v_cache.device:
        raise ValueError(f"v and the caches must be on {k.device} like k")
