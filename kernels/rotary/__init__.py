"""The steps of decoders between the product for q, k and v and attention: norm and rotation of heads, stored rows.

Knows nothing about frequencies: the angles come as cosines and sines. Halves turn together, as in GPT-NeoX.
Sources: Su et al., RoFormer (arXiv 2104.09864), equation 34; Zhang and Sennrich, Root Mean Square Layer Normalization
(arXiv 1910.07467).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import FLOAT_DTYPES, Backend, check_tensor, choose, describe

__all__ = ["Backend", "HeadNorm", "KvSlots", "rotary"]


class HeadNorm(NamedTuple):
    """RMSNorm of heads.

    Attributes:
        weight: [heads, K], float32, contiguous.
        eps: Added to the mean square.
    """

    weight: Tensor
    eps: float


class KvSlots(NamedTuple):
    """Where keys and values are kept.

    Attributes:
        k_cache: [P, block_size, Hkv, K], dtype and device of q, contiguous. Written in place.
        v_cache: As `k_cache`.
        slots: [T], int64, same device: slot b * block_size + i is place i of block b; a negative one is not stored. No
            slot twice. The values are not checked.
    """

    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_turned: int,
    *,
    norm: HeadNorm | None = None,
    store: KvSlots | None = None,
    backend: Backend | None = None,
) -> None:
    """Normalises and rotates the first heads of every row in place, and stores keys and values, in one pass.

    A head x of the first `num_turned` becomes x / sqrt(mean(x^2) + eps) * weight where there is a norm. Then, of its
    columns, a = x[:J] and b = x[J : 2 J] become a cos - b sin and b cos + a sin; the others stay. The arithmetic is
    float32, and each result is rounded once. Every backend is held to the reference within 1e-5 of the largest
    value for float32, and 1e-2 otherwise.

    Args:
        qkv: [T, U, K], float32/bfloat16/float16, last two axes contiguous: heads of q, then of k, then of v. The first
            `num_turned` are written in place, the others only read.
        cos: [T, J], float32, last axis contiguous, 2 J <= K.
        sin: As `cos`, with the same strides.
        num_turned: Heads of q and k together.
        norm: Norm of these heads before the rotation; None has none.
        store: Slots of the cache that keys and values are copied to; None stores nothing.
        backend: None takes "triton" for CUDA tensors where it is installed, else "torch". "reference" is "torch".

    Raises:
        ValueError: Shapes, dtypes or strides do not fit together; the message says which.
    """
    _check(qkv, cos, sin, num_turned, norm, store)
    if choose(backend, qkv) != "triton":
        _rotary_torch(qkv, cos, sin, num_turned, norm, store)
    elif qkv.shape[0]:
        from ._triton import rotary_triton

        rotary_triton(qkv, cos, sin, num_turned, norm, store)


def _check(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_turned: int, norm: HeadNorm | None, store: KvSlots | None
) -> None:
    """Checks shapes, types and strides. Runs once a layer and takes a few microseconds."""
    if qkv.dim() != 3 or qkv.dtype not in FLOAT_DTYPES or qkv.stride()[1:] != (qkv.shape[2], 1):
        raise ValueError(
            f"qkv must be [T, U, K] float32, bfloat16 or float16 with its last two axes contiguous, "
            f"got {describe(qkv)} with strides {qkv.stride()}"
        )
    num_rows, num_heads, head_size = qkv.shape
    if not 0 < num_turned <= num_heads:
        raise ValueError(f"num_turned must be from 1 to {num_heads}, got {num_turned}")
    if cos.dim() != 2 or cos.dtype != torch.float32 or cos.shape[0] != num_rows or 2 * cos.shape[1] > head_size:
        raise ValueError(f"cos must be float32 [{num_rows}, J] with 2 J <= {head_size}, got {describe(cos)}")
    if cos.shape[1] == 0 or cos.stride(1) != 1 or cos.stride() != sin.stride():
        raise ValueError("cos and sin must have columns that are contiguous, and the same strides")
    check_tensor("sin", sin, tuple(cos.shape), torch.float32, qkv.device)
    if norm is not None:
        check_tensor("norm.weight", norm.weight, (num_turned, head_size), torch.float32, qkv.device)
        if not norm.weight.is_contiguous():
            raise ValueError("norm.weight must be contiguous")
    if store is None:
        return
    check_tensor("store.slots", store.slots, (num_rows,), torch.int64, qkv.device)
    num_kv_heads = num_heads - num_turned
    for name, cache in (("k_cache", store.k_cache), ("v_cache", store.v_cache)):
        if cache.dim() != 4 or cache.shape[2:] != (num_kv_heads, head_size) or cache.dtype != qkv.dtype:
            raise ValueError(
                f"store.{name} must be {qkv.dtype} [P, block_size, {num_kv_heads}, {head_size}], got {describe(cache)}"
            )
        if cache.device != qkv.device or not cache.is_contiguous():
            raise ValueError(f"store.{name} must be contiguous, on {qkv.device} like qkv")
    if num_turned < 2 * num_kv_heads:
        raise ValueError(f"{num_turned} heads of q and k are too few for {num_kv_heads} of v")


def _rotary_torch(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_turned: int, norm: HeadNorm | None, store: KvSlots | None
) -> None:
    """Same as `rotary`. With `store` it waits for the device of the slots."""
    turned_TUK = qkv[:, :num_turned]
    x_TUK = turned_TUK.float()
    if norm is not None:
        scale_TU1 = torch.linalg.vector_norm(x_TUK, dim=-1, keepdim=True)
        scale_TU1 = scale_TU1.square_().div_(x_TUK.shape[-1]).add_(norm.eps).rsqrt_()
        x_TUK = (x_TUK * scale_TU1).mul_(norm.weight)
    num_pairs = cos.shape[1]
    a_TUJ, b_TUJ = x_TUK[..., :num_pairs], x_TUK[..., num_pairs : 2 * num_pairs]
    cos_T1J, sin_T1J = cos[:, None], sin[:, None]
    first_TUJ = (a_TUJ * cos_T1J).addcmul_(b_TUJ, sin_T1J, value=-1)
    # Without a norm float32 rows are written in place: `a` is read before it is written.
    turned_TUK[..., num_pairs : 2 * num_pairs] = b_TUJ.mul_(cos_T1J).addcmul_(a_TUJ, sin_T1J)
    turned_TUK[..., :num_pairs] = first_TUJ
    if norm is not None:
        turned_TUK[..., 2 * num_pairs :] = x_TUK[..., 2 * num_pairs :]
    if store is None:
        return
    is_stored = store.slots >= 0
    keys_TGK, values_TGK = qkv[:, 2 * num_turned - qkv.shape[1] : num_turned], qkv[:, num_turned:]
    for cache, rows_TGK in ((store.k_cache, keys_TGK), (store.v_cache, values_TGK)):
        cache.flatten(0, 1)[store.slots[is_stored]] = rows_TGK[is_stored]
