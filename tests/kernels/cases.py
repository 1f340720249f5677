"""Shapes and inputs of kernel tests. Benchmarks use the inputs too."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class PoolingCase:
    """A packed batch of hidden states. `is_quick` cases also run through triton's interpreter, row by row."""

    name: str
    seq_lens: tuple[int, ...]
    hidden_size: int
    is_quick: bool = False


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
        # Some are longer than their sequence.
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
    """The same numbers at every call; q, k and v are chunks of one tensor if `is_fused`."""
    generator = torch.Generator().manual_seed(len(case.seq_lens) * 1000 + case.head_size)
    num_tokens, longest = sum(case.seq_lens), max(case.seq_lens)
    num_all = case.num_heads + 2 * case.num_kv_heads
    qkv = torch.randn(num_tokens, num_all, case.head_size, generator=generator).to(dtype).to(device)
    q, k, v = qkv.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    if not is_fused:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    bias = torch.randn(case.num_heads, 2 * longest + 1, generator=generator).to(dtype).to(device)
    return AttentionInputs(q, k, v, make_cu_seqlens(case.seq_lens, device), bias)


@dataclass(frozen=True)
class ConvCase:
    """A packed batch for the causal convolution. `is_quick` cases also run through triton's interpreter."""

    name: str
    seq_lens: tuple[int, ...]
    channels: int
    width: int = 4
    is_quick: bool = False


@dataclass(frozen=True)
class ScanCase:
    """A packed batch for the selective scan. `is_quick` cases also run through triton's interpreter."""

    name: str
    seq_lens: tuple[int, ...]
    channels: int
    state_size: int = 16
    is_quick: bool = False


@dataclass(frozen=True)
class SsdCase:
    """A packed batch for state space duality. `is_quick` cases also run through triton's interpreter."""

    name: str
    seq_lens: tuple[int, ...]
    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    is_quick: bool = False


@dataclass(frozen=True)
class ConvInputs:
    x: Tensor
    weight: Tensor
    bias: Tensor
    cu_seqlens: Tensor
    initial_states: Tensor


def make_conv_inputs(
    case: ConvCase, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> ConvInputs:
    """The same numbers at every call; x is a part of a wider tensor, as in a model."""
    generator = torch.Generator().manual_seed(len(case.seq_lens) * 1000 + case.channels)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    return ConvInputs(
        x=normal(sum(case.seq_lens), case.channels + 3)[:, : case.channels],
        weight=normal(case.channels, case.width),
        bias=normal(case.channels),
        cu_seqlens=make_cu_seqlens(case.seq_lens, device),
        initial_states=normal(len(case.seq_lens), case.channels, case.width - 1),
    )


@dataclass(frozen=True)
class SsmInputs:
    """Inputs of selective_scan and ssd."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    cu_seqlens: Tensor
    initial_states: Tensor


def make_scan_inputs(
    case: ScanCase, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> SsmInputs:
    """The same numbers at every call; b and c are chunks of one tensor."""
    generator = torch.Generator().manual_seed(len(case.seq_lens) * 1000 + case.channels)
    num_rows = sum(case.seq_lens)
    b, c = torch.randn(num_rows, 2 * case.state_size, generator=generator).to(dtype).to(device).chunk(2, dim=1)
    return SsmInputs(
        x=torch.randn(num_rows, case.channels, generator=generator).to(dtype).to(device),
        dt=_make_steps((num_rows, case.channels), generator).to(device),
        a=-16 * torch.rand(case.channels, case.state_size, generator=generator).to(device),
        b=b,
        c=c,
        d=torch.randn(case.channels, generator=generator).to(device),
        cu_seqlens=make_cu_seqlens(case.seq_lens, device),
        initial_states=torch.randn(len(case.seq_lens), case.channels, case.state_size, generator=generator).to(device),
    )


def make_ssd_inputs(case: SsdCase, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> SsmInputs:
    """The same numbers at every call; x, b and c are parts of one tensor, as in a model."""
    generator = torch.Generator().manual_seed(len(case.seq_lens) * 1000 + case.num_heads)
    num_rows, inner, groups = sum(case.seq_lens), case.num_heads * case.head_size, case.num_groups * case.state_size
    xbc = torch.randn(num_rows, inner + 2 * groups, generator=generator).to(dtype).to(device)
    x, b, c = xbc.split([inner, groups, groups], dim=1)
    states_shape = (len(case.seq_lens), case.num_heads, case.head_size, case.state_size)
    return SsmInputs(
        x=x.unflatten(1, (case.num_heads, case.head_size)),
        dt=_make_steps((num_rows, case.num_heads), generator).to(device),
        a=-16 * torch.rand(case.num_heads, generator=generator).to(device),
        b=b.unflatten(1, (case.num_groups, case.state_size)),
        c=c.unflatten(1, (case.num_groups, case.state_size)),
        d=torch.randn(case.num_heads, generator=generator).to(device),
        cu_seqlens=make_cu_seqlens(case.seq_lens, device),
        initial_states=torch.randn(states_shape, generator=generator).to(device),
    )


def _make_steps(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Step sizes from 1e-4 to 1 as in trained models, and some steps of 0, 10 and 50."""
    steps = 10 ** (-4 * torch.rand(shape, generator=generator))
    kind = torch.randint(0, 40, shape, generator=generator)
    for which, value in enumerate((0.0, 10.0, 50.0)):
        steps[kind == which] = value
    return steps


@dataclass(frozen=True)
class PagedCase:
    """Chunks of sequences, (past, rows) each, over a cache in blocks. `is_quick` cases also run interpreted."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 4
    is_scattered: bool = True
    is_quick: bool = False


@dataclass(frozen=True)
class PagedInputs:
    """Slots of the caches without a token hold NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    cu_seqlens: Tensor
    seq_lens: tuple[int, ...]
    context_lens: tuple[int, ...]


def make_block_table(num_blocks: int, is_scattered: bool, first: int = 1) -> Tensor:
    """[num_blocks], int32: consecutive blocks from `first`, or every other block in random order."""
    if not is_scattered:
        return torch.arange(first, first + num_blocks, dtype=torch.int32)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(num_blocks))
    return (first + 2 * order).int()


def make_paged_inputs(
    case: PagedCase, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PagedInputs:
    """The same numbers at every call."""
    generator = torch.Generator().manual_seed(len(case.chunks) * 1000 + case.head_size)
    context_lens, seq_lens = (tuple(numbers) for numbers in zip(*case.chunks, strict=True))
    counts = [-(-(past + rows) // case.block_size) for past, rows in case.chunks]
    tables = torch.full((len(counts), max(*counts, 1) + 1), 1 << 30, dtype=torch.int32)
    shape = (2 * sum(counts) + 2, case.block_size, case.num_kv_heads, case.head_size)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    first = 1
    for n, (count, (past, rows)) in enumerate(zip(counts, case.chunks, strict=True)):
        tables[n, :count] = make_block_table(count, case.is_scattered, first)
        first += 2 * count
        slots = (tables[n, :count, None] * case.block_size + torch.arange(case.block_size)).flatten()[: past + rows]
        for cache in (k_cache, v_cache):
            tokens = torch.randn(past + rows, *shape[2:], generator=generator).to(dtype)
            cache.view(-1, *shape[2:])[slots.long()] = tokens
    q = torch.randn(sum(seq_lens), case.num_heads, case.head_size, generator=generator).to(dtype)
    return PagedInputs(
        q.to(device),
        k_cache.to(device),
        v_cache.to(device),
        tables,
        make_cu_seqlens(seq_lens, device),
        seq_lens,
        context_lens,
    )


@dataclass(frozen=True)
class RotaryCase:
    """Tokens with heads of q and k that are rotated."""

    name: str
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_pairs: int
    block_size: int = 4


@dataclass(frozen=True)
class RotaryInputs:
    """Q, k and v are part of a wider tensor. Caches hold NaN. Every third token is not stored."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    weight: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor


def make_rotary_inputs(
    case: RotaryCase, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> RotaryInputs:
    """The same numbers at every call."""
    generator = torch.Generator().manual_seed(case.num_tokens * 1000 + case.head_size)
    num_rotated = case.num_heads + case.num_kv_heads
    num_all = num_rotated + case.num_kv_heads
    wide = torch.randn(case.num_tokens, num_all * case.head_size + 16, generator=generator).to(dtype).to(device)
    angles = 100 * torch.rand(case.num_tokens, case.num_pairs, generator=generator)
    num_blocks = -(-2 * case.num_tokens // case.block_size)
    slots = torch.randperm(num_blocks * case.block_size, generator=generator)[: case.num_tokens]
    slots[2::3] = -1
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    return RotaryInputs(
        wide[:, : num_all * case.head_size].unflatten(1, (num_all, case.head_size)),
        angles.cos().to(device),
        angles.sin().to(device),
        torch.randn(num_rotated, case.head_size, generator=generator).to(device),
        k_cache,
        v_cache,
        slots.to(device),
    )
