"""Steps of a decoder between the QKV projection and attention: head norm, rotary embedding, KV cache write.

The caller passes the angles as cosines and sines. The first half of the columns is rotated with the second half, as in
GPT-NeoX.
Sources: Su et al., RoFormer (arXiv 2104.09864), equation 34; Zhang and Sennrich, Root Mean Square Layer Normalization
(arXiv 1910.07467).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import FLOAT_DTYPES, Backend, check_tensor, choose, describe

__all__ = ["Backend", "HeadNorm", "KvDestination", "rotary"]


class HeadNorm(NamedTuple):
    """RMSNorm of heads.

    Attributes:
        weight: [heads, K], float32, contiguous.
        eps: Added to the mean square.
    """

    weight: Tensor
    eps: float


class KvDestination(NamedTuple):
    """Destination of keys and values in the KV cache.

    Attributes:
        k_cache: [P, block_size, Hkv, K], dtype and device of q, contiguous. Written in place.
        v_cache: As `k_cache`.
        slot_mapping: [T], int64, same device: slot b * block_size + i is row i of block b. Tokens with a negative slot
            are not stored. Slots must be unique. The values are not checked.
    """

    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_rotated: int,
    *,
    norm: HeadNorm | None = None,
    store: KvDestination | None = None,
    backend: Backend | None = None,
) -> None:
    """Normalises and rotates the first heads of every row in place, and stores keys and values, in one pass.

    With a norm, each of the first `num_rotated` heads x becomes x / sqrt(mean(x^2) + eps) * weight. Then the columns
    a = x[:J] and b = x[J : 2 J] become a cos - b sin and b cos + a sin; other columns do not change. The arithmetic is
    float32, and each result is rounded once. Tests allow a difference to the reference of 1e-5 of the largest value for
    float32, else 1e-2.

    Args:
        qkv: [T, U, K], float32/bfloat16/float16, last two axes contiguous: heads of q, then of k, then of v. The first
            `num_rotated` are written in place, the others only read.
        cos: [T, J], float32, last axis contiguous, 2 J <= K.
        sin: As `cos`, with the same strides.
        num_rotated: Number of heads of q and k.
        norm: Norm of the heads of q and k before the rotation; None: no norm.
        store: Slots of the cache for keys and values; None stores nothing.
        backend: None selects "triton" for CUDA tensors if it is installed, else "torch".

    Raises:
        ValueError: Shapes, dtypes or strides do not match; the message names the argument.
    """
    _check(qkv, cos, sin, num_rotated, norm, store)
    if choose(backend, qkv) != "triton":
        _rotary_torch(qkv, cos, sin, num_rotated, norm, store)
    elif qkv.shape[0]:
        from ._triton import rotary_triton

        rotary_triton(qkv, cos, sin, num_rotated, norm, store)


def _check(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int, norm: HeadNorm | None, store: KvDestination | None
) -> None:
    """Runs once per layer and takes a few microseconds."""
    if qkv.dim() != 3 or qkv.dtype not in FLOAT_DTYPES or qkv.stride()[1:] != (qkv.shape[2], 1):
        raise ValueError(
            f"qkv must be [T, U, K] float32, bfloat16 or float16 with its last two axes contiguous, "
            f"got {describe(qkv)} with strides {qkv.stride()}"
        )
    num_rows, num_heads, head_size = qkv.shape
    if not 0 < num_rotated <= num_heads:
        raise ValueError(f"num_rotated must be from 1 to {num_heads}, got {num_rotated}")
    if cos.dim() != 2 or cos.dtype != torch.float32 or cos.shape[0] != num_rows or 2 * cos.shape[1] > head_size:
        raise ValueError(f"cos must be float32 [{num_rows}, J] with 2 J <= {head_size}, got {describe(cos)}")
    if cos.shape[1] == 0 or cos.stride(1) != 1 or cos.stride() != sin.stride():
        raise ValueError("cos and sin must have contiguous columns and equal strides")
    check_tensor("sin", sin, tuple(cos.shape), torch.float32, qkv.device)
    if norm is not None:
        check_tensor("norm.weight", norm.weight, (num_rotated, head_size), torch.float32, qkv.device)
        if not norm.weight.is_contiguous():
            raise ValueError("norm.weight must be contiguous")
    if store is None:
        return
    check_tensor("store.slot_mapping", store.slot_mapping, (num_rows,), torch.int64, qkv.device)
    num_kv_heads = num_heads - num_rotated
    for name, cache in (("k_cache", store.k_cache), ("v_cache", store.v_cache)):
        if cache.dim() != 4 or cache.shape[2:] != (num_kv_heads, head_size) or cache.dtype != qkv.dtype:
            raise ValueError(
                f"store.{name} must be {qkv.dtype} [P, block_size, {num_kv_heads}, {head_size}], got {describe(cache)}"
            )
        if cache.device != qkv.device or not cache.is_contiguous():
            raise ValueError(f"store.{name} must be contiguous, on {qkv.device} like qkv")
    if num_rotated < 2 * num_kv_heads:
        raise ValueError(f"{num_rotated} heads of q and k are too few for {num_kv_heads} of v")


def _rotary_torch(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int, norm: HeadNorm | None, store: KvDestination | None
) -> None:
    """Same as `rotary`. On CUDA, `store` synchronises host and device."""
    rotated_TUK = qkv[:, :num_rotated]
    x_TUK = rotated_TUK.float()
    if norm is not None:
        scale_TU1 = torch.linalg.vector_norm(x_TUK, dim=-1, keepdim=True)
        scale_TU1 = scale_TU1.square_().div_(x_TUK.shape[-1]).add_(norm.eps).rsqrt_()
        x_TUK = (x_TUK * scale_TU1).mul_(norm.weight)
    num_pairs = cos.shape[1]
    a_TUJ, b_TUJ = x_TUK[..., :num_pairs], x_TUK[..., num_pairs : 2 * num_pairs]
    cos_T1J, sin_T1J = cos[:, None], sin[:, None]
    first_TUJ = (a_TUJ * cos_T1J).addcmul_(b_TUJ, sin_T1J, value=-1)
    # Without a norm a_TUJ is a view of float32 qkv: read it before writing it.
    rotated_TUK[..., num_pairs : 2 * num_pairs] = b_TUJ.mul_(cos_T1J).addcmul_(a_TUJ, sin_T1J)
    rotated_TUK[..., :num_pairs] = first_TUJ
    if norm is not None:
        rotated_TUK[..., 2 * num_pairs :] = x_TUK[..., 2 * num_pairs :]
    if store is None:
        return
    is_stored = store.slot_mapping >= 0
    keys_TGK, values_TGK = qkv[:, 2 * num_rotated - qkv.shape[1] : num_rotated], qkv[:, num_rotated:]
    for cache, rows_TGK in ((store.k_cache, keys_TGK), (store.v_cache, values_TGK)):
        cache.flatten(0, 1)[store.slot_mapping[is_stored]] = rows_TGK[is_stored]
