"""Reference of rotary: step by step in float32, and row by row into the cache."""

from typing import NamedTuple

import torch
from torch import Tensor


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


def rotary_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_turned: int, norm: HeadNorm | None, store: KvSlots | None
) -> None:
    """Same as `rotary`."""
    turned_TUK = qkv[:, :num_turned].float()
    if norm is not None:
        scale_TU1 = torch.rsqrt(turned_TUK.square().mean(-1, keepdim=True) + norm.eps)
        turned_TUK = turned_TUK * scale_TU1 * norm.weight
    num_pairs = cos.shape[1]
    a_TUJ, b_TUJ = turned_TUK[..., :num_pairs], turned_TUK[..., num_pairs : 2 * num_pairs]
    cos_T1J, sin_T1J = cos[:, None], sin[:, None]
    parts = [a_TUJ * cos_T1J - b_TUJ * sin_T1J, b_TUJ * cos_T1J + a_TUJ * sin_T1J, turned_TUK[..., 2 * num_pairs :]]
    qkv[:, :num_turned] = torch.cat(parts, dim=-1).to(qkv.dtype)
    if store is None:
        return
    block_size = store.k_cache.shape[1]
    num_kv_heads = qkv.shape[1] - num_turned
    for row, slot in zip(qkv, store.slots.tolist(), strict=True):
        if slot >= 0:
            store.k_cache[slot // block_size, slot % block_size] = row[num_turned - num_kv_heads : num_turned]
            store.v_cache[slot // block_size, slot % block_size] = row[num_turned:]
