"""Kernels that see heads: attention, their norm and rotation."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.attention import attention, attention_paged
from penstock.kernels.rotary import HeadNorm, KvDestination, rotary

from .work import Heads, Inputs, Work


def packed_attention(softcap: float | None, inputs: Inputs, size: Heads, *, has_bias: bool = False) -> Work:
    """Attends within sequences, two ways; with a bias of the scores as MPNet has it."""
    tokens = sum(size.lengths)
    both = size.heads + 2 * size.kv_heads
    qkv = inputs.normal(tokens, both, size.size)
    q, k, v = qkv.split([size.heads, size.kv_heads, size.kv_heads], dim=1)
    bias = inputs.normal(size.heads, 2 * max(size.lengths) + 1) if has_bias else None
    call = partial(
        attention,
        *(q, k, v, inputs.borders(size.lengths), size.lengths),
        max_seqlen=max(size.lengths),
        scale=size.size**-0.5,
        relative_bias=bias,
        softcap=softcap,
    )
    operations = 4 * size.heads * size.size * sum(length**2 for length in size.lengths)
    moved = qkv.nbytes + q.numel() * q.itemsize + (0 if bias is None else bias.nbytes)
    return Work(call, moved, operations, reference="sdpa")


def paged_attention(inputs: Inputs, size: Heads) -> Work:
    """Attends to a past in blocks of 16 tokens."""
    block = 16
    counts = [-(-(size.past + length) // block) for length in size.lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, part in zip(tables, order.split(counts), strict=True):
        row[: len(part)] = part
    caches = [inputs.normal(sum(counts), block, size.kv_heads, size.size) for _ in range(2)]
    q = inputs.normal(sum(size.lengths), size.heads, size.size)
    call = partial(
        attention_paged,
        *(q, *caches, tables.to(inputs.device), inputs.borders(size.lengths), size.lengths),
        (size.past,) * len(size.lengths),
        scale=size.size**-0.5,
    )
    seen = sum(length * (size.past + (length + 1) / 2) for length in size.lengths)
    return Work(call, 2 * q.nbytes + 2 * caches[0].nbytes, int(4 * size.heads * size.size * seen), reference="sdpa")


def turning(inputs: Inputs, size: Heads) -> Work:
    """Rotates the heads of q and k, as ModernBERT does."""
    qkv = inputs.normal(sum(size.lengths), size.heads + 2 * size.kv_heads, size.size)
    cos, sin = angles(inputs, size)
    num_rotated = size.heads + size.kv_heads
    moved = 2 * qkv[:, :num_rotated].numel() * qkv.itemsize + 2 * cos.nbytes
    return Work(partial(rotary, qkv, cos, sin, num_rotated), moved, written=(qkv,))


def turning_and_storing(inputs: Inputs, size: Heads) -> Work:
    """Norms and rotates the heads of q and k and puts keys and values into their blocks, as Qwen3 does."""
    qkv = inputs.normal(sum(size.lengths), size.heads + 2 * size.kv_heads, size.size)
    cos, sin = angles(inputs, size)
    num_rotated = size.heads + size.kv_heads
    norm = HeadNorm(inputs.normal(num_rotated, size.size, dtype=torch.float32), 1e-6)
    store = places(inputs, size)
    call = partial(rotary, qkv, cos, sin, num_rotated, norm=norm, store=store)
    read, stored = qkv.numel(), 2 * size.kv_heads * size.size * len(qkv)
    moved = (read + qkv[:, :num_rotated].numel() + stored) * qkv.itemsize + 2 * cos.nbytes + store.slot_mapping.nbytes
    return Work(call, moved, written=(qkv, store.k_cache, store.v_cache))


def angles(inputs: Inputs, size: Heads) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of any angles, a pair for every two columns of a head."""
    turns = 2 * math.pi * inputs.uniform(sum(size.lengths), size.size // 2)
    return turns.cos(), turns.sin()


def places(inputs: Inputs, size: Heads) -> KvDestination:
    """Returns empty blocks, twice as many as the tokens fill, and a slot for each token in disorder."""
    tokens, block = sum(size.lengths), 16
    num_blocks = 2 * -(-tokens // block)
    caches = (
        torch.zeros(num_blocks, block, size.kv_heads, size.size, dtype=inputs.dtype, device=inputs.device) for _ in "kv"
    )
    slots = torch.randperm(num_blocks * block, generator=torch.Generator().manual_seed(0))[:tokens]
    return KvDestination(*caches, slots.to(inputs.device))
