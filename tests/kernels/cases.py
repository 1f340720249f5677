"""Shapes and inputs that the kernel tests and benchmarks/kernels share."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PoolingCase:
    """A packed batch of hidden states. `is_quick` cases also run through triton's interpreter, row by row."""

    name: str
    seq_lens: tuple[int, ...]
    hidden_size: int
    is_quick: bool = False


POOLING_CASES = (
    PoolingCase("one_token", (1,), 1, is_quick=True),
    PoolingCase("one_row_each", (1, 1, 1, 1), 60, is_quick=True),
    PoolingCase("odd_with_empty", (0, 63, 0, 1, 5, 0), 60, is_quick=True),
    PoolingCase("several_blocks", (300, 3, 257), 60),
    PoolingCase("minilm", (12, 8), 384, is_quick=True),
    PoolingCase("odd_width", (9, 1, 2), 1000, is_quick=True),
    PoolingCase("thousand", (1000,), 384),
    PoolingCase("one_long_many_short", (1000, *([3] * 200)), 384),
    PoolingCase("all_empty", (0, 0), 60, is_quick=True),
)

# Timed, not tested for equality: what a server pools at once.
POOLING_BENCH_CASES = (
    PoolingCase("query", (8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 15, 16, 17, 18, 19, 20), 384),
    PoolingCase("mixed", tuple(range(8, 200, 6)), 384),
    PoolingCase("long", (200, 212, 230, 236, 244, 250, 262, 280), 384),
    PoolingCase("short_512", (8,) * 512, 384),
    PoolingCase("one_8192", (8192,), 1024),
)


@dataclass(frozen=True)
class PoolingInputs:
    hidden_states: Tensor
    cu_seqlens: Tensor
    weights: Tensor
    skip_tokens: Tensor
    dimensions: Tensor
    normalize: Tensor


def make_cu_seqlens(seq_lens: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor([0, *accumulate(seq_lens)], dtype=torch.int32, device=device)


def make_pooling_inputs(
    case: PoolingCase, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PoolingInputs:
    """The same numbers at every call and on every device."""
    generator = torch.Generator().manual_seed(len(case.seq_lens) * 1000 + case.hidden_size)
    num_tokens, num_seqs = sum(case.seq_lens), len(case.seq_lens)
    lengths = torch.tensor(case.seq_lens)
    skips = torch.randint(0, 4, (num_seqs,), generator=generator)
    return PoolingInputs(
        hidden_states=torch.randn(num_tokens, case.hidden_size, generator=generator).to(dtype).to(device),
        cu_seqlens=make_cu_seqlens(case.seq_lens, device),
        weights=torch.rand(num_tokens, generator=generator).to(device),
        # Here and there more than the sequence has.
        skip_tokens=torch.where(lengths > 4, skips, skips // 2).int().to(device),
        dimensions=torch.randint(1, case.hidden_size + 1, (num_seqs,), generator=generator).int().to(device),
        normalize=torch.randint(0, 2, (num_seqs,), generator=generator).bool().to(device),
    )


@dataclass(frozen=True)
class AttentionCase:
    """A packed batch of queries, keys and values."""

    name: str
    seq_lens: tuple[int, ...]
    num_heads: int = 12
    num_kv_heads: int = 12
    head_size: int = 32


ATTENTION_CASES = (
    AttentionCase("one_token", (1,)),
    AttentionCase("one_63", (63,)),
    AttentionCase("equal_12", (12,) * 16),
    AttentionCase("odd_with_empty", (5, 1, 0, 7, 130, 12, 12, 60, 9, 1), 4, 4, 60),
    AttentionCase("ascending", (1, 3, 8, 9, 17, 17, 31, 64, 65, 100), 3, 3, 8),
    AttentionCase("grouped_heads", (2, 40, 41, 90), 6, 2, 16),
    AttentionCase("one_head_for_all", (33, 7), 8, 1, 64),
    AttentionCase("long", (300, 515), 2, 2, 64),
)

ATTENTION_BENCH_CASES = (
    AttentionCase("query", (8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 15, 16, 17, 18, 19, 20)),
    AttentionCase("one_query", (12,)),
    AttentionCase("mixed", tuple(range(8, 200, 6))),
    AttentionCase("long", (200, 212, 230, 236, 244, 250, 262, 280)),
    AttentionCase("equal_250", (250,) * 32),
    AttentionCase("base_query", (8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 15, 16, 17, 18, 19, 20), head_size=64),
    AttentionCase("base_mixed", tuple(range(8, 200, 6)), head_size=64),
    AttentionCase("base_long", (200, 212, 230, 236, 244, 250, 262, 280), head_size=64),
    AttentionCase("base_512", (512,) * 4, head_size=64),
)


@dataclass(frozen=True)
class AttentionInputs:
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    relative_bias: Tensor


def make_attention_inputs(
    case: AttentionCase,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    is_fused: bool = True,
) -> AttentionInputs:
    """The same numbers at every call; q, k and v are slices of one tensor where `is_fused` and the heads allow it."""
    generator = torch.Generator().manual_seed(len(case.seq_lens) * 1000 + case.head_size)
    num_tokens, longest = sum(case.seq_lens), max(case.seq_lens)
    num_all = case.num_heads + 2 * case.num_kv_heads
    qkv = torch.randn(num_tokens, num_all, case.head_size, generator=generator).to(dtype).to(device)
    q, k, v = qkv.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    if not is_fused:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    bias = torch.randn(case.num_heads, longest, longest, generator=generator).to(dtype).to(device)
    return AttentionInputs(q, k, v, make_cu_seqlens(case.seq_lens, device), bias)
